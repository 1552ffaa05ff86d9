"""`--plan MODEL`: a model's memory on GPUs of every size, as trainer and engine, and what to change
if it does not fit.

Uses the estimates of `common.models.memory`; needs neither the model's weights nor a GPU.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from common.models import hub
from common.models.memory import ModelShape, trainer_host_bytes, trainer_memory
from common.settings.config import load
from jobgroup.doctor.memory import judge_engine, parts
from jobgroup.doctor.report import Result, fits, gb

SIZES = (24, 40, 48, 80, 141, 180)
"""GB of usual GPUs: 4090 and L4, A100, L40S, A100 and H100, H200, B200."""
_NODE = 8
"""GPUs of a node."""
_CHECKPOINTING = {"RLHF_TRAINER__ACTIVATION_CHECKPOINTING": "true"}
_SHORT = {**_CHECKPOINTING, "RLHF_TRAINER__MICRO_BATCH_TOKENS": "4096"}
_TOGETHER = "RLHF_TRAINER__CONTEXT_PARALLEL_SIZE"


def predict(
    model: str, gpus: int, env: Mapping[str, str], *, only_gb: float | None
) -> Iterator[Result]:
    """Yields the prediction for `gpus` GPUs of the trainer, for every usual size or `only_gb`, with
    the settings in `env`.

    Raises ConfigError for a model that cannot be read or estimated, and for settings that are
    wrong.
    """
    config = load([], env)
    hub.check_model(model, "--plan")
    shape = ModelShape.of(hub.text_config(model, ask_hub=True))
    yield Result("model", "ok", f"{shape.parameters:,} parameters ({model})")

    estimate = trainer_memory(shape, config, gpus)
    found = (
        f"{gb(estimate.total)} on each of {gpus} GPUs in an update, {gb(estimate.held)} between "
        f"updates: {parts(estimate)}"
    )
    yield Result("trainer", "ok", found)
    node = min(gpus, _NODE)
    host = gb(trainer_host_bytes(shape, config, gpus, node))
    found = f"{host} on a trainer node of {node} GPUs, while a checkpoint is copied"
    yield Result("CPU memory", "ok", found)

    for size in (only_gb,) if only_gb else SIZES:
        room = int(size * 1e9)
        title = f"trainer on {size:g} GB"
        total = estimate.total
        result = fits(title, gb(total), needed=total, available=room, fix="")
        if result.state != "ok":
            result = replace(result, fix=_changes(shape, env, gpus, room=room))
        yield result
        yield judge_engine(f"engine on {size:g} GB", shape, config, room)


def _savings(shape: ModelShape, gpus: int) -> Iterator[Mapping[str, str]]:
    """Yields settings that save memory, from the cheapest."""
    yield _CHECKPOINTING
    yield _SHORT
    for ranks in range(2, gpus + 1):
        if gpus % ranks == 0 and shape.heads % ranks == 0:
            yield {**_SHORT, _TOGETHER: str(ranks)}
    yield {**_SHORT, "RLHF_TRAINER__OFFLOAD_OPTIMIZER": "true"}
    yield {**_CHECKPOINTING, "RLHF_LORA__RANK": "16"}


def _changes(shape: ModelShape, env: Mapping[str, str], gpus: int, *, room: int) -> str:
    """Returns the settings with which the trainer fits."""
    for changes in _savings(shape, gpus):
        needed = trainer_memory(shape, load([], {**env, **changes}), gpus).total
        if needed <= room:
            options = " ".join(f"--env {name}={value}" for name, value in changes.items())
            return f"{options} ({gb(needed)})"
    return "more GPUs, larger GPUs, or a smaller model"
