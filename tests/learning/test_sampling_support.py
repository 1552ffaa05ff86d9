"""Log-probabilities over the tokens a sampler kept match a softmax over only those, in value and
gradient."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from common.wire.schemas import Completion, Group, Int32
from learning.sampling_support import Sampled, Support
from trainer.policy import logprobs
from trainer.policy.logprobs import token_scores

VOCABULARY, HIDDEN = 50, 8
NONE: Int32 = np.zeros(0, np.int32)


def rows(rng: np.random.Generator) -> tuple[list[Sampled | None], list[int], list[int]]:
    """Completions with truncated sampling, with a minimum length longer or shorter than they are,
    or neither.

    Also returns lengths and tokens.
    """
    minimum = {1: 7, 4: 2}
    sampled: list[Sampled | None] = []
    lengths, tokens = [5, 3, 4, 1, 6], []
    for number, length in enumerate(lengths):
        own = rng.integers(10, VOCABULARY, length)
        tokens += own.tolist()
        if number in (0, 3):
            lists = [np.unique([token, *rng.integers(0, VOCABULARY, 6)]) for token in own]
            sampled.append(
                Sampled(
                    np.concatenate(lists).astype(np.int32),
                    np.array([*map(len, lists)], np.int32),
                    NONE,
                    0,
                )
            )
        else:
            least = minimum.get(number)
            barred = np.array([1, 2, 3], np.int32)
            sampled.append(None if least is None else Sampled(NONE, NONE, barred, least))
    return sampled, lengths, tokens


def allowed(sampled: list[Sampled | None], lengths: list[int]) -> torch.Tensor:
    """The tokens that each row allows, computed the slow way: [C, V]."""
    found = []
    for row, length in zip(sampled, lengths, strict=True):
        for place in range(length):
            line = torch.ones(VOCABULARY, dtype=torch.bool)
            if row is not None and len(row.kept_counts):
                first = int(row.kept_counts[:place].sum())
                line[:] = False
                line[
                    torch.from_numpy(
                        row.kept_tokens[first : first + row.kept_counts[place]].astype(np.int64)
                    )
                ] = True
            elif row is not None and place < row.min_new_tokens:
                line[torch.from_numpy(row.barred.astype(np.int64))] = False
            found.append(line)
    return torch.stack(found)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk", [512, 4])
def test_scores_over_a_support(
    entropy_gradient: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "_CPU_CHUNK", chunk)
    monkeypatch.setattr(logprobs, "_KEPT_BYTES", 0 if chunk == 4 else 1 << 20)
    rng = np.random.default_rng(1)
    torch.manual_seed(1)
    sampled, lengths, tokens = rows(rng)
    support = Support.of(sampled, lengths)
    linear, hidden = (
        nn.Linear(HIDDEN, VOCABULARY),
        torch.randn(sum(lengths), HIDDEN, requires_grad=True),
    )
    targets, weights = torch.tensor(tokens), torch.randn(sum(lengths))

    free = allowed(sampled, lengths)
    logs = torch.log_softmax((linear(hidden) / 0.7).masked_fill(~free, -torch.inf), -1)
    wanted = logs.gather(1, targets[:, None])[:, 0]
    entropy = -(logs.exp() * logs.masked_fill(~free, 0.0)).sum(-1)
    loss = (wanted * weights).sum() + (entropy.sum() * 0.3 if entropy_gradient else 0)
    gradients = torch.autograd.grad(loss, [hidden, linear.weight])

    found, theirs = token_scores(linear, hidden, targets, 0.7, entropy_gradient, support=support)
    ours = (found * weights).sum() + (theirs.sum() * 0.3 if entropy_gradient else 0)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(theirs, entropy, atol=1e-5, rtol=1e-5)
    for mine, other in zip(
        torch.autograd.grad(ours, [hidden, linear.weight]), gradients, strict=True
    ):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_completions_of_the_whole_vocabulary_have_no_support() -> None:
    completion = Completion(
        token_ids=np.array([5], np.int32),
        logprobs=np.array([-1.0], np.float32),
        text="",
        finish_reason="stop",
        weight_versions=[(0, 0, 1)],
    )
    group = Group(
        id="g",
        prompt_id="p",
        prompt="",
        ground_truth="",
        prompt_token_ids=np.array([1], np.int32),
        completions=[completion],
    )
    assert Sampled.of(group, completion) is None
    assert Support.of([None, None], [3, 1]) is None
    # A minimum without tokens to bar, and tokens to bar without a minimum, exclude nothing.
    barred = np.array([7], np.int32)
    minimum = replace(group, min_new_tokens=2)
    assert Sampled.of(minimum, completion) is None
    assert Sampled.of(replace(group, barred=barred), completion) is None
    found = Sampled.of(replace(minimum, barred=barred), completion)
    assert found is not None
    assert (found.barred.tolist(), found.min_new_tokens) == ([7], 2)
    kept = replace(
        completion,
        kept_tokens=np.array([5, 9], np.int32),
        kept_counts=np.array([2], np.int32),
    )
    found = Sampled.of(group, kept)
    assert found is not None
    assert (found.kept_tokens.tolist(), found.kept_counts.tolist()) == ([5, 9], [2])


def test_the_support_of_some_tokens() -> None:
    """It excludes from their logits what the support of all tokens excludes."""
    rng = np.random.default_rng(2)
    sampled, lengths, _ = rows(rng)
    support = Support.of(sampled, lengths)
    assert support is not None
    logits = torch.randn(sum(lengths), VOCABULARY)
    for seed in range(5):
        chosen = np.flatnonzero(np.random.default_rng(seed).random(len(logits)) < 0.5)
        expected = support.apply(logits.clone(), 0)[chosen]
        some = support.only_for(chosen)
        assert torch.equal(some.apply(logits[chosen].clone(), 0), expected)
        assert torch.equal(some.apply(logits[chosen][2:].clone(), 2), expected[2:])
