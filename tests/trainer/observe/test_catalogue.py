"""Every row of the catalogue is a heading of the documentation, with its limits, settings and
remedy; and every heading about a hint or alarm is a row."""

import re
from typing import get_args

import pytest
from pydantic import BaseModel

from common.clients.base import Unreachable
from common.clients.unreachable import Problem, problem_of
from common.errors import NotReady, ServiceError, ServiceLost, Unauthorized
from common.process.storage import StorageFailed
from common.settings.config import Config
from tests.support.paths import ROOT
from trainer.observe import catalogue
from trainer.observe.catalogue import ALARMS, HINTS

SECTIONS = [name for name, each in Config() if isinstance(each, BaseModel)]
SETTING = re.compile(rf"\b({'|'.join(SECTIONS)})\.([a-z_]+)")
PAGES = ROOT / "docs" / "how-to"
TASKS = (
    "data-server",
    "reward-server",
    "replay-buffer",
    "environment-server-1",
    "rollout-server-1",
    "router",
    "engine",
)


def headings(page: str) -> set[str]:
    text = (PAGES / page).read_text(encoding="utf-8")
    return set(re.findall(r"^### (.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("fault", catalogue.FAULTS)
def test_a_fault_is_a_heading_and_has_a_remedy(fault: catalogue.Fault) -> None:
    assert fault in headings("operations.md")
    assert fault.remedy


def test_a_code_belongs_to_one_fault() -> None:
    codes = [code for fault in catalogue.FAULTS for code in fault.codes]
    assert len(codes) == len(set(codes))


EVENTS = (
    "waiting",
    "group_dropped",
    "rank_lost",
    "rank_place",
    "reward_function_failed",
    "started",
)
"""Codes of log lines that `trainer.diagnosis.messages` and `logs` read."""


def test_every_code_that_is_read_is_one_that_is_written() -> None:
    folders = ("common", "learning", "services", "trainer")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    written = "".join(path.read_text() for path in files if path.parent.name != "diagnosis")
    for code in (*catalogue.BY_CODE, *EVENTS):
        assert f'"{code}"' in written or f"code: {code}" in written, code


def test_every_hint_or_alarm_of_the_page_is_a_row() -> None:
    page = (PAGES / "operations.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#### (.*)$", page, re.MULTILINE)
    explained = {name for heading in headings for name in re.findall(r"`(\w+)`", heading)}
    assert explained == {name.partition(",")[0] for name in (*HINTS, *ALARMS)}


@pytest.mark.parametrize("name", [*HINTS, *ALARMS])
def test_the_page_explains_a_hint_or_alarm_with_its_thresholds_and_settings(name: str) -> None:
    row = (HINTS | ALARMS)[name]
    page = (PAGES / "operations.md").read_text(encoding="utf-8")
    sections = re.split(r"\n#{3,4} ", page)[1:]
    heading = f"`{name.partition(',')[0]}`"
    about = [text for text in sections if heading in text.partition("\n")[0]]
    assert about
    main = f"{row.limit:.0%}" if row.unit.startswith("of ") else f"{row.limit:g}"
    further = [f"; {bound}: {value:g}" for bound, value in row.further_limits.items()]
    limits = f"{main} {row.unit}{''.join(further)}"
    assert all(limits in " ".join(text.split()) for text in about)
    words = " ".join([row.seen, row.remedy, *row.remedies_unless_set.values()])
    for section, key in SETTING.findall(words):
        assert key in type(getattr(Config(), section)).model_fields
    # A text knows the settings that it names (`Said`), but for those that are measured with it.
    for section, key in SETTING.findall(words.replace(catalogue.OWN_DEFAULTS, "")):
        assert f"{{{section}.{key}!}}" in words
    named = {f"{section}.{key}" for section, key in SETTING.findall(row.remedy)}
    explained = {f"{section}.{key}" for text in about for section, key in SETTING.findall(text)}
    assert not named or named & explained


@pytest.mark.parametrize(
    "problem", [each for each in get_args(Problem) if each not in ("", "error", "not_ready")]
)
@pytest.mark.parametrize("service", TASKS)
def test_every_problem_of_every_service_has_a_name(service: str, problem: Problem) -> None:
    assert catalogue.fault_of_service(service, problem) in catalogue.FAULTS
    assert catalogue.fault_of_service(service, problem) != catalogue.ENDED
    # What is called by the name of the task is the router.
    of_router = catalogue.fault_of_service("router", problem)
    assert catalogue.fault_of_service("rollout-server", problem) == of_router


@pytest.mark.parametrize("service", TASKS)
def test_who_is_silent_hangs_and_who_refuses_has_died(service: str) -> None:
    task = service.removesuffix("-1")
    words = {
        "rollout-server": ("An agent hangs", "A rollout node dies"),
        "router": ("An engine or the router hangs", "The router dies"),
        "engine": ("An engine or the router hangs", "An engine dies"),
        "environment-server": ("Environment-server dies or hangs",) * 2,
    }
    services = "Data-server, reward-server or replay-buffer hangs"
    hangs, dies = words.get(task, (services, f"{task.capitalize()} dies"))
    assert catalogue.fault_of_service(service, "silent").startswith(hangs)
    assert catalogue.fault_of_service(service, "refused").startswith(dies)

    is_engine = task in ("router", "engine")
    lost = "The engine of a run in one process dies" if is_engine else "A service cannot start"
    assert catalogue.fault_of_service(service, "lost").startswith(lost)
    is_node = task == "rollout-server"
    disk = catalogue.DISK_OF_NODE if is_node else catalogue.DISK_OF_SERVICE
    assert catalogue.fault_of_service(service, "disk_full") is disk
    assert catalogue.fault_of_service(service, "unauthorized") is catalogue.WRONG_TOKEN


@pytest.mark.parametrize(
    "setting",
    sorted(
        set(
            re.findall(
                r"\b(?:trainer|reward|sampling|rollout|model|data)\.[a-z_]+",
                " ".join(fault.remedy for fault in catalogue.FAULTS),
            )
        )
    ),
)
def test_the_settings_of_the_remedies_exist(setting: str) -> None:
    section, _, field = setting.partition(".")
    assert hasattr(getattr(Config(), section), field)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (OSError("Cannot connect to host 127.0.0.1:8002 ssl:default [Connect call failed ('127.0.0.1', 8002)]"), "refused"),
        (OSError("Cannot connect to host data-server-0.x:8000 ssl:default [Name or service not known]"), "unknown_name"),
        (OSError("Cannot connect to host data-server-0.x:8000 ssl:default [Temporary failure in name resolution]"), "unknown_name"),
        (TimeoutError(), "silent"),
        (OSError("Server disconnected"), "silent"),
        (Unauthorized("any words"), "unauthorized"),
        (StorageFailed("any words", code="disk_full", status=507), "disk_full"),
        (NotReady("any words"), "not_ready"),
        (ServiceLost("any words"), "lost"),
        (ServiceError("any words", code="certificate"), "certificate"),
        (Unreachable("any words", about={"problem": "refused"}), "refused"),
        (ServiceError("No space left in a sentence of ours"), "error"),
    ],
)  # fmt: skip
def test_the_problem_of_a_call_is_in_its_error(error: Exception, problem: Problem) -> None:
    assert problem_of(error) == problem
