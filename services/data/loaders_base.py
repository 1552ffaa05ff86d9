"""Base of the loaders: where rows come from, parts of a single file, and the prompt of a row."""

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from common import Json
from common.errors import ConfigError
from common.wire.schemas import Prompt
from services.data.files import file_of_split, read_file
from services.data.hub import hub_rows, is_hub_name
from services.data.rows import BadRow, Cells, Row, refuse, refuse_same_ids, row_at, stop

HELD_OUT = 0.1
"""Share of a single file that is held out for evaluation."""
MapRow = Callable[[Json], Cells | None]
"""Maps the columns of a row to the columns to read, or to None to leave the row out."""
# The part of a single file for each split; ids contain the name of the part.
_PARTS = {"train": "train", "test": "eval", "eval": "eval", "all": "all"}


@dataclass
class Loader(ABC):
    """A data set.

    Args:
        source: a file, a directory with a file per split, or `org/name` on the hub where no such
            path exists.
        hub_config: configuration of a hub data set that has several; empty for the default one.
        name: first part of generated ids, before the split, for rows without an `id`; empty for the
            name of the source.
        task: task of the prompts, which selects their reward functions; empty for the default ones.
    """

    source: str | Path
    _: KW_ONLY
    hub_config: str = ""
    name: str = ""
    task: str = ""

    @property
    def has_splits(self) -> bool:
        """Whether its splits have names; a single file has none."""
        return not Path(self.source).is_file()

    def load(
        self, split: str, num_samples: int | None = None, seed: int = 0, shuffle: bool = False
    ) -> list[Prompt]:
        """Returns the prompts of a split, in the order of the data set.

        Args:
            split: name in the data set. A single file has `train`, `test` (a tenth of the problems,
                chosen by a hash of their texts) and `all`.
            num_samples: number of prompts, the first ones; all when None.
            seed: seed of the order when `shuffle` is on.
            shuffle: shuffle before `num_samples` are taken.

        Raises:
            ConfigError: something does not load (the error names file, row and column), or there
                are too few problems. There is no substitute data.
        """
        prompts = self._load(split)
        if not prompts:
            stop(
                f"the split {split!r} has no problems",
                self.source,
                "add rows (a single file needs at least two different problems), or leave out "
                "fewer of them",
            )
        refuse_same_ids(prompts, "data.source")
        if num_samples is not None:
            check_enough(prompts, num_samples)
        if shuffle:
            random.Random(seed).shuffle(prompts)
        return prompts[:num_samples]

    @abstractmethod
    def _load(self, split: str) -> list[Prompt]:
        """Returns all problems of a split."""


@dataclass
class RowLoader(Loader):
    """A data set of rows with columns, in files or on the hub.

    Args:
        map: function that transforms every row before it is read, or skips it by returning None.
    """

    _: KW_ONLY
    map: MapRow | None = None
    finish: Callable[[Prompt, Cells], Prompt] | None = field(default=None, init=False)
    """Makes of a problem and its row what is loaded in its place."""

    @abstractmethod
    def _prompt(self, row: Cells, default_id: str) -> Prompt | None:
        """Returns the problem of a row, or None to leave the row out."""

    def _load(self, split: str) -> list[Prompt]:
        path = Path(self.source)
        if path.is_dir():
            return self._prompts(
                read_file(file_of_split(path, split)), f"{self.name or path.resolve().name}-{split}"
            )
        if path.exists():
            part = _PARTS.get(split, split)
            prompts = self._prompts(read_file(path), f"{self.name or path.stem}-{part}")
            return part_of(prompts, split, path)
        source = str(self.source)
        if not is_hub_name(source):
            stop(
                "there is no such file or directory",
                self.source,
                "gsm8k, math, tiny, the path of a file or a directory, or the name org/name of a "
                "data set on the hub",
            )
        return self._prompts(
            hub_rows(source, self.hub_config, split),
            f"{self.name or source.partition('/')[2]}-{split}",
        )

    def _prompts(self, rows: Iterable[Row], prefix: str) -> list[Prompt]:
        prompts = list[Prompt]()
        for number, (where, row) in enumerate(rows):
            with row_at(where):
                columns = row if self.map is None else _mapped(self.map, row)
                if columns is None:
                    continue
                prompt = self._prompt(columns, f"{prefix}-{number}")
                if prompt is not None:
                    prompts.append(self.finish(prompt, columns) if self.finish else prompt)
        return prompts


def check_enough(prompts: list[Prompt], num_samples: int) -> None:
    """Raises ConfigError unless `num_samples` of the prompts can be taken."""
    if not 0 < num_samples <= len(prompts):
        raise ConfigError(
            f"the split has only {len(prompts)} problems",
            field="data.num_samples",
            value=num_samples,
            remedy="ask for at least one and at most this many, or leave the setting unset for all "
            "of them",
        )


def part_of(prompts: list[Prompt], split: str, path: Path) -> list[Prompt]:
    """Returns one part of the problems at a path without named splits. The problem's text decides,
    so the same problem is never in both parts.

    Adding rows moves no problem to the other part. Even a short file has at least one held-out
    problem. Raises ConfigError for an unknown split.
    """
    if split not in _PARTS:
        stop(f"it has no split {split!r}", path, f"its splits are {', '.join(_PARTS)}")
    part = _PARTS[split]
    if part == "all":
        return prompts
    shares = [_share(prompt.prompt) for prompt in prompts]
    limit = max(HELD_OUT, min(shares, default=0.0))
    held_out = part == "eval"
    pairs = zip(prompts, shares, strict=True)
    return [prompt for prompt, share in pairs if (share <= limit) == held_out]


def _share(text: str) -> float:
    """Returns a number from 0 to 1 that depends on the text alone."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64


def _mapped(function: MapRow, row: Cells) -> Cells | None:
    """Returns the row transformed by the user's function; None to skip it.

    Raises ConfigError when the function fails.
    """
    module = getattr(function, "__module__", "?")
    name = f"{module}:{getattr(function, '__qualname__', type(function).__name__)}"
    try:
        changed = function(dict(row))
    except Exception as error:  # the operator's function may raise anything
        raise BadRow(
            f"the function failed ({type(error).__name__}: {error})",
            field="data.map",
            value=name,
            remedy="correct the function, or the row",
        ) from error
    if changed is not None and not isinstance(changed, Mapping):
        refuse(
            f"the function returned {changed!r:.80}",
            "return a mapping of columns, or None to leave the row out",
            field="data.map",
            value=name,
        )
    return changed
