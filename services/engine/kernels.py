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


_SIZE = ctypes.c_int64
_NUMBER = ctypes.c_float
_ARGUMENTS: dict[str, list[Any]] = {
    "norm": [*[_Tensor] * 2, _NUMBER, _Tensor, *[_SIZE] * 2],
    "gate": [*[_Tensor] * 2, *[_SIZE] * 2],
    "rotate": [*[_Tensor] * 5, _NUMBER, *[_SIZE] * 4],
    "attend": [*[_Tensor] * 6, *[_SIZE] * 5, _NUMBER, _SIZE],
    "draw": [*[_Tensor] * 5, *[_SIZE] * 3],
}


@functools.cache
def compiled() -> Any:
    """Returns the library with the functions of `kernels.cpp`; None, and logs why, where it cannot
    be compiled.
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
    for name, types in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = None
    return library


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
