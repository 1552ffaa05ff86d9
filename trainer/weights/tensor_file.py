"""Safetensors files, written and hashed in one pass over the tensors."""

import json
from collections.abc import Callable, Iterator
from typing import BinaryIO

import torch
from torch import Tensor

from common import Json
from common.process import progress
from common.weights.checksums import Hasher

_PIECE = 1 << 20
"""Bytes per piece: each is hashed, then written while it is still in the processor's cache."""
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    tensors: dict[str, Tensor], stream: BinaryIO, wrote: Callable[[], None] = progress.moved
) -> str:
    """Writes contiguous tensors in host memory to `stream`, and calls `wrote` after every MiB;
    returns the checksum of the file.
    """
    # The widest dtype first, so that each tensor begins at a multiple of its item size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin = end
        end += tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = Hasher()
    for piece in _pieces(len(text).to_bytes(8, "little") + text, [tensor for _, tensor in ordered]):
        digest.update(piece)
        stream.write(piece)
        wrote()
    return digest.hexdigest()


def _pieces(head: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    yield head
    for tensor in tensors:
        if tensor.numel():
            flat = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            for begin in range(0, len(flat), _PIECE):
                yield flat[begin : begin + _PIECE]
