"""Verifies programs by their test cases."""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from common.process.daemon_threads import DaemonThreads
from common.prompts.answer_text import without_thoughts
from services.reward.functions.base import (
    Completions,
    DetailedRewardFunction,
    Score,
    Scores,
    check_positive,
    column,
    text_of,
)
from services.sandbox.case_formats import parse_cases
from services.sandbox.cases import Case, CaseResult
from services.sandbox.python_source import parse_python
from services.sandbox.sandbox import Limits, Sandbox, SandboxFault, SandboxKind

# Longer programs are ignored.
MAX_SOURCE_CHARS = 100_000
# Possessive, so that the text after a fence is scanned only once, however long it is. A block that
# is labelled as Python may begin after text on its line.
_FENCE = re.compile(
    r"^(?P<indent>[ \t]*+)(?:[^\n`]++(?=```[ \t]*+py))?+"
    r"(?P<marks>`{3,}+|~{3,}+)[ \t]*+(?P<language>[^\s`]*+)[^\n`]*+$",
    re.MULTILINE,
)
_MARKER = re.compile(r"<(/?\w+)>")
# Stands for the `<` of a marker that is part of a program.
_LITERAL = "<\0"
_PYTHON = re.compile(r"\W*(?:(?:py|python)[\d.]*\W*)?", re.IGNORECASE)
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
_PRINTS = re.compile(r"^print\(", re.MULTILINE)


