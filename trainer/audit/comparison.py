"""The outcome of a stage, and what counts as equal."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from common.wire.schemas import Float32

if TYPE_CHECKING:
    from trainer.observe.audit import Setup  # torch: slow to import

Stage = Literal[
    "prompts",
    "weights",
    "episodes",
    "completions",
    "rewards",
    "logprobs",
    "advantages",
    "gradients",
    "new weights",
    "checkpoint",
]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""In the order in which a step makes them."""
LOGPROB_BOUND = 1e-3
"""Largest difference between two float32 computations of one log-probability, in nats."""
LOGPROB_BOUND_LOW = 0.5
"""The same in bfloat16, on a GPU and with SGLang, where trainer and engine round every layer
differently."""
NORM_BOUND = 1e-3
"""Relative difference of gradient norms where bits cannot be compared."""


@dataclass(frozen=True)
class StageOutcome:
    """What comparing a stage found."""

    stage: Stage
    state: Literal["equal", "close", "differs", "not compared"]
    """`close`: within the rounding that `detail` states."""
    detail: str
    """What was compared, or why nothing was."""
    where: str = ""
    """The first place that differs."""
    expected: str = ""
    """What the run recorded there."""
    found: str = ""
    """What came out again."""


_DIFFERENCES = {
    "device": "the run computed on {}, this is {}",
    "instructions": "the run's processor had {}, this has {}",
    "world_size": "the run had {} ranks, this has {}",
    "threads": "the run's ranks had {} threads, these have {}",
}
"""What a difference in a field of `Setup` means."""


def differences(then: "Setup", now: "Setup") -> list[str]:
    """Returns why the bits of a result may differ from those of the run."""
    found = []
    for name, text in _DIFFERENCES.items():
        was = getattr(then, name)
        is_now = getattr(now, name)
        if was != is_now:
            found.append(text.format(was, is_now))
    for name, version in sorted(then.packages.items()):
        is_now = now.packages.get(name, "none")
        if version != is_now:
            found.append(f"{name} was {version} and is {is_now}")
    return found


def first_difference(expected: Sequence[object], found: Sequence[object]) -> int | None:
    """Returns the first index at which two sequences differ; None if they are equal."""
    both = zip_longest(expected, found)
    return next((at for at, (was, is_now) in enumerate(both) if was != is_now), None)


def compare_checksums(
    stage: Stage, what: str, expected: str | None, found: str | None
) -> StageOutcome:
    """Compares two checksums of `what`."""
    if expected == found:
        return StageOutcome(stage, "equal", f"{what} {expected}")
    return StageOutcome(stage, "differs", what, what, expected=str(expected), found=str(found))


def compare_columns(
    stage: Stage,
    what: str,
    expected: Sequence[Float32 | None],
    found: Sequence[Float32 | None],
    *,
    names: Sequence[str],
    bound: float = 0.0,
) -> StageOutcome:
    """Compares two columns of a batch, number by number; `names` says whose each row is.

    A row of which either side is None is left out. With a `bound` the numbers may differ by as
    much.
    """
    count = 0
    largest = 0.0
    for name, before, after in zip(names, expected, found, strict=True):
        # A row that was not trained on has no numbers.
        if before is None or after is None:
            continue
        where = ""
        if len(before) != len(after):
            where = f"{name}: number of tokens"
            was = str(len(before))
            is_now = str(len(after))
        else:
            # Equal bits, or within the bound. NaN is only equal to its own bits.
            apart = np.abs(before - after)
            wrong = before.view(np.int32) != after.view(np.int32)
            if bound:
                wrong &= ~(apart <= bound)
            if wrong.any():
                token = int(wrong.argmax())
                where = f"{name}, trained token {token}"
                # With nine digits, two numbers that differ look different.
                was = f"{before[token]:.9g}"
                is_now = f"{after[token]:.9g}"
        if where:
            return StageOutcome(stage, "differs", what, where, expected=was, found=is_now)
        count += len(before)
        largest = max(largest, float(apart.max(initial=0.0)))
    detail = f"{count} {what}"
    if not bound:
        return StageOutcome(stage, "equal", detail)
    detail += f", at most {largest:.2g} apart (bound {bound:g})"
    return StageOutcome(stage, "close", detail)
