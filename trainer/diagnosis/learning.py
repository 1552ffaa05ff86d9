"""Findings from the numbers of a run: its alarms and hints, and what neither of them says. Pure."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from statistics import fmean

from common import Json
from trainer.diagnosis.facts import Facts, Finding, finding
from trainer.observe import catalogue
from trainer.observe.catalogue import SLOW
from trainer.trackers.base import flatten

_NEWEST = 3
"""A condition holds if it holds in this many steps in a row."""
_SOLVED = 0.95


def from_numbers(facts: Facts) -> Iterator[Finding]:
    """Yields the findings, those that harm first."""
    if not facts.steps:
        return
    yield from _not_finite(facts)
    yield from _drawn_twice(facts)
    yield from _equal_rewards(facts)
    yield from _old_weights(facts)
    yield from _texts(facts)


def _says(line: Json, kind: str, name: str) -> bool:
    """Returns whether an alarm or hint was raised in this step."""
    return name in (line.get(kind) or {})


def _since(lines: Sequence[Json], holds: Callable[[Json], bool]) -> float | None:
    """Returns the time of the first of the newest steps in a row for which this holds."""
    in_a_row = list(takewhile(holds, reversed(lines)))
    return in_a_row[-1].get("time") if in_a_row else None


def _texts(facts: Facts) -> Iterator[Finding]:
    """Yields the alarms and hints of the newest step, which say themselves what to change."""
    for kind in ("alarms", "hints"):
        for name, text in (facts.steps[-1].get(kind) or {}).items():
            what, _, remedy = str(text).partition(". ")
            yield Finding(
                name=name,
                what=what,
                since=_since(facts.steps, partial(_says, kind=kind, name=name)),
                evidence=[f"step {facts.step}: {kind.removesuffix('s')} {name}"],
                remedy=remedy or "docs/how-to/operations.md has a section of this name",
                level="slow" if name in SLOW else "harm",
            )


def _not_finite(facts: Facts) -> Iterator[Finding]:
    for line in facts.steps[-_NEWEST:]:
        update = line.get("update") or {}
        names = ("reward", "completion_tokens")
        measured = flatten({**{name: line.get(name) for name in names}, "update": update})
        bad = [
            name
            for name, value in measured.items()
            if isinstance(value, float) and not math.isfinite(value)
        ]
        what = f"{', '.join(bad)} of step {line['step']}"
        skipped = int(update.get("skipped") or 0)
        if skipped:
            what = f"the gradient of step {line['step']}: {skipped} updates were skipped"
        if bad or skipped:
            yield finding(catalogue.NOT_FINITE, what, line.get("time"), level="harm")
            return


def _drawn_twice(facts: Facts) -> Iterator[Finding]:
    """Yields two steps that trained on one position of the stream, or on the same prompts in the
    same order.
    """
    seen: dict[object, int] = {}
    times = {line.get("step"): line.get("time") for line in facts.steps}
    for line in facts.groups:
        step = line["step"]
        known = [
            group
            for group in line.get("groups", ())
            if not group.get("reused") and isinstance(group.get("position"), int)
        ]
        known.sort(key=lambda group: group["position"])
        prompts = tuple(str(group.get("prompt_id")) for group in known)
        drawn: list[object] = [group["position"] for group in known]
        if len(set(prompts)) > 1:  # one prompt may come again by chance
            drawn.append(prompts)
        for each in drawn:
            before = seen.setdefault(each, step)
            if before != step:
                what = f"position {each} in the steps {before} and {step}"
                if each is prompts:
                    what = f"step {step} has the prompts of step {before}, in the same order"
                yield finding(catalogue.DRAWN_TWICE, what, times.get(step), level="harm")
                return


def _equal_rewards(facts: Facts) -> Iterator[Finding]:
    batch = facts.config.get("trainer.batch_size") or math.inf

    def is_equal(line: Json) -> bool:
        return bool(line.get("zero_variance_groups", 0) >= batch)

    newest = facts.steps[-_NEWEST:]
    is_solved = (newest[-1].get("accuracy") or 0.0) >= _SOLVED
    has_no_baseline = facts.config.get("algorithm.advantage") == "none"  # equal rewards teach, too
    if len(newest) < _NEWEST or is_solved or has_no_baseline or not all(map(is_equal, newest)):
        return
    reward = fmean(line.get("reward") or 0.0 for line in newest)
    what = f"all {batch} groups of the last {_NEWEST} steps (mean reward {reward:.3f}): no gradient"
    since = _since(facts.steps, is_equal)
    yield finding(catalogue.EQUAL_REWARDS, what, since, level="harm")


def _old_weights(facts: Facts) -> Iterator[Finding]:
    """Yields experience that is older than the run permits."""
    allowed = facts.config.get("trainer.max_staleness")
    if allowed is None or facts.config.get("trainer.when_stale") == "train":
        return
    age = facts.steps[-1].get("staleness") or 0.0
    if age > allowed + 0.5:
        what = (
            f"the experience of step {facts.step} is {age:.1f} versions old, more than "
            f"trainer.max_staleness ({allowed})"
        )
        yield finding(catalogue.OLD_WEIGHTS, what, facts.last, level="harm")
