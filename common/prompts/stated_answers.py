r"""Finds the final answer that a text states: in a box, on a line after `####`, in `<answer>` tags,
or after "the answer is". The last of these counts.

Every step takes time linear in the length of any text: responses are untrusted.
"""

import re
from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from common.prompts.answer_text import BOX
from common.prompts.phrases import phrases

# Longer answers are ignored, because cutting one could turn it into another answer.
MAX_ANSWER_CHARS = 1024
_CONTEXT_CHARS = 500  # text around a mark that is read for its meaning
_MAX_ITEM_CHARS = 200  # a longer line of a list is a statement
_MAX_LABELS = 16  # statements that are read, from the last one backwards
_MAX_QUESTIONS = 8  # headings that are tried
FIRST_MASK = 0xE000  # the private characters that stand for formulas

# `\\` before anything but a box is a line break, so a brace after it counts; `\{` and `\}` are
# literal characters.
_TOKEN = re.compile(
    rf"""(?P<box>{BOX}\s{{0,8}}(?:\{{|(?P<bare>[-−]?[0-9](?:[0-9.,/]*[0-9])?)|\Z))
    | \\\\(?!f?box) | \\[{{}}] | [{{}}] | (?<![#])[#]{{4}}(?![#])
    | <(?P<closes>/?)(?i:(?:final_?)?answer)>""",
    re.VERBOSE,
)
_BETWEEN_BOXES = re.compile(
    r"(?:[,;&]|and|or|\\(?:text|mbox|textbf)\{,?(?:and|or)\})+(?:[A-Za-z](?:_\{?\w+\}?)?[=:])?"
    r"|[.,;]*\(?[a-d1-4][).:](?:[A-Za-z]=)?"
)
_TYPESETTING = re.compile(r"[\s$*]|\\[()\[\],;:!]|\\q?quad(?![A-Za-z])")

_BLANK = re.compile(
    r"(?:[\s~{}_.…?-]|\\[,;:! ]|\\(?:q?quad|[lc]?dots|square|underline)(?![A-Za-z])"
    r"|\\(?:text|mbox)\{\s*\}|\\[hv]?(?:phantom|space)\*?\{[^{}]*\})*"
)

# The surroundings of a box: where its side of the formula ends, and what is joined to it.
_STYLE = r"""(?:[\s{}()\[\]*"'.~$]|\\(?:displaystyle|left|right|[bB]igg?[lr]?|[lL]arge|LARGE|[hH]uge
    |bf|mathbf|boldsymbol|underline|mathrm|(?:text)?color\{\w+\}|colorbox\{\w+\}|[,;:!\ ]))*"""
