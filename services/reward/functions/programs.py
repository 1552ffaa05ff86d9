"""Verifies programs by their test cases."""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.errors import ConfigError
from services.reward.extract import without_thoughts
from services.reward.functions.base import Message, RewardFunction, as_floats, column, text_of
from services.reward.sandbox.cases import Case, CaseResult, parse_cases
from services.reward.sandbox.run import Limits, Sandbox, SandboxFault, SandboxKind
from services.reward.score import Score

MAX_SOURCE_CHARS = 100_000
"""A longer program is none."""
# Possessive: what follows the fence is read once, however long it is.
_FENCE = re.compile(r"^[ \t]{0,3}(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
_LANGUAGES = ("", "python", "python3", "py", "python2")


class CodeRewardFunction(RewardFunction):
    """1.0 for a completion whose program passes all of `test_cases`, else 0.0, or the share that it passes.

    The program is the last code block that is not marked as another language; thoughts do not count. It runs in a sandbox
    (bubblewrap) without network, files or further processes. What a test case looks like: `parse_cases` in
    `services.reward.sandbox.cases`. A program that fails, hangs or uses too much has failed its case; only where the sandbox
    itself fails there is no score.

    Args:
        timeout: seconds of wall time for one case; all cases of a program have five times as much.
        partial_credit: reward the share of the cases that pass; every case is run then.
        slots: programs at once; the number of processors when None.
        memory_mb: address space of a program.
        output_kb: standard output of one case, or the value it returns.
        python: interpreter for programs, with what is installed for it; when empty a bare one is found.
        sandbox: `none` runs programs as this user without protection: only for programs that you trust.

    Raises ConfigError with the remedy where the sandbox does not work: it is tried when this object is made.
    """

    name = "code"
    bounds_itself = True

    def __init__(
        self,
        timeout: float = 5.0,
        partial_credit: bool = False,
        *,
        slots: int | None = None,
        memory_mb: int = 512,
        output_kb: int = 64,
        python: str = "",
        sandbox: SandboxKind = "bubblewrap",
    ) -> None:
        slots = slots or os.cpu_count() or 1
        for field, value in (("timeout", timeout), ("slots", slots), ("memory_mb", memory_mb), ("output_kb", output_kb)):
            if value <= 0:
                raise ConfigError(f"{field} is not above 0", field=field, value=value, remedy="raise it")
        self.partial_credit = partial_credit
        self._sandbox = Sandbox(Limits(timeout, memory_mb, output_kb), slots, sandbox, python)
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix="sandbox")

    def __call__(self, completions: list[list[Message]], **kwargs: Any) -> list[float]:
        """A number in [0, 1] or NaN for each completion. Raises InvalidInput for `test_cases` that are none."""
        return as_floats(self.scores(completions, **kwargs))

    def scores(self, completions: list[list[Message]], **kwargs: Any) -> list[Score]:
        """Scores; `answer` is the outcome of every case. Raises as `__call__` does."""
        columns = column(kwargs, "test_cases", len(completions), self.name)
        cases = [parse_cases(column, f"test_cases[{i}]") for i, column in enumerate(columns)]
        return list(self._threads.map(self._score, map(text_of, completions), cases))

    def results(self, source: str, test_cases: Any) -> list[CaseResult]:
        """What comes of every case of a program. Raises InvalidInput for a bad case, SandboxFault when the sandbox fails."""
        return self._sandbox.run(source, parse_cases(test_cases))

    def _score(self, text: str, cases: Sequence[Case]) -> Score:
        source = extract_program(text)
        if source is None:
            return Score(0.0, "unparsable", correct=False)
        try:
            results = self._sandbox.run(source, cases, stop_at_failure=not self.partial_credit)
        except SandboxFault:
            return Score(None, "error", correct=False)
        passed = sum(result.status == "passed" for result in results)
        value = passed / len(results) if self.partial_credit else float(passed == len(results))
        answer = ", ".join(result.status for result in results)
        return Score(value, correct=passed == len(results), answer=answer)


def extract_program(response: str) -> str | None:
    """The last code block of a response that may be Python; None when there is none, or one over `MAX_SOURCE_CHARS`.

    Thoughts do not count. A block that is never closed is cut off: it counts when no closed one does.
    """
    text = without_thoughts(response)
    found = unclosed = None
    opening: re.Match[str] | None = None
    for match in _FENCE.finditer(text):
        if opening is None:
            opening = match
        elif match.group(1).startswith(opening.group(1)) and not match.group(2):
            if opening.group(2).lower() in _LANGUAGES:
                found = text[opening.end() + 1 : match.start()]
            opening = None
    if opening is not None and opening.group(2).lower() in _LANGUAGES:
        unclosed = text[opening.end() + 1 :]
    source = unclosed if found is None else found
    return source if source is not None and source.strip() and len(source) <= MAX_SOURCE_CHARS else None
