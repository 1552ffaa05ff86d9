"""Checkpoints: a Hugging Face directory with the trainer's state beside it, written atomically.

`checkpoints/step_000050/` loads with `AutoModelForCausalLM.from_pretrained`; `trainer_state.pt` in it holds optimiser,
random generators and the position in the prompt stream, and is read without unpickling code (`weights_only`).
"""

import io
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError

_STATE = "trainer_state.pt"
_FORMAT = 2


@dataclass(frozen=True)
class TrainerState:
    """What a run needs beside the weights to go on."""

    step: int
    position: int
    """Of the prompt stream."""
    run_id: str
    optimizer: list[dict[str, Any]]
    rng: torch.Tensor
    kl_coef: float
    finished: list[int] = field(default_factory=list)
    """Positions of the prompt stream after `position` that are done too."""


def save(
    directory: Path, policy: Any, tokenizer: Any, state: TrainerState, keep: int, more: Callable[[Path], None] = lambda _: None
) -> Path:
    """Writes `directory/step_000050` and removes all but the newest `keep`; returns its path.

    `more` writes what else belongs to it into the directory it is given, before that gets its name.
    """
    target = directory / f"step_{state.step:06d}"
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    policy.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    content = {name: getattr(state, name) for name in TrainerState.__dataclass_fields__}
    torch.save({"format": _FORMAT, **content}, partial / _STATE)
    more(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    for old in _all(directory)[:-keep]:
        shutil.rmtree(old)
    return target


def newest(directory: Path) -> Path | None:
    """The newest complete checkpoint in `directory`."""
    return next(reversed(_all(directory)), None)


def set_aside(directory: Path) -> None:
    """Makes room for a run that begins anew: an earlier run's checkpoints would be taken for newer ones of this run."""
    if _all(directory):
        directory.rename(directory.with_name(f"{directory.name}-until-{time.strftime('%Y%m%d-%H%M%S')}"))


def read_state(path: Path) -> bytes:
    """The trainer's state in a checkpoint, as bytes that can be sent to other ranks."""
    return (path / _STATE).read_bytes()


def load_state(body: bytes, path: Path) -> TrainerState:
    """Raises ConfigError naming `path` when the state is damaged or of another format."""
    try:
        content = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
        if content.pop("format") != _FORMAT:
            raise ValueError("another format")
        return TrainerState(**content)
    except Exception as error:  # torch.load raises whatever the damage leads to
        raise ConfigError(
            f"the checkpoint cannot be resumed from: {type(error).__name__} {error}".splitlines()[0],
            field="trainer.run_dir",
            value=str(path),
            remedy="remove that directory to go on from the one before, or start with --trainer.resume false",
        ) from None


def _all(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if re.fullmatch(r"step_\d{6,}", path.name) and path.is_dir())