class CodeRewardFunction(DetailedRewardFunction):
    """1.0 for a completion whose program passes all of `test_cases`, else 0.0, or the share that it
    passes.

    `extract_program` defines which code blocks are the program. It runs in a sandbox (bubblewrap)
    without network, files or further processes. `parse_cases` of `services.sandbox.case_formats`
    documents test cases. A program that fails, hangs or exceeds a limit fails its case. Only a
    failure of the sandbox itself, or a machine too busy to run the program, gives no score.

    Args:
        timeout_s: seconds of computing or waiting for one case; all cases of a program share five
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
    gives_verdicts = True

    def __init__(
        self,
        timeout_s: float = 5.0,
        partial_credit: bool = False,
        *,
        slots: int | None = None,
        memory_mb: int = 512,
        output_kb: int = 1024,
        python: str = "",
        sandbox: SandboxKind = "bubblewrap",
    ) -> None:
        self.slots = slots or os.cpu_count() or 1
        self.partial_credit = partial_credit
        check_positive(
            timeout_s=timeout_s, slots=self.slots, memory_mb=memory_mb, output_kb=output_kb
        )
        self._sandbox = Sandbox(
            Limits(timeout_s, memory_mb, output_kb), self.slots, sandbox, python=python
        )
        self._threads = DaemonThreads(self.slots, "sandbox")

    def scores(self, completions: Completions, **kwargs: Any) -> Scores:
        """Returns scores in [0, 1]; `answer` is the outcome of every case. Raises InvalidInput for
        invalid `test_cases`.
        """
        columns = column(kwargs, "test_cases", len(completions), self.name)
        entry_points = kwargs.get("entry_point") or [""] * len(completions)
        cases = [
            self.cases(content, f"test_cases[{i}]", str(entry_point or ""))
            for i, (content, entry_point) in enumerate(zip(columns, entry_points, strict=True))
        ]
        return self._threads.map(self._score, map(text_of, completions), cases)

    def cases(
        self, test_cases: Any, where: str = "test_cases", entry_point: str = ""
    ) -> list[Case]:
        """Returns the test cases of one problem, as `parse_cases`. Raises InvalidInput also for a
        case that no program passes here.
        """
        cases = parse_cases(test_cases, where, entry_point)
        for case in cases:
            self._sandbox.check(case, where)
        return cases

    def results(self, source: str, test_cases: Any) -> list[CaseResult]:
        """Returns the result of every case of a program. Raises InvalidInput for a bad case, or
        SandboxFault.
        """
        return self._sandbox.run(source, self.cases(test_cases))

    def _score(self, text: str, cases: Sequence[Case]) -> Score:
        reads_input = any(case.request["kind"] == "stdin" for case in cases)
        source = extract_program(text, reads_input)
        if source is None:
            return Score(0.0, "unparsable", correct=False)
        try:
            results = self._sandbox.run(source, cases, stop_at_failure=not self.partial_credit)
        except SandboxFault as error:
            return Score(None, "error", correct=False, reason=str(error))

        statuses = [result.status for result in results]
        answer = ", ".join(statuses)
        # A busy machine decides nothing.
        has_failed = not {"passed", "starved", "skipped"}.issuperset(statuses)
        if "starved" in statuses and (self.partial_credit or not has_failed):
            return Score(
                None,
                "timeout",
                correct=False,
                answer=answer,
                reason="the machine was too busy to run the program",
            )

        passed = statuses.count("passed")
        all_passed = passed == len(results)
        value = passed / len(results) if self.partial_credit else float(all_passed)
        return Score(value, correct=all_passed, answer=answer)


def extract_program(response: str, reads_input: bool = True) -> str | None:
    """Returns the program of a response; None without a code block that may be Python, or when over
    `MAX_SOURCE_CHARS`.

    The program is the last block of code. A block of output, and one that only calls what an
    earlier one defines, does not count, unless the tests give input, the block reads it and no
    other does. What a block needs from earlier ones is put before it. Thoughts do not count, and
    blocks without a language only where no other holds a program or they define or import
    something. A block that is never closed (a truncated response) counts only when there is no
    closed one. A response without any block counts when all of it is Python.
    """
    answer = without_thoughts(_with_literals(response)).replace(_LITERAL, "<")
    blocks = [block for block in _blocks(answer) if _PYTHON.fullmatch(block.language)]
    closed = [block for block in blocks if block.is_closed]
    programs = [block for block in closed if _holds_program(block)]
    texts = [block.text for block in programs or closed or blocks]
    source = _assembled(texts or _unfenced(answer), reads_input)
    return source if source.strip() and len(source) <= MAX_SOURCE_CHARS else None


class _Block(NamedTuple):
    """A fenced block; `text[start:end]` of the response is its content."""

    language: str
    text: str
    """Its content without the indentation of the fence."""
    start: int
    end: int
    is_closed: bool


def _holds_program(block: _Block) -> bool:
    """Returns whether a block is labelled as Python, or defines or imports something."""
    is_labelled = "py" in block.language.lower()
    return is_labelled or bool(_DEFINED.search(block.text) or _IMPORTED.search(block.text))


def _blocks(text: str) -> Iterator[_Block]:
    """Yields the fenced blocks of a text; one that is never closed comes last."""
    opening: re.Match[str] | None = None
    for match in _FENCE.finditer(text):
        if opening is None:
            opening = match
        elif _closes(opening, match):
            yield _block(text, opening, match.start(), is_closed=True)
            opening = None
    if opening is not None:
        yield _block(text, opening, len(text), is_closed=False)


def _block(text: str, opening: re.Match[str], end: int, *, is_closed: bool) -> _Block:
    start = min(opening.end() + 1, end)
    indent = re.compile(f"^{opening['indent']}", re.MULTILINE)
    return _Block(
        language=opening["language"],
        text=indent.sub("", text[start:end]),
        start=start,
        end=end,
        is_closed=is_closed,
    )


def _with_literals(response: str) -> str:
    """Hides marks such as <think> that are text of a program, which end or begin no thought."""
    parts: list[str] = []
    done = 0
    for block in _blocks(response):
        if block.is_closed and _MARKER.search(block.text) and _is_python(block.text):
            parts.append(response[done : block.start])
            parts.append(_MARKER.sub(_LITERAL + r"\1>", response[block.start : block.end]))
            done = block.end
    return "".join([*parts, response[done:]])


def _unfenced(answer: str) -> list[str]:
    """Returns a response without any block as its only block, if all of it is a program."""
    source = answer.strip()
    has_code = _DEFINED.search(source) or _IMPORTED.search(source) or _PRINTS.search(source)
    return [source] if has_code and _is_python(source) else []


def _is_python(source: str) -> bool:
    if len(source) > MAX_SOURCE_CHARS:
        return False
    try:
        parse_python(source)
    except SyntaxError:
        return False
    return True


def _closes(opening: re.Match[str], fence: re.Match[str]) -> bool:
    """Returns whether a fence closes a block: as long as its opening, without a language, and
    indented by at most three columns more.
    """
    is_long_enough = fence["marks"].startswith(opening["marks"])
    deeper = len(fence["indent"].expandtabs(4)) - len(opening["indent"].expandtabs(4))
    return is_long_enough and not fence["language"] and deeper <= 3


def _assembled(blocks: list[str], reads_input: bool) -> str:
    """Returns the last block that is a program, after those that it needs."""
    programs = [
        block for block in blocks if _STATEMENT.search(block) and not _SESSION.search(block)
    ]
    if not programs:
        return blocks[-1] if blocks else ""

    # A last block that only calls what an earlier one defines is an example.
    last = len(programs) - 1
    while last > 0 and not _DEFINED.search(programs[last]):
        earlier = programs[:last]
        # Unless only it reads the input of the tests.
        reads_alone = _INPUT.search(programs[last]) and not any(map(_INPUT.search, earlier))
        if (reads_input and reads_alone) or not _calls(programs[last], earlier):
            break
        last -= 1

    parts = [programs[last]]
    needed = {*_NAME.findall(programs[last])} - _bound(programs[last])
    for block in reversed(programs[:last]):
        names = _bound(block)
        if names & needed:
            parts.insert(0, block)
            needed = (needed.union(_NAME.findall(block))) - names
    return "\n".join(parts)


def _calls(block: str, earlier: list[str]) -> bool:
    """Returns whether a block uses a name that only an earlier one defines."""
    defined = {name for other in earlier for name in _DEFINED.findall(other)}
    return bool((defined - _bound(block)) & {*_NAME.findall(block)})


def _bound(source: str) -> set[str]:
    """Returns the names that a program binds at its top level."""
    imported = _NAME.findall(" ".join(_IMPORTED.findall(source)))
    return {*_DEFINED.findall(source), *_ASSIGNED.findall(source), *imported} - {"as"}
