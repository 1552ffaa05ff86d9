"""Hints: problems seen over the last steps, and which setting to change. Pure.

An alarm (`alarms.py`) concerns a single update; a hint needs several steps.
docs/how-to/troubleshooting.md explains every threshold.
"""

import math
import statistics
from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any

from common.settings.config import Config
from trainer.timing import STAGES, WAITING
from trainer.trackers.base import numbers

WINDOW = 10
"""Number of latest steps that hints consider."""
FIRST = 5
"""Number of first steps whose entropy is the baseline."""
MAX_EQUAL = 0.75
MAX_COPIES = 0.75
COLD = 0.5
"""Temperature below which sampling leaves little choice."""
MAX_UNPARSABLE = 0.3
MAX_TRUNCATED = 0.25
LOW_ACCURACY = 0.5
"""Truncation harms learning below this accuracy."""
NEVER_ENDS = 0.95
LENGTH_LEFT = 0.4
ACCURACY_LOST = 0.05
CERTAIN_LOSS = 3.0
"""Standard errors of a difference of means above which accuracy fell, and did not just vary from
step to step."""
FLAT = 0.02
"""Smallest rise of a mean from the first to the second half of the window that counts as a rise."""
LEAST_RATE = 2e-8
"""AdamW moves a weight by at most about the learning rate in an update; those of language models
are about 0.02 in size. Below this rate a thousand updates change them by a thousandth."""
MOST_RATE = 1e-2
"""Above it, one update changes them by half of their size."""
USUAL_RATES = "1e-6 to 1e-5 is usual for all weights, 1e-5 to 1e-3 for an adapter"
BROKEN = 0.5
"""Rise of the share of answers that are cut or have no final answer since the first step."""
RESULT_LOST = 0.9
"""Share of the first step's accuracy or reward that a broken policy has lost."""
BROKEN_STEPS = 2
"""Steps in a row that show it, so that one odd batch is no hint."""
MAX_KL_REFERENCE = 0.5
"""Nats per token."""
KL_GROWTH = 10.0
MIN_GROWN_KL = 0.05
MAX_RATIO_OFF = 0.2
MAX_CLIPPED = 0.4
ENTROPY_LEFT = 0.2
SOLVED = 0.8
MAX_GENERATION = 0.8
MAX_GENERATION_ASYNC = 0.5
MAX_IDLE = 0.9
MAX_IDLE_ASYNC = 0.5
MAX_REWARD = 0.3
MAX_REPLAY = 0.2
MAX_PUBLISH = 0.35
MAX_WAITING = 0.3
MAX_STRAGGLERS = 0.15
MAX_DROPPED = 0.1
_DROPS = {
    "generation": (
        "the engine fails or is too slow: look at its log, give it time "
        "(sampling.request_timeout_s), or ask for less (sampling.max_new_tokens)"
    ),
    "reward": (
        "answers cannot be graded: the log says what times out or fails. Give it time "
        "(reward.function_timeout_s, or timeout_s of a function in reward.functions) or more "
        "processes (reward.workers)"
    ),
    "teacher": (
        "the teacher fails or is too slow: look at its log, and give it time (teacher.timeout_s) "
        "or fewer groups at once (teacher.concurrency)"
    ),
    "stale": (
        "long answers are overtaken by more than trainer.max_staleness updates, and the model "
        "learns to be short: set trainer.when_stale wait, raise trainer.max_staleness, or lower "
        "sampling.max_new_tokens"
    ),
}
_UNREAD = (
    "a reward function does not read the answers as they are (to a data set with chats: lists of "
    "messages, not texts)"
)
_LOST = {
    "timeout": (
        "long episodes are lost more often than short ones, and the model learns from those that "
        "end in time. Give them time (environment.deadline_s), end slow calls "
        "(environment.tool_timeout_s), or ask for less (environment.turns, sampling.max_new_tokens)"
    ),
    "died": "look at the log of environment-server for what is lost",
    "error": "the environment or the program fails: the Rollouts tab and groups/ have the reasons",
}
"""What to do about lost episodes, by their most frequent status."""
_SLOW = {
    "stragglers": (
        "stragglers",
        MAX_STRAGGLERS,
        "for {share:.0%} of the time a batch is ready and the update waits for the longest of the "
        "oldest answers. Raise trainer.max_staleness, lower sampling.max_new_tokens, or train on "
        "what is ready at any age (trainer.when_stale train)",
    ),
    "reward_bound": (
        "reward",
        MAX_REWARD,
        "the trainer waits for the grader for {share:.0%} of the time. Grade faster: more "
        "processes (reward.workers; slots of code and concurrency of judge in reward.functions) "
        "and cores for them, or shorter limits (timeout_s in reward.functions, "
        "reward.function_timeout_s)",
    ),
    "replay_bound": (
        "replay",
        MAX_REPLAY,
        "the trainer waits for the replay-buffer for {share:.0%} of the time: every group is "
        "synced to its disk. Put its state (state_dir) on a faster disk or block volume, or reuse "
        "less (replay.reuse_ratio)",
    ),
    "nothing_active": (
        "waiting",
        MAX_WAITING,
        "for {share:.0%} of the time nothing is generated, graded, stored or trained on: prompts "
        "come too slowly, or this process has too little processor time. Compare OMP_NUM_THREADS "
        "with the cores; on a cluster look at the log of data-server",
    ),
}
"""Stage, limit on its share of the wall time, and text, by hint name."""
Line = Mapping[str, Any]


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
    if not history:
        return {}
    steps = _Steps(history, config)
    found = {"policy_breaks": _policy_breaks(steps)}
    if len(history) >= WINDOW:
        found |= _of_window(steps)
    return {name: text for name, text in found.items() if text}


