"""Fills a problem and its columns into the text of `data.prompt_template`."""

import re
from collections.abc import Iterable

from common.errors import ConfigError, did_you_mean
from common.settings.prompt_templates import PLACEHOLDER, QUESTION, placeholders
from common.wire.schemas import Prompt


def filled(template: str, prompt: Prompt) -> str:
    """Returns the template with the problem in place of `{question}`, and its column in place of
    `{name}`; the bare problem when there is no template. `{{name}}` becomes `{name}`; other braces
    stay as they are.

    Raises ConfigError that names the problem and the column.
    """
    values = {**prompt.columns, QUESTION: prompt.prompt}

    def value(found: re.Match[str]) -> str:
        escaped, name = found.groups()
        if escaped is not None:
            return f"{{{escaped}}}"
        if name not in values:
            hint = did_you_mean(name, [], values)
            raise ConfigError(
                f"the template has {{{name}}}, and the problem {prompt.id} has no such column; "
                f"there are {', '.join((QUESTION, *prompt.columns))}",
                field="data.prompt_template",
                value=template,
                remedy=f"{hint} name a column that every row has (and data.columns keeps), or "
                f"write {{{{{name}}}}} for the text {{{name}}}; the problem itself is "
                f"{{{QUESTION}}}, and its answer is not available in a prompt".strip(),
            )
        content = values[name]
        if isinstance(content, bool) or not isinstance(content, str | int | float):
            raise ConfigError(
                f"the template has {{{name}}}, but that column of the problem {prompt.id} is "
                "neither text nor a number",
                field="data.prompt_template",
                value=template,
                remedy="convert the column to text with data.map, or use another column",
            )
        return str(content)

    return PLACEHOLDER.sub(value, template) if template else prompt.prompt


def check_prompts(template: str, prompts: Iterable[Prompt]) -> None:
    """Raises ConfigError when the template cannot be filled for one of the problems."""
    if set(placeholders(template)) - {QUESTION}:  # it names columns
        for prompt in prompts:
            filled(template, prompt)
