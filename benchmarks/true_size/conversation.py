"""An environment whose episodes have as many turns as the case of a rehearsal."""

import json
import os
import random
from typing import Any

OBSERVATION = "The program printed the following lines, none of which is the answer. " * 2


class Conversation:
    """Answers every call with about 40 tokens, and gives a random reward at the end."""

    def __init__(self) -> None:
        self._turns = json.loads(os.environ["TRUE_SIZE_RANK"])["turns"]
        self._asked = 0

    def reset(self, ground_truth: str) -> str:
        """Begins an episode."""
        return ""

    def step(self, messages: list[dict[str, Any]]) -> str | None:
        """Returns the next observation; None at the end."""
        self._asked += 1
        return OBSERVATION if self._asked < self._turns else None

    def get_reward(self) -> float:
        """Rewards half of the episodes."""
        return float(random.random() < 0.5)
