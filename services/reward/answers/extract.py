"""Finds the final answer of a response: the one that it states (`common.prompts.stated_answers`),
else the last value of the last sentence with a value.

Every step takes time linear in the length of any text: responses are untrusted.
"""

import calendar
import re
from itertools import pairwise

from common.prompts.answer_text import answering_part
from common.prompts.numerals import in_digits
from common.prompts.phrases import phrases
from common.prompts.stated_answers import (
    DOUBT,
    FIRST_MASK,
    LINE,
    MAX_ANSWER_CHARS,
    NOTE,
    SENTENCE_END,
    before_next_question,
    clean,
    joined_items,
    masked,
    stated_answer,
    unmasked,
)
from services.reward.answers.exact import quantity, same_answer
from services.reward.answers.golds import repaired, with_single_backslashes
from services.reward.answers.units import MEASURE

_VALUE = (
    r"(?:(?:(?<==)|(?<=:)|(?<=\bis)|(?<=equals)|(?<=\*\*))\s*[-−–]\s+"
    r"|\A\s*[-−–]\s+(?=[0-9.]+\s*\Z)|(?<![\w)}.])[-−])?\\?[$€£¥]?"
    r"(?:\\[dt]?frac\{-?[0-9]+\}\{-?[0-9]+\}|(?:(?<![0-9])[0-9]{1,9}\s?\*?\s?)?sqrt\([0-9]{1,9}\)"
    # a 1 in 4 chance, 2 and 3/4 cups, 1:05 pm
    r"|(?<![0-9])[0-9]{1,9}\s(?:in|out\sof)\s(?:every\s)?[0-9]+(?=\s(?:chance|probability)\b)"
    r"|(?<![0-9])[0-9]{1,9}\sand\s[0-9]/[0-9]{1,2}\s[a-z]{2,}"
    r"|(?<![0-9:])[0-9]{1,2}:[0-5][0-9]\s?[AaPp]\.?[Mm]\b"
    r"|(?:(?:[0-9]{1,3}(?:(?:,|\{,\}|,\\!|\ )[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"|(?<![0-9])\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
    r"(?:(?:\ [0-9]+)?/[0-9]+(?![0-9]|\.[0-9]))?)"
    rf"(?:\s?\\?%|\s(?:dozen|hundred|thousand|million|billion|trillion)\b"
    # its measure: 5 "km per hour"
    rf"|\s(?:(?:square|cubic|sq|cu)\.?\s)?{MEASURE}s?(?:\^?[23²³]|\s(?:squared|cubed))?"
    rf"(?:(?:\s?/\s?|\sper\s){MEASURE}s?)?(?![\w'’/&-]))?|[\ue000-\uf8ff]"
)
_VALUES = re.compile(_VALUE)
_BOLD = re.compile(r"(?<![\w*])\*\*(?![\s*])([^*\n]{1,200}?)(?<![\s:])\*\*(?![\w*:])")
_CHOICE = re.compile(r"\(?[A-H][).:]\s\S")  # "A) 0.3"
_LAST = re.compile(r".*(?:[0-9$]|\\[\])]|\*\*|\})", re.DOTALL)
_WINDOW_CHARS = 4096
_FEW_DIGITS = 20
_VERB = rf"\b{phrases('starts anew')}\b"
_ANEW = re.compile(rf"[=:;,]|{_VERB}", re.IGNORECASE)
_HEDGE_BEFORE = re.compile(
    rf"n['’]t\b|[<≠≤≥]|(?<![=-])>(?!\s*\*\*)|\b{phrases('doubt', 'could', 'limits')}\b|\bno\s*\Z"
    r"|(?<!from )(?<![0-9.])[0-9][0-9.]*\s+(?:to|in)\s*\Z"
    r"|(?:不|没|可能|也许|或许|大概|大约|至少|至多|超过)[^,;:=]{0,8}\Z",
    re.IGNORECASE,
)
_SAYS = rf"\b(?=[a-z]+\s(?:[^a-z]|\Z))(?:{phrases('acts')}|equals|gives)\s"
_DENIED_OR_SUPPOSED = re.compile(  # such as: We cannot have exactly; if there were
    rf"(?:\b|(?=n['’]t)){phrases('denies')}(?:\s+(?!but\b|and\b|{_VERB})\w+){{0,2}}"
    rf"\s+{_VERB}(?:(?!{_VERB})[^=:;,])*\Z"
    r"|\b(?:if|unless|whether|suppose|assum(?:e|ing))\b(?:(?!\bthen\b)[^,;:=])*\Z"
    # the second of two claims, of which a reader cannot choose one: He paid $8 and got
    rf"|{_SAYS}(?:{_VALUE})(?=[^=:;]*\b(?:and|while|whereas)\s)"
    rf"(?:(?!\b(?:so|thus|hence|therefore|then|which|total|together)\b)[^=:;]){{0,260}}{_SAYS}\Z",
    re.IGNORECASE,
)
_SIGN_IN_WORDS = re.compile(
    rf"(\A\s*|\b(?:{phrases('states', 'restates', 'starts anew', 'filler')}"
    r"|to|of|at|by|from|now|still)\s+)"
    r"(?:minus|negative)\s+(?=[$€£]?\.?[0-9])",
    re.IGNORECASE,
)
_HEDGE_AFTER = re.compile(
    rf"""\W*(?:{phrases("limits after")}\b|\?) | .*\?\s*\Z | \s+\w+\s+or\s+(?:so|more|less|fewer)\b
    | ,?\s+(?:which|but\s(?:that|this|it))\s(?:is|was)\s(?:wrong|incorrect|false|not|impossible)\b
    | [^=.,;:]{{0,30}}\b(?:is|was|are|were|would\ be)\s(?:wrong|incorrect|false|impossible)\b
    | [^=.]{{0,12}}\b(?:maybe|perhaps|possibly|guess|not\ sure|unsure)\b""",
    re.IGNORECASE | re.VERBOSE,
)
_CLAUSE = re.compile(r"[,;:]|\b(?:so|thus|hence|therefore|but)\b", re.IGNORECASE)
_SUBORDINATE = re.compile(
    rf"""(?<=[\w*)°%\ue000-\uf8ff])\s*,?\s+(?:
    (?:since|because|although|though)\b(?:[^,:]|,(?=[0-9]))*
    | (?:(?:after|by)\s\w+ing|after|from|when)\b
        (?:(?!{_VERB})[^,:;=]|,(?=[0-9]))*\Z)
    # 42, including 5; 42, which is 8 fewer than before
    | ,\s(?:including|excluding|counting|which\sis\s(?:{_VALUE})\s(?:more|less|fewer)\b)
        (?:(?!{_VERB})[^:;=])*\Z
    # 42, of which 8 are red
    | ,\s(?:[a-z]+\s)?of\s(?:which|whom|them)\b[^:;=]*\Z
    # 1/4 (25%); 0.25, or 25%; 25%, or 1/4
    | (?<=%)(?:\s\(=?\s?[0-9./]+\)|,?\s(?:or|which\sis|i\.e\.,?)\s[0-9./]+(?![0-9./%\w]))
    | (?<=[0-9}}\ue000-\uf8ff])(?:\s\(=?\s?[0-9.]+\s?\\?%\)
        |,?\s(?:or|which\sis|i\.e\.,?)\s(?:about\s)?[0-9.]+\\?%)
    # 18, not 20
    | ,\s(?:{phrases("instead")}|nicht|não|no|non|pas|не)\s(?:{_VALUE})(?=[\s*]*\Z)
    # 9 of the 12, and not half or a quarter of it
    | (?<=[0-9])(?<![/.][0-9])(?<![/.][0-9]{{2}})\s(?:out\s)?of\s
        (?:(?:the|his|her|its|their|our|my|these|those)\s)?
        [0-9][0-9,]*\b(?!\s(?:chance|probability)\b)""",
    re.VERBOSE,
)
# The circumstances of a value may have values of their own: 45 "minutes to clean the 3 rooms".
_LEADS = phrases("leads to a value")
_NOUN = (  # of 5 "red boxes of tea" and $42 "each week"
    rf"(?:[\s-](?:(?:of|each|every|per|a)\s(?=[a-z]))?(?!{_LEADS}\b|{_VERB})"
    r"[^\W\d_][\w'’/]*){0,6}"
)
_CIRCUMSTANCES = re.compile(
    rf"""(?P<value> (?P<computed>=\s*)?+
        # the result of a computation, or a value after a word, or before "are needed to"
        (?(computed) | (?: \A(?=.+\s(?:is|are|was|were)\s[a-z]+\sto\s)
            | \b(?=[a-z]+\s[^a-z])(?:so|(?!{_LEADS}\s)[a-z]+)\s ) )
        (?>{_VALUE}) )
    # After a computation anything is a circumstance but another computation or value.
    (?(computed) (?=\s)(?!\s?[-−–+*/×÷^x]\s|\s(?:{_VALUE})\s?[-−–+*/×÷^=])
        (?!.*\s(?:or|so|which)\b|{_NOUN}\sand\b)
        (?:{_NOUN}\s(?:is|are|was|were)(?=\s[a-z]))?
    | {_NOUN}(?:\s(?:is|are|was|were)(?=\s[a-z]+\sto\s)\s[a-z]+)?
        # 42 seats in the hall, 6 in each row
        (?: (?:\s(?:of|on|in|at|for)(?:\s[a-z]+){{1,2}})?
            ,\s(?:{_VALUE})\s(?:in|for|per|of|on|at|from|each|to|with|by|[a-z]+(?:ing|ed))\b
        | ,?\sfrom(?=\s\S+\sto\s)
        | \s(?: (?<=[a-z]\s)(?:out\s)?of(?=\s\$?[0-9]) | between | per | each | every
            | (?:for|in|than|over|on|at)\s(?:the|all|each|these|those|his|her|their|\$?[0-9]+)\b
            | to\s(?!make|get\b(?!\sto)|reach|give|obtain|a\b|the\b)[a-z]+ ) ) )
    # up to the end, without a verb that states something
    \s(?:(?!{_VERB}|and\s{phrases("acts")}\b|(?<!in\s)total\b)[^=:;,]
        |[,:](?=[0-9])){{0,200}}\Z""",
    re.IGNORECASE | re.VERBOSE,
)
# A value and what it is computed from: "$18 (9 * 2)"
_COMPUTATION = re.compile(rf"(?<![0-9.,])({_VALUE})\s\(([0-9$][^()]{{1,80}})\)")
# "3 + " of a computation without its value
_UNFINISHED = re.compile(r"(?:(?:[0-9)]|\b[a-z])\s[-−–]|[0-9a-z)²³]\s[+*×÷/]|[0-9]\sx)\s\Z")
_ITEM = rf"(?:[A-Za-z]\s?=\s?)?(?:{_VALUE})"
_LISTED = re.compile(
    rf"""(?:\A|[=:]|\b(?:[Ss]o|[Tt]hen|[Tt]hus|[Hh]ence|[Tt]herefore|gives)\b(?=[^,]*\Z)
        |\b(?:is|are|es|son|ist|sind|est|sont|é|são|è|sono)\b)[\s*]*
    ((?:{_ITEM}\s*(?:[,;]\s+|(?<=\s))(?:(?:or|and|oder|und|o|y|ou|et|e|или|и)\s+)?){{1,20}}
    {_ITEM})\Z""",
    re.VERBOSE,
)
# The lines of a list at the end of a text, each with its mark, and what makes them solutions.
_LINES = re.compile(rf"(?:\n+{LINE}){{1,20}}(?=[^0-9]*\Z)")
_SOLUTIONS = re.compile(r"\b(?:solution|root|value|answer|zero)s?\b[^\n]*\Z", re.IGNORECASE)
_MONTH = rf"(?:{'|'.join(filter(None, (*calendar.month_name, *calendar.month_abbr)))})\b\.?"
# A tuple, a date, or 1 hour and 30 minutes: its numbers are no answers by themselves.
_WHOLE = re.compile(
    rf"[(\[]\s*(?:(?:{_VALUE})\s*,\s*){{1,20}}(?:{_VALUE})\s*[)\]]"
    # not within a number, which may be long
    rf"|(?=[^\sA-Za-z])(?<![0-9.,])(?:{_VALUE})"
    rf"(?:(?<=[a-z])(?:,?\s(?:and\s)?(?:{_VALUE})(?<=[a-z])){{1,3}}"
    rf"|(?:\s(?!{_LEADS}\b|{_VERB})[a-z]+,?(?:\s(?:{_VALUE}))?){{1,9}}\sand\s(?:{_VALUE})\s[a-z]+)"
    rf"|(?:\b[0-9]{{1,2}}(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH}"
    rf"|\b{_MONTH}\s+[0-9]{{1,2}}(?:st|nd|rd|th)?\b)(?:,?\s+[0-9]{{4}})?"
)
_ALIGNED = re.compile(r"\\begin\{(?:align|gather|split|eqnarray|multline)")
# A row ends at `\\` outside a matrix.
_ROW_END = re.compile(
    r"\\\\(?!(?:(?!\\begin).)*\\end\{[a-z]*matrix)|\\end\{(?!\w*matrix)\w+\*?\}\s*\Z", re.DOTALL
)
_WORD = re.compile(r"(?<![\\{A-Za-z])[A-Za-z]{2,}")
_SMALL_NUMBER = (
    r"(?:zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
    r"|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty(?:-[a-z]+)?)"
)
# A whole number in words: "forty-two", "one hundred and twenty".
_NUMBER_WORD = re.compile(
    rf"\b(?:{_SMALL_NUMBER}|(?:one|a)\s(?:hundred|thousand|million))"
    rf"(?:\s(?:(?:hundred|thousand|million)|(?:and\s)?(?:{_SMALL_NUMBER}|one)))*\b(?! of\b)"
)
_REFUSED = re.compile(
    r"""\bI(?:['’]m|\sam|\swas)?
        \s(?:can['’]?t|can\s?not|could\snot|couldn['’]t|(?:un|not\s)able\sto)
        \s(?:solve|answer|help(?!\sbut)|determine)\b
    | (?:ot\senough|nsufficient)\sinformation""",
    re.VERBOSE,
)
# A sentence that restates the question, or says what others think.
_ASKS = re.compile(
    r"\b(?:asks?|asked|asking|want(?:s|ed)? to know|need to (?:find|know)|wonder\w*)\b"
    rf"[^.]{{0,60}}\bhow (?:many|much)\b|\b{phrases('others say')}\b",
    re.IGNORECASE,
)
# A response that is nothing but its answer: "(B)", "Option B.", "B) 14", "Yes, it is."
_BARE = re.compile(
    r"""[\s*_$]*(?:I\s(?:choose|pick|select)\s)?(?:(?:[Oo]ption|[Cc]hoice)\s)?
    (\(?[A-H]\)? | \(?[A-H][).](?:\s[^\s*_$]+){1,4} | (?i:yes|no|true|false))[\s*_$]*
    (?:[.,;:!—–](?!.*\b(?:[A-H]|(?i:yes|no|true|false))\b)[^0-9]*)?""",
    re.DOTALL | re.VERBOSE,
)
# "Josh made a profit of $70,000", as it stands under a heading "Final Answer"
_CLAUSE_WITH_VERB = re.compile(
    rf"""(?:(?i:I|he|she|it|we|they|you|there)|(?:The|His|Her|Their|Each|[A-Z][a-z]+['’]s)\s\w+)\s
        (?:\w+\s)?(?:{phrases("acts")}|[a-z]{{3,}}(?:s|ed))\b
    | [A-Z][a-z]+\s(?:and\s[A-Z][a-z]+\s)?{phrases("acts")}\b""",
    re.VERBOSE,
)
_OPTIONS = re.compile(r"\(?[A-H]\)?(?:,? or \(?[A-H]\)?)+")
_ROUGHLY = re.compile(r"(?:approximately|about|roughly|≈|\\approx)")
_OTHERWISE = re.compile(r",?\s+or\s+(?:alternatively,?\s+)?|,\s+i\.e\.,?\s+")


