"""The names of findings: headings of docs/how-to/operations.md, each with its remedy."""

from typing import Final

from trainer.diagnosis.unreachable import Problem

DATA_DIES: Final = "Data-server dies"
REWARD_DIES: Final = "Reward-server dies"
REPLAY_DIES: Final = "Replay-buffer dies"
CRITIC_DIES: Final = "Critic-server dies"
ENVIRONMENT_DIES: Final = "Environment-server dies or hangs"
SERVICE_HANGS: Final = "Data-server, reward-server or replay-buffer hangs"
CANNOT_START: Final = "A service cannot start its graders, or the command of `openenv:`"
ENGINE_DIES: Final = "An engine dies"
ENGINE_DIES_AGAIN: Final = "An engine dies again and again"
ENGINE_CANNOT: Final = "The embedded engine cannot run the model"
ENGINE_OF_PROCESS: Final = "The engine of a run in one process dies, for example for lack of memory"
ENGINE_HANGS: Final = "An engine or the router hangs"
ROUTER_DIES: Final = "The router dies"
NODE_DIES: Final = "A rollout node dies"
AGENT_HANGS: Final = "An agent hangs or is cut off"
OLD_WEIGHTS: Final = "An engine serves old weights"
WEIGHTS_DAMAGED: Final = "A byte of a rollout node's weights changes"
RANK_DIES: Final = "A trainer node or one of its processes dies"
RANK_STUCK: Final = "A rank of the trainer is stuck"
RANK_MEMORY: Final = "A rank of the trainer is out of memory"
KILLED: Final = "The trainer was killed"
INTERRUPTED: Final = "The run was interrupted"
ENDED: Final = "The run ended with an error"
TASK_FAILED: Final = "A task has failed more often than it may be restarted"
WRONG_TOKEN: Final = "A task has the wrong token"  # noqa: S105
CERTIFICATE: Final = "A certificate is not trusted"
UNKNOWN_NAME: Final = "A name does not resolve"
WRONG_SETTING: Final = "A setting is wrong"
DISK_OF_SERVICE: Final = "A full disk: replay-buffer, data-server, critic-server"
DISK_OF_NODE: Final = "A full disk: a rollout node"
DISK_OF_RUN: Final = "A full disk: the trainer's run directory"
SECOND_RUN: Final = "A second run is started in the `RUN_DIR` of a running one"
CHECKPOINT_DAMAGED: Final = "A byte of a checkpoint changes"
SQLITE_DAMAGED: Final = "An SQLite file or its log is damaged, cut or removed"
NOT_GRADED: Final = "Answers cannot be graded"
NOT_GENERATED: Final = "Completions cannot be generated"
NO_BATCH: Final = "No batch comes"
NO_STEP: Final = "No step ends"
EQUAL_REWARDS: Final = "Every group has equal rewards"
NOT_FINITE: Final = "A number is not finite"
DRAWN_TWICE: Final = "A prompt is drawn twice"
CLOCK_JUMPS: Final = "A clock jumps"
CLOCKS_DIFFER: Final = "Clocks differ"
VERSIONS_DIFFER: Final = "Versions differ"

