"""What the trainer configures in the allocators, and which settings of the user it keeps."""

import platform
import resource

import numpy as np
import pytest
import torch
from torch.torch_version import TorchVersion

from learning.allocator import configure_allocators, keep_freed_memory

_PINNED = "pinned_max_round_threshold_mb:16,pinned_max_cached_size_mb:16"
_KNOWN = TorchVersion(torch.__version__) >= (2, 13) or torch.version.cuda is None
"""A build without CUDA has no pinned memory, and takes every key."""

needs_limits = pytest.mark.skipif(
    not _KNOWN, reason="torch before 2.13 refuses limits of pinned memory"
)


def test_a_setting_that_torch_does_not_know_is_left_out() -> None:
    """torch would refuse to allocate anything on a GPU."""
    settings = configure_allocators({})
    assert (_PINNED in settings) is _KNOWN
    torch._C._accelerator_setAllocatorSettings(settings)


@needs_limits
def test_large_pinned_blocks_are_neither_rounded_nor_cached() -> None:
    """Both matter: torch 2.13 picks a cached block by the next power of two, so it may be too small
    for the request."""
    assert configure_allocators({}) == f"{_PINNED},expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_of_the_user_are_kept(name: str) -> None:
    own = "expandable_segments:False,max_split_size_mb:512"
    settings = configure_allocators({name: own})
    assert settings.startswith(own)
    assert settings.count("expandable_segments") == 1


@needs_limits
def test_limits_of_the_user_are_kept() -> None:
    own = "pinned_max_round_threshold_mb:4,pinned_max_cached_size_mb:4"
    assert configure_allocators({"PYTORCH_ALLOC_CONF": own}) == f"{own},expandable_segments:True"


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch 2.11 does not tell"
)
def test_what_is_returned_is_in_force() -> None:
    for own in ("", "expandable_segments:False"):
        settings = configure_allocators({"PYTORCH_ALLOC_CONF": own})
        assert torch._C._accelerator_getAllocatorSettings() == settings


def test_freed_memory_is_kept_but_for_a_user_who_set_limits() -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("only glibc has these limits")
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "0"})
    assert keep_freed_memory({})

    def allocate() -> int:
        """Allocates and frees 24 MiB; returns the page faults of that."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [np.ones(8 << 20, np.uint8) for _ in range(3)]
        blocks.clear()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    allocate()
    assert allocate() < 1000, "of the 6,144 pages of 4 KiB"
