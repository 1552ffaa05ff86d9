"""`--plan MODEL`: a model's memory on GPUs of every size, as trainer and engine, and what to change
if it does not fit.

Uses the estimates of `common.models.memory`; needs neither the model's weights nor a GPU.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from common.errors import ConfigError
from common.models import hub
from common.models.memory import (
    FITS_SHARE,
    ModelShape,
    TrainerMemory,
    fastest_fit,
    form,
    trainer_host_bytes,
    trainer_memory,
)
from common.settings.config import load
from jobgroup.doctor.memory import judge_engine, parts
from jobgroup.doctor.report import Result, fits, gb

SIZES = (24, 40, 48, 80, 141, 180)
"""GB of usual GPUs: 4090 and L4, A100, L40S, A100 and H100, H200, B200."""
_NODE = 8
"""GPUs of a node."""
_AUTO = {
    "RLHF_TRAINER__ACTIVATION_CHECKPOINTING": "auto",
    "RLHF_PARALLEL__RESHARD_AFTER_FORWARD": "auto",
}
_SHORT = {"RLHF_TRAINER__MICRO_BATCH_TOKENS": "4096"}
_TOGETHER = "RLHF_PARALLEL__CONTEXT_SIZE"
_EXPERTS = "RLHF_PARALLEL__EXPERT_SIZE"
_OFFLOAD = "RLHF_PARALLEL__OFFLOAD_OPTIMIZER"
_LORA = "RLHF_LORA__RANK"
_MOST_TIMES = 16
"""Up to this many times the GPUs are looked for when none of the settings suffices."""


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

    held = trainer_memory(shape, config, gpus).held
    longest = config.sampling.max_new_tokens
    found = f"{gb(held)} on each of {gpus} GPUs between updates; answers of {longest:,} tokens"
    yield Result("trainer", "ok", found)
    node = min(gpus, _NODE)
    host = gb(trainer_host_bytes(shape, config, gpus, node))
    found = f"{host} on a trainer node of {node} GPUs, while a checkpoint is copied"
    yield Result("CPU memory", "ok", found)

    for size in (only_gb,) if only_gb else SIZES:
        room = int(size * 1e9)
        decided = fastest_fit(shape, config, gpus, FITS_SHARE * room)
        estimate = trainer_memory(shape, decided, gpus)
        result = fits(
            f"trainer on {size:g} GB",
            f"{gb(estimate.total)} with {form(decided)}: {parts(estimate)}",
            needed=estimate.total,
            available=room,
            fix="",
        )
        if result.state != "ok":
            result = replace(result, fix=_changes(shape, env, gpus, room=room))
        yield result
        yield judge_engine(f"engine on {size:g} GB", shape, config, room)


def _savings(shape: ModelShape, env: Mapping[str, str], gpus: int) -> Iterator[dict[str, str]]:
    """Yields settings that save memory, from the cheapest: shorter passes, several GPUs for a row
    or for the experts, and what costs most.
    """
    decided = {name: value for name, value in _AUTO.items() if name in env}
    if decided:
        yield decided
    short = {**decided, **_SHORT}
    yield short
    for ranks in _divisors(gpus, shape.heads):
        yield {**short, _TOGETHER: str(ranks)}
    for experts in _divisors(gpus, shape.experts):
        yield {**short, _EXPERTS: str(experts)}
        for ranks in _divisors(gpus, shape.heads):
            yield {**short, _EXPERTS: str(experts), _TOGETHER: str(ranks)}
    if gpus > 1:
        yield {**short, _OFFLOAD: "true"}
        for ranks in _divisors(gpus, shape.heads):
            yield {**short, _TOGETHER: str(ranks), _OFFLOAD: "true"}
    yield {**decided, _LORA: "16"}


def _divisors(gpus: int, count: int) -> list[int]:
    """Returns into how large groups the GPUs can be divided, of which each divides `count`."""
    return [size for size in range(2, gpus + 1) if gpus % size == 0 and count and count % size == 0]


def _estimate(
    shape: ModelShape, env: Mapping[str, str], gpus: int, changes: Mapping[str, str], *, room: float
) -> TrainerMemory | None:
    """Returns the memory of an update with these changes; None if the settings exclude them."""
    try:
        config = load([], {**env, **changes})
        return trainer_memory(shape, fastest_fit(shape, config, gpus, FITS_SHARE * room), gpus)
    except ConfigError:
        return None


def _of_host(
    shape: ModelShape, env: Mapping[str, str], gpus: int, changes: Mapping[str, str]
) -> str:
    """Returns what offloading needs in CPU memory; empty without it."""
    if _OFFLOAD not in changes:
        return ""
    needed = trainer_host_bytes(shape, load([], {**env, **changes}), gpus, min(gpus, _NODE))
    return f", and {gb(needed)} of CPU memory on a node"


def _changes(shape: ModelShape, env: Mapping[str, str], gpus: int, *, room: int) -> str:
    """Returns the settings with which the trainer fits with a tenth to spare, after cheaper ones
    that fit tightly; or how much is missing and how many GPUs would do.
    """
    found: list[tuple[int, str, Mapping[str, str]]] = []
    tight = ""
    for changes in _savings(shape, env, gpus):
        estimate = _estimate(shape, env, gpus, changes, room=room)
        if estimate is None:
            continue
        if estimate.total <= FITS_SHARE * room:
            host = _of_host(shape, env, gpus, changes)
            return f"{tight}{_words(changes)} ({gb(estimate.total)}{host})"
        if estimate.total <= room and not tight:
            tight = f"tight: {_words(changes)} ({gb(estimate.total)}); or "
        found.append((estimate.total, f"{gb(estimate.held)} between updates", changes))
    total, held, smallest = min(found, key=lambda each: each[0])
    missing = (
        f"{tight}nothing fits with a tenth to spare: the smallest is {gb(total)}, {held}, "
        f"with {_words(smallest)}"
    )
    enough = _enough(shape, env, gpus, room=room)
    more = f"{enough} such GPUs fit" if enough else "use a smaller model"
    return f"{missing}; {more}, or larger GPUs"


def _words(changes: Mapping[str, str]) -> str:
    return " ".join(f"--env {name}={value}" for name, value in changes.items())


def _enough(shape: ModelShape, env: Mapping[str, str], gpus: int, *, room: int) -> str:
    """Returns how many GPUs fit without offloading or an adapter, and with what settings; empty
    when even many more do not.
    """
    step = _NODE if gpus >= _NODE else gpus
    for more in range(gpus + step, _MOST_TIMES * gpus + 1, step):
        for changes in _savings(shape, env, more):
            if _OFFLOAD in changes or _LORA in changes:
                continue
            estimate = _estimate(shape, env, more, changes, room=room)
            if estimate is not None and estimate.total <= FITS_SHARE * room:
                return f"{more} ({_words(changes)}: {gb(estimate.total)})"
    return ""
