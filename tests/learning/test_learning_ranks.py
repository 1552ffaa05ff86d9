"""What a rank configures in torch, and which settings of the user it keeps."""

from learning.ranks import _pin_exactly

_OWN = "pinned_max_round_threshold_mb:16,pinned_max_cached_size_mb:16"


def after(**before: str) -> dict[str, str]:
    _pin_exactly(before)
    return before


def test_large_pinned_blocks_are_neither_rounded_nor_cached() -> None:
    """Both matter: torch 2.13 picks a cached block by the next power of two, so it may be too small for the request."""
    assert after() == {"PYTORCH_ALLOC_CONF": _OWN}
    assert after(PYTORCH_ALLOC_CONF=_OWN) == {"PYTORCH_ALLOC_CONF": _OWN}


def test_settings_of_the_user_are_kept() -> None:
    segments = "expandable_segments:True"
    assert after(PYTORCH_ALLOC_CONF=segments) == {"PYTORCH_ALLOC_CONF": f"{segments},{_OWN}"}
    assert after(PYTORCH_CUDA_ALLOC_CONF=segments) == {"PYTORCH_CUDA_ALLOC_CONF": f"{segments},{_OWN}"}, (
        "the other name would win"
    )
    own = {"PYTORCH_CUDA_ALLOC_CONF": "pinned_max_round_threshold_mb:4,pinned_max_cached_size_mb:4"}
    assert after(**own) == own
