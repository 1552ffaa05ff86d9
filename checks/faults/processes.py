"""Faults of processes and of the network between them, in the real job group on this machine."""

import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from checks.faults.fault import fault
from checks.faults.lab import Lab
from tests.chaos.group import ROOT, Group
from tests.chaos.targets import find, send
from tests.support.processes.ports import free_port

_STEPS = 400
"""More than a fault needs; the group is ended when the fault was watched long enough."""
_WATCHED_S = 45.0
_BEGINS_S = 200.0
"""Longest start of a group with its first steps, on a machine that does other work."""
_LOST_AFTER_S = 10.0
_SERVICE_S = 20.0
_HANG_S = 8.0
Edit = Callable[[str], str]


class _Running(Group):
    """A job group whose output is that of this process."""

    edit: Edit = staticmethod(lambda yaml: yaml)
    nodes = 1
    trainers = 1

    def _command(self) -> list[str]:
        command = super()._command()
        path = self.folder / "jobgroup.yaml"
        whole = path.read_text().replace(
            "max_restarts_on_errors: 1000", "max_restarts_on_errors: 2"
        )
        path.write_text(self.edit(whole))
        for task, count in (("rollout-server", self.nodes), ("ppo-trainer", self.trainers)):
            if count != 2:
                command += ["--num-nodes", f"{task}={count}"]
        return command


def _settings(lab: Lab, **values: Any) -> dict[str, str]:
    settings = {
        "RUN_CONFIG": ROOT / "jobgroup" / "configs" / "tiny-cpu.yaml",
        "MODEL_NAME": lab.model,
        "SEED": lab.seed,
        "BATCH_SIZE": 8,
        "MAX_STEPS": _STEPS,
        "RLHF_ROLLOUT__HANG_TIMEOUT_S": _HANG_S,
        "RLHF_CHECKPOINT__EVERY": 3,
        "RLHF_EVALUATION__SAMPLES": 0,
        "RLHF_OPTIMIZER__LEARNING_RATE": 1e-6,
        "RLHF_LIMITS__LOST_AFTER_S": _LOST_AFTER_S,
        "RLHF_LIMITS__SERVICE_TIMEOUT_S": _SERVICE_S,
        "RLHF_LIMITS__FENCE_AFTER_S": 30,
        "RLHF_LIMITS__STUCK_AFTER_S": 40,
    }
    return {name: str(value) for name, value in (settings | values).items()}


@contextmanager
def _group(
    lab: Lab,
    *,
    nodes: int = 1,
    trainers: int = 1,
    edit: Edit = lambda yaml: yaml,
    **settings: Any,
) -> Iterator[_Running]:
    """Runs a job group inside the block; its output is copied to that of this process."""
    folder = lab.directory / "group"
    folder.mkdir()
    group = _Running(folder, _settings(lab, **settings))
    group.nodes = nodes
    group.trainers = trainers
    group.edit = edit
    with subprocess.Popen(
        ["tail", "--retry", "-s", "0.1", "-F", str(folder / "output.txt")],
        stderr=subprocess.DEVNULL,
    ) as tail:
        try:
            with group.running():
                yield group
        finally:
            time.sleep(0.5)
            tail.kill()


def _begun(group: _Running, steps: int) -> None:
    """Waits until the run has trained some steps."""
    assert group.process is not None
    limit = time.monotonic() + _BEGINS_S
    while group.step() < steps:
        if group.process.poll() is not None:
            raise RuntimeError("the group ended before the fault")
        if time.monotonic() > limit:
            raise RuntimeError(f"the group has not trained {steps} steps in {_BEGINS_S:g} s")
        time.sleep(0.05)


def _watch(group: _Running, seconds: float = _WATCHED_S) -> None:
    """Waits until the group ends, or for some seconds."""
    assert group.process is not None
    limit = time.monotonic() + seconds
    while group.process.poll() is None and time.monotonic() < limit:
        time.sleep(0.1)


