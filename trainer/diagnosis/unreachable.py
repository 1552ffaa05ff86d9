"""Why a service cannot be reached, from the error of a call to it."""

import re
from typing import Literal

Problem = Literal[
    "",
    "refused",
    "silent",
    "unknown_name",
    "unauthorized",
    "certificate",
    "disk_full",
    "not_ready",
    "lost",
    "error",
]
"""`refused`: nobody listens. `silent`: somebody may, but there is no answer. `lost`: it will never
serve again."""
_PATTERNS: tuple[tuple[Problem, str], ...] = (
    ("unauthorized", r"\b401\b|API_TOKEN|the token is wrong|a token is needed"),
    ("certificate", r"certificate"),
    (
        "unknown_name",
        r"name resolution|Name or service not known|No address associated|nodename nor servname"
        r"|getaddrinfo|Domain name not found|DNS server",
    ),
    ("disk_full", r"disk_full|\b507\b|No space left|disk is full|database or disk is full"),
    ("refused", r"Connect call failed|refused|Cannot connect|unreachable|No route to host"),
    ("silent", r"[Tt]imeout|timed out|no answer|disconnected|reset by peer|no request was sent"),
    ("not_ready", r"\b503\b|draining|starting"),
)


def problem_of(reason: str) -> Problem:
    """Returns the kind of problem that an error's text names; `error` for any other."""
    for problem, pattern in _PATTERNS:
        if re.search(pattern, reason):
            return problem
    return "error"
