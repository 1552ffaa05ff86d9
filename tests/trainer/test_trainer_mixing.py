"""Right answers of the past in groups that failed: which ones, where, and what must stay as it was."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.algorithm import AlgorithmSection
from common.config import Config
from common.schemas import Group
from common.wire import encode_groups
from tests.trainer.groups import make_group
from trainer.algorithms.batch import Batch
from trainer.algorithms.compute_advantages import weigh
from trainer.rollouts.collector import pass_rate
from trainer.rollouts.mixing import failed_prompts, mix_successes, mixed_in


def group_of(prompt_id: str, rewards: list[float], name: str = "", version: int = 0) -> Group:
    """Right where the reward is above 0; the text of completion i is `name-i`; the prompt's tokens follow from its id."""
    group = make_group(np.random.default_rng(0), rewards, version=version)
    group.id = name = name or prompt_id
    group.prompt_id, group.prompt_token_ids = prompt_id, np.frombuffer(prompt_id.encode(), np.uint8).astype(np.int32)
    for i, completion in enumerate(group.completions):
        completion.text = f"{name}-{i}"
    return group


def texts(group: Group) -> list[str]:
    return [completion.text for completion in group.completions]


def test_what_is_mixed_in_does_not_count_as_solved() -> None:
    failed = group_of("p", [0, 0, 0, 0])
    assert pass_rate(group_of("p", [1, 0, 0, 1, 0])) == 0.4
    assert pass_rate(mix_successes([failed], [group_of("p", [1, 1], "old")], 2)[0]) == 0


def test_the_last_answers_of_a_failed_group_are_replaced() -> None:
    failed, solved = group_of("p", [0, 0, 0, 0], "failed", version=9), group_of("q", [0, 1], "solved", version=9)
    failed.metadata = {"kind": "sum"}
    before = encode_groups([failed, solved])
    new, old = group_of("p", [1, 0, 1], "new", version=7), group_of("p", [1, 1], "old", version=5)
    other = group_of("q", [1], "other")

    mixed = mix_successes([failed, solved], [other, new, old], 3)

    assert [mixed_in(group) for group in mixed] == [3, 0]
    assert mixed[1] is solved
    assert texts(mixed[0]) == ["failed-0", "new-0", "new-2", "old-0"]  # the wrong answer of `new` is passed over
    assert (mixed[0].id, mixed[0].prompt_id, mixed[0].metadata) == ("failed", "p", {"kind": "sum", "mixed": 3})
    assert encode_groups([failed, solved]) == before
    # What corrects them: who sampled them, and how likely that was.
    for got, stored in zip(mixed[0].completions[1:], [*new.completions[::2], old.completions[0]], strict=True):
        assert got.weight_versions == stored.weight_versions
        np.testing.assert_array_equal(got.logprobs, stored.logprobs)
        np.testing.assert_array_equal(got.token_ids, stored.token_ids)


def test_a_failed_group_gets_an_advantage() -> None:
    failed = group_of("p", [0, 0, 0, 0])
    (mixed,) = mix_successes([failed], [group_of("p", [1], "past")], 1)
    batches = [Batch.of([group], [1.0], Config()) for group in (failed, mixed)]
    for batch in batches:
        weigh(batch, AlgorithmSection(), 64, kl_coef=0.0)
    assert [float(row[0]) for row in batches[0].advantages] == [0, 0, 0, 0]
    # rewards 0, 0, 0, 1: mean ¼, unbiased deviation ½
    assert [float(row[0]) for row in batches[1].advantages] == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-5)


@pytest.mark.parametrize(
    ("size", "available", "count", "expected"),
    [
        (4, 5, 1, 1),
        (4, 5, 3, 3),
        (4, 2, 3, 2),
        (4, 5, 9, 3),  # one of its own stays
        (1, 5, 1, 0),
        (4, 0, 2, 0),
        (4, 5, 0, 0),
    ],
)
def test_how_many(size: int, available: int, count: int, expected: int) -> None:
    failed, successes = group_of("p", [0] * size), [group_of("p", [1], f"s{i}") for i in range(available)]
    (mixed,) = mix_successes([failed], successes, count)
    assert mixed_in(mixed) == expected
    assert texts(mixed) == [f"p-{i}" for i in range(size - expected)] + [f"s{i}-0" for i in range(expected)]
    assert (mixed is failed) == (expected == 0)


def test_trap_successes_of_other_prompt_tokens_are_passed_over() -> None:
    """Another system prompt or tokenizer asks another question: these log-probabilities say nothing here."""
    failed, other, longer, same = (group_of("p", [0, 0], name) for name in ("failed", "other", "longer", "same"))
    for success in (other, longer, same):
        success.completions[1].correct, success.completions[1].reward = True, 1.0
    other.prompt_token_ids = other.prompt_token_ids + 1
    longer.prompt_token_ids = np.append(longer.prompt_token_ids, np.int32(3))
    (mixed,) = mix_successes([failed], [other, longer, same], 1)
    assert texts(mixed) == ["failed-0", "same-1"]
    assert mix_successes([failed], [other, longer], 1) == [failed]


def test_groups_of_one_prompt_get_the_same_successes() -> None:
    groups = [group_of("p", [0, 0], name) for name in "ab"]
    mixed = mix_successes(groups, [group_of("p", [1, 1], "s")], 1)
    assert [texts(group) for group in mixed] == [["a-0", "s-0"], ["b-0", "s-0"]]


def test_failed_is_by_right_answers_whatever_the_reward() -> None:
    rewarded, solved = group_of("p", [0.5, 0.5]), group_of("q", [-1, -1])
    for completion in rewarded.completions:
        completion.correct = False
    solved.completions[0].correct = True
    groups = [rewarded, solved, group_of("r", [0]), group_of("p", [0]), group_of("s", [1])]
    assert failed_prompts(groups) == ["p", "r"]
    assert failed_prompts([]) == []


prompts = st.sampled_from(["a", "b", "c"])
batches = st.lists(st.tuples(prompts, st.lists(st.booleans(), min_size=1, max_size=6)), max_size=6)


@given(batches, batches, st.integers(0, 8))
def test_properties(fresh: list[tuple[str, list[bool]]], past: list[tuple[str, list[bool]]], count: int) -> None:
    groups = [group_of(prompt, [float(right) for right in answers], f"g{i}") for i, (prompt, answers) in enumerate(fresh)]
    successes = [group_of(prompt, [float(right) for right in answers], f"s{i}") for i, (prompt, answers) in enumerate(past)]
    before = encode_groups(copy.deepcopy(groups))
    mixed = mix_successes(groups, successes, count)
    assert encode_groups(groups) == before
    assert [group.id for group in mixed] == [group.id for group in groups]
    for group, result in zip(groups, mixed, strict=True):
        assert len(result.completions) == len(group.completions)
        if group.prompt_id not in failed_prompts([group]):
            assert result is group
        own = [completion for completion in result.completions if completion.text.startswith("g")]
        others = [completion for completion in result.completions if not completion.text.startswith("g")]
        assert own == group.completions[: len(own)]
        assert len(own) > 0
        available = {id(each): each for past in successes if past.prompt_id == group.prompt_id for each in past.completions}
        assert all(id(completion) in available and completion.correct for completion in others)
        assert len(others) <= count
        assert mixed_in(result) == len(others)
