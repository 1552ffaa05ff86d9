"""Loads rows from the Hugging Face hub, or fails within seconds when the hub cannot be reached."""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ConfigError, shorten
from services.data.files import known_format
from services.data.rows import Row

REACH_S = 4.0
"""Seconds that the hub may take to confirm that it has the data set. `load_dataset` alone tries for 24 s and more."""
STALL_S = 30.0
"""Seconds without a byte after which a download is abandoned. `load_dataset` alone takes over 200 s."""
_POLL_S = 0.5
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_T = TypeVar("_T")


def is_hub_name(source: str) -> bool:
    """Returns whether this could name a data set on the hub: `org/name`, and not a file of a known format."""
    return _NAME.fullmatch(source) is not None and not known_format(source)


def hub_rows(name: str, config: str, split: str) -> Iterator[Row]:
    """Yields the rows of a split; `config` is empty for the default configuration.

    Raises ConfigError when the data set cannot be loaded: after `REACH_S` seconds when the hub does not answer, after `STALL_S`
    when it no longer does.
    """
    # Heavy, and not needed for the other sources.
    import datasets
    import huggingface_hub

    if not sys.stderr.isatty():  # progress bars would be endless lines of the log
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
    except Exception as error:  # whatever the library raises, the start ends here with the cause
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
    """Returns or raises what `work` does. Raises TimeoutError when `progress` has not changed for `limit_s` seconds.

    The work runs in a daemon thread, which is abandoned then: a timeout of the library applies to one of its many attempts,
    and not to resolving names.
    """
    import huggingface_hub

    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="hub", daemon=True).start()
    since, seen = time.monotonic(), -1
    while not wait([future], min(_POLL_S, limit_s)).done:
        if (now := progress()) != seen:
            since, seen = time.monotonic(), now
        if time.monotonic() - since >= limit_s:
            raise TimeoutError(f"{huggingface_hub.constants.ENDPOINT} did not answer for {limit_s:.0f} s")
    return future.result()


def _cached_bytes(name: str) -> int:
    """Returns the bytes of a data set in the caches of the library, incomplete downloads included."""
    import datasets
    import huggingface_hub

    wanted = name.partition("/")[2].lower()
    total = 0
    for cache in (huggingface_hub.constants.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE):
        for folder in Path(cache).glob("*"):
            if wanted in folder.name.lower() and folder.is_dir():
                for path in folder.rglob("*"):
                    with suppress(FileNotFoundError):  # the download has just completed
                        total += path.lstat().st_size
    return total