_WAIT = (
    "nothing if its task is restarted (SkyPilot, jobgroup.local); else see the end of its log and "
    "start it again: the trainer waits trainer.service_timeout_s"
)
REMEDIES = {
    DATA_DIES: _WAIT,
    REWARD_DIES: _WAIT,
    REPLAY_DIES: _WAIT,
    CRITIC_DIES: "start trainer and critic-server again: the run goes on from its checkpoint",
    ENVIRONMENT_DIES: _WAIT,
    SERVICE_HANGS: (
        "nobody restarts what hangs: kill -CONT if it is stopped, else kill it, and its task is "
        "restarted; nothing is lost"
    ),
    CANNOT_START: "fix what the reason names and start the run again",
    ENGINE_DIES: "nothing: its agent restarts it; see the engine's log if it dies again",
    ENGINE_DIES_AGAIN: "fix what the end of the engine's log names and start again",
    ENGINE_CANNOT: "another model, or rollout.engine sglang",
    ENGINE_OF_PROCESS: "fix what the reason names and start again",
    ENGINE_HANGS: "nothing: its agent kills and restarts it after rollout.hang_timeout_s",
    ROUTER_DIES: "nothing: the agent of node 0 restarts it",
    NODE_DIES: "nothing: its task is restarted, and the run goes on with the other nodes",
    AGENT_HANGS: "continue it (kill -CONT) or restart its task",
    OLD_WEIGHTS: "see the agent's log for why it cannot load them; restart that rollout node",
    WEIGHTS_DAMAGED: "nothing: it downloads them again; check that node's disk if it recurs",
    RANK_DIES: (
        "nothing if the task is restarted: the run goes on from its newest checkpoint; look for "
        "the killer (kernel log, memory limit of the pod)"
    ),
    RANK_STUCK: (
        "continue it if it is stopped (kill -CONT); else see its stack, and end it: all ranks are "
        "started again from the newest checkpoint"
    ),
    RANK_MEMORY: (
        "lower trainer.micro_batch_tokens, switch on trainer.activation_checkpointing or "
        "trainer.offload_optimizer, or shard over more ranks (trainer.shard_size)"
    ),
    KILLED: (
        "start it again: it goes on from its newest checkpoint; look for the killer (kernel log, "
        "memory limit of the pod; a terminal that closes: use nohup or tmux)"
    ),
    INTERRUPTED: "start it again with the same run directory: it goes on from its checkpoint",
    ENDED: "see the lines above",
    TASK_FAILED: "fix what its last line names and start again",
    WRONG_TOKEN: "set the same API_TOKEN in every task and start again",
    CERTIFICATE: "set TLS_CA to the authority that signed TLS_CERT, the same in every task",
    UNKNOWN_NAME: (
        "check that the task runs and that its name resolves from the trainer (getent hosts NAME); "
        "names are TASK-NODE.GROUP"
    ),
    WRONG_SETTING: "correct that setting and start again",
    DISK_OF_SERVICE: "free space there: everything continues by itself",
    DISK_OF_NODE: "free space there: the node fetches the weights again by itself",
    DISK_OF_RUN: "free space there and start again: the run goes on from its newest checkpoint",
    SECOND_RUN: "leave the directory to that run, or name another RUN_DIR",
    CHECKPOINT_DAMAGED: "restore it from a copy, or remove it to go on from the one before",
    SQLITE_DAMAGED: "restore the file that the reason names from a copy, or move it away",
    NOT_GRADED: (
        "see why in the evidence: correct the reward function, or give it time "
        "(reward.function_timeout_s) or processes (reward.workers)"
    ),
    NOT_GENERATED: (
        "see the log of rollout-server; give it time (sampling.request_timeout_s) or ask for less "
        "(sampling.max_new_tokens)"
    ),
    NO_BATCH: "see what the trainer waits for in the evidence, and the log of that service",
    NO_STEP: (
        "see what waits in the evidence, and the log of the service that it waits for; restart "
        "that service if its log has nothing; kill -USR1 makes a process log its stacks"
    ),
    EQUAL_REWARDS: (
        "the prompts are too hard or too easy, or the reward is constant: change data.source, "
        "reward.functions, or sampling.group_size"
    ),
    NOT_FINITE: "lower trainer.learning_rate or trainer.max_grad_norm, or set model.dtype float32",
    DRAWN_TWICE: "restore the state of data-server (STATE_DIR), or start a new run",
    CLOCK_JUMPS: "nothing: only the times that people read are wrong; check the machine's NTP",
    CLOCKS_DIFFER: "synchronise the clocks (NTP): training is right, times of logs are not",
    VERSIONS_DIFFER: "install the same version in every task",
}
_DIES = {
    "data-server": DATA_DIES,
    "reward-server": REWARD_DIES,
    "replay-buffer": REPLAY_DIES,
    "critic-server": CRITIC_DIES,
    "router": ROUTER_DIES,
    "engine": ENGINE_DIES,
}
_OF_PROBLEM: dict[Problem, str] = {
    "unknown_name": UNKNOWN_NAME,
    "unauthorized": WRONG_TOKEN,
    "certificate": CERTIFICATE,
    "disk_full": DISK_OF_SERVICE,
    "lost": CANNOT_START,
}

DROPS = {
    "reward": NOT_GRADED,
    "generation": NOT_GENERATED,
    "episode": NOT_GENERATED,
    "teacher": NOT_GENERATED,
}
"""Names by the reason for which a group was dropped."""


def of_service(service: str, problem: Problem) -> str:
    """Returns the name of the finding that `service` (a task, a node, `router` or `engine`) has
    this problem.
    """
    if service == "rollout-server":  # its address is that of the router
        service = "router"
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
