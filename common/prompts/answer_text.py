"""The part of a response in which its answer is looked for: without thoughts, comments, and what
the response takes back.

Every step takes time linear in the length of any text: responses are untrusted.
"""

import re

from common.prompts.retractions import RETRACTION

BOX = r"\\(?:A?boxed|fbox|framebox)"
# The names that chat templates give to thoughts, in any of their brackets.
_NAME = "(?:think(?:ing)?|thoughts?|reason(?:ing)?|reflection|analysis|scratchpad)"
_MESSAGE = r"\b[^<\n]{0,80}(?:<\|constrain\|>\w{1,20})?(?:<\|message\|>)?"
_THOUGHT = re.compile(
    rf"""(?P<opens>
        <(?:seed:|\|(?:begin_of_|start_)?)?{_NAME}\|?> | ◁think▷ | \[THINK\] | <unused94>
        | <\|channel\|?>(?:analysis|commentary|thought){_MESSAGE} | \Aanalysis(?=[A-Z])
    )
    | <(?:/(?:seed:)?|\|/|\|end_(?:of_)?){_NAME}\|?> | ◁/think▷ | \[/THINK\] | <unused95>
    | <channel\|> | <\|channel\|>final{_MESSAGE} | assistantfinal""",
    re.IGNORECASE | re.VERBOSE,
)
# The end of a prompt whose template has begun a thought.
OPENED_THOUGHT = re.compile(
    rf"(?:<(?:seed:)?{_NAME}>|<\|begin_of_{_NAME}\|>|◁think▷|\[THINK\])\s*\Z", re.IGNORECASE
)
_SIGN_OF_THOUGHT = re.compile(r"<[/|tTsrRaAu] | ◁ | \[THINK\] | final", re.VERBOSE)
_STOP_TOKEN = re.compile(
    r"""<(?: \|\w*(?:end|eo[a-z]|return|start|im_)\w*\|> | ｜[^<>｜]{1,40}｜> | /?s>|eos>|pad>
        | (?:start|end)_of_turn>)""",
    re.VERBOSE,
)
# The calculator of GSM8K writes <<48+24=72>>.
_COMMENT = re.compile(
    r"<!--(?:.*?-->|.*)|<(del|strike)>(?:.*?</\1>|.*)|<<[^<>\n]{0,200}>>", re.DOTALL
)
_CODE = re.compile(
    r"""```(?:.*?```|.*) | ~~[^~\n]+~~ | `[^`'\n]+` | \\verb\*?([^\w\s*])[^\n]{0,500}?\1
    | \\begin\{(verbatim|lstlisting|comment)\}(?:.*?\\end\{\2\}|.*)""",
    re.DOTALL | re.VERBOSE,
)
_JSON = re.compile(r"```(?:json)?\s*\{", re.IGNORECASE)
_TAG = re.compile(
    r"""</?(?:b|i|u|em|strong|span|font|mark|code|big|small|center)(?:\s[^<>]{0,200})?>
    | <(?P<line>br|/?p|/?div|/?h[1-6])\s?/?>""",
    re.IGNORECASE | re.VERBOSE,
)
_PROOF_END = (
    r"\\(?:blacksquare|qed(?:symbol|here)?|checkmark)(?![A-Za-z])|\\(?:square|Box)\s*(?=\$|\\[\])])"
)
_PROOF_ENDS = re.compile(rf"\$\s*(?:{_PROOF_END})\s*\$|{_PROOF_END}")


def without_thoughts(text: str) -> str:
    """Returns the text outside thoughts, closed or not."""
    if not _SIGN_OF_THOUGHT.search(text):
        return text
    kept: list[str] = []
    position = 0
    thinking = False
    for match in _THOUGHT.finditer(text):
        before = text[max(0, match.start() - 3) : match.start()]
        if before.endswith(('"', "'", "`")) and before != "```":
            continue  # a literal in code
        if not thinking:
            kept.append(text[position : match.start()])
        if match["opens"] is None and not thinking:
            # The chat template opened the thought in the prompt, so everything before is thought.
            kept.clear()
        thinking = match["opens"] is not None
        position = match.end()
    if not thinking:
        kept.append(text[position:])
    return "".join(kept)


def _without_box(code: re.Match[str]) -> str:
    """Returns "" for code with a box in it, which only prints an answer; JSON objects are kept."""
    is_code = _JSON.match(code.group()) is None and re.search(BOX, code.group())
    return "" if is_code else code.group()


def answering_part(text: str) -> str:
    """Returns the text without thoughts, comments, struck out text, code with a box, HTML tags,
    signs such as ∎, stop tokens, and everything before a retraction ("Wait, that is wrong").
    """
    text = _STOP_TOKEN.sub("\n", without_thoughts(text))
    text = _COMMENT.sub("", text)
    if "box" in text:
        text = _CODE.sub(_without_box, text)
    text = _TAG.sub(lambda tag: "\n" if tag["line"] else "", text)
    text = _PROOF_ENDS.sub("", text)
    # What a later box states again is not taken back. A bound, for a model that repeats itself.
    *retracted, kept = RETRACTION.split(text.rpartition("boxed{")[-1][-4096:])
    return kept if retracted else text
