"""Reward functions that a run's configuration or the caller of the Python API names."""

from services.reward.functions.answers import MathRewardFunction as MathRewardFunction
from services.reward.functions.base import RewardFunction as RewardFunction
from services.reward.functions.base import Score as Score
from services.reward.functions.composite import CompositeRewardFunction as CompositeRewardFunction
from services.reward.functions.judge import JudgeRewardFunction as JudgeRewardFunction
from services.reward.functions.programs import CodeRewardFunction as CodeRewardFunction
from services.reward.functions.text import FormatRewardFunction as FormatRewardFunction
from services.reward.functions.text import LengthPenaltyFunction as LengthPenaltyFunction
from services.reward.functions.text import RepetitionPenaltyFunction as RepetitionPenaltyFunction
from services.reward.reward_model import RewardModelFunction as RewardModelFunction