def extract_answer(response: str) -> str | None:
    """Returns the final answer of a response, cleaned. Returns None if there is none, or if it is
    hedged, denied, or longer than `MAX_ANSWER_CHARS`.
    """
    text = in_digits(answering_part(with_single_backslashes(response)))
    text = before_next_question(text, value_of=last_value)
    answer = stated_answer(text)
    if answer is None:
        answer = last_value(text)
    elif _CLAUSE_WITH_VERB.match(answer) and _VALUES.search(answer):
        answer = None if _HEDGE_BEFORE.search(answer) else last_value(answer)
    return _single_answer(answer or "")


def gold_answer(ground_truth: str) -> str | None:
    """Returns the answer in a ground truth, repaired: the one that it states, else all of it.
    Returns None if that is empty, too long, or a list of several texts.
    """
    if ground_truth.isdecimal() and len(ground_truth) < _FEW_DIGITS and ground_truth.isascii():
        return ground_truth  # nearly every one of GSM8K
    text = in_digits(repaired(ground_truth))
    answer = stated_answer(answering_part(text))
    return _single_answer(clean(text) if answer is None else answer)


def _single_answer(answer: str) -> str | None:
    """Returns an answer, or if it is the same one in several forms, the first: 42 days of "42 days,
    or 6 weeks". Returns None if it is empty, too long, or names several options, as "A or B".
    """
    first, *others = _OTHERWISE.split(answer)
    if all(_ROUGHLY.match(other) or same_answer(first, other) for other in others):
        answer = first
    return None if _OPTIONS.fullmatch(answer) or not 0 < len(answer) <= MAX_ANSWER_CHARS else answer


