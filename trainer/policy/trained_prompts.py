"""Fingerprints of the prompts that a model was trained on, in a file beside its weights. With them
an evaluation says which of its problems were trained on, and whether it words its prompts
differently.

A prompt takes 8 bytes, for a hash of its text and its ground truth.
"""

import io
import json
import shutil
import unicodedata
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from common import Json
from common.errors import ConfigError, shorten
from common.prompts.prompter import PromptStyle
from common.wire.schemas import Prompt

TRAINED_PROMPTS = "trained_prompts.npz"
Hashes = NDArray[np.uint64]


class TrainedPrompts:
    """What a model was trained on so far: sorted hashes of prompts."""

    def __init__(self, prompts: Hashes, style: Mapping[str, Any] | None = None) -> None:
        self.style = style
        """The settings that made the prompts (`style_of`); None if they are not known."""
        self._prompts = prompts
        self._new_prompts: list[int] = []

    @classmethod
    def none(cls) -> Self:
        """Returns the fingerprints of a model that was not trained: none."""
        return cls(np.zeros(0, np.uint64))

    @classmethod
    def of(cls, model: str | Path) -> Self:
        """Returns the fingerprints in a model's directory; none for a model without such a file.
        Raises ConfigError for a damaged file.
        """
        path = Path(model) / TRAINED_PROMPTS
        if not path.is_file():
            return cls.none()
        try:
            with np.load(io.BytesIO(path.read_bytes())) as content:
                style = json.loads(str(content["style"])) if "style" in content else None
                return cls(content["prompts"], style)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"the fingerprints of the training prompts cannot be read: {error}",
                field="model.name",
                value=str(path),
                remedy="restore that file; without it, evaluations cannot say what was trained on",
            ) from None

    def add(self, prompts: Iterable[tuple[str, str]]) -> None:
        """Adds prompts, each with its ground truth, that the model is trained on."""
        for text, ground_truth in prompts:
            self._new_prompts.append(_hash_of(text, ground_truth))

    def contain(self, prompts: Sequence[Prompt]) -> list[bool]:
        """Returns for every prompt whether it was trained on: with this ground truth, or without
        one, as the examples of supervised fine-tuning are.
        """
        self._merge()
        hashes = [_hash_of(prompt.prompt, prompt.ground_truth) for prompt in prompts]
        with_truth = np.isin(np.array(hashes, np.uint64), self._prompts)
        without = np.isin([_hash_of(prompt.prompt, "") for prompt in prompts], self._prompts)
        found: list[bool] = (with_truth | without).tolist()
        return found

    def other_style(self, style: PromptStyle) -> str:
        """Returns how the prompts of `style` differ from those of the training; empty if they do
        not, or if that is not known.
        """
        if self.style is None:
            return ""
        now = style_of(style)
        changes: list[str] = []
        for name, value in self.style.items():
            if now.get(name) != value:
                old = shorten(repr(value))
                changes.append(f"{name} was {old} and is {shorten(repr(now.get(name)))}")
        return "; ".join(changes)

    def file(self) -> bytes:
        """Returns the content of the file."""
        self._merge()
        stream = io.BytesIO()
        style = np.array(json.dumps(self.style))
        np.savez(stream, prompts=self._prompts, style=style)
        return stream.getvalue()

    def _merge(self) -> None:
        self._prompts = np.union1d(self._prompts, np.array(self._new_prompts, np.uint64))
        self._new_prompts = []


def style_of(style: PromptStyle) -> Json:
    """Returns the settings that make prompts, by their names."""
    return {
        "data.prompt_template": style.template,
        "sampling.system_prompt": style.system_prompt,
        "sampling.chat_template_kwargs": dict(style.chat_template_kwargs),
        "sampling.prefill": style.prefill,
    }


def copy_trained_prompts(source: str | Path, target: Path) -> None:
    """Copies the file from a model's directory, if there is one, to a model made from it."""
    path = Path(source) / TRAINED_PROMPTS
    if path.is_file():
        shutil.copyfile(path, target / TRAINED_PROMPTS)


def _hash_of(text: str, ground_truth: str) -> int:
    """Returns the hash of a problem; case, white space and forms of characters do not count."""
    return xxhash.xxh3_64_intdigest(f"{_normalised(text)}\0{_normalised(ground_truth)}".encode())


def _normalised(text: str) -> str:
    # A lone surrogate, which a row may have, cannot be encoded.
    plain = text.encode("utf-8", "replace").decode()
    return " ".join(unicodedata.normalize("NFKC", plain).casefold().split())
