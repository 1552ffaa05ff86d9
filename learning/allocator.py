"""Settings of the allocators: of torch's, on the GPU and for pinned host memory, and of the C
library's.
"""

import ctypes
from collections.abc import Mapping

import torch

# The user's settings; torch reads the first that is set.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# Larger pinned blocks are allocated exactly; smaller ones are rounded up to a power of two.
_PINNED_MB = 16
# Pins large blocks of host memory at their exact size instead of rounding up to powers of two.
# Blocks that are not rounded must not be cached either, because torch 2.13 would reuse a freed
# block for a larger request.
_PINNED = f"pinned_max_round_threshold_mb:{_PINNED_MB},pinned_max_cached_size_mb:{_PINNED_MB}"
# Lets blocks of GPU memory grow, so that micro-batches of changing lengths leave no unusable gaps
# between them. Such memory cannot be shared with another process in every container. The trainer
# shares none.
_SEGMENTS = "expandable_segments:True"
# The user's settings of the C library's allocator.
_MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
# Values of glibc's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD: larger blocks are returned to the kernel
# at once, and so is what is free at the end of the heap beyond this many bytes.
_MALLOC_LIMITS = {-3: 32 << 20, -1: 128 << 20}


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Makes the C library keep what this process frees for the next allocation, up to 128 MiB,
    unless `environment` has settings of the user; returns whether it does (glibc only).

    An update on a CPU frees and allocates a few MiB with every operator. The kernel would hand them
    out again page by page: 2,300 page faults, 7 % of the time of an update of the tiny model
    (`/usr/bin/time -v` counts them).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(environment.get(name) for name in _MALLOC_VARIABLES):
        return False
    return all(mallopt(name, limit) for name, limit in _MALLOC_LIMITS.items())


def configure_allocators(environment: Mapping[str, str]) -> str:
    """Applies this project's settings, except for what the user has set in `environment`; returns
    all settings.

    They hold in this process only. SGLang, which a trainer may start, could not release the memory
    of expandable segments when it shares its GPU. Raises ValueError for a setting of the user that
    torch does not know.
    """
    settings = next((environment[name] for name in _VARIABLES if environment.get(name)), "")
    if "pinned_max" not in settings:
        settings = _added(settings, _PINNED)
    if "expandable_segments" not in settings and "backend" not in settings:
        settings = _added(settings, _SEGMENTS)
    return settings


def _added(settings: str, more: str) -> str:
    """Applies `settings` with `more`, if this torch knows it; returns what applies."""
    both = f"{settings},{more}" if settings else more
    try:
        # Replaces all settings, so the earlier ones come along.
        torch._C._accelerator_setAllocatorSettings(both)
    except ValueError:  # an unknown key: torch has the limits of pinned memory since 2.13
        torch._C._accelerator_setAllocatorSettings(settings)
        return settings
    return both
