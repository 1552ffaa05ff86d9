"""Fingerprints of the prompts that a model was trained on, in a file beside its weights: an
evaluation says which of its problems were trained on, and whether it prompts the model otherwise.

A prompt takes 8 bytes, for a hash of its text and its ground truth, and at most 64 more for the
smallest 8 hashes of its sequences of 13 words. A problem that shares half of its sequences with a
prompt has one of these 8 with a probability of 1 − 1/2⁸.
"""

import io
import json
import re
import shutil
import unicodedata
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from common.errors import ConfigError, shorten
from common.prompts.prompter import PromptStyle
from common.wire.schemas import Prompt

TRAINED_PROMPTS = "trained_prompts.npz"
_WORDS = 13
"""Words of a sequence, as in the overlap test of GPT-3 (Brown et al. 2020, arXiv:2005.14165)."""
_KEPT = 8
"""Sequences of a prompt that are kept."""
_WORD = re.compile(r"\w+")
Hashes = NDArray[np.uint64]


class TrainedPrompts:
    """What a model was trained on so far: sorted hashes of prompts, and of sequences of words."""

    def __init__(
        self, prompts: Hashes, sequences: Hashes, style: Mapping[str, Any] | None = None
    ) -> None:
        self.style = style
        """The settings that made the prompts (`style_of`); None if they are not known."""
        self._prompts = prompts
        self._sequences = sequences
        self._new_prompts: list[int] = []
        self._new_sequences: list[int] = []

    @classmethod
    def none(cls) -> Self:
        """Returns the fingerprints of a model that was not trained: none."""
        return cls(np.zeros(0, np.uint64), np.zeros(0, np.uint64))

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
                return cls(content["prompts"], content["sequences"], style)
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
            self._new_sequences += sorted(_sequences(text))[:_KEPT]

    def contain(self, prompts: Sequence[Prompt]) -> list[bool]:
        """Returns for every prompt whether it was trained on: with this ground truth, or without
        one, as the examples of supervised fine-tuning are.
        """
        self._merge()
        with_truth = np.isin(_hashes(prompts), self._prompts)
        without = np.isin([_hash_of(prompt.prompt, "") for prompt in prompts], self._prompts)
        found: list[bool] = (with_truth | without).tolist()
        return found

    def resemble(self, prompts: Sequence[Prompt]) -> list[bool]:
        """Returns for every prompt whether it has a kept sequence of 13 words."""
        self._merge()
        shared = []
        for prompt in prompts:
            hashes = np.array(list(_sequences(prompt.prompt)), np.uint64)
            shared.append(bool(np.isin(hashes, self._sequences).any()))
        return shared

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
        np.savez(stream, prompts=self._prompts, sequences=self._sequences, style=style)
        return stream.getvalue()

    def _merge(self) -> None:
        self._prompts = np.union1d(self._prompts, np.array(self._new_prompts, np.uint64))
        self._sequences = np.union1d(self._sequences, np.array(self._new_sequences, np.uint64))
        self._new_prompts = []
        self._new_sequences = []


def style_of(style: PromptStyle) -> dict[str, Any]:
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


def _hashes(prompts: Sequence[Prompt]) -> Hashes:
    return np.array([_hash_of(each.prompt, each.ground_truth) for each in prompts], np.uint64)


def _hash_of(text: str, ground_truth: str) -> int:
    """Returns the hash of a problem; case, white space and forms of characters do not count."""
    return xxhash.xxh3_64_intdigest(f"{_normalised(text)}\0{_normalised(ground_truth)}".encode())


def _sequences(text: str) -> set[int]:
    """Returns the hashes of all sequences of words, without punctuation."""
    words = _WORD.findall(_normalised(text))
    starts = range(len(words) - _WORDS + 1)
    return {xxhash.xxh3_64_intdigest(" ".join(words[i : i + _WORDS]).encode()) for i in starts}


def _normalised(text: str) -> str:
    # A lone surrogate, which a row may have, cannot be encoded.
    plain = text.encode("utf-8", "replace").decode()
    return " ".join(unicodedata.normalize("NFKC", plain).casefold().split())
