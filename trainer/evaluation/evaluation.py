"""Results of an evaluation: accuracy of greedy or sampled answers, and pass@k of sampled ones."""

import math
from dataclasses import asdict, dataclass

from common import Json

PASS_K = 8
"""k of the pass@k that a run measures: answers to each problem."""


@dataclass(frozen=True)
class Answer:
    """The first answer to a held-out problem."""

    prompt_id: str
    prompt: str
    ground_truth: str
    response: str
    correct: bool | None
    """None when the rewards are not verdicts."""
    reward: float = 0.0


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation."""

    step: int
    accuracy: float | None
    """Share of correct answers to the held-out problems; None when the rewards are not verdicts
    (`verified`)."""
    standard_error: float | None
    """Standard error of the accuracy: the standard deviation of the problems' shares over √(number
    of problems)."""
    num_samples: int
    pass_at_k: float | None
    """Share of problems with at least one correct answer among k sampled ones; None when it was not
    measured."""
    k: int
    answers: list[Answer]
    mean_reward: float = 0.0
    """Mean reward of the answers."""
    verified: bool = True
    """Whether the rewards are verdicts on correctness."""
    n: int = 1
    """Number of answers per problem."""
    temperature: float = 0.0
    """Sampling temperature of these answers; 0 for greedy ones."""

    trained_on: int = 0
    """Problems that the model was trained on."""

    def summary(self) -> Json:
        """Returns all fields but the answers."""
        return {key: value for key, value in asdict(self).items() if key != "answers"}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns the unbiased pass@k of one problem (Chen et al. 2021, arXiv:2107.03374, eq. 1): 1 −
    C(n−c, k) / C(n, k).

    Raises ValueError for fewer than k samples.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {correct} correct among {samples} samples is not defined")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)
