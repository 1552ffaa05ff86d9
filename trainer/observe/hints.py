"""Hints: what is wrong over several steps, and which setting to change. Pure.

An alarm (`alarms.py`) is about a single update; a hint is about the last `WINDOW` steps, which some
hints compare with the first `FIRST` steps. `catalogue.HINTS` has the words and the limits, a row
for each hint or for each of its cases. `_share_of_row` measures the rows that bound a stage's share
of the time, or the share of dropped groups. Every other hint has a function here, which returns the
numbers that its sentence names, or None when all is well:

    40 % of the completions are cut, accuracy is 0.2  ─►  _truncated
    ─►  {"share": 0.4, "why": "accuracy is 0.20: …", "end_token": ""}
    ─►  "40% of the completions are cut at sampling.max_new_tokens (1024), and accuracy is 0.20: …"
"""

import math
import statistics
from collections.abc import Callable, Mapping, MutableSequence, Sequence

from common import Json
from common.models.memory import answers_of_pass, full_pass
from common.settings.config import Config
from trainer.observe.catalogue import HINTS, NEVER_ENDS, Notice, Texts
from trainer.timing import STAGES, WAITING
from trainer.trackers.base import Record, numbers

WINDOW = 10
"""Number of latest steps that hints consider."""
FIRST = 5
"""Number of first steps whose numbers are the baseline."""
# A mean that rises by less counts as unchanged.
_RISE = HINTS["reward_hacking"].further_limits["rise of the reward"]
# The first row of each hint. Its limits hold for all cases but `policy_breaks, rate`, whose limit
# `_policy_breaks` reads itself.
_ROWS: dict[str, Notice] = {}
for _name, _row in HINTS.items():
    _ROWS.setdefault(_name.partition(",")[0], _row)
# The numbers that a hint's sentence names, with `row` for a hint of several rows; None when all is
# well.
_Measured = Json | None


def remember(history: MutableSequence[Record], line: Record) -> None:
    """Appends a line of `metrics.jsonl`, and removes all but the first `FIRST` and the last
    `WINDOW` + 1.
    """
    history.append(line)
    del history[FIRST : max(FIRST, len(history) - WINDOW - 1)]


def hints(history: Sequence[Record], config: Config) -> Texts:
    """Returns hint texts by name, for a history kept by `remember`.

    A policy can break in one update, which is said at once; every other hint needs `WINDOW` steps,
    since fewer could be chance.
    """
    steps = _Steps(history, config)
    texts = {}
    for name, row in _ROWS.items():
        measure = _MEASURES.get(name, _share_of_row)
        has_enough = len(history) >= WINDOW or name == "policy_breaks"
        measured = measure(steps, row) if has_enough else None
        if measured is not None:
            row = HINTS[measured.pop("row", name)]
            texts[name] = row.text(config, **measured)
    return texts