def _of_window(steps: "_Steps") -> dict[str, str]:
    """Returns the texts of the hints about the last `WINDOW` steps, empty ones included."""
    found = {
        "zero_variance_groups": _zero_variance_groups(steps),
        "same_answers": _same_answers(steps),
        "dead_reward": _dead_reward(steps),
        "reward_hacking": _reward_hacking(steps),
        "format": _format(steps),
        "truncated": _truncated(steps),
        "short_answers": _short_answers(steps),
        "policy_moves": _policy_moves(steps),
        "policy_stands_still": _policy_stands_still(steps),
        "not_finite": _not_finite(steps),
        "entropy": _entropy(steps),
        "generation_bound": _generation_bound(steps),
        "rollout_idle": _rollout_idle(steps),
        "publish_bound": _publish_bound(steps),
        "lost_episodes": _lost_episodes(steps),
    }
    for name, (stage, limit, text) in _SLOW.items():
        found[name] = _slow(steps, stage, limit, text)
    for reason in _DROPS:
        found[f"dropped_{reason}"] = _dropped(steps, reason)
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
        return self.mean(name, self.last[half:]) - self.mean(name, self.last[:half]) > FLAT

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


def _zero_variance_groups(steps: _Steps) -> str:
    if steps.config.algorithm.advantage == "none":
        return ""
    share = _equal_share(steps)
    if share < MAX_EQUAL:
        return ""
    config = steps.config
    if _same_answers(steps):
        return ""  # which is why the rewards are equal
    accuracy = steps.accuracy()
    solved = steps.sum("solved_groups")
    failed = steps.sum("failed_groups")
    # Without solved or failed groups, all equal ones were replaced.
    mostly_right = accuracy is not None and accuracy >= 0.5
    easy = solved > failed if solved + failed else mostly_right

    # Rewards that differ between groups alone have a mean that changes.
    constant = steps.constant("reward") if share == 1 else None
    if constant == 0:
        cause = _always_zero(accuracy)
        remedy = (
            "Grade one right answer by hand with reward.functions, and see whether the column "
            "data.answer_field has the answers; then take easier prompts (data.source, "
            "data.levels), or a reward with intermediate steps (reward.functions)"
        )
    elif accuracy is None:
        cause = ""
        if constant is not None:
            cause = f": every answer got the same reward, {constant:g}, perhaps because {_UNREAD}"
        remedy = (
            "The reward does not tell answers to one prompt apart: use one with intermediate steps "
            "(reward.functions), more tries (sampling.group_size), or other prompts (data.source)"
        )
    elif easy:
        cause = f", mostly because all answers are right (accuracy {accuracy:.2f})"
        remedy = (
            "The prompts are too easy for this model: use harder ones (data.source, data.levels)"
        )
    else:
        cause = f", mostly because all answers are wrong (accuracy {accuracy:.2f})"
        remedy = (
            "The prompts are too hard for this model: use easier ones (data.source, data.levels), "
            "a better model (model.name), more tries (sampling.group_size), or a reward with "
            "intermediate steps (reward.functions)"
        )
    text = (
        f"{share:.0%} of the groups have equal rewards{cause}: they carry no gradient, so most of "
        f"what is generated is wasted. {remedy}"
    )
    if config.data.curriculum == "none":
        text += ", or prefer those in between (data.curriculum difficulty)"
    if not config.algorithm.dynamic_sampling:
        text += "; algorithm.dynamic_sampling replaces such groups at the cost of generating more"
    return text


