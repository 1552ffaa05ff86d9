"""Repairs ground truths as data sets write them: lists of one answer, doubled backslashes."""

import re

from common.prompts.stated_answers import MAX_ANSWER_CHARS

_LIST = re.compile(r"[\[(]\s*(?P<item>.*?)\s*,?\s*[\])]", re.DOTALL)
_QUOTED = re.compile(r"""(?P<quote>["'])(?P<text>.*)(?P=quote)""", re.DOTALL)
_BACKSLASHES = re.compile(r"\\+")
_DOUBLED = re.compile(r"\\\\(?:[A-Za-z]{2,}|[{}%$])")
EATEN_BACKSLASH = re.compile(
    r"[\a\x08\v\f]|\t(?:imes|ext|heta|an|au|o(?![a-z]))|\r(?!\n)|\n(?:abla|eq)(?![a-z])"
)
r"""A backslash and a letter that became one control character, as when `\frac` is read as a form
feed and `rac`."""


def repaired(ground_truth: str) -> str:
    r"""Repairs what can only be meant in one way: `['31']` becomes 31, and `\\frac{1}{3}` becomes
    `\frac{1}{3}`. A list of several texts, which may be several answers or several ways to write
    one, becomes "".
    """
    text = ground_truth.strip()
    if len(text) > MAX_ANSWER_CHARS:
        return text  # a worked solution
    item = text
    while found := _LIST.fullmatch(item):
        item = found["item"]
    quoted = _QUOTED.fullmatch(item) if item != text else None
    if quoted:
        text = "" if quoted["quote"] in quoted["text"] else quoted["text"]

    return with_single_backslashes(text)


def with_single_backslashes(text: str) -> str:
    r"""Returns a text in which every backslash is doubled, as in JSON, with single ones."""
    if _DOUBLED.search(text) and all(len(run) % 2 == 0 for run in _BACKSLASHES.findall(text)):
        return text.replace("\\\\", "\\")
    return text
