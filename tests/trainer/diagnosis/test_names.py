"""Every name that a diagnosis can give has its heading in the documentation, and its remedy."""

import re
from typing import get_args

import pytest

from common.settings.config import Config
from tests.support.paths import ROOT
from trainer.diagnosis import names
from trainer.diagnosis.unreachable import Problem, problem_of
from trainer.observe.alarms import limits
from trainer.observe.hints import _DROPS, _SLOW

PAGES = ROOT / "docs" / "how-to"
NAMES = sorted(
    value
    for name, value in vars(names).items()
    if name.isupper() and not name.startswith("_") and isinstance(value, str)
)
TASKS = (
    "data-server",
    "reward-server",
    "replay-buffer",
    "critic-server",
    "environment-server-1",
    "rollout-server-1",
    "router",
    "engine",
)


def headings(page: str) -> set[str]:
    text = (PAGES / page).read_text(encoding="utf-8")
    return set(re.findall(r"^### (.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_heading_and_has_a_remedy(name: str) -> None:
    assert name in headings("operations.md")
    assert names.REMEDIES[name]


def test_alarms_and_hints_are_headings() -> None:
    said = " ".join(headings("troubleshooting.md"))
    for name in (*limits(old=True), *_SLOW, *(f"dropped_{reason}" for reason in _DROPS)):
        assert f"`{name}`" in said


@pytest.mark.parametrize(
    "problem", [each for each in get_args(Problem) if each not in ("", "error", "not_ready")]
)
@pytest.mark.parametrize("service", TASKS)
def test_every_problem_of_every_service_has_a_name(service: str, problem: Problem) -> None:
    assert names.of_service(service, problem) in NAMES
    assert names.of_service(service, problem) != names.ENDED


@pytest.mark.parametrize(
    "setting",
    sorted(
        set(
            re.findall(
                r"\b(?:trainer|reward|sampling|rollout|model|data)\.[a-z_]+",
                " ".join(names.REMEDIES.values()),
            )
        )
    ),
)
def test_the_settings_of_the_remedies_exist(setting: str) -> None:
    section, _, field = setting.partition(".")
    assert hasattr(getattr(Config(), section), field)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Cannot connect to host 127.0.0.1:8002 ssl:default [Connect call failed ('127.0.0.1', 8002)]", "refused"),
        ("Cannot connect to host data-server-0.x:8000 ssl:default [Name or service not known]", "unknown_name"),
        ("Cannot connect to host data-server-0.x:8000 ssl:default [Temporary failure in name resolution]", "unknown_name"),
        ("HTTP 401: the token is wrong", "unauthorized"),
        ("HTTP 507: groups cannot be written: [Errno 28] No space left on device", "disk_full"),
        ("TimeoutError", "silent"),
        ("Server disconnected", "silent"),
        ("HTTP 503: the reward workers are starting", "not_ready"),
        ("something else", "error"),
    ],
)  # fmt: skip
def test_the_problem_is_read_from_the_error_of_a_call(text: str, problem: Problem) -> None:
    assert problem_of(text) == problem
