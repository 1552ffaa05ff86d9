"""Statistics of evaluations: uncertainty of a share, maj@k, paired comparison. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean, stdev

Z95 = NormalDist().inv_cdf(0.975)
"""1.96, for a two-sided interval of 95 %."""


def standard_error(share: float, count: int) -> float:
    """Returns the standard error of a share of `count` independent problems: sqrt(p(1 − p) / n)."""
    return math.sqrt(share * (1 - share) / count)


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share (Wilson 1927, doi:10.1080/01621459.1927.10502953), wide
    even at 0 and 1.
    """
    share = successes / count
    z2 = Z95**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def accuracy_text(accuracy: float, error: float, count: int) -> str:
    """Writes the accuracy of `count` problems with its standard error, or, where all answers are
    alike and that is 0, with its 95 % interval.
    """
    if error:
        return f"{accuracy:.3f} ± {error:.3f}"
    low, high = wilson_interval(round(accuracy * count), count)
    return f"{accuracy:.3f} (95 % interval {low:.3f} to {high:.3f})"


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Returns the accuracy of a majority vote over the k answers to one problem (Wang et al. 2022,
    arXiv:2203.11171).

    Answers with equal texts are equal; None does not vote. A tie is broken at random; the expected
    result is returned.

    Args:
        answers: [k] extracted answers.
        correct: [k] verdicts.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most_votes = max(votes.values())
    # Equal answers have equal verdicts: that of the first counts for each winner.
    winners = [list(answers).index(answer) for answer, n in votes.items() if n == most_votes]
    return sum(correct[i] for i in winners) / len(winners)


@dataclass(frozen=True)
class PairedDifference:
    """Mean result of one model minus that of another on the same problems: accuracy or reward."""

    difference: float
    low: float
    """Lower end of the 95 % interval."""
    high: float
    p_value: float
    """Probability of a difference at least this large if the models are equally good."""
    gained: list[int]
    """Indices of problems on which the first model is better."""
    lost: list[int]
    num_samples: int


def mean_difference(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Compares the rewards of two models problem by problem; interval and p value are those of the
    normal distribution of a mean.

    Args:
        first, second: [n] rewards of the answers.

    Raises ValueError for different lengths, or fewer than two problems.
    """
    apart = [a - b for a, b in zip(first, second, strict=True)]
    if len(apart) < 2:
        raise ValueError("a difference of means needs two problems")
    centre = mean(apart)
    error = stdev(apart) / math.sqrt(len(apart))
    p_value = float(centre == 0)
    if error:
        p_value = 2 * NormalDist().cdf(-abs(centre) / error)
    return PairedDifference(
        difference=centre,
        low=centre - Z95 * error,
        high=centre + Z95 * error,
        p_value=p_value,
        gained=[i for i, each in enumerate(apart) if each > 0],
        lost=[i for i, each in enumerate(apart) if each < 0],
        num_samples=len(apart),
    )


def paired_difference(
    first: Sequence[bool | None], second: Sequence[bool | None]
) -> PairedDifference:
    """Compares two models problem by problem.

    The interval is the adjusted Wald interval for matched proportions, which adds half an
    observation to each of the four cells (Agresti & Min 2005, doi:10.1002/sim.1781). The p value is
    that of McNemar's exact test: of the b + c problems that differ, the number b in favour is
    binomial with p = 1/2.

    Args:
        first, second: [n] verdicts of the answers; None for an ungraded answer, which is left out.

    Raises ValueError for different lengths, or when no problem is left.
    """
    graded = [i for i, pair in enumerate(zip(first, second, strict=True)) if None not in pair]
    if not graded:
        raise ValueError("no problem was graded for both")
    gained = [i for i in graded if first[i] and not second[i]]
    lost = [i for i in graded if second[i] and not first[i]]
    count = len(graded)
    b = len(gained)
    c = len(lost)

    # Half an observation more in each of the four cells: two more problems in all.
    adjusted_count = count + 2
    adjusted_b = b + 0.5
    adjusted_c = c + 0.5
    centre = (adjusted_b - adjusted_c) / adjusted_count
    variance = adjusted_b + adjusted_c - (adjusted_b - adjusted_c) ** 2 / adjusted_count
    half = Z95 * math.sqrt(variance) / adjusted_count

    tail = sum(math.comb(b + c, i) for i in range(min(b, c) + 1)) / 2 ** (b + c)
    return PairedDifference(
        difference=(b - c) / count,
        low=max(-1.0, centre - half),
        high=min(1.0, centre + half),
        p_value=min(1.0, 2 * tail),
        gained=gained,
        lost=lost,
        num_samples=count,
    )
