"""The catalogue of what can be wrong with a run: every fault, hint and alarm is one row, with its
meaning, its limit and its remedy.

| table | a row is | who says it |
|---|---|---|
| `FAULTS` | known by the code of an error or log line, or by words of a library | `rlhf diagnose` |
| `HINTS` | measured over several steps (`hints.py`) | the run |
| `ALARMS` | measured in one update (`alarms.py`) | the run |

The name of a row is a heading of `docs/how-to/operations.md`, which explains it; a test compares
names, limits and settings.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Self

from common.settings.config import Config
from trainer.trackers.base import Numbers


class Said(str):
    """The text of an alarm or hint, with the `settings` that it names."""

    settings: Sequence[str] = ()


Texts = dict[str, Said]
"""The texts of alarms or hints by name."""
_NAME = re.compile(r"\{([a-z0-9_.]+)!\}")
"""A setting that a template names."""


class Fault(str):
    """A row of `FAULTS`. As a text it is the fault's name, which a `Finding` has too."""

    remedy: str
    codes: tuple[str, ...]
    foreign_text: str
    """A regular expression for what torch, SQLite, Python or the kernel write about it; empty for
    none."""

    def __new__(
        cls, heading: str, remedy: str, *, codes: tuple[str, ...] = (), foreign_text: str = ""
    ) -> Self:
        fault = super().__new__(cls, heading)
        fault.remedy = remedy
        fault.codes = codes
        fault.foreign_text = foreign_text
        FAULTS.append(fault)
        return fault


FAULTS: list[Fault] = []
"""Every `Fault` that is created below, in this order."""
_WAIT = (
    "nothing if its task is restarted (SkyPilot, jobgroup.local); else see the end of its log and "
    "start it again: the trainer waits limits.service_timeout_s"
)