def _strikes(
    lab: Lab,
    target: str,
    number: signal.Signals,
    *,
    held_s: float = 0.0,
    watched_s: float = 15.0,
    **options: Any,
) -> None:
    """Sends a signal to a process of the group after some steps; a stop lasts `held_s`."""
    with _group(lab, **options) as group:
        _begun(group, lab.strike_step + 1)
        process = find(target, group.processes())
        assert process is not None, f"there is no {target}"
        lab.strike()
        send(process.pid, number)
        if held_s:
            _watch(group, held_s)
            send(process.pid, signal.SIGCONT)
        _watch(group, watched_s)


# ------------------------------------------------------------ services

_DEAD = r"signal|killed|ended|restart|SIGKILL|died|exit"
_SILENT = r"no answer|not answer|timed? ?out|wait|silent|hang|hung|unreach|within"


@fault("the data-server is killed", r"data-server", _DEAD)
def data_server_killed(lab: Lab) -> None:
    _strikes(lab, "data-server", signal.SIGKILL)


@fault(
    "the reward-server is killed",
    r"reward-server",
    _DEAD,
    reported="https://github.com/PrimeIntellect-ai/prime-rl/pull/1816",
)
def reward_server_killed(lab: Lab) -> None:
    _strikes(lab, "reward-server", signal.SIGKILL)


@fault("the replay-buffer is killed", r"replay-buffer", _DEAD)
def replay_buffer_killed(lab: Lab) -> None:
    _strikes(lab, "replay-buffer", signal.SIGKILL)


@fault(
    "the data-server hangs",
    r"data-server",
    _SILENT,
    timeout="limits.service_timeout_s",
    timeout_s=_SERVICE_S,
)
def data_server_hangs(lab: Lab) -> None:
    _strikes(lab, "data-server", signal.SIGSTOP, held_s=_WATCHED_S, watched_s=0)


@fault(
    "the reward-server hangs",
    r"reward-server",
    _SILENT,
    reported="https://github.com/PrimeIntellect-ai/prime-rl/issues/1713",
    timeout="limits.service_timeout_s",
    timeout_s=_SERVICE_S,
)
def reward_server_hangs(lab: Lab) -> None:
    _strikes(lab, "reward-server", signal.SIGSTOP, held_s=_WATCHED_S, watched_s=0)


@fault(
    "the replay-buffer hangs",
    r"replay-buffer",
    _SILENT,
    reported="https://github.com/PrimeIntellect-ai/prime-rl/issues/1713",
    timeout="limits.service_timeout_s",
    timeout_s=_SERVICE_S,
)
def replay_buffer_hangs(lab: Lab) -> None:
    _strikes(lab, "replay-buffer", signal.SIGSTOP, held_s=_WATCHED_S, watched_s=0)


# ------------------------------------------------------------ engines


@fault(
    "an engine is killed, as by the kernel that is out of memory",
    r"engine",
    _DEAD,
    reported="https://github.com/NovaSky-AI/SkyRL/issues/1673",
)
def engine_killed(lab: Lab) -> None:
    _strikes(lab, "engine-0", signal.SIGKILL)


@fault(
    "an engine hangs",
    r"engine",
    r"hang|hung|no answer|not answer|not respond|unresponsive|silent|killed",
    reported="https://github.com/PrimeIntellect-ai/prime-rl/pull/2230",
    timeout="rollout.hang_timeout_s",
    timeout_s=_HANG_S,
)
def engine_hung(lab: Lab) -> None:
    _strikes(lab, "engine-0", signal.SIGSTOP, held_s=30, watched_s=2)


@fault("the router is killed", r"router", _DEAD)
def router_killed(lab: Lab) -> None:
    _strikes(lab, "router", signal.SIGKILL)


@fault(
    "the router hangs",
    r"router",
    r"hang|hung|no answer|not answer|not respond|unresponsive|silent|killed",
    timeout="rollout.hang_timeout_s",
    timeout_s=_HANG_S,
)
def router_hangs(lab: Lab) -> None:
    _strikes(lab, "router", signal.SIGSTOP, held_s=30, watched_s=2)


