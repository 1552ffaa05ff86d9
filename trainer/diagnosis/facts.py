"""What is known of a run when it is diagnosed. Pure data, which a test can record and read."""

import re
from collections.abc import Iterable
from statistics import median
from typing import Literal

from pydantic import BaseModel, Field

from common import Json
from common.process.logs import SEPARATOR
from common.process.watchdog import Awaited, RankWhere
from trainer.diagnosis.health import ServiceHealth
from trainer.observe.catalogue import Fault

State = Literal["empty", "starting", "running", "finished", "ended", "killed"]
"""`ended`: by itself or by a signal that it handled; `killed`: it had no time to say why."""
Level = Literal["stopped", "stalled", "harm", "slow"]
LEVELS: tuple[Level, ...] = ("stopped", "stalled", "harm", "slow")
"""The run has ended; it does not advance; what it learns is wrong or in danger; it is slow."""
_UNKNOWN_STEP_S = 60.0
"""Stands for the usual seconds of a step until one has ended."""


class LogLine(BaseModel):
    """One message of a log file."""

    source: str
    """Name of the file without its suffix: `ppo-trainer-rank0`, `reward-server`."""
    time: float | None
    """Seconds since 1970; None for output that is no line of a log."""
    level: str = ""
    logger: str = ""
    text: str
    code: str = ""
    """That of the error or event that the line reports; empty without one."""
    fields: dict[str, str] = {}
    """What the line says of it: `field`, `value`, `remedy`, `service`, `problem` …"""

    @property
    def message(self) -> str:
        """The first line, without the parts that `fields` has."""
        text = re.sub(r"^(rank \d+: )?error: ", "", self.text)
        return text.partition("\n")[0].partition(SEPARATOR)[0]

    @property
    def seconds(self) -> float:
        """The seconds that a call had waited, by the line; 0 if it names none."""
        text = self.fields.get("seconds", "")
        return float(text) if text.isdecimal() else 0.0

    @property
    def said(self) -> str:
        """The line as evidence."""
        return f"{self.source}: {self.text.partition(chr(10))[0]}"[:400]

    @property
    def is_of_trainer(self) -> bool:
        return self.source.startswith(("ppo-trainer", "sft"))


class RankFacts(RankWhere):
    """Where a rank of the trainer is."""

    answered: bool
    collective: str = ""
    """The collective call in its main thread, such as `all_reduce`."""


class ServiceFacts(ServiceHealth):
    """A service or rollout node, and what it waits for."""

    awaited: list[Awaited] = Field([])
    release: str = ""
    """Its version of this system."""
    stacks: str = ""


class Facts(BaseModel):
    """All that is known of a run."""

    directory: str
    now: float
    state: State
    started: float | None = None
    """Start of the newest attempt."""
    config: Json = {}
    """Settings by name, such as `trainer.batch_size`."""
    steps: list[Json] = []
    """The newest lines of `metrics.jsonl`."""
    unread: str = ""
    """Why there are none, although the file is not empty."""
    groups: list[Json] = []
    """The prompts of the newest lines of `groups.jsonl`."""
    lines: list[LogLine] = []
    """Lines of the logs of the newest attempt that may matter, the oldest first."""
    end: LogLine | None = None
    """The last word of rank 0: why it ended, and when it wrote that."""
    restarts: bool | None = None
    """Whether the local runner lives, which starts tasks again; None without one, as on a
    cluster."""
    holder: Json = {}
    """Who has, or had when it died, the run directory."""
    asked: bool = False
    """Whether the living processes were asked."""
    not_asked: Json = {}
    """The error of this process that kept it from asking them: code, message, field, value and
    remedy."""
    trainer_problem: str = ""
    """Why rank 0 does not answer; empty if it does, or was not asked."""
    ranks: list[RankFacts] = []
    services: list[ServiceFacts] = []
    versions: dict[str, str] = {}

    @property
    def exited(self) -> float | None:
        """When rank 0 ended, if it said so."""
        return self.end.time if self.end else None

    @property
    def last(self) -> float | None:
        """When the newest step ended; None before the first."""
        return self.steps[-1].get("time") if self.steps else None

    @property
    def step(self) -> int:
        """The newest step; 0 before the first."""
        return int(self.steps[-1].get("step", 0)) if self.steps else 0

    @property
    def total_steps(self) -> int | None:
        total = self.steps[-1].get("total_steps") if self.steps else None
        return int(total) if total else None

    @property
    def lives(self) -> bool:
        return self.state in ("starting", "running")

    @property
    def silent_s(self) -> float:
        """Seconds since the newest step, or since the start if that was later."""
        begin = max(self.last or 0.0, self.started or 0.0)
        return self.now - begin if begin else 0.0

    @property
    def usual_step_s(self) -> float:
        """The seconds that a step usually takes."""
        known = [sum(line.get("seconds", {}).values()) for line in self.steps]
        return median(known) if known else _UNKNOWN_STEP_S


class Finding(BaseModel):
    """One thing that is wrong."""

    name: str
    """A heading of docs/how-to/operations.md."""
    what: str
    since: float | None = None
    evidence: list[str] = []
    remedy: str
    level: Level


def finding(
    fault: Fault,
    what: str,
    since: float | None,
    *,
    level: Level,
    evidence: Iterable[str] = (),
    remedy: str = "",
) -> Finding:
    """Returns the finding of a fault, with the remedy of its row unless a better one is known."""
    return Finding(
        name=fault,
        what=what,
        since=since,
        evidence=list(evidence),
        remedy=remedy or fault.remedy,
        level=level,
    )
