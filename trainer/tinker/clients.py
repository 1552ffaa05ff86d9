"""Who calls: clients are told apart by the keys in `TINKER_KEYS`, which the SDK sends as its API
key.
"""

import hmac
import os
import re
from collections.abc import Mapping

from common.errors import ConfigError, Unauthorized
from common.process.security import token

KEYS = "TINKER_KEYS"
_PREFIX = "tml-"
"""The SDK takes no other key."""
_ENTRY = re.compile(r"(?P<name>[^=]+)=(?P<key>tml-.{12,})")
ANYONE = "anyone"


class Clients:
    """The clients that may call. Without `TINKER_KEYS` all callers are one client; their key is
    `tml-` with the run's API_TOKEN behind it, or any key if the run has no token.

    `TINKER_KEYS` is `NAME=KEY,NAME=KEY,…`; keys begin with `tml-`. Raises ConfigError, without the
    keys, for another form.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        given = (os.environ if env is None else env).get(KEYS, "")
        shared = token(env)
        self._keys = {ANYONE: _PREFIX + shared} if shared else {}
        entries = [entry.strip() for entry in given.split(",") if entry.strip()]
        for number, entry in enumerate(entries, 1):
            found = _ENTRY.fullmatch(entry)
            if found is None:
                raise ConfigError(
                    f"entry {number} is not NAME=KEY with a key of at least 16 characters that "
                    f"begins with {_PREFIX}",
                    field=KEYS,
                    remedy="make a key with: echo tml-$(openssl rand -hex 32)",
                )
            self._keys[found["name"]] = found["key"]

    @property
    def are_told_apart(self) -> bool:
        return bool(self._keys)

    def owner(self, headers: Mapping[str, str]) -> str:
        """Returns the name of the client with these headers. Raises Unauthorized."""
        if not self._keys:
            return ANYONE
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        # All keys are compared, each in constant time.
        found = [
            name
            for name, key in self._keys.items()
            if hmac.compare_digest(given.encode(), key.encode())
        ]
        if not found:
            raise Unauthorized(
                "the key is wrong" if given else "a key is needed",
                field="X-API-Key",
                remedy=f"set TINKER_API_KEY to a key of {KEYS} of this server, "
                f"or to {_PREFIX} and its API_TOKEN",
            )
        return found[0]
