"""Hints: problems seen over the last steps, and which setting to change. Pure.

An alarm (`alarms.py`) concerns a single update; a hint needs several steps. Every function here
measures for one row of `notes.HINTS`, which has the words and the thresholds, and returns the
numbers that its sentence names, or None when all is well.
"""

import math
import statistics
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from functools import partial
from typing import Any

from common.settings.config import Config
from trainer.observe.notes import HINTS, MAX_DROPPED, NEVER_ENDS
from trainer.timing import STAGES, WAITING
from trainer.trackers.base import numbers

WINDOW = 10
"""Number of latest steps that hints consider."""
FIRST = 5
"""Number of first steps whose numbers are the baseline."""
_RISE = HINTS["reward_hacking"].also["rise of the reward"]
"""Smallest rise of a mean that counts as one."""
Line = Mapping[str, Any]
_Measured = dict[str, Any] | None


def remember(history: MutableSequence[Line], line: Line) -> None:
    """Appends a line of `metrics.jsonl`, and removes all but the first `FIRST` and the last
    `WINDOW` + 1.
    """
    history.append(line)
    del history[FIRST : max(FIRST, len(history) - WINDOW - 1)]


def hints(history: Sequence[Line], config: Config) -> dict[str, str]:
    """Returns hint texts by name, for a history kept by `remember`.

    A policy can break in one update, which is said at once; every other hint needs `WINDOW` steps.
    """
    found = {}
    steps = _Steps(history, config)
    for name, measure in _MEASURES.items():
        has_enough = len(history) >= (1 if name == "policy_breaks" else WINDOW)
        measured = measure(steps) if has_enough else None
        if measured is not None:
            row = HINTS[measured.pop("row", name)]
            found[name] = row.text(config, **measured)
    return found


class _Steps:
    """Statistics of the last steps."""

    def __init__(self, history: Sequence[Line], config: Config) -> None:
        rows = list(map(numbers, history))
        self.config = config
        self.first = rows[:FIRST]
        self.last = rows[-WINDOW:]
        self.measured = [row for row in self.last if row.get("update.trained_tokens") != 0]
        """Those whose update trained on a token: if all groups have equal rewards, it measures no
        entropy."""
        self._before = rows[-WINDOW - 1] if len(rows) > WINDOW else {}
        self.groups = len(self.last) * config.trainer.batch_size

    def sum(self, name: str) -> float:
        return sum(row.get(name, 0.0) for row in self.last)

    def mean(self, name: str, rows: Sequence[Mapping[str, float]] | None = None) -> float:
        """Returns the mean of a number, such as `update.kl_reference`."""
        rows = self.last if rows is None else rows
        return sum(row.get(name, 0.0) for row in rows) / max(1, len(rows))

    def accuracy(self) -> float | None:
        """Returns the mean accuracy; None when the rewards are not verdicts."""
        known = all("accuracy" in row for row in self.last)
        return self.mean("accuracy") if known else None

    def constant(self, name: str) -> float | None:
        """Returns the value that a number had in all known steps; None if it changed."""
        values = {row.get(name) for row in (*self.first, *self.last)}
        return values.pop() if len(values) == 1 else None

    def error_since_first(self, name: str) -> float:
        """Returns the standard error of the difference between the means of the first and the last
        steps, from how much the steps differ; 0 where there are too few to tell.
        """
        square = 0.0
        for rows in (self.first, self.last):
            values = [row[name] for row in rows if name in row]
            if len(values) > 1:
                square += statistics.variance(values) / len(values)
        return math.sqrt(square)

    def rose(self, name: str) -> bool:
        """Returns whether the mean rose from the first to the second half of the steps."""
        half = len(self.last) // 2
        return self.mean(name, self.last[half:]) - self.mean(name, self.last[:half]) > _RISE

    def share(self, stage: str) -> float:
        """Returns a stage's share of the wall time, without evaluations and without the longest
        step: while a service was gone, the trainer waited for it, whatever it usually does.
        """
        usual = sorted(self.last, key=_wall_seconds)[:-1]
        seconds = sum(row.get(f"seconds.{stage}", 0.0) for row in usual)
        return seconds / max(1e-9, sum(map(_wall_seconds, usual)))

    def dropped(self, reason: str) -> int:
        """Returns the groups dropped in these steps. The counts restart at 0 with the process."""
        now = int(self.last[-1].get(f"dropped.{reason}", 0))
        before = int(self._before.get(f"dropped.{reason}", 0))
        return now - before if now >= before else now


