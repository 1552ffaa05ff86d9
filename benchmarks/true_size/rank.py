"""One rank of a rehearsal: the trainer, whose model computes nothing and whose update takes the
time that a GPU is predicted to take.

`python -m trainer.launch -m benchmarks.true_size.rank` is the real trainer. Packing, advantages,
collective calls, publishing and records are real. Only the model's passes are replaced: they are
queued on a modelled GPU, as kernels are, and the host goes on until it needs a result. Between the
end of its queue and the next pass the modelled GPU waits for the host; what the host did meanwhile
is recorded (`idle`).
"""

import asyncio
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.true_size.cases import ENGINES
from common.clients.rollout import RolloutClient
from trainer.policy.policy import Policy
from trainer.rollouts.collector import Collector
from trainer.rollouts.group_maker import GroupMaker
from trainer.rollouts.rollouts import Rollouts
from trainer.start.program import run_rank

HOST = (
    "receive",
    "parse",
    "grade",
    "store",
    "take",
    "share",
    "batch",
    "advantages",
    "publish",
    "record",
    "pack",
    "wait",
)
"""What the host may do while the GPU waits; of several at once, the first counts. The first four
are the way of the last answers into the store."""


class Device:
    """A modelled GPU: passes run one after the other, at `clock` times their speed."""

    def __init__(self, seconds_per_token: float, clock: float, max_staleness: int) -> None:
        # With staleness 0 nothing can be trained on before the engines are done, whatever the host
        # does meanwhile; otherwise they always generate.
        self._order = (*HOST, ENGINES) if max_staleness else (ENGINES, *HOST)
        self._per_token = seconds_per_token / clock
        self._busy_until = time.perf_counter()
        self._lock = threading.Lock()
        self._spans: list[tuple[float, float, str]] = []
        self.computed = 0.0
        """Real seconds of passes since the last lap."""
        self.idle: dict[str, float] = defaultdict(float)

    def launch(self, tokens: int) -> None:
        """Queues a pass over so many tokens."""
        now = time.perf_counter()
        if now > self._busy_until:
            self.count_idle(self._busy_until, now)
        seconds = tokens * self._per_token
        self._busy_until = max(now, self._busy_until) + seconds
        self.computed += seconds

    def wait(self) -> None:
        """Waits until the queue is empty."""
        time.sleep(max(0.0, self._busy_until - time.perf_counter()))

    def did(self, name: str, start: float, end: float) -> None:
        """Records what the host, or its event loop, did."""
        with self._lock:
            self._spans.append((start, end, name))

    def count_idle(self, start: float, end: float) -> None:
        """Adds [start, end] to what the host did then."""
        with self._lock:
            spans = [span for span in self._spans if span[1] > start]
            self._spans = []
        cuts = sorted({start, end, *(at for s in spans for at in s[:2] if start < at < end)})
        for left, right in pairwise(cuts):
            names = {name for begin, until, name in spans if begin <= left and until >= right}
            first = next((name for name in self._order if name in names), "rest")
            self.idle[first] += right - left

    def lap(self) -> dict[str, Any]:
        found = {"computed": self.computed, "idle": dict(self.idle)}
        self.computed = 0.0
        self.idle.clear()
        return found


def _recorded(owner: Any, method: str, name: str, device: Device) -> None:
    """Records every call of a method or function that returns something as `name`."""
    inner: Callable[..., Any] = getattr(owner, method)

    @wraps(inner)
    def call(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*arguments, **options)
        finally:
            device.did(name, start, time.perf_counter())

    setattr(owner, method, call)


