"""How far the store of a service is. The service sends it with every answer and the client sends it
back, so both notice when the store has gone back: its directory was set to an older copy.
"""

from typing import NamedTuple

STORE_HEADER = "x-store-mark"


class StoreMark(NamedTuple):
    """A moment in the life of a store."""

    identity: int
    """A random number, which a new store has for itself."""
    changes: int
    """Transactions that changed the store since it was made: a number that only grows."""

    def __str__(self) -> str:
        return f"{self.identity}-{self.changes}"

    @classmethod
    def parse(cls, text: str) -> "StoreMark | None":
        """Returns the mark in a header; None when there is none."""
        identity, _, changes = text.partition("-")
        if not (identity.isdecimal() and changes.isdecimal()):
            return None
        return cls(int(identity), int(changes))

    def is_behind(self, seen: "StoreMark | None") -> bool:
        """Whether this moment is before one that a client has seen of the same store."""
        return seen is not None and self.identity == seen.identity and self.changes < seen.changes
