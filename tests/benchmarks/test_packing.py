"""What `benchmarks.packing` counts."""

import numpy as np
import pytest

from benchmarks.packing import KINDS, Kind, batch_seconds, needed_flops, pairs
from benchmarks.roofline import groups
from learning.layout import Packed, Padded


def test_pairs_of_tokens_that_attention_looks_at() -> None:
    """A prompt of 3 tokens, and completions of which 2 and 0 are computed."""
    prompt = np.zeros(3, np.int32)
    rows = ([prompt, prompt], [np.zeros(3, np.int32), np.zeros(1, np.int32)])
    in_prompt = 1 + 2 + 3
    in_completion = 4 + 5
    assert pairs(rows, None, Packed)[0] == in_prompt + in_completion
    assert pairs(rows, None, Padded)[0] == 2 * (1 + 2 + 3 + 4 + 5)
    assert pairs(rows, 2, Packed)[0] == (1 + 2 + 2) + (2 + 2)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss 20B", "Qwen3.5 9B"])
def test_packed_layers_take_less_time_than_padded_ones(name: str) -> None:
    kind: Kind = KINDS[name]
    rows = groups(4096, prompt=200, completion=100)
    padded, more = batch_seconds(kind, rows, Padded, tokens=16_384)
    packed, fewer = batch_seconds(kind, rows, Packed, tokens=16_384)
    assert fewer < more
    assert 0 < packed < padded
    compiled, _ = batch_seconds(kind, rows, Packed, tokens=16_384, compiled=True)
    assert (compiled < packed) == ("linear_attention" in kind.layers)
    assert needed_flops(kind, rows) > 0
