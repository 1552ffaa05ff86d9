"""Finds the final answer that a text marks: in a box with balanced braces, or on a line after
`####`.
"""

import re

# `\\` before anything but a box is a line break, so a brace after it counts; `\{` and `\}` are
# literal characters.
_TOKEN = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{|\\\\(?!boxed|fbox)|\\[{}]|[{}]|(?<!#)####(?!#)")


def marked_answers(text: str) -> list[tuple[int, int | None]]:
    """Returns the marked answers in the order they end: (start, end) of a balanced box, (start,
    None) of a `####` line.

    Takes time linear in the length of the text.
    """
    if "####" not in text and "\\boxed" not in text and "\\fbox" not in text:
        return []
    ends: list[tuple[int, int | None]] = []
    open_braces: list[int | None] = []  # a box's brace: start of its content; any other brace: None
    for match in _TOKEN.finditer(text):
        found = match.group()
        if found == "####":
            ends.append((match.end(), None))
        elif found == "{":
            open_braces.append(None)
        elif found == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                ends.append((start, match.start()))
        elif found[1] in "bf":
            open_braces.append(match.end())
    return ends


def last_box(text: str) -> str | None:
    r"""Returns the content of the last balanced `\boxed{…}` (or `\fbox{…}`), stripped; None when
    there is none.
    """
    for start, end in reversed(marked_answers(text)):
        if end is not None:
            return text[start:end].strip()
    return None
