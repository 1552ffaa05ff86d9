"""The findings, one row each: a heading of docs/how-to/operations.md, its remedy, and what it is
known by: codes of our errors and log lines, or words of programs that have no codes.
"""

import re
from typing import Self


class Fault(str):
    """A row of the table. It is the heading itself, so that reports and tests compare names."""

    remedy: str
    codes: tuple[str, ...]
    foreign: str
    """What torch, SQLite, Python or the kernel write of it: a regular expression."""

    def __new__(
        cls, heading: str, remedy: str, *, codes: tuple[str, ...] = (), foreign: str = ""
    ) -> Self:
        fault = super().__new__(cls, heading)
        fault.remedy = remedy
        fault.codes = codes
        fault.foreign = foreign
        FAULTS.append(fault)
        return fault


FAULTS: list[Fault] = []
_WAIT = (
    "nothing if its task is restarted (SkyPilot, jobgroup.local); else see the end of its log and "
    "start it again: the trainer waits limits.service_timeout_s"
)

DATA_DIES = Fault("Data-server dies", _WAIT)
REWARD_DIES = Fault("Reward-server dies", _WAIT)
REPLAY_DIES = Fault("Replay-buffer dies", _WAIT)
CRITIC_DIES = Fault(
    "Critic-server dies",
    "start trainer and critic-server again: the run goes on from its checkpoint",
)
ENVIRONMENT_DIES = Fault("Environment-server dies or hangs", _WAIT)
SERVICE_HANGS = Fault(
    "Data-server, reward-server or replay-buffer hangs",
    (
        "nobody restarts what hangs: kill -CONT if it is stopped, else kill it, and its task is "
        "restarted; nothing is lost"
    ),
)
CANNOT_START = Fault(
    "A service cannot start its graders, or the command of `openenv:`",
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
    (
        "nothing if the task is restarted: the run goes on from its newest checkpoint; look for "
        "the killer (kernel log, memory limit of the pod)"
    ),
)
RANK_STUCK = Fault(
    "A rank of the trainer is stuck",
    (
        "continue it if it is stopped (kill -CONT); else see its stack, and end it: all ranks are "
        "started again from the newest checkpoint"
    ),
)
RANK_MEMORY = Fault(
    "A rank of the trainer is out of memory",
    (
        "lower trainer.micro_batch_tokens, switch on trainer.activation_checkpointing or "
        "parallel.offload_optimizer, or shard over more ranks (parallel.shard_size)"
    ),
    codes=("out_of_memory",),
    foreign=r"OutOfMemory|out of memory|Cannot allocate memory|bad_alloc|MemoryError",
)
KILLED = Fault(
    "The trainer was killed",
    (
        "start it again: it goes on from its newest checkpoint; look for the killer (kernel log, "
        "memory limit of the pod; a terminal that closes: use nohup or tmux)"
    ),
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
    (
        "check that the task runs and that its name resolves from the trainer (getent hosts NAME); "
        "names are TASK-NODE.GROUP"
    ),
)
WRONG_SETTING = Fault("A setting is wrong", "correct that setting and start again")
DISK_OF_SERVICE = Fault(
    "A full disk: replay-buffer, data-server, critic-server",
    "free space there: everything continues by itself",
)
DISK_OF_NODE = Fault(
    "A full disk: a rollout node", "free space there: the node fetches the weights again by itself"
)
DISK_OF_RUN = Fault(
    "A full disk: the trainer's run directory",
    "free space there and start again: the run goes on from its newest checkpoint",
    codes=("disk_full",),
    foreign=r"No space left|Disk quota exceeded|File too large",
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
    foreign=r"disk image is malformed|file is not a database|btreeInitPage",
)
NOT_GRADED = Fault(
    "Answers cannot be graded",
    (
        "see why in the evidence: correct the reward function, or give it time "
        "(reward.function_timeout_s) or processes (reward.workers)"
    ),
    codes=("not_graded",),
)
NOT_GENERATED = Fault(
    "Completions cannot be generated",
    (
        "see the log of rollout-server; give it time (sampling.request_timeout_s) or ask for less "
        "(sampling.max_new_tokens)"
    ),
)
NO_BATCH = Fault(
    "No batch comes",
    "see what the trainer waits for in the evidence, and the log of that service",
    codes=("no_batch", "stuck"),
)
NO_STEP = Fault(
    "No step ends",
    (
        "see what waits in the evidence, and the log of the service that it waits for; restart "
        "that service if its log has nothing; kill -USR1 makes a process log its stacks"
    ),
)
EQUAL_REWARDS = Fault(
    "Every group has equal rewards",
    (
        "the prompts are too hard or too easy, or the reward is constant: change data.source, "
        "reward.functions, or sampling.group_size"
    ),
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
CLOCK_JUMPS = Fault(
    "A clock jumps", "nothing: only the times that people read are wrong; check the machine's NTP"
)
CLOCKS_DIFFER = Fault(
    "Clocks differ", "synchronise the clocks (NTP): training is right, times of logs are not"
)
VERSIONS_DIFFER = Fault("Versions differ", "install the same version in every task")

BY_CODE = {code: fault for fault in FAULTS for code in fault.codes}
_DIES = {
    "data-server": DATA_DIES,
    "reward-server": REWARD_DIES,
    "replay-buffer": REPLAY_DIES,
    "critic-server": CRITIC_DIES,
    "router": ROUTER_DIES,
    "engine": ENGINE_DIES,
}
_OF_PROBLEM: dict[str, Fault] = {
    "unknown_name": UNKNOWN_NAME,
    "unauthorized": WRONG_TOKEN,
    "certificate": CERTIFICATE,
    "disk_full": DISK_OF_SERVICE,
}

DROPS = {
    "reward": NOT_GRADED,
    "generation": NOT_GENERATED,
    "episode": NOT_GENERATED,
    "teacher": NOT_GENERATED,
}
"""Names by the reason for which a group was dropped."""


def foreign(text: str) -> Fault | None:
    """Returns the row that a program without codes writes about; None without one."""
    for fault in FAULTS:
        if fault.foreign and re.search(fault.foreign, text):
            return fault
    return None


def of_service(service: str, problem: str) -> Fault:
    """Returns the row for a problem (`common.clients.unreachable`) of `service`: a task, a node,
    `router` or `engine`.
    """
    if service == "rollout-server":  # its address is that of the router
        service = "router"
    if problem == "lost":
        return ENGINE_OF_PROCESS if service in ("router", "engine") else CANNOT_START
    if problem in _OF_PROBLEM:
        is_node = service.startswith("rollout-server")
        return DISK_OF_NODE if problem == "disk_full" and is_node else _OF_PROBLEM[problem]
    task = service if service in _DIES else service.rstrip("0123456789").rstrip("-")
    hangs = problem == "silent"
    if task == "environment-server":
        return ENVIRONMENT_DIES
    if task == "rollout-server":
        return AGENT_HANGS if hangs else NODE_DIES
    if task in ("router", "engine") and hangs:
        return ENGINE_HANGS
    if hangs and task != "critic-server":
        return SERVICE_HANGS
    return _DIES.get(task, ENDED)
