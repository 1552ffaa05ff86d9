"""Messages for invalid values: what is wrong, and what to give instead."""

from collections.abc import Mapping
from typing import Any

from common.errors import did_you_mean

_EXPECTED = "Input should be "


def explained(problem: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the message and the remedy for one pydantic error (an item of
    `ValidationError.errors()`).
    """
    message = problem["msg"]
    if problem["type"] == "literal_error":
        listed = problem["ctx"]["expected"].replace(" or ", ", ")
        choices = [choice.strip("'") for choice in listed.split(", ")]
        return "there is no such choice", did_you_mean(str(problem["input"]), choices)
    if message.startswith(_EXPECTED):
        # "a valid integer, unable to parse string as an integer": the value is shown anyway.
        expected = message.removeprefix(_EXPECTED).partition(",")[0]
        return f"invalid value, expected {expected}", f"give a value that is {expected}"
    # Our own validators raise ValueError("REASON: REMEDY").
    reason, colon, remedy = message.removeprefix("Value error, ").rpartition(": ")
    return (reason, remedy) if colon else (message, "correct it")
