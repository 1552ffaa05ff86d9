"""Findings from the numbers of a run: its alarms and hints, and what neither of them says. Pure."""

import math
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from trainer.diagnosis import names
from trainer.diagnosis.facts import Facts, Finding, Level, finding
from trainer.observe.notes import HINTS, SLOW

_NEWEST = 3
"""A condition holds if it holds in so many steps in a row."""
_SOLVED = 0.95
_JUMP_S = 5.0
_Line = dict[str, Any]


def from_numbers(facts: Facts) -> Iterator[Finding]:
    """Yields the findings, those that harm first."""
    if not facts.steps:
        return
    yield from _not_finite(facts)
    yield from _drawn_twice(facts)
    yield from _equal_rewards(facts)
    yield from _old_weights(facts)
    yield from _drops(facts)
    yield from _texts(facts, "alarms")
    yield from _texts(facts, "hints")
    yield from _clock(facts)


def _texts(facts: Facts, kind: str) -> Iterator[Finding]:
    """Yields the alarms or hints of the newest step."""
    newest = facts.steps[-1]
    for name, text in (newest.get(kind) or {}).items():
        what, _, remedy = str(text).partition(". ")
        since = facts.steps[-1].get("time")
        for line in reversed(facts.steps):
            if name not in (line.get(kind) or {}):
                break
            since = line.get("time")
        level: Level = "slow" if name in SLOW else "harm"
        evidence = [f"step {newest.get('step')}: {kind[:-1]} {name}"]
        yield Finding(
            name=name,
            what=what,
            since=since,
            evidence=evidence,
            remedy=remedy or "see the page of this name",
            level=level,
        )


def _drops(facts: Facts) -> Iterator[Finding]:
    """Yields groups that were dropped since the first of the known steps, a tenth or more."""
    oldest = facts.steps[0].get("dropped") or {}
    newest = facts.steps[-1].get("dropped") or {}
    groups = len(facts.steps) * int(facts.config.get("trainer.batch_size") or 0)
    for reason, name in names.DROPS.items():
        began = oldest.get(reason, 0) if len(facts.steps) > 1 else 0
        count = newest.get(reason, 0)
        if count >= began:  # otherwise the process, and its counts, began anew meanwhile
            count -= began
        if count and count >= HINTS[f"dropped_{reason}"].limit * (groups + count):
            what = f"{count} groups were dropped ({reason}) in the last {len(facts.steps)} steps"
            yield finding(name, what, facts.last, level="harm")


def _not_finite(facts: Facts) -> Iterator[Finding]:
    for line in facts.steps[-_NEWEST:]:
        bad = [name for name in ("reward", "completion_tokens") if not _is_finite(line.get(name))]
        update = line.get("update") or {}
        bad += [f"update.{name}" for name, value in update.items() if not _is_finite(value)]
        skipped = int(update.get("skipped") or 0)
        if bad or skipped:
            what = f"{', '.join(bad)} of step {line['step']}"
            if skipped:
                what = f"the gradient of step {line['step']}: {skipped} updates were skipped"
            yield finding(names.NOT_FINITE, what, line.get("time"), level="harm")
            return


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _drawn_twice(facts: Facts) -> Iterator[Finding]:
    """Yields two steps that trained on one position of the stream, or on the same prompts in the
    same order.
    """
    seen: dict[tuple[str, ...], int] = {}
    positions: dict[int, int] = {}
    for line in facts.groups:
        fresh = [group for group in line.get("groups", ()) if not group.get("reused")]
        known = [group for group in fresh if isinstance(group.get("position"), int)]
        known.sort(key=lambda group: group["position"])
        for group in known:
            before = positions.setdefault(group["position"], line["step"])
            if before != line["step"]:
                what = f"position {group['position']} in the steps {before} and {line['step']}"
                yield finding(names.DRAWN_TWICE, what, _time_of(facts, line["step"]), level="harm")
                return
        prompts = tuple(str(group.get("prompt_id")) for group in known)
        before = seen.setdefault(prompts, line["step"])
        if len(set(prompts)) > 1 and before != line["step"]:
            what = f"step {line['step']} has the prompts of step {before}, in the same order"
            yield finding(names.DRAWN_TWICE, what, _time_of(facts, line["step"]), level="harm")
            return


def _equal_rewards(facts: Facts) -> Iterator[Finding]:
    newest = facts.steps[-_NEWEST:]
    batch = facts.config.get("trainer.batch_size")
    all_equal = batch and all(line.get("zero_variance_groups", 0) >= batch for line in newest)
    if len(newest) < _NEWEST or not all_equal or facts.config.get("algorithm.advantage") == "none":
        return
    accuracy = newest[-1].get("accuracy")
    if accuracy is not None and accuracy >= _SOLVED:
        return
    reward = _mean(newest, "reward")
    what = f"all {batch} groups of the last {_NEWEST} steps (mean reward {reward:.3f}): no gradient"
    yield finding(names.EQUAL_REWARDS, what, _begin_of_equal(facts), level="harm")


def _begin_of_equal(facts: Facts) -> float | None:
    """Returns the time of the first of the newest steps in a row whose groups are all equal."""
    batch = facts.config.get("trainer.batch_size")
    since = None
    for line in reversed(facts.steps):
        if line.get("zero_variance_groups") != batch:
            break
        since = line.get("time")
    return since


def _old_weights(facts: Facts) -> Iterator[Finding]:
    """Yields experience that is older than the run permits."""
    allowed = facts.config.get("trainer.max_staleness")
    if allowed is None or facts.config.get("trainer.when_stale") == "train":
        return
    newest = facts.steps[-1]
    if (newest.get("staleness") or 0.0) > allowed + 0.5:
        what = (
            f"the experience of step {newest['step']} is {newest['staleness']:.1f} versions old, "
            f"more than trainer.max_staleness ({allowed})"
        )
        yield finding(names.OLD_WEIGHTS, what, newest.get("time"), level="harm")


def _mean(lines: Sequence[_Line], name: str) -> float:
    """Returns the mean of a number; NaN when a line lacks it."""
    values = [line.get(name) for line in lines]
    known = [float(value) for value in values if isinstance(value, int | float)]
    return mean(known) if known and len(known) == len(values) else math.nan


def _clock(facts: Facts) -> Iterator[Finding]:
    for before, after in zip(facts.steps, facts.steps[1:], strict=False):
        seconds = after.get("time", 0.0) - before.get("time", 0.0)
        if seconds < -_JUMP_S:
            what = f"that of the trainer went back by {-seconds:.0f} s before step {after['step']}"
            yield finding(names.CLOCK_JUMPS, what, after.get("time"), level="slow")
            return


def _time_of(facts: Facts, step: int) -> float | None:
    return next((line.get("time") for line in facts.steps if line.get("step") == step), None)
