"""The kernels of `services/engine/kernels.cpp`: against torch in float64, to the last bit beside
other rows, and the engine where they cannot be compiled."""

import random
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from services.engine.engine import Engine
from services.engine.jobs import GenerationJob, SamplingParams
from services.engine.kernels import compiled
from services.engine.model import Model
from tests.support.engines.engines import write_model

needs_compiler = pytest.mark.skipif(compiled() is None, reason="no C++ compiler is installed")
SIZES = [1, 2, 7, 8, 24, 31, 32, 33, 64, 80, 129]
ROUNDING = 3e-6


def random_numbers(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
def test_embedded_kernel_of_norms_equals_torch(size: int) -> None:
    hidden = random_numbers(5, size, seed=size, scale=4)
    weight = random_numbers(size, seed=size + 1)
    found = torch.empty_like(hidden)
    compiled().norm(hidden=hidden, weight=weight, epsilon=1e-5, out=found, rows=5, size=size)
    wanted = nn.functional.rms_norm(hidden.double(), (size,), weight.double(), 1e-5)
    torch.testing.assert_close(found.double(), wanted, atol=ROUNDING, rtol=ROUNDING)


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
def test_embedded_kernel_of_gates_equals_torch_also_where_exponentials_overflow(size: int) -> None:
    both = random_numbers(4, 2 * size, seed=size, scale=4)
    both[0, :size] = torch.tensor([-200.0, 200.0, -88.0, 88.0, 0.0]).repeat(size)[:size]
    found = torch.empty(4, size)
    compiled().gate(both=both, out=found, rows=4, size=size)
    gates, ups = both.double().chunk(2, -1)
    wanted = nn.functional.silu(gates) * ups
    torch.testing.assert_close(found.double(), wanted, atol=ROUNDING, rtol=ROUNDING)


def turned(states: Tensor, angles: Tensor) -> Tensor:
    """Rotates each pair of numbers, as a complex one, by its angle."""
    first, second = states.chunk(2, -1)
    pairs = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), -1)


@needs_compiler
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(2, 1, 32), (4, 4, 6), (6, 2, 34)])
def test_embedded_kernel_of_rotations_turns_pairs_of_queries_and_keys(
    heads: int, kv_heads: int, size: int, normed: bool
) -> None:
    states = random_numbers(5, heads + 2 * kv_heads, size, seed=1)
    positions = torch.tensor([0, 3, 3, 1, 8])
    angles = random_numbers(9, size // 2, seed=2).double()
    sines = torch.cat((-angles.sin(), angles.sin()), -1)
    rotations = torch.stack((angles.cos().repeat(1, 2), sines), 1).float()
    norms = random_numbers(2, size, seed=3)
    before = states.double()

    compiled().rotate(
        states=states,
        positions=positions,
        rotations=rotations,
        query_norm=norms[0] if normed else None,
        key_norm=norms[1] if normed else None,
        epsilon=1e-6,
        tokens=5,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
    )
    queries, keys, values = before.split((heads, kv_heads, kv_heads), 1)
    if normed:
        queries = nn.functional.rms_norm(queries, (size,), norms[0].double(), 1e-6)
        keys = nn.functional.rms_norm(keys, (size,), norms[1].double(), 1e-6)
    rotated = turned(torch.cat((queries, keys), 1), angles[positions][:, None])
    wanted = torch.cat((rotated, values), 1)
    torch.testing.assert_close(states.double(), wanted, atol=ROUNDING, rtol=ROUNDING)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(2, 1, 32), (4, 4, 6), (6, 2, 40), (3, 1, 64), (1, 1, 1)]
)
def test_embedded_kernel_of_attention_sees_the_earlier_tokens_of_the_row(
    heads: int, kv_heads: int, size: int, threads: int
) -> None:
    rows = torch.tensor([2, 0, 2, 3, 0])
    positions = torch.tensor([4, 0, 5, 11, 7])
    states = random_numbers(5, heads + 2 * kv_heads, size, seed=size)
    keys = random_numbers(4, kv_heads, 12, size, seed=4)
    values = random_numbers(4, kv_heads, 12, size, seed=5)
    queries, new_keys, new_values = states.split((heads, kv_heads, kv_heads), 1)
    all_keys = keys.clone()
    all_values = values.clone()
    all_keys[rows, :, positions] = new_keys
    all_values[rows, :, positions] = new_values

    found = torch.empty(5, heads, size)
    compiled().attend(
        states=states,
        token_rows=rows,
        positions=positions,
        keys=keys,
        values=values,
        out=found,
        tokens=5,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        columns=12,
        scale=0.3,
        threads=threads,
    )
    assert torch.equal(keys, all_keys)
    assert torch.equal(values, all_values)
    for token, (row, position) in enumerate(zip(rows, positions, strict=True)):
        wanted = nn.functional.scaled_dot_product_attention(
            queries[token, :, None].double(),
            all_keys[row, :, : position + 1].double(),
            all_values[row, :, : position + 1].double(),
            scale=0.3,
            enable_gqa=True,
        )
        torch.testing.assert_close(
            found[token].double(), wanted[:, 0], atol=ROUNDING, rtol=ROUNDING
        )


