"""Messages for invalid values: what is wrong, and what to give instead."""

from collections.abc import Mapping
from typing import Any

from common.errors import did_you_mean

_NUMBER = ("this is not a number", "give a number, such as 0.5 or 1e-6")
_WHOLE = ("this is not a whole number", "give a whole number, such as 8")
_BOOL = ("this is neither true nor false", "give true or false")
_LIST = ("this is not a list", "give values separated by commas, or a list in JSON")
_FIXED = {
    "int_parsing": _WHOLE,
    "int_type": _WHOLE,
    "int_from_float": _WHOLE,
    "int_parsing_size": ("this number is too long", "give a smaller number"),
    "float_parsing": _NUMBER,
    "float_type": _NUMBER,
    "finite_number": ("this number is not finite", "give a finite number"),
    "bool_parsing": _BOOL,
    "bool_type": _BOOL,
    "string_type": ("this is not text", "give text; in YAML, put it in quotes"),
    "path_type": ("this is not a path", "give the path of a file or directory"),
    "list_type": _LIST,
    "tuple_type": _LIST,
    "dict_type": ("this is not a mapping", "give NAME=VALUE, or a mapping in JSON"),
    "model_type": ("this section is not a mapping", "write its settings below its name"),
    "model_attributes_type": ("this section is not a mapping", "write its settings below its name"),
    "string_too_short": ("this is empty", "give a value"),
    "missing": ("this is required", "add it"),
}
_BOUNDS = {
    "greater_than": ("gt", "too small", "above"),
    "greater_than_equal": ("ge", "too small", "of at least"),
    "less_than": ("lt", "too large", "below"),
    "less_than_equal": ("le", "too large", "of at most"),
}


def explained(problem: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the message and the remedy for one pydantic error (an item of
    `ValidationError.errors()`).
    """
    kind = problem["type"]
    context = problem.get("ctx", {})
    if kind in _FIXED:
        return _FIXED[kind]
    if kind in _BOUNDS:
        bound, what, words = _BOUNDS[kind]
        return f"this number is {what}", f"give a number {words} {context[bound]}"
    if kind == "literal_error":
        choices = [
            choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")
        ]
        return "there is no such choice", did_you_mean(str(problem["input"]), choices)
    if kind == "too_short":
        return (
            f"this has {context['actual_length']} values",
            f"give at least {context['min_length']}",
        )
    if kind == "too_long":
        return (
            f"this has {context['actual_length']} values",
            f"give at most {context['max_length']}",
        )
    message = problem["msg"].removeprefix("Value error, ")
    reason, colon, remedy = message.rpartition(": ")
    return (reason, remedy) if colon else (message, "correct it")