DATA_DIES = Fault("Data-server dies", _WAIT)
REWARD_DIES = Fault("Reward-server dies", _WAIT)
REPLAY_DIES = Fault("Replay-buffer dies", _WAIT)
ENVIRONMENT_DIES = Fault("Environment-server dies or hangs", _WAIT)
SERVICE_HANGS = Fault(
    "Data-server, reward-server or replay-buffer hangs",
    "nobody restarts what hangs: kill -CONT if it is stopped, else kill it, and its task is "
    "restarted; nothing is lost",
)
CANNOT_START = Fault(
    "A service cannot start its graders, or the server of `agent:`",
    "fix what the reason names and start the run again",
    codes=("service_lost",),
)
ENGINE_DIES = Fault(
    "An engine dies", "nothing: its agent restarts it; see the engine's log if it dies again"
)
ENGINE_DIES_AGAIN = Fault(
    "An engine dies again and again",
    "fix what the end of the engine's log names and start again",
    codes=("engine_failed",),
)
ENGINE_CANNOT = Fault(
    "The embedded engine cannot run the model",
    "another model, or rollout.engine sglang",
    codes=("unfit_model",),
)
ENGINE_OF_PROCESS = Fault(
    "The engine of a run in one process dies, for example for lack of memory",
    "fix what the reason names and start again",
)
ENGINE_HANGS = Fault(
    "An engine or the router hangs",
    "nothing: its agent kills and restarts it after rollout.hang_timeout_s",
)
ROUTER_DIES = Fault("The router dies", "nothing: the agent of node 0 restarts it")
NODE_DIES = Fault(
    "A rollout node dies",
    "nothing: its task is restarted, and the run goes on with the other nodes",
)
AGENT_HANGS = Fault("An agent hangs or is cut off", "continue it (kill -CONT) or restart its task")
OLD_WEIGHTS = Fault(
    "An engine serves old weights",
    "see the agent's log for why it cannot load them; restart that rollout node",
    codes=("node_stale", "nodes_behind"),
)
WEIGHTS_DAMAGED = Fault(
    "A byte of a rollout node's weights changes",
    "nothing: it downloads them again; check that node's disk if it recurs",
    codes=("bad_weights",),
)
RANK_DIES = Fault(
    "A trainer node or one of its processes dies",
    "nothing if the task is restarted: the run goes on from its newest checkpoint; look for "
    "the killer (kernel log, memory limit of the pod)",
)
RANK_STUCK = Fault(
    "A rank of the trainer is stuck",
    "continue it if it is stopped (kill -CONT); else see its stack, and end it: all ranks are "
    "started again from the newest checkpoint",
)
RANK_MEMORY = Fault(
    "A rank of the trainer is out of memory",
    "lower trainer.micro_batch_tokens, switch on trainer.activation_checkpointing or "
    "parallel.offload_optimizer, or shard over more ranks (parallel.shard_size)",
    codes=("out_of_memory",),
    foreign_text=r"OutOfMemory|out of memory|Cannot allocate memory|bad_alloc|MemoryError",
)
KILLED = Fault(
    "The trainer was killed",
    "start it again: it goes on from its newest checkpoint; look for the killer (kernel log, "
    "memory limit of the pod; a terminal that closes: use nohup or tmux)",
    codes=("rank_killed",),
)
INTERRUPTED = Fault(
    "The run was interrupted",
    "start it again with the same run directory: it goes on from its checkpoint",
    codes=("interrupted",),
)
ENDED = Fault("The run ended with an error", "see the lines above")
TASK_FAILED = Fault(
    "A task has failed more often than it may be restarted",
    "fix what its last line names and start again",
)
WRONG_TOKEN = Fault(
    "A task has the wrong token",
    "set the same API_TOKEN in every task and start again",
    codes=("unauthorized",),
)
CERTIFICATE = Fault(
    "A certificate is not trusted",
    "set TLS_CA to the authority that signed TLS_CERT, the same in every task",
    codes=("certificate",),
)
UNKNOWN_NAME = Fault(
    "A name does not resolve",
    "check that the task runs and that its name resolves from the trainer (getent hosts NAME); "
    "names are TASK-NODE.GROUP",
)
WRONG_SETTING = Fault("A setting is wrong", "correct that setting and start again")
DISK_OF_SERVICE = Fault(
    "A full disk: replay-buffer, data-server",
    "free space there: everything continues by itself",
)
DISK_OF_NODE = Fault(
    "A full disk: a rollout node", "free space there: the node fetches the weights again by itself"
)
DISK_OF_RUN = Fault(
    "A full disk: the trainer's run directory",
    "free space there and start again: the run goes on from its newest checkpoint",
    codes=("disk_full",),
    foreign_text=r"No space left|Disk quota exceeded|File too large",
)
SECOND_RUN = Fault(
    "A second run is started in the `RUN_DIR` of a running one",
    "leave the directory to that run, or name another RUN_DIR",
    codes=("run_in_use", "run_taken_over"),
)
CHECKPOINT_DAMAGED = Fault(
    "A byte of a checkpoint changes",
    "restore it from a copy, or remove it to go on from the one before",
    codes=("checkpoint_changed",),
)
SQLITE_DAMAGED = Fault(
    "An SQLite file or its log is damaged, cut or removed",
    "restore the file that the reason names from a copy, or move it away",
    codes=("damaged",),
    foreign_text=r"disk image is malformed|file is not a database|btreeInitPage",
)
NOT_GRADED = Fault(
    "Answers cannot be graded",
    "see why in the evidence: correct the reward function, or give it time "
    "(reward.function_timeout_s) or processes (reward.workers)",
    codes=("not_graded",),
)
NOT_GENERATED = Fault(
    "Completions cannot be generated",
    "see the log of rollout-server; ask for less (sampling.max_new_tokens)",
)
ENGINES_BUSY = Fault(
    "The engines are busy",
    "nothing: a step takes as long as its answers; for shorter steps add rollout nodes, or ask for "
    "less (sampling.max_new_tokens, sampling.group_size, trainer.batch_size)",
)
NO_BATCH = Fault(
    "No batch comes",
    "see what the trainer waits for in the evidence, and the log of that service",
    codes=("no_batch", "stuck"),
)
NO_STEP = Fault(
    "No step ends",
    "see what waits in the evidence, and the log of the service that it waits for; restart "
    "that service if its log has nothing; kill -USR1 makes a process log its stacks",
)
EQUAL_REWARDS = Fault(
    "Every group has equal rewards",
    "the prompts are too hard or too easy, or the reward is constant: change data.source, "
    "reward.functions, or sampling.group_size",
    codes=("equal_rewards",),
)
NOT_FINITE = Fault(
    "A number is not finite",
    "lower optimizer.learning_rate or optimizer.max_grad_norm, or set model.dtype float32",
    codes=("not_finite",),
)
DRAWN_TWICE = Fault(
    "A prompt is drawn twice", "restore the state of data-server (STATE_DIR), or start a new run"
)
VERSIONS_DIFFER = Fault("Versions differ", "install the same version in every task")

