"""What all loaders share: where rows come from, parts of a single file, and which problems of a split are wanted."""

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.schemas import Prompt
from services.data.files import file_of_split, read_file
from services.data.hub import hub_rows, is_hub_name
from services.data.rows import Row, stop

HELD_OUT = 0.1
"""Share of a single file that is held out for evaluation."""
WHOLE = "all"
"""The split that is all of a single file."""
_PARTS = {"train": "train", "test": "eval", "eval": "eval", WHOLE: WHOLE}
"""Splits of a single file, and how the ids of their problems call them."""


class Loader(ABC):
    """A data set.

    Args:
        source: a file, a directory with a file per split, or `org/name` on the hub where no such path exists.
        hub_config: configuration of a data set on the hub that has several; empty for the default one.
        name: what ids without a column of their own begin with, before the split; empty to name them after the source.
        task: which reward functions grade the answers; empty for the default ones.
    """

    def __init__(self, source: str | Path, hub_config: str = "", name: str = "", task: str = "") -> None:
        self.source, self.hub_config, self.name, self.task = str(source), hub_config, name, task

    def load(self, split: str, num_samples: int | None = None, seed: int = 0, shuffle: bool = False) -> list[Prompt]:
        """The prompts of a split, in the order of the data set.

        Args:
            split: as the data set names it. A single file has `train` and `test`, a tenth of the problems held out by a hash
                of their texts, and `all`.
            num_samples: only the first so many; all of them when None.
            seed: of the order when `shuffle` is on.
            shuffle: in an order that depends on `seed`; before `num_samples` are taken.

        Raises ConfigError, naming the file, row and column where there is one, when anything does not load, or when there
        are fewer than `num_samples`. There is no substitute data.
        """
        prompts = self._load(split)
        if not prompts:
            stop(
                f"the split {split!r} has no problems",
                self.source,
                "add rows (a single file needs at least two different problems), or leave fewer of them out",
            )
        self._refuse_same_ids(prompts)
        if num_samples is not None and not 0 < num_samples <= len(prompts):
            raise ConfigError(
                f"the split {split!r} has only {len(prompts)} problems",
                field="data.num_samples",
                value=num_samples,
                remedy="ask for at least one and not for more than there are, or leave it unset for all of them",
            )
        if shuffle:
            random.Random(seed).shuffle(prompts)
        return prompts[:num_samples]

    @abstractmethod
    def _load(self, split: str) -> list[Prompt]:
        """All problems of a split."""

    def _refuse_same_ids(self, prompts: list[Prompt]) -> None:
        seen: set[str] = set()
        for prompt in prompts:
            if prompt.id in seen:
                remedy = "make the ids unique, or leave the column id out"
                stop(f"two problems have the id {prompt.id!r}", self.source, remedy)
            seen.add(prompt.id)


class RowLoader(Loader):
    """A data set of rows with columns, in files or on the hub."""

    @abstractmethod
    def _prompt(self, row: dict[str, Any], where: str, default_id: str) -> Prompt | None:
        """The problem of a row, or None to leave the row out."""

    def _load(self, split: str) -> list[Prompt]:
        path = Path(self.source)
        if path.is_dir():
            return self._prompts(read_file(file_of_split(path, split)), f"{self.name or path.resolve().name}-{split}")
        if path.exists():
            if split not in _PARTS:
                stop(f"a single file has no split {split!r}", path, f"its splits are {', '.join(_PARTS)}")
            part = _PARTS[split]
            return _part(self._prompts(read_file(path), f"{self.name or path.stem}-{part}"), part)
        if not is_hub_name(self.source):
            stop(
                "there is no such file or directory",
                self.source,
                "gsm8k, math, tiny, the path of a file or a directory, or the name org/name of a data set on the hub",
            )
        prefix = f"{self.name or self.source.partition('/')[2]}-{split}"
        return self._prompts(hub_rows(self.source, self.hub_config, split), prefix)

    def _prompts(self, rows: Iterable[Row], prefix: str) -> list[Prompt]:
        """Prompts of rows; one without an id of its own is `{prefix}-{row}`, rows counted from 0 before any is left out."""
        made = (self._prompt(row, where, f"{prefix}-{number}") for number, (where, row) in enumerate(rows))
        return [prompt for prompt in made if prompt is not None]


def _part(prompts: list[Prompt], part: str) -> list[Prompt]:
    """One side of a single file. By the problem's text, so the same problem is never on both sides.

    The side of a problem does not change when rows are added. A short file has at least one problem held out.
    """
    if part == WHOLE:
        return prompts
    shares = [int.from_bytes(hashlib.sha256(prompt.prompt.encode()).digest()[:8]) / 2**64 for prompt in prompts]
    limit = max(HELD_OUT, min(shares, default=0.0))
    return [prompt for prompt, share in zip(prompts, shares, strict=True) if (share <= limit) == (part == "eval")]
