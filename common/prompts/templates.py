"""Fills a problem and its columns into the text of `data.prompt_template`."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from common.errors import ConfigError, did_you_mean
from common.settings.prompt_templates import PLACEHOLDER, QUESTION, placeholders
from common.wire.schemas import Prompt


def columns_of(template: str) -> list[str]:
    """Returns the columns that a template names besides the question."""
    return [name for name in dict.fromkeys(placeholders(template)) if name != QUESTION]


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

    return PLACEHOLDER.sub(value, template)


def filled(template: str, prompt: Prompt) -> str:
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
            f"the template has {{{name}}}, and the problem {prompt.id} has no such column; there "
            f"are {there}",
            field=field,
            value=template,
            remedy=f"{hint} name a column that every row has (and data.columns keeps), or write "
            f"{{{{{name}}}}} for the text {{{name}}}; the problem itself is {{{QUESTION}}}, "
            "and its answer is not available in a prompt".strip(),
        ) from None
    except TypeError as error:
        raise ConfigError(
            f"the template has {{{error}}}, but that column of the problem {prompt.id} is neither "
            "text nor a number",
            field=field,
            value=template,
            remedy="convert the column to text with data.map, or use another column",
        ) from None


def check_prompts(template: str, prompts: Iterable[Prompt]) -> None:
    """Raises ConfigError when the template cannot be filled for one of the problems."""
    if columns_of(template):
        for prompt in prompts:
            filled(template, prompt)
