"""The data sets: what `data.source` names is read by one of the loaders, or the start stops with the cause and the remedy.

`gsm8k` and `math` come from the hub, `math:SOURCE` is MATH in other places, `tiny` is generated; anything else is a file, a
directory with one file per split, or the name of a data set on the hub.
"""

import itertools
import random
from pathlib import Path
from typing import Literal

from common.errors import ConfigError
from common.imports import import_callable
from common.schemas import Prompt
from common.sections import DataSection
from services.data import tiny
from services.data.loaders_base import Loader
from services.data.loaders_custom import CustomDatasetLoader
from services.data.loaders_math import MATH_ON_HUB, GSM8KLoader, MATHLoader
from services.data.rows import final_answer, stop

__all__ = [
    "CustomDatasetLoader",
    "GSM8KLoader",
    "Loader",
    "MATHLoader",
    "Split",
    "TinyLoader",
    "final_answer",
    "load_split",
    "loader_of",
]
Split = Literal["train", "eval"]


class TinyLoader(Loader):
    """The generated task (`services.data.tiny`): splits train and test, the same ones always."""

    def __init__(self, task: str = "") -> None:
        super().__init__("tiny", task=task)

    def _load(self, split: str) -> list[Prompt]:
        if split not in tiny.SIZES:
            stop(f"the data set tiny has no split {split!r}", "tiny", "its splits are train and test")
        name: tiny.Split = "train" if split == "train" else "test"
        rows = enumerate(itertools.islice(tiny.problems(name), tiny.SIZES[name]))
        return [
            Prompt(id=f"tiny-{name}-{n}", prompt=problem.question, ground_truth=str(problem.answer), task=self.task)
            for n, problem in rows
        ]


def loader_of(config: DataSection) -> Loader:
    """The loader of `data.source`. Raises ConfigError for levels that are none and a `data.map` that cannot be imported."""
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


def load_split(config: DataSection, split: Split, seed: int) -> list[Prompt]:
    """The prompts of a split, in the order of the data set: what the data-server serves.

    Args:
        config: source, names of the splits and of the columns, and how many training problems to use.
        split: `train` or `eval`.
        seed: decides which problems `config.num_samples` keeps; the data set itself does not depend on it.

    Raises ConfigError, naming the file, row and column where there is one, when anything does not load.
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
    if Path(loader.source).is_file():
        name = split  # a single file has no splits to name: a part of it is held out
    prompts = loader.load(name)
    return _sample(prompts, config, seed) if split == "train" else prompts


def _sample(prompts: list[Prompt], config: DataSection, seed: int) -> list[Prompt]:
    """`data.num_samples` of them by chance, in the order of the data set."""
    if config.num_samples is None:
        return prompts
    if config.num_samples > len(prompts):
        raise ConfigError(
            f"the training split has only {len(prompts)} problems",
            field="data.num_samples",
            value=config.num_samples,
            remedy="ask for fewer, or leave it unset for all of them",
        )
    kept = random.Random(seed).sample(range(len(prompts)), config.num_samples)
    return [prompts[i] for i in sorted(kept)]
