"""`--plan MODEL`: a model's memory on GPUs of every size, as trainer and engine, and what to change
if it does not fit.

Uses the estimates of `common.models.memory`; needs neither the model's weights nor a GPU.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from common.errors import ConfigError
from common.models import hub
from common.models.cache import CacheShape
from common.models.flow import answer_flow
from common.models.memory import (
    FITS_SHARE,
    ModelShape,
    fastest_fit,
    trainer_host_bytes,
    trainer_memory,
)
from common.settings.config import Config, load
from jobgroup.doctor.memory import judge_engine, judge_passes, judge_trainer, weight_bytes
from jobgroup.doctor.report import Result, Results, gb
from jobgroup.spec import Env

SIZES = (24, 40, 48, 80, 141, 180)
"""GB of usual GPUs: 4090 and L4, A100, L40S, A100 and H100, H200, B200."""
# GPUs of a node.
_NODE = 8
_AUTO = {
    "RLHF_TRAINER__ACTIVATION_CHECKPOINTING": "auto",
    "RLHF_PARALLEL__RESHARD_AFTER_FORWARD": "auto",
}
_SHORT = {"RLHF_TRAINER__MICRO_BATCH_TOKENS": "4096"}
_TOGETHER = "RLHF_PARALLEL__CONTEXT_SIZE"
_EXPERTS = "RLHF_PARALLEL__EXPERT_SIZE"
_OFFLOAD = "RLHF_PARALLEL__OFFLOAD_OPTIMIZER"
_ROUNDED = {"RLHF_OPTIMIZER__MOMENTS": "bfloat16"}
_LORA = "RLHF_LORA__RANK"


def predict(model: str, gpus: int, env: Env, *, only_gb: float | None) -> Results:
    """Yields the prediction for `gpus` GPUs of the trainer, for every usual size or `only_gb`, with
    the settings in `env`.

    Raises ConfigError for a model that cannot be read or estimated, and for settings that are
    wrong.
    """
    config = load([], env)
    hub.check_model(model, "--plan")
    content = hub.text_config(model, ask_hub=True)
    sizes = (only_gb,) if only_gb else SIZES
    if CacheShape.of(content).linear_layers:
        yield Result("model", "ok", f"{gb(weight_bytes(model, content, config))} ({model})")
        yield Result(
            "trainer",
            "warn",
            "the memory of an update of a model with linear layers cannot be estimated",
            "watch nvidia-smi in a short run",
        )
        for size in sizes:
            yield judge_engine(
                f"engine on {size:g} GB", model, content, config, size=int(size * 1e9)
            )
        return
    shape = ModelShape.of(content)
    yield Result("model", "ok", f"{shape.parameters:,} parameters ({model})")

    held = trainer_memory(shape, config, gpus).held
    longest = config.sampling.max_new_tokens
    yield Result(
        "trainer",
        "ok",
        f"{gb(held)} on each of {gpus} GPUs between updates; answers of {longest:,} tokens",
    )
    yield from judge_passes(config)
    node = min(gpus, _NODE)
    host = gb(trainer_host_bytes(shape, config, gpus, node))
    yield Result(
        "CPU memory", "ok", f"{host} on a trainer node of {node} GPUs, while a checkpoint is copied"
    )
    yield _flow(shape, config, gpus)

    for size in sizes:
        room = int(size * 1e9)
        result = judge_trainer(f"trainer on {size:g} GB", shape, config, gpus, room=room, fix="")
        if result.state != "ok":
            result = replace(result, fix=_changes(shape, env, gpus, room=room))
        yield result
        yield judge_engine(f"engine on {size:g} GB", model, content, config, size=room)


def _flow(shape: ModelShape, config: Config, gpus: int) -> Result:
    """Predicts what a step moves between the tasks, and their host memory, if every answer is as
    long as it may be and the engines have as many GPUs as the trainer.
    """
    tokens = config.step_tokens
    replays = config.trainer.routing_replay
    flow = answer_flow(
        config,
        tokens,
        gpus,
        engines=gpus / config.rollout.tensor_parallel_size,
        experts_of_token=shape.layers * shape.experts_per_token * replays,
    )
    parts = [
        f"{task} {gb(each.received)} in, {gb(each.sent)} out, {gb(each.memory)} of host memory"
        for task, each in flow.items()
    ]
    weights = f"beside {gb(2 * shape.parameters)} of weights to every engine"
    return Result(f"a step of {tokens:,} tokens", "ok", f"{'; '.join(parts)}; {weights}")


def _savings(shape: ModelShape, env: Env, gpus: int) -> Iterator[dict[str, str]]:
    """Yields settings that save memory, from the cheapest: shorter passes, several GPUs for a row
    or for the experts, rounded moments, and what costs most.
    """
    decided = {name: value for name, value in _AUTO.items() if name in env}
    if decided:
        yield decided
    short = {**decided, **_SHORT}
    together: list[dict[str, str]] = [
        {},
        *({_TOGETHER: str(ranks)} for ranks in _divisors(gpus, shape.heads)),
    ]
    experts = [{_EXPERTS: str(ranks)} for ranks in _divisors(gpus, shape.experts)]
    offloaded = [{_OFFLOAD: "true"}] if gpus > 1 else []
    for costly in ({}, *experts, _ROUNDED, *offloaded):
        for ranks in together:
            yield {**short, **costly, **ranks}
    yield {**decided, _LORA: "16"}


def _divisors(gpus: int, count: int) -> list[int]:
    """Returns into how large groups the GPUs can be divided, of which each divides `count`."""
    return [size for size in range(2, gpus + 1) if gpus % size == 0 and count and count % size == 0]


def _changes(shape: ModelShape, env: Env, gpus: int, *, room: int) -> str:
    """Returns the cheapest settings with which the trainer fits with a tenth to spare, after
    cheaper ones that fit tightly; or how much is missing.
    """
    tight = ""
    smallest = math.inf
    for changes in _savings(shape, env, gpus):
        try:
            config = load([], {**env, **changes})
            fastest = fastest_fit(shape, config, gpus, FITS_SHARE * room)
            estimate = trainer_memory(shape, fastest, gpus)
        except ConfigError:  # the settings exclude these changes
            continue
        words = " ".join(f"--env {name}={value}" for name, value in changes.items())
        found = f"{words} ({gb(estimate.total)})"
        if estimate.total <= FITS_SHARE * room:
            return f"{tight}{found}"
        if estimate.total <= room and not tight:
            tight = f"tight: {found}; or "
        smallest = min(smallest, estimate.total)
    return (
        f"{tight}nothing fits with a tenth to spare, the smallest takes {gb(smallest)}: use more "
        "or larger GPUs, or a smaller model"
    )
