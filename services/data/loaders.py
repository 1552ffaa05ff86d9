"""Loads the data set named by `data.source`, or ends the startup with the cause and the remedy.

`gsm8k` and `math` come from the hub, `math:SOURCE` is MATH in other places, `tiny` is generated;
anything else is a file, a directory with one file per split, or the name of a data set on the hub.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from common.errors import ConfigError
from common.process.imports import import_callable
from common.prompts.templates import check_prompts
from common.settings.sections import DataSection
from common.wire.schemas import Prompt
from services.data import tiny
from services.data.loaders_base import Loader, check_enough
from services.data.loaders_custom import CustomDatasetLoader
from services.data.loaders_harbor import HarborLoader, has_tasks
from services.data.loaders_math import MATH_ON_HUB, GSM8KLoader, MATHLoader
from services.data.rows import stop

__all__ = [
    "CustomDatasetLoader",
    "GSM8KLoader",
    "Loader",
    "MATHLoader",
    "Split",
    "TinyLoader",
    "load_split",
    "loader_of",
]
Split = Literal["train", "eval"]


@dataclass
class TinyLoader(GSM8KLoader):
    """The generated task (`services.data.tiny`), with the splits train and test, which never
    change. Its rows are like those of GSM8K.
    """

    source: str | Path = "tiny"
    _: KW_ONLY
    name: str = "tiny"

    def _load(self, split: str) -> list[Prompt]:
        if split not in tiny.SIZES:
            stop(
                f"the data set tiny has no split {split!r}", "tiny", "its splits are train and test"
            )
        name: tiny.Split = "train" if split == "train" else "test"
        problems = itertools.islice(tiny.problems(name), tiny.SIZES[name])
        rows = (("tiny", {"question": each.question, "answer": each.solution}) for each in problems)
        return self._prompts(rows, f"{self.name}-{name}")


def loader_of(config: DataSection) -> Loader:
    """Returns the loader of `data.source`. Raises ConfigError for an unknown level or a `data.map`
    that cannot be imported.
    """
    if config.source == "tiny":
        return TinyLoader()
    if config.source == "gsm8k":
        return GSM8KLoader()
    if config.is_math:
        return MATHLoader(
            levels=config.levels or None,
            subjects=config.subjects or None,
            source=config.source.partition(":")[2] or MATH_ON_HUB,
            hub_config=config.hub_config,
        )
    if has_tasks(Path(config.source)):
        return HarborLoader(config.source)
    return CustomDatasetLoader(
        config.source,
        prompt_field=config.prompt_field,
        answer_field=config.answer_field,
        messages_field=config.messages_field,
        task_field=config.task_field,
        columns=config.columns,
        map=import_callable(config.map, "data.map") if config.map else None,
        hub_config=config.hub_config,
    )


def load_split(
    config: DataSection,
    split: Split,
    seed: int,
    loader_of: Callable[[DataSection], Loader] = loader_of,
) -> list[Prompt]:
    """Returns the prompts of a split that the data-server serves, in the order of the data set.

    The seed only determines which problems `config.num_samples` keeps. Raises ConfigError that
    names file, row and column when anything does not load.
    """
    if config.train_split == config.eval_split:
        raise ConfigError(
            "training and evaluation would use the same problems",
            field="data.eval_split",
            value=config.eval_split,
            remedy="name another split",
        )
    loader = loader_of(config)
    name: str = config.train_split if split == "train" else config.eval_split
    if not loader.has_splits:
        name = split  # a part of it is held out
    prompts = loader.load(name)
    check_prompts(config.prompt_template, prompts)
    if split == "eval" or config.num_samples is None:
        return prompts
    check_enough(prompts, config.num_samples)
    kept = random.Random(seed).sample(range(len(prompts)), config.num_samples)
    return [prompts[i] for i in sorted(kept)]
