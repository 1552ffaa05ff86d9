"""A fault: what happens, the words that name its cause, who reported it; and the list of all."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checks.faults.lab import Lab

OWN = "own"
"""Where a fault was reported that nobody reported: we know it from our own work."""
Run = Callable[["Lab"], None]
Oracle = Callable[[str, str, str], float]
"""(text of the answer, ground truth, finish reason) -> the reward that is right."""


@dataclass(frozen=True)
class Fault:
    """One fault, and how to recognise that its cause was named."""

    name: str
    subject: str
    """The module that has it: rewards, data, engine, …"""
    cause: str
    """The cause in one phrase."""
    words: tuple[str, ...]
    """Patterns that one line contains, all of them and in any case, when it names the cause. They
    were chosen from `cause`, before anyone looked at what the system says."""
    reported: str
    """URL of a public thread, or `OWN`."""
    run: Run
    """Starts a run and injects the fault."""
    timeout: str = ""
    """The setting that decides when the fault can be noticed at all."""
    timeout_s: float = 0.0
    """Its value in `run`."""
    in_steps: bool = False
    """Whether the cause shows only over steps, as in a hint."""
    harmless: bool = False
    """Whether the run is to go on as if nothing had happened, and there is nothing to name."""
    oracle: Oracle | None = None
    """The right rewards; None when no reward of this run can be checked by an outsider."""

    def is_named_by(self, line: str) -> bool:
        """Whether this line names the cause."""
        if not self.words:
            return False
        return all(re.search(word, line, re.IGNORECASE) for word in self.words)


FAULTS: dict[str, Fault] = {}


def fault(
    cause: str,
    *words: str,
    reported: str = OWN,
    timeout: str = "",
    timeout_s: float = 0.0,
    in_steps: bool = False,
    harmless: bool = False,
    oracle: Oracle | None = None,
) -> Callable[[Run], Run]:
    """Adds the decorated function to `FAULTS`, under its own name."""

    def add(run: Run) -> Run:
        name = run.__name__
        assert name not in FAULTS, f"two faults are called {name}"
        FAULTS[name] = Fault(
            name=name,
            subject=run.__module__.rpartition(".")[2],
            cause=cause,
            words=words,
            reported=reported,
            run=run,
            timeout=timeout,
            timeout_s=timeout_s,
            in_steps=in_steps,
            harmless=harmless,
            oracle=oracle,
        )
        return run

    return add
