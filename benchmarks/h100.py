"""What an H100 SXM reaches, from published measurements: products by their shape, attention by the
length of its rows, and copies.

- Products in bfloat16: the table of XLA's cost model for sm_90 (openxla,
  `matmul_interpolator_data.h`) and 8192 × 8192 × K on an H800 (tilelang, `benchmark/matmul`). A
  product computes tiles of its result, 132 at a time; the last round may be nearly empty, and every
  tile has a cost of its own. `gemm_share` is this with two constants that fit both tables
  (`tests/benchmarks/test_h100.py`).
- Attention: figures 5 and 6 of FlashAttention-3 (arXiv:2407.08608); forward with a causal mask,
  backward without one.
- Copies: 3.0 TB/s of 3.35 for a large copy.
- Transfers among the eight GPUs of a node: 360 GB/s of 450 into each, which is what NCCL's authors
  expect of large gathers (NVIDIA/nccl-tests, issue 326).
"""

import math
from bisect import bisect_left

PEAK = 989e12
"""FLOPs per second, from the data sheet."""
BANDWIDTH = 3.0e12
"""Bytes per second of a large copy."""
LINK = 360e9
"""Bytes per second into a GPU from the others of its node."""
_BEST = 0.826
"""Share of the peak of large products."""
_TILE_COST = 153
"""What starting and storing a tile costs, as terms of its sums."""
_TILES = {(128, 256): 1.0, (128, 128): 0.855}
"""Sizes of tiles that cuBLAS chooses from, and their speed."""
_UNITS = 132
"""Tiles that are computed at a time: the streaming multiprocessors."""
_LEAST_SPLIT = 1024
"""Fewest terms of a sum that is divided among tiles."""
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
_ATTENTION = {
    ("2", 64, False): (180, 229, 262, 284, 295, 299),
    ("2", 128, False): (191, 260, 298, 319, 333, 335),
    ("2", 64, True): (198, 238, 264, 279, 287, 291),
    ("2", 128, True): (214, 260, 291, 310, 318, 322),
    ("3", 64, False): (197, 265, 371, 420, 460, 473),
    ("3", 128, False): (292, 423, 521, 579, 602, 616),
    ("3", 64, True): (272, 363, 422, 453, 472, 474),
    ("3", 128, True): (316, 424, 501, 542, 559, 561),
}
"""TFLOP/s at `_LENGTHS` by FlashAttention's generation, head size, and whether it is the backward
pass."""


def gemm_share(rows: float, columns: float, terms: float) -> float:
    """Returns the share of the GPU's peak FLOP/s that a product [rows, terms] × [terms, columns]
    reaches.
    """
    best = 0.0
    for (height, width), speed in _TILES.items():
        tiles = math.ceil(rows / height) * math.ceil(columns / width)
        split = 1
        while split == 1 or terms / split >= _LEAST_SPLIT:
            rounds = math.ceil(tiles * split / _UNITS)
            filled = tiles * split / (rounds * _UNITS)
            part = terms / split
            best = max(best, speed * filled * part / (part + _TILE_COST))
            split *= 2
    return _BEST * best


def attention_share(generation: str, head_size: int, length: float, backward: bool) -> float:
    """Returns the share of the GPU's peak FLOP/s that attention over rows of `length` tokens
    reaches.
    """
    rates = _ATTENTION[generation, 64 if head_size <= 64 else 128, backward]
    after = bisect_left(_LENGTHS, length)
    if after == 0:
        rate = rates[0] * length / _LENGTHS[0]
    elif after == len(_LENGTHS):
        rate = rates[-1]
    else:
        way = math.log(length / _LENGTHS[after - 1]) / math.log(2)
        rate = rates[after - 1] + way * (rates[after] - rates[after - 1])
    return rate * 1e12 / PEAK
