"""Whether the model fits the GPUs, or the CPU memory, of the tasks, using the estimates of
`common.models.memory`.
"""

from collections.abc import Iterator
from dataclasses import fields

from common.errors import ConfigError
from common.models.memory import (
    ModelShape,
    TrainerMemory,
    engine_memory,
    trainer_host_bytes,
    trainer_memory,
)
from common.process.topology import CRITIC, ROLLOUT, TRAINER
from common.settings.config import Config
from common.settings.sections import LoraSection
from jobgroup.doctor.machine import available_memory, needs_cuda
from jobgroup.doctor.plan import Plan, PlannedTask
from jobgroup.doctor.report import Result, expect, failed, fits, gb

TITLE = "memory for the model"
_STATIC = 0.85
"""Approximate share of a GPU that SGLang takes for weights and KV cache; `--mem-fraction-static`
sets it."""
_PROMPT = 512
"""Tokens of a long prompt."""
_PROCESS = 600 << 20
"""Bytes of a torch process on a CPU before it loads a model (docs/how-to/scale.md)."""
_FP32 = 4
_SMALLER = (
    "lower trainer.micro_batch_tokens, set trainer.activation_checkpointing, trainer.offload_optimizer or lora.rank, "
    "use more GPUs, or use a smaller model"
)


def check_fit(plan: Plan) -> Iterator[Result]:
    """Estimates the memory of trainer, critic-server and engines."""
    jobs = [job for job in plan.here if job.name in (TRAINER, CRITIC, ROLLOUT)]
    if not jobs:
        return
    name = jobs[0].config.model.name
    try:
        shape = ModelShape.of(plan.shapes[name])
    except KeyError:
        yield Result(
            TITLE,
            "warn",
            f"not estimated: the config.json of {name} cannot be read",
            "see the line of the model",
        )
        return
    except ConfigError as error:
        found, fix = (
            f"{error.message}: {error.value}",
            "watch nvidia-smi in a first run with --env MAX_STEPS=3",
        )
        yield Result(TITLE, "warn", found, fix)
        return
    yield Result("model", "ok", f"{shape.parameters:,} parameters ({name})")
    if plan.assumed_gb or plan.gpus:
        size = (
            int(plan.assumed_gb * 1e9) if plan.assumed_gb else min(gpu.total for gpu in plan.gpus)
        )
        for job in jobs:
            try:
                yield from _on_gpu(job, shape, size, plan)
            except ConfigError as error:
                yield failed(f"memory of {job.name}", error)
    elif needs_cuda(plan):
        fix = "--gpu-memory-gb 80 judges it for a cluster's GPUs"
        yield Result(TITLE, "warn", "not judged: there is no GPU here", fix)
    else:
        yield _on_cpu(jobs, shape, *available_memory(plan.topology is not None))


def _estimate(
    job: PlannedTask, shape: ModelShape, ranks: int, width: int | None = None
) -> TrainerMemory:
    """Estimates a process of the trainer, or of critic-server: which trains a whole model without a
    reference.
    """
    if job.name == TRAINER:
        return trainer_memory(shape, job.config, ranks, width)
    algorithm = job.config.algorithm.model_copy(update={"kl_coef": 0.0})
    config = job.config.model_copy(update={"lora": LoraSection(), "algorithm": algorithm})
    return trainer_memory(shape, config, 1, width)


def _parts(estimate: TrainerMemory) -> str:
    return ", ".join(
        f"{each.name} {gb(size)}"
        for each in fields(estimate)
        if (size := getattr(estimate, each.name))
    )


def _on_gpu(job: PlannedTask, shape: ModelShape, size: int, plan: Plan) -> Iterator[Result]:
    if job.name == ROLLOUT:
        if job.uses_sglang and job.config.rollout.device != "cpu":
            yield judge_engine("memory of an engine", shape, job.config, size)
        return
    here = job.gpus if plan.assumed_gb else min(job.gpus, len(plan.gpus))
    ranks = (plan.assumed_gpus or job.num_nodes * max(1, here)) if job.name == TRAINER else 1
    estimate = _estimate(job, shape, ranks)
    found = f"{gb(estimate.total)} of {gb(size)} on each of {ranks} GPUs: {_parts(estimate)}"
    yield fits(f"memory of {job.name}", found, estimate.total, size, _SMALLER)
    if job.name == TRAINER and not plan.assumed_gb:
        needed = trainer_host_bytes(shape, job.config, ranks, min(ranks, len(plan.gpus)))
        left, bound = available_memory(bool(plan.topology))
        found = f"{gb(needed)} of {gb(left)} {bound}, while a checkpoint is copied"
        yield fits(
            f"CPU memory of {job.name}",
            found,
            needed,
            left,
            "less offloading, LoRA, or a machine with more",
        )


def judge_engine(name: str, shape: ModelShape, config: Config, size: int) -> Result:
    """Judges the KV cache of SGLang on GPUs of `size` bytes: a group should fit, and a completion
    must.
    """
    settings, one = config.rollout, _PROMPT + config.sampling.max_new_tokens
    words = [part for word in settings.engine_args for part in word.split("=", 1)]
    static = (
        float(words[words.index("--mem-fraction-static") + 1])
        if "--mem-fraction-static" in words[:-1]
        else _STATIC
    )
    engine = engine_memory(shape, config, size, static)
    tokens, left = engine.kv_tokens, gb(engine.kv_tokens * engine.kv_bytes_per_token)
    found = (
        f"weights {gb(engine.weights)} on each of {settings.tensor_parallel_size} GPUs, {left} left for the KV cache: "
        f"{tokens:,} tokens, {tokens // one:,} completions of {one:,}"
    )
    fix = (
        "raise rollout.tensor_parallel_size and the GPUs of a node with it, or --mem-fraction-static in rollout.engine_args; "
        "lower sampling.max_new_tokens, or use a smaller model"
    )
    return expect(
        name,
        tokens >= one * config.sampling.group_size,
        found,
        fix,
        "warn" if tokens >= one else "fail",
    )


def _on_cpu(jobs: list[PlannedTask], shape: ModelShape, left: int, bound: str) -> Result:
    """Judges all processes of all tasks in the memory of this machine, where everything is
    float32.
    """
    parts, total = [], 0
    for job in jobs:
        if job.name == ROLLOUT:
            requests, tokens = (
                job.config.rollout.max_running_requests,
                job.config.rollout.max_context_tokens,
            )
            weights, per_token = (
                _FP32 * shape.parameters,
                2 * _FP32 * shape.layers * shape.kv_heads * shape.head_dim,
            )
            needed = _PROCESS + weights + per_token * requests * tokens
            found = f"weights {gb(weights)}, KV cache of {requests} × {tokens} tokens"
        else:
            estimate = _estimate(job, shape, job.num_nodes, _FP32)
            needed, found = (
                estimate.total - estimate.overhead + _PROCESS,
                _parts(estimate).rpartition(", overhead")[0],
            )
        parts.append(f"{job.num_nodes} × {job.name} {gb(needed)} ({found})")
        total += job.num_nodes * needed
    fix = "a smaller model, lora.rank, lower trainer.micro_batch_tokens or rollout.max_running_requests, fewer nodes; or GPUs"
    return fits(TITLE, f"{gb(total)} of {gb(left)} {bound}: {'; '.join(parts)}", total, left, fix)
