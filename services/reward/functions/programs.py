"""Verifies programs by their test cases."""

import os
import re
from collections.abc import Sequence
from typing import Any

from common.process.daemon_threads import DaemonThreads
from services.reward.answers.extract import without_thoughts
from services.reward.functions.base import (
    DetailedRewardFunction,
    Message,
    Score,
    check_positive,
    column,
    text_of,
)
from services.sandbox.cases import Case, CaseResult, parse_cases
from services.sandbox.sandbox import Limits, Sandbox, SandboxFault, SandboxKind

MAX_SOURCE_CHARS = 100_000
"""Longer programs are ignored."""
# Possessive, so that the text after a fence is scanned only once, however long it is.
_FENCE = re.compile(r"^([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
_PYTHON = re.compile(r"\W*(?:(py|python)[\d.]*\W*)?", re.IGNORECASE)
_DEFINED = re.compile(
    r"^(?:async[ \t]+)?(?:def|class)[ \t]+(?!test)(\w+)", re.MULTILINE | re.IGNORECASE
)
_IMPORTED = re.compile(r"^(?:from[ \t]+\S+[ \t]+)?import[ \t]+([^#\n]+)", re.MULTILINE)
_ASSIGNED = re.compile(r"^(\w+)[ \t]*=[^=]", re.MULTILINE)
_STATEMENT = re.compile(
    r"^[ \t]*(?:@|(?:def|class|import|from|for|while|if|with|try|print|async)\b)|=|\w\(",
    re.MULTILINE,
)
_SESSION = re.compile(r"^(?:>>>|\$) ", re.MULTILINE)
_INPUT = re.compile(r"\binput\(|\bstdin\b|\bopen\(0")
_NAME = re.compile(r"[^\W\d]\w*")


class CodeRewardFunction(DetailedRewardFunction):
    """1.0 for a completion whose program passes all of `test_cases`, else 0.0, or the share that it
    passes.

    `extract_program` defines which code blocks are the program. It runs in a sandbox (bubblewrap)
    without network, files or further processes. `services.sandbox.cases.parse_cases` documents test
    cases. A program that fails, hangs or exceeds a limit fails its case. Only a failure of the
    sandbox itself, or a machine too busy to run the program, gives no score.

    Args:
        timeout: seconds of computing or waiting for one case; all cases of a program share five
        times as much.
        partial_credit: reward the share of the cases that pass; every case then runs.
        slots: maximum concurrent programs; the number of processors when None.
        memory_mb: address space of a program.
        output_kb: standard output of one case, or the value it returns.
        python: interpreter for programs, with its packages; when empty, one is found and used
        without packages.
        sandbox: `none` runs programs as this user without protection: only for programs that you
        trust.

    Raises:
        ConfigError: the sandbox, which is tested when this object is created, does not work.
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
        self._threads = DaemonThreads(slots, "sandbox")

    def scores(self, completions: list[list[Message]], **kwargs: Any) -> list[Score]:
        """Returns scores in [0, 1]; `answer` is the outcome of every case. Raises InvalidInput for
        invalid `test_cases`.
        """
        columns = column(kwargs, "test_cases", len(completions), self.name)
        cases = [parse_cases(column, f"test_cases[{i}]") for i, column in enumerate(columns)]
        return self._threads.map(self._score, map(text_of, completions), cases)

    def results(self, source: str, test_cases: Any) -> list[CaseResult]:
        """Returns the result of every case of a program. Raises InvalidInput for a bad case, or
        SandboxFault.
        """
        return self._sandbox.run(source, parse_cases(test_cases))

    def _score(self, text: str, cases: Sequence[Case]) -> Score:
        source = extract_program(text, any(case.request["kind"] == "stdin" for case in cases))
        if source is None:
            return Score(0.0, "unparsable", correct=False)
        try:
            results = self._sandbox.run(source, cases, stop_at_failure=not self.partial_credit)
        except SandboxFault as error:
            return Score(None, "error", correct=False, reason=str(error))
        passed = sum(result.status == "passed" for result in results)
        value = passed / len(results) if self.partial_credit else float(passed == len(results))
        answer = ", ".join(result.status for result in results)
        statuses = {result.status for result in results}
        failed = statuses - {"passed", "starved", "skipped"}
        if "starved" in statuses and (
            self.partial_credit or not failed
        ):  # a busy machine decides nothing
            reason = "the machine was too busy to run the program"
            return Score(None, "timeout", correct=False, answer=answer, reason=reason)
        return Score(value, correct=passed == len(results), answer=answer)


def extract_program(response: str, reads_input: bool = True) -> str | None:
    """Returns the program of a response; None without a code block that may be Python, or when over
    `MAX_SOURCE_CHARS`.

    The program is the last block of code. A block of output, and one that only calls what an
    earlier one defines, does not count, unless the tests give input, the block reads it and no
    other does. What a block needs from earlier ones is put before it. Thoughts do not count, and
    blocks without a language only where no other holds a program or they define or import
    something. A block that is never closed (a truncated response) counts only when there is no
    closed one.
    """
    closed, truncated = _blocks(without_thoughts(response))
    blocks = [
        text for marked, text in closed if marked or _DEFINED.search(text) or _IMPORTED.search(text)
    ]
    source = _assembled(blocks or [text for _, text in closed] or truncated, reads_input)
    return source if source.strip() and len(source) <= MAX_SOURCE_CHARS else None


def _blocks(text: str) -> tuple[list[tuple[bool, str]], list[str]]:
    """Returns the closed blocks that may be Python, each with whether it is labelled so, and any
    unclosed blocks.
    """
    blocks: list[tuple[bool, str]] = []
    opening: re.Match[str] | None = None
    for match in _FENCE.finditer(text):
        if opening is None:
            opening = match
        elif (
            match[2].startswith(opening[2])
            and not match[3]
            and _depth(match) <= _depth(opening) + 3
        ):
            if language := _PYTHON.fullmatch(opening[3]):
                blocks.append(
                    (
                        bool(language[1]),
                        _unindented(text[opening.end() + 1 : match.start()], opening[1]),
                    )
                )
            opening = None
    if opening is not None and _PYTHON.fullmatch(opening[3]):
        return blocks, [_unindented(text[opening.end() + 1 :], opening[1])]
    return blocks, []


def _depth(fence: re.Match[str]) -> int:
    return len(fence[1].expandtabs(4))


def _unindented(source: str, indent: str) -> str:
    """Returns the content of a block without the indentation of its fence."""
    return re.sub(rf"^{indent}", "", source, flags=re.MULTILINE) if indent else source


def _assembled(blocks: list[str], reads_input: bool) -> str:
    """Returns the last block that is a program, after those that it needs."""
    programs = [
        block for block in blocks if _STATEMENT.search(block) and not _SESSION.search(block)
    ]
    if not programs:
        return blocks[-1] if blocks else ""
    bound = [_bound(block) for block in programs]
    last = len(programs) - 1
    while last > 0 and not _DEFINED.search(programs[last]):
        drives = (
            reads_input
            and _INPUT.search(programs[last])
            and not any(map(_INPUT.search, programs[:last]))
        )
        earlier: set[str] = set().union(*(_DEFINED.findall(block) for block in programs[:last]))
        if drives or not (earlier - bound[last]).intersection(_NAME.findall(programs[last])):
            break
        last -= 1
    needed, parts = set(_NAME.findall(programs[last])) - bound[last], [programs[last]]
    for block, names in zip(programs[:last][::-1], bound[:last][::-1], strict=True):
        if names & needed:
            parts.insert(0, block)
            needed = (needed | set(_NAME.findall(block))) - names
    return parts[0] if len(parts) == 1 else "\n".join(parts)


def _bound(source: str) -> set[str]:
    """Returns the names that a program binds at its top level."""
    imported = _NAME.findall(" ".join(_IMPORTED.findall(source)))
    return {*_DEFINED.findall(source), *_ASSIGNED.findall(source), *imported} - {"as"}
