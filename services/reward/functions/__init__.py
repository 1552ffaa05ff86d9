"""What a completion is rewarded for: functions that a run's configuration or the caller of the Python API names."""

from services.reward.functions.base import RewardFunction

__all__ = ["RewardFunction"]
