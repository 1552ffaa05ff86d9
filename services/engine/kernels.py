"""Kernels for a CPU (`kernels.cpp`), compiled when they are first needed.

There, a token of a small model costs the calls of operators, not their arithmetic.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cpp")


class _Tensor:
    """A contiguous tensor, which is passed as the address of its first number, or None."""

    @staticmethod
    def from_param(tensor: Tensor | None) -> ctypes.c_void_p | None:
        if tensor is None:
            return None
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
        return ctypes.c_void_p(tensor.data_ptr())


_HEADS = ("heads", "kv_heads", "size")
_KERNELS = {
    "norm": ("hidden", "weight", "epsilon", "out", "rows", "size"),
    "gate": ("both", "out", "rows", "size"),
    "rotate": (
        *("states", "positions", "rotations", "query_norm", "key_norm", "epsilon", "tokens"),
        *_HEADS,
    ),
    "attend": (
        *("states", "token_rows", "positions", "keys", "values", "out", "tokens"),
        *_HEADS,
        *("columns", "scale", "threads"),
    ),
    "draw": ("logits", "temperatures", "uniforms", "allowed", "out", "rows", "size", "threads"),
}
"""The kernels with their arguments, in their order."""
_TYPES = {
    **dict.fromkeys(("epsilon", "scale"), ctypes.c_float),
    **dict.fromkeys(("rows", "tokens", *_HEADS, "columns", "threads"), ctypes.c_int64),
}
"""All other arguments are tensors."""


@functools.cache
def compiled() -> Any:
    """Returns the functions of `kernels.cpp`, which take their arguments by name; None, and logs
    why, where it cannot be compiled.
    """
    # A wider instruction set gains nothing, and machines with and without it would round otherwise.
    has_avx2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    command = [
        *shlex.split(os.environ.get("CXX", "c++")),
        *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"),
        *(["-march=x86-64-v3"] if has_avx2 else []),
        "-fopenmp-simd" if sys.platform == "darwin" else "-fopenmp",
        str(_SOURCE),
    ]
    try:
        library = _library(command)
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        log.warning(
            "small models will take more time for a token: %s cannot be compiled; install a C++ "
            "compiler, or name one in CXX (%s)",
            _SOURCE.name,
            said,
        )
        return None
    functions = SimpleNamespace()
    for name, arguments in _KERNELS.items():
        types: list[Any] = [_TYPES.get(argument, _Tensor) for argument in arguments]
        is_input = 1
        flags = tuple((is_input, argument) for argument in arguments)
        # ctypes calls it with arguments by name.
        function = ctypes.CFUNCTYPE(None, *types)((name, library), flags)
        setattr(functions, name, function)
    return functions


def _library(command: list[str]) -> ctypes.CDLL:
    """Loads the library that the command makes; the user's cache has it after the first time.

    Raises OSError, CalledProcessError.
    """
    parts = [*command, platform.machine(), _SOURCE.read_text(encoding="utf-8")]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rlhf-math"
    cached = cache / f"kernels-{digest}.so"
    if cached.is_file():
        return ctypes.CDLL(str(cached))

    with TemporaryDirectory() as directory:
        made = Path(directory) / cached.name
        subprocess.run([*command, "-o", made], check=True, capture_output=True, text=True)
        library = ctypes.CDLL(str(made))
        with suppress(OSError):  # no home, or one that cannot be written: compiled again next time
            cache.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=cache) as beside:
                # Whole at once: other processes look for it.
                Path(shutil.copy(made, beside)).replace(cached)
    return library
