"""Messages for invalid values: what is wrong, and what to give instead."""

import re
from collections.abc import Mapping
from typing import Any

from common.errors import did_you_mean

# Pydantic's "Input should be a valid integer, unable to parse …" (the value is shown anyway) and
# "List should have at least 1 item after validation, not 0".
_SHOULD = re.compile(r"\w+ should (be|have) (.+?)(?: after validation)?(?:,|$)")
_FIXED = {
    "missing": ("it is missing", "give it"),
    "extra_forbidden": ("there is no such field", "leave it out, or correct its name"),
    "path_type": ("invalid value, expected a path", "give a text"),
}


def explained(problem: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the message and the remedy for one pydantic error (an item of
    `ValidationError.errors()`).
    """
    message = problem["msg"]
    if problem["type"] == "literal_error":
        listed = problem["ctx"]["expected"].replace(" or ", ", ")
        choices = [choice.strip("'") for choice in listed.split(", ")]
        return "there is no such choice", did_you_mean(str(problem["input"]), choices)
    if problem["type"] in _FIXED:
        return _FIXED[problem["type"]]
    should = _SHOULD.match(message)
    if should:
        verb, expected = should.groups()
        does = "is" if verb == "be" else "has"
        return f"invalid value, expected {expected}", f"give a value that {does} {expected}"
    # Our own validators raise ValueError("REASON: REMEDY").
    reason, colon, remedy = message.removeprefix("Value error, ").rpartition(": ")
    return (reason, remedy) if colon else (message, "correct it")
