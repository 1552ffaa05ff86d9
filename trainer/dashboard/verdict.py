"""Judges from the rewards of a run whether it learns, in one sentence. Pure."""

import math

import numpy as np
from numpy.typing import NDArray

from common import Json

# Steps needed for a verdict.
_FEWEST = 12
# Standard errors of a significant difference: high, since neighbouring steps are not independent.
_SURE = 4.0
# Accuracy above which there is little left to learn.
_SOLVED = 0.95


def verdict(reward: NDArray[np.float64], accuracy: NDArray[np.float64]) -> Json:
    """Returns `level` (`good`, `warn`, `bad`, or `none` if too early) and `text`, from [steps]
    means, NaN for none.

    With enough steps also `start` and `end`, the mean rewards of the oldest and the newest `window`
    steps.
    """
    reward = reward[~np.isnan(reward)]
    accuracy = accuracy[~np.isnan(accuracy)]
    steps = len(reward)
    if steps < _FEWEST:
        return {
            "level": "none",
            "text": f"Too early to say whether it learns: {steps} of {_FEWEST} steps",
        }
    window = max(_FEWEST // 3, min(steps // 5, 100))
    parts = [reward[i : i + window] for i in range(0, steps - window + 1, window)]
    start = reward[:window]
    end = reward[-window:]
    best = max(parts, key=np.mean)
    means = {"start": float(start.mean()), "end": float(end.mean()), "window": window}
    change = (
        f"reward {start.mean():.3f} → {end.mean():.3f} "
        f"(means of the first and the last {window} of {steps} steps)"
    )
    lost_half_of_gain = best.mean() - end.mean() > (best.mean() - start.mean()) / 2
    level = "warn"
    text = f"Not learning yet: {change}, within its noise"
    if lost_half_of_gain and _apart(best, end) > _SURE:
        level = "bad"
        fallen = f"Reward has fallen: {end.mean():.3f}, and it was {best.mean():.3f} at its best"
        text = f"{fallen} (means of {window} of {steps} steps)"
    elif _apart(end, start) > _SURE:
        level = "good"
        text = f"Learning: {change}"
    elif len(accuracy) >= window and accuracy[-window:].mean() >= _SOLVED:
        level = "good"
        text = f"Solved from the start: accuracy {accuracy[-window:].mean():.3f}"
    return {"level": level, "text": text, **means}


def _apart(high: NDArray[np.float64], low: NDArray[np.float64]) -> float:
    """Returns the difference of the means of `high` and `low` in standard errors."""
    error = math.sqrt(high.var(ddof=1) / len(high) + low.var(ddof=1) / len(low))
    difference = float(high.mean() - low.mean())
    if error > 0:
        return difference / error
    return math.copysign(math.inf, difference) if difference else 0.0
