"""`--plan MODEL`: a model's memory on GPUs of every size, as trainer and engine, and what to change
if it does not fit.

Uses the estimates of `common.models.memory`; needs neither the model's weights nor a GPU.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.models.memory import ModelShape, trainer_host_bytes, trainer_memory
from common.settings.config import Config, load
from jobgroup.doctor.memory import judge_engine, parts, words
from jobgroup.doctor.report import Result, fits, gb

SIZES = (24, 40, 48, 80, 141, 180)
"""GB of usual GPUs: 4090 and L4, A100, L40S, A100 and H100, H200, B200."""
_HELD = ("weights", "gradients", "optimizer", "reference", "critic")
"""Parts of `TrainerMemory` that stay from one update to the next."""
_NODE = 8
"""GPUs of a node."""
_SAVINGS: tuple[dict[str, Any], ...] = (
    {"trainer.activation_checkpointing": True},
    {"trainer.activation_checkpointing": True, "trainer.micro_batch_tokens": 4096},
    {
        "trainer.activation_checkpointing": True,
        "trainer.micro_batch_tokens": 4096,
        "trainer.offload_optimizer": True,
    },
)
"""From the cheapest; the first that suffices is reported."""
_LORA = {"lora.rank": 16, "trainer.activation_checkpointing": True}


def predict(
    model: Path, gpus: int, env: Mapping[str, str], *, only_gb: float | None
) -> Iterator[Result]:
    """Yields the prediction for `gpus` GPUs of the trainer, for every usual size or `only_gb`, with
    the settings in `env`.

    Raises ConfigError for a model that cannot be read or estimated, and for settings that are
    wrong.
    """
    config = load([], env)
    shape = ModelShape.of(_read(model))
    yield Result("model", "ok", f"{shape.parameters:,} parameters ({model})")

    estimate = trainer_memory(shape, config, gpus)
    sizes = parts(estimate)
    kept = {name: sizes.pop(name) for name in _HELD if name in sizes}
    found = f"{gb(estimate.held)} on each of {gpus} GPUs between updates"
    yield Result("held", "ok", f"{found}: {words(kept) or 'nothing'}")

    tokens = config.trainer.micro_batch_tokens
    found = f"{gb(estimate.total)} in an update, in micro-batches of {tokens:,} tokens"
    yield Result("peak", "ok", f"{found}: beside that, {words(sizes)}")

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
            result = replace(result, fix=_changes(shape, config, gpus, room))
        yield result
        yield judge_engine(f"engine on {size:g} GB", shape, config, room)


def _changes(shape: ModelShape, config: Config, gpus: int, room: int) -> str:
    """Returns the settings, and the number of GPUs, with which the trainer fits."""

    def needed(changes: Mapping[str, Any], ranks: int) -> int:
        return trainer_memory(shape, _changed(config, changes), ranks).total

    ways: list[tuple[Mapping[str, Any], int]] = []
    ways += [(changes, gpus) for changes in _SAVINGS if needed(changes, gpus) <= room][:1]
    if needed(_LORA, gpus) <= room:
        ways.append((_LORA, gpus))
    counts = [gpus << doubled for doubled in range(1, 10)]
    with_more_gpus = [*itertools.product(({}, _SAVINGS[0]), counts)]
    enough = [
        (changes, count) for changes, count in with_more_gpus if needed(changes, count) <= room
    ]
    ways += enough[:1]

    found = []
    for changes, count in ways:
        more = [f"--gpus {count}"] if count != gpus else []
        options = " ".join([*more, *_options(changes)])
        found.append(f"{options} ({gb(needed(changes, count))})")
    return "; or ".join(found) or "a larger GPU, or a smaller model"


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns the configuration with other settings; token counts are never raised."""
    for name, value in changes.items():
        section, _, key = name.partition(".")
        old = getattr(config, section)
        value = min(value, old.micro_batch_tokens) if key == "micro_batch_tokens" else value
        config = config.model_copy(update={section: old.model_copy(update={key: value})})
    return config


def _options(changes: Mapping[str, Any]) -> Iterator[str]:
    for name, value in changes.items():
        variable = f"RLHF_{name.replace('.', '__').upper()}"
        yield f"--env {variable}={str(value).lower()}"


def _read(model: Path) -> dict[str, Any]:
    try:
        found = json.loads((model / "config.json" if model.is_dir() else model).read_text())
        if not isinstance(found, dict):
            raise ValueError("its configuration is not a JSON object")
    except (OSError, ValueError) as error:
        remedy = "name a directory with a model's config.json, or that file"
        raise ConfigError(
            f"this is not a model: {error}", field="--plan", value=str(model), remedy=remedy
        ) from None
    return found
