"""Experts of tokens on the disk of rank 0, for routing replay.

The experts of a token of a large mixture take fifty times the bytes of the token itself, gigabytes
in a batch. So a group's experts are written to a file when they arrive; its arrays are views of the
file, whose pages the system drops when it needs memory. Every rank reads those of a row when it
computes the row: from the file, or over HTTP where another node has it.
"""

import asyncio
import weakref
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np

from common.clients.base import Client
from common.errors import NotFound
from common.process.storage import storing
from common.process.topology import TRAINER
from common.wire.schemas import Group, UInt8

EXPERTS = "experts"
"""The directory in `state_dir`."""
_FETCH_S = 300.0
_ONE_BYTE = 256
"""Numbers below this fit into a byte."""


def split_routing(group: Group) -> None:
    """Moves the experts of the prompt, which every completion came with, to the group, once; makes
    all numbers one byte if none is above 255.

    Those of the first completion are kept. Others differ only in experts that are nearly equal, and
    only for tokens of the prompt that the engine computed again instead of finding them cached.
    """
    prompt_tokens = len(group.prompt_token_ids)
    numbers = [completion.routed_experts.view("<u2") for completion in group.completions]
    size = "<u2"
    # The experts of a long group are its largest part: half the bytes.
    if all(int(array.max()) < _ONE_BYTE for array in numbers):
        size = "<u1"
    for completion, array in zip(group.completions, numbers, strict=True):
        tokens = prompt_tokens + len(completion.token_ids) - 1
        of_prompt, of_completion = np.split(array.astype(size).reshape(tokens, -1), [prompt_tokens])
        completion.routed_experts = of_completion.reshape(-1).view(np.uint8)
        if completion is group.completions[0]:
            group.prompt_routed_experts = of_prompt.reshape(-1).view(np.uint8)


def spool(group: Group, directory: Path) -> None:
    """Moves the experts of a group to a file in `directory`, which is removed with the last array
    that is a view of it. Raises StorageFailed.
    """
    arrays = [group.prompt_routed_experts]
    arrays += [completion.routed_experts for completion in group.completions]
    path = directory / f"{uuid4().hex}.experts"
    with storing("the experts of a group", path, "state_dir"):
        directory.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for array in arrays:
                file.write(array.data)

    whole: UInt8 = np.memmap(path, np.uint8, mode="r")
    weakref.finalize(whole, path.unlink, missing_ok=True)
    ends = np.cumsum([len(array) for array in arrays])
    of_prompt, *of_completions = np.split(whole, ends[:-1])
    group.prompt_routed_experts = of_prompt
    for completion, experts in zip(group.completions, of_completions, strict=True):
        completion.routed_experts = experts


@dataclass(frozen=True, slots=True)
class SpooledExperts:
    """Experts that a rank reads when it needs them."""

    path: Path
    start: int
    size: int
    url: str
    """The address of rank 0, from which ranks of other nodes fetch the experts."""

    def read(self) -> UInt8:
        """Returns the numbers. Raises ServiceError."""
        try:
            return read_part(self.path, self.start, self.size)
        except NotFound:
            return np.frombuffer(asyncio.run(self._fetch()), np.uint8)

    async def _fetch(self) -> bytes:
        async with Client(TRAINER, self.url, deadline_s=_FETCH_S) as client:
            part = {"start": self.start, "size": self.size}
            return (await client.request("GET", f"/experts/{self.path.name}", params=part)).content


Experts = UInt8 | SpooledExperts
"""In memory, or where to read them."""


def located(array: UInt8, url: str) -> Experts:
    """Returns where an array is; the array itself if it is in memory. `url` is rank 0's."""
    if not isinstance(array, np.memmap):
        return array
    assert array.filename is not None
    start = 0
    if isinstance(array.base, np.memmap):
        start = array.ctypes.data - array.base.ctypes.data
    return SpooledExperts(Path(array.filename), start, len(array), url)


def loaded(experts: Experts) -> UInt8:
    """Returns the numbers. Raises ServiceError."""
    return experts.read() if isinstance(experts, SpooledExperts) else experts


def read_part(path: Path, start: int, size: int) -> UInt8:
    """Reads a part of a spooled file. Raises NotFound when this node has no such file."""
    try:
        return np.fromfile(path, np.uint8, size, offset=start)
    except FileNotFoundError:
        raise NotFound(
            "these experts are not here: their group was trained on, or dropped",
            field="name",
            value=path.name,
        ) from None