@fault(
    "the agent of a rollout node hangs, so that its engine may serve old weights",
    r"rollout-server-1",
    r"silent|no report|reported|out of the router|not heard|fenced|has not",
    reported="https://github.com/radixark/miles/issues/1724",
    timeout="limits.fence_after_s",
    timeout_s=30.0,
)
def agent_hangs(lab: Lab) -> None:
    _strikes(lab, "agent-1", signal.SIGSTOP, held_s=60, watched_s=2, nodes=2)


@fault(
    "a rollout node is lost",
    r"rollout-server-1",
    r"silent|missing|lost|ended|restart|gone|signal|killed",
    reported="https://github.com/NovaSky-AI/SkyRL/issues/24",
)
def rollout_node_lost(lab: Lab) -> None:
    _strikes(lab, "rollout-server-1", signal.SIGKILL, nodes=2)


# ------------------------------------------------------------ ranks of the trainer


@fault(
    "a rank of the trainer is stuck, and the others wait for it in a collective",
    r"rank 1",
    r"silent|lost|stuck|no word|not heard|hang",
    reported="https://github.com/NovaSky-AI/SkyRL/issues/757",
    timeout="limits.lost_after_s",
    timeout_s=_LOST_AFTER_S,
)
def rank_stuck(lab: Lab) -> None:
    _strikes(lab, "trainer-1", signal.SIGSTOP, held_s=30, watched_s=2, trainers=2)


@fault(
    "a rank of the trainer is killed, as by the kernel that is out of memory",
    r"rank 1|ppo-trainer-1",
    r"lost|killed|SIGKILL|signal 9|died",
    reported="https://github.com/OpenRLHF/OpenRLHF/issues/187",
)
def rank_killed(lab: Lab) -> None:
    _strikes(lab, "trainer-1", signal.SIGKILL, trainers=2, watched_s=20)


@fault(
    "a rank of the trainer gets no more memory",
    r"memory",
    r"alloc|out of|rank 1|ppo-trainer-1",
    reported="https://github.com/OpenRLHF/OpenRLHF/issues/519",
)
def rank_out_of_memory(lab: Lab) -> None:
    with _group(lab, trainers=2) as group:
        _begun(group, lab.strike_step + 1)
        process = find("trainer-1", group.processes())
        assert process is not None
        lab.strike()
        status = Path(f"/proc/{process.pid}/statm").read_text().split()
        used = int(status[0]) * resource.getpagesize()
        resource.prlimit(process.pid, resource.RLIMIT_AS, (used, used))
        _watch(group)


@fault(
    "the trainer is killed",
    r"ppo-trainer",
    _DEAD,
    reported="https://github.com/OpenRLHF/OpenRLHF/issues/187",
)
def trainer_killed(lab: Lab) -> None:
    _strikes(lab, "trainer-0", signal.SIGKILL, watched_s=25)


@fault(
    "the trainer is interrupted (SIGTERM)",
    r"interrupted|SIGTERM",
    r"ppo-trainer|start again|continue",
)
def trainer_interrupted(lab: Lab) -> None:
    _strikes(lab, "trainer-0", signal.SIGTERM, watched_s=15)


# ------------------------------------------------------------ groups that do not begin


def _task(yaml: str, name: str, old: str, new: str) -> str:
    """Returns the YAML with a change in one task."""
    parts = yaml.split("\n---\n")
    index = next(i for i, part in enumerate(parts) if f"\nname: {name}\n" in f"\n{part}\n")
    assert old in parts[index], f"{name} has no {old}"
    parts[index] = parts[index].replace(old, new)
    return "\n---\n".join(parts)


def _never_begins(lab: Lab, edit: Edit, **settings: Any) -> None:
    lab.strike()
    with _group(lab, edit=edit, **settings) as group:
        _watch(group, _BEGINS_S)


@fault(
    "one task has another token than the others",
    r"reward-server",
    r"token|401|unauthori[sz]ed",
)
def token_wrong(lab: Lab) -> None:
    _never_begins(
        lab,
        lambda yaml: _task(
            yaml,
            "reward-server",
            "run: exec",
            "run: export API_TOKEN=0123456789abcdef0123456789abcdef; exec",
        ),
    )


