"""Starts, restarts and ends a job group on one machine by SkyPilot's rules."""

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from common.process import launcher
from common.process.exits import SIGNALLED, how_ended
from common.process.topology import LOST, WRONG_SETTING
from jobgroup.local.node import Node
from jobgroup.local.output import Screen
from jobgroup.spec import Env, Task

State = Literal["PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED", "STOPPED"]
"""`STOPPED`: ended after the primary tasks have succeeded, as every service is; SkyPilot calls it
CANCELLED."""
# Seconds that a node which failed by itself has to end, after one that only followed it.
_CAUSE_S = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class TaskRun:
    """One task: all its nodes are started, restarted and ended together."""

    def __init__(self, task: Task, start: Callable[[Task, int], Node], screen: Screen) -> None:
        self.task = task
        self.screen = screen
        self._start = start
        self.state: State = "PENDING"
        self.status = 0
        self.restarts = 0
        self.nodes: list[Node] = []
        self.failed: Node | None = None
        """The node whose last lines say why the task failed for good."""
        self._counted = 0
        self._stopping = False
        self._state_if_stopped: State = "CANCELLED"
        self._began = self._ended = time.monotonic()

    @property
    def seconds(self) -> float:
        return (time.monotonic() if self.state == "RUNNING" else self._ended) - self._began

    async def run(self) -> None:
        """Runs the task until it succeeds, has failed more often than it may be restarted, or is
        stopped.
        """
        self.state = "RUNNING"
        while not self._stopping:
            self.nodes = [self._start(self.task, rank) for rank in range(self.task.num_nodes)]
            failed = await self._first_failure()
            await self._cause_ends(failed)
            # As in SkyPilot, the nodes of a task live and die together.
            for node in self.nodes:
                node.stop()
            await asyncio.wait([node.ended for node in self.nodes])
            if self._stopping:
                break
            if failed is None:
                self._finish("SUCCEEDED")
                return
            # The node that ended first may only have followed the one that failed by itself, whose
            # status says whether a restart helps.
            failed = next((node for node in (failed, *self.nodes) if _on_its_own(node)), failed)
            self.status = failed.ended.result()
            if not self._may_restart():
                self._finish("FAILED")
                # Else node 0 was ended because another one had failed.
                by_itself = 0 < self.nodes[0].ended.result() < SIGNALLED
                self.failed = self.nodes[0] if by_itself else failed
                reason = " (a setting is wrong)" if self.status == WRONG_SETTING else ""
                after = f"after {self.restarts} restarts{reason}"
                self._tell(failed, f"{self.task.name} FAILED {after}")
                return
            self.restarts += 1
            which = f"restart {self.restarts} of {self.task.name}"
            self._tell(failed, f"{which} (at most {self.task.max_restarts})")
        self._finish(self._state_if_stopped)

    def stop(self, state: State = "CANCELLED") -> None:
        """Ends the task's nodes; `state` is then that of the task. Further calls change nothing."""
        if not self._stopping:
            self._state_if_stopped = state
        self._stopping = True
        for node in self.nodes:
            node.stop()

    async def _first_failure(self) -> Node | None:
        """Returns the first node that ends with another status than 0; None when all succeed or the
        task is stopped.
        """
        pending = {node.ended for node in self.nodes}
        while pending:
            ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for node in self.nodes:
                if node.ended in ended and node.ended.result() != 0:
                    return node
        return None

    async def _cause_ends(self, failed: Node | None) -> None:
        """Waits for the other nodes if this one ended because of another: that one may still be
        saying why, and its status decides whether the task is restarted.
        """
        if failed is None or failed.ended.result() != LOST:
            return
        others = [node.ended for node in self.nodes if not node.ended.done()]
        if others:
            await asyncio.wait(others, timeout=_CAUSE_S)

    def _may_restart(self) -> bool:
        if self.status == WRONG_SETTING:
            return False
        if self.status in self.task.restart_codes:
            return True
        self._counted += 1
        return self._counted <= self.task.max_restarts

    def _finish(self, state: State) -> None:
        self.state = state
        self._ended = time.monotonic()

    def _tell(self, failed: Node, then: str) -> None:
        self.screen.say(f"{failed.name} {how_ended(self.status)}: {then}", loud=True)
        # The lines of the node that is followed were shown already.
        if self.state != "FAILED" and self.screen.follow not in (None, failed.name):
            self.screen.tail(failed.name, failed.last_lines, failed.log)


