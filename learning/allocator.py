"""Settings of torch's allocators, on the GPU and for pinned host memory."""

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
