"""What a rank sets for torch, and what it leaves as the user has it."""

from learning.ranks import _pin_exactly

_OWN = "pinned_max_round_threshold_mb:16,pinned_max_cached_size_mb:16"


def after(**before: str) -> dict[str, str]:
    _pin_exactly(before)
    return before


def test_large_pinned_blocks_are_neither_rounded_nor_cached() -> None:
    """Both: torch 2.13 hands out a cached block by the power of two above its size, so a smaller one than was asked for."""
    assert after() == {"PYTORCH_ALLOC_CONF": _OWN}
    assert after(PYTORCH_ALLOC_CONF=_OWN) == {"PYTORCH_ALLOC_CONF": _OWN}


def test_what_the_user_has_set_stays() -> None:
    segments = "expandable_segments:True"
    assert after(PYTORCH_ALLOC_CONF=segments) == {"PYTORCH_ALLOC_CONF": f"{segments},{_OWN}"}
    assert after(PYTORCH_CUDA_ALLOC_CONF=segments) == {"PYTORCH_CUDA_ALLOC_CONF": f"{segments},{_OWN}"}, (
        "the other name would win"
    )
    own = {"PYTORCH_CUDA_ALLOC_CONF": "pinned_max_round_threshold_mb:4,pinned_max_cached_size_mb:4"}
    assert after(**own) == own
