"""Any YAML is a valid configuration or raises a ConfigError that names the problem, quickly and
without a traceback."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from common.settings.config import Config, load
from jobgroup import spec
from tests.support.processes.fuzzed_service import SECONDS

pytestmark = pytest.mark.integration

relaxed = settings(
    max_examples=100 * max(1, SECONDS),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ODD = [
    "1e999",
    "~",
    "nan",
    "-1",
    "0",
    "1",
    "true",
    "auto",
    "none",
    "math",
    "9" * 400,
    "\ud800",
    "\x00",
    "~nobody/x",
]
scalars: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=10)
    | st.dates()
    | st.binary(max_size=5)
    | st.sampled_from(ODD)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3),
    max_leaves=6,
)
sections = [
    name for name, field in Config.model_fields.items() if hasattr(field.annotation, "model_fields")
]
names = [
    (section, name)
    for section in sections
    for name in Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
]


def named(error: ConfigError) -> None:
    assert error.field
    assert len(str(error)) < 12_000
    str(error).encode()


def dump(path: Path, *documents: Any) -> Path:
    path.write_text(yaml.dump_all(documents, allow_unicode=False), encoding="utf-8")
    return path


@relaxed
@given(st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=4))
def test_any_value_of_any_setting_loads_or_is_named(
    tmp_path: Path, chosen: dict[tuple[str, str], Any]
) -> None:
    content: dict[str, dict[str, Any]] = {}
    for (section, name), value in chosen.items():
        content.setdefault(section, {})[name] = value
    try:
        load(["--config", str(dump(tmp_path / "c.yaml", content))], {})
    except ConfigError as error:
        named(error)


@relaxed
@given(values)
def test_any_yaml_loads_or_is_named(tmp_path: Path, content: Any) -> None:
    path = dump(tmp_path / "c.yaml", content)
    for read in (lambda: load(["--config", str(path)], {}), lambda: spec.load(path)):
        try:
            read()
        except ConfigError as error:
            named(error)


@relaxed
@given(
    st.binary(max_size=60) | st.text("{}[]-:&*!|>'\"?%@`, \n\t0a#<~", max_size=60).map(str.encode)
)
def test_any_bytes_load_or_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    for read in (lambda: load(["--config", str(path)], {}), lambda: spec.load(path)):
        try:
            read()
        except ConfigError as error:
            named(error)


BAD_YAML = [
    *(
        b"2023-99-99",
        b"a: 2023-02-30",
        b"[" * 2000,
        b"1: {}",
        b"? [1]\n: 2",
        b"a: &a [*a]",
        b"\xff\xfe",
        b"{? {} : 1}",
    ),
    *(b"!!python/object:x {}", b"'': 1", b"'': {a: 1}"),
]


@pytest.mark.parametrize("content", BAD_YAML, ids=lambda content: repr(content[:20]))
def test_yaml_that_cannot_be_built_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(["--config", str(path)], {})
    named(caught.value)
    assert "command line" not in caught.value.message
    with pytest.raises(ConfigError) as caught:
        spec.load(path)
    named(caught.value)


@relaxed
@given(
    st.dictionaries(
        st.sampled_from([f"RLHF_{a}__{b}".upper() for a, b in names]),
        st.text(max_size=10),
        max_size=3,
    )
)
def test_any_environment_loads_or_is_named(env: dict[str, str]) -> None:
    try:
        load([], env)
    except ConfigError as error:
        named(error)


HEADER = {"name": "group", "execution": "parallel"}
TASK = {"name": "task", "run": "true"}
task_fields = st.sampled_from([*spec._TaskDocument.model_fields])
resources = st.fixed_dictionaries({}, optional={"accelerators": values, "job_recovery": values})


@relaxed
@given(
    st.dictionaries(
        st.sampled_from(["primary_tasks", "termination_delay", "inter_connection", "name"]),
        values,
        max_size=2,
    ),
    st.dictionaries(task_fields, values | resources, max_size=3),
)
def test_any_job_group_loads_or_is_named(
    tmp_path: Path, header: dict[str, Any], task: dict[str, Any]
) -> None:
    path = dump(tmp_path / "g.yaml", HEADER | header, TASK | task)
    try:
        group = spec.load(path)
    except ConfigError as error:
        named(error)
    else:
        assert group.tasks[0].gpus >= 0


@relaxed
@given(
    st.text(max_size=20)
    | st.integers()
    | st.from_regex(r"[0-9]{1,400}(\.[0-9]+)?[smhdw]?", fullmatch=True)
)
def test_any_duration_is_seconds_or_is_named(text: str | int) -> None:
    try:
        assert spec.seconds(text, "termination_delay") >= 0
    except ConfigError as error:
        named(error)