def last_value(text: str) -> str | None:
    """Returns the last value of the last sentence with a value, if it has bold values, the last of
    these; the choice, or yes or no, if the text is nothing else. Returns None if there is none, or
    the sentence hedges or denies it.
    """
    bare = _BARE.fullmatch(text)
    if bare and not DOUBT.search(text):
        return bare[1]
    last = _LAST.match(text)
    if not last:
        return _number_in_words(text)
    window = text[max(0, last.end() - _WINDOW_CHARS) : last.end() + 100]
    window, formulas = masked(_LINES.sub(_without_marks, window))
    if _REFUSED.search(window):
        return None
    window = window.replace("?", " ?. ")  # the mark of a question stays in its sentence
    for sentence in reversed(SENTENCE_END.split(window)):
        if _ASKS.search(sentence):
            continue
        if "inus" in sentence or "egative" in sentence:
            sentence = _SIGN_IN_WORDS.sub(r"\1-", sentence)
        bold = list(_BOLD.finditer(sentence))
        if bold and (_CHOICE.match(bold[0][1]) or not _VALUES.search(sentence)):
            return None if len(bold) > 1 or DOUBT.search(sentence) else clean(bold[0][1])
        ends = [match.end(1) for match in bold if _VALUES.search(match[1])]
        for value in reversed(_asserted(sentence, max(ends, default=len(sentence)))):
            formula = unmasked(value.group(), formulas)
            if formula.strip() and len(_WORD.findall(_VALUES.sub("", formula))) < 2:
                return _value_in_context(value, formulas)
    return None


