"""Reads rows from files: JSON lines, JSON, CSV and parquet, from one file or from a directory with
a file per split.
"""

import csv
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from common import Json
from services.data.rows import MAX_TEXT_CHARS, Row, stop


def read_file(path: Path) -> Iterator[Row]:
    """Yields the rows of a file, in order. Raises ConfigError with file and line if it violates its
    suffix's format.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        stop(f"{path.name} is not of a known format", path, f"known formats: {', '.join(_READERS)}")
    try:
        for where, row in reader(path):
            if not isinstance(row, dict):
                raise ValueError(f"{where} is not an object with columns")
            yield where, row
    except UnicodeDecodeError as error:
        where = error.reason if error.reason.startswith(path.name) else path.name
        found = f"byte {error.start} is {error.object[error.start]:#04x}"
        stop(f"{where} is not in UTF-8: {found}", path, "save the file in UTF-8")
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        where = "" if str(error).startswith(path.name) else f"{path.name} cannot be read: "
        is_absent = isinstance(error, FileNotFoundError)
        stop(f"{where}{error}", path, "correct its name" if is_absent else "repair the file")


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
                yield where, _parse(line, where)


def _read_json(path: Path) -> Iterator[Row]:
    content = _parse(path.read_bytes(), path.name)
    if not isinstance(content, list):
        raise ValueError("it is not a list of rows (one object per line is .jsonl)")
    for number, item in enumerate(content, 1):
        yield f"{path.name}, row {number}", item


def _read_csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(4 * MAX_TEXT_CHARS)  # so that only `rows` limits texts
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        names = list(reader.fieldnames or [])
        _refuse_same(names)
        other = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), None)
        if other:
            raise ValueError(
                f"{path.name} separates its columns by {other!r}: {names[0]!r} is one column; "
                "save it with commas"
            )
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
        _refuse_same(file.schema_arrow.names)
        types = {field.name: str(field.type) for field in file.schema_arrow}
        batches = (batch.to_pylist() for batch in file.iter_batches())
        for number, row in enumerate(itertools.chain.from_iterable(batches), 1):
            yield f"{path.name}, row {number}", with_short_floats(row, types)


def with_short_floats(row: Json, types: Mapping[str, str]) -> Json:
    """Returns a row in which numbers of narrow columns are as somebody wrote them: 0.1 in a float32
    column, which Python reads as 0.10000000149.

    `types` has the type of each column in words, such as `float` or `list<item: halffloat>`.
    """
    changed = dict(row)
    for name, kind in types.items():
        narrow = _NARROW.search(kind)
        if narrow is not None and name in row:
            is_half = narrow[0] in ("halffloat", "float16")
            changed[name] = _short(row[name], np.float16 if is_half else np.float32)
    return changed


def _short(value: Any, kind: type[np.floating[Any]]) -> Any:
    """Returns a number, or those in a list, with the fewest digits that `kind` tells apart."""
    if isinstance(value, list):
        return [_short(item, kind) for item in value]
    return float(str(kind(value))) if isinstance(value, float) else value


_NARROW = re.compile(r"\b(?:halffloat|float16|float32|float)\b")
_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _parse(data: bytes, where: str) -> Any:
    try:
        return json.loads(
            data.decode("utf-8-sig"), parse_constant=_no_constant, object_pairs_hook=_no_same_key
        )
    except json.JSONDecodeError as error:
        place = f"column {error.colno}"
        if error.lineno > 1:
            place = f"line {error.lineno}, {place}"
        raise ValueError(f"{where} is not JSON: {error.msg} ({place})") from None
    except UnicodeDecodeError as error:
        error.reason = where  # for `read_file`, which says what is wrong
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from None


def _no_same_key(pairs: list[tuple[str, Any]]) -> Json:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return content


def _refuse_same(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise ValueError(f"two columns have the same name: {', '.join(names)}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