def _always_zero(accuracy: float | None) -> str:
    """Returns why no answer may ever have got another reward than 0."""
    cause = (
        ": every answer got the reward 0, so either all answers are wrong (the prompts are too "
        "hard), or a reward function fails and returns 0 (an error or a time-out that it "
        "catches itself)"
    )
    return cause if accuracy is not None else f"{cause}, or {_UNREAD}"


def _same_answers(steps: _Steps) -> str:
    share = steps.mean("copies")
    accuracy = steps.accuracy()
    solved = accuracy is not None and accuracy >= SOLVED
    # Short answers may be copies while the others of their groups still teach.
    teaches = _equal_share(steps) < MAX_EQUAL
    if share < MAX_COPIES or solved or teaches:
        return ""
    temperature = steps.config.sampling.temperature
    seen = (
        f"{share:.0%} of the answers are the same as another one of their group, token for token: "
        "a group has nothing to compare"
    )
    if temperature < COLD:
        return (
            f"{seen}. sampling.temperature ({temperature:g}) is nearly greedy: set it to 1, at "
            "which the policy itself samples"
        )
    entropy = ""
    if steps.measured:
        entropy = f" (entropy {steps.mean('update.entropy', steps.measured):.2g} nats per token)"
    return (
        f"{seen}. The policy is certain{entropy}: start from a model that is less so (model.name), "
        f"or raise sampling.temperature ({temperature:g}) or algorithm.entropy_coef"
    )


def _dead_reward(steps: _Steps) -> str:
    names = [name for name in steps.last[-1] if name.startswith("rewards.")]
    if len(names) < 2:
        return ""
    dead = {name: steps.constant(name) for name in names}
    found = [
        f"{name.removeprefix('rewards.')} ({value:g})"
        for name, value in dead.items()
        if value is not None
    ]
    if not found:
        return ""
    return (
        "reward functions whose mean score has been the same since the first step: "
        f"{', '.join(found)}. If every answer gets it, they teach nothing: correct what they look "
        "for, or leave them out of reward.functions (a penalty that no answer incurs may stay)"
    )


