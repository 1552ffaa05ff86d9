"""Reads rows from files: JSON lines, JSON, CSV and parquet, from one file or from a directory with
a file per split.
"""

import csv
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from services.data.rows import MAX_TEXT_CHARS, Row, stop


def read_file(path: Path) -> Iterator[Row]:
    """Yields the rows of a file, in order. Raises ConfigError with file and line if it violates its
    suffix's format.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        stop(f"{path.name} is not of a known format", path, f"known formats: {', '.join(_READERS)}")
    try:
        yield from reader(path)
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        stop(f"{path.name} cannot be read: {error}", path, "repair the file")


def file_of_split(folder: Path, split: str) -> Path:
    """Returns the file in a directory that is named after the split. Raises ConfigError unless
    there is exactly one.
    """
    candidates = [folder / f"{split}{suffix}" for suffix in _READERS]
    files = [file for file in candidates if file.is_file()]
    if len(files) != 1:
        there = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        problem = "no file" if not files else "more than one file"
        wanted = " or ".join(file.name for file in candidates)
        stop(
            f"the directory has {problem} for the split {split!r}; it has {there}",
            folder,
            f"put one file {wanted} there",
        )
    return files[0]


def known_format(name: str) -> bool:
    """Returns whether the name has the suffix of a readable format."""
    return Path(name).suffix.lower() in _READERS


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
    csv.field_size_limit(4 * MAX_TEXT_CHARS)  # so that only `rows` limits texts
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        names = list(reader.fieldnames or [])
        if len(set(names)) != len(names):
            raise ValueError(f"two columns have the same name: {', '.join(names)}")
        for row in reader:
            if None in row:
                raise ValueError(
                    f"line {reader.line_num} has more cells than there are columns: "
                    f"{', '.join(names)}"
                )
            yield f"{path.name}, line {reader.line_num}", row


def _read_parquet(path: Path) -> Iterator[Row]:
    # Slow to import, and not needed for the other formats.
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        batches = (batch.to_pylist() for batch in file.iter_batches())
        for number, row in enumerate(itertools.chain.from_iterable(batches), 1):
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