def _wall_seconds(row: Mapping[str, float]) -> float:
    """Returns the wall time of a step, without its evaluation."""
    whole = sum(row.get(f"seconds.{name}", 0.0) for name in (*STAGES, WAITING))
    return whole - row.get("seconds.evaluation", 0.0)


def _equal_share(steps: _Steps) -> float:
    """Returns the share of the groups whose rewards are equal."""
    replaced = steps.dropped("zero_variance")
    equal = steps.sum("zero_variance_groups") + replaced
    return equal / (steps.groups + replaced)


def _zero_variance_groups(steps: _Steps) -> _Measured:
    share = _equal_share(steps)
    accuracy = steps.accuracy()
    too_few = share < HINTS["zero_variance_groups, right"].limit
    # Copies are why the rewards are equal.
    if too_few or steps.config.algorithm.advantage == "none" or _same_answers(steps):
        return None
    solved = steps.sum("solved_groups")
    failed = steps.sum("failed_groups")
    # Without solved or failed groups, all equal ones were replaced.
    mostly_right = accuracy is not None and accuracy >= 0.5
    easy = solved > failed if solved + failed else mostly_right

    # Rewards that differ between groups alone have a mean that changes.
    constant = steps.constant("reward") if share == 1 else None
    if constant == 0:
        case = "zero"
    elif accuracy is None:
        case = "unrated" if constant is None else "same"
    else:
        case = "right" if easy else "wrong"
    row = f"zero_variance_groups, {case}"
    return {"row": row, "share": share, "accuracy": accuracy, "constant": constant}


def _same_answers(steps: _Steps) -> _Measured:
    row = HINTS["same_answers"]
    share = steps.mean("copies")
    solved = (steps.accuracy() or 0.0) >= row.also["accuracy below"]
    # Short answers may be copies while the others of their groups still teach.
    teaches = _equal_share(steps) < HINTS["zero_variance_groups, right"].limit
    if share < row.limit or solved or teaches:
        return None
    entropy = steps.mean("update.entropy", steps.measured)
    is_cold = steps.config.sampling.temperature < row.also["temperature that is nearly greedy"]
    return {
        "row": "same_answers, cold" if is_cold else "same_answers",
        "share": share,
        "entropy": f" (entropy {entropy:.2g} nats per token)" if steps.measured else "",
    }


def _dead_reward(steps: _Steps) -> _Measured:
    names = [name for name in steps.last[-1] if name.startswith("rewards.")]
    constants = {name.removeprefix("rewards."): steps.constant(name) for name in names}
    dead = [f"{name} ({value:g})" for name, value in constants.items() if value is not None]
    return {"dead": ", ".join(dead)} if dead and len(names) > 1 else None


def _reward_hacking(steps: _Steps) -> _Measured:
    row = HINTS["reward_hacking"]
    accuracy = steps.accuracy()
    reward_first = steps.mean("reward", steps.first)
    reward = steps.mean("reward")
    accuracy_first = steps.mean("accuracy", steps.first)
    chance = row.also["standard errors"] * steps.error_since_first("accuracy")
    if (
        accuracy is None
        or reward - reward_first < _RISE
        or accuracy_first - accuracy < max(row.limit, chance)
    ):
        return None
    grown = []
    for name in steps.last[-1]:
        began = steps.mean(name, steps.first)
        now = steps.mean(name)
        if name.startswith("rewards.") and now > began + _RISE:
            grown.append(f"{name.removeprefix('rewards.')} ({began:.2f} → {now:.2f})")
    return {
        "reward_first": reward_first,
        "reward": reward,
        "accuracy_first": accuracy_first,
        "accuracy": accuracy,
        "grown": f": {', '.join(grown)}" if grown else "",
    }


