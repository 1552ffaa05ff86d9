"""Whether the model fits the GPUs of the tasks, and the CPU memory beside them, by the estimates of
`common.models.memory`.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from common.errors import ConfigError
from common.models import hub
from common.models.cache import CacheShape, engine_memory
from common.models.memory import (
    FITS_SHARE,
    LONG_PROMPT,
    ModelShape,
    TrainerMemory,
    answers_of_pass,
    fastest_fit,
    form,
    full_pass,
    number_bytes,
    trainer_host_bytes,
    trainer_memory,
)
from common.process.topology import ROLLOUT, TRAINER
from common.settings.config import Config
from jobgroup.doctor.machine import available_memory
from jobgroup.doctor.plan import Plan, PlannedTask
from jobgroup.doctor.report import Result, Results, expect, failed, fits, gb

TITLE = "memory for the model"
# Approximate share of a GPU that SGLang takes for weights and KV cache; `--mem-fraction-static`
# sets it.
_STATIC = 0.85
# Share of a pass that the longest answers should fill.
_FULL = 0.7
_SMALLER = (
    "lower trainer.micro_batch_tokens, set trainer.activation_checkpointing, "
    "parallel.offload_optimizer or lora.rank, use more GPUs, or use a smaller model"
)


def check_fit(plan: Plan) -> Results:
    """Estimates the memory of trainer and engines."""
    jobs = [job for job in plan.here if job.name in (TRAINER, ROLLOUT)]
    if not jobs:
        return
    name = jobs[0].config.model.name
    if name not in plan.shapes:
        # Otherwise the line of the model says why its config.json cannot be read.
        if plan.makes_model(jobs[0]):
            yield Result(
                TITLE, "ok", "not estimated: the built-in model is made later, and is small"
            )
        return
    try:
        shape = ModelShape.of(plan.shapes[name])
        yield Result("model", "ok", f"{shape.parameters:,} parameters ({name})")
    except ConfigError as error:
        shape = None
        yield Result(
            TITLE,
            "warn",
            f"{error.message}: {error.value}",
            "watch nvidia-smi in a first run with --env MAX_STEPS=3",
        )
    if plan.gpus:
        for job in jobs:
            yield from _on_gpus(job, shape, plan)
    elif shape is not None:
        yield Result(
            TITLE,
            "ok",
            "not judged: there is no GPU here, and --plan judges a model for a cluster's",
        )


def _on_gpus(job: PlannedTask, shape: ModelShape | None, plan: Plan) -> Results:
    try:
        if job.name == ROLLOUT:
            yield from _engine_on_gpu(job, plan)
        elif shape is not None:
            yield from _trainer_on_gpu(job, shape, plan)
    except ConfigError as error:
        yield failed(f"memory of {job.name}", error)


def parts(estimate: TrainerMemory) -> str:
    """Lists the parts of an estimate that are not empty."""
    return ", ".join(f"{name} {gb(size)}" for name, size in vars(estimate).items() if size)


def _trainer_on_gpu(job: PlannedTask, shape: ModelShape, plan: Plan) -> Results:
    size = min(gpu.total for gpu in plan.gpus)
    ranks = job.num_nodes * max(1, min(job.gpus, len(plan.gpus)))
    title = f"memory of {job.name}"
    yield from judge_passes(job.config)
    yield judge_trainer(title, shape, job.config, ranks, room=size, fix=_SMALLER)

    if not plan.inside:
        needed = trainer_host_bytes(shape, job.config, ranks, min(ranks, len(plan.gpus)))
        left, bound = available_memory()
        yield fits(
            f"CPU {title}",
            f"{gb(needed)} of {gb(left)} {bound}, while a checkpoint is copied",
            needed=needed,
            available=left,
            fix="less offloading, LoRA, or a machine with more",
        )


def _engine_on_gpu(job: PlannedTask, plan: Plan) -> Results:
    name = job.config.model.name
    if job.config.rollout.device == "cpu":
        return
    folder = job.path(name)
    place = str(folder) if folder.exists() else name
    yield judge_engine(
        "memory of an engine",
        place,
        plan.shapes[name],
        job.config,
        size=min(gpu.total for gpu in plan.gpus),
    )


def judge_trainer(
    name: str, shape: ModelShape, config: Config, ranks: int, *, room: int, fix: str
) -> Result:
    """Judges an update on `ranks` GPUs of `room` bytes."""
    decided = fastest_fit(shape, config, ranks, FITS_SHARE * room)
    estimate = trainer_memory(shape, decided, ranks)
    return fits(
        name,
        f"{gb(estimate.total)} of {gb(room)} on each of {ranks} GPUs with {form(decided)}: "
        f"{parts(estimate)}",
        needed=estimate.total,
        available=room,
        fix=fix,
    )


def judge_passes(config: Config) -> Results:
    """Judges how full passes of the longest answers are, where `trainer.micro_batch_tokens` is
    set; `auto` makes them full.
    """
    room = config.trainer.micro_batch_tokens
    if room == "auto":
        return
    answers = answers_of_pass(config)
    fill = min(1.0, full_pass(config, answers) / room)
    yield expect(
        "passes of the longest answers",
        fill >= _FULL,
        f"{room:,} tokens, {fill:.0%} of which {answers} answers of "
        f"{config.sampling.max_new_tokens:,} and their prompt take",
        f"trainer.micro_batch_tokens auto, {full_pass(config, answers)}, or "
        f"{full_pass(config, answers + 1)}",
        otherwise="warn",
    )


def judge_engine(
    title: str, model: str, content: Mapping[str, Any], config: Config, *, size: int
) -> Result:
    """Judges what an engine keeps of sequences on GPUs of `size` bytes: a group should fit, and a
    completion must. `content` is the `config.json` of `model`.
    """
    share = config.rollout.engine_argument("--mem-fraction-static")
    cache = CacheShape.of(content)
    engine = engine_memory(
        cache,
        weight_bytes(model, content, config),
        config,
        gpu_bytes=size,
        static_share=float(share or _STATIC),
    )
    tokens = engine.kv_tokens
    completion = LONG_PROMPT + config.sampling.max_new_tokens
    fitting = engine.completions(completion)
    states = ""
    if cache.linear_layers:
        states = f", states of {gb(engine.state_bytes)} for each of {engine.sequences:,} at once"
    found = (
        f"weights {gb(engine.weights)} on each of {config.rollout.tensor_parallel_size} GPUs, "
        f"{gb(tokens * engine.kv_bytes_per_token)} left for the KV cache: "
        f"{tokens:,} tokens{states}, {fitting:,} completions of {completion:,}"
    )
    fix = (
        "raise rollout.tensor_parallel_size and the GPUs of a node with it "
        "(rollout.nodes_per_engine for several nodes), "
        "or --mem-fraction-static in rollout.engine_args; "
        "lower sampling.max_new_tokens, or use a smaller model"
    )
    group_fits = fitting >= config.sampling.group_size
    return expect(title, group_fits, found, fix, otherwise="warn" if fitting else "fail")


def weight_bytes(model: str, content: Mapping[str, Any], config: Config) -> int:
    """Returns the bytes of a model's weights in an engine: counted, or where the architecture is
    not known, those of its files, which are mostly in bfloat16. Raises ConfigError without either.
    """
    with suppress(ConfigError):
        return number_bytes(config) * ModelShape.of(content).parameters
    found = hub.stored_bytes(model)
    if not found:
        raise ConfigError(
            "the size of this architecture is known only from its weight files, and there are none",
            field="model.name",
            value=model,
            remedy="name a directory with *.safetensors, or a model that the hub has",
        )
    of_file = content.get("dtype") or content.get("torch_dtype")
    return found * number_bytes(config) // (4 if of_file == "float32" else 2)
