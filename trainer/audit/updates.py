"""Compares a re-executed update with the recorded one."""

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from common.wire.schemas import Float32
from trainer.audit.comparison import (
    LOGPROB_BOUND,
    NORM_BOUND,
    StageOutcome,
    compare_checksums,
    compare_columns,
)
from trainer.audit.history import Reexecuted
from trainer.audit.recorded import RecordedStep


def compare_update(again: Reexecuted, why_rounded: str) -> Iterator[StageOutcome]:
    """Yields the outcomes of the stages of an update, in order.

    `why_rounded` says why the bits of two executions may differ; empty when they may not.
    """
    recorded = again.recorded
    bound = LOGPROB_BOUND if why_rounded else 0.0
    yield _logprobs(recorded, again, bound)
    assert again.batch.advantages is not None
    yield compare_columns(
        "advantages",
        "advantages",
        [row for item in recorded.groups for row in item.advantages],
        again.batch.advantages,
        names=recorded.names,
        bound=bound,
    )
    yield _gradients(recorded, again, why_rounded)
    yield _new_weights(recorded, again, why_rounded)


def _logprobs(recorded: RecordedStep, again: Reexecuted, bound: float) -> StageOutcome:
    """Compares the policy's log-probabilities, number by number, and the checksums of the
    reference's and of the critic's values.
    """
    expected = [row for item in recorded.groups for row in item.logprobs]
    scored = again.batch.old_logprobs or again.update.logprobs
    found: Sequence[Float32 | None] = scored or [None] * len(expected)
    outcome = compare_columns(
        "logprobs",
        "log-probabilities of the policy",
        expected,
        found,
        names=recorded.names,
        bound=bound,
    )
    # With another rounding, checksums of the others cannot be equal, and say nothing.
    if outcome.state == "differs" or bound:
        return outcome

    line = recorded.line
    detail = outcome.detail
    others = {
        "reference_logprobs": "the reference's log-probabilities",
        "values": "the critic's values",
    }
    for name, what in others.items():
        was = getattr(line, name)
        is_now = getattr(again.line, name)
        if was != is_now:
            return compare_checksums("logprobs", what, was, is_now)
        if was:
            detail += f", {what}"
    return StageOutcome("logprobs", "equal", detail)


def _gradients(recorded: RecordedStep, again: Reexecuted, why_rounded: str) -> StageOutcome:
    """Compares norm and checksum of the gradient of every optimiser update."""
    line = recorded.line
    expected = list(zip(line.norms, line.gradients, strict=False))
    found = list(zip(again.line.norms, again.line.gradients, strict=False))
    # Of an update that one side lacks, nothing is equal, and nothing is close.
    updates = zip_longest(expected, found, fillvalue=(math.nan, "none"))
    for number, (was, is_now) in enumerate(updates):
        is_close = abs(was[0] - is_now[0]) <= NORM_BOUND * abs(was[0])
        if was != is_now and not (why_rounded and is_close):
            return StageOutcome(
                "gradients",
                "differs",
                "gradients before clipping",
                f"update {number}",
                expected=f"norm {was[0]!r}, checksum {was[1]}",
                found=f"norm {is_now[0]!r}, checksum {is_now[1]}",
            )
    if not expected:
        return StageOutcome("gradients", "equal", "the step made no update")
    norms = ", ".join(f"{norm:.6g}" for norm in line.norms)
    if why_rounded:
        detail = f"norm {norms}, within {NORM_BOUND:g} of it; no bits, because {why_rounded}"
        return StageOutcome("gradients", "close", detail)
    detail = f"norm {norms}, checksum {', '.join(line.gradients)}"
    return StageOutcome("gradients", "equal", detail)


def _new_weights(recorded: RecordedStep, again: Reexecuted, why_rounded: str) -> StageOutcome:
    line = recorded.line
    what = f"version {recorded.step}"
    outcome = compare_checksums("new weights", what, line.weights, again.line.weights)
    if outcome.state == "equal" and line.critic != again.line.critic:
        what = f"the critic after step {recorded.step}"
        outcome = compare_checksums("new weights", what, line.critic, again.line.critic)
    if outcome.state == "differs" and why_rounded:
        return StageOutcome("new weights", "not compared", f"no bits, because {why_rounded}")
    return outcome
