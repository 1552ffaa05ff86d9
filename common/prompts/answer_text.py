"""The part of a response in which its answer is looked for: without thoughts, comments, and what
the response takes back.

Every step takes time linear in the length of any text: responses are untrusted.
"""

import re

from common.prompts.phrases import phrases

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
_SIGNS_OF_THOUGHT = (
    "</", "<|", "<t", "<T", "<s", "<r", "<R", "<a", "<A", "<u", "◁", "[THINK]", "final",
)  # fmt: skip
_STOP_TOKEN = re.compile(
    r"""<(?: \|\w*(?:end|eo[a-z]|return|start|im_)\w*\|> | ｜[^<>｜]{1,40}｜> | /?s>|eos>|pad>
        | (?:start|end)_of_turn>)""",
    re.VERBOSE,
)
_COMMENT = re.compile(r"<!--(?:.*?-->|.*)|<(del|strike)>(?:.*?</\1>|.*)", re.DOTALL)
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
# What follows "\boxed{9}. ": "This answer is wrong", "Oops, I forgot one", "No, it is 8", "But one
# is lost, which leaves 8". A comparison ("but Ben has 8"), a condition and a check take nothing
# back.
_RETRACTED = re.compile(
    rf"""[.!?\n。！？,;(，；（—–}}>][\s*_$)\]]{{0,8}}(?=[^\W\d_])
    (?:(?P<wavers>{phrases("interjection")}\b[\s,.!…:，。、：—–-]{{1,4}})){{0,3}}+
    (?: (?:please\ )?{phrases("withdrawn")}\b
    | (?(wavers)(?:that|this|it|i|(?:my|the)\ answer|the\ above)
        | (?:(?:but|so|therefore|thus|hence)\b,?\ )?
          (?:my|this|that|the|the\ above)\ answer(?:\ above)?)
      (?:['’]s|\ is|\ was|\ am)?\ {phrases("taken back")}\b
    | (?(wavers)
        | (?:{phrases("turn")}|then(?=[^.!?\n]{{0,200}}\b(?:leav|left|remain)))(?:\b|(?<=[一-鿿]))
          (?![^.!?\n。]{{0,200}}\b(?:if|would|could|wenn|si|если|如果)\b))
      (?=[^.!?\n。！？]{{0,200}}[0-9$(])
      (?! .{{0,300}}(?:[✓✅]|\b(?:matche[sd]|consistent|confirm(?:s|ed)|works|holds|stands
        |satisf\w+|as\ (?:required|expected|desired)
        |(?:this|that|it|answer)\ is\ (?:indeed\ )?(?:correct|right))\b))
      # its sentence, up to a value
      (?:[^.!?\n。！？]|\.(?=[0-9])){{0,200}}?
      (?: (?P<concludes>(?:\b{phrases("concludes")}\s|[是为剩下有]|は\s?)
          (?:(?:only|now|just|noch|nur|que|plus\ que|sólo|solo|apenas)\s){{0,2}}
        | (?(wavers)
            (?:(?<=[,.!…:—–-]\s)|(?<=[，。、：])|(?<=\bno\s)|(?<=rather\s)|(?<=mean\s)|(?<=meant\s))
            (?:[^\W\d_]+['’\s]+){{0,3}} | (?!)))
      | \b )
      (?=(?:\$|\\\()?\s?[-−]?(?:\\?[$€£¥])?
        (?:\\[dt]?frac\{{[^{{}}\n]{{1,20}}\}}\{{[^{{}}\n]{{1,20}}\}}|[0-9.,/]*[0-9]
        |(?<=[$(])[^$\n]{{1,80}}(?=\$|\\\)))(?:\$|\\\))?%?
        (?(concludes)(?:\s?[^\W\d_]+){{0,3}}|(?:\ \w+)?\ (?:are\ |is\ )?(?:left|remain)\w*)
        [*\s)）]{{0,4}}(?:[.!\n。！,;，]|\Z)) )""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)


def without_thoughts(text: str) -> str:
    """Returns the text outside thoughts, closed or not."""
    if not any(sign in text for sign in _SIGNS_OF_THOUGHT):
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
    *retracted, kept = _RETRACTED.split(text.rpartition("boxed{")[-1][-4096:])
    return kept if retracted else text
