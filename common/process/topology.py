"""Addresses of all tasks of the job group. Only this module reads `SKYPILOT_*` and
`JOBGROUP_HOSTS`.

- On a cluster, SkyPilot names node *i* of a task `{task}-{i}.{group}` (Kubernetes, `/etc/hosts`
  refreshed every 5 s).
- Under `rlhf local`, `JOBGROUP_HOSTS` maps those names to loopback addresses of this
  machine, with ports shifted where the platform has a single loopback address.
- Outside a job group every task is on 127.0.0.1 at its own port.

Callers get names, not addresses: after a recovery the name is the same but its address is new.
"""

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from common import Json
from common.errors import ConfigError
from common.process.security import tls

DATA = "data-server"
ROLLOUT = "rollout-server"
REWARD = "reward-server"
REPLAY = "replay-buffer"
ENVIRONMENT = "environment-server"
TRAINER = "ppo-trainer"
TINKER = "tinker-server"
TORCHRUN_PORT = 29500
WRONG_SETTING = 78
"""Exit status (EX_CONFIG) of a process of a job group whose settings are wrong: a restart would not
help."""
LOST = 75
"""Exit status (EX_TEMPFAIL) of a trainer rank that ends because another one is lost: a restart
helps."""


_HOST = re.compile(r"([^=]+)=([^:]+)(?::(\d+))?")
INSTALL_CUDA_BUILD = (
    "install the CUDA build of the same version (`bash jobgroup/setup.sh trainer` does so where it "
    "finds nvidia-smi)"
)
"""The remedy for a torch that was built for CPUs only."""


def setting_status() -> int:
    """Returns the exit status for a wrong setting: `WRONG_SETTING` in a job group, else 2."""
    return WRONG_SETTING if os.environ.get("SKYPILOT_JOBGROUP_NAME") else 2


def assigned_gpus() -> str | None:
    """Returns the variable that assigns GPUs to this process, with its value; None when there is
    none.
    """
    count = os.environ.get("SKYPILOT_NUM_GPUS_PER_NODE", "0")
    if count != "0":
        return f"SKYPILOT_NUM_GPUS_PER_NODE is {count}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"CUDA_VISIBLE_DEVICES is {visible}" if visible and not hidden_gpus() else None


def refuse_cpu_build(field: str, value: object, on_cpu: str) -> None:
    """Raises ConfigError for a torch without CUDA, without importing it, which takes seconds.

    `field` and `value` ask for a GPU; `on_cpu` says how to do without one.
    """
    try:
        found = version("torch")
    except PackageNotFoundError:
        return  # whoever imports it says so
    if found.endswith("+cpu"):
        raise ConfigError(
            f"torch finds no GPU: torch {found} is a CPU build",
            field=field,
            value=value,
            remedy=f"{INSTALL_CUDA_BUILD}; or {on_cpu}",
        )


def hidden_gpus() -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides every GPU: CUDA reads it up to the first word that is not
    a number, GPU or MIG id.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    return not (first.isdecimal() or first.startswith(("GPU-", "MIG-")))