def _without_marks(lines: re.Match[str]) -> str:
    """Returns the values of a list as one sentence, and other lines without their marks, which are
    no signs.
    """
    items = re.findall(rf"\n{LINE}", lines.group())
    before = lines.string[max(0, lines.start() - 100) : lines.start()]
    joined = joined_items(items, are_solutions=bool(_SOLUTIONS.search(before)))
    amounts = [quantity(clean(item.rpartition("=")[2])) for item in items]
    are_steps = any(one and other and one[0] == other[0] for one, other in pairwise(amounts))
    if joined is None or are_steps:  # x = 12/3, x = 4
        return "".join(f"\n{item}" for item in items)
    return f": {joined}\n"


def _number_in_words(text: str) -> str | None:
    """Returns the only number in a text that writes it in words, unless the text hedges it."""
    words = list(_NUMBER_WORD.finditer(text))
    if len(words) != 1 or _HEDGE_BEFORE.search(text):
        return None
    return None if _HEDGE_AFTER.match(text, words[0].end()) else words[0].group()


def _asserted(sentence: str, end: int) -> list[re.Match[str]]:
    """Returns the values of a sentence up to `end`, without those of notes, of subordinate clauses
    and of the circumstances of another value.
    """
    # What is left out becomes blanks, so that places stay the same.
    shown = sentence
    for aside in (NOTE, _SUBORDINATE):
        shown = aside.sub(lambda match: " " * len(match.group()), shown)
    shown = _COMPUTATION.sub(_without_computation, shown)
    shown = _CIRCUMSTANCES.sub(lambda found: found["value"].ljust(len(found.group())), shown)
    return list(_VALUES.finditer(shown, 0, end))