def _recorded_coroutine(owner: Any, method: str, name: str, device: Device) -> None:
    """The same for a coroutine, unless it returns [], as a `take` that found too few groups."""
    inner: Callable[..., Any] = getattr(owner, method)

    @wraps(inner)
    async def call(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        found = await inner(*arguments, **options)
        if found != []:
            device.did(name, start, time.perf_counter())
        return found

    setattr(owner, method, call)


def _recorded_answers(device: Device) -> None:
    """Records when the engines generate an answer, when it is received and when it is parsed."""
    arrived: dict[Any, float] = {}
    receive = RolloutClient._to_file
    contents = RolloutClient._contents
    generate = RolloutClient.generate

    async def received(self: RolloutClient, pieces: Any) -> Path:
        start = time.perf_counter()
        file = await receive(self, pieces)
        device.did("receive", start, time.perf_counter())
        return file

    async def answered(self: RolloutClient, *arguments: Any, **options: Any) -> Any:
        found = await contents(self, *arguments, **options)
        arrived[asyncio.current_task()] = time.perf_counter()
        return found

    async def generated(self: RolloutClient, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        completions = await generate(self, *arguments, **options)
        there = arrived.pop(asyncio.current_task(), time.perf_counter())
        device.did("parse", there, time.perf_counter())
        device.did(ENGINES, start, there)
        return completions

    RolloutClient._to_file = received  # type: ignore[method-assign]
    RolloutClient._contents = answered  # type: ignore[method-assign]
    RolloutClient.generate = generated  # type: ignore[method-assign]


def replace_model(device: Device, record: Path) -> None:
    """Replaces the model's passes in this process by the modelled GPU."""
    from learning import batching
    from learning.optimizer import Optimizer
    from learning.ranks import Ranks
    from trainer.algorithms.batch import Batch, MicroBatch
    from trainer.policy import learn as learning_step
    from trainer.run import Run
    from trainer.weights.sync import WeightSync

    def backward(self: Policy, micro: Any, **_: Any) -> torch.Tensor:
        device.launch(micro.inputs.tokens.input_ids.numel())
        return torch.full_like(micro.rollout_logprobs, -0.5)

    class NoScores:
        """The scores of a pass that joins the others' collective calls."""

        logprobs = torch.zeros(1, requires_grad=True)

    def step(_: Optimizer, __: float) -> float:
        device.wait()
        return 1.0

    Policy._backward = backward  # type: ignore[method-assign]
    Policy._score = lambda *_, **__: NoScores()  # type: ignore[assignment, method-assign]
    Optimizer.step = step  # type: ignore[assignment, method-assign]

    _recorded_answers(device)
    _recorded_coroutine(Collector, "take", "take", device)
    _recorded_coroutine(Collector, "_store", "store", device)
    _recorded_coroutine(GroupMaker, "_grade", "grade", device)
    _recorded_coroutine(GroupMaker, "_episodes", ENGINES, device)
    _recorded(Rollouts, "next", "wait", device)
    for name in ("broadcast", "scatter", "collect"):
        _recorded(Ranks, name, "share", device)
    _recorded(Batch, "of", "batch", device)
    _recorded(learning_step, "compute_advantages", "advantages", device)
    _recorded(WeightSync, "gather", "publish", device)
    _recorded(WeightSync, "publish", "publish", device)
    _recorded(Run, "end_step", "record", device)
    _recorded(batching, "micro_batches", "pack", device)
    _recorded(MicroBatch, "of", "pack", device)

    inner = Run.end_step

    def end_step(self: Run, *arguments: Any) -> None:
        inner(self, *arguments)
        line = {"step": self.policy.step, "rank": self.ranks.rank, "at": time.time()}
        with record.open("a") as file:
            file.write(json.dumps(line | device.lap()) + "\n")

    Run.end_step = end_step  # type: ignore[assignment, method-assign]


def main() -> None:
    """Runs this rank with the settings of `TRUE_SIZE_RANK`."""
    settings = json.loads(os.environ["TRUE_SIZE_RANK"])
    device = Device(
        settings["seconds_per_token"], settings["clock"], max_staleness=settings["max_staleness"]
    )
    record = Path(settings["directory"]) / f"rank{os.environ['RANK']}.jsonl"
    replace_model(device, record)

    from trainer.__main__ import main as train

    train()


if __name__ == "__main__":
    run_rank(main)