_SIDE_END = re.compile(
    r"""= | & | \\\\ | \$ | \\[\[\]()] | [,;:?<>≤≥≈→⇒∴∈] | [.!]\s | \n | \\q?quad(?![a-z])
    | \\(?:begin|end)\{[^}]*\} | \\(?:implies|iff|[Ll]ong[Rr]ightarrow|[Rr]ightarrow|to|therefore
    |approx|equiv|in|sim|leq?|geq?|lt|gt|tag|label|text\w*|mbox|mathrm)(?![A-Za-z])
    | (?<![\\A-Za-z])[A-Za-z]{2,}""",
    re.VERBOSE,
)
_JOINED_BEFORE = re.compile(
    rf"""(?: (?<![A-Za-z]{{2}})[-−+/^×·÷±|] | (?<=[0-9)])\* | [0-9] | (?<![A-Za-z\\{{])[A-Za-z]
    | \\(?:cdot|times|div|pm|mp|lfloor|lceil|ln|log|sin|cos|tan)(?![A-Za-z])
    | \\(?:[dt]?frac|sqrt|[dt]?binom)(?:\[[^\]]*\])?(?:\{{[^{{}}]*\}})? ) {_STYLE}\Z""",
    re.VERBOSE,
)
_JOINED_AFTER = re.compile(
    rf"""{_STYLE}(?: \^ | [-−](?![A-Za-z]{{2}}) | [+/×·÷] | _\{{?[0-9] | \*(?!\*) | [0-9]
    | !(?=\s*(?:\Z|[-+*/^])) | \\(?:cdot|times|div|pm|mp|[dt]?frac|sqrt|pi)(?![A-Za-z])
    | [a-z](?![A-Za-z]) )""",
    re.VERBOSE,
)
_SCALE = re.compile(
    r"(?:[\s$},]|\\[),;]|\\text\{)*(dozen|hundred|thousand|million|billion|trillion)\b"
)
_DENIED_BEFORE = re.compile(
    rf"""(?: (?:\bnot|n['’]t|\bnever|\bcannot|≠|\\neq?|\b{phrases("doubt", "could")})
        (?:\s+{phrases("denied filler")})*
    | \bplaceholder\b[^.\n]{{0,40}}
    | (?:\bnot|n['’]t|\bno)\s+{phrases("believes")}\b[^,;:.\n]{{0,60}} ) {_STYLE}\Z""",
    re.VERBOSE,  # without IGNORECASE, which takes five times as long
)
_DENIED_AFTER = re.compile(
    rf"""[\s$*_)\]}}]{{0,8}}(?:\\[\])])?\s{{0,8}}
    (?: (?:,?\s{{0,8}}(?:which|but\ (?:that|this|it))\s)?
        (?:is|was|would\ be)\s(?:not|false|impossible)\b
    | \(\s?(?:wrong|incorrect)\b
    | isn['’]t | wasn['’]t | cannot\ be | can['’]t\ be | or\s(?:maybe|perhaps|possibly) | \?
    | [\s,.]{{0,8}}(?:(?:but|so|however|yet),?\s)?(?: (?:(?:that|this|it)\s)?contradicts
        | (?:(?:that|this|it)\s|(?:that|this|it)?\s?(?:is|was|['’]s)\s)
          (?:{phrases("taken back")}|impossible)(?!\sto\b) )\b
    | \s{{0,8}}\(\s?\$?[-−0-9.,/]+\$?\s(?:if|when|for|otherwise)\b )""",
    re.IGNORECASE | re.VERBOSE,
)

# Another value after a box: "or 8", "(or 8 if the first counts)".
_OTHERWISE = re.compile(
    r"""[\s$*_)\]}]{0,8},?\s?\(?or\s(\$[^$\n]{1,80}\$|[-−]?\$?[0-9.,/]*[0-9])
    (?=\s{0,4}(?:[).,;!\n]|\Z|(?:if|when|depending|for)\b))""",
    re.VERBOSE,
)

