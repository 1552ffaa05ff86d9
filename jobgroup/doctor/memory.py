"""Whether the model fits the GPUs, or the CPU memory, of the tasks, using the estimates of
`common.models.memory`.
"""

from collections.abc import Iterator
from dataclasses import replace

from common.errors import ConfigError
from common.models.memory import (
    FITS_SHARE,
    ModelShape,
    TrainerMemory,
    critic_only,
    engine_memory,
    fastest_fit,
    trainer_host_bytes,
    trainer_memory,
)
from common.process.topology import CRITIC, ROLLOUT, TRAINER
from common.settings.config import Config
from jobgroup.doctor.gpus import needs_cuda
from jobgroup.doctor.machine import available_memory
from jobgroup.doctor.plan import Plan, PlannedTask
from jobgroup.doctor.report import Result, expect, failed, fits, gb

TITLE = "memory for the model"
_STATIC = 0.85
"""Approximate share of a GPU that SGLang takes for weights and KV cache; `--mem-fraction-static`
sets it."""
_PROMPT = 512
"""Tokens of a long prompt."""
_PROCESS = 600 << 20
"""Bytes of a torch process on a CPU before it loads a model (docs/how-to/clusters.md)."""
_FP32 = 4
_SMALLER = (
    "lower trainer.micro_batch_tokens, set trainer.activation_checkpointing, "
    "parallel.offload_optimizer or lora.rank, use more GPUs, or use a smaller model"
)


def check_fit(plan: Plan) -> Iterator[Result]:
    """Estimates the memory of trainer, critic-server and engines."""
    jobs = [job for job in plan.here if job.name in (TRAINER, CRITIC, ROLLOUT)]
    if not jobs:
        return
    name = jobs[0].config.model.name
    if name not in plan.shapes and plan.makes_model(jobs[0]):
        yield Result(TITLE, "ok", "not estimated: the built-in model is made later, and is small")
        return
    if name not in plan.shapes:
        found = f"not estimated: the config.json of {name} cannot be read"
        yield Result(TITLE, "warn", found, "see the line of the model")
        return
    try:
        shape = ModelShape.of(plan.shapes[name])
    except ConfigError as error:
        fix = "watch nvidia-smi in a first run with --env MAX_STEPS=3"
        yield Result(TITLE, "warn", f"{error.message}: {error.value}", fix)
        return

    yield Result("model", "ok", f"{shape.parameters:,} parameters ({name})")
    if plan.gpus:
        for job in jobs:
            try:
                yield from _on_gpu(job, shape, plan)
            except ConfigError as error:
                yield failed(f"memory of {job.name}", error)
    elif needs_cuda(plan):
        fix = "--plan judges a model for a cluster's GPUs"
        yield Result(TITLE, "warn", "not judged: there is no GPU here", fix)
    elif not plan.inside:  # else the group's processes already have their memory
        yield _on_cpu(jobs, shape)


def _estimate(
    job: PlannedTask,
    shape: ModelShape,
    ranks: int,
    *,
    width: int | None = None,
    size: int | None = None,
) -> TrainerMemory:
    """Estimates a process of the trainer or of critic-server, on a GPU of `size` bytes unless it
    runs on a CPU.
    """
    config = job.config if job.name == TRAINER else critic_only(job.config)
    if size is not None:
        config = fastest_fit(shape, config, ranks, FITS_SHARE * size)
    return trainer_memory(shape, config, ranks, width=width)


def parts(estimate: TrainerMemory) -> str:
    """Lists the parts of an estimate that are not empty."""
    return ", ".join(f"{name} {gb(size)}" for name, size in vars(estimate).items() if size)


def _on_gpu(job: PlannedTask, shape: ModelShape, plan: Plan) -> Iterator[Result]:
    size = min(gpu.total for gpu in plan.gpus)
    if job.name == ROLLOUT:
        if job.uses_sglang and job.config.rollout.device != "cpu":
            yield judge_engine("memory of an engine", shape, job.config, size)
        return

    ranks = 1
    if job.name == TRAINER:
        ranks = job.num_nodes * max(1, min(job.gpus, len(plan.gpus)))
    estimate = _estimate(job, shape, ranks, size=size)
    found = f"{gb(estimate.total)} of {gb(size)} on each of {ranks} GPUs: {parts(estimate)}"
    title = f"memory of {job.name}"
    yield fits(title, found, needed=estimate.total, available=size, fix=_SMALLER)

    if job.name == TRAINER and not plan.inside:
        needed = trainer_host_bytes(shape, job.config, ranks, min(ranks, len(plan.gpus)))
        left, bound = available_memory()
        found = f"{gb(needed)} of {gb(left)} {bound}, while a checkpoint is copied"
        fix = "less offloading, LoRA, or a machine with more"
        yield fits(f"CPU {title}", found, needed=needed, available=left, fix=fix)


def judge_engine(name: str, shape: ModelShape, config: Config, size: int) -> Result:
    """Judges the KV cache of SGLang on GPUs of `size` bytes: a group should fit, and a completion
    must.
    """
    engine = engine_memory(shape, config, size, static_share=_static_share(config))
    tokens = engine.kv_tokens
    completion = _PROMPT + config.sampling.max_new_tokens
    found = (
        f"weights {gb(engine.weights)} on each of {config.rollout.tensor_parallel_size} GPUs, "
        f"{gb(tokens * engine.kv_bytes_per_token)} left for the KV cache: "
        f"{tokens:,} tokens, {tokens // completion:,} completions of {completion:,}"
    )
    fix = (
        "raise rollout.tensor_parallel_size and the GPUs of a node with it "
        "(rollout.nodes_per_engine for several nodes), "
        "or --mem-fraction-static in rollout.engine_args; "
        "lower sampling.max_new_tokens, or use a smaller model"
    )
    group_fits = tokens >= completion * config.sampling.group_size
    return expect(
        name, group_fits, found, fix, otherwise="warn" if tokens >= completion else "fail"
    )


def _static_share(config: Config) -> float:
    """Returns the share of a GPU that SGLang takes; its argument is `--name 1` or `--name=1`."""
    arguments = " ".join(config.rollout.engine_args).replace("=", " ").split()
    if "--mem-fraction-static" not in arguments[:-1]:
        return _STATIC
    return float(arguments[arguments.index("--mem-fraction-static") + 1])


def _on_cpu(jobs: list[PlannedTask], shape: ModelShape) -> Result:
    """Judges all processes of all tasks in the memory of this machine, where everything is
    float32.
    """
    left, bound = available_memory()
    lines = []
    total = 0
    for job in jobs:
        if job.name == ROLLOUT:
            rollout = job.config.rollout
            tokens = rollout.max_running_requests * rollout.max_context_tokens
            weights = _FP32 * shape.parameters
            cache = 2 * _FP32 * shape.layers * shape.kv_heads * shape.head_dim * tokens
            needed = _PROCESS + weights + cache
            found = f"weights {gb(weights)}, KV cache of {tokens:,} tokens"
        else:
            # The overhead of a GPU is no part of a process on a CPU.
            ranks = job.num_nodes if job.name == TRAINER else 1
            estimate = replace(_estimate(job, shape, ranks, width=_FP32), overhead=0)
            needed = estimate.total + _PROCESS
            found = parts(estimate)
        lines.append(f"{job.num_nodes} × {job.name} {gb(needed)} ({found})")
        total += job.num_nodes * needed
    fix = f"{_SMALLER}; lower rollout.max_running_requests, or use fewer nodes"
    found = f"{gb(total)} of {gb(left)} {bound}: {'; '.join(lines)}"
    return fits(TITLE, found, needed=total, available=left, fix=fix)
