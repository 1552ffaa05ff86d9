"""Reward functions that a run's configuration or the caller of the Python API names."""

from services.reward.functions.answers import MathRewardFunction
from services.reward.functions.base import RewardFunction, Score
from services.reward.functions.composite import CompositeRewardFunction
from services.reward.functions.judge import JudgeRewardFunction
from services.reward.functions.programs import CodeRewardFunction
from services.reward.functions.text import FormatRewardFunction, LengthPenaltyFunction, RepetitionPenaltyFunction
from services.reward.neural import RewardModelFunction

__all__ = [
    "CodeRewardFunction",
    "CompositeRewardFunction",
    "FormatRewardFunction",
    "JudgeRewardFunction",
    "LengthPenaltyFunction",
    "MathRewardFunction",
    "RepetitionPenaltyFunction",
    "RewardFunction",
    "RewardModelFunction",
    "Score",
]
