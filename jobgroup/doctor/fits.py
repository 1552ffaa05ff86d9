"""Does the model fit? The estimates of `common.memory` against the GPUs, or the CPU memory, that the tasks will have."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from common.config import Config
from common.errors import ConfigError
from common.memory import ModelShape, TrainerMemory, engine_memory, trainer_host_bytes, trainer_memory
from common.sections import LoraSection
from common.topology import CRITIC, ROLLOUT, TRAINER
from jobgroup.doctor.gpu import Gpu, needs_cuda
from jobgroup.doctor.machine import memory
from jobgroup.doctor.plan import Job, Plan
from jobgroup.doctor.result import Result, fail, failed, gb, ok, warn

_STATIC = 0.85
"""Share of a GPU that SGLang takes for weights and KV cache, about; `--mem-fraction-static` sets it."""
_PROMPT = 512
"""Tokens of a long prompt."""
_TIGHT = 0.9
_PROCESS = 600 << 20
"""Of a process with torch on a CPU, before it has a model (docs/how-to/scale.md)."""
_FP32 = 4
_LESS = (
    "lower trainer.micro_batch_tokens, set trainer.activation_checkpointing, trainer.offload_optimizer or lora.rank, "
    "take more GPUs, or a smaller model"
)


def check_fit(plan: Plan, gpus: Sequence[Gpu], shapes: Mapping[str, Mapping[str, Any]]) -> Iterable[Result]:
    """Lines for trainer, critic-server and engines, with the numbers."""
    jobs = [job for job in plan.here if job.name in (TRAINER, CRITIC, ROLLOUT)]
    title = "memory for the model"
    if not jobs:
        return
    name = jobs[0].config.model.name
    if name not in shapes:
        yield warn(title, f"not estimated: the config.json of {name} cannot be had", "see the line of the model")
        return
    try:
        shape = ModelShape.of(shapes[name])
    except ConfigError as error:
        yield warn(title, f"{error.message}: {error.value}", "watch nvidia-smi in a first run with --env MAX_STEPS=3")
        return
    yield ok("model", f"{shape.parameters:,} parameters ({name})")
    if plan.assumed is not None or gpus:
        size = int(plan.assumed.memory_gb * 1e9) if plan.assumed else min(gpu.total for gpu in gpus)
        for job in jobs:
            yield from _bounded(job, _on_gpu(job, shape, size, plan, None if plan.assumed else len(gpus)))
        if not plan.assumed:
            yield from _shared(jobs, shape, size, len(gpus))
    elif needs_cuda(plan):
        yield warn(title, "not judged: there is no GPU here", "--gpu-memory-gb 80 judges it for a cluster's GPUs")
    else:
        yield from _bounded(jobs[0], _on_cpu(jobs, shape, *memory(plan.topology is not None)))


def _bounded(job: Job, results: Iterator[Result]) -> Iterable[Result]:
    """An estimate that the settings do not permit is a failed line."""
    try:
        yield from results
    except ConfigError as error:
        yield failed(f"memory of {job.name}", error)


def _ranks(job: Job, plan: Plan, here: int | None) -> int:
    """Trainer processes, one per GPU."""
    if plan.assumed is not None and plan.assumed.trainer_gpus is not None:
        return plan.assumed.trainer_gpus
    return job.nodes * max(1, job.gpus if here is None else min(job.gpus, here))


def _on_gpu(job: Job, shape: ModelShape, size: int, plan: Plan, here: int | None) -> Iterator[Result]:
    """One process of this task on a GPU of its own of `size` bytes."""
    if job.name == ROLLOUT:
        if job.uses_sglang and job.config.rollout.device == "cuda":
            yield _engine(job.config, shape, size)
        return
    ranks = _ranks(job, plan, here) if job.name == TRAINER else 1
    config = job.config if job.name == TRAINER else _critics(job.config)
    estimate = trainer_memory(shape, config, ranks)
    text = f"{gb(estimate.total)} of {gb(size)} on each of {ranks} GPUs: {_parts(estimate)}"
    yield _compared(f"memory of {job.name}", text, estimate.total, size, _LESS)
    if here is not None and job.name == TRAINER:
        node = min(ranks, here)
        needed, (left, bound) = trainer_host_bytes(shape, config, ranks, node), memory(plan.topology is not None)
        text = f"{gb(needed)} of {gb(left)} {bound}, while a checkpoint is copied"
        yield _compared(f"CPU memory of {job.name}", text, needed, left, "less offloading, LoRA, or a machine with more")


def _critics(config: Config) -> Config:
    """The settings by which a critic-server learns: a whole model without a reference."""
    algorithm = config.algorithm.model_copy(update={"kl_coef": 0.0})
    trainer = config.trainer.model_copy(update={"micro_batch_tokens": config.critic.micro_batch_tokens})
    return config.model_copy(update={"lora": LoraSection(), "algorithm": algorithm, "trainer": trainer})


def _parts(estimate: TrainerMemory) -> str:
    named = [(field.name, getattr(estimate, field.name)) for field in fields(estimate)]
    return ", ".join(f"{name} {gb(size)}" for name, size in named if size)


def _compared(title: str, text: str, needed: float, size: float, mend: str) -> Result:
    if needed > size:
        return fail(title, f"does not fit: {text}", mend)
    return warn(title, f"tight: {text}", mend) if needed > _TIGHT * size else ok(title, text)


def _static(config: Config) -> float:
    """`--mem-fraction-static` among the engine's arguments."""
    words = [part for word in config.rollout.engine_args for part in word.split("=", 1)]
    return float(words[words.index("--mem-fraction-static") + 1]) if "--mem-fraction-static" in words[:-1] else _STATIC