BY_CODE = {code: fault for fault in FAULTS for code in fault.codes}
# By task or node.
_DIES = {
    "data-server": DATA_DIES,
    "reward-server": REWARD_DIES,
    "replay-buffer": REPLAY_DIES,
    "router": ROUTER_DIES,
    "engine": ENGINE_DIES,
    "environment-server": ENVIRONMENT_DIES,
    "rollout-server": NODE_DIES,
}
# The other services share `SERVICE_HANGS`.
_HANGS = {
    "environment-server": ENVIRONMENT_DIES,
    "rollout-server": AGENT_HANGS,
    "router": ENGINE_HANGS,
    "engine": ENGINE_HANGS,
}
_BY_PROBLEM: dict[str, Fault] = {
    "unknown_name": UNKNOWN_NAME,
    "unauthorized": WRONG_TOKEN,
    "certificate": CERTIFICATE,
    "disk_full": DISK_OF_SERVICE,
}


def fault_in_text(text: str) -> Fault | None:
    """Returns the fault about which torch, SQLite, Python or the kernel wrote `text`; None without
    one.
    """
    for fault in FAULTS:
        if fault.foreign_text and re.search(fault.foreign_text, text):
            return fault
    return None


def fault_of_service(service: str, problem: str) -> Fault:
    """Returns the fault for a problem (`common.clients.unreachable`) of `service`: a task, a node,
    `router` or `engine`.
    """
    if service == "rollout-server":  # its address is that of the router
        service = "router"
    if problem == "lost":
        return ENGINE_OF_PROCESS if service in ("router", "engine") else CANNOT_START
    if problem in _BY_PROBLEM:
        is_node = service.startswith("rollout-server")
        return DISK_OF_NODE if problem == "disk_full" and is_node else _BY_PROBLEM[problem]
    task = service.rstrip("0123456789").rstrip("-")  # `rollout-server-1` is a node of its task
    if problem == "silent":
        return _HANGS.get(task, SERVICE_HANGS)
    return _DIES.get(task, ENDED)


@dataclass(frozen=True)
class Notice:
    """A row of `HINTS` or `ALARMS`."""

    seen: str
    """What is wrong. `seen` and `remedy` are templates of the measured numbers, of this row
    (`note`), and of the settings: `{data.source!}` is the name of one, `{config.data.source}` its
    value."""
    remedy: str
    limit: float
    """The main threshold, in `unit`."""
    unit: str
    further_limits: Mapping[str, float] = field(default_factory=dict)
    """Further thresholds by what they bound."""
    remedies_unless_set: Mapping[str, str] = field(default_factory=dict)
    """Further remedies by setting; left out where the setting is switched on already."""
    stage: str = ""
    """The stage whose share of the time the limit bounds."""
    dropped: str = ""
    """The reason of dropped groups whose share the limit bounds."""
    metric: str = ""
    """The field of `UpdateMetrics` that the limit bounds. A row with none of these three is
    measured by a function of its own."""
    is_minimum: bool = False
    """Whether the metric must be above the limit, not below."""

    def limit_of(self, config: Config) -> float:
        """Returns the main limit; some rows have another one for runs with stale experience."""
        return (
            self.further_limits.get(_STALE, self.limit)
            if config.trainer.max_staleness
            else self.limit
        )

    def text(self, config: Config, **measured: Any) -> Said:
        """Returns the sentence, or two: what is seen, and the remedy."""
        remedy = self.remedy
        for setting, further in self.remedies_unless_set.items():
            if attrgetter(setting)(config) in (0, None, "none"):
                remedy += further
        template = f"{self.seen}. {remedy}" if remedy else self.seen
        said = Said(_NAME.sub(r"\1", template).format(config=config, note=self, **measured))
        said.settings = _NAME.findall(template)
        return said