# Statements: a label, then a sentence in which each formula is one private character.
_FORMULA = re.compile(
    r"""\$\$((?:\\.|[^$\\]){0,1024})\$\$
    | (?<![\\0-9])\$(?!\s*[0-9.,]+\s+[a-z]{2})((?:\\.|[^$\\]){0,1024})\$(?![0-9])
    | \\\((.{0,1024}?)\\\) | \\\[(.{0,1024}?)\\\]
    | \\begin\{(?:align|equation|gather|multline|eqnarray)(?:ed)?\*?\}
        (.{0,1024}?)\\end\{(?:align|equation|gather|multline|eqnarray)(?:ed)?\*?\}""",
    re.DOTALL | re.VERBOSE,
)
SENTENCE_END = re.compile(
    r"""(?<!\bsq)(?<!\bcu)(?<!i\.e)(?<!e\.g)(?<!\b[MD]r)(?<!\bMrs)(?<!\bMs)[.?](?=[\s*_"')”’»」]|$)
    | !(?=[\s*_"')]*(?:\n|$|\s[A-Z])) | [\n。।]""",
    re.VERBOSE,
)
DOUBT = re.compile(rf"\b{phrases('doubt')}\b", re.IGNORECASE)
_HEDGE = re.compile(rf"\b{phrases('doubt', 'could')}\b", re.IGNORECASE)
_ALTERNATIVE = re.compile(
    rf"\b(?:{phrases('doubt', 'could')}|alternatively|or|not(?!\s(?:counting|including)\b))\b",
    re.IGNORECASE,
)
_VALUE = r"(?:[-−–+]?\s?[$€£¥]?\.?[0-9]|[\ue000-\uf8ff]|\(?[A-H]\)?(?![\w'’]))"
# A member of a JSON object that is the answer.
_JSON = re.compile(
    r"""["'](?:(?:final|correct)[_\ ]?)?(?:answer|result)["']\s{0,8}:\s{0,8}
    (?: (?P<list>\[\s{0,8})?(?P<quote>["'])(?P<text>(?:(?!(?P=quote))[^\\\n]|\\.){0,1024})(?P=quote)
        (?(list)\s{0,8}\])
    | (?P<bare>[^\s"',}]{1,1024}) | ["'] )""",
    re.IGNORECASE | re.VERBOSE,
)
_SIGN_OF_QUESTION = re.compile(
    "uestion|UESTION|Q:|roblem|ROBLEM|ruction|uman:|UMAN:|ser:|SER:|user|问题|题目"
)
_NEXT_QUESTION = re.compile(
    r"""(?:\n[\s#*\[]{0,8}(?i:next\s)?|\s(?=[QP])|<\|)
    (?: (?i:question|problem|instruction|human|user|问题|题目|(?-i:Q))[\s*\]]{0,4}[:：]
    | (?:(?<=[#\[])|(?<=[#\[]\s))(?i:question|problem)[*\]]{0,3}\s
    | (?<=\n)user\s | (?<=<\|)user\|> )""",
    re.VERBOSE,
)
_SIGN_OF_LABEL = re.compile("nswer|NSWER|inal|esult|hoice|ption|orrect|答|结果|답")
_LABEL = re.compile(
    rf"""\banswers?\b
        (?:\s(?:to|for|of|in|we|i|that|here|then|must|would|should|will)\b[^.\n:=!?$]{{0,80}}?)??
        [\s*_`"')]{{0,4}}
        (?:{phrases("states")}\b(?:\s?:)?|[:：]|=>?|[-=]>|(?=\s{phrases("wavers")}\b))
    | (?P<part>\banswer\s\(?[A-H1-9]\)?\s?[:：=])
    | \b(?:so|thus|hence|therefore),?\s(?:it\sis\s|it['’]s\s)?(?=(?:option|choice)\s\(?[A-H]\b)
    | \b(?:correct|right)\s(?:choice|option|value|number|result)\s{phrases("states")}\b
    | (?:^|[.\n])[\s#>*_-]{{0,8}}(?:final(?:\ result|\ value)?|result)[*_\s]{{0,4}}[:：]
    | ^[\ \t>#*_0-9.)]{{0,8}}(?:the\ |my\ )?(?:final\ )?(?:answer|result)s?[\ \t*_:.]*$
    | (?:答案|结果|答え|정답|답)\s*(?:[是为為はは은는]|：|:|=){{1,3}}""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_NO_LABEL = re.compile(rf"\b{phrases('no label', 'others say')}\b[^,]*$", re.IGNORECASE)
# What stands before a label in its sentence: "If the tank were empty, " or "With 5 of them, " of
# "With 5 of them, the answer would be"; and what stands after it: " if the tank were empty"
_CASE_BEFORE = re.compile(
    r"""(?:^|[.!?]\s)[^\w\n]*(?:(?:and|but|also|however|even|note(?:\ that)?)[,:]?\ )?
    (?: (?:if|when(?!\ (?:we|you|i|all)\b)|unless|had|were|without|suppose|supposing)\b
    | [^.!?\n]*\binstead\b | (?:with|for)\b[^.!?\n]*\bwould\b )(?:[^.!?\n]|\.(?!\s))*\Z""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_CASE_AFTER = re.compile(r"[^.!?\n]{0,200}\b(?:if|unless|instead)\b(?! of\b)", re.IGNORECASE)
_DENIED_LABEL = re.compile(
    rf"\b(?:{phrases('doubt', 'could')}|false|untrue|never)\b[^,;:]{{0,40}}$", re.IGNORECASE
)
_OPENING = re.compile(
    r"(?:```[a-z]*\n|`(?!`\w)|[\s*_)\]}:#]|={3,}|-{3,}|(?<=\n)>|(?<=\n\s)>|[\"'](?=[\s*:]))*"
)
# The lines of a list after a label, and what a line says.
LINE = r"[ \t]*(?:(?:[-–*•]|[0-9]{1,2}[.)]|\(?[a-h1-9]\))[ \t]+|・[ \t]*)(\S[^\n]*)"
_LIST = re.compile(rf"[\s*_]*\n(?:{LINE}(?:\n+|\Z))+")
_RULED_OUT = re.compile(
    r"[✗✘❌]|\([^()]*\b(?:extraneous|reject|rejected|invalid|discarded)\b", re.IGNORECASE
)
_FORMULA_PART = r"(?:[^=:A-Za-z]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))"
# An item that is a value, with a name or a unit: "x = 3", "5 apples"
_PLAIN = re.compile(
    r"(?:(?P<name>[A-Za-z](?:_\{?\w+\}?)?)\s?=\s?)?"
    rf"{_FORMULA_PART}*[0-9]{_FORMULA_PART}*"
    r"(?:(?<=\s)[a-z]{2,}(?:\s[a-z]+){0,2})?"
)
_PART = re.compile(
    r"[^=:\n]*[A-Za-z]{2}[^=:\n]*:\s*(?:[A-Za-z]\s?=\s?)?[-−$0-9][^=:A-Za-z]*[a-z\s]*"
)
_TOTAL = re.compile(
    r"\W*(?:grand\s|the\s)?(?:total|sum|altogether|overall|in all|answer|result)\b", re.IGNORECASE
)
_EXPLAINS = re.compile(r"\W*(?:explanation|because|since|reason\w*|check|note|as)\b", re.IGNORECASE)
_WORD = re.compile(r"(?<![\\A-Za-z])[a-z]{2,}")
_STATES = re.compile(rf"=|\b(?:is|are|was|were|will|can|has|have|had|costs?|{phrases('acts')})\b")
_CONCLUDES = re.compile(
    r"\b(?:so|thus|hence|therefore|total|altogether|finally|answer)\b[^\n]*[0-9]", re.IGNORECASE
)
_HAS_VALUE = re.compile("[0-9\ue000-\uf8ff]")
_FILLER = re.compile(rf"(?:(?:{phrases('filler')}\b|[≈:])[\s,:]*)*", re.IGNORECASE)
_RESTATED = re.compile(rf".*(?:\b{phrases('restates')}\b|=)\s*(?={_VALUE})", re.DOTALL)
_INSTEAD = re.compile(
    rf",?\s+(?:(?:and|but)\s+)?{phrases('instead')}\s+(?:(?:option|choice)\s+)?{_VALUE}.*",
    re.DOTALL,
)
NOTE = re.compile(
    r"""(?<=[^\s(])[*_]*\s+\((?!\s*(?:mod\b|[-−0-9.]+\s*,))
    (?: (?=[=≈~]|[^()]{0,300}\b(?!oo\b|inf)[A-Za-z]{2,})
    # The computation of 17 students (20 - 3), but not of tan (20 - 3)
    | (?<=[a-z]{2}\s\()(?<!(?:sin|cos|tan|log)\s\()(?=[0-9.,$\s]+[-+−*/×÷][-+−*/×÷=0-9.,$\s]+\)) )
    (?:[^()]|\([^()]{0,100}\)){1,300}\)""",
    re.VERBOSE,
)
# Another way to write the answer, or another answer: "1/2 (or 0.5)"
_OR_NOTE = re.compile(r"\s\((?:or|i\.e\.,?)\s([^()]*)\)")
_REASON = re.compile(rf"\s*,?\s+{phrases('reason')}\b", re.IGNORECASE)
_REMARK = re.compile(
    rf"""\s*,?\s+{phrases("remark")}\b | [,;]\s+(?!{phrases("continues")}\b)[a-z]{{2,}}
    | \s*[–—]\s*(?=[A-Za-z]{{3}})""",
    re.IGNORECASE | re.VERBOSE,
)
_SPACES = re.compile("(?:[^\\S\n]|[\ue000-\uf8ff])+")  # private characters stand for formulas
_NUMBERED_HEADING = re.compile(
    r"""[\s*_]*\(?[0-9]{1,3}(?:\.[0-9]{1,3}){0,3}(?: [.):]\s+(?![-0-9$\\])\S | \s+(?:[-–—]\s+)?
    (?:Check|Verif|Solu|Solve|Step|Conclu|Summ|Result|Final|Answer|Calc|Compu|Find|Determ|Use|Apply
    |Set|Defin|Simpl|Anal|The|Note|Expl)[a-z]* )""",
    re.VERBOSE,
)
_WORDS_FIRST = re.compile(
    r"""[\s*_]*(?!(?:a?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp|sqrt|abs|max|min|gcd|lcm|pi)\b)
    [A-Za-z]{2}""",
    re.VERBOSE,
)
_FINAL_SIGN = re.compile(
    r"(?<!\.)[.,:。।；：]\Z|(?<=\.)[,。]\Z|(?<!&quot)(?<!&gt);\Z|\s?(?:です|입니다|이다)[.。]?\Z"
)
_DOLLAR = re.compile(r"(?<!\\)\$")
# Decoration after an answer: check marks, emoji.
_SYMBOLS = " ∎■□✅✓✔☑✨⭐\ufe0f" + "".join(map(chr, range(0x1F300, 0x1FB00)))


class Mark(NamedTuple):
    """A mark of an answer in a text."""

    kind: str
    """box, tag, json, line (`####`), label ("the answer is"), case ("if x is 1, the answer is"), or
    cut: a box or a second tag without its end.
    """
    start: int
    end: int
    inner: tuple[int, int] = (0, 0)
    """Where the answer is; empty when it ends with its line or sentence."""


def stated_answer(text: str) -> str | None:
    """Returns the last answer that a text states, cleaned.

    None when it states none. "" when it states one that cannot be read: hedged, denied, or longer
    than `MAX_ANSWER_CHARS`; then nothing else in the text may be taken for the answer.
    """
    marks = _marks(text)
    closed = [mark.end for mark in marks if mark.kind != "line"]
    # After a box, only a later statement counts, and only one of a value.
    position = max(closed, default=0)
    if _SIGN_OF_LABEL.search(text, position):
        marks = _with_labels(text, marks, position)

    lines = [mark for mark in marks if mark.kind == "line"]
    if len(lines) > 1 and marks[-1] == lines[-1] and not text[lines[-1].end :].strip():
        return ""  # the last line was cut

    while marks:
        mark = marks[-1]
        content = text[slice(*mark.inner)]
        answer: str | None = ""  # if it was cut
        if mark.kind == "box":
            answer = _boxed(text, marks)
        elif mark.kind in ("json", "tag"):
            content = content.replace("\\\\", "\\") if mark.kind == "json" else content
            answer = stated_answer(content)
            if answer is None:
                passage = _without_marks(content)
                answer = passage and clean(passage)
        elif mark.kind == "line":
            answer = _line(text[mark.end : mark.end + 2 * MAX_ANSWER_CHARS], alone=len(marks) == 1)
        elif mark.kind in ("label", "case"):
            answer = _labelled(text, mark, words=not closed)
        if answer is not None:
            return answer if len(answer) <= MAX_ANSWER_CHARS else ""
        marks.pop()
    return None


def before_next_question(text: str, value_of: Callable[[str], str | None]) -> str:
    """Returns the text up to a heading "Question:" (or "Problem:", "Q:", "User:") that follows a
    complete answer: from there on, the model makes up the next problem. A computation that ends
    with a value, which `value_of` finds, is complete without a label.
    """
    if not _SIGN_OF_QUESTION.search(text):
        return text
    for asked in islice(_NEXT_QUESTION.finditer(text), _MAX_QUESTIONS):
        head = text[: asked.start()]
        if stated_answer(head) or (
            re.search("[0-9)] ?=|^A:", head, re.MULTILINE) and value_of(head)
        ):
            return head
    return text


def last_box(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{…}` (or `\fbox{…}`), together with the boxes that it
    continues (`\boxed{2}` or `\boxed{3}`). Returns None if there is no box or the last is cut.
    """
    boxes = [mark for mark in _marks(text) if mark.kind in ("box", "cut")]
    if not boxes or boxes[-1].kind == "cut":
        return None
    last = text[slice(*boxes[-1].inner)].strip()
    joined = _joined(text, boxes)[1]
    # "a or b" without names is one answer, written in two ways.
    return last if joined.endswith(f" or {last}") else joined


def _marks(text: str) -> list[Mark]:
    """Returns the boxes, tags, answers in JSON and `####` lines in the order they end."""
    marks: list[Mark] = []
    for member in _JSON.finditer(text):
        inner = member.span("text" if member["quote"] else "bare")
        marks.append(Mark("json", *member.span(), inner))
    braces: list[re.Match[str] | None] = []  # open ones: a box's, or None for any other
    tag: re.Match[str] | None = None
    for match in _TOKEN.finditer(text):
        found = match.group()
        start, stop = match.span()
        if found == "####":
            marks.append(Mark("line", start, stop))
        elif match["bare"]:
            marks.append(Mark("box", start, stop, match.span("bare")))
        elif match["box"] or found == "{":
            braces.append(match if match["box"] else None)
        elif found == "}":
            box = braces.pop() if braces else None
            if box is not None:
                marks.append(Mark("box", box.start(), stop, (box.end(), start)))
        elif match["closes"] == "":
            tag = match
        elif match["closes"] and tag is not None:
            marks.append(Mark("tag", tag.start(), stop, (tag.end(), start)))
            tag = None
    # What has no end was cut. A tag alone may have lost its end to a stop string.
    unclosed = filter(None, (*braces, tag if marks else None))
    marks += [Mark("cut", *opening.span()) for opening in unclosed]
    return sorted(marks, key=attrgetter("end"))


def _with_labels(text: str, marks: list[Mark], position: int) -> list[Mark]:
    """Returns the marks together with the labels from `position` on, in the order they end. What
    holds only in a case is left out where something is stated without it, and counts as cut where
    each of several cases has its answer.
    """
    for label in list(_LABEL.finditer(text, position))[-_MAX_LABELS:]:
        before = text[max(0, label.start() - 200) : label.end()]
        is_case = (
            label["part"]  # of several: "Answer A: 17, Answer B: 18"
            or _CASE_BEFORE.search(before)
            or _CASE_AFTER.match(text, label.end())
        )
        marks.append(Mark("case" if is_case else "label", *label.span()))
    marks.sort(key=attrgetter("end"))
    stated = [mark for mark in marks if mark.kind != "case"]
    return stated or (marks if len(marks) < 2 else [Mark("cut", 0, 0)])


def _joined(text: str, marks: list[Mark]) -> tuple[int, str]:
    r"""Returns where a list of boxes begins that ends with the last mark (`\boxed{2}` or
    `\boxed{3}`), and their contents, joined.
    """
    begin = marks[-1].end
    joint = ", "
    contents: list[str] = []
    for mark in islice(reversed(marks), MAX_ANSWER_CHARS):
        if contents:
            between = _TYPESETTING.sub("", text[mark.end : min(begin, mark.end + 80)])
            if mark.kind != "box" or not _BETWEEN_BOXES.fullmatch(between):
                break
            # Without names, `2 or 3` may be two ways to write one answer.
            joint = " or " if "or" in between and "=" not in between else ", "
        begin = mark.start
        contents.append(text[slice(*mark.inner)].strip())
    if _BLANK.fullmatch(contents[0]):
        return begin, ""
    return begin, joint.join(dict.fromkeys(filter(None, reversed(contents))))


def _boxed(text: str, marks: list[Mark]) -> str:
    r"""Returns the content of the last box and what its formula joins to it: -7 of `-\boxed{7}`.
    Returns "" if the box is empty, or its sentence denies or doubts it.
    """
    begin, answer = _joined(text, marks)
    stop = marks[-1].end
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return answer
    left = text[max(0, begin - _CONTEXT_CHARS) : begin].rpartition("\n\n")[2]
    right = text[stop : stop + _CONTEXT_CHARS]
    if _DENIED_BEFORE.search(left[-100:].lower()) or _DENIED_AFTER.match(right):
        return ""

    head = re.findall(r"(?:(?:(?<==)|(?<=:)|(?<=\bis))\s*[-−–]\s+|\S*)\Z", left[-100:])[0]
    tail = re.split(r"\s", right[:100], maxsplit=1)[0].rstrip(".,;:!?")
    for formula in _FORMULA.finditer(left + text[begin:stop] + right):
        if formula.start() < len(left) < formula.end():  # the box stands in a formula
            head = _SIDE_END.split(left[formula.start() :])[-1]
            tail = _SIDE_END.split(right, maxsplit=1)[0]
            break
    scale = _SCALE.match(right)
    if _JOINED_BEFORE.search(head) or _JOINED_AFTER.match(tail):
        is_compound = re.search(r".[-+=,]", answer)
        answer = head + (f"({answer})" if is_compound else answer) + tail
    elif scale:
        answer = f"{answer} {scale[1]}"
    otherwise = _OTHERWISE.match(right)
    return clean(f"{answer} or {otherwise[1]}" if otherwise else answer)


def _line(rest: str, alone: bool) -> str | None:
    """Returns the answer on a `####` line: "" if what follows denies it, None for a heading, such
    as `#### 2. Check`. A line of words is an answer only if it is the only mark (`alone`) and the
    last line.
    """
    line, _, after = rest.partition("\n")
    is_words = _WORDS_FIRST.match(line) and (not alone or after.strip())
    if is_words or _NUMBERED_HEADING.match(line):
        return None
    if _DENIED_AFTER.match(after):
        return ""
    return _shortened(*masked(line))


def _labelled(text: str, label: Mark, words: bool) -> str | None:
    """Returns what "the answer is …" states. Returns None for prose without a value; with `words`,
    up to three words without a value are an answer too.
    """
    clause = re.split(r"[.!?;\n]", text[max(0, label.start - 200) : label.start])[-1]
    if _NO_LABEL.search(clause):
        return None
    if _DENIED_LABEL.search(clause):
        return ""

    rest = text[label.end : label.end + 2 * MAX_ANSWER_CHARS]
    is_heading = re.search(r"[:：][\s*_]*\Z", text[: label.end][-8:]) or rest.lstrip(
        " *_"
    ).startswith("\n")
    passage = _without_marks(rest)
    if passage is None or (rest and not passage):
        return passage
    sentence, formulas = masked(_OPENING.sub("", passage, count=1))
    end = SENTENCE_END.search(sentence)
    more = ""
    if end:
        more = sentence[end.end() :]
        is_asked = end.group() == "?" and re.match(rf"[\"'“‘«„]?{_VALUE}", sentence)
        if is_asked or _DENIED_AFTER.match(sentence, end.end()):
            return ""
        sentence = sentence[: end.start()]
    sentence = _FILLER.sub("", sentence, count=1)
    if "\\boxed" in sentence:
        return None  # a box without its end
    starts_with_words = re.match(r"[A-Za-z]{2,}(?![A-Za-z]|\s?[(=/^*+_\\])", sentence)
    is_prose = starts_with_words or (len(_WORD.findall(sentence)) > 1 and _STATES.search(sentence))
    if is_heading and is_prose and _HAS_VALUE.search(sentence) and _HAS_VALUE.search(more):
        return None  # the first sentence of a solution
    if starts_with_words:
        restated = _RESTATED.match(sentence)
        if restated is None or _ALTERNATIVE.search(restated.group()):
            sentence = _REASON.split(NOTE.sub("", sentence))[0]
            has_value = _HAS_VALUE.search(sentence)
            # What has a value is kept whole: nothing in it may be guessed.
            is_answer = has_value or (words and len(sentence.split()) <= 3)
            return clean(unmasked(sentence, formulas)) or None if is_answer else None
        sentence = sentence[restated.end() :]
    return _shortened(sentence, formulas)


def _without_marks(text: str) -> str | None:
    """Returns the items of a list that a text begins with, joined, and any other text as it is.
    Returns "" for a list of parts with names, and None for one of statements: both are no answer.
    """
    found = _LIST.match(text)
    if not found:
        return text
    items = [clean(item.replace("**", "")) for item in re.findall(rf"\n{LINE}", found.group())]
    after = text[found.end() : found.end() + 2 * MAX_ANSWER_CHARS]
    if len(items) == 1:
        return f"{items[0]}\n{after}"
    if _CONCLUDES.search(after):
        return None
    joined = joined_items(items, are_solutions=True)
    are_words = not any(map(_HAS_VALUE.search, items))
    is_explained = joined_items(items[:1], are_solutions=True) and _EXPLAINS.match(items[1])
    if are_words or is_explained:
        return ", ".join(items)
    are_parts = all(len(item) < _MAX_ITEM_CHARS and _PART.fullmatch(item) for item in items)
    return "" if are_parts and not _TOTAL.match(items[-1]) else joined


def joined_items(items: Sequence[str], are_solutions: bool) -> str | None:
    """Returns the values of a list as one answer, without those that it rules out; None if a line
    says more than a value, with a name or a unit.

    Args:
        items: the lines, without their marks.
        are_solutions: whether values of different names belong together.
    """
    ends = _SYMBOLS + ".,;"
    kept = [each.replace("**", "").strip(ends) for each in items if not _RULED_OUT.search(each)]
    if not kept or max(map(len, kept)) > _MAX_ITEM_CHARS:
        return None
    plain = [
        _PLAIN.fullmatch(re.sub(r"\\(?:[A-Za-z]+|[(),\[\]])|[$*]", "", item).strip(" .,;"))
        for item in kept
    ]
    names = {match["name"] for match in plain if match}
    if not all(plain) or (len(names) > 1 and not are_solutions):
        return None
    return ", ".join(kept)


def _shortened(sentence: str, formulas: list[str]) -> str | None:
    """Returns an answer without the remarks and reasons after it. Returns "" if these hedge, and
    None if nothing is left.
    """
    sentence = _INSTEAD.sub("", re.sub(r"(?<!\w)\*\*|\*\*(?!\w)", "", sentence))
    sentence = _OR_NOTE.sub(r", or \1", sentence)
    if any(map(_ALTERNATIVE.search, NOTE.findall(sentence))):
        return ""
    sentence = _REASON.split(NOTE.sub("", sentence))[0]
    if _HEDGE.search(sentence):
        return ""
    remark = _REMARK.search(sentence, 1)
    if remark:
        before = sentence[: remark.start()]
        if before.count("{") <= before.count("}"):  # not in \text{ of the pie}
            sentence = before
    return clean(unmasked(sentence, formulas)) or None


def masked(text: str) -> tuple[str, list[str]]:
    """Returns the text with each formula replaced by one private-use character, and the formulas.
    The dots and commas of a formula then end no sentence.
    """
    formulas: list[str] = []

    def hide(formula: re.Match[str]) -> str:
        formulas.append(formula.group())
        return chr(FIRST_MASK + len(formulas) - 1)

    return _FORMULA.sub(hide, _SPACES.sub(" ", text)), formulas


def unmasked(text: str, formulas: list[str]) -> str:
    """Puts the formulas back into a masked text, without their delimiters."""

    def content(mask: re.Match[str]) -> str:
        formula = formulas[ord(mask.group()) - FIRST_MASK]
        return _FORMULA.sub(lambda match: next(filter(None, match.groups()), ""), formula)

    return re.sub("[\ue000-\uf8ff]", content, text)


def clean(answer: str) -> str:
    """Removes decoration from an answer: math mode, bold type, final punctuation. Currency signs
    stay: they are units.
    """
    text = answer
    for _ in range(3):  # decorations nest: **\(42\).**
        text = re.sub(r"\A`{1,2}([^`']*)'{1,2}\Z", r"\1", text)  # TeX quotes
        text = text.rstrip(_SYMBOLS).strip().strip("*_`").strip()
        is_money = len(_DOLLAR.findall(text)) == 1 and re.search(r"\$[-\s]*[0-9.]", text)
        text = _FINAL_SIGN.sub("", text if is_money else _DOLLAR.sub("", text))
        if text.startswith(("\\(", "\\[")) and text.endswith(("\\)", "\\]")):
            text = text[2:-2]
    return text.replace("\\$", "$").rstrip("\\ ").strip()
