"""Chat templates that a setting gives: Jinja, in a file or as it is."""

import re
from pathlib import Path
from typing import Any

OWN = "own"
"""The model's own chat template."""
_TAKEN = ("messages", "conversation", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template", "tools")
"""Arguments of transformers' `apply_chat_template`."""
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""A tag that transformers adds to Jinja."""


def read_chat_template(given: str) -> str:
    """Returns the Jinja of a chat template from its file or itself; an empty text and `own` stay as they are.

    Raises ValueError for a text that is neither, is no Jinja, or does not use the messages.
    """
    if given in ("", OWN):
        return given
    text = given if "{" in given else _file(given)
    unknown = variables(text)
    if "messages" not in unknown:
        raise ValueError("the chat template never uses `messages`: write a template over them, in Jinja")
    return text


def variables(template: str) -> set[str]:
    """Returns the variables that a chat template reads. Raises ValueError for a text that is no Jinja."""
    from jinja2 import Environment, TemplateSyntaxError, meta  # not needed by most runs

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701  # it is parsed, not rendered
    try:
        return meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template)))
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template is no Jinja, in line {error.lineno} ({error.message}): repair it") from None


def read_template_variables(given: Any) -> Any:
    """Reads `true`, `false` and numbers that come as text, as on a command line: a template takes any text for true.

    Raises ValueError for a name that is not a variable of a template.
    """
    if not isinstance(given, dict):
        return given
    for name, value in given.items():
        if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
            raise ValueError(f"chat_template_kwargs has {name}, which is no variable of yours: leave it out")
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"{name} is {value!r:.40}, no truth value, number or text: give one, or set it in the template")
    return {name: _typed(value) if isinstance(value, str) else value for name, value in given.items()}


def _typed(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _file(given: str) -> str:
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(
            f"it is no Jinja and no file ({reason}): name a file with a chat template, write the template itself, or {OWN}"
        ) from None