class _Steps:
    """Statistics of the last steps."""

    def __init__(self, history: Sequence[Record], config: Config) -> None:
        steps = list(map(numbers, history))
        self.config = config
        self.first = steps[:FIRST]
        self.last = steps[-WINDOW:]
        self.trained = [step for step in self.last if step.get("update.trained_tokens") != 0]
        """The last steps whose update trained on a token. When all groups have equal rewards, an
        update measures no entropy."""
        # The step before the last ones; empty without one.
        self._before = steps[-WINDOW - 1] if len(steps) > WINDOW else {}
        self.groups = len(self.last) * config.trainer.batch_size
        # The mean accuracy; None when the rewards are not verdicts.
        is_known = all("accuracy" in step for step in self.last)
        self.accuracy = self.mean("accuracy") if is_known else None

    def sum(self, name: str) -> float:
        return sum(step.get(name, 0.0) for step in self.last)

    def mean(self, name: str, steps: Sequence[Mapping[str, float]] | None = None) -> float:
        """Returns the mean of a number, such as `update.kl_reference`, over `steps`, or the last
        ones.
        """
        steps = self.last if steps is None else steps
        return sum(step.get(name, 0.0) for step in steps) / max(1, len(steps))

    def constant(self, name: str) -> float | None:
        """Returns the value that a number had in all known steps; None if it changed."""
        values = {step.get(name) for step in (*self.first, *self.last)}
        return values.pop() if len(values) == 1 else None

    def error_since_first(self, name: str) -> float:
        """Returns the standard error of the difference between the means of the first and the last
        steps; 0 where there are too few to tell.

        Each mean varies as its steps do: its squared error is Var(steps) / number of steps, and
        those of independent means add up.
        """
        square = 0.0
        for steps in (self.first, self.last):
            values = [step[name] for step in steps if name in step]
            if len(values) > 1:
                square += statistics.variance(values) / len(values)
        return math.sqrt(square)

    def rose(self, name: str) -> bool:
        """Returns whether the mean rose from the first to the second half of the last steps."""
        half = len(self.last) // 2
        return self.mean(name, self.last[half:]) - self.mean(name, self.last[:half]) > _RISE

    def share(self, stage: str) -> float:
        """Returns a stage's share of the wall time, without evaluations and without the longest
        step, in which the trainer may have waited for a service that was gone.
        """
        usual = sorted(self.last, key=_wall_seconds)[:-1]
        seconds = sum(step.get(f"seconds.{stage}", 0.0) for step in usual)
        return seconds / max(1e-9, sum(map(_wall_seconds, usual)))

    def dropped(self, reason: str) -> int:
        """Returns the number of groups dropped in the last steps. The counts of a resumed process
        begin at 0.
        """
        now = int(self.last[-1].get(f"dropped.{reason}", 0))
        before = int(self._before.get(f"dropped.{reason}", 0))
        return now - before if now >= before else now

    def equal_share(self) -> float:
        """Returns the share of the groups whose rewards are equal, replaced ones included."""
        replaced = self.dropped("zero_variance")
        equal = self.sum("zero_variance_groups") + replaced
        return equal / (self.groups + replaced)


def _wall_seconds(step: Mapping[str, float]) -> float:
    """Returns the wall time of a step, without its evaluation."""
    whole = sum(step.get(f"seconds.{name}", 0.0) for name in (*STAGES, WAITING))
    return whole - step.get("seconds.evaluation", 0.0)


def _share_of_row(steps: _Steps, row: Notice) -> _Measured:
    """Measures a hint whose row bounds the share of a stage or of dropped groups."""
    # Only a row without a stage shows the count.
    count = steps.dropped(row.dropped)
    share = steps.share(row.stage) if row.stage else count / (steps.groups + count)
    return {"count": count, "share": share} if share >= row.limit_of(steps.config) else None


def _zero_variance_groups(steps: _Steps, row: Notice) -> _Measured:
    share = steps.equal_share()
    # Equal answers make equal rewards, and have a hint of their own.
    has_copies = _same_answers(steps, HINTS["same_answers"])
    if share < row.limit or has_copies or steps.config.algorithm.advantage == "none":
        return None
    solved = steps.sum("solved_groups")
    failed = steps.sum("failed_groups")
    accuracy = steps.accuracy
    # If no group of a batch is solved or failed, all equal ones were replaced: only the accuracy
    # tells which they were.
    is_easy = solved > failed if solved + failed else (accuracy or 0.0) >= 0.5

    # If all groups got one reward, the mean is the same in every step.
    constant = steps.constant("reward") if share == 1 else None
    if constant == 0:
        case = "zero"
    elif accuracy is not None:
        case = "right" if is_easy else "wrong"
    else:
        case = "unrated" if constant is None else "same"
    return {
        "row": f"zero_variance_groups, {case}",
        "share": share,
        "accuracy": accuracy,
        "constant": constant,
    }


