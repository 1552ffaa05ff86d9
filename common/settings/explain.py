"""Messages for invalid values: what is wrong, and what to give instead."""

import re
from collections.abc import Mapping
from typing import Any

from common.errors import Refused, did_you_mean

# Pydantic's "Input should be a valid integer, unable to parse …" (the value is shown anyway) and
# "List should have at least 1 item after validation, not 0".
_SHOULD = re.compile(r"\w+ should (be|have) (.+?)(?: after validation)?(?:,|$)")
_FIXED = {
    "missing": Refused("it is missing", "give it"),
    "extra_forbidden": Refused("there is no such field", "leave it out, or correct its name"),
    "path_type": Refused("invalid value, expected a path", "give a text"),
}


def explained(problem: Mapping[str, Any]) -> Refused:
    """Returns the reason and the remedy for one pydantic error (an item of
    `ValidationError.errors()`).
    """
    refused = problem.get("ctx", {}).get("error")
    if isinstance(refused, Refused):  # of a validator of ours
        return refused
    if problem["type"] == "literal_error":
        listed = problem["ctx"]["expected"].replace(" or ", ", ")
        choices = [choice.strip("'") for choice in listed.split(", ")]
        return Refused("there is no such choice", did_you_mean(str(problem["input"]), choices))
    if problem["type"] in _FIXED:
        return _FIXED[problem["type"]]
    should = _SHOULD.match(problem["msg"])
    if should is None:
        return Refused(problem["msg"], "correct it")
    verb, expected = should.groups()
    does = "is" if verb == "be" else "has"
    return Refused(f"invalid value, expected {expected}", f"give a value that {does} {expected}")
