"""Where two sequences differ first, and which recorded tokens a version sampled."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer.audit.comparison import first_difference
from trainer.audit.completions import Completions
from trainer.audit.engine import Request


@pytest.mark.parametrize("seed", range(30))
def test_the_first_difference_is_where_one_sequence_goes_on_or_apart(seed: int) -> None:
    draws = random.Random(seed)
    one = [draws.randrange(2) for _ in range(draws.randrange(5))]
    other = [draws.randrange(2) for _ in range(draws.randrange(5))]
    equal = 0
    while equal < min(len(one), len(other)) and one[equal] == other[equal]:
        equal += 1
    assert first_difference(one, other) == (None if one == other else equal)
    assert first_difference(one, one) is None
    assert first_difference(one, [*one, 1]) == first_difference([*one, 1], one) == len(one)


@pytest.mark.parametrize("seed", range(30))
def test_the_tokens_that_a_version_sampled_by_request(seed: int) -> None:
    """A token belongs to a request and to a version; each is compared once."""
    draws = random.Random(seed)
    length = draws.randrange(2, 12)
    versions = sorted(draws.choice([3, 4]) for _ in range(length))
    ends = [at + 1 for at in range(length) if at + 1 == length or versions[at] != versions[at + 1]]
    spans = [(versions[end - 1], begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    completion = SimpleNamespace(
        token_ids=np.arange(100, 100 + length),
        logprobs=np.arange(length, dtype=np.float32),
        weight_versions=spans,
    )
    cut = draws.randrange(1, length)
    requests = [
        Request(row=0, prompt=[1], seed=seed, start=begin, end=end)
        for begin, end in ((0, cut), (cut, length))
    ]
    replay: Any = SimpleNamespace(
        recorded=SimpleNamespace(completions=[completion]), requests=requests
    )
    for version in (3, 4):
        found = Completions._spans(replay, version)
        owned = [
            (span.request.start, span.start + at, token, float(span.logprobs[at]))
            for span in found
            for at, token in enumerate(span.tokens)
        ]
        assert owned == [
            (0 if at < cut else cut, at, 100 + at, float(at))
            for at in range(length)
            if versions[at] == version
        ]
        for span in found:
            assert span.earlier == list(range(100 + span.request.start, 100 + span.start))
