"""Ports that the tasks listen on: free on this machine, or who has them."""

import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from common.topology import CRITIC, DATA, REPLAY, REWARD, ROLLOUT, TRAINER
from jobgroup.doctor.plan import Job, Plan
from jobgroup.doctor.result import Result, fail, ok, warn

_LISTENING = "0A"
_BLOCK = "127.254.251.1"
"""As the address of a node of a local run on Linux (`jobgroup/local/places.py`): nobody else listens there alone."""


def ports(job: Job) -> dict[str, int]:
    """The ports of a task by the setting that changes them."""
    config = job.config
    rollout = {
        f"rollout.{name}": getattr(config.rollout, name)
        for name in ("router_port", "engine_port", "agent_port", "router_metrics_port")
    }
    own = {
        DATA: {"data.port": config.data.port},
        ROLLOUT: rollout,
        REWARD: {"reward.port": config.reward.port},
        REPLAY: {"replay.port": config.replay.port},
        CRITIC: {"critic.port": config.critic.port},
        TRAINER: {"trainer.port": config.trainer.port},
    }
    return own.get(job.name, {})


def check_ports(plan: Plan) -> Iterable[Result]:
    """Tries to listen as the tasks will. In a running group they are taken by the tasks themselves: nothing is tried there."""
    if plan.topology is not None:
        return
    taken = 0
    own = sys.platform == "linux"
    wanted = {(job.name, setting): port for job in plan.here for setting, port in ports(job).items()}
    for (task, setting), port in wanted.items():
        title, variable = f"port {port} of {task}", f"RLHF_{setting.replace('.', '__').upper()}"
        if problem := _problem(_BLOCK if own else "127.0.0.1", port):
            mend = f"end it, or take another port: --env {variable}={port + 1000}"
            yield fail(title, f"{problem}{holder(port)}", mend)
        elif own and (problem := _problem("127.0.0.1", port)):
            mend = "nothing for jobgroup.local, whose nodes have addresses of their own; for this service alone end it"
            yield warn(title, f"on 127.0.0.1 {problem}{holder(port)}", mend)
        else:
            continue
        taken += 1
    if wanted and not taken:
        yield ok("ports", f"free: {', '.join(str(port) for port in dict.fromkeys(wanted.values()))}")


def _problem(address: str, port: int) -> str | None:
    """Why nothing can listen there."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: connections that just ended do not count
        try:
            sock.bind((address, port))
            sock.listen()
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return None


def holder(port: int) -> str:
    """` by process 123 (python)` for every process that listens there, as far as /proc shows it to this user."""
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.is_file() else []:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    found = []
    for process in Path("/proc").glob("[0-9]*") if inodes else []:
        with suppress(OSError):  # of another user, or it has ended
            if any(str(each.readlink()) in inodes for each in (process / "fd").iterdir()):
                found.append(f"{process.name} ({(process / 'comm').read_text().strip()})")
    return f" by process {', '.join(found)}" if found else ""
