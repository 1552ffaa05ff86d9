"""Combines several reward functions into one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from common.errors import ConfigError
from common.wire.schemas import RewardStatus
from services.reward.functions.base import DetailedRewardFunction, Message, RewardFunction, Score

_SEVERITY: tuple[RewardStatus, ...] = (
    "died",
    "error",
    "timeout",
    "unparsable",
    "unevaluated",
    "ok",
    "inapplicable",
)
assert set(_SEVERITY) == set(get_args(RewardStatus))


class CompositeRewardFunction(DetailedRewardFunction):
    """The weighted sum of other functions. If one of them has no score, the sum has none: an error
    is not a zero.

    `scores` reports the score of every part by its name, before weights.

    Args:
        functions: the parts, with distinct names.
        weights: weight of each part, in the same order; 1.0 each when None.
        name: name of this function.

    Raises:
        ConfigError: the number of weights is wrong, or two parts have the same name.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        name: str = "composite",
    ) -> None:
        weights = [1.0] * len(functions) if weights is None else list(weights)
        if not functions or len(weights) != len(functions):
            raise ConfigError(
                f"there are {len(functions)} functions but {len(weights)} weights",
                field="weights",
                value=weights,
                remedy="give at least one function, and one weight for each",
            )
        if not all(map(math.isfinite, weights)):
            raise ConfigError(
                "a weight is not a finite number",
                field="weights",
                value=weights,
                remedy="give finite numbers",
            )
        check_names([function.name for function in functions])
        self.functions, self._name = list(functions), name
        self.weights = {
            function.name: float(weight)
            for function, weight in zip(functions, weights, strict=True)
        }
        self.bounds_itself = all(function.bounds_itself for function in functions)

    @property
    def name(self) -> str:
        """Name of its component in metrics and results."""
        return self._name

    def scores(self, completions: list[list[Message]], **kwargs: Any) -> list[Score]:
        """Returns the weighted sums with their components. Raises what a part raises."""
        parts = {
            function.name: function.scores(completions, **kwargs) for function in self.functions
        }
        return [
            combine({name: scores[i] for name, scores in parts.items()}, self.weights)
            for i in range(len(completions))
        ]


def combine(parts: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """Combines scores: the weighted sum, the worst status, and correct if all verifying parts are.

    A part that does not apply is left out; if no part applies, the whole does not apply.
    """
    absent: dict[str, float | None] = {
        name: None for name, part in parts.items() if part.status == "inapplicable"
    }
    parts = {name: part for name, part in parts.items() if name not in absent}
    if not parts:
        return Score(
            None, "inapplicable", components=absent, reason="no reward function applies to it"
        )
    total: float | None = 0.0
    for name, part in parts.items():
        total = (
            None
            if total is None or part.value is None
            else total + weights.get(name, 1.0) * part.value
        )
    status = min((part.status for part in parts.values()), key=_SEVERITY.index)
    verdicts = [part.correct for part in parts.values() if part.correct is not None]
    components = {**absent}
    for name, part in parts.items():
        components[name] = part.value
        components |= {f"{name}/{inner}": value for inner, value in part.components.items()}
    return Score(
        value=total,
        status=status,
        correct=all(verdicts) if verdicts else None,
        answer=next((part.answer for part in parts.values() if part.answer is not None), None),
        components=components,
        reason=next(
            (
                f"{name}: {part.reason}"
                for name, part in parts.items()
                if part.value is None and part.reason
            ),
            "",
        ),
    )


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigError when two reward functions have the same name: their components would be
    indistinguishable.
    """
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                "two reward functions have the same name",
                field="name",
                value=name,
                remedy="rename one of them",
            )
