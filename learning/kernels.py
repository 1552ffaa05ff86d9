"""Checks that GPU kernels can be compiled here, for `torch.compile` and the project's own Triton
kernels.
"""

import importlib.util
import logging
import os
import shutil
from functools import cache

log = logging.getLogger(__name__)


@cache
def has_triton(device_type: str) -> bool:
    """Whether Triton can compile for this device type: a GPU, with the package and a C compiler for
    its launchers.
    """
    if device_type != "cuda":
        return False
    missing: list[str] = []
    if not importlib.util.find_spec("triton"):
        missing.append("the package triton")
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        missing.append("a C compiler")
    if missing:
        log.warning(
            "GPU kernels cannot be compiled without %s, "
            "so updates run at about half the speed: install what is missing",
            " and ".join(missing),
        )
    return not missing
