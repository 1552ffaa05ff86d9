"""Prompt templates from a setting: text with `{question}` and column names, given as a ready-made
name, a file, or the text itself. `common.prompts.templates` fills them.
"""

import re
from pathlib import Path

from common.errors import Refused, did_you_mean

QUESTION = "question"
NAMED = {
    "plain": "Question: {question}\nAnswer:",
    "boxed": "{question}\n"
    "Please reason step by step, and put your final answer within \\boxed{}.\n",
    "r1_zero": (
        "A conversation between User and Assistant. The user asks a question, and the Assistant "
        "solves it. The assistant first thinks about the reasoning process in the mind and then "
        "provides the user with the answer. The reasoning process and answer are enclosed within "
        "<think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning "
        "process here </think> <answer> answer here </answer>. User: {question}. Assistant:"
    ),
    "few_shot": (
        "Question: A box holds 12 pencils. Mia buys 3 boxes and gives 5 pencils away. How many "
        "pencils does she keep?\n"
        "Answer: 3 boxes hold 3 * 12 = 36 pencils. After giving 5 away she keeps 36 - 5 = 31.\n"
        "#### 31\n\n"
        "Question: A train drives 150 km in 2 hours. How far does it drive in 5 hours at the same "
        "speed?\n"
        "Answer: In one hour it drives 150 / 2 = 75 km. In 5 hours it drives 5 * 75 = 375 km.\n"
        "#### 375\n\n"
        "Question: Of 40 pupils a quarter walk to school and 18 take the bus. The others cycle. "
        "How many cycle?\n"
        "Answer: 40 / 4 = 10 pupils walk. 40 - 10 - 18 = 12 pupils cycle.\n"
        "#### 12\n\n"
        "Question: {question}\n"
        "Answer:"
    ),
}
"""Ready-made templates. `r1_zero` is the template of DeepSeek-R1-Zero (arXiv:2501.12948, table
1)."""
_NAME = r"\{([^\W\d][\w-]*)\}"
PLACEHOLDER = re.compile(rf"\{{{_NAME}\}}|{_NAME}")
"""A name in braces; the first group is that of an escaped one, `{{name}}`."""


def read_template(given: str) -> str:
    """Returns the text of a template given by name, as a file or as text. Raises Refused for
    anything else.

    The last line break of a file is dropped, because editors add it.
    """
    if not given:
        return ""
    if given in NAMED:
        return NAMED[given]
    text = given
    if "{" not in given and "\n" not in given:
        named = did_you_mean(given, NAMED)
        text = read_file(
            given,
            "it has no {question}, names no built-in template and is not a file",
            f"write text with {{question}}, name a file, or {named}",
        ).removesuffix("\n")
    if QUESTION not in placeholders(text):
        raise Refused(
            "the template has no {question}", "write {question} where the problem belongs"
        )
    return text


def placeholders(template: str) -> list[str]:
    """Returns the names in braces of a template, in order, repeated ones included."""
    return [name for _, name in PLACEHOLDER.findall(template) if name]


def read_file(given: str, problem: str, remedy: str) -> str:
    """Returns the text of a file. Raises Refused with `problem`, the reason and `remedy`."""
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Refused(f"{problem} ({reason})", remedy) from None