def _without_computation(found: re.Match[str]) -> str:
    """Returns the value before its computation, "18 (9 * 2)", or an equation, "18 (9 * 2 = 18)".
    3 (4 + 5) stays as it is: a product.
    """
    value, note = found.groups()
    sides = re.sub(r"\bx\b", "*", note.replace("$", "")).split("=")
    amounts = [quantity(side) for side in (value, *sides)]
    is_equation = len(sides) > 1
    is_same = None not in amounts and len({amount[0] for amount in amounts if amount}) == 1
    return value.ljust(len(found.group())) if is_equation or is_same else found.group()


def _value_in_context(value: re.Match[str], formulas: list[str]) -> str | None:
    """Returns a value with everything attached to it, or the list or tuple that it belongs to.
    Returns None if its sentence hedges or denies it.
    """
    sentence = value.string
    listed = _LISTED.search(sentence[: value.end()])
    left = sentence[: listed.start(1) if listed else value.start()]
    if (
        _HEDGE_BEFORE.search(_ANEW.split(left)[-1])
        or _DENIED_OR_SUPPOSED.search(left)
        or _HEDGE_AFTER.match(sentence[value.end() :])
        or DOUBT.search(_CLAUSE.split(left)[-1])
        or _UNFINISHED.search(left)
    ):
        return None
    for whole in _WHOLE.finditer(sentence):
        if whole.start() <= value.start() < whole.end():
            return clean(unmasked(whole.group(), formulas))
    if listed:
        return clean(unmasked(listed[1], formulas))
    found = value.group()
    if ord(found[0]) < FIRST_MASK:
        return clean(unmasked(_with_attached(value), formulas)) or clean(found)

    formula = unmasked(found, formulas)
    if _ALIGNED.search(formulas[ord(found) - FIRST_MASK]):
        rows = [row for row in _ROW_END.split(formula) if row.strip()]
        formula = re.sub(r"&(?=\s*=)|\A[\s&]+", "", rows[-1]) if rows else ""
    return clean(_last_side(formula)) or None


def _with_attached(number: re.Match[str]) -> str:
    """Returns a number with everything attached to it: 3√2 and not 2."""
    text = number.string
    left = text[max(0, number.start() - MAX_ANSWER_CHARS) : number.start()]
    right = text[number.end() : number.end() + MAX_ANSWER_CHARS]
    head = re.findall(r"[^\s：、-鿿가-힣]*\Z", left)[0].rpartition("boxed{")[2].lstrip("([{\"'*_`")
    if head.endswith(("-", "–", "—")) or number.group()[0].isspace():
        head = ""
    tail = re.findall(r"\A[^\s぀-ヿ가-힣]*", right)[0].rstrip(".,;:?!)]}\"'*_`")
    return _last_side(head + number.group() + tail)


def _last_side(formula: str) -> str:
    """Returns the part after the last equals sign; all of an equation in several unknowns."""
    *sides, last = re.split(r"(?<![<>!])=", formula)
    if not last.strip():
        return formula
    for side in sides:
        without_commands = re.sub(r"\\[A-Za-z]+", "", side)
        if len(re.findall(r"[A-Za-z]", without_commands)) > 1:
            return formula
    return last
