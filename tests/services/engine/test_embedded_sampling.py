"""Sampling: the right distribution, the right log-probabilities, numbers that depend on seed and position alone."""

import torch

from services.engine.sampling import sample, sample_seed, stream_key, uniforms

ROWS = 20_000


def draw(logits: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(logits)
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
    return sample(logits, torch.full((rows,), temperature), torch.full((rows,), top_p), uniform)


def test_embedded_sampling_follows_the_distribution_also_at_a_temperature() -> None:
    logits = torch.randn(45, generator=torch.Generator().manual_seed(1))
    for temperature in (1.0, 0.6):
        tokens, logprobs = draw(logits.expand(ROWS, -1), temperature)
        wanted = torch.softmax(logits / temperature, -1)
        counted = torch.bincount(tokens, minlength=45) / ROWS
        assert ((counted - wanted).abs() < 5 * (wanted * (1 - wanted) / ROWS).sqrt() + 1e-4).all()
        torch.testing.assert_close(logprobs, wanted.log()[tokens], atol=1e-6, rtol=1e-6)


def test_embedded_sampling_never_draws_what_has_no_probability() -> None:
    logits = torch.full((ROWS, 1000), -torch.inf)
    logits[:, 501] = 0.0
    tokens, logprobs = draw(logits)
    assert (tokens == 501).all()
    assert (logprobs == 0).all()


def test_embedded_sampling_reaches_the_ends_of_the_unit_interval() -> None:
    logits = torch.randn(1, 37, generator=torch.Generator().manual_seed(2))
    options = (torch.tensor([1.0]), torch.tensor([1.0]))
    first, _ = sample(logits, *options, torch.tensor([0.0], dtype=torch.float64))
    last, _ = sample(logits, *options, torch.tensor([1.0 - 2**-53], dtype=torch.float64))
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
    together, _ = sample(logits, temperature, top_p, uniform)
    for i in range(8):
        row = slice(i, i + 1)
        alone, _ = sample(logits[row], temperature[row], top_p[row], uniform[row])
        assert alone.item() == together[i].item()


def test_embedded_sampling_random_numbers_are_uniform_and_a_function_of_key_and_counter() -> None:
    keys = torch.tensor([stream_key(sample_seed(7, index)) for index in range(200)]).repeat_interleave(100)
    counters = torch.arange(100).repeat(200)
    numbers = uniforms(keys, counters)
    assert torch.equal(numbers, uniforms(keys, counters))
    assert len(set(numbers.tolist())) == 20_000
    assert 0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    assert abs(numbers.mean().item() - 0.5) < 0.01
    grid = numbers.view(200, 100)
    assert abs(torch.corrcoef(torch.stack([grid[:-1].flatten(), grid[1:].flatten()]))[0, 1].item()) < 0.03
    assert abs(torch.corrcoef(torch.stack([grid[:, :-1].flatten(), grid[:, 1:].flatten()]))[0, 1].item()) < 0.03
