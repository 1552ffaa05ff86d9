"""Loads rows from the Hugging Face hub, or fails within seconds when the hub cannot be reached."""

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import ConfigError, shorten
from common.models.hub import REACH_S, patiently
from services.data.files import known_format, with_short_floats
from services.data.rows import Row

STALL_S = 30.0
"""Seconds without a byte after which a download is abandoned. `load_dataset` alone takes over 200
s."""
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_name(source: str) -> bool:
    """Returns whether this could name a data set on the hub: `org/name`, and not a file of a known
    format.
    """
    return _NAME.fullmatch(source) is not None and not known_format(source)


def hub_rows(name: str, config: str, split: str) -> Iterator[Row]:
    """Yields the rows of a split; `config` is empty for the default configuration.

    Raises ConfigError when the data set cannot be loaded: after `REACH_S` seconds if the hub does
    not answer, after `STALL_S` seconds if it stops answering.
    """
    # Slow to import, and not needed for the other sources.
    import datasets
    import huggingface_hub

    if not sys.stderr.isatty():  # progress bars would be endless lines of the log
        datasets.disable_progress_bars()
    api = huggingface_hub.HfApi()
    try:
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            patiently(lambda: api.dataset_info(name, timeout=REACH_S), REACH_S)
        rows: Any = patiently(
            lambda: datasets.load_dataset(name, config or None, split=split),
            STALL_S,
            lambda: _cached_bytes(name),
        )
        types = {column: str(feature) for column, feature in (rows.features or {}).items()}
        for number, row in enumerate(rows, 1):
            yield f"{name} {split}, row {number}", with_short_floats(row, types)
    except Exception as error:  # the library may raise anything; startup ends here with the cause
        cause = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 400)
        part = f"configuration {config}, split {split}" if config else f"split {split}"
        raise ConfigError(
            f"{name} cannot be loaded from the Hugging Face hub ({part}): {cause}",
            field="data.source",
            value=name,
            remedy="use a copy in files: data.source PATH (.jsonl, .json, .csv, .parquet or a "
            "directory); or check the name, data.hub_config, the network, HF_TOKEN and "
            "HF_ENDPOINT; or with a cached copy set HF_HUB_OFFLINE=1 and HF_HOME to its folder",
        ) from error


def _cached_bytes(name: str) -> int:
    """Returns the bytes of a data set in the library's caches, including incomplete downloads."""
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
