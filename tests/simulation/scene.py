"""What the simulated runs share: a network of nodes, and faults that befall them at random."""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.simulation.disk import Disk, watched
from tests.simulation.network import App, Chance, Model, Net, Node, Story
from tests.simulation.virtual_time import VirtualLoop

DOWN_S = 20.0
"""Longest time for which a process, a disk or a connection is down."""


class Crash(KeyboardInterrupt):
    """The trainer's process ends at this moment. Only such an exception leaves an event loop."""


class NoEnd(KeyboardInterrupt):
    """A run takes longer than its limit of virtual time."""


class Violation(AssertionError):
    """An invariant is broken."""


class Scene(ABC):
    """The simulated run of one seed."""

    fault_rates = (0.0, 0.02, 0.1, 0.3)
    """Shares of requests that have a fault, one of them in each run."""

    def __init__(self, seed: int, directory: Path, loop: VirtualLoop) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.loop = loop
        self.story = Story(loop.time)
        self.chance = Chance(self.rng, self.rng.choice(self.fault_rates))
        self.net = Net(loop, self.chance, self.story)
        self.is_up = False
        """Whether the trainer's process runs."""
        self._directory = directory

    @abstractmethod
    def run(self) -> None:
        """Runs to the end; raises Violation."""

    def stand_ins(self, stack: ExitStack) -> None:
        """Puts stand-ins in the place of what computes."""
        stack.enter_context(self.net.joined())
        stack.enter_context(watched(self.disk_of))

    def node(
        self,
        name: str,
        make: Callable[[Path], App],
        *,
        host: str = "",
        machine: str = "",
        model: Model | None = None,
    ) -> Node:
        """Adds a node at a host, on a machine of its own unless that is named."""
        disk = Disk(self._directory / name, lambda size: self.rng.randrange(size + 1))
        node = Node(
            name,
            make,
            loop=self.loop,
            disk=disk,
            story=self.story,
            model=model or Model(),
            machine=machine,
        )
        self.net.add(host or name, node)
        return node

    @property
    def nodes(self) -> list[Node]:
        return list(self.net.nodes.values())

    def disk_of(self, path: Path) -> Disk | None:
        """Returns the disk on which a file is; None for those of earlier lives."""
        disks = (node.disk for node in self.nodes)
        return next((disk for disk in disks if path.is_relative_to(disk.path)), None)

    def sleep(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def limit(self, seconds: float) -> None:
        """Ends a run that takes longer, in virtual time."""

        def end() -> None:
            raise NoEnd(f"the run has not ended after {seconds:.0f} s")

        self.loop.call_later(seconds, end)

    def check_nodes(self) -> None:
        """Raises Violation for an answer that broke a promise."""
        for node in self.nodes:
            if node.errors:
                raise Violation(f"{node.name}: {node.errors[0]}") from node.errors[0]

    # ------------------------------------------------------------ faults

    def schedule(self, kinds: dict[str, Callable[[], None]], count: int, within_s: float) -> None:
        """Lets faults begin at random times."""
        for _ in range(count):
            kind = self.rng.choice(list(kinds))
            self.loop.call_later(self.rng.uniform(0.1, within_s), self.strike, kinds[kind])

    def strike(self, fault: Callable[[], None]) -> None:
        if self.chance.on:  # not while the end is checked
            fault()

    def down_s(self) -> float:
        return self.rng.uniform(0.5, DOWN_S)

    def crash_trainer(self) -> None:
        if self.is_up:
            raise Crash

    def end(self, node: Node, text: str = "") -> None:
        """Ends a process, which comes back later."""
        node.crash(text)
        self.loop.call_later(self.down_s(), node.start)

    def crash(self) -> None:
        node = self.rng.choice(self.nodes)
        if node.app is not None:
            self.end(node)

    def partition(self) -> None:
        """Cuts a node off for a while."""
        self.net.cut(self.rng.choice(self.nodes).machine, "*", self.down_s())

    def move_clock(self) -> None:
        self.loop.wall_offset_s += self.rng.uniform(-3600.0, 3600.0)
        self.story.fault("clock", f"{self.loop.wall_offset_s:.0f} s off")


def ask_json(scene: Scene, node: Node, path: str) -> Any:
    """Returns what a node answers at the end of a run."""
    node.start()
    return scene.loop.run_until_complete(node.ask("GET", path)).json()