def _reward_hacking(steps: _Steps) -> str:
    accuracy = steps.accuracy()
    if accuracy is None:
        return ""
    reward_first = steps.mean("reward", steps.first)
    reward = steps.mean("reward")
    accuracy_first = steps.mean("accuracy", steps.first)
    least_loss = max(ACCURACY_LOST, CERTAIN_LOSS * steps.error_since_first("accuracy"))
    if reward - reward_first < FLAT or accuracy_first - accuracy < least_loss:
        return ""
    grown = [
        f"{name.removeprefix('rewards.')} ({steps.mean(name, steps.first):.2f} → "
        f"{steps.mean(name):.2f})"
        for name in steps.last[-1]
        if name.startswith("rewards.") and steps.mean(name) > steps.mean(name, steps.first) + FLAT
    ]
    return (
        f"the reward rose from {reward_first:.3f} to {reward:.3f}, and accuracy fell from "
        f"{accuracy_first:.3f} to {accuracy:.3f}: the policy learns what another reward function "
        f"pays for{': ' if grown else ''}{', '.join(grown)}. Lower its weight, or give it only to "
        "right answers (reward.functions)"
    )


def _format(steps: _Steps) -> str:
    share = steps.mean("unparsable")
    if share < MAX_UNPARSABLE or steps.rose("reward"):
        return ""
    return (
        f"in {share:.0%} of the completions the grader finds no answer, and the reward does not "
        f"rise (mean {steps.mean('reward'):.3f}): the model does not keep to the format. Say it in "
        "sampling.system_prompt, reward it (format in reward.functions), "
        "start from a model that follows instructions (model.name), or leave room to get there "
        f"(sampling.max_new_tokens {steps.config.sampling.max_new_tokens}); see samples.jsonl"
    )


def _truncated(steps: _Steps) -> str:
    share = steps.mean("truncated")
    accuracy = steps.accuracy()
    if accuracy is None:
        is_harmless = steps.rose("reward") and share < NEVER_ENDS
        seen = "the reward does not rise" if not steps.rose("reward") else "hardly any ends"
    else:
        is_harmless = accuracy >= LOW_ACCURACY
        seen = f"accuracy is {accuracy:.2f}: what is cut is hardly ever right"
    if share < MAX_TRUNCATED or is_harmless:
        return ""
    text = (
        f"{share:.0%} of the completions are cut at sampling.max_new_tokens "
        f"({steps.config.sampling.max_new_tokens}), and {seen}. Raise sampling.max_new_tokens"
    )
    if share >= NEVER_ENDS:
        text += (
            "; as hardly any answer ends by itself, see also whether the model's end token is the "
            "one that it was trained with (eos_token_id in its generation_config.json, "
            "sampling.stop_token_ids, sampling.ignore_eos)"
        )
    if not steps.config.algorithm.overlong_buffer:
        text += ", or make long answers cost something before the end (algorithm.overlong_buffer)"
    return text


def _short_answers(steps: _Steps) -> str:
    began = steps.mean("completion_tokens", steps.first)
    now = steps.mean("completion_tokens")
    accuracy = steps.accuracy()
    # Not `rose`: answers that have become short and right stay so.
    learned = accuracy is not None and accuracy > steps.mean("accuracy", steps.first) + FLAT
    if now > LENGTH_LEFT * began or began == 0 or learned:
        return ""
    aggregation = steps.config.algorithm.aggregation
    return (
        f"answers became shorter, from {began:.0f} to {now:.0f} tokens: what is paid for collapses "
        "to short answers. Look at what the reward pays for (reward.functions), whether long "
        "answers are cut (sampling.max_new_tokens) or lost, and how the loss weighs length "
        f"(algorithm.aggregation {aggregation})"
    )


