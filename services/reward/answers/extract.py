"""Finds the final answer in a response: a box, a `####` line, "the answer is …", or else the last
number.

Every step is linear in the length of any text: responses are untrusted.
"""

import re

from common.prompts.final_answers import marked_answers
from services.reward.answers.exact import quantity
from services.reward.answers.notation import FUNCTIONS

MAX_ANSWER_CHARS = 1024
"""Longer answers are ignored, because cutting one could turn it into another answer."""

_THINK = re.compile(r"(</?think>)", re.IGNORECASE)
_NUMBERED = re.compile(
    r"[\s*_]*\(?[0-9]{1,3}(?:\.[0-9]{1,3}){0,3}(?:[.):]\s+\S|\s+(?:[-–—]\s+)?[A-Z][a-z])"
)
_WORDY = re.compile(r"[\s*_]*([A-Za-z]{2,})")
_LABEL = re.compile(
    r"[\s*_]*(?:the\s+)?(?:final\s+)?answer\s*(?:\*\*)?\s*(?:is|:|=)[\s:*]*(?=\S)", re.IGNORECASE
)
_STATED = re.compile(r"\banswers?[\s*_]{0,4}(?:is|are|:|=)(?:\s?:)?[\s*_]{0,8}", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<!sq)(?<!cu)[.?](?=[\s*_\"')]|$)|\n")
_CLAUSE_END = re.compile(
    r"\s*,?\s+(?:because|since|which|where|when|so|as|thus|hence|therefore|given|assuming)\b",
    re.IGNORECASE,
)
_FILLER = re.compile(
    r"(?:(?:therefore|thus|then|simply|just|indeed|clearly|exactly|approximately|about|equal to"
    r"|given by|that)\b[\s,:]*)+",
    re.IGNORECASE,
)
_MATH_SPAN = re.compile(
    r"\$\$((?:\\.|[^$\\]){0,1024})\$\$|(?<!\\)\$((?:\\.|[^$\\]){0,1024})\$"
    r"|\\\((.{0,1024}?)\\\)|\\\[(.{0,1024}?)\\\]",
    re.DOTALL,
)
_PROSE = re.compile(r"(?<![\\{A-Za-z])[A-Za-z]{2,}")
_DIGITS = r"(?:[0-9]{1,3}(?:(?:,|\{,\}|,\\!)[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
_RATIO = r"(?:/[0-9]+(?![0-9]|\.[0-9]))"
_NUMBER = re.compile(
    rf"(?:(?<![\w)}}.])[-−])?\\?\$?(?:\\[dt]?frac\{{-?[0-9]+\}}\{{-?[0-9]+\}}"
    rf"|(?:{_DIGITS}|(?<![0-9])\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?:{_RATIO}|\s[0-9]+{_RATIO})?)"
    r"(?:\s?\\?%|\s(?:dozen|hundred|thousand|million|billion|trillion)\b)?"
)
_TAIL_CHARS = 4096
_WRAPPERS = ((r"\(", r"\)"), (r"\[", r"\]"))
_DOLLAR = re.compile(r"(?<!\\)\$")


def extract_answer(response: str) -> str | None:
    """Returns the final answer of a response, cleaned, or None without one (or with one over
    `MAX_ANSWER_CHARS`).

    Thoughts (`<think>`) do not count, closed or not. The last of several marked answers counts.
    """
    text = without_thoughts(response)
    found, answer = _last_marked(text)
    return answer if found else _stated(text) or _last_number(text)


def gold_answer(ground_truth: str) -> str | None:
    """Returns the answer in a ground truth: its marked answer, else all of it. None when it is
    empty or too long.
    """
    found, answer = _last_marked(ground_truth)
    if found:
        return answer
    if len(ground_truth) > MAX_ANSWER_CHARS:
        return None
    return clean(ground_truth) or None


def clean(answer: str) -> str:
    """Removes decoration from an answer: math mode, bold type, final punctuation. Currency signs
    stay: they are units.
    """
    text = answer
    for _ in range(3):  # decorations nest: **\(42\).**
        before = text
        text = _without_math_mode(text.strip().strip("*_`").strip())
        if text.endswith((".", ",")) and not text.endswith(".."):
            text = text[:-1]
        for opening, closing in _WRAPPERS:
            if text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : -len(closing)]
        if text == before:
            break
    return text.replace("\\$", "$").rstrip("\\ ").strip()


def _without_math_mode(text: str) -> str:
    """Removes paired dollar signs; a single dollar sign is money."""
    signs = len(_DOLLAR.findall(text))
    if signs == 1 and re.search(r"\$[-\s]*[0-9.]", text):
        return text
    return _DOLLAR.sub("", text)


