"""What every process of a rehearsal uses: processor time, memory, bytes over its sockets."""

import os
import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.targets import Process, processes

_TICKS = os.sysconf("SC_CLK_TCK")
_SENT = re.compile(r"bytes_sent:(\d+)")
_RECEIVED = re.compile(r"bytes_received:(\d+)")
_OWNER = re.compile(r"pid=(\d+),")


@dataclass
class Use:
    """What the processes of one role have used."""

    cpu_s: float = 0.0
    peak_mb: float = 0.0
    received: float = 0.0
    """Bytes."""
    sent: float = 0.0
    count: int = 0


def role(process: Process) -> str:
    """Returns what a process is in the job group: `trainer rank 0`, `router`, `replay-buffer`."""
    words = process.argv
    text = " ".join(words)
    if not process.node:
        return "local runner"
    if "sglang.launch_server" in text:
        return "engine (modelled)"
    if "launch_router" in text or words[0].startswith(("sglang::router", "smg")):
        return "router"
    if process.is_grader:
        return "graders"
    if "multiprocessing" in text and process.node.startswith("ppo-trainer"):
        return "readers of answers"
    if "benchmarks.true_size.rank" in text and "trainer.launch" not in text:
        rank = process.node.rpartition("-")[2]
        return "trainer rank 0" if rank == "0" else "trainer, other ranks"
    for name in ("data", "reward", "replay", "rollout", "environment"):
        if f"services.{name}" in text:
            return {"rollout": "agent", "replay": "replay-buffer"}.get(name, f"{name}-server")
    return "launchers"


class Meter:
    """Sums over the processes of a run, by role; call `sample` about twice a second."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._cpu: dict[tuple[int, int], tuple[str, float]] = {}
        self._peaks: dict[tuple[int, int], tuple[str, float]] = {}
        self._sockets: dict[tuple[str, str], tuple[float, float]] = {}
        """Bytes received and sent, by role and socket."""

    def sample(self) -> None:
        """Reads the counters of every process and socket."""
        roles: dict[int, str] = {}
        for process in processes(self._mark):
            key = (process.pid, process.started)
            roles[process.pid] = name = role(process)
            try:
                stat = Path(f"/proc/{process.pid}/stat").read_text(errors="replace")
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:  # it has ended
                continue
            fields = stat.rpartition(")")[2].split()
            self._cpu[key] = (name, (int(fields[11]) + int(fields[12])) / _TICKS)
            peak = re.search(r"VmHWM:\s+(\d+)", status)
            if peak:
                self._peaks[key] = (name, int(peak[1]) / 1024)
        self._read_sockets(roles)

    def _read_sockets(self, roles: dict[int, str]) -> None:
        found = subprocess.run(
            ["ss", "-tinpOH"], capture_output=True, text=True, check=False
        ).stdout
        for line in found.splitlines():
            owner = _OWNER.search(line)
            if owner is None or int(owner[1]) not in roles:
                continue
            words = line.split()
            key = (roles[int(owner[1])], f"{words[3]}-{words[4]}")
            received = _RECEIVED.search(line)
            sent = _SENT.search(line)
            before = self._sockets.get(key, (0.0, 0.0))
            self._sockets[key] = (
                max(before[0], float(received[1]) if received else 0.0),
                max(before[1], float(sent[1]) if sent else 0.0),
            )

    def uses(self) -> dict[str, Use]:
        """Returns the sums so far."""
        found: dict[str, Use] = defaultdict(Use)
        for name, seconds in self._cpu.values():
            found[name].cpu_s += seconds
            found[name].count += 1
        for name, megabytes in self._peaks.values():
            found[name].peak_mb = max(found[name].peak_mb, megabytes)
        for (name, _), (received, sent) in self._sockets.items():
            found[name].received += received
            found[name].sent += sent
        return dict(found)