def _policy_moves(steps: _Steps) -> str:
    newest = steps.last[-3:]
    kl_first = steps.mean("update.kl_reference", steps.last[:3])
    kl_last = steps.mean("update.kl_reference", newest)
    ratio = steps.mean("update.ratio", newest)
    clipped = steps.mean("update.clip_fraction", newest)
    seen = []
    if kl_last > MAX_KL_REFERENCE:
        seen.append(f"KL to the reference is {kl_last:.3g} nats per token")
    elif kl_last > MIN_GROWN_KL and kl_last > KL_GROWTH * kl_first:
        seen.append(
            f"KL to the reference rose from {kl_first:.3g} to {kl_last:.3g} nats per token in "
            f"{WINDOW} steps"
        )
    if abs(ratio - 1) > MAX_RATIO_OFF:
        seen.append(f"the probability ratio is {ratio:.2f} on average")
    if clipped > MAX_CLIPPED:
        seen.append(f"{clipped:.0%} of the tokens are clipped")
    if not seen:
        return ""
    config = steps.config
    remedies = [f"lower trainer.learning_rate ({config.trainer.learning_rate:g})"]
    if config.algorithm.updates_per_batch > 1:
        remedies.append(
            "fewer updates on a batch (algorithm.update_epochs, algorithm.mini_batches), or "
            "algorithm.early_stop_kl"
        )
    if config.trainer.max_staleness:
        remedies.append(
            f"younger experience (trainer.max_staleness {config.trainer.max_staleness})"
        )
    if config.algorithm.kl_coef:
        remedies.append(
            f"a stronger pull to the reference (algorithm.kl_coef {config.algorithm.kl_coef:g})"
        )
    return f"the policy moves too far: {', '.join(seen)}. Remedies: {'; '.join(remedies)}"


def _policy_breaks(steps: _Steps) -> str:
    rate = steps.config.trainer.learning_rate
    newest = steps.last[-BROKEN_STEPS:]
    improves = steps.mean("reward", newest) > steps.mean("reward", steps.first[:1])
    if rate > MOST_RATE and not improves:
        return (
            f"trainer.learning_rate ({rate:g}) is so large that one update changes every weight by "
            "more than half of its usual size: the policy moves too far and breaks. Lower it: "
            f"{USUAL_RATES}"
        )
    if steps.first[0] in newest:
        return ""
    began = _without_answer(steps.first[0])
    now = min(map(_without_answer, newest))
    measured = "reward" if steps.accuracy() is None else "accuracy"
    result_first = steps.mean(measured, steps.first[:1])
    result = steps.mean(measured, newest)
    if now - began < BROKEN or result > result_first - RESULT_LOST * abs(result_first):
        return ""
    return (
        f"the answers fell apart: {began:.0%} were cut or without a final answer in the first "
        f"step, {now:.0%} are now, and {measured} went from {result_first:.3f} to {result:.3f}: "
        "updates have moved the policy too far. Lower "
        f"trainer.learning_rate ({rate:g}; {USUAL_RATES}), and start again from a checkpoint "
        "before that"
    )


def _without_answer(row: Mapping[str, float]) -> float:
    """Returns the share of the answers that are cut or have no final answer, at least."""
    return max(row.get("truncated", 0.0), row.get("unparsable", 0.0))


def _policy_stands_still(steps: _Steps) -> str:
    rate = steps.config.trainer.learning_rate
    if rate >= LEAST_RATE or steps.rose("reward"):
        return ""
    return (
        f"trainer.learning_rate ({rate:g}) is so small that the policy hardly changes: an update "
        f"moves a weight by at most about this much. Raise it: {USUAL_RATES}"
    )


def _not_finite(steps: _Steps) -> str:
    skipped = int(steps.sum("update.skipped"))
    if skipped < 2:
        return ""
    return (
        f"{skipped} updates were skipped because their gradient was not finite. Lower "
        "trainer.learning_rate or trainer.max_grad_norm, or compute in float32 (model.dtype)"
    )


