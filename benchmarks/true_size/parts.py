"""What the host does with the answers of a step, part by part, at the whole size of a case.

`python -m benchmarks.true_size.parts [7b] [--share 1] [--ranks 4]` takes the answers of a step
through the real parts one after the other: received and parsed, stored, taken, made a batch, shared
between ranks over gloo, advantages, collected, recorded. Nothing is generated, and the engine sends
one rendered answer again and again.

Each part tells the CPU seconds of rank 0, which do not depend on who else uses the machine, the
CPU seconds of the other process that it needs (the reader, the replay-buffer, the mean of the other
ranks), and the seconds that passed. `python -m benchmarks.true_size` runs all of it together.
"""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console

from benchmarks.command import command_parser, figures_table
from benchmarks.processes import calling, free_port, local_url, processes
from benchmarks.true_size.cases import BY_NAME, Case
from benchmarks.true_size.stand_in.sglang.launch_server import Pieces, Speed
from common.clients.replay import ReplayClient
from common.clients.rollout import RolloutClient
from common.process.helpers import helper_processes
from common.process.loop_thread import LoopThread
from common.process.metrics import Metrics
from common.settings.config import Config, load
from common.wire.schemas import Group, TakeRequest
from learning.layout import Packed
from learning.ranks import Ranks
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.algorithms.compute_advantages import compute_advantages
from trainer.evaluation.verdicts import Verdicts
from trainer.observe.prometheus import TrainerMetrics
from trainer.observe.run_dir import Recorder
from trainer.observe.run_log import RunLog
from trainer.policy.learn import distributed_batch
from trainer.policy.policy import Policy, PolicyUpdate
from trainer.policy.update_metrics import UpdateMetrics
from trainer.rollouts.drops import Drops
from trainer.rollouts.rollouts import Rollouts
from trainer.timing import StageClock

_STORED_AT_ONCE = 32
"""Groups in a call to the replay-buffer, as the collector's."""
_JOIN_S = 7200.0


@dataclass
class Part:
    """What one part took."""

    name: str
    wall_s: float
    cpu_s: float
    other_cpu_s: float
    peak_mb: float


