"""Several reward functions as one."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from common.errors import ConfigError
from common.schemas import RewardStatus
from services.reward.functions.base import Message, RewardFunction, as_floats
from services.reward.score import Score

_GRAVITY: tuple[RewardStatus, ...] = ("died", "error", "timeout", "unparsable", "ok")
assert set(_GRAVITY) == set(get_args(RewardStatus))


class CompositeRewardFunction(RewardFunction):
    """The weighted sum of other functions. Where one of them has no score, the sum has none: an error is not a zero.

    `scores` reports the score of every part by its name, before weights.

    Args:
        functions: the parts; no two have one name.
        weights: of the parts, in their order; 1.0 each when left out.

    Raises ConfigError when the weights do not fit, or two parts have one name.
    """

    def __init__(
        self, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None, name: str = "composite"
    ) -> None:
        weights = [1.0] * len(functions) if weights is None else list(weights)
        if not functions or len(weights) != len(functions):
            raise ConfigError(
                f"{len(functions)} functions and {len(weights)} weights",
                field="weights",
                value=weights,
                remedy="give at least one function, and one weight for each",
            )
        check_names([function.name for function in functions])
        self.functions, self._name = list(functions), name
        self.weights = {function.name: float(weight) for function, weight in zip(functions, weights, strict=True)}
        self.bounds_itself = all(function.bounds_itself for function in functions)

    @property
    def name(self) -> str:
        """As given."""
        return self._name

    def __call__(self, completions: list[list[Message]], **kwargs: Any) -> list[float]:
        """The weighted sum for each completion; NaN where a part has no score. Raises what a part raises."""
        return as_floats(self.scores(completions, **kwargs))

    def scores(self, completions: list[list[Message]], **kwargs: Any) -> list[Score]:
        """The weighted sums with their components. Raises what a part raises."""
        parts = {function.name: function.scores(completions, **kwargs) for function in self.functions}
        return [combine({name: scores[i] for name, scores in parts.items()}, self.weights) for i in range(len(completions))]


def combine(parts: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """One score out of several: the weighted sum, the gravest status, right where every part that verifies says so."""
    total: float | None = 0.0
    for name, part in parts.items():
        total = None if total is None or part.value is None else total + weights.get(name, 1.0) * part.value
    status = min((part.status for part in parts.values()), key=_GRAVITY.index)
    verdicts = [part.correct for part in parts.values() if part.correct is not None]
    components: dict[str, float | None] = {}
    for name, part in parts.items():
        components[name] = part.value
        components |= {f"{name}/{inner}": value for inner, value in part.components.items()}
    return Score(
        value=total,
        status=status,
        correct=all(verdicts) if verdicts else None,
        answer=next((part.answer for part in parts.values() if part.answer is not None), None),
        components=components,
    )


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigError when two reward functions have one name: their components could not be told apart."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("two reward functions have one name", field="name", value=name, remedy="rename one of them")