def cuda_of_driver() -> int | None:
    """Returns the newest CUDA that the driver supports, 13000 for 13.0; 0 if unknown, None without
    a driver.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found = ctypes.c_int(0)
    return found.value if library.cuDriverGetVersion(ctypes.byref(found)) == 0 else 0


@dataclass(frozen=True)
class LocalHost:
    """Location of one node under the local runner: a loopback address and an offset for its
    ports.
    """

    address: str
    port_shift: int = 0


def parse_hosts(text: str) -> dict[str, LocalHost]:
    """Parses `JOBGROUP_HOSTS`: `name=address[:shift]`, separated by commas. Raises ConfigError for
    any other entry.
    """
    hosts: dict[str, LocalHost] = {}
    for entry in filter(None, text.split(",")):
        found = _HOST.fullmatch(entry)
        if found is None:
            raise ConfigError(
                "an entry of JOBGROUP_HOSTS does not have the form name=address[:shift]",
                field="JOBGROUP_HOSTS",
                value=entry,
                remedy="write name=address[:shift], separated by commas",
            )
        hosts[found[1]] = LocalHost(found[2], int(found[3] or 0))
    return hosts


def format_hosts(hosts: Mapping[str, LocalHost]) -> str:
    """Inverts `parse_hosts`."""
    return ",".join(f"{name}={host.address}:{host.port_shift}" for name, host in hosts.items())


@dataclass(frozen=True)
class Topology:
    """This process's node in the job group, and the addresses of the other tasks."""

    group: str | None = None
    """Name of the job group; None outside one."""
    node_rank: int = 0
    num_nodes: int = 1
    """Nodes of this process's own task."""
    node_ips: tuple[str, ...] = ("127.0.0.1",)
    gpus_per_node: int = 0
    local_hosts: Mapping[str, LocalHost] = field(default_factory=dict)
    """Set only by the local runner."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "Topology":
        """Reads the environment that SkyPilot or the local runner sets on every node of a task.

        Raises ConfigError when a variable is malformed or the variables contradict each other.
        """
        env = os.environ if env is None else env
        ips = tuple(env.get("SKYPILOT_NODE_IPS", "127.0.0.1").split())
        try:
            topology = cls(
                group=env.get("SKYPILOT_JOBGROUP_NAME") or None,
                node_rank=int(env.get("SKYPILOT_NODE_RANK", 0)),
                num_nodes=int(env.get("SKYPILOT_NUM_NODES", 1)),
                node_ips=ips,
                gpus_per_node=int(env.get("SKYPILOT_NUM_GPUS_PER_NODE", 0)),
                local_hosts=parse_hosts(env.get("JOBGROUP_HOSTS", "")),
            )
            if not 0 <= topology.node_rank < topology.num_nodes == len(ips):
                raise ValueError("the rank, the number of nodes and the addresses do not match")
        except ValueError as error:
            raise ConfigError(
                f"a variable that SkyPilot sets is wrong: {error}",
                field="SKYPILOT_NODE_RANK, SKYPILOT_NUM_NODES, SKYPILOT_NODE_IPS, "
                "SKYPILOT_NUM_GPUS_PER_NODE",
                remedy="unset these variables outside SkyPilot",
            ) from None
        return topology

    def saved(self) -> Json:
        """Returns what `from_saved` reads, for a file: addresses, and nothing that is secret."""
        return {
            "group": self.group,
            "node_ips": list(self.node_ips),
            "hosts": format_hosts(self.local_hosts),
        }

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> "Topology":
        """Returns the topology as another process sees it that is no node of the group. Raises
        ConfigError.
        """
        ips = tuple(saved["node_ips"])
        return cls(
            saved["group"],
            num_nodes=len(ips),
            node_ips=ips,
            local_hosts=parse_hosts(saved["hosts"]),
        )

    def host(self, task: str, node: int = 0) -> str:
        """Returns the host name of a node of `task`; its address under the local runner."""
        if self.group is None:
            return "127.0.0.1"
        name = f"{task}-{node}.{self.group}"
        if not self.local_hosts:
            return name
        return self._local(name).address

    def url(self, task: str, port: int, node: int = 0) -> str:
        shift = self._local(f"{task}-{node}.{self.group}").port_shift if self.local_hosts else 0
        return f"{tls().scheme}://{self.host(task, node)}:{port + shift}"

    def bind(self, task: str, port: int) -> tuple[str, int]:
        """Returns (host, port) to listen on for `task`: all interfaces on a cluster, a loopback
        address locally.
        """
        if self.group is None:
            return "127.0.0.1", port
        if not self.local_hosts:
            return "0.0.0.0", port  # noqa: S104
        place = self._local(f"{task}-{self.node_rank}.{self.group}")
        return place.address, port + place.port_shift

    @property
    def is_one_machine(self) -> bool:
        """Whether all tasks are on this machine."""
        return self.group is None or bool(self.local_hosts)

    def loopback_env(self) -> dict[str, str]:
        """Returns the variables without which torch.distributed's rendezvous hangs if all tasks are
        on this machine.
        """
        if not self.is_one_machine:
            return {}
        return {
            "GLOO_SOCKET_IFNAME": os.environ.get(
                "GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"
            )
        }

    def proxy_env(self, env: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables that except this group from the proxies of `env`, for programs that
        are not ours: the router and SGLang use a proxy even for loopback.
        """
        given = env.get("no_proxy") or env.get("NO_PROXY") or ""
        if given.strip() == "*":
            return {}
        # Not every client knows blocks of addresses, so each one is named.
        own = ["localhost", "127.0.0.1", "127.0.0.0/8"]
        own += [host.address for host in self.local_hosts.values()]
        if self.group is not None:
            own.append(f".{self.group}")
        spared = ",".join(dict.fromkeys([*filter(None, given.split(",")), *own]))
        return {"NO_PROXY": spared, "no_proxy": spared}

    def own_name(self, task: str) -> str:
        """Returns the stable name of this node, for logs and registrations: `rollout-server-1`."""
        return f"{task}-{self.node_rank}"

    def _local(self, name: str) -> LocalHost:
        if name not in self.local_hosts:
            raise ConfigError(
                f"{name} is not a node of this run",
                field="JOBGROUP_HOSTS",
                value=name,
                remedy=f"run it too; the nodes of this run are {', '.join(self.local_hosts)}",
            )
        return self.local_hosts[name]

    @property
    def torchrun_port(self) -> int:
        """The port of torchrun's rendezvous.

        It listens on every interface, so concurrent local runs need different ports.
        """
        return TORCHRUN_PORT + (int(self.node_ips[0].split(".")[1]) if self.local_hosts else 0)
