"""Verifies programs by their test cases."""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.reward.extract import without_thoughts
from services.reward.functions.base import DetailedRewardFunction, Message, Score, check_positive, column, text_of
from services.reward.sandbox.cases import Case, CaseResult, parse_cases
from services.reward.sandbox.run import Limits, Sandbox, SandboxFault, SandboxKind

MAX_SOURCE_CHARS = 100_000
"""Longer programs do not count."""
# Possessive: the text after a fence is read once, however long it is.
_FENCE = re.compile(r"^[ \t]{0,3}(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
_LANGUAGES = ("", "python", "python3", "py", "python2")


class CodeRewardFunction(DetailedRewardFunction):
    """1.0 for a completion whose program passes all of `test_cases`, else 0.0, or the share that it passes.

    The program is the last code block that is not marked as another language; thoughts do not count. It runs in a sandbox
    (bubblewrap) without network, files or further processes. `services.reward.sandbox.cases.parse_cases` documents test cases.
    A program that fails, hangs or uses too much fails its case. Only a failure of the sandbox itself, or a machine too busy to
    run the program, gives no score.

    Args:
        timeout: seconds for one case, in which it computes or waits; all cases of a program share five times as much.
        partial_credit: reward the share of the cases that pass; every case runs then.
        slots: programs at once; the number of processors when None.
        memory_mb: address space of a program.
        output_kb: standard output of one case, or the value it returns.
        python: interpreter for programs, with its packages; when empty, one is found and used without packages.
        sandbox: `none` runs programs as this user without protection: only for programs that you trust.

    Raises:
        ConfigError: the sandbox, which is tested when this object is made, does not work.
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
        self.slots = slots = slots or os.cpu_count() or 1
        check_positive(timeout=timeout, slots=slots, memory_mb=memory_mb, output_kb=output_kb)
        self.partial_credit = partial_credit
        self._sandbox = Sandbox(Limits(timeout, memory_mb, output_kb), slots, sandbox, python)
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix="sandbox")

    def scores(self, completions: list[list[Message]], **kwargs: Any) -> list[Score]:
        """Returns scores in [0, 1]; `answer` is the outcome of every case. Raises InvalidInput for invalid `test_cases`."""
        columns = column(kwargs, "test_cases", len(completions), self.name)
        cases = [parse_cases(column, f"test_cases[{i}]") for i, column in enumerate(columns)]
        return list(self._threads.map(self._score, map(text_of, completions), cases))

    def results(self, source: str, test_cases: Any) -> list[CaseResult]:
        """Returns the result of every case of a program. Raises InvalidInput for a bad case, SandboxFault when it fails."""
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
        statuses = {result.status for result in results}
        failed = statuses - {"passed", "starved", "skipped"}
        if "starved" in statuses and (self.partial_credit or not failed):  # a busy machine has decided nothing
            return Score(None, "timeout", correct=False, answer=answer)
        return Score(value, correct=passed == len(results), answer=answer)


def extract_program(response: str) -> str | None:
    """Returns the last code block of a response that may be Python; None without one, or when over `MAX_SOURCE_CHARS`.

    Thoughts do not count. A block that is never closed (a truncated response) counts only when there is no closed one.
    """
    text = without_thoughts(response)
    source: str | None = None
    opening: re.Match[str] | None = None
    for match in _FENCE.finditer(text):
        if opening is None:
            opening = match
        elif match.group(1).startswith(opening.group(1)) and not match.group(2):
            if opening.group(2).lower() in _LANGUAGES:
                source = text[opening.end() + 1 : match.start()]
            opening = None
    if source is None and opening is not None and opening.group(2).lower() in _LANGUAGES:
        source = text[opening.end() + 1 :]
    return source if source is not None and source.strip() and len(source) <= MAX_SOURCE_CHARS else None
