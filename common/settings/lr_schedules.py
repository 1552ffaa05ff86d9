"""The schedules of the learning rate, by their names in `transformers`, with their arguments."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from common.errors import did_you_mean

LrSchedule = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
# The arguments of every schedule that are numbers.
_NUMBERS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_decay_steps", "num_stable_steps", "min_lr_ratio", "num_cycles"),
}
Conflict = tuple[object, str, str]
"""Whether something is wrong with settings, what, and the remedy."""
_SHAPES = ("linear", "cosine", "1-sqrt")


def wrong_arguments(
    schedule: str, arguments: Mapping[str, Any], learning_rate: float
) -> Iterator[Conflict]:
    """Yields what may be wrong with the arguments of a schedule; `{name}` in a reason stands for a
    setting (`common.settings.checks`).
    """
    shapes = ("warmup_type", "decay_type") if schedule == "warmup_stable_decay" else ()
    known = (*_NUMBERS[schedule], *shapes)
    for name, value in arguments.items():
        if name not in known:
            remedy = did_you_mean(name, known) or "leave it out"
            yield (
                True,
                f"{{optimizer.lr_schedule_args!}} has {name}, which {schedule} does not read",
                remedy,
            )
        elif name in shapes:
            yield (
                value not in _SHAPES,
                f"{{optimizer.lr_schedule_args!}} has the {name} {value}",
                f"use one of {', '.join(_SHAPES)}",
            )
        elif isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            yield (
                True,
                f"{{optimizer.lr_schedule_args!}} has the {name} {value}",
                "give a number of at least 0",
            )

    yield (
        "min_lr" in known and len({"min_lr", "min_lr_rate"} & arguments.keys()) != 1,
        "{optimizer.lr_schedule} needs one lowest rate",
        "give min_lr or min_lr_rate in {optimizer.lr_schedule_args!}",
    )
    yield (
        schedule == "warmup_stable_decay" and "num_decay_steps" not in arguments,
        "{optimizer.lr_schedule} needs the steps of its decay",
        "give num_decay_steps in {optimizer.lr_schedule_args!}",
    )
    lowest = arguments.get("lr_end", 1e-7 if schedule == "polynomial" else 0.0)
    yield (
        lowest >= learning_rate,
        f"{{optimizer.lr_schedule_args!}} has the lr_end {lowest:g}, which is not below "
        f"{{optimizer.learning_rate!}} {learning_rate:g}",
        "lower it",
    )
