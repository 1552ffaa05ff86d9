"""Prompt templates: text with `{question}` and column names, given as a ready-made name, a file, or
the text itself.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.settings.explain import did_you_mean

if TYPE_CHECKING:
    from common.wire.schemas import Prompt

QUESTION = "question"
NAMED = {
    "plain": "Question: {question}\nAnswer:",
    "boxed": "{question}\nPlease reason step by step, and put your final answer within \\boxed{}.\n",
    "r1_zero": (
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant first "
        "thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning process and "
        "answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning "
        "process here </think> <answer> answer here </answer>. User: {question}. Assistant:"
    ),
    "few_shot": (
        "Question: A box holds 12 pencils. Mia buys 3 boxes and gives 5 pencils away. How many pencils does she keep?\n"
        "Answer: 3 boxes hold 3 * 12 = 36 pencils. After giving 5 away she keeps 36 - 5 = 31.\n#### 31\n\n"
        "Question: A train drives 150 km in 2 hours. How far does it drive in 5 hours at the same speed?\n"
        "Answer: In one hour it drives 150 / 2 = 75 km. In 5 hours it drives 5 * 75 = 375 km.\n#### 375\n\n"
        "Question: Of 40 pupils a quarter walk to school and 18 take the bus. The others cycle. How many cycle?\n"
        "Answer: 40 / 4 = 10 pupils walk. 40 - 10 - 18 = 12 pupils cycle.\n#### 12\n\n"
        "Question: {question}\nAnswer:"
    ),
}
"""Ready-made templates. `r1_zero` is the template of DeepSeek-R1-Zero (arXiv:2501.12948, table
1)."""
_NAME = r"\{([^\W\d][\w-]*)\}"
_PLACE = re.compile(rf"\{{{_NAME}\}}|{_NAME}")


def read_template(given: str) -> str:
    """Returns the text of a template given by name, as a file or as text. Raises ValueError for
    anything else.

    The last line break of a file is dropped, because editors add it.
    """
    if not given:
        return ""
    if given in NAMED:
        return NAMED[given]
    text = given if "{" in given or "\n" in given else _file(given)
    if QUESTION not in _names(text):
        raise ValueError(
            "the template has no {question}: write {question} where the problem belongs"
        )
    return text


def columns_of(template: str) -> list[str]:
    """Returns the columns that a template names besides the question."""
    return [name for name in dict.fromkeys(_names(template)) if name != QUESTION]


def fill(template: str, question: str, columns: Mapping[str, Any]) -> str:
    """Replaces `{question}`, and `{name}` by that column. `{{name}}` becomes `{name}`; other braces
    stay as they are.

    Raises KeyError for a missing column, and TypeError for a column that is neither text nor a
    number.
    """

    def value(found: re.Match[str]) -> str:
        escaped, name = found.groups()
        if escaped is not None:
            return f"{{{escaped}}}"
        content = question if name == QUESTION else columns[name]
        if isinstance(content, bool) or not isinstance(content, str | int | float):
            raise TypeError(name)
        return str(content)

    return _PLACE.sub(value, template)


def filled(template: str, prompt: "Prompt") -> str:
    """Fills a problem into the template; returns the bare problem when there is no template.

    Raises ConfigError that names the problem and the column.
    """
    field = "data.prompt_template"
    try:
        return fill(template or "{question}", prompt.prompt, prompt.columns)
    except KeyError as error:
        name = str(error.args[0])
        there = ", ".join((QUESTION, *prompt.columns))
        hint = did_you_mean(name, [], [QUESTION, *prompt.columns])
        raise ConfigError(
            f"the template has {{{name}}}, and the problem {prompt.id} has no such column; there are {there}",
            field=field,
            value=template,
            remedy=f"{hint} name a column that every row has (and data.columns keeps), or write {{{{{name}}}}} for the text "
            f"{{{name}}}; the problem itself is {{{QUESTION}}}, and its answer is not available in a prompt".strip(),
        ) from None
    except TypeError as error:
        raise ConfigError(
            f"the template has {{{error}}}, but that column of the problem {prompt.id} is neither text nor a number",
            field=field,
            value=template,
            remedy="convert the column to text with data.map, or use another column",
        ) from None


def check_prompts(template: str, prompts: "Iterable[Prompt]") -> None:
    """Raises ConfigError when the template cannot be filled for one of the problems."""
    if columns_of(template):
        for prompt in prompts:
            filled(template, prompt)


def _names(template: str) -> list[str]:
    return [name for _, name in _PLACE.findall(template) if name]


def _file(given: str) -> str:
    try:
        return Path(given).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, ValueError) as error:
        named = did_you_mean(given, NAMED)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(
            f"it has no {{question}}, is not a file ({reason}) and names no built-in template: write text with {{question}}, "
            f"name a file, or {named}"
        ) from None
