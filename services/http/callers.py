"""Keeps web pages out: without a token, a page open in any browser on this machine could otherwise
act on a run.

A page can send requests that need no permission of the server (CORS's "simple" requests), and with
DNS rebinding any request to a host name of its own. So a call must have a `Host` of this service,
no `Origin` of another site, and, if it is a POST, a content type or a header that a page may not
send. A request with the run's token needs none of this.
"""

import ipaddress
import re
import socket
from functools import lru_cache

from starlette.types import Scope

from common.errors import ServiceError
from common.process import logs
from common.process.topology import Topology

_PAGES = frozenset(("/health", "/metrics", "/docs", "/openapi.json"))
"""Paths that links on other pages may open, because reading them changes nothing."""
_CHANGING = frozenset(("POST", "PUT", "PATCH", "DELETE"))
_KINDS = frozenset(("application/json", "application/msgpack", "application/x-protobuf"))
_OWN_HEADERS = frozenset((logs.REQUEST_HEADER, "authorization"))
_READ = frozenset(b"host origin sec-fetch-site content-type x-request-id authorization".split())
"""The headers that decide."""
_REMEDY = (
    "programs send `Content-Type: application/json` or an `X-Request-Id`; or give the run an "
    "API_TOKEN (SECURITY.md)"
)


class ForeignCaller(ServiceError):
    """The request comes from a web page of another site, or could (403)."""

    status = 403
    code = "foreign_caller"


class CallerCheck:
    """Decides which callers without a token are served; links may open `open_paths`."""

    def __init__(self, open_paths: frozenset[str]) -> None:
        group = Topology.from_env().group
        self._names = {"localhost", socket.gethostname().lower()}
        self._of_group = re.compile(rf"[a-z0-9-]+\.{re.escape(group.lower())}") if group else None
        self._open = open_paths | _PAGES

    def refusal(self, scope: Scope) -> ServiceError | None:
        """Returns why this request is not served, or None."""
        headers: dict[str, str] = {}
        hosts = 0
        for name, value in scope["headers"]:
            hosts += name == b"host"
            if name in _READ:
                headers.setdefault(name.decode(), value.decode("latin-1"))
        host = headers.get("host", "").lower()
        if not self._is_own(host, scope) or hosts > 1:
            return ForeignCaller(
                "this host is not a name of this service: a page of another site may have pointed "
                "it here (DNS rebinding)",
                field="host",
                value=host,
                remedy="call it by its address, localhost or its name in the job group, or give "
                "the run an API_TOKEN (SECURITY.md)",
            )

        origin = headers.get("origin")
        if origin is not None and (not host or origin.lower().partition("://")[2] != host):
            return _from_a_page("origin", origin)
        site = headers.get("sec-fetch-site", "none")
        is_link = scope["method"] not in _CHANGING and scope["path"] in self._open
        if site not in ("none", "same-origin") and not is_link:
            return _from_a_page("sec-fetch-site", site)

        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        # A browser asks the server (preflight) before it lets a page send any other method.
        if scope["method"] != "POST" or kind in _KINDS or not _OWN_HEADERS.isdisjoint(headers):
            return None
        return ServiceError(
            "a web page could have sent this",
            code="unsupported_media_type",
            status=415,
            field="content-type",
            value=kind,
            remedy=_REMEDY,
        )

    def _is_own(self, host: str, scope: Scope) -> bool:
        """Whether a Host belongs to this service.

        No page can have an IP address as its name, so any address is fine.
        """
        match = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]]*)(:\d*)?", host)
        name = match[1].removesuffix(".") if match else ""
        if not host or name in self._names or (self._of_group and self._of_group.fullmatch(name)):
            return match is not None  # only old programs, not browsers, send no Host
        server = scope.get("server")  # in process: the name that the client was given
        return _is_address(name.strip("[]")) or (server is not None and name == server[0])


def _from_a_page(field: str, value: str) -> ForeignCaller:
    return ForeignCaller(
        "a page of another site sent this", field=field, value=value, remedy=_REMEDY
    )


@lru_cache(1024)
def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False
