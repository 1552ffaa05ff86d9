"""What a reward function says about one completion."""

from dataclasses import dataclass, field

from common.schemas import RewardStatus


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward function says about one completion."""

    value: float | None
    """Higher is better; None when it could not be had. An error is not a zero."""
    status: RewardStatus = "ok"
    correct: bool | None = None
    """The verdict of a function that verifies (math, code); None of one that does not."""
    answer: str | None = None
    """What was verified: the extracted answer, or the outcome of every test case."""
    components: dict[str, float | None] = field(default_factory=dict)
    """Of a composite: the score of every part by its name, before weights."""