def _same_answers(steps: _Steps, row: Notice) -> _Measured:
    share = steps.mean("copies")
    is_solved = (steps.accuracy or 0.0) >= row.further_limits["accuracy below"]
    # Short answers are often copies; a group teaches as long as its rewards differ.
    teaches = steps.equal_share() < HINTS["zero_variance_groups, right"].limit
    if share < row.limit or is_solved or teaches:
        return None
    entropy = steps.mean("update.entropy", steps.trained)
    is_cold = (
        steps.config.sampling.temperature < row.further_limits["temperature that is nearly greedy"]
    )
    return {
        "row": "same_answers, cold" if is_cold else "same_answers",
        "share": share,
        "entropy": f" (entropy {entropy:.2g} nats per token)" if steps.trained else "",
    }


def _dead_reward(steps: _Steps, row: Notice) -> _Measured:
    names = [name for name in steps.last[-1] if name.startswith("rewards.")]
    constants = {name.removeprefix("rewards."): steps.constant(name) for name in names}
    dead = [f"{name} ({value:g})" for name, value in constants.items() if value is not None]
    # If the only function is constant, `zero_variance_groups` says it.
    return {"dead": ", ".join(dead)} if dead and len(names) > 1 else None


def _reward_hacking(steps: _Steps, row: Notice) -> _Measured:
    reward_first = steps.mean("reward", steps.first)
    reward = steps.mean("reward")
    accuracy_first = steps.mean("accuracy", steps.first)
    chance = row.further_limits["standard errors"] * steps.error_since_first("accuracy")
    if steps.accuracy is None or reward - reward_first < _RISE:
        return None
    if accuracy_first - steps.accuracy < max(row.limit, chance):
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
        "accuracy": steps.accuracy,
        "grown": f": {', '.join(grown)}" if grown else "",
    }


def _format(steps: _Steps, row: Notice) -> _Measured:
    share = steps.mean("unparsable")
    # While the reward rises, the model is learning the format.
    if share < row.limit or steps.rose("reward"):
        return None
    return {"share": share, "reward": steps.mean("reward")}


def _truncated(steps: _Steps, row: Notice) -> _Measured:
    share = steps.mean("truncated")
    never_ends = share >= row.further_limits["share at which hardly any ends"]
    if steps.accuracy is not None:
        is_harmless = steps.accuracy >= row.further_limits["accuracy below"]
        why = f"accuracy is {steps.accuracy:.2f}: what is cut is hardly ever right"
    else:
        is_harmless = steps.rose("reward") and not never_ends
        why = "hardly any ends" if steps.rose("reward") else "the reward does not rise"
    if share < row.limit or is_harmless:
        return None
    return {"share": share, "why": why, "end_token": NEVER_ENDS if never_ends else ""}


def _short_answers(steps: _Steps, row: Notice) -> _Measured:
    began = steps.mean("completion_tokens", steps.first)
    now = steps.mean("completion_tokens")
    # Accuracy is compared with the first steps, not within the last ones (`rose`): once answers
    # have become short and right, it rises no more.
    least = steps.mean("accuracy", steps.first) + row.further_limits["rise of the accuracy"]
    learned = steps.accuracy is not None and steps.accuracy > least
    if now > row.limit * began or began == 0 or learned:
        return None
    return {"began": began, "now": now}


def _policy_moves(steps: _Steps, row: Notice) -> _Measured:
    newest = steps.last[-3:]
    kl_first = steps.mean("update.kl_reference", steps.last[:3])
    kl = steps.mean("update.kl_reference", newest)
    ratio = steps.mean("update.ratio", newest)
    clipped = steps.mean("update.clip_fraction", newest)
    seen = []
    if kl > row.limit:
        seen.append(f"KL to the reference is {kl:.3g} nats per token")
    elif (
        kl > row.further_limits["KL that has grown"]
        and kl > row.further_limits["growth"] * kl_first
    ):
        grown = f"KL to the reference rose from {kl_first:.3g} to {kl:.3g} nats per token"
        seen.append(f"{grown} in {WINDOW} steps")
    if abs(ratio - 1) > row.further_limits["ratio off 1"]:
        seen.append(f"the probability ratio is {ratio:.2f} on average")
    if clipped > row.further_limits["share that is clipped"]:
        seen.append(f"{clipped:.0%} of the tokens are clipped")
    return {"seen": ", ".join(seen)} if seen else None