def _engine(config: Config, shape: ModelShape, size: int) -> Result:
    share, title = _static(config), "memory of an engine"
    engine = engine_memory(shape, config, size, share)
    one = _PROMPT + config.sampling.max_new_tokens
    text = (
        f"weights {gb(engine.weights)} on each of {config.rollout.tensor_parallel_size} GPUs; "
        f"the rest of {share:.0%} of {gb(size)} is KV cache for {engine.kv_tokens:,} tokens at "
        f"{engine.kv_bytes_per_token:,} bytes: {engine.kv_tokens // one} completions of {one}"
    )
    mend = "raise rollout.tensor_parallel_size and the GPUs of a node with it, or --mem-fraction-static in rollout.engine_args"
    if engine.kv_tokens < one:
        return fail(title, f"does not fit: {text}", mend)
    return warn(title, f"few at once: {text}", mend) if engine.kv_tokens < one * config.sampling.group_size else ok(title, text)


def _shared(jobs: Sequence[Job], shape: ModelShape, size: int, gpus: int) -> Iterable[Result]:
    """GPUs of this machine that several processes get, given in turn as `jobgroup.local.places.share_gpus` does."""
    held: dict[int, list[tuple[str, int]]] = {}
    given = 0
    for job in jobs:
        count = min(job.gpus, gpus)
        for node in range(job.nodes):
            used = min(count, job.config.rollout.tensor_parallel_size) if job.name == ROLLOUT else count
            for each in range(used):
                needed = int(_static(job.config) * size) if job.name == ROLLOUT else _process(job, shape, job.nodes * count)
                held.setdefault((given + each) % gpus, []).append((f"{job.name}-{node}", needed))
            given += count
    for number, parts in sorted(held.items()):
        if len(parts) > 1:
            needed = sum(part for _, part in parts)
            text = f"{gb(needed)} of {gb(size)}: {', '.join(f'{name} {gb(part)}' for name, part in parts)}"
            mend = "fewer nodes (num_nodes), and --mem-fraction-static in rollout.engine_args: an engine fills what it gets"
            yield _compared(f"GPU number {number} is shared", text, needed, size, mend)


def _process(job: Job, shape: ModelShape, ranks: int) -> int:
    config = job.config if job.name == TRAINER else _critics(job.config)
    return trainer_memory(shape, config, ranks if job.name == TRAINER else 1).total


def _on_cpu(jobs: Sequence[Job], shape: ModelShape, left: int, bound: str) -> Iterator[Result]:
    """All processes of all tasks in the memory of this machine; everything is float32 there."""
    parts: list[tuple[str, int]] = []
    for job in jobs:
        if job.name == ROLLOUT:
            rollout = job.config.rollout
            per_token = 2 * _FP32 * shape.layers * shape.kv_heads * shape.head_dim
            needed = _PROCESS + _FP32 * shape.parameters + per_token * rollout.max_running_requests * rollout.max_context_tokens
            tokens = f"{rollout.max_running_requests} × {rollout.max_context_tokens}"
            text = f"weights {gb(_FP32 * shape.parameters)}, KV cache of {tokens} tokens"
        else:
            config = job.config if job.name == TRAINER else _critics(job.config)
            estimate = trainer_memory(shape, config, job.nodes if job.name == TRAINER else 1, _FP32)
            needed = estimate.total - estimate.overhead + _PROCESS
            text = _parts(estimate).rpartition(", overhead")[0]
        parts.append((f"{job.nodes} × {job.name} {gb(needed)} ({text})", job.nodes * needed))
    total = sum(size for _, size in parts)
    text = f"{gb(total)} of {gb(left)} {bound}: {'; '.join(part for part, _ in parts)}"
    mend = "a smaller model, lora.rank, lower trainer.micro_batch_tokens or rollout.max_running_requests, fewer nodes; or GPUs"
    yield _compared("memory for the model", text, total, left, mend)
