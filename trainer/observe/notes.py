"""The alarms and hints, one row each: what they say, above or below what, and what to change.

`alarms.py` and `hints.py` measure; this table has the words and every threshold.
`docs/how-to/operations.md` explains each row, and a test holds the two together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.settings.config import Config


@dataclass(frozen=True)
class Notice:
    """One row. `seen` and `remedy` are templates of the measured numbers and of `config`."""

    seen: str
    remedy: str
    limit: float
    """The main threshold, in `unit`."""
    unit: str
    also: Mapping[str, float] = field(default_factory=dict)
    """Further thresholds by what they bound."""
    unless: Mapping[str, str] = field(default_factory=dict)
    """Further remedies, each left out when its setting is already switched on."""
    slow: bool = False
    """Whether it is about speed; otherwise what the run learns is in danger."""
    metric: str = ""
    """Field of `UpdateMetrics` that the limit bounds; empty for a row that is measured in code."""
    is_least: bool = False
    """Whether the metric must be above the limit, not below."""

    def text(self, config: Config, **measured: Any) -> str:
        """Returns the sentence, or two: what is seen, and the remedy."""
        remedy = self.remedy
        for setting, further in self.unless.items():
            section, _, name = setting.partition(".")
            if getattr(getattr(config, section), name) in (0, None, "none"):
                remedy += further
        text = f"{self.seen}. {remedy}" if remedy else self.seen
        return text.format(config=config, note=self, **measured)

    @property
    def threshold(self) -> str:
        """All thresholds, as the page shows them."""
        main = f"{self.limit:.0%}" if self.unit.startswith("of ") else f"{self.limit:g}"
        return "; ".join(
            [f"{main} {self.unit}", *(f"{name}: {value:g}" for name, value in self.also.items())]
        )


MAX_DROPPED = 0.1
"""Share of the groups; `rlhf diagnose` has the same limit."""
_OLD = "with older experience"
_USUAL_RATES = "1e-6 to 1e-5 is usual for all weights, 1e-5 to 1e-3 for an adapter"
_RATE = "optimizer.learning_rate ({config.optimizer.learning_rate:g})"
_UNREAD = (
    "a reward function does not read the answers as they are (to a data set with chats: lists of "
    "messages, not texts)"
)
OWN_DEFAULTS = (
    "the distribution or samples at another temperature than it was asked to, as with a filter "
    "(top_k, top_p, min_p) or temperature among its own defaults (rollout.engine_args, "
    "generation_config.json of the model)"
)
NEVER_ENDS = (
    "; as hardly any answer ends by itself, see also whether the model's end token is the one that "
    "it was trained with (eos_token_id in its generation_config.json, sampling.stop_token_ids, "
    "sampling.ignore_eos)"
)
_EQUAL = ": they carry no gradient, so most of what is generated is wasted"
_MIXED = {
    "data.curriculum": ", or prefer those in between (data.curriculum difficulty)",
    "algorithm.dynamic_sampling": (
        "; algorithm.dynamic_sampling replaces such groups at the cost of generating more"
    ),
}
_GROUPS = "{share:.0%} of the groups have equal rewards"


def _equal(cause: str, remedy: str) -> Notice:
    return Notice(f"{_GROUPS}{cause}{_EQUAL}", remedy, 0.75, "of the groups", unless=_MIXED)


def _same(remedy: str) -> Notice:
    seen = (
        "{share:.0%} of the answers are the same as another one of their group, token for token: "
        "a group has nothing to compare"
    )
    bounds = {"accuracy below": 0.8, "temperature that is nearly greedy": 0.5}
    return Notice(seen, remedy, 0.75, "of the answers", also=bounds)


def _dropped(reason: str, remedy: str) -> Notice:
    seen = f"{{count}} groups ({{share:.0%}}) were dropped ({reason}): {remedy}"
    return Notice(seen, "", MAX_DROPPED, "of the groups")


def _lost(status: str, remedy: str) -> Notice:
    seen = f"{{count}} episodes ({{share:.0%}}) were lost, mostly {status}: {remedy}"
    return Notice(seen, "", 0.1, "of the episodes")


def _slow(seen: str, remedy: str, limit: float, **more: Any) -> Notice:
    return Notice(seen, remedy, limit, "of the time", slow=True, **more)


HINTS = {
    "policy_breaks": Notice(
        "the answers fell apart: {began:.0%} were cut or without a final answer in the first "
        "step, {now:.0%} are now, and {measured} went from {first:.3f} to {result:.3f}: updates "
        "have moved the policy too far",
        f"Lower {_RATE}: {_USUAL_RATES}; and start again from a checkpoint before that",
        0.5,
        "of the answers",
        also={"steps in a row": 2, "lost share of the first result": 0.9},
    ),
    "policy_breaks, rate": Notice(
        f"{_RATE} is so large that one update changes every weight by more than half of its usual "
        "size: the policy moves too far and breaks",
        f"Lower it: {_USUAL_RATES}",
        1e-2,
        "optimizer.learning_rate",
    ),
    "zero_variance_groups, zero": _equal(
        ": every answer got the reward 0, so either all answers are wrong (the prompts are too "
        "hard), or a reward function fails and returns 0 (an error or a time-out that it "
        f"catches itself), or {_UNREAD}",
        "Grade one right answer by hand with reward.functions, and see whether the column "
        "data.answer_field has the answers; then take easier prompts (data.source, "
        "data.levels), or a reward with intermediate steps (reward.functions)",
    ),
    "zero_variance_groups, same": _equal(
        f": every answer got the same reward, {{constant:g}}, perhaps because {_UNREAD}",
        "The reward does not tell answers to one prompt apart: correct it (reward.functions)",
    ),
    "zero_variance_groups, unrated": _equal(
        "",
        "The reward does not tell answers to one prompt apart: use one with intermediate steps "
        "(reward.functions), more tries (sampling.group_size), or other prompts (data.source)",
    ),
    "zero_variance_groups, right": _equal(
        ", mostly because all answers are right (accuracy {accuracy:.2f})",
        "The prompts are too easy for this model: use harder ones (data.source, data.levels)",
    ),
    "zero_variance_groups, wrong": _equal(
        ", mostly because all answers are wrong (accuracy {accuracy:.2f})",
        "The prompts are too hard for this model: use easier ones (data.source, data.levels), "
        "a better model (model.name), more tries (sampling.group_size), or a reward with "
        "intermediate steps (reward.functions)",
    ),
    "same_answers, cold": _same(
        "sampling.temperature ({config.sampling.temperature:g}) is nearly greedy: set it to 1, at "
        "which the policy itself samples"
    ),
    "same_answers": _same(
        "The policy is certain{entropy}: start from a model that is "
        "less so (model.name), or raise sampling.temperature ({config.sampling.temperature:g}) or "
        "algorithm.entropy_coef"
    ),
    "dead_reward": Notice(
        "reward functions whose mean score has been the same since the first step: {dead}",
        "If every answer gets it, they teach nothing: correct what they look for, or leave them "
        "out of reward.functions (a penalty that no answer incurs may stay)",
        0,
        "change of the mean",
    ),
    "reward_hacking": Notice(
        "the reward rose from {reward_first:.3f} to {reward:.3f}, and accuracy fell from "
        "{accuracy_first:.3f} to {accuracy:.3f}: the policy learns what another reward function "
        "pays for{grown}",
        "Lower its weight, or give it only to right answers (reward.functions)",
        0.05,
        "lost accuracy",
        also={"standard errors": 3, "rise of the reward": 0.02},
    ),
    "format": Notice(
        "in {share:.0%} of the completions the grader finds no answer, and the reward does not "
        "rise (mean {reward:.3f}): the model does not keep to the format",
        "Say it in sampling.system_prompt, reward it (format in reward.functions), "
        "start from a model that follows instructions (model.name), or leave room to get there "
        "(sampling.max_new_tokens {config.sampling.max_new_tokens}); see samples.jsonl",
        0.3,
        "of the completions",
    ),
    "truncated": Notice(
        "{share:.0%} of the completions are cut at sampling.max_new_tokens "
        "({config.sampling.max_new_tokens}), and {why}",
        "Raise sampling.max_new_tokens{end_token}",
        0.25,
        "of the completions",
        also={"accuracy below": 0.5, "share at which hardly any ends": 0.95},
        unless={
            "algorithm.overlong_buffer": (
                ", or make long answers cost something before the end (algorithm.overlong_buffer)"
            )
        },
    ),
    "short_answers": Notice(
        "answers became shorter, from {began:.0f} to {now:.0f} tokens: what is paid for collapses "
        "to short answers",
        "Look at what the reward pays for (reward.functions), whether long "
        "answers are cut (sampling.max_new_tokens) or lost, and how the loss weighs length "
        "(algorithm.aggregation {config.algorithm.aggregation})",
        0.4,
        "of the first tokens",
        also={"rise of the accuracy": 0.02},
    ),
    "policy_moves": Notice(
        "the policy moves too far: {seen}",
        f"Remedies: lower {_RATE}; fewer updates on a batch (algorithm.update_epochs "
        "{config.algorithm.update_epochs}, algorithm.mini_batches "
        "{config.algorithm.mini_batches}), or algorithm.early_stop_kl; younger experience "
        "(trainer.max_staleness {config.trainer.max_staleness}); a stronger pull to the reference "
        "(algorithm.kl_coef {config.algorithm.kl_coef:g})",
        0.5,
        "nats per token of KL to the reference",
        also={
            "growth": 10,
            "KL that has grown": 0.05,
            "ratio off 1": 0.2,
            "share that is clipped": 0.4,
        },
    ),
    "policy_stands_still": Notice(
        f"{_RATE} is so small that the policy hardly changes: an update moves a weight by at most "
        "about this much",
        f"Raise it: {_USUAL_RATES}",
        2e-8,
        "optimizer.learning_rate",
    ),
    "not_finite": Notice(
        "{skipped} updates were skipped because their gradient was not finite",
        "Lower optimizer.learning_rate or optimizer.max_grad_norm, or compute in float32 "
        "(model.dtype)",
        2,
        "updates",
    ),
    "entropy": Notice(
        "entropy fell from {began:.3g} to {now:.3g} nats per token, and {why}: the policy became "
        "certain too early and tries nothing new",
        "Raise algorithm.clip_high (0.28 in the recipe dapo) or sampling.temperature, set "
        f"algorithm.entropy_coef, or lower {_RATE}",
        0.2,
        "of the first entropy",
        also={"accuracy below": 0.8},
    ),
    "generation_bound": _slow(
        "the trainer waits for completions for {share:.0%} of the time",
        "Generate faster: more at once (rollout.max_running_requests), shorter answers "
        "(sampling.max_new_tokens), on a cluster more rollout nodes (num_nodes of rollout-server)",
        0.8,
        also={"with staleness": 0.5},
        unless={
            "trainer.max_staleness": (
                "; trainer.max_staleness 1 lets the next batch be generated during the update"
            )
        },
    ),
    "rollout_idle": _slow(
        "the engines are idle for {idle:.0%} of the time, and the update takes {update:.0%}: the "
        "experience is as old as trainer.max_staleness ({config.trainer.max_staleness}) permits",
        "Update faster: more tokens at once (trainer.micro_batch_tokens) or trainer.compile; on a "
        "cluster more or larger trainer nodes (num_nodes of ppo-trainer), or fewer rollout nodes",
        0.9,
        also={"with staleness": 0.5, "share of the update": 0.5},
        unless={"trainer.max_staleness": "; or run both at once (trainer.max_staleness 1)"},
    ),
    "publish_bound": _slow(
        "new weights take {share:.0%} of the time to reach the engines",
        "Change: trainer.weight_sync ({config.trainer.weight_sync}) to distributed or shared, or "
        "the network between the nodes",
        0.35,
        unless={
            "trainer.max_staleness": (
                ", or trainer.max_staleness 1, which overlaps it with the next step"
            ),
            "lora.rank": ", or an adapter instead of all weights (lora.rank)",
        },
    ),
    "lost_episodes, timeout": _lost(
        "timeout",
        "long episodes are lost more often than short ones, and the model learns from those that "
        "end in time. Give them time (environment.deadline_s), end slow calls "
        "(environment.tool_timeout_s), or ask for less (environment.turns, "
        "sampling.max_new_tokens)",
    ),
    "lost_episodes, died": _lost("died", "look at the log of environment-server for what is lost"),
    "lost_episodes, error": _lost(
        "error",
        "the environment or the program fails: the Rollouts tab and groups/ have the reasons",
    ),
    "stragglers": _slow(
        "for {share:.0%} of the time a batch is ready and the update waits for the longest of the "
        "oldest answers",
        "Raise trainer.max_staleness, lower sampling.max_new_tokens, or train on what is ready at "
        "any age (trainer.when_stale train)",
        0.15,
    ),
    "reward_bound": _slow(
        "the trainer waits for the grader for {share:.0%} of the time",
        "Grade faster: more processes (reward.workers; slots of code and concurrency of judge in "
        "reward.functions) and cores for them, or shorter limits (timeout_s in reward.functions, "
        "reward.function_timeout_s)",
        0.3,
    ),
    "replay_bound": _slow(
        "the trainer waits for the replay-buffer for {share:.0%} of the time: every group is "
        "synced to its disk",
        "Put its state (state_dir) on a faster disk or block volume, or reuse less "
        "(replay.reuse_ratio)",
        0.2,
    ),
    "nothing_active": _slow(
        "for {share:.0%} of the time nothing is generated, graded, stored or trained on: prompts "
        "come too slowly, or this process has too little processor time",
        "Compare OMP_NUM_THREADS with the cores; on a cluster look at the log of data-server",
        0.3,
    ),
    "dropped_generation": _dropped(
        "generation",
        "the engine fails or is too slow: look at its log, give it time "
        "(sampling.request_timeout_s), or ask for less (sampling.max_new_tokens)",
    ),
    "dropped_reward": _dropped(
        "reward",
        "answers cannot be graded: the log says what times out or fails. Give it time "
        "(reward.function_timeout_s, or timeout_s of a function in reward.functions) or more "
        "processes (reward.workers)",
    ),
    "dropped_teacher": _dropped(
        "teacher",
        "the teacher fails or is too slow: look at its log, and give it time (teacher.timeout_s) "
        "or fewer groups at once (teacher.concurrency)",
    ),
    "dropped_stale": _dropped(
        "stale",
        "long answers are overtaken by more than trainer.max_staleness updates, and the model "
        "learns to be short: set trainer.when_stale wait, raise trainer.max_staleness, or lower "
        "sampling.max_new_tokens",
    ),
}
"""By name, and by case where one hint has several."""

ALARMS = {
    "delta_logprob": Notice(
        "mean |Δ logprob| between rollout engine and trainer is {measured:.3g} on the same weights "
        "(alarm above {note.limit:g}): the two do not compute the same policy",
        "Likely: {mismatch}",
        # SkyRL's tests allow 0.0104 (synchronous) and 0.0193 (asynchronous) in bfloat16.
        0.02,
        "mean |Δ logprob| on the same weights",
        # Rounding has both signs, a filter one. Other weights give an engine's own samples a far
        # higher difference than a filter does, and let it jump, not grow.
        also={"one-sided share": 0.5, "most that a filter leaves out": 1, "jump": 5},
        metric="delta_logprob_current",
    ),
    # NeMo-RL calls 1e-3 between engine and trainer a problem; stale experience exceeds it.
    "kl_rollout": Notice(
        "KL(rollout ‖ trainer) is {measured:.3g} nats per token (alarm above {bound:g})",
        "Likely: {cause}",
        1e-3,
        "nats per token",
        also={_OLD: 1e-2},
        metric="kl_rollout",
    ),
    "effective_sample_size": Notice(
        "the effective sample size is {measured:.2f} of the tokens (alarm below {note.limit:g}): "
        "few tokens carry the update",
        "Likely: {cause}",
        0.5,
        "of the tokens",
        metric="effective_sample_size",
        is_least=True,
    ),
    "likelihood": Notice(
        "the sampled tokens are likelier than sampling from the policy makes them, by {gap:.2g} "
        "nats per token (entropy is {entropy:.2g}): the engine truncates " + OWN_DEFAULTS,
        "",
        # Only groups of differing rewards are measured, and which those are depends on what was
        # sampled; the standard errors are those of independent tokens, which one answer's are not.
        0.15,
        "of the entropy",
        also={"standard errors": 8},
    ),
    "copied_answers": Notice(
        "{share:.0%} of the answers are the same as another one of their group, token "
        "for token, and that is no coincidence: the model gives such an answer a probability "
        "of {example:.1g}",
        "They were sampled with one seed, or greedily (a top_k 1 or a temperature 0 among the "
        "engine's own defaults), or one answer was returned several times: make the engine sample "
        "every answer with a seed of its own",
        20,
        "nats of surprise",
    ),
    "reference": Notice(
        "KL to the reference is {kl:.2g} nats per token in the first step already: model.reference "
        "is not the model that training starts from ({config.model.reference}), and "
        "algorithm.kl_coef pulls the policy to another model; leave model.reference empty unless "
        "you want that",
        "",
        0.05,
        "nats per token in the first step",
    ),
    "same_prompts": Notice(
        "the prompts of {problems} different problems are the same, token for token: the model "
        "does not see the problem",
        "Likely: the chat template leaves out the user's message; correct model.chat_template or "
        "data.prompt_template, and see the prompt of a group in the tab Rollouts",
        2,
        "different problems",
    ),
    "refused_calls": Notice(
        "{outcome}{calls} calls of the model were refused: {refusal}", "", 1, "call"
    ),
}

SLOW = frozenset(name for name, row in HINTS.items() if row.slow)
"""The hints that are about speed."""


def limits(*, is_old: bool) -> dict[str, float]:
    """Returns the limits of the metrics of an update by alarm. `is_old`: an earlier policy sampled
    some of the experience.
    """
    return {
        name: row.also.get(_OLD, row.limit) if is_old else row.limit
        for name, row in ALARMS.items()
        if row.metric
    }
