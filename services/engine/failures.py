"""Errors of a model's code, as the user reads them: what was raised, where, and what helps."""

import traceback
from pathlib import Path

import torch

SGLANG = (
    "use SGLang (rollout.engine sglang; in Python the argument engine='sglang') or another model"
)
"""The remedy for a model that this engine does not run."""
_LONGEST = 600
_SHOWN_FOLDERS = 3


def described(error: BaseException) -> str:
    """Returns the type, the message and the place of an error in one line."""
    message = " ".join(str(error).split())[:_LONGEST]
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return f"{type(error).__name__}: {message}"
    last = frames[-1]
    file = Path(*Path(last.filename).parts[-_SHOWN_FOLDERS - 1 :])
    return f"{type(error).__name__}: {message} (in {last.name}, {file}:{last.lineno})"


def remedy(error: BaseException) -> str:
    """Returns what helps against an error of the model's code."""
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "lower rollout.max_running_requests or rollout.max_context_tokens, "
            "or use a smaller model or a device with more memory"
        )
    return SGLANG
