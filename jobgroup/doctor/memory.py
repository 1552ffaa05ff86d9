"""Whether the model fits the GPUs of the tasks, and the CPU memory beside them, by the estimates of
`common.models.memory`.
"""

from collections.abc import Iterator

from common.errors import ConfigError
from common.models.memory import (
    FITS_SHARE,
    LONG_PROMPT,
    ModelShape,
    TrainerMemory,
    answers_of_pass,
    engine_memory,
    fastest_fit,
    form,
    full_pass,
    trainer_host_bytes,
    trainer_memory,
)
from common.process.topology import ROLLOUT, TRAINER
from common.settings.config import Config
from jobgroup.doctor.machine import available_memory
from jobgroup.doctor.plan import Plan, PlannedTask
from jobgroup.doctor.report import Result, expect, failed, fits, gb

TITLE = "memory for the model"
_STATIC = 0.85
"""Approximate share of a GPU that SGLang takes for weights and KV cache; `--mem-fraction-static`
sets it."""
_FULL = 0.7
"""Share of a pass that the longest answers should fill."""
_SMALLER = (
    "lower trainer.micro_batch_tokens, set trainer.activation_checkpointing, "
    "parallel.offload_optimizer or lora.rank, use more GPUs, or use a smaller model"
)


def check_fit(plan: Plan) -> Iterator[Result]:
    """Estimates the memory of trainer and engines."""
    jobs = [job for job in plan.here if job.name in (TRAINER, ROLLOUT)]
    if not jobs:
        return
    name = jobs[0].config.model.name
    if name not in plan.shapes:
        # Otherwise the line of the model says why its config.json cannot be read.
        if plan.makes_model(jobs[0]):
            found = "not estimated: the built-in model is made later, and is small"
            yield Result(TITLE, "ok", found)
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
    else:
        found = "not judged: there is no GPU here, and --plan judges a model for a cluster's"
        yield Result(TITLE, "ok", found)


def parts(estimate: TrainerMemory) -> str:
    """Lists the parts of an estimate that are not empty."""
    return ", ".join(f"{name} {gb(size)}" for name, size in vars(estimate).items() if size)


def _on_gpu(job: PlannedTask, shape: ModelShape, plan: Plan) -> Iterator[Result]:
    size = min(gpu.total for gpu in plan.gpus)
    if job.name == ROLLOUT:
        if job.uses_sglang and job.config.rollout.device != "cpu":
            yield judge_engine("memory of an engine", shape, job.config, size)
        return

    ranks = job.num_nodes * max(1, min(job.gpus, len(plan.gpus)))
    title = f"memory of {job.name}"
    yield from judge_passes(job.config)
    yield judge_trainer(title, shape, job.config, ranks, room=size, fix=_SMALLER)

    if not plan.inside:
        needed = trainer_host_bytes(shape, job.config, ranks, min(ranks, len(plan.gpus)))
        left, bound = available_memory()
        found = f"{gb(needed)} of {gb(left)} {bound}, while a checkpoint is copied"
        fix = "less offloading, LoRA, or a machine with more"
        yield fits(f"CPU {title}", found, needed=needed, available=left, fix=fix)


def judge_trainer(
    name: str, shape: ModelShape, config: Config, ranks: int, *, room: int, fix: str
) -> Result:
    """Judges an update on `ranks` GPUs of `room` bytes."""
    decided = fastest_fit(shape, config, ranks, FITS_SHARE * room)
    estimate = trainer_memory(shape, decided, ranks)
    found = (
        f"{gb(estimate.total)} of {gb(room)} on each of {ranks} GPUs with {form(decided)}: "
        f"{parts(estimate)}"
    )
    return fits(name, found, needed=estimate.total, available=room, fix=fix)


def judge_passes(config: Config) -> Iterator[Result]:
    """Judges how full passes of the longest answers are, where `trainer.micro_batch_tokens` is
    set; `auto` makes them full.
    """
    room = config.trainer.micro_batch_tokens
    if room == "auto":
        return
    answers = answers_of_pass(config)
    fill = min(1.0, full_pass(config, answers) / room)
    found = (
        f"{room:,} tokens, {fill:.0%} of which {answers} answers of "
        f"{config.sampling.max_new_tokens:,} and their prompt take"
    )
    fix = (
        f"trainer.micro_batch_tokens auto, {full_pass(config, answers)}, or "
        f"{full_pass(config, answers + 1)}"
    )
    yield expect("passes of the longest answers", fill >= _FULL, found, fix, otherwise="warn")


def judge_engine(name: str, shape: ModelShape, config: Config, size: int) -> Result:
    """Judges the KV cache of SGLang on GPUs of `size` bytes: a group should fit, and a completion
    must.
    """
    share = config.rollout.engine_argument("--mem-fraction-static")
    engine = engine_memory(shape, config, size, static_share=float(share or _STATIC))
    tokens = engine.kv_tokens
    completion = LONG_PROMPT + config.sampling.max_new_tokens
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
