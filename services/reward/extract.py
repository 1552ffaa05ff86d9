"""Finds the final answer in a response: a box, a `####` line, or else the last number.

Every step is linear in the length of any text: responses are untrusted.
"""

import re

from common.final_answers import marked_answers

MAX_ANSWER_CHARS = 1024
"""Longer answers do not count: cutting one could turn it into another answer."""

_THINK = re.compile(r"(</?think>)", re.IGNORECASE)
_HEADING = re.compile(r"[\s*_]*[A-Za-z]{2,}")
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
_NUMBER = re.compile(
    rf"(?:(?<![\w)}}.])[-−])?\$?(?:\\[dt]?frac\{{-?[0-9]+\}}\{{-?[0-9]+\}}"
    rf"|(?:{_DIGITS}|(?<![0-9])\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?:/[0-9]+(?![0-9.]))?)(?:\s?\\?%)?"
)
_TAIL_CHARS = 4096
_WRAPPERS = ((r"\(", r"\)"), (r"\[", r"\]"))
_CURRENCY = str.maketrans(dict.fromkeys("$€£¥"))
_SPACES = re.compile(r"(?<!\\)\\[!,;: ]|~")
_PERCENT_WORD = re.compile(r"(?<=[0-9])\s*percent$", re.IGNORECASE)


def extract_answer(response: str) -> str | None:
    """Returns the final answer of a response, cleaned, or None without one (or with one over `MAX_ANSWER_CHARS`).

    Thoughts (`<think>`) do not count, closed or not. The last of several marked answers counts.
    """
    text = without_thoughts(response)
    found, answer = _last_marked(text)
    return answer if found else _last_number(text)


def gold_answer(ground_truth: str) -> str | None:
    """Returns the answer that a ground truth states: its marked answer, else all of it. None when empty or too long."""
    found, answer = _last_marked(ground_truth)
    if found:
        return answer
    return clean(ground_truth) or None if len(ground_truth) <= MAX_ANSWER_CHARS else None


def clean(answer: str) -> str:
    """Removes decoration from an answer: math mode, currency signs, bold type, thin spaces, a final full stop."""
    text = answer.replace("\\$", "").replace("−", "-").replace("{,}", ",")
    text = _SPACES.sub("", text.translate(_CURRENCY))
    for _ in range(3):  # decorations nest: **\(42\).**
        before = text
        text = text.strip().strip("*_`").strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1]
        for opening, closing in _WRAPPERS:
            if text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : -len(closing)]
        if text == before:
            break
    return _PERCENT_WORD.sub("%", text.strip())


def without_thoughts(text: str) -> str:
    """Returns the text outside `<think>` tags, closed or not."""
    kept: list[str] = []
    thinking = False
    for piece in _THINK.split(text):
        tag = piece.lower()
        if tag == "<think>":
            thinking = True
        elif tag == "</think>":
            if not thinking:  # the chat template opened <think> in the prompt: everything before is thought
                kept.clear()
            thinking = False
        elif not thinking:
            kept.append(piece)
    return "".join(kept)


def _last_marked(text: str) -> tuple[bool, str | None]:
    """Returns (whether there is a marked answer, the last one or None when it is too long)."""
    for start, end in reversed(marked_answers(text)):
        if end is None:
            line = text[start : start + MAX_ANSWER_CHARS + 1].partition("\n")[0]
            if _HEADING.match(line):
                continue
            end, raw = start + len(line), line
        else:
            raw = text[start : min(end, start + MAX_ANSWER_CHARS)]
        if end - start > MAX_ANSWER_CHARS:
            return True, None
        if raw and (answer := clean(raw)):
            return True, answer
    return False, None


def _last_number(text: str) -> str | None:
    last = None
    for part in (text[-_TAIL_CHARS:], text):
        for match in _NUMBER.finditer(part):
            last = match
        if last is not None and (last.start() > 0 or part is text):
            break  # a number at the very start of the tail may have been cut
    if last is None or len(last.group()) > MAX_ANSWER_CHARS:
        return None
    return clean(last.group())
