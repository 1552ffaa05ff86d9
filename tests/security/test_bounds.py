"""No body, however many items it has, blocks a service or fills its memory."""

import asyncio
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, TypeAdapter, ValidationError

from common.errors import TooLarge, shorten
from common.wire import codec, schemas
from common.wire.schemas import AtMost, Wire
from services.engine import control, distributed, protocol
from services.http.app import create_app
from tests.support.environments.own_environments import OPEN_SESSION
from tests.support.errors import raises
from tests.support.services.apps import APPS, make, tiny
from trainer.tinker import requests

_BODIES = (control, distributed, protocol, requests)


def kinds() -> list[type[Any]]:
    """Returns every type on the wire: the schemas, the services' JSON bodies, and the bodies in
    SGLang's format."""
    found: list[type[Any]] = [Wire]
    for kind in found:
        found += [
            each for each in kind.__subclasses__() if not each.__module__.startswith("tests.")
        ]
    structs = [
        kind
        for kind in vars(schemas).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    ]
    bodies = {
        kind
        for module in _BODIES
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    }
    return [
        *dict.fromkeys(found),
        *structs,
        *sorted(bodies - {BaseModel}, key=lambda kind: kind.__name__),
    ]


def unbounded(hint: Any, bounded: bool = False) -> Iterator[Any]:
    """Yields the unbounded lists and mappings in an annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner, *marks = arguments
        limits = [
            mark
            for mark in marks
            if isinstance(mark, AtMost) or getattr(mark, "max_length", None) is not None
        ]
        yield from unbounded(inner, bool(limits))
        return
    if (origin or hint) in (list, dict, set, frozenset) and not bounded:
        yield hint
    if origin in (list, dict, tuple, set, frozenset, typing.Union, types.UnionType):
        for argument in arguments:
            yield from unbounded(argument)


def test_every_list_and_mapping_on_the_wire_is_bounded(base_model: Path, tmp_path: Path) -> None:
    assert len(kinds()) > 50
    loose = {
        f"{kind.__name__}.{name}": found
        for kind in kinds()
        for name, hint in typing.get_type_hints(kind, include_extras=True).items()
        if not name.startswith(("model_", "_")) and get_origin(hint) is not typing.ClassVar
        for found in unbounded(hint)
    }
    assert loose == {}, "give it an AtMost (pydantic) or a Meta(max_length=…) (msgspec)"


@pytest.mark.parametrize(
    "hint", [list[int], dict[str, int], list[int] | None, Annotated[list[list[int]], AtMost(3)]]
)
def test_the_walk_finds_a_new_unbounded_field(hint: Any) -> None:
    assert list(unbounded(hint))


def test_validation_stops_at_the_first_error_and_before_the_first_item_of_too_many() -> None:
    seen = 0

    def count(value: int) -> int:
        nonlocal seen
        seen += 1
        if value < 0:
            raise ValueError("negative")
        return value

    Number = Annotated[int, AfterValidator(count)]
    cases: list[tuple[Any, Any, Any]] = [
        (Annotated[list[Number], AtMost(1000)], [-1] * 1000, [1] * 1001),
        (
            Annotated[dict[str, Number], AtMost(1000)],
            {str(i): -1 for i in range(1000)},
            {str(i): 1 for i in range(1001)},
        ),
    ]
    for kind, wrong, many in cases:
        seen = 0
        with pytest.raises(ValidationError) as caught:
            TypeAdapter(kind).validate_python(wrong)
        assert (seen, caught.value.error_count()) == (1, 1)
        with pytest.raises(ValidationError, match="at most 1000 items") as caught:
            TypeAdapter(kind).validate_python(many)
        assert (seen, caught.value.errors()[0]["type"]) == (1, "too_long")
    with pytest.raises(ValidationError) as caught:
        schemas.GroupIds.model_validate({f"x{i}": 1 for i in range(100_000)} | {"ids": ["a"]})
    assert [error["loc"] for error in caught.value.errors()] == [("x0",)]


MANY: dict[str, bytes] = {
    "empty objects": b"[" + b",".join([b"{}"] * 300_000) + b"]",
    "numbers": b"[" + b",".join([b"1"] * 300_000) + b"]",
    "texts": b"[" + b",".join([b'"x"'] * 300_000) + b"]",
    "lists": b"[" + b",".join([b"[]"] * 300_000) + b"]",
    "names": b"{" + b",".join(b'"k%d":{}' % i for i in range(100_000)) + b"}",
    "millions": b"[" + b",".join([b"{}"] * 3_000_000) + b"]",
    "chains": b"[" + b",".join([b'{"a":' * 900 + b"1" + b"}" * 900] * 1200) + b"]",
}
CALLS = [
    ("reward", "/batch_reward", b'{"items":%s}'),
    ("reward", "/reward", b'{"response":"5","ground_truth":"5","columns":%s}'),
    ("reward", "/reward", b"%s"),
    ("replay", "/add", b'{"experiences":%s}'),
    ("replay", "/groups", b'{"groups":%s}'),
    ("replay", "/groups/ack", b'{"ids":%s}'),
    ("replay", "/groups/priorities", b'{"ids":["a"],"priorities":%s}'),
    ("replay", "/groups/take", b'{"count":%s}'),
    ("data", "/pass_rates", b'{"prompt_ids":%s,"pass_rates":[0.5],"request_id":"a"}'),
    ("data", "/seek", b"%s"),
    (
        "environment",
        "/episodes",
        b'{"request_id":"a","task":{"env":"e","columns":%s},"sampling":{"max_new_tokens":5}}',
    ),
    (
        "environment",
        "/episodes",
        b'{"request_id":"a","task":{"env":"e","messages":%s},"sampling":{"max_new_tokens":5}}',
    ),
    ("environment", "/episodes", b"%s"),
    ("environment", f"/sessions/{OPEN_SESSION}/v1/chat/completions", b'{"messages":%s}'),
    (
        "environment",
        f"/sessions/{OPEN_SESSION}/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"x"}],"tools":%s}',
    ),
    ("environment", f"/sessions/{OPEN_SESSION}/v1/responses", b'{"input":%s}'),
    ("environment", f"/sessions/{OPEN_SESSION}/v1/messages", b'{"messages":%s}'),
    (
        "environment",
        f"/sessions/{OPEN_SESSION}/v1/messages",
        b'{"messages":[{"role":"user","content":%s}]}',
    ),
    ("engine", "/generate", b'{"input_ids":%s}'),
    ("engine", "/generate", b'{"input_ids":[1],"sampling_params":%s}'),
    ("engine", "/update_weights_from_distributed", b'{"names":[],"dtypes":[],"shapes":%s}'),
    ("tinker", "/api/v1/create_session", b'{"tags":%s}'),
    ("tinker", "/api/v1/create_session", b'{"user_metadata":%s}'),
    ("tinker", "/api/v1/retrieve_futures", b'{"target":{},"retrieved_request_ids":%s}'),
    ("tinker", "/api/v1/asample", b'{"prompt":{"chunks":%s}}'),
    ("tinker", "/api/v1/asample", b'{"prompt":{"chunks":[{"tokens":%s}]}}'),
    ("trainer", "/workers/a", b"%s"),
    ("trainer", "/weights/1/verify", b'{"worker":"a","ranks":[%s]}'),
]


@pytest.mark.integration
@pytest.mark.parametrize("name", APPS)
async def test_many_items_are_refused_with_a_short_error_while_others_are_answered(
    name: str, base_model: Path, tmp_path: Path
) -> None:
    app = make(
        name,
        tiny(base_model, tmp_path, "--algorithm.name", "ppo", "--data.curriculum", "difficulty"),
    )
    headers = {"content-type": "application/json", "authorization": f"Bearer {OPEN_SESSION}"}
    life = (app if name != "agent" else create_app("x")).router.lifespan_context(app)
    async with (
        life,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://x", headers=headers
        ) as http,
    ):
        for index, (path, frame) in enumerate(
            (path, frame) for service, path, frame in CALLS if service == name
        ):
            # One path gets every kind of body under concurrent calls; the other paths share its
            # reading code.
            for kind in MANY if index == 0 else ("names", "millions"):
                work = asyncio.create_task(http.post(path, content=frame % MANY[kind]))
                between = 0
                while index == 0 and not work.done():
                    await http.get("/health")
                    await asyncio.sleep(0)  # lets the other task run
                    between += 1
                answer = await work
                where = f"{path} with {kind}"
                assert answer.status_code in (400, 404, 409, 413, 422), where
                assert len(answer.content) < 3000, where
                if kind in ("millions", "chains"):
                    assert answer.status_code == 413, where
                    assert index or between > 1 or name == "trainer", (
                        f"{where}: nobody was answered meanwhile"
                    )  # this service takes small bodies only


def test_an_error_formats_no_whole_body() -> None:
    assert len(shorten([{"a": ["x" * 1000] * 1000}] * 1_000_000)) <= 200
    assert len(shorten(b"x" * 10_000_000)) <= 200
    assert shorten({"a": [1, 2, None]}) == "{'a': [1, 2, None]}"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a,{["\\\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('a,:{["\\'), inner),
)


@given(json_values, st.integers(1, 40), st.booleans())
def test_items_are_counted_as_they_are_whatever_texts_hold(
    value: Any, chunk: int, ascii_: bool
) -> None:
    def items(value: Any) -> int:
        if not isinstance(value, list | dict):
            return 0
        inner = value.values() if isinstance(value, dict) else value
        return 2 + max(0, len(value) - 1) + sum(items(item) for item in inner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_CHUNK", chunk)
        assert codec._json_items(json.dumps(value, ensure_ascii=ascii_).encode()) == items(value)


def test_commas_in_long_texts_are_not_counted_as_items() -> None:
    text = '1, 2, [3], {4}, "5", \\' * 200_000
    assert codec.parse_json(json.dumps({"items": [text]}).encode()) == {"items": [text]}
    with raises(TooLarge, field="body"):
        codec.parse_json(b" " * (codec.MAX_JSON_BYTES + 1))
