"""Prioritised reuse: probabilities calculated by hand, and frequencies counted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from common.clients.replay import ReplayClient
from common.errors import ServiceError
from common.wire.schemas import SampleRequest, TakeRequest
from services.replay.sampling import (
    Float64,
    draw,
    draw_by_reward,
    importance_weights,
    inclusion,
    probabilities,
)
from tests.support.batches.replay_groups import MakeGroup


def array(*numbers: float) -> Float64:
    return np.array(numbers, np.float64)


@pytest.mark.parametrize(
    ("priorities", "exponent", "expected"),
    [
        (array(1, 2, 3, 4), 1.0, array(0.1, 0.2, 0.3, 0.4)),
        (array(1, 4, 9), 0.5, array(1 / 6, 2 / 6, 3 / 6)),
        (array(1, 2, 5), 0.0, array(1 / 3, 1 / 3, 1 / 3)),
        (array(0, 2, 2), 0.6, array(0, 0.5, 0.5)),
        (array(0, 0), 0.6, array(0, 0)),
        (array(0, 0), 0.0, array(0.5, 0.5)),
        (array(1e300, 1e300), 3.0, array(0.5, 0.5)),
        (array(), 0.6, array()),
    ],
)
def test_probabilities_by_hand(priorities: Float64, exponent: float, expected: Float64) -> None:
    np.testing.assert_allclose(probabilities(priorities, exponent), expected, rtol=1e-12)


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1.0, 1e300])
def test_probabilities_do_not_depend_on_the_unit(scale: float) -> None:
    found = probabilities(np.array([1.0, 3.0, 0.0]) * scale, 2.0)
    np.testing.assert_allclose(found, [0.1, 0.9, 0.0])


@pytest.mark.parametrize(
    ("chances", "count", "expected"),
    [
        (array(0.1, 0.2, 0.3, 0.4), 2, array(0.2, 0.4, 0.6, 0.8)),  # k·P(i)
        (
            array(0.1, 0.1, 0.8),
            2,
            array(0.5, 0.5, 1),
        ),  # the third is certain; the other two share one place
        (
            array(0.05, 0.05, 0.1, 0.8),
            3,
            array(0.5, 0.5, 1, 1),
        ),  # they become certain one after the other
        (array(0.5, 0.5, 0), 3, array(1, 1, 0)),  # at most as many as exist
        (array(), 3, array()),
    ],
)
def test_inclusion_by_hand(chances: Float64, count: int, expected: Float64) -> None:
    np.testing.assert_allclose(inclusion(chances, count), expected, rtol=1e-12)


def test_importance_weights_by_hand() -> None:
    # P = 0.1, 0.2, 0.3, 0.4 of N = 4: 1 / (N·P), whose mean over draws, Σ P / (N·P), is 1
    included, everyone = inclusion(array(0.1, 0.2, 0.3, 0.4), 2), np.arange(4)
    np.testing.assert_allclose(
        importance_weights(included, everyone, 1.0), [2.5, 1.25, 5 / 6, 0.625], rtol=1e-12
    )
    # P^-0.5 = 3.1623, 2.2361, 1.8257, 1.5811 over Σ P^0.5 = 1.9436
    np.testing.assert_allclose(
        importance_weights(included, everyone, 0.5), [1.62701, 1.15047, 0.93935, 0.81350], rtol=1e-5
    )
    np.testing.assert_allclose(importance_weights(included, everyone, 0.0), [1, 1, 1, 1])
    np.testing.assert_allclose(importance_weights(included, np.array([3, 1]), 1.0), [0.625, 1.25])
    np.testing.assert_allclose(importance_weights(array(1, 0, 1), np.array([2]), 0.7), [1])


@pytest.mark.parametrize("lowest", [1e-3, 1e-9, 1e-300, 5e-324, 0.0])
@pytest.mark.parametrize("exponent", [0.4, 0.7, 1.0])
def test_one_group_of_low_priority_takes_no_weight_from_the_others(
    lowest: float, exponent: float
) -> None:
    """Dividing by the buffer's largest weight gave the others a mean of 0.0185 (exponent 1, one
    such group in 40)."""
    priorities = np.append(np.random.default_rng(0).uniform(0.6, 1.0, 39), lowest)
    included = inclusion(probabilities(priorities, 0.6), 4)
    weights = importance_weights(included, np.arange(39), exponent)
    assert weights.min() > 0.8
    assert weights.mean() == pytest.approx(1, abs=0.04)


@given(
    arrays(np.float64, st.integers(1, 60), elements=st.floats(1e-3, 1e3)),
    st.integers(1, 80),
    st.floats(0, 1),
)
def test_weights_are_one_on_average(priorities: Float64, count: int, exponent: float) -> None:
    included = inclusion(probabilities(priorities, 0.6), count)
    weights = importance_weights(included, np.arange(len(priorities)), exponent)
    assert (included * weights).sum() / included.sum() == pytest.approx(1)


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float64, st.integers(1, 60), elements=st.floats(0, 1e6)),
    st.integers(1, 80),
    st.floats(0, 2),
    st.integers(0, 2**32),
)
def test_a_sample_is_of_the_right_size_without_repetition(
    priorities: Float64, count: int, exponent: float, seed: int
) -> None:
    chances = probabilities(priorities, exponent)
    included = inclusion(chances, count)
    possible = int((chances > 0).sum())
    assert included.sum() == pytest.approx(min(count, possible))
    assert (included <= 1).all()
    chosen = draw(included, np.random.default_rng(seed))
    assert len(set(chosen.tolist())) == len(chosen) == min(count, possible)
    assert (chances[chosen] > 0).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_frequencies_are_the_inclusion_chances(count: int) -> None:
    included = inclusion(probabilities(array(0.5, 1, 2, 3, 5), 0.6), count)
    rng, rounds = np.random.default_rng(1), 20_000
    drawn = np.zeros(5)
    for _ in range(rounds):
        drawn[draw(included, rng)] += 1
    expected = included * rounds
    uncertain = included < 1
    assert (drawn[~uncertain] == rounds).all()
    deviations = (drawn - expected)[uncertain] / np.sqrt(expected * (1 - included))[uncertain]
    assert (np.abs(deviations) < 4.5).all(), deviations


def test_any_two_groups_may_be_drawn_together_and_in_any_order() -> None:
    """Evenly spaced points would never hit neighbours, so the groups are shuffled first."""
    included = inclusion(probabilities(array(1, 1, 1, 1, 1, 1), 0.6), 2)
    rng = np.random.default_rng(0)
    pairs = {tuple(draw(included, rng).tolist()) for _ in range(1_000)}
    assert pairs == {(i, j) for i in range(6) for j in range(6) if i != j}


def test_weighted_mean_of_samples_is_the_mean_of_all() -> None:
    """With β = 1 the weights make a prioritised sample an unbiased estimate of the uniform mean."""
    values = array(3, -1, 4, 1, -5, 9)
    included = inclusion(probabilities(array(1, 2, 3, 4, 5, 40), 1.0), 3)  # the last is certain
    rng = np.random.default_rng(0)
    sums = np.zeros(2)
    for _ in range(20_000):
        chosen = draw(included, rng)
        weights = importance_weights(included, chosen, 1.0)
        sums += (weights * values[chosen]).mean(), weights.mean()
    assert sums / 20_000 == pytest.approx([values.mean(), 1], abs=0.05)


def test_a_few_of_many_completions_are_drawn_in_proportion_to_their_weights() -> None:
    """Weights rise from 0.1 at the lowest reward to 1.1 at the highest: 0.6 in the middle.

    One completion has the lowest reward, the others alternate. Of 30,000 draws a share of 1.1 / 1.7
    should have the highest reward; its standard error is 0.0028, and the bound is 4.5 of these.
    """
    rewards = np.where(np.arange(20_000) % 2, 1.0, 0.5).astype(np.float32)
    rewards[0] = 0.0
    rng = np.random.default_rng(0)
    rounds = 300
    count = 100
    highest = 0
    for _ in range(rounds):
        slots = draw_by_reward(rewards, count, prioritized=True, rng=rng)
        assert len(set(slots.tolist())) == count
        highest += int((rewards[slots] == 1.0).sum())

    share = 1.1 / 1.7
    draws = rounds * count
    standard_error = (share * (1 - share) / draws) ** 0.5
    assert highest / draws == pytest.approx(share, abs=4.5 * standard_error)


async def consume(client: ReplayClient, make_group: MakeGroup, count: int) -> None:
    """Stores and consumes `count` groups g0, g1, … of versions 0, 1, …"""
    await client.add([make_group(f"g{i}", version=i) for i in range(count)])
    taken = await client.take(TakeRequest(count=count, request_id="all"))
    await client.ack([group.id for group in taken.groups])


def request(count: int, **more: float) -> SampleRequest:
    return SampleRequest.model_validate({"count": count, **more})


async def test_sampling_over_http_by_the_numbers(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    await consume(client, make_group, 4)
    await client.set_priorities({"g0": 1, "g1": 2, "g2": 3, "g3": 4, "nobody": 9})
    expected = {"g0": 2.5, "g1": 1.25, "g2": 5 / 6, "g3": 0.625}
    seen = set()
    for seed in range(30):
        sampled = await client.sample(
            request(2, priority_exponent=1, importance_exponent=1, seed=seed)
        )
        assert len({group.id for group in sampled.groups}) == 2
        for group, weight in zip(sampled.groups, sampled.weights, strict=True):
            assert weight == pytest.approx(expected[group.id], rel=1e-6)
            seen.add(group.id)
    assert seen == set(expected)


async def test_one_seed_draws_the_same_groups(client: ReplayClient, make_group: MakeGroup) -> None:
    await consume(client, make_group, 20)
    draws = [
        [group.id for group in (await client.sample(request(5, seed=seed))).groups]
        for seed in (3, 3, 4)
    ]
    assert draws[0] == draws[1] != draws[2]


async def test_only_eligible_groups_are_drawn_and_never_too_many(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    assert (await client.sample(request(3))).groups == []
    await consume(client, make_group, 4)
    await client.add([make_group("fresh", version=9)])
    for _ in range(2):
        sampled = await client.sample(request(9, min_version=2, max_times_sampled=2))
        assert {group.id for group in sampled.groups} == {"g2", "g3"}
        assert sampled.weights.tolist() == [1, 1]
    assert (await client.sample(request(9, min_version=2, max_times_sampled=2))).groups == []
    assert len((await client.sample(request(9, max_times_sampled=2))).groups) == 2


async def test_new_groups_get_the_largest_priority_seen(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    await consume(client, make_group, 1)
    await client.set_priorities({"g0": 50.0})
    await client.set_priorities({"g0": 3.0})
    await client.add([make_group("new"), make_group("rated")])
    await client.set_priorities({"rated": 0.5})  # rated by the trainer before it is acknowledged
    await client.take(TakeRequest(count=2, request_id="r"))
    await client.ack(["new", "rated"])
    listed = {
        item["id"]: item["priority"]
        for item in (await client.request("GET", "/groups")).json()["groups"]
    }
    assert listed == {"g0": 3.0, "new": 50.0, "rated": 0.5}


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ('{"ids":["g0"],"priorities":[NaN]}', "neither NaN nor Infinity"),
        ('{"ids":["g0"],"priorities":[Infinity]}', "neither NaN nor Infinity"),
        ('{"ids":["g0"],"priorities":[-1]}', "priorities"),
        ('{"ids":["g0"],"priorities":[1,2]}', "priorities"),
        ('{"ids":["g0"],"priorities":["high"]}', "priorities"),
        ('{"ids":[],"priorities":[]}', "ids"),
        ('{"ids":["\\ud800"],"priorities":[1]}', "surrogate"),
    ],
)
async def test_bad_priorities_are_refused(
    client: ReplayClient, make_group: MakeGroup, body: str, names: str
) -> None:
    await consume(client, make_group, 1)
    with pytest.raises(ServiceError) as error:
        await client.request(
            "POST", "/groups/priorities", content=body, headers={"content-type": "application/json"}
        )
    assert error.value.status == 422
    assert names in str(error.value)
    assert len((await client.sample(request(1))).groups) == 1