@fault(
    "a service never gets ready",
    r"reward-server",
    r"refused|not ready|wait|reach|connect|health",
    reported="https://github.com/PrimeIntellect-ai/prime-rl/pull/1630",
    timeout="limits.stuck_after_s",
    timeout_s=40.0,
)
def service_never_ready(lab: Lab) -> None:
    _never_begins(
        lab,
        lambda yaml: _task(
            yaml,
            "reward-server",
            "run: exec .venv/bin/python -m services.reward",
            "run: exec sleep 600",
        ),
    )


@fault(
    "a task fails at every start",
    r"data-server",
    r"restart|failed|status",
    r"\d",
)
def service_fails_always(lab: Lab) -> None:
    _never_begins(
        lab,
        lambda yaml: _task(
            yaml,
            "data-server",
            "run: exec .venv/bin/python -m services.data",
            "run: |\n  echo 'libcuda.so.1: cannot open shared object file' >&2; exit 1",
        ),
    )


@fault(
    "a task has a wrong setting",
    r"reward\.workers",
    r"0",
)
def service_wrong_setting(lab: Lab) -> None:
    _never_begins(
        lab,
        lambda yaml: _task(
            yaml, "reward-server", "run: exec", "run: export RLHF_REWARD__WORKERS=0; exec"
        ),
    )


@fault(
    "the port of a service is taken by another program",
    r"port|address|\d{5}",
    r"in use|taken|already",
)
def port_taken(lab: Lab) -> None:
    port = free_port()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("0.0.0.0", port))  # noqa: S104
        other.listen()
        _never_begins(lab, lambda yaml: yaml, RLHF_DATA__PORT=port)


@fault(
    "the name of a service does not resolve",
    r"reward-server",
    r"resolve|resolution|unknown|no address|not known",
    reported="https://github.com/PrimeIntellect-ai/prime-rl/pull/1622",
)
def name_does_not_resolve(lab: Lab) -> None:
    def forget(yaml: str) -> str:
        # The local runner gives an address; on a cluster it is this name, which is resolved.
        name = "reward-server-0.rlhf-math.invalid"
        edit = rf"s/\(reward-server-0[^=]*=\)[^:,]*/\1{name}/"
        hosts = f"export JOBGROUP_HOSTS=$(echo $JOBGROUP_HOSTS | sed '{edit}')"
        return _task(yaml, "ppo-trainer", "run: exec", f"run: {hosts}; exec")

    _never_begins(lab, forget)


@fault(
    "a second job group is started in the run directory of a running one",
    r"using this directory|is used|in use",
    r"run",
)
def group_second(lab: Lab) -> None:
    with _group(lab) as group:
        _begun(group, 2)
        second = lab.directory / "second"
        second.mkdir()
        other = _Running(second, _settings(lab, RUN_DIR=group.run_dir, STATE_DIR=second / "state"))
        lab.strike()
        with other.running():
            limit = time.monotonic() + 40
            while time.monotonic() < limit and other.process and other.process.poll() is None:
                time.sleep(0.2)
        print(other.output(), flush=True)


@fault(
    "a byte of the weights on a rollout node changes, and its engine starts again",
    r"weights",
    r"damaged|differ|changed",
)
def node_weights_damaged(lab: Lab) -> None:
    with _group(lab) as group:
        _begun(group, lab.strike_step + 1)
        process = find("engine-0", group.processes())
        assert process is not None, "there is no engine-0"
        lab.strike()
        send(process.pid, signal.SIGKILL)
        damaged: set[int] = set()
        for _ in range(20):  # a version may still arrive before the engine starts again
            _damage(group.state_dir / "rollout", damaged)
            time.sleep(0.02)
        _watch(group, 25)


def _damage(directory: Path, damaged: set[int]) -> None:
    """Changes a byte in every file of weights, once: files of several versions may be one."""
    for path in directory.rglob("*.safetensors"):
        with suppress(OSError), path.open("r+b") as file:
            number = os.fstat(file.fileno()).st_ino
            if number in damaged:
                continue
            file.seek(-64, os.SEEK_END)
            content = file.read(1)
            file.seek(-64, os.SEEK_END)
            file.write(bytes([content[0] ^ 1]))
            damaged.add(number)
