r"""Recognises where a text takes back the answer that it has given.

What follows "\boxed{9}. " takes the 9 back in one of these forms:

    withdrawal   Never mind.                         Wait, scratch that.
    denial       My answer is wrong.                 Wait, I missed one.
    correction   But one is lost, which leaves 8.    No, it is 8.    Oops, 8 eggs are left.

A remark takes nothing back: a comparison ("but Ben has 8 of them"), another case ("but if we count
Ben, it is 8"), a check ("Wait, 4 + 5 = 9, which matches").

Every repetition has a bound, because responses are untrusted.
"""

import re

from common.prompts.phrases import phrases

# A sign, and what is typeset between it and its clause: `}$ (` of "\boxed{9}$ (correction: 8)".
_CLAUSE_START = r"[.!?\n。！？,;(，；（—–}>][\s*_$)\]]{0,8}(?=[^\W\d_])"
_CLAUSE_END = r"[*\s)）]{0,4}(?:[.!\n。！,;，]|\Z)"
# "Wait, no, "
_INTERJECTIONS = rf"(?:{phrases('interjection')}\b[\s,.!…:，。、：—–-]{{1,4}}){{1,3}}+"

# "Never mind", "please ignore that", "更正"
_WITHDRAWAL = rf"(?:please\ )?{phrases('withdrawn')}\b"

# "That" of "Wait, that is wrong", "I" of "Wait, I missed one"
_WHAT_OR_WHO = r"(?:that|this|it|i|(?:my|the)\ answer|the\ above)"
# Without an interjection the answer must be named: "That is wrong" may be said of another thing.
_THE_ANSWER = r"""(?:(?:but|so|therefore|thus|hence)\b,?\ )?
    (?:my|this|that|the|the\ above)\ answer(?:\ above)?"""
_IS_WRONG = rf"(?:['’]s|\ is|\ was|\ am)?\ {phrases('taken back')}\b"

# "but", and "then" where something is left; after Chinese characters there is no \b.
_TURN = rf"""(?:{phrases("turn")}|then(?=[^.!?\n]{{0,200}}\b(?:leav|left|remain)))
    (?:\b|(?<=[一-鿿]))
    (?![^.!?\n。]{{0,200}}\b(?:if|would|could|wenn|si|если|如果)\b)  # that is another case
    """
# "Let me recalculate. ", unless it is a check
_ANEW = r"""(?:let\ me\ |i\ will\ |i['’]ll\ |i\ |to\ )?(?:re-?calculat|re-?comput|recount|redo)\w*\b
    (?![^.!?\n]{0,100}\b(?:verif|check|confirm|sure))(?:[^.!?:\n=]{0,60}[.:!]\s{1,4})?"""
# "one is lost, which " of "But one is lost, which leaves 8."
_UP_TO_THE_VALUE = r"""
    (?=[^.!?\n。！？]{0,200}[0-9$(])  # a quick look: most sentences have no value
    # nothing confirms the answer
    (?!.{0,300}(?:[✓✅]|\b(?:matche[sd]|consistent|confirm(?:s|ed)|works|holds|stands|satisf\w+
        |as\ (?:required|expected|desired)
        |(?:this|that|it|answer)\ is\ (?:indeed\ )?(?:correct|right))\b))
    (?:[^.!?\n。！？]|\.(?=[0-9])){0,200}?  # the point of 3.5 ends no sentence
    """
# 8, $-8$, \$8.50, 8%, \frac{3}{4}, $x + 1$
_VALUE = r"""
    (?:\$|\\\()?\s?[-−]?(?:\\?[$€£¥])?
    (?: \\[dt]?frac\{[^{}\n]{1,20}\}\{[^{}\n]{1,20}\}
    | [0-9.,/]*[0-9]
    | (?<=[$(])[^$\n]{1,80}(?=\$|\\\)) )
    (?:\$|\\\))?%?
    """
# "8 eggs.", with which a clause ends. It is looked at and not taken, because the answer is read
# from what follows the retraction.
_LAST_VALUE = rf"(?={_VALUE}(?:\s?[^\W\d_]+){{0,3}}{_CLAUSE_END})"
# "leaves 8.", "so it is only 8 eggs.", "8 eggs are left."
_NEW_VALUE = rf"""(?:
      (?:\b{phrases("concludes")}\s|[是为剩下有]|は\s?)
      (?:(?:only|now|just|noch|nur|que|plus\ que|sólo|solo|apenas)\s){{0,2}}{_LAST_VALUE}
    | \b(?={_VALUE}(?:\ \w+)?\ (?:are\ |is\ )?(?:left|remain)\w*{_CLAUSE_END}) )"""
# "8." of "No, 8.", "I mean 8." of "Sorry, I mean 8.": after an interjection a value needs no verb.
_BARE_VALUE = rf"""
    (?:(?<=[,.!…:—–-]\s)|(?<=[，。、：])|(?<=\bno\s)|(?<=rather\s)|(?<=mean\s)|(?<=meant\s))
    (?:[^\W\d_]+['’\s]+){{0,3}}{_LAST_VALUE}"""

# From the sign before a retraction up to what the text says instead, if it says that.
RETRACTION = re.compile(
    rf"""{_CLAUSE_START}(?:
      {_INTERJECTIONS}
      (?: {_WITHDRAWAL} | {_WHAT_OR_WHO}{_IS_WRONG}
      | let\ me\ (?:recount|recalculate|recompute|redo|start\ over|try\ again)\b
      | {_UP_TO_THE_VALUE}(?: {_NEW_VALUE} | {_BARE_VALUE} ) )
    | {_WITHDRAWAL}
    | {_THE_ANSWER}{_IS_WRONG}
    | {_TURN}{_UP_TO_THE_VALUE}{_NEW_VALUE}
    | {_ANEW}{_UP_TO_THE_VALUE}(?: {_NEW_VALUE} | (?:=|\bg[eo]t|\bgives)\s?{_LAST_VALUE} ) )""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