def _format(steps: _Steps) -> _Measured:
    share = steps.mean("unparsable")
    if share < HINTS["format"].limit or steps.rose("reward"):
        return None
    return {"share": share, "reward": steps.mean("reward")}


def _truncated(steps: _Steps) -> _Measured:
    row = HINTS["truncated"]
    share = steps.mean("truncated")
    accuracy = steps.accuracy()
    never_ends = share >= row.also["share at which hardly any ends"]
    if accuracy is not None:
        is_harmless = accuracy >= row.also["accuracy below"]
        why = f"accuracy is {accuracy:.2f}: what is cut is hardly ever right"
    else:
        is_harmless = steps.rose("reward") and not never_ends
        why = "hardly any ends" if steps.rose("reward") else "the reward does not rise"
    if share < row.limit or is_harmless:
        return None
    return {"share": share, "why": why, "end_token": NEVER_ENDS if never_ends else ""}


def _short_answers(steps: _Steps) -> _Measured:
    row = HINTS["short_answers"]
    began = steps.mean("completion_tokens", steps.first)
    now = steps.mean("completion_tokens")
    accuracy = steps.accuracy()
    # Not `rose`: answers that have become short and right stay so.
    least = steps.mean("accuracy", steps.first) + row.also["rise of the accuracy"]
    learned = accuracy is not None and accuracy > least
    if now > row.limit * began or began == 0 or learned:
        return None
    return {"began": began, "now": now}


def _policy_moves(steps: _Steps) -> _Measured:
    row = HINTS["policy_moves"]
    newest = steps.last[-3:]
    kl_first = steps.mean("update.kl_reference", steps.last[:3])
    kl = steps.mean("update.kl_reference", newest)
    ratio = steps.mean("update.ratio", newest)
    clipped = steps.mean("update.clip_fraction", newest)
    seen = []
    if kl > row.limit:
        seen.append(f"KL to the reference is {kl:.3g} nats per token")
    elif kl > row.also["KL that has grown"] and kl > row.also["growth"] * kl_first:
        seen.append(
            f"KL to the reference rose from {kl_first:.3g} to {kl:.3g} nats per token in "
            f"{WINDOW} steps"
        )
    if abs(ratio - 1) > row.also["ratio off 1"]:
        seen.append(f"the probability ratio is {ratio:.2f} on average")
    if clipped > row.also["share that is clipped"]:
        seen.append(f"{clipped:.0%} of the tokens are clipped")
    return {"seen": ", ".join(seen)} if seen else None


def _policy_breaks(steps: _Steps) -> _Measured:
    row = HINTS["policy_breaks"]
    newest = steps.last[-int(row.also["steps in a row"]) :]
    first = steps.first[:1]
    improves = steps.mean("reward", newest) > steps.mean("reward", first)
    if steps.config.optimizer.learning_rate > HINTS["policy_breaks, rate"].limit and not improves:
        return {"row": "policy_breaks, rate"}
    if first[0] in newest:
        return None
    began = _without_answer(first[0])
    now = min(map(_without_answer, newest))
    measured = "reward" if steps.accuracy() is None else "accuracy"
    result_first = steps.mean(measured, first)
    result = steps.mean(measured, newest)
    lost = row.also["lost share of the first result"] * abs(result_first)
    if now - began < row.limit or result > result_first - lost:
        return None
    return {
        "began": began,
        "now": now,
        "measured": measured,
        "first": result_first,
        "result": result,
    }


def _without_answer(row: Mapping[str, float]) -> float:
    """Returns the share of the answers that are cut or have no final answer, at least."""
    return max(row.get("truncated", 0.0), row.get("unparsable", 0.0))


