"""Headers that client and service send beside a call, on whether it is worked on and on the store.

`ATTEMPT` and the next ones tell a client whether a service works on a request that stays
unanswered. With `STORE_HEADER` the service says with every answer how far its store is, and the
client sends it back, so both notice when the store has gone back: its directory was set to an older
copy.
"""

from typing import NamedTuple

ATTEMPT = "x-attempt"
"""Id of an attempt: a call that is sent again has another one."""
ASKED_ATTEMPT = "x-asked-attempt"
"""In a request for `/health`: the attempt that is asked for. In its answer: `WORKING` or `LOST`."""
WORKING = "working"
LOST = "lost"
"""The request has not arrived, or its answer was sent."""
PROGRESS = "x-progress"
"""In the same answer: a number that grows as long as the service gets on with its work."""
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
        # A proxy or another program may have written the header: nothing is concluded from it.
        if not (identity.isdecimal() and changes.isdecimal()):
            return None
        return cls(int(identity), int(changes))

    def is_behind(self, seen: "StoreMark") -> bool:
        """Whether this moment is before one that a client has seen of the same store."""
        # A new store has another identity: fewer changes say nothing about it.
        return self.identity == seen.identity and self.changes < seen.changes
