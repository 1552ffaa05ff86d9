"""SGLang as this project runs it: start, log-probabilities, weights from disk and by broadcast,
checksums, memory.
"""

import asyncio
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.processes import free_port
from checks.gpu_check.generation import scored
from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting, claim_agreement
from common.clients.rollout import RolloutClient
from common.errors import ServiceError
from common.process.child import Child, ChildOutput
from common.process.topology import Topology
from common.settings.config import Config
from common.settings.sections import ModelSection, RolloutSection
from common.wire.schemas import Completion, WorkerReport
from services.rollout.engine_client import EngineClient, engine_command, engine_env
from trainer.weights.comparison import Checksums
from trainer.weights.host_copy import HostCopy
from trainer.weights.transfer import EngineGroup, Rendezvous

_START_S = 200
"""SGLang compiles kernels at its first start on a machine."""
_TIMEOUT_S = 60
_RELEASED = 0.5
"""Share of the memory it takes that SGLang must release for an update."""


def measure(found: Findings, setting: Setting, python: Path) -> None:
    """Starts SGLang with the agent's command line and calls it as the agent does."""
    os.environ.update(Topology().loopback_env())
    model = setting.model_path or setting.model("small" if setting.small else "0.5b")
    other = setting.scratch / "sglang-other"
    weights = _files(model)
    changed = _write_changed(model, weights, other)
    section = RolloutSection(
        engine="sglang",
        device="cuda" if setting.on_gpu else "cpu",
        engine_python=str(python),
        engine_port=free_port(),
        max_running_requests=64,
        colocate=setting.on_gpu,
    )
    config = Config(model=ModelSection(name=str(model)), rollout=section)
    run = _Run(found, setting, config, model=model, weights=weights, other=other, changed=changed)
    asyncio.run(_calls(run))


@dataclass(frozen=True)
class _Run:
    """What the calls share."""

    found: Findings
    setting: Setting
    config: Config
    model: Path
    """The model that SGLang starts with."""
    weights: dict[str, Tensor]
    """Its tensors."""
    other: Path
    """A model of the same shape with other weights."""
    changed: dict[str, Tensor]
    """Its tensors."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.rollout.engine_port}"

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.nbytes for tensor in self.weights.values())


def _files(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def _write_changed(model: Path, weights: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Writes a model whose every tensor differs from `model`'s; returns its tensors."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for file in model.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and not file.name.endswith(
            ".index.json"
        ):
            shutil.copyfile(file, directory / file.name)
    changed = {name: tensor * 0.5 for name, tensor in weights.items()}
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    return changed


async def _calls(run: _Run) -> None:
    command = engine_command(run.config, Topology(), str(run.model), "1")
    env = engine_env(run.config) | Topology().loopback_env()
    before = _free_bytes(run.setting)
    start = time.perf_counter()
    output = ChildOutput(run.setting.scratch / "sglang.log", lambda _: None, on_loss=print)
    child = await Child.start(command, output, env={**os.environ, **env})
    try:
        async with (
            EngineClient("engine", run.url) as api,
            RolloutClient("engine", run.url) as client,
        ):
            await _healthy(api, child, output)
            run.found.claim(
                "SGLang answers after its start", "", f"{time.perf_counter() - start:.0f} s"
            )
            version = await api.weight_version()
            run.found.claim(
                "the version of the weights that it started with", "1", version, version == "1"
            )
            await _generate(run, client)
            await _load(run, api)
            await _broadcast(run, api)
            if run.setting.on_gpu:
                await _sleep(run, api, client, before=before)
            else:
                run.found.not_reached(
                    "SGLang's sleep during an update", "SGLang can release only the memory of GPUs"
                )
    finally:
        await child.end(5)


async def _healthy(api: EngineClient, child: Child, output: ChildOutput) -> None:
    """Returns when SGLang answers. Raises RuntimeError with the end of its output when it ends or
    takes too long.
    """
    limit = time.monotonic() + _START_S
    ended = asyncio.create_task(child.wait())
    try:
        while reason := await api.unhealthy_reason():
            if ended.done() or time.monotonic() > limit:
                print(*output.last_lines, sep="\n")
                why = (
                    f"ended with status {ended.result()}"
                    if ended.done()
                    else f"is not healthy after {_START_S} s: {reason}"
                )
                raise RuntimeError(f"SGLang {why}: see the log")
            await asyncio.sleep(0.2)
    finally:
        ended.cancel()


async def _generate(run: _Run, client: RolloutClient) -> None:
    """Generates, and compares the log-probabilities with the trainer's: the head in float32 on both
    sides.
    """
    setting = run.setting
    count, length, new = (2, 8, 8) if setting.small else (32, 64, 64)
    rng = np.random.default_rng(0)
    vocabulary = len(run.weights["model.embed_tokens.weight"])
    prompts = rng.integers(10, min(vocabulary, 100_000), (count, length)).tolist()
    answers: list[list[Completion]] = []
    took = 0.0
    for _ in range(2):  # the first compiles
        start = time.perf_counter()
        work = [
            client.generate(
                prompt,
                n=2,
                max_new_tokens=new,
                temperature=1.0,
                stop_token_ids=[],
                parameters={"ignore_eos": True},
            )
            for prompt in prompts
        ]
        answers = list(await asyncio.gather(*work))
        took = time.perf_counter() - start
    tokens = sum(len(each.token_ids) for group in answers for each in group)
    run.found.claim(
        f"SGLang, {2 * count} completions of {new} tokens", "", f"{tokens / took:,.0f} tokens/s"
    )
    completions = [[each.token_ids for each in group] for group in answers]
    own = scored(setting, run.model, prompts, completions)
    theirs = torch.from_numpy(
        np.concatenate([each.logprobs for group in answers for each in group])
    )
    apart = (own - theirs).abs()
    text = "SGLang's log-probabilities beside the trainer's, with its head in float32"
    claim_agreement(run.found, text, apart)


async def _load(run: _Run, api: EngineClient) -> None:
    """Replaces the weights from disk."""
    start = time.perf_counter()
    await api.load(run.other, "2", _TIMEOUT_S)
    took = time.perf_counter() - start
    run.found.claim(
        "SGLang loads weights from disk", "", f"{took:.1f} s, {run.size / took / 1e9:.2f} GB/s"
    )
    await _compare(run, api, run.changed, way="from disk")


async def _compare(run: _Run, api: EngineClient, sent: dict[str, Tensor], *, way: str) -> None:
    """Compares SGLang's checksums with those of what it was sent."""
    start = time.perf_counter()
    theirs = await api.checksums(_TIMEOUT_S)
    took = time.perf_counter() - start
    start = time.perf_counter()
    comparison = Checksums(on_gpu=run.setting.on_gpu).compare(sent, theirs)
    own = time.perf_counter() - start
    holds = comparison.problem is None and comparison.compared == comparison.total
    measured = comparison.problem or str(comparison)
    run.found.claim(
        f"checksums of the weights that SGLang got {way}", "all as the trainer's", measured, holds
    )
    run.found.claim(
        f"checksums {way}: SGLang's and the trainer's", "", f"{took:.2f} and {own:.2f} s"
    )