def without_thoughts(text: str) -> str:
    """Returns the text outside `<think>` tags, closed or not."""
    kept: list[str] = []
    thinking = False
    for piece in _THINK.split(text):
        tag = piece.lower()
        if tag == "<think>":
            thinking = True
        elif tag == "</think>":
            # The chat template opened <think> in the prompt, so everything before is thought.
            if not thinking:
                kept.clear()
            thinking = False
        elif not thinking:
            kept.append(piece)
    return "".join(kept)


def _last_marked(text: str) -> tuple[bool, str | None]:
    """Returns (whether there is a marked answer, the last one or None when it is too long)."""
    marks = marked_answers(text)
    for start, end in reversed(marks):
        if end is None:
            line = text[start : start + MAX_ANSWER_CHARS + 1].partition("\n")[0]
            end = start + len(line)
            is_alone = len(marks) == 1 and not text[end:].strip()
            if _is_heading(line, is_alone):
                continue
            label = _LABEL.match(line)
            raw = line[label.end() :] if label else line
        else:
            raw = text[start : min(end, start + MAX_ANSWER_CHARS)]

        if end - start > MAX_ANSWER_CHARS:
            return True, None
        answer = clean(raw)
        if answer:
            return True, answer
    return False, None


def _is_heading(line: str, alone: bool) -> bool:
    """Returns whether a `####` line is a heading, such as `#### 2. Check`. Words are an answer if
    it stands `alone`.
    """
    if _NUMBERED.match(line):
        return quantity(clean(line)) is None
    word = _WORDY.match(line)
    if word is None or alone or _LABEL.match(line):
        return False
    return word[1] not in FUNCTIONS | {"pi"}


def _stated(text: str) -> str | None:
    """Returns X of the last sentence with "the answer is X"; None without one, or when X is
    prose.
    """
    last = None
    for match in _STATED.finditer(text):
        last = match
    if last is None:
        return None

    rest = text[last.end() : last.end() + MAX_ANSWER_CHARS + 1].lstrip()
    display = _MATH_SPAN.match(rest)
    if display and display.group().startswith(("$$", "\\[")):
        return clean(display.group())

    end = _SENTENCE_END.search(rest)
    sentence = rest[: end.start()] if end else rest
    if clause := _CLAUSE_END.search(sentence):
        sentence = sentence[: clause.start()]
    if filler := _FILLER.match(sentence):
        sentence = sentence[filler.end() :]

    is_prose = _PROSE.match(sentence) and len(sentence.split()) > 3
    if is_prose or "\\boxed" in sentence:
        return None
    answer = clean(_MATH_SPAN.sub(_content, sentence))
    return answer if 0 < len(answer) <= MAX_ANSWER_CHARS else None


def _last_number(text: str) -> str | None:
    """Returns the last number or formula of a text."""
    tail = text[-_TAIL_CHARS:]
    last: re.Match[str] | None = None
    for part in (tail, text):
        for match in _NUMBER.finditer(part):
            last = match
        # A number at the very start of the tail may have been cut.
        if last is not None and (last.start() > 0 or part is text):
            break

    spans = [span for span in _MATH_SPAN.finditer(tail) if len(_PROSE.findall(_content(span))) < 2]
    if spans and (last is None or len(last.string) - last.start() >= len(tail) - spans[-1].end()):
        number_end = -1 if last is None else last.end() - len(last.string) + len(tail)
        if number_end <= spans[-1].end():
            found = _last_side(_content(spans[-1]))
            return clean(found) or None

    if last is None or last.end() - last.start() > MAX_ANSWER_CHARS:
        return None
    found = _run(last)
    if len(found) > MAX_ANSWER_CHARS:
        return None
    # Nothing is left of `1=\)` beyond its equals sign.
    return clean(found) or clean(last.group()) or None


def _content(span: re.Match[str]) -> str:
    return next(part for part in span.groups() if part is not None)


def _run(number: re.Match[str]) -> str:
    """Returns a number with everything attached to it: 3√2 and not 2."""
    text = number.string
    start = number.start()
    end = number.end()
    before = re.search(r"\S*\Z", text[max(0, start - MAX_ANSWER_CHARS) : start])
    after = re.match(r"\S*", text[end : end + MAX_ANSWER_CHARS])
    assert before is not None
    assert after is not None
    head = before.group().rpartition("boxed{")[2].lstrip("([{\"'*_`")
    if head.endswith(("-", "–", "—")):
        head = ""
    return _last_side(head + number.group() + after.group().rstrip(".,;:?!)]}\"'*_`"))


def _last_side(formula: str) -> str:
    """Returns the part after the last equals sign, unless the formula is an equation in
    unknowns.
    """
    *sides, last = re.split(r"(?<![<>!])=", formula)
    if not last.strip():
        return formula
    for side in sides:
        without_commands = re.sub(r"\\[A-Za-z]+", "", side)
        if len(re.findall(r"[A-Za-z]", without_commands)) > 1:
            return formula
    return last
