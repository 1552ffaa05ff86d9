"""What kind of problem keeps a service from answering, for programs."""

import re
from typing import Literal

from common.errors import ServiceError

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
_OF_CODE: dict[str, Problem] = {"certificate": "certificate", "service_lost": "lost"}
_OF_STATUS: dict[int, Problem] = {401: "unauthorized", 507: "disk_full", 503: "not_ready"}
_FOREIGN_WORDS: tuple[tuple[Problem, str], ...] = (
    (
        "unknown_name",
        r"name resolution|Name or service not known|No address associated|nodename nor servname"
        r"|getaddrinfo|Domain name not found|DNS server",
    ),
    ("disk_full", r"No space left|disk is full"),
    ("refused", r"Connect call failed|refused|Cannot connect|unreachable|No route to host"),
    ("silent", r"[Tt]imeout|timed out|disconnected|reset by peer"),
)
"""Words of network errors of aiohttp, httpx, Python and the kernel, which have no codes."""


def problem_of(error: BaseException) -> Problem:
    """Returns the kind of problem of a call's error; `error` for any other."""
    if isinstance(error, ServiceError):
        known = error.about.get("problem") or _OF_CODE.get(error.code)
        return known or problem_of_status(error.status)
    words = str(error) or type(error).__name__
    for problem, pattern in _FOREIGN_WORDS:
        if re.search(pattern, words):
            return problem
    return "error"


def problem_of_status(status: int) -> Problem:
    """Returns the kind of problem of an unsuccessful answer."""
    return _OF_STATUS.get(status, "error")