def _on_its_own(node: Node) -> bool:
    """Whether the node failed by itself: it was not killed, and its status is not that of following
    another node.
    """
    return 0 < node.ended.result() < SIGNALLED and node.ended.result() != LOST


class Runner:
    """A job group: starts all tasks at once; the primary ones (all, if none is) decide when it ends
    and with which status.

    An auxiliary task that has failed for good also ends it: the primary ones would wait for it, as
    they do in SkyPilot.

    Args:
        tasks: to run. When none of them is primary, all are.
        environment: of node `rank` of a task.
        screen: for output.
        log_dir: for a log file per node.
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        environment: Callable[[Task, int], Env],
        screen: Screen,
        log_dir: Path,
        *,
        grace_s: float,
    ) -> None:
        self._environment = environment
        self.screen = screen
        self.log_dir = log_dir
        self.grace_s = grace_s
        self.runs = [TaskRun(task, self._start, screen) for task in tasks]
        some_primary = any(task.primary for task in tasks)
        self._primary = {run for run in self.runs if run.task.primary or not some_primary}
        self._logs: set[Path] = set()
        self._signal = 0

    async def run(self) -> int:
        """Runs everything, leaves no process behind, and returns the exit status for the shell."""
        launcher.adopt_orphans()
        running = {asyncio.create_task(run.run()): run for run in self.runs}
        lasting = asyncio.create_task(self._until_over(running))
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number, lasting)
        try:
            await asyncio.wait({lasting})
            # A signal that comes now changes nothing: what is ending keeps its grace.
            for run in self.runs:
                run.stop()
            await asyncio.wait(running)
            for task in (*running, lasting):
                task.result()  # raises what went wrong in our own code
        except asyncio.CancelledError:
            return SIGNALLED + self._signal
        finally:
            launcher.end_children()  # there are some only if a launcher was killed
            # A signal that the loop handles while it closes raises OSError.
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
        return self.reason.status if self.reason else 0

    async def _until_over(self, running: Mapping[asyncio.Task[None], TaskRun]) -> None:
        """Waits until all that is left is to be ended."""
        await self._until_primaries_end(running)
        if all(run.state == "SUCCEEDED" for run in self._primary):
            running_on = [run for run in self.runs if run.state == "RUNNING"]
            # Services that no longer reach the trainer warn of it.
            self.screen.hushed |= {node.name for run in running_on for node in run.nodes}
            await asyncio.gather(*map(self._stop_later, running_on))

    @property
    def reason(self) -> TaskRun | None:
        """The task that made the group fail, if any: a primary one, or the auxiliary one that ended
        it.
        """
        failed = [run for run in self.runs if run.state == "FAILED"]
        primary = [run for run in failed if run in self._primary]
        succeeded = all(run.state == "SUCCEEDED" for run in self._primary)
        return None if succeeded else next(iter(primary or failed), None)

    async def _until_primaries_end(self, running: Mapping[asyncio.Task[None], TaskRun]) -> None:
        pending = set(running)
        while any(running[task] in self._primary for task in pending):
            ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
                if running[task].state == "FAILED" and running[task] not in self._primary:
                    return

    async def _stop_later(self, run: TaskRun) -> None:
        await asyncio.sleep(run.task.termination_delay_s)
        run.stop("STOPPED")

    def _start(self, task: Task, rank: int) -> Node:
        name = f"{task.name}-{rank}"
        log = self.log_dir / f"{name}.log"
        if log not in self._logs:  # a restart appends to the file; an earlier run's file is removed
            log.unlink(missing_ok=True)
            self._logs.add(log)
        return Node(
            name,
            task.run,
            env=self._environment(task, rank),
            workdir=task.workdir,
            log=log,
            screen=self.screen,
            grace_s=self.grace_s,
        )

    def _on_signal(self, number: int, lasting: asyncio.Task[None]) -> None:
        if not self._signal:
            self._signal = number
            self.screen.say(
                f"{signal.Signals(number).name}: ending every task (again: kill them now)",
                loud=True,
            )
            lasting.cancel()
        else:
            for run in self.runs:
                for node in run.nodes:
                    node.kill()
