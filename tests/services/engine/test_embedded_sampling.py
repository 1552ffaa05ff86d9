"""Sampling: the right distribution and log-probabilities, and random numbers that depend only on
seed and position."""

import numpy as np
import pytest
import torch

from common.clients.rollout import sample_seed
from services.engine.kernels import compiled
from services.engine.sampling import (
    FIELDS,
    GREEDY_BELOW,
    _truncate,
    sample,
    stream_keys,
    uniforms,
)

ROWS = 20_000


@pytest.fixture(autouse=True, params=["kernel", "torch"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws with the kernel, and as on a GPU or without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr("services.engine.sampling.compiled", lambda: None)
    elif compiled() is None:
        pytest.skip("no C++ compiler is installed")


def drawn(
    logits: torch.Tensor,
    temperature: torch.Tensor | float,
    top_p: torch.Tensor | float,
    uniform: torch.Tensor | float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns sampled tokens and their log-probabilities."""
    state = torch.zeros(len(FIELDS), len(logits), dtype=torch.float64)
    for field, value in enumerate((temperature, top_p, uniform, torch.inf, 0.0), 2):
        state[field] = value
    plain = bool((state[2] > 0).all() and (state[3] == 1).all())
    tokens, logprobs = sample(logits, state, plain)
    return tokens.long(), logprobs.float()


def draw(
    logits: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return drawn(
        logits,
        temperature,
        top_p,
        torch.rand(len(logits), generator=generator, dtype=torch.float64),
    )


def test_embedded_sampling_follows_the_distribution_also_at_a_temperature() -> None:
    logits = torch.randn(45, generator=torch.Generator().manual_seed(1))
    for temperature in (1.0, 0.6):
        tokens, logprobs = draw(logits.expand(ROWS, -1), temperature)
        wanted = torch.softmax(logits / temperature, -1)
        counted = torch.bincount(tokens, minlength=45) / ROWS
        assert ((counted - wanted).abs() < 5 * (wanted * (1 - wanted) / ROWS).sqrt() + 1e-4).all()
        torch.testing.assert_close(logprobs, wanted.log()[tokens], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("vocabulary", [1, 45, 1024, 1025, 3001])
def test_embedded_sampling_draws_the_token_in_whose_share_the_number_falls(
    vocabulary: int,
) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(400, vocabulary, generator=generator)
    uniform = torch.rand(400, generator=generator, dtype=torch.float64)
    tokens, logprobs = drawn(logits, 1.0, 1.0, uniform)

    exponentials = np.exp(logits.double().numpy())
    shares = exponentials / exponentials.sum(-1, keepdims=True)
    end = shares.cumsum(-1)[np.arange(400), tokens]
    share = shares[np.arange(400), tokens]
    rounding = 1e-6
    assert (end - share - rounding <= uniform.numpy()).all()
    assert (uniform.numpy() <= end + rounding).all()
    np.testing.assert_allclose(logprobs, np.log(share), atol=1e-5)


def test_embedded_sampling_never_draws_an_impossible_token() -> None:
    logits = torch.full((ROWS, 1000), -1e30)
    logits[:, 501] = 0.0
    tokens, logprobs = draw(logits)
    assert (tokens == 501).all()
    assert (logprobs == 0).all()


def test_embedded_sampling_reaches_the_ends_of_the_unit_interval() -> None:
    logits = torch.randn(1, 37, generator=torch.Generator().manual_seed(2))
    first, _ = drawn(logits, 1.0, 1.0, 0.0)
    last, _ = drawn(logits, 1.0, 1.0, 1.0 - 2**-53)
    assert (first.item(), last.item()) == (0, 36)


def test_embedded_sampling_truncates_but_reports_the_full_distribution() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(2000, -1)
    for top_p, allowed in ((1e-6, {0}), (0.7, {0, 1}), (0.9, {0, 1, 2})):
        tokens, logprobs = draw(logits, top_p=top_p)
        assert set(tokens.tolist()) == allowed, top_p
        torch.testing.assert_close(logprobs, logits[0][tokens])


def test_embedded_sampling_greedy_is_the_argmax_with_the_raw_log_softmax() -> None:
    logits = torch.randn(50, 31, generator=torch.Generator().manual_seed(3))
    tokens, logprobs = draw(logits, temperature=0.0)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))


def test_embedded_sampling_rows_do_not_see_each_other() -> None:
    logits = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    uniform = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    temperature = torch.tensor([1.0, 0.5, 0.0, 1.0, 2.0, 1.0, 1.0, 1.0])
    top_p = torch.tensor([1.0, 0.5, 1.0, 0.3, 1.0, 1.0, 0.1, 1.0])
    together, _ = drawn(logits, temperature, top_p, uniform)
    for i in range(8):
        row = slice(i, i + 1)
        alone, _ = drawn(logits[row], temperature[row], top_p[row], uniform[row])
        assert alone.item() == together[i].item()


def test_embedded_sampling_random_numbers_are_uniform_and_a_function_of_key_and_counter() -> None:
    keys = np.repeat(stream_keys([sample_seed(7, index) for index in range(200)]), 100)
    counters = np.tile(np.arange(100), 200)
    numbers = torch.from_numpy(uniforms(keys, counters))
    assert numbers.tolist() == uniforms(keys, counters).tolist()
    assert len(set(numbers.tolist())) == 20_000
    assert 0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    assert abs(numbers.mean().item() - 0.5) < 0.01
    grid = numbers.view(200, 100)
    assert (
        abs(torch.corrcoef(torch.stack([grid[:-1].flatten(), grid[1:].flatten()]))[0, 1].item())
        < 0.03
    )
    assert (
        abs(
            torch.corrcoef(torch.stack([grid[:, :-1].flatten(), grid[:, 1:].flatten()]))[
                0, 1
            ].item()
        )
        < 0.03
    )


def kept_by_hand(probs: list[float], top_p: float, top_k: int, min_p: float) -> set[int]:
    """Applies the definition token by token: keeps the likeliest tokens while all bounds hold."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    found, mass = set(), 0.0
    for place, token in enumerate(order):
        if (mass > top_p and top_p < 1) or place >= top_k or probs[token] < min_p * probs[order[0]]:
            break
        found.add(token)
        mass += probs[token]
    return found


def test_embedded_sampling_keeps_and_draws_what_the_definition_keeps() -> None:
    """Random distributions and bounds; log-probabilities are relative to the kept tokens, without
    barred ones."""
    rng = np.random.default_rng(5)
    bounds = [
        (1.0, 9, 0.0),
        (0.8, 40, 0.0),
        (1.0, 40, 0.2),
        (0.9, 6, 0.05),
        (0.05, 40, 0.0),
        (1.0, 2, 0.0),
    ]
    for _ in range(20):
        logits = torch.tensor(rng.normal(size=40) * 2, dtype=torch.float32)
        barred, temperature = rng.choice(40, 3, replace=False), rng.uniform(0.5, 1.5)
        state = torch.zeros(len(FIELDS) + 3, len(bounds), dtype=torch.float64)
        state[2], state[3], state[5], state[6] = (
            temperature,
            *(torch.tensor(each) for each in zip(*bounds, strict=True)),
        )
        state[4] = torch.tensor(rng.uniform(size=len(bounds)))
        state[7:] = torch.tensor(barred)[:, None]
        state[9, 0] = -1  # a row with fewer barred tokens
        found = sample(logits.expand(len(bounds), -1), state, False, 40)
        for row, (top_p, top_k, min_p) in enumerate(bounds):
            free = logits.double() / temperature
            free[torch.tensor(barred[: 3 - (row == 0)])] = -torch.inf
            probs = torch.softmax(free, -1)
            wanted = kept_by_hand(probs.tolist(), top_p, top_k, min_p)
            token, count = int(found[0, row]), int(found[3, row])
            assert set(found[4 : 4 + count, row].int().tolist()) == wanted
            assert token in wanted
            among = probs[token] / probs[sorted(wanted)].sum()
            assert abs(found[2, row].item() - among.log().item()) < 1e-5
            assert abs(found[1, row].item() - probs[token].log().item()) < 1e-5


def test_embedded_sampling_returns_a_greedy_token_as_the_only_one() -> None:
    state = torch.zeros(len(FIELDS), 2, dtype=torch.float64)
    state[2], state[3], state[4], state[5] = torch.tensor([0.0, 1.0]), 1.0, 0.99, 3
    found = sample(torch.tensor([[0.1, 3.0, 2.0, 1.0]]).expand(2, -1), state, False, 3)
    assert found[[0, 2, 3, 4], 0].tolist() == [1, 0, 1, 1]
    assert found[3, 1] == 3


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, 0.875, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.25, 0.5, 1.0])
def test_embedded_sampling_keeps_tokens_at_a_bound_as_sglang_does(
    top_p: float, min_p: float
) -> None:
    """Sums and products of powers of two are exact."""
    probabilities = [0.5, 0.25, 0.125, 0.125]
    for top_k in (1.0, 2.0, 4.0, np.inf):
        kept, order = _truncate(
            torch.tensor([probabilities]),
            torch.tensor([top_p]),
            torch.tensor([top_k]),
            min_p=torch.tensor([min_p]),
        )
        wanted = [
            (sum(probabilities[:place]) <= top_p or top_p == 1.0)
            and place < top_k
            and probability >= min_p * probabilities[0]
            for place, probability in enumerate(probabilities)
        ]
        assert kept[0].tolist() == wanted
        assert order[0].tolist() == [0, 1, 2, 3]


def test_embedded_sampling_is_greedy_below_a_bound_and_not_at_it() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    _, at_the_bound = draw(logits, GREEDY_BELOW, top_p=0.5)
    _, below = draw(logits, GREEDY_BELOW / 2, top_p=0.5)
    assert at_the_bound.tolist() == [0.0], "of a distribution with one token"
    torch.testing.assert_close(below, logits.log_softmax(-1)[:, 1])
