"""The outcome of a stage, and what counts as equal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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
]
STAGES: tuple[Stage, ...] = (
    "prompts",
    "weights",
    "episodes",
    "completions",
    "rewards",
    "logprobs",
    "advantages",
    "gradients",
    "new weights",
)
"""In the order in which a step makes them."""
LOGPROB_BOUND = 1e-3
"""Most by which two float32 computations of one log-probability may differ, in nats."""
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


def differences(then: "Setup", now: "Setup") -> list[str]:
    """Returns why the bits of a result may differ from those of the run."""
    found = []
    if now.device != then.device:
        found.append(f"the run computed on {then.device}, this is {now.device}")
    if now.instructions != then.instructions:
        found.append(f"the run's processor had {then.instructions}, this has {now.instructions}")
    if now.world_size != then.world_size:
        found.append(f"the run had {then.world_size} ranks, this has {now.world_size}")
    if now.threads != then.threads:
        found.append(f"the run's ranks had {then.threads} threads, these have {now.threads}")
    for name in sorted(then.packages):
        before = then.packages[name]
        is_now = now.packages.get(name, "none")
        if before != is_now:
            found.append(f"{name} was {before} and is {is_now}")
    return found


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
    for row, (before, after) in enumerate(zip(expected, found, strict=True)):
        if before is None or after is None:
            continue
        if len(before) != len(after):
            where = f"{names[row]}: number of tokens"
            return StageOutcome(
                stage,
                "differs",
                what,
                where,
                expected=str(len(before)),
                found=str(len(after)),
            )
        # Equal bits, or within the bound. NaN is only equal to its own bits.
        apart = np.abs(before - after)
        unequal = before.view(np.int32) != after.view(np.int32)
        wrong = unequal & ~(apart <= bound) if bound else unequal
        if wrong.any():
            token = int(np.flatnonzero(wrong)[0])
            return StageOutcome(
                stage,
                "differs",
                what,
                f"{names[row]}, trained token {token}",
                expected=_number(before[token]),
                found=_number(after[token]),
            )
        count += len(before)
        largest = max(largest, float(apart.max(initial=0.0)))
    state: Literal["equal", "close"] = "close" if bound else "equal"
    detail = f"{count} {what}"
    if bound:
        detail += f", at most {largest:.2g} apart (bound {bound:g})"
    return StageOutcome(stage, state, detail)


def _number(value: np.float32) -> str:
    """Writes a number so that two that differ look different."""
    return f"{value:.9g}"
