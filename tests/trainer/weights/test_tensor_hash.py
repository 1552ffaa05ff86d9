"""The checksum of tensors on GPUs, against SGLang's own and a computation word by word."""

from itertools import pairwise

import pytest
import torch

from trainer.weights.tensor_hash import gpu_digest

_BITS = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("size", "dtype", "expected"),
    [
        (1, torch.bfloat16, "9149bf2047a96e36"),
        (3, torch.bfloat16, "ca2c79fa7fbb2b5f"),
        (7, torch.float32, "3e7cad3f6142b0c7"),
        (8192, torch.float32, "d81cc0aca0e3b7b4"),
        (8193, torch.float32, "ad415f12a8d894bd"),
        (100_001, torch.bfloat16, "fcbd6fa0af47d3bf"),
    ],
)
def test_checksums_on_gpus_are_those_of_sglangs_kernel(
    size: int, dtype: torch.dtype, expected: str
) -> None:
    """Recorded from the Triton kernel of SGLang 0.5.21 in Triton's interpreter on a CPU."""
    numbers = (torch.arange(size) * 2_654_435_761 + 12_345) % 65_536
    assert gpu_digest((numbers.float() / 65_536 - 0.5).to(dtype)) == expected


def word_by_word(content: bytes) -> str:
    """Computes the checksum with Python's own integers, which are never cut off."""
    content += bytes(-len(content) % 4)
    tiles: dict[int, list[int]] = {}
    seed = 0x243F6A88
    lanes = ((0x27D4EB2D, seed, 15), (0x165667B1, (seed * 0x9E3779B1 ^ 0xDEADBEEF) & _BITS, 13))
    for place in range(len(content) // 4):
        word = int.from_bytes(content[4 * place : 4 * place + 4], "little")
        sums = tiles.setdefault(place // 8192, [0, 0])
        for lane, (factor, start, turn) in enumerate(lanes):
            turned = (place << turn | place >> (32 - turn)) & _BITS
            sums[lane] += mixed(word ^ ((place * factor + start) & _BITS) ^ turned)
    total = sum(
        mixed(a & _BITS ^ len(content)) << 32 | mixed(b & _BITS ^ len(content))
        for a, b in tiles.values()
    )
    whole = (1 << 64) - 1
    x = total & whole
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & whole
    x = (x ^ x >> 27) * 0x94D049BB133111EB & whole
    return f"{x ^ x >> 31:016x}"


def mixed(x: int) -> int:
    x = (x ^ x >> 16) * 0x85EBCA6B & _BITS
    x = (x ^ x >> 13) * 0xC2B2AE35 & _BITS
    return x ^ x >> 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 4096, 8191, 8193, 20_001])
def test_the_bits_of_every_number_count(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    content = torch.randint(
        0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator
    )
    assert gpu_digest(content.view(dtype)) == word_by_word(content.numpy().tobytes())


def test_tensors_are_hashed_as_one_wherever_they_are_in_memory() -> None:
    numbers = torch.randn(50_001, generator=torch.Generator().manual_seed(0)).bfloat16()
    for cuts in ([0, 6, 8192, 16_390, 50_001], [0, 3, 50_001]):  # 3: ends within a word
        parts = [
            torch.cat([torch.zeros(1).bfloat16(), numbers[start:end]])[1:]  # begins within a word
            for start, end in pairwise(cuts)
        ]
        assert gpu_digest(*parts) == gpu_digest(numbers)


def test_a_checksum_is_the_same_however_many_words_are_mixed_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    whole = gpu_digest(tensor)
    monkeypatch.setattr("trainer.weights.tensor_hash._CHUNK", 3 * 8192)
    assert gpu_digest(tensor) == whole
    assert len({gpu_digest(torch.randn(n)) for n in range(1, 50)}) == 49