def _policy_breaks(steps: _Steps, row: Notice) -> _Measured:
    newest = steps.last[-int(row.further_limits["steps in a row"]) :]
    first = steps.first[:1]
    improves = steps.mean("reward", newest) > steps.mean("reward", first)
    if steps.config.optimizer.learning_rate > HINTS["policy_breaks, rate"].limit and not improves:
        return {"row": "policy_breaks, rate"}
    if first[0] in newest:  # nothing to compare with yet
        return None
    began = _without_answer(first[0])
    now = min(map(_without_answer, newest))
    result_name = "reward" if steps.accuracy is None else "accuracy"
    result_first = steps.mean(result_name, first)
    result = steps.mean(result_name, newest)
    lost = row.further_limits["lost share of the first result"] * abs(result_first)
    if now - began < row.limit or result > result_first - lost:
        return None
    return {
        "began": began,
        "now": now,
        "measured": result_name,
        "first": result_first,
        "result": result,
    }


def _without_answer(step: Mapping[str, float]) -> float:
    """Returns a lower bound of the share of answers that are cut or have no final answer."""
    return max(step.get("truncated", 0.0), step.get("unparsable", 0.0))


def _policy_stands_still(steps: _Steps, row: Notice) -> _Measured:
    is_small = steps.config.optimizer.learning_rate < row.limit
    return {} if is_small and not steps.rose("reward") else None


def _not_finite(steps: _Steps, row: Notice) -> _Measured:
    skipped = int(steps.sum("update.skipped"))
    return {"skipped": skipped} if skipped >= row.limit else None


def _entropy(steps: _Steps, row: Notice) -> _Measured:
    began = steps.mean("update.entropy", steps.first)
    now = steps.mean("update.entropy", steps.trained)
    if steps.accuracy is None:
        learns = steps.rose("reward")
        why = "the reward does not rise"
    else:
        learns = steps.accuracy >= row.further_limits["accuracy below"] or steps.rose("accuracy")
        why = f"accuracy stays at {steps.accuracy:.2f}"
    if not steps.trained or now >= row.limit * began or learns:
        return None
    return {"began": began, "now": now, "why": why}


def _rollout_idle(steps: _Steps, row: Notice) -> _Measured:
    update = steps.share("update")
    idle = 1 - steps.mean("generating")
    # If the experience is younger than permitted, the engines do not wait for the update.
    is_as_old_as_allowed = steps.mean("staleness") > steps.config.trainer.max_staleness - 0.5
    is_measured = (
        "generating" in steps.last[0] and update >= row.further_limits["share of the update"]
    )
    if not is_measured or idle <= row.limit_of(steps.config) or not is_as_old_as_allowed:
        return None
    return {"idle": idle, "update": update}


def _half_full_passes(steps: _Steps, row: Notice) -> _Measured:
    known = [step for step in steps.trained if "update.pass_fill" in step]
    fill = steps.mean("update.pass_fill", known)
    is_set = steps.config.trainer.micro_batch_tokens != "auto"
    if not (known and is_set) or fill >= row.limit:
        return None
    answers = 1 + answers_of_pass(steps.config)
    return {"fill": fill, "answers": answers, "full": full_pass(steps.config, answers)}


def _lost_episodes(steps: _Steps, row: Notice) -> _Measured:
    lost = {name: int(steps.sum(f"lost_episodes.{name}")) for name in ("timeout", "died", "error")}
    count = sum(lost.values())
    share = count / (steps.groups * steps.config.sampling.group_size + count)
    case = f"lost_episodes, {max(lost, key=lambda each: lost[each])}"
    return {"row": case, "count": count, "share": share} if share >= row.limit else None


# The function that measures each hint; `_share_of_row` measures the others.
_MEASURES: dict[str, Callable[[_Steps, Notice], _Measured]] = {
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
    "rollout_idle": _rollout_idle,
    "half_full_passes": _half_full_passes,
    "lost_episodes": _lost_episodes,
}