def drawn(
    logits: Tensor,
    *,
    temperature: Tensor,
    uniform: Tensor,
    allowed: Tensor | None = None,
    threads: int = 1,
) -> Tensor:
    found = torch.empty(2, len(logits), dtype=torch.float64)
    compiled().draw(
        logits=logits,
        temperatures=temperature,
        uniforms=uniform,
        allowed=allowed,
        out=found,
        rows=len(logits),
        size=logits.shape[1],
        threads=threads,
    )
    return found


@needs_compiler
@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 401, 5000])
def test_embedded_kernel_of_draws_inverts_the_distribution(
    size: int, threads: int, limited: bool
) -> None:
    generator = torch.Generator().manual_seed(size)
    rows = 200
    logits = random_numbers(rows, size, seed=size, scale=3)
    temperature = 0.5 + torch.rand(rows, generator=generator, dtype=torch.float64)
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
    uniform[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    allowed = None
    if limited:
        allowed = torch.rand(rows, size, generator=generator) < 0.3
        allowed[:, size // 2] = True
    tokens, logprobs = drawn(
        logits, temperature=temperature, uniform=uniform, allowed=allowed, threads=threads
    )

    logs = (logits.double() / temperature[:, None]).log_softmax(-1)
    weights = logs.exp() if allowed is None else logs.exp() * allowed
    weights /= weights.sum(-1, keepdim=True)
    chosen = tokens.long()[:, None]
    share = weights.gather(1, chosen)[:, 0]
    end = weights.cumsum(-1).gather(1, chosen)[:, 0]
    assert (share > 0).all()
    assert (end - share - 1e-6 <= uniform).all()
    assert (uniform <= end + 1e-6).all()
    torch.testing.assert_close(logprobs, logs.gather(1, chosen)[:, 0], atol=1e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
def test_embedded_kernels_do_not_depend_on_where_a_row_lies(size: int) -> None:
    """Compilers may begin a sum elsewhere in a row that lies elsewhere."""
    rng = random.Random(size)
    row = random_numbers(size, seed=size, scale=3)
    number = torch.tensor([rng.random()], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    found: set[tuple[float, ...]] = set()
    for offset in range(16):
        moved = torch.empty(size + 16)[offset : offset + size]
        moved.copy_(row)
        normed = torch.empty(size + 16)[15 - offset :][:size]
        compiled().norm(hidden=moved, weight=row, epsilon=1e-6, out=normed, rows=1, size=size)
        gated = torch.empty(size // 2)
        half = size // 2
        compiled().gate(both=moved[: 2 * half], out=gated, rows=1, size=half)
        token = drawn(moved[None], temperature=one, uniform=number)
        found.add((*normed.tolist(), *gated.tolist(), *token.flatten().tolist()))
    assert len(found) == 1


@pytest.fixture(name="fresh")
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes the kernels compile again, with an empty cache; gives the cache's directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled.cache_clear()
    yield tmp_path / "cache"
    compiled.cache_clear()


def compiler(path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(path))


@needs_compiler
def test_embedded_kernels_are_compiled_once(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    compiler(tmp_path / "cxx", f'echo called >> "{calls}"\nexec c++ "$@"', monkeypatch)
    for _ in range(2):
        assert compiled() is not None
        compiled.cache_clear()
    assert calls.read_text() == "called\n"
    assert [path.suffix for path in (fresh / "rlhf-math").iterdir()] == [".so"]


@needs_compiler
def test_embedded_kernels_need_no_cache(fresh: Path) -> None:
    fresh.write_text("a file where the directory should be")
    assert compiled() is not None


@pytest.mark.parametrize("script", [None, "echo 'no such instruction' >&2; exit 1"])
def test_embedded_engine_without_a_compiler_runs_the_model_of_transformers(
    script: str | None,
    fresh: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if script is None:
        monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    else:
        compiler(tmp_path / "cxx", script, monkeypatch)
    assert not fresh.exists()
    directory = write_model(tmp_path / "model", seed=0)
    model = Model(directory, 64)
    assert compiled() is None
    assert [record.name for record in caplog.records] == ["services.engine.kernels"]

    engine = Engine(model, max_running=4)
    prompt = [5, 17, 40]
    job = GenerationJob("a", prompt, SamplingParams(max_new_tokens=8, temperature=0.0))
    engine.start()
    try:
        engine.submit([job])
        tokens = job.done.result(60)[0].tokens
    finally:
        engine.stop()
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits = plain(torch.tensor([prompt + tokens])).logits[0]
    assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
