"""The speeds of the roofline against what was published for an H100."""

import pytest

from benchmarks.h100 import PEAK, attention_share, gemm_share

_START_S = 3e-6
"""Seconds between two kernels, which the published products include."""
_PRODUCTS = [
    (4096, 2048, 4096, 764),
    (512, 4096, 4096, 653),
    (4096, 4096, 1024, 681),
    (2048, 1024, 4096, 659),
    (2048, 4096, 2048, 717),
    (8192, 8192, 1024, 628),
    (8192, 8192, 2048, 705),
    (8192, 8192, 4096, 736),
    (8192, 8192, 8192, 758),
    (8192, 8192, 16_384, 766),
]
"""Rows, columns, terms and TFLOP/s: XLA's table, and tilelang's on an H800."""


@pytest.mark.parametrize(("rows", "columns", "terms", "published"), _PRODUCTS)
def test_products_take_what_was_measured(
    rows: int, columns: int, terms: int, published: float
) -> None:
    flops = 2 * rows * columns * terms
    seconds = flops / (gemm_share(rows, columns, terms) * PEAK) + _START_S
    assert flops / seconds / 1e12 == pytest.approx(published, rel=0.1)


def test_a_nearly_empty_round_of_tiles_costs_a_whole_one() -> None:
    """133 tiles of 128 × 256 on 132 units, with sums that are too short to be divided."""
    full = gemm_share(128 * 132, 256, 1024)
    assert gemm_share(128 * 133, 256, 1024) < 0.9 * full


def test_attention_between_the_published_lengths() -> None:
    assert attention_share("2", 128, 4096, backward=False) * PEAK == pytest.approx(319e12)
    assert attention_share("3", 64, 100_000, backward=True) * PEAK == pytest.approx(474e12)
    between = attention_share("2", 64, 3000, backward=True) * PEAK
    assert 264e12 < between < 279e12
    short = attention_share("2", 128, 256, backward=False) * PEAK
    assert short == pytest.approx(191e12 / 2)
