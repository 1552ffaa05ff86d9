"""Chat templates from a setting: a file with Jinja, or the Jinja text itself."""

import re
from typing import Any

from common.errors import Refused
from common.settings.prompt_templates import read_file

OWN = "own"
"""The model's own chat template."""
# Names already taken: arguments of transformers' `apply_chat_template`.
_TAKEN = (
    "messages",
    "conversation",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tools",
)
# A tag that transformers adds to Jinja.
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def read_chat_template(given: str) -> str:
    """Returns the Jinja text of a chat template given as a file or as text; an empty text and `own`
    stay as they are.

    Raises Refused when it is neither, is not valid Jinja, or does not use the messages.
    """
    if given in ("", OWN):
        return given
    text = given
    if "{" not in given:
        text = read_file(
            given,
            "it is neither Jinja nor a file",
            f"name a file with a chat template, write the template itself, or {OWN}",
        )
    if "messages" not in variables(text):
        raise Refused(
            "the chat template never uses the variable `messages`",
            "write a Jinja template that does",
        )
    return text


def variables(template: str) -> set[str]:
    """Returns the variables that a chat template reads. Raises Refused when it is not valid
    Jinja.
    """
    from jinja2 import Environment, TemplateSyntaxError, meta  # not needed by most runs

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # it is parsed, not rendered  # noqa: S701
    try:
        return meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template)))
    except TemplateSyntaxError as error:
        raise Refused(
            f"the chat template is not valid Jinja, line {error.lineno} ({error.message})",
            "correct it",
        ) from None


def read_template_variables(given: Any) -> Any:
    """Converts `true`, `false` and numbers given as text, as on a command line, because Jinja
    treats any text as true.

    Raises Refused for a name that cannot be a variable of a template, and for a value of another
    type.
    """
    if not isinstance(given, dict):
        return given
    for name, value in given.items():
        if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
            raise Refused(
                f"chat_template_kwargs has {name}, which cannot be a variable of a template",
                "leave it out",
            )
        if not isinstance(value, bool | int | float | str):
            raise Refused(
                f"{name} is {value!r:.40}",
                "give true, false, a number or text, or set it in the template",
            )
    return {
        name: _typed(value) if isinstance(value, str) else value for name, value in given.items()
    }


def _typed(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
