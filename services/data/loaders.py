"""Reads a data set into prompts, or stops the start with the cause and the remedy. There is no substitute data.

Sources: `gsm8k` (the hub), `tiny` (generated), a directory with one file per split, or a single file. Of a single file
a tenth is held out for evaluation by a hash of the problem text (`_part`), the rest is the training split.
"""

import csv
import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn

from common.errors import ConfigError
from common.schemas import Prompt
from common.sections import DataSection
from services.data import tiny

Split = Literal["train", "eval"]
Row = tuple[str, dict[str, Any]]
"""Where the row is, for messages (`train.jsonl, line 3`), and its columns."""

HELD_OUT = 0.1
"""Share of a single file that is held out for evaluation."""
MAX_TEXT_CHARS = 1_000_000
MAX_ID_CHARS = 512
_HUB_NAME = "openai/gsm8k"
_HUB_TIMEOUT_S = 5.0


def load_split(config: DataSection, split: Split, seed: int) -> list[Prompt]:
    """The prompts of a split, in the order of the data set.

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
    name = config.train_split if split == "train" else config.eval_split
    if config.source == "tiny":
        prompts = _tiny(name)
    elif config.source == "gsm8k":
        rows: Iterable[Row] = ((f"{_HUB_NAME} {name}, row {n}", row) for n, row in enumerate(_hub(name), 1))
        prompts = _prompts(rows, f"gsm8k-{name}", "question", "answer")
    else:
        prompts = _local(config, Path(config.source), split, name)
    if not prompts:
        _stop(
            f"the {split} split has no problems", config.source, "add rows: a single file needs at least two different problems"
        )
    _refuse_same_ids(prompts, config.source)
    return _sample(prompts, config, seed) if split == "train" else prompts


def final_answer(text: str) -> str:
    """What an answer is compared with: N of a text with `#### N`, without commas and spaces; else the text, stripped."""
    _, marker, tail = text.rpartition("####")
    return "".join(tail.replace(",", "").split()) if marker else text.strip()


def _sample(prompts: list[Prompt], config: DataSection, seed: int) -> list[Prompt]:
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


def _refuse_same_ids(prompts: list[Prompt], source: str) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            _stop(f"two problems have the id {prompt.id!r}", source, "make the ids unique, or leave the column id out")
        seen.add(prompt.id)


def _tiny(name: str) -> list[Prompt]:
    if name not in tiny.SIZES:
        _stop(f"the data set tiny has no split {name!r}", "tiny", "its splits are train and test")
    split: tiny.Split = "train" if name == "train" else "test"
    problems = itertools.islice(tiny.problems(split), tiny.SIZES[split])
    return [
        Prompt(id=f"tiny-{split}-{n}", prompt=problem.question, ground_truth=str(problem.answer))
        for n, problem in enumerate(problems)
    ]


# ---------------------------------------------------------------- the hub


def _hub(name: str) -> Iterable[dict[str, Any]]:
    # Heavy, and not needed for the other sources.
    import datasets
    import huggingface_hub

    try:
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            # Asked once, since `load_dataset` retries an unreachable hub for 24 s before it says so.
            huggingface_hub.HfApi().dataset_info(_HUB_NAME, timeout=_HUB_TIMEOUT_S)
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(_HUB_NAME, "main", split=name)
    except Exception as error:  # whatever the library raises, the start ends here and the cause is told
        raise ConfigError(
            f"{_HUB_NAME} cannot be loaded from the Hugging Face hub: {type(error).__name__}: {error}",
            field="data.source",
            value="gsm8k",
            remedy="check the network and HF_ENDPOINT; with a cached copy set HF_HUB_OFFLINE=1 and HF_HOME to its folder; "
            "or use --data.source PATH (files) or --data.source tiny (generated)",
        ) from error
    return rows


# ---------------------------------------------------------------- files


def _local(config: DataSection, path: Path, split: Split, name: str) -> list[Prompt]:
    if not path.exists():
        _stop("there is no such file or directory", path, "gsm8k, tiny, or the path of a file or a directory")
    if path.is_dir():
        file = _file_of_split(path, name)
        return _prompts(_read(file), f"{path.resolve().name}-{name}", config.prompt_field, config.answer_field)
    prompts = _prompts(_read(path), f"{path.stem}-{split}", config.prompt_field, config.answer_field)
    return _part(prompts, split)


def _file_of_split(folder: Path, name: str) -> Path:
    files = [folder / f"{name}{suffix}" for suffix in _READERS if (folder / f"{name}{suffix}").is_file()]
    if len(files) != 1:
        there = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        problem = "no file" if not files else "more than one file"
        wanted = " or ".join(f"{name}{suffix}" for suffix in _READERS)
        _stop(f"the directory has {problem} for the split {name!r}; it has {there}", folder, f"put one file {wanted} there")
    return files[0]


def _part(prompts: list[Prompt], split: Split) -> list[Prompt]:
    """One side of a single file. By the problem's text, so the same problem is never on both sides.

    The side of a problem does not change when rows are added. A short file has at least one problem held out.
    """
    shares = [int.from_bytes(hashlib.sha256(prompt.prompt.encode()).digest()[:8]) / 2**64 for prompt in prompts]
    limit = max(HELD_OUT, min(shares, default=0.0))
    return [prompt for prompt, share in zip(prompts, shares, strict=True) if (share <= limit) == (split == "eval")]


def _read(path: Path) -> Iterator[Row]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        _stop(f"{path.name} is not of a known format", path, f"known formats: {', '.join(_READERS)}")
    try:
        yield from reader(path)
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        _stop(f"{path.name} cannot be read: {error}", path, "repair the file")


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path.name}, line {number}"
                yield where, _mapping(_parse(line, where), where)


def _read_json(path: Path) -> Iterator[Row]:
    content = _parse(path.read_bytes(), path.name)
    if not isinstance(content, list):
        raise ValueError("it is not a list of rows (one object per line is .jsonl)")
    for number, item in enumerate(content, 1):
        where = f"{path.name}, row {number}"
        yield where, _mapping(item, where)


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        names = list(reader.fieldnames or [])
        if len(set(names)) != len(names):
            raise ValueError(f"two columns have the same name: {', '.join(names)}")
        for row in reader:
            if None in row:
                raise ValueError(f"line {reader.line_num} has more cells than there are columns: {', '.join(names)}")
            yield f"{path.name}, line {reader.line_num}", row


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path.name}, row {number}", row


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _parse(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _mapping(item: object, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ValueError(f"{where} is not an object with columns")
    return item


# ---------------------------------------------------------------- rows


def _prompts(rows: Iterable[Row], prefix: str, prompt_field: str, answer_field: str) -> list[Prompt]:
    """Prompts of rows; one without an `id` of its own is `{prefix}-{row}`, rows counted from 0."""
    prompts = []
    for number, (where, row) in enumerate(rows):
        text = _text(row, prompt_field, where, "--data.prompt_field")
        answer = final_answer(_text(row, answer_field, where, "--data.answer_field"))
        if not answer:
            _stop(f"{where}: the answer in column {answer_field!r} is empty", where, "give every row an answer, or remove it")
        own = _text(row, "id", where, "the column id", MAX_ID_CHARS) if "id" in row else f"{prefix}-{number}"
        prompts.append(Prompt(id=own, prompt=text, ground_truth=answer))
    return prompts


def _text(row: dict[str, Any], column: str, where: str, setting: str, limit: int = MAX_TEXT_CHARS) -> str:
    if column not in row:
        _stop(f"{where}: there is no column {column!r}; there are {', '.join(row)}", where, f"set {setting}")
    value = row[column]
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of whole numbers with a gap comes as floats
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number and not isinstance(value, str):
        _stop(f"{where}: column {column!r} is {value!r:.80}, not a text or a number", where, "repair the row, or remove it")
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        _stop(f"{where}: column {column!r} is not text: {error.reason}", where, "repair the row, or remove it")
    if not text.strip() or len(text) > limit:
        _stop(f"{where}: column {column!r} is empty or over {limit} characters", where, "repair the row, or remove it")
    return text


def _stop(message: str, value: object, remedy: str) -> NoReturn:
    raise ConfigError(message, field="data.source", value=str(value), remedy=remedy)