# Names of further limits: when an earlier policy sampled, and with trainer.max_staleness.
_OLD = "with older experience"
_STALE = "with staleness"
_OF_TIME = "of the time"
_USUAL_RATES = "1e-6 to 1e-5 is usual for all weights, 1e-5 to 1e-3 for an adapter"
_RATE = "{optimizer.learning_rate!} ({config.optimizer.learning_rate:g})"
_UNREAD = (
    "a reward function does not read the answers as they are (with a data set of chats they are "
    "lists of messages, not texts)"
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
    "data.curriculum": ", or prefer those in between ({data.curriculum!} difficulty)",
    "algorithm.dynamic_sampling": (
        "; {algorithm.dynamic_sampling!} replaces such groups at the cost of generating more"
    ),
}
_GROUPS = "{share:.0%} of the groups have equal rewards"


def _equal(cause: str, remedy: str) -> Notice:
    return Notice(
        f"{_GROUPS}{cause}{_EQUAL}", remedy, 0.75, "of the groups", remedies_unless_set=_MIXED
    )


def _same(remedy: str) -> Notice:
    seen = (
        "{share:.0%} of the answers are the same as another one of their group, token for token: "
        "a group has nothing to compare"
    )
    bounds = {"accuracy below": 0.8, "temperature that is nearly greedy": 0.5}
    return Notice(seen, remedy, 0.75, "of the answers", further_limits=bounds)


def _dropped(reason: str, remedy: str) -> Notice:
    return Notice(
        f"{{count}} groups ({{share:.0%}}) were dropped ({reason}): {remedy}",
        "",
        0.1,
        "of the groups",
        dropped=reason,
    )


def _lost(status: str, remedy: str) -> Notice:
    return Notice(
        f"{{count}} episodes ({{share:.0%}}) were lost, mostly {status}: {remedy}",
        "",
        0.1,
        "of the episodes",
    )


def _slow(seen: str, remedy: str, limit: float, **more: Any) -> Notice:
    return Notice(seen, remedy, limit, _OF_TIME, **more)


