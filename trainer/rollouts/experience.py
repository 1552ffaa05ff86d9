"""What one step trains on, taken by rank 0 and shared with the others."""

import json
from dataclasses import dataclass

from common.schemas import Group
from common.wire import decode_groups, encode_groups
from learning.ranks import Ranks


@dataclass
class Experience:
    """What one step trains on: fresh groups first, then reused ones."""

    groups: list[Group]
    weights: list[float]
    """Importance weight of each group."""
    fresh: int

    def encode(self) -> bytes:
        head = json.dumps({"weights": self.weights, "fresh": self.fresh}).encode()
        return len(head).to_bytes(8, "little") + head + encode_groups(self.groups)

    @classmethod
    def decode(cls, body: bytes) -> "Experience":
        size = 8 + int.from_bytes(body[:8], "little")
        head = json.loads(body[8:size])
        return cls(decode_groups(body[size:]), **head)

    @classmethod
    def share(cls, experience: "Experience | None", ranks: Ranks) -> "Experience":
        """Rank 0's experience on every rank."""
        if ranks.world_size == 1:
            assert experience is not None
            return experience
        return cls.decode(ranks.broadcast(experience.encode() if experience is not None else b""))