async def _broadcast(run: _Run, api: EngineClient) -> None:
    """Broadcasts the first weights into SGLang, by the calls of
    `services/rollout/weights/receive.py`.
    """
    text = "a broadcast of weights into SGLang"
    if run.setting.on_gpu and torch.cuda.device_count() < 2:
        run.found.not_reached(
            text, "NCCL needs a GPU for the trainer and one for SGLang, and here is one"
        )
        return
    if run.setting.on_gpu:
        torch.cuda.set_device(1)  # SGLang is on the first
    copy = HostCopy()
    copy.fill(run.weights.items(), 3)
    report = WorkerReport(name="engine", url=run.url, num_nodes=1, state="ready", version=None)
    group = EngineGroup(
        [report], Rendezvous("127.0.0.1", "nccl" if run.setting.on_gpu else "gloo"), _TIMEOUT_S
    )
    plan = group.announcement(copy.buckets)
    init: dict[str, Any] = {
        "group_name": plan.group,
        "rank_offset": 1,
        "world_size": plan.world_size,
    }
    init |= {
        "master_address": plan.master_address,
        "master_port": plan.master_port,
        "backend": plan.backend,
    }
    loop = asyncio.get_running_loop()
    start = time.perf_counter()
    with ThreadPoolExecutor(1) as sender:
        sending = [loop.run_in_executor(sender, group.send, flat) for flat in copy.flats]
        try:
            await api.control("/init_weights_update_group", init, _TIMEOUT_S)
            await api.pause()
            await api.control("/begin_weight_update", {}, _TIMEOUT_S)
            for index, bucket in enumerate(plan.buckets):
                last = index == len(plan.buckets) - 1
                body = bucket.model_dump() | {
                    "group_name": plan.group,
                    "load_format": "flattened_bucket",
                }
                body |= (
                    {"flush_cache": True, "weight_version": "3"} if last else {"flush_cache": False}
                )
                await api.control("/update_weights_from_distributed", body, _TIMEOUT_S)
            await api.control("/end_weight_update", {}, _TIMEOUT_S)
            await api.resume()
            await asyncio.gather(*sending)
        except ServiceError:
            group.close(stuck=True)
            raise
    took = time.perf_counter() - start
    group.close()
    measured = (
        f"{took:.1f} s, {copy.size / took / 1e9:.2f} GB/s by {plan.backend}, joining included"
    )
    run.found.claim(text, "", measured)
    await _compare(run, api, run.weights, way="by broadcast")


async def _sleep(run: _Run, api: EngineClient, client: RolloutClient, *, before: int) -> None:
    """Releases SGLang's memory as for an update on the same GPU, and wakes it with other
    weights.
    """
    text = "SGLang releases its memory for an update"
    awake = _free_bytes(run.setting)
    start = time.perf_counter()
    await api.sleep(["kv_cache", "weights"], _TIMEOUT_S)
    slept = time.perf_counter() - start
    asleep = _free_bytes(run.setting)
    taken = max(1, before - awake)
    share = (asleep - awake) / taken
    measured = f"{(asleep - awake) / 1e9:.1f} of {taken / 1e9:.1f} GB in {slept:.1f} s"
    run.found.claim(text, f"≥ {_RELEASED:.0%} of what it takes", measured, share >= _RELEASED)
    start = time.perf_counter()
    await api.load(run.model, "4", _TIMEOUT_S)
    run.found.claim(
        "SGLang wakes up with new weights from disk", "", f"{time.perf_counter() - start:.1f} s"
    )
    await _compare(run, api, run.weights, way="after sleep")
    answers = await client.generate(
        [20, 21, 22], n=1, max_new_tokens=4, temperature=1.0, stop_token_ids=[]
    )
    count = len(answers[0].token_ids)
    run.found.claim(
        "SGLang generates after its sleep", "1 to 4 tokens", str(count), 1 <= count <= 4
    )


def _free_bytes(setting: Setting) -> int:
    """Returns the free memory of the first GPU, over all processes; 0 on a CPU."""
    if not setting.on_gpu:
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(0)[0])