def _entropy(steps: _Steps) -> str:
    began = steps.mean("update.entropy", steps.first)
    now = steps.mean("update.entropy", steps.measured)
    accuracy = steps.accuracy()
    if accuracy is None:
        learns = steps.rose("reward")
        seen = "the reward does not rise"
    else:
        learns = accuracy >= SOLVED or steps.rose("accuracy")
        seen = f"accuracy stays at {accuracy:.2f}"
    if not steps.measured or now >= ENTROPY_LEFT * began or learns:
        return ""
    return (
        f"entropy fell from {began:.3g} to {now:.3g} nats per token, and {seen}: the policy became "
        "certain too early and tries nothing new. Raise algorithm.clip_high (0.28 in the recipe "
        "dapo) or sampling.temperature, set algorithm.entropy_coef, or lower trainer.learning_rate "
        f"({steps.config.trainer.learning_rate:g})"
    )


def _generation_bound(steps: _Steps) -> str:
    staleness = steps.config.trainer.max_staleness
    share = steps.share("generation")
    if share < (MAX_GENERATION_ASYNC if staleness else MAX_GENERATION):
        return ""
    text = (
        f"the trainer waits for completions for {share:.0%} of the time. Generate faster: more at "
        "once (rollout.max_running_requests), shorter answers (sampling.max_new_tokens), on a "
        "cluster more rollout nodes (num_nodes of rollout-server)"
    )
    if not staleness:
        text += "; trainer.max_staleness 1 lets the next batch be generated during the update"
    return text


def _rollout_idle(steps: _Steps) -> str:
    staleness = steps.config.trainer.max_staleness
    update = steps.share("update")
    if "generating" not in steps.last[0] or update < 0.5:
        return ""
    idle = 1 - steps.mean("generating")
    faster = (
        "more tokens at once (trainer.micro_batch_tokens) or trainer.compile; on a cluster more or "
        "larger trainer nodes (num_nodes of ppo-trainer), or fewer rollout nodes"
    )
    is_as_old_as_allowed = steps.mean("staleness") > staleness - 0.5
    if staleness and idle > MAX_IDLE_ASYNC and is_as_old_as_allowed:
        return (
            f"the engines are idle for {idle:.0%} of the time, because the experience is as old as "
            f"trainer.max_staleness ({staleness}) permits and the update takes {update:.0%}. "
            f"Update faster: {faster}"
        )
    if not staleness and idle > MAX_IDLE:
        return (
            f"the engines are idle for {idle:.0%} of the time, the update takes {update:.0%}. Run "
            f"both at once (trainer.max_staleness 1), or update faster: {faster}"
        )
    return ""


def _publish_bound(steps: _Steps) -> str:
    config = steps.config
    share = steps.share("publish")
    if share < MAX_PUBLISH:
        return ""
    remedies = []
    if config.trainer.weight_sync != "distributed":
        remedies.append("trainer.weight_sync distributed (or shared)")
    if not config.trainer.max_staleness:
        remedies.append("trainer.max_staleness 1, which overlaps it with the next step")
    if not config.lora.rank:
        remedies.append("an adapter instead of all weights (lora.rank)")
    remedy = ", or ".join(remedies) or "the network between the nodes"
    return f"new weights take {share:.0%} of the time to reach the engines. Change: {remedy}"


def _lost_episodes(steps: _Steps) -> str:
    lost = {status: int(steps.sum(f"lost_episodes.{status}")) for status in _LOST}
    count = sum(lost.values())
    share = count / (steps.groups * steps.config.sampling.group_size + count)
    if share < MAX_DROPPED:
        return ""
    status = max(lost, key=lambda each: lost[each])
    return f"{count} episodes ({share:.0%}) were lost, mostly {status}: {_LOST[status]}"


def _slow(steps: _Steps, stage: str, limit: float, text: str) -> str:
    share = steps.share(stage)
    return text.format(share=share) if share >= limit else ""


def _dropped(steps: _Steps, reason: str) -> str:
    count = steps.dropped(reason)
    share = count / (steps.groups + count)
    if share < MAX_DROPPED:
        return ""
    return f"{count} groups ({share:.0%}) were dropped ({reason}): {_DROPS[reason]}"