HINTS = {
    "policy_breaks": Notice(
        "the answers fell apart: {began:.0%} were cut or without a final answer in the first "
        "step, {now:.0%} are now, and {measured} went from {first:.3f} to {result:.3f}: updates "
        "have moved the policy too far",
        f"Lower {_RATE}: {_USUAL_RATES}; and start again from a checkpoint before that",
        0.5,
        "of the answers",
        further_limits={"steps in a row": 2, "lost share of the first result": 0.9},
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
        "Grade one right answer by hand with {reward.functions!}, and see whether the column "
        "{data.answer_field!} has the answers; then take easier prompts ({data.source!}, "
        "{data.levels!}), or a reward with intermediate steps ({reward.functions!})",
    ),
    "zero_variance_groups, same": _equal(
        f": every answer got the same reward, {{constant:g}}, perhaps because {_UNREAD}",
        "The reward does not tell answers to one prompt apart: correct it ({reward.functions!})",
    ),
    "zero_variance_groups, unrated": _equal(
        "",
        "The reward does not tell answers to one prompt apart: use one with intermediate steps "
        "({reward.functions!}), more tries ({sampling.group_size!}), or other prompts "
        "({data.source!})",
    ),
    "zero_variance_groups, right": _equal(
        ", mostly because all answers are right (accuracy {accuracy:.2f})",
        "The prompts are too easy for this model: use harder ones ({data.source!}, {data.levels!})",
    ),
    "zero_variance_groups, wrong": _equal(
        ", mostly because all answers are wrong (accuracy {accuracy:.2f})",
        "The prompts are too hard for this model: use easier ones ({data.source!}, "
        "{data.levels!}), a better model ({model.name!}), more tries ({sampling.group_size!}), or "
        "a reward with intermediate steps ({reward.functions!})",
    ),
    "same_answers, cold": _same(
        "{sampling.temperature!} ({config.sampling.temperature:g}) is nearly greedy: set it to 1, "
        "at which the policy itself samples"
    ),
    "same_answers": _same(
        "The policy is certain{entropy}: start from a model that is less so ({model.name!}), or "
        "raise {sampling.temperature!} ({config.sampling.temperature:g}) or "
        "{algorithm.entropy_coef!}"
    ),
    "dead_reward": Notice(
        "reward functions whose mean score has been the same since the first step: {dead}",
        "If every answer gets it, they teach nothing: correct what they look for, or leave them "
        "out of {reward.functions!} (a penalty that no answer incurs may stay)",
        0,
        "change of the mean",
    ),
    "reward_hacking": Notice(
        "the reward rose from {reward_first:.3f} to {reward:.3f}, and accuracy fell from "
        "{accuracy_first:.3f} to {accuracy:.3f}: the policy learns what another reward function "
        "pays for{grown}",
        "Lower its weight, or give it only to right answers ({reward.functions!})",
        0.05,
        "lost accuracy",
        further_limits={"standard errors": 3, "rise of the reward": 0.02},
    ),
    "format": Notice(
        "in {share:.0%} of the completions the grader finds no answer, and the reward does not "
        "rise (mean {reward:.3f}): the model does not keep to the format",
        "Say it in {sampling.system_prompt!}, reward it (format in {reward.functions!}), "
        "start from a model that follows instructions ({model.name!}), or leave room to get there "
        "({sampling.max_new_tokens!} {config.sampling.max_new_tokens}); see samples.jsonl",
        0.3,
        "of the completions",
    ),
    "truncated": Notice(
        "{share:.0%} of the completions are cut at {sampling.max_new_tokens!} "
        "({config.sampling.max_new_tokens}), and {why}",
        "Raise {sampling.max_new_tokens!}{end_token}",
        0.25,
        "of the completions",
        further_limits={"accuracy below": 0.5, "share at which hardly any ends": 0.95},
        remedies_unless_set={
            "algorithm.overlong_buffer": (
                ", or make long answers cost something before the end "
                "({algorithm.overlong_buffer!})"
            )
        },
    ),
    "short_answers": Notice(
        "answers became shorter, from {began:.0f} to {now:.0f} tokens: the policy collapses to "
        "short answers",
        "Look at what the reward pays for ({reward.functions!}), whether long "
        "answers are cut ({sampling.max_new_tokens!}) or lost, and how the loss weighs length "
        "({algorithm.aggregation!} {config.algorithm.aggregation})",
        0.4,
        "of the first tokens",
        further_limits={"rise of the accuracy": 0.02},
    ),
    "policy_moves": Notice(
        "the policy moves too far: {seen}",
        f"Remedies: lower {_RATE}; fewer updates on a batch ({{algorithm.update_epochs!}} "
        "{config.algorithm.update_epochs}, {algorithm.mini_batches!} "
        "{config.algorithm.mini_batches}), or {algorithm.early_stop_kl!}; younger experience "
        "({trainer.max_staleness!} {config.trainer.max_staleness}); a stronger pull to the "
        "reference ({algorithm.kl_coef!} {config.algorithm.kl_coef:g})",
        0.5,
        "nats per token of KL to the reference",
        further_limits={
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
        "Lower {optimizer.learning_rate!} or {optimizer.max_grad_norm!}, or compute in float32 "
        "({model.dtype!})",
        2,
        "updates",
    ),
    "entropy": Notice(
        "entropy fell from {began:.3g} to {now:.3g} nats per token, and {why}: the policy became "
        "certain too early and tries nothing new",
        "Raise {algorithm.clip_high!} (0.28 in the recipe dapo) or {sampling.temperature!}, set "
        f"{{algorithm.entropy_coef!}}, or lower {_RATE}",
        0.2,
        "of the first entropy",
        further_limits={"accuracy below": 0.8},
    ),
    "generation_bound": _slow(
        "the trainer waits for completions for {share:.0%} of the time",
        "Generate faster: more at once ({rollout.max_running_requests!}), shorter answers "
        "({sampling.max_new_tokens!}), on a cluster more rollout nodes (num_nodes of "
        "rollout-server)",
        0.8,
        stage="generation",
        further_limits={_STALE: 0.5},
        remedies_unless_set={
            "trainer.max_staleness": (
                "; {trainer.max_staleness!} 1 lets the next batch be generated during the update"
            )
        },
    ),
    "rollout_idle": _slow(
        "the engines are idle for {idle:.0%} of the time, and the update takes {update:.0%}: the "
        "experience is as old as {trainer.max_staleness!} ({config.trainer.max_staleness}) permits",
        "Update faster: more tokens at once ({trainer.micro_batch_tokens!}) or "
        "{trainer.compile!}; on a cluster more or larger trainer nodes (num_nodes of "
        "ppo-trainer), or fewer rollout nodes",
        0.9,
        further_limits={_STALE: 0.5, "share of the update": 0.5},
        remedies_unless_set={
            "trainer.max_staleness": "; or run both at once ({trainer.max_staleness!} 1)"
        },
    ),
    "half_full_passes": Notice(
        "the passes of the update are {fill:.0%} full, since {answers} of the longest answers and "
        "their prompt do not fit {trainer.micro_batch_tokens!} "
        "({config.trainer.micro_batch_tokens})",
        "Set it to {full}, if the GPU has the memory (`rlhf doctor --plan`), or leave it auto",
        0.7,
        "of the passes",
    ),
    "publish_bound": _slow(
        "new weights take {share:.0%} of the time to reach the engines",
        "Change: {trainer.weight_sync!} ({config.trainer.weight_sync}) to distributed or shared, "
        "or the network between the nodes",
        0.35,
        stage="publish",
        remedies_unless_set={
            "trainer.max_staleness": (
                ", or {trainer.max_staleness!} 1, which overlaps it with the next step"
            ),
            "lora.rank": ", or an adapter instead of all weights ({lora.rank!})",
        },
    ),
    "lost_episodes, timeout": _lost(
        "timeout",
        "long episodes are lost more often than short ones, and the model learns from those that "
        "end in time. Give them time ({environment.deadline_s!}), end slow calls "
        "({environment.tool_timeout_s!}), or ask for less ({environment.turns!}, "
        "{sampling.max_new_tokens!})",
    ),
    "lost_episodes, died": _lost("died", "look at the log of environment-server for the reason"),
    "lost_episodes, error": _lost(
        "error",
        "the environment or the program fails: the Rollouts tab and groups/ have the reasons",
    ),
    "stragglers": _slow(
        "for {share:.0%} of the time a batch is ready and the update waits for the longest of the "
        "oldest answers",
        "Raise {trainer.max_staleness!}, lower {sampling.max_new_tokens!}, or train on what is "
        "ready at any age ({trainer.when_stale!} train)",
        0.15,
        stage="stragglers",
    ),
    "reward_bound": _slow(
        "the trainer waits for the grader for {share:.0%} of the time",
        "Grade faster: more processes ({reward.workers!}; slots of code and concurrency of judge "
        "in {reward.functions!}) and cores for them, or shorter limits (timeout_s in "
        "{reward.functions!}, {reward.function_timeout_s!})",
        0.3,
        stage="reward",
    ),
    "replay_bound": _slow(
        "the trainer waits for the replay-buffer for {share:.0%} of the time: every group is "
        "synced to its disk",
        "Put its state (state_dir) on a faster disk or block volume, or reuse less "
        "({replay.reuse_ratio!})",
        0.2,
        stage="replay",
    ),
    "nothing_active": _slow(
        "for {share:.0%} of the time nothing is generated, graded, stored or trained on: prompts "
        "come too slowly, or this process has too little processor time",
        "Compare OMP_NUM_THREADS with the cores; on a cluster look at the log of data-server",
        0.3,
        stage="waiting",
    ),
    "dropped_generation": _dropped(
        "generation",
        "the engines fail: look at their logs, or ask for less ({sampling.max_new_tokens!})",
    ),
    "dropped_reward": _dropped(
        "reward",
        "answers cannot be graded: the log says what times out or fails. Give it time "
        "({reward.function_timeout_s!}, or timeout_s of a function in {reward.functions!}) or more "
        "processes ({reward.workers!})",
    ),
    "dropped_teacher": _dropped(
        "teacher",
        "the teacher fails or is too slow: look at its log, and give it time "
        "({teacher.timeout_s!}) or fewer groups at once ({teacher.concurrency!})",
    ),
    "dropped_stale": _dropped(
        "stale",
        "long answers are overtaken by more than {trainer.max_staleness!} updates, and the model "
        "learns to be short: set {trainer.when_stale!} wait, raise {trainer.max_staleness!}, or "
        "lower {sampling.max_new_tokens!}",
    ),
}
"""By name; a hint with several cases has a row for each, `NAME, CASE`."""

ALARMS = {
    "delta_logprob": Notice(
        "mean |Δ logprob| between rollout engine and trainer is {measured:.3g} on the same weights "
        "(alarm above {note.limit:g}): the two do not compute the same policy",
        "Likely: {mismatch}",
        # SkyRL's tests allow 0.0104 (synchronous) and 0.0193 (asynchronous) in bfloat16.
        0.02,
        "mean |Δ logprob| on the same weights",
        # Differences from rounding have both signs, those from a filter have one. Wrong weights
        # make far larger differences than a filter, and they appear in one step: they do not grow.
        further_limits={"one-sided share": 0.5, "most that a filter leaves out": 1, "jump": 5},
        metric="delta_logprob_current",
    ),
    # NeMo-RL calls 1e-3 between engine and trainer a problem; stale experience exceeds it.
    "kl_rollout": Notice(
        "KL(rollout ‖ trainer) is {measured:.3g} nats per token (alarm above {bound:g})",
        "Likely: {cause}",
        1e-3,
        "nats per token",
        further_limits={_OLD: 1e-2},
        metric="kl_rollout",
    ),
    "effective_sample_size": Notice(
        "the effective sample size is {measured:.2f} of the tokens (alarm below {note.limit:g}): "
        "few tokens carry the update",
        "Likely: {cause}",
        0.5,
        "of the tokens",
        metric="effective_sample_size",
        is_minimum=True,
    ),
    "likelihood": Notice(
        "the sampled tokens are likelier than sampling from the policy makes them, by {gap:.2g} "
        "nats per token (entropy is {entropy:.2g}): the engine truncates " + OWN_DEFAULTS,
        "",
        # Both limits are wide. Only groups of differing rewards are measured, which depends on what
        # was sampled, and the standard error is that of independent tokens, unlike those of an
        # answer.
        0.15,
        "of the entropy",
        further_limits={"standard errors": 8},
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
        "KL to the reference is {kl:.2g} nats per token in the first step already: "
        "{model.reference!} is not the model that training starts from "
        "({config.model.reference}), and {algorithm.kl_coef!} pulls the policy to another model; "
        "leave {model.reference!} empty unless you want that",
        "",
        0.05,
        "nats per token in the first step",
    ),
    "same_prompts": Notice(
        "the prompts of {problems} different problems are the same, token for token: the model "
        "does not see the problem",
        "Likely: the chat template leaves out the user's message; correct {model.chat_template!} "
        "or {data.prompt_template!}, and see the prompt of a group in the tab Rollouts",
        2,
        "different problems",
    ),
    "refused_calls": Notice(
        "{outcome}{calls} calls of the model were refused: {refusal}", "", 1, "call"
    ),
}

SLOW = frozenset(name for name, row in HINTS.items() if row.unit == _OF_TIME)
"""The hints that are about speed."""


def limits(*, is_old: bool) -> Numbers:
    """Returns the limits of the metrics of an update, by alarm. `is_old` says that an earlier
    policy sampled some of the experience.
    """
    return {
        name: row.further_limits.get(_OLD, row.limit) if is_old else row.limit
        for name, row in ALARMS.items()
        if row.metric
    }