class Parts:
    """The parts so far."""

    def __init__(self) -> None:
        self.found: list[Part] = []

    @contextmanager
    def part(self, name: str, other: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
        """Measures the block; `other` returns the CPU seconds of another process so far."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = other()
        cpu = time.process_time()
        start = time.perf_counter()
        yield
        part = Part(
            name,
            wall_s=time.perf_counter() - start,
            cpu_s=time.process_time() - cpu,
            other_cpu_s=other() - before,
            peak_mb=peak_mb(),
        )
        self.found.append(part)
        print(f"{name}: {part.wall_s:.2f} s, CPU {part.cpu_s:.2f} s", flush=True)


def peak_mb() -> float:
    """Returns the most memory of this process since the peak was reset, of files excluded."""
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("VmHWM:") + 1]) / 1024


def cpu_of(pid: int) -> Callable[[], float]:
    """Returns a function that returns the CPU seconds of a process."""
    process = psutil.Process(pid)
    return lambda: float(sum(process.cpu_times()[:2]))


def settings(name: str, share: float) -> Config:
    """Returns the settings of a case."""
    case = BY_NAME[name]
    words = {
        "trainer.batch_size": round(case.groups * share),
        "sampling.group_size": case.group_size,
        "sampling.max_new_tokens": case.tokens,
        "trainer.packing": "on",
        "trainer.micro_batch_tokens": 2 * case.tokens,
        "replay.capacity": 2 * case.groups * case.group_size,
    }
    arguments: list[str] = []
    for setting, value in words.items():
        arguments += [f"--{setting}", str(value)]
    return load(arguments, {})


def serve_answers(name: str, port: int) -> None:
    """Answers every request with the same group of answers of full length."""
    from aiohttp import web

    case = BY_NAME[name]
    options = case.speed(case.engines, 1.0, 1.0, 256)
    pieces = Pieces(Speed(**options))  # type: ignore[arg-type]
    meta = {
        "id": "0",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": case.prompt,
        "completion_tokens": case.tokens,
        "weight_version": "0",
        "output_token_logprobs_length": case.tokens,
    }
    rendered = [pieces.answer(case.tokens, dict(meta), 0) for _ in range(case.group_size)]
    body = f"[{','.join(rendered)}]".encode()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def fine(_: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_get("/health", fine)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def rank_policy(config: Config, ranks: Ranks) -> Policy:
    """Returns what shares a batch: a policy without a model."""
    policy = object.__new__(Policy)
    policy.config = config
    policy.ranks = ranks
    policy.step = 0
    policy.scorer = SimpleNamespace(layout=Packed)  # type: ignore[assignment]
    return policy


def ranks_of(rank: int, world_size: int, port: int) -> Ranks:
    """Returns this process among the ranks."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return Ranks(rank=rank, world_size=world_size, join_s=_JOIN_S, device_kind="cpu")


def follow(name: str, share: float, rank: int, world_size: int, port: int) -> None:
    """Does what a rank above 0 does with a batch, and tells its CPU seconds and its peak."""
    torch.set_num_threads(1)
    config = settings(name, share)
    with ranks_of(rank, world_size, port) as ranks:
        ranks.barrier()
        parts = Parts()
        with parts.part("share"):
            batch = distributed_batch([], rank_policy(config, ranks))
        ranks.barrier()
        with parts.part("advantages"):
            batch.advantages, _ = compute_advantages(batch, config, 0.0, ranks.sum_shares)
        ranks.barrier()
        with parts.part("collect"):
            batch.gathered(batch.advantages, ranks)
            batch.gathered(batch.advantages, ranks)
        ranks.gather(json.dumps([[each.cpu_s, each.peak_mb] for each in parts.found]))


async def receive(url: str, case: Case, count: int, directory: Path, readers: Any) -> list[Group]:
    """Returns `count` groups, received and parsed as the collector does."""

    async def group(number: int) -> Group:
        completions = await client.generate(
            prompt,
            n=case.group_size,
            max_new_tokens=case.tokens,
            temperature=1.0,
            stop_token_ids=[2],
        )
        for index, completion in enumerate(completions):
            completion.reward = float(index % 2)
            completion.correct = bool(index % 2)
            completion.verified = True
        return Group(
            id=f"run-{number}",
            prompt_id=f"prompt-{number}",
            prompt="x" * case.prompt,
            ground_truth="12",
            prompt_token_ids=np.array(prompt, np.int32) + number % 7,
            completions=completions,
            position=number,
            created_at=time.time(),
        )

    prompt = list(range(10, 10 + case.prompt))
    async with RolloutClient("router", url) as client:
        client.readers = readers
        client.directory = directory
        return list(await asyncio.gather(*(group(number) for number in range(count))))


def run(case: Case, share: float, world_size: int, directory: Path) -> list[Part]:
    """Returns the parts, in the order of a step."""
    config = settings(case.name, share)
    count = config.trainer.batch_size
    engine = local_url()
    replay = local_url()
    port = free_port()
    commands = [
        calling(serve_answers, case.name, int(engine.rpartition(":")[2])),
        [
            *("-m", "services.replay", "--replay.port", replay.rpartition(":")[2]),
            *("--state_dir", str(directory / "state")),
            *("--replay.capacity", str(config.replay.capacity)),
        ],
    ]
    commands += [
        calling(follow, case.name, share, rank, world_size, port) for rank in range(1, world_size)
    ]
    parts = Parts()
    with (
        LoopThread() as loop,
        helper_processes(1) as readers,
        processes(commands, [engine, replay]) as running,
    ):
        groups = _collected(
            parts, loop, readers, case, count=count, url=engine, directory=directory
        )
        _stored(parts, loop, groups, url=replay, pid=running[1].pid)
        batch = _learned(parts, groups, config, world_size=world_size, port=port)
        _recorded(parts, batch, config, directory / "run")
    return parts.found


def _collected(
    parts: Parts,
    loop: LoopThread,
    readers: ProcessPoolExecutor,
    case: Case,
    *,
    count: int,
    url: str,
    directory: Path,
) -> list[Group]:
    reader = cpu_of(readers.submit(os.getpid).result())
    with parts.part("receive and parse", reader):
        return loop.call(receive(url, case, count, directory / "experts", readers))


def _stored(parts: Parts, loop: LoopThread, groups: list[Group], *, url: str, pid: int) -> None:
    client = ReplayClient("replay-buffer", url, deadline_s=600.0)

    async def store() -> None:
        for begin in range(0, len(groups), _STORED_AT_ONCE):
            await client.add(groups[begin : begin + _STORED_AT_ONCE])

    request = TakeRequest(
        count=len(groups), min_version=0, wait_s=1.0, request_id="take", ids_only=True, run_id=""
    )
    with parts.part("store", cpu_of(pid)):
        loop.call(store())
    with parts.part("take", cpu_of(pid)):
        taken = loop.call(client.take(request))
    assert len(taken.ids) == len(groups)
    with parts.part("acknowledge", cpu_of(pid)):
        loop.call(client.ack(taken.ids))
    loop.call(client.close())


def _learned(
    parts: Parts, groups: list[Group], config: Config, *, world_size: int, port: int
) -> Batch:
    """Returns the batch after an update that computed nothing."""
    checking = SimpleNamespace(_vocabulary=1 << 20)
    with parts.part("check of tokens"):
        for group in groups:
            Rollouts._check_tokens(checking, group)  # type: ignore[arg-type]
    with ranks_of(0, world_size, port) as ranks:
        ranks.barrier()
        with parts.part("batch and share"):
            batch = distributed_batch(
                [TrainingGroup(group) for group in groups], rank_policy(config, ranks)
            )
        ranks.barrier()
        with parts.part("advantages"):
            batch.advantages, _ = compute_advantages(batch, config, 0.0, ranks.sum_shares)
        ranks.barrier()
        with parts.part("collect"):
            # Advantages, and the log-probabilities before the update.
            batch.advantages = batch.gathered(batch.advantages, ranks)
            batch.old_logprobs = batch.gathered(
                [row if len(row) else np.zeros(0, np.float32) for row in batch.advantages], ranks
            )
        others = [json.loads(text) for text in ranks.gather("[]")[1:]]
    with parts.part("priorities"):
        batch.mean_advantages()
    for number, part in enumerate(parts.found[-4:-1]):
        measured = [other[number] for other in others]
        part.other_cpu_s = sum(cpu_s for cpu_s, _ in measured) / max(1, len(measured))
        print(f"other ranks, {part.name}: peak {max(peak for _, peak in measured):.0f} MB")
    return batch


def _recorded(parts: Parts, batch: Batch, config: Config, directory: Path) -> None:
    registry = TrainerMetrics(Metrics("trainer"))
    numbers = {each.name: 0.0 for each in fields(UpdateMetrics)}
    update = PolicyUpdate(UpdateMetrics(**numbers))  # type: ignore[arg-type]
    drops = Drops()
    with Recorder(directory, config, Console(quiet=True), tracked=registry.tracked) as recorder:
        log = RunLog(
            config,
            recorder,
            registry,
            clock=StageClock(),
            step=0,
            collecting_cpu=lambda: 0.0,
            verdicts=Verdicts(decided=True),
            drops=drops,
        )
        with log.training(0, 2):
            with parts.part("record, in the loop"):
                log.step(1, batch, update, None)
            with parts.part("record, beside the next step"):
                log._groups.flush()


def main() -> None:
    """Prints the table."""
    parser = command_parser("true_size.parts", __doc__)
    parser.add_argument("case", nargs="?", default="7b", choices=["7b", "wide"])
    parser.add_argument("--share", type=float, default=1.0, help="share of the case")
    parser.add_argument("--ranks", type=int, default=4, help="ranks that share the batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    case = BY_NAME[options.case]
    with tempfile.TemporaryDirectory() as directory:
        found = run(case, options.share, options.ranks, Path(directory))
    tokens = case.answer_tokens * options.share / 1e6
    table = figures_table(
        f"{tokens:.1f} million tokens, {options.ranks} ranks",
        ["part", "CPU s of rank 0", "CPU s of the other process", "seconds", "peak MB of rank 0"],
    )
    for part in found:
        cells = (part.cpu_s, part.other_cpu_s, part.wall_s)
        table.add_row(part.name, *(f"{cell:.2f}" for cell in cells), f"{part.peak_mb:.0f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
