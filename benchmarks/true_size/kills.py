"""Kills of a rehearsal: one process in each step, and what must be true in the end."""

import signal
import time
from collections.abc import Sequence

from rich.console import Console

from benchmarks.command import figures_table
from benchmarks.true_size.meter import role
from tests.chaos.group import Group, wait_gone
from tests.chaos.invariants import read_evidence, violations
from tests.chaos.targets import Process, find, send
from trainer.observe.run_dir import read_lines

_RANK = "trainer-1"
KILLED = ("agent-0", "replay-buffer", _RANK, "reward-server", "data-server", "router")
"""A killed rank ends the other one too, and both continue from the newest checkpoint."""
_PART_OF_STEP = 0.4
"""The kill comes when this part of a step has passed: the engines generate, and groups arrive."""
_NOT_HERE = ("weights:", "steps: there is no evaluation")
"""Invariants of a model that computes."""


class Kills:
    """Kills `names` of the processes of a running group, each in another step; call `look` twice a
    second.
    """

    def __init__(self, group: Group, names: Sequence[str]) -> None:
        self._group = group
        self._waiting = list(names)
        self._seen = 0.0
        """When the last step that was seen ended."""
        self._due = 0.0
        self._done: list[tuple[str, float, int]] = []
        """Name, time and the last step then."""

    def look(self) -> None:
        """Kills the next process if its moment has come."""
        times = self._step_times()
        if len(times) < 2 or not self._waiting:
            return
        if times[-1] > self._seen:
            self._seen = times[-1]
            took_s = times[-1] - times[-2]
            self._due = time.time() + _PART_OF_STEP * took_s
        if not self._due or time.time() < self._due:
            return
        victim = _victim(self._waiting[0], self._group.processes())
        if victim is not None and send(victim.pid, signal.SIGKILL):
            self._due = 0.0  # the next one in the next step
            name = self._waiting.pop(0)
            self._done.append((name, time.time(), self._group.step()))
            print(f"killed {name} after step {self._group.step()}", flush=True)

    def _step_times(self) -> list[float]:
        """Returns when each step of the run that is not undone ended, in seconds since 1970."""
        return [line["time"] for line in read_lines(self._group.run_dir / "metrics.jsonl")]

    def report(self) -> bool:
        """Prints what was killed and what was violated; returns whether all is well."""
        group = self._group
        left = wait_gone(group)
        evidence = read_evidence(group.run_dir, group.state_dir)
        found = [each for each in violations(evidence) if not each.startswith(_NOT_HERE)]
        found += [f"still there: {text}" for text in left]
        table = figures_table(
            f"{len(evidence.states)} groups stored in {evidence.steps} steps",
            ["killed", "after step", "s to the end of the next step"],
        )
        for name, at, step in self._done:
            later = [when - at for when in self._step_times() if when > at]
            table.add_row(name, str(step), f"{min(later):.0f}" if later else "")
        console = Console(width=100)
        console.print(table)
        console.print(f"restarts: {dict(group.restarts())}")
        console.print(f"dropped: {evidence.metrics[-1]['dropped']}")
        for name in self._waiting:
            found.append(f"{name} was not killed")
        console.print("\n".join(found) or "nothing is lost, nothing is trained on twice")
        return not found


def _victim(name: str, running: list[Process]) -> Process | None:
    if name != _RANK:
        return find(name, running)
    ranks = [each for each in running if role(each) == "trainer, other ranks"]
    return next((each for each in ranks if "-u" in each.argv), None)
