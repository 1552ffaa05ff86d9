"""Rows of a data set on the Hugging Face hub, or an error within seconds when the hub cannot be reached."""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ConfigError, shorten
from services.data.files import known_format
from services.data.rows import Row

REACH_S = 4.0
"""Seconds the hub may take to say that it has the data set. `load_dataset` alone goes on trying for 24 s and more."""
STALL_S = 30.0
"""Seconds without a byte after which a hub that answered at first is given up. `load_dataset` alone takes over 200 s."""
_LOOK_EVERY_S = 0.5
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_T = TypeVar("_T")


def is_hub_name(source: str) -> bool:
    """Whether this could name a data set on the hub: `org/name`, and not a file of a known format."""
    return _NAME.fullmatch(source) is not None and not known_format(source)


def hub_rows(name: str, config: str, split: str) -> Iterator[Row]:
    """The rows of a split.

    Args:
        name: `org/name`.
        config: of a data set that has several configurations; empty for the default one.
        split: as the data set names it.

    Raises ConfigError with the data set, the cause and the remedy when it cannot be had: after `REACH_S` seconds when the
    hub does not answer, after `STALL_S` seconds when it no longer does.
    """
    # Heavy, and not needed for the other sources.
    import datasets
    import huggingface_hub

    if not sys.stderr.isatty():  # its bars would be endless lines of the log
        datasets.disable_progress_bars()
    api = huggingface_hub.HfApi()
    try:
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            _patiently(lambda: api.dataset_info(name, timeout=REACH_S), REACH_S, lambda: 0)
        rows: Iterable[dict[str, Any]] = _patiently(
            lambda: datasets.load_dataset(name, config or None, split=split), STALL_S, lambda: _cached_bytes(name)
        )
        for number, row in enumerate(rows, 1):
            yield f"{name} {split}, row {number}", row
    except Exception as error:  # whatever the library raises, the start ends here and the cause is told
        cause = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 400)
        part = f"configuration {config}, split {split}" if config else f"split {split}"
        raise ConfigError(
            f"{name} cannot be loaded from the Hugging Face hub ({part}): {cause}",
            field="data.source",
            value=name,
            remedy="use a copy in files: --data.source PATH (.jsonl, .json, .csv, .parquet or a directory); or check the name, "
            "data.hub_config, the network, HF_TOKEN and HF_ENDPOINT; or with a cached copy set HF_HUB_OFFLINE=1 and HF_HOME "
            "to its folder",
        ) from error


def _patiently(work: Callable[[], _T], limit_s: float, progress: Callable[[], int]) -> _T:
    """What `work` returns or raises. Raises TimeoutError when `progress` has stayed the same for `limit_s` seconds.

    The work is in a thread of its own, which is left to itself then: a limit of the library counts for one of its many
    attempts, and not for resolving names.
    """
    import huggingface_hub

    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="hub", daemon=True)
    thread.start()
    since, seen = time.monotonic(), -1
    while thread.is_alive():
        thread.join(min(_LOOK_EVERY_S, limit_s))
        if (now := progress()) != seen:
            since, seen = time.monotonic(), now
        if thread.is_alive() and time.monotonic() - since >= limit_s:
            raise TimeoutError(f"{huggingface_hub.constants.ENDPOINT} did not answer for {limit_s:.0f} s")
    if errors:
        raise errors[0]
    return results[0]


def _cached_bytes(name: str) -> int:
    """Bytes of a data set in the caches of the library, downloads that are not complete included."""
    import datasets
    import huggingface_hub

    wanted = name.partition("/")[2].lower()
    total = 0
    for cache in (huggingface_hub.constants.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE):
        for folder in Path(cache).glob("*"):
            if wanted in folder.name.lower() and folder.is_dir():
                total += sum(_size(path) for path in folder.rglob("*"))
    return total


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:  # a download that was just completed
        return 0