def _policy_stands_still(steps: _Steps) -> _Measured:
    is_small = steps.config.optimizer.learning_rate < HINTS["policy_stands_still"].limit
    return {} if is_small and not steps.rose("reward") else None


def _not_finite(steps: _Steps) -> _Measured:
    skipped = int(steps.sum("update.skipped"))
    return {"skipped": skipped} if skipped >= HINTS["not_finite"].limit else None


def _entropy(steps: _Steps) -> _Measured:
    row = HINTS["entropy"]
    began = steps.mean("update.entropy", steps.first)
    now = steps.mean("update.entropy", steps.measured)
    accuracy = steps.accuracy()
    if accuracy is None:
        learns = steps.rose("reward")
        why = "the reward does not rise"
    else:
        learns = accuracy >= row.also["accuracy below"] or steps.rose("accuracy")
        why = f"accuracy stays at {accuracy:.2f}"
    if not steps.measured or now >= row.limit * began or learns:
        return None
    return {"began": began, "now": now, "why": why}


def _generation_bound(steps: _Steps) -> _Measured:
    row = HINTS["generation_bound"]
    limit = row.also["with staleness"] if steps.config.trainer.max_staleness else row.limit
    share = steps.share("generation")
    return {"share": share} if share >= limit else None


def _rollout_idle(steps: _Steps) -> _Measured:
    row = HINTS["rollout_idle"]
    staleness = steps.config.trainer.max_staleness
    update = steps.share("update")
    idle = 1 - steps.mean("generating")
    limit = row.also["with staleness"] if staleness else row.limit
    # With younger experience than permitted, something else keeps the engines idle.
    is_as_old_as_allowed = steps.mean("staleness") > staleness - 0.5
    is_measured = "generating" in steps.last[0] and update >= row.also["share of the update"]
    if not is_measured or idle <= limit or not is_as_old_as_allowed:
        return None
    return {"idle": idle, "update": update}


def _lost_episodes(steps: _Steps) -> _Measured:
    lost = {name: int(steps.sum(f"lost_episodes.{name}")) for name in ("timeout", "died", "error")}
    count = sum(lost.values())
    share = count / (steps.groups * steps.config.sampling.group_size + count)
    row = f"lost_episodes, {max(lost, key=lambda each: lost[each])}"
    return {"row": row, "count": count, "share": share} if share >= HINTS[row].limit else None


def _takes(stage: str, name: str, steps: _Steps) -> _Measured:
    share = steps.share(stage)
    return {"share": share} if share >= HINTS[name].limit else None


def _dropped(reason: str, steps: _Steps) -> _Measured:
    count = steps.dropped(reason)
    share = count / (steps.groups + count)
    return {"count": count, "share": share} if share >= MAX_DROPPED else None


_MEASURES: dict[str, Callable[[_Steps], _Measured]] = {
    "policy_breaks": _policy_breaks,
    "zero_variance_groups": _zero_variance_groups,
    "same_answers": _same_answers,
    "dead_reward": _dead_reward,
    "reward_hacking": _reward_hacking,
    "format": _format,
    "truncated": _truncated,
    "short_answers": _short_answers,
    "policy_moves": _policy_moves,
    "policy_stands_still": _policy_stands_still,
    "not_finite": _not_finite,
    "entropy": _entropy,
    "generation_bound": _generation_bound,
    "rollout_idle": _rollout_idle,
    "lost_episodes": _lost_episodes,
}
for _name, _stage in {
    "publish_bound": "publish",
    "stragglers": "stragglers",
    "reward_bound": "reward",
    "replay_bound": "replay",
    "nothing_active": WAITING,
}.items():
    _MEASURES[_name] = partial(_takes, _stage, _name)
for _reason in ("generation", "reward", "teacher", "stale"):
    _MEASURES[f"dropped_{_reason}"] = partial(_dropped, _reason)
