"""Right answers of the past, by prompt: what may be mixed into groups that failed entirely."""

import json

import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from common import wire
from common.clients import ReplayClient
from common.schemas import Group, TakeRequest
from common.sections import ReplaySection
from services.replay.buffer import pack_group, right_answers, unpack_groups
from services.replay.database import Database
from tests.replay.conftest import MakeGroup


async def consume(client: ReplayClient, *groups: Group) -> None:
    """Adds groups and acknowledges them in this order."""
    await client.add(list(groups))
    await client.take(TakeRequest(count=len(groups), request_id=groups[0].id))
    await client.ack([group.id for group in groups])


def told(groups: list[Group]) -> list[tuple[str, list[str]]]:
    """(id, texts of the completions) of each group."""
    return [(group.id, [completion.text for completion in group.completions]) for group in groups]


async def test_only_right_completions_as_they_were_sampled(client: ReplayClient, make_group: MakeGroup) -> None:
    group = make_group("a", version=3, position=7, rewards=(0.0, 1.0, -1.0, 0.5), tokens=5)
    group.metadata = {"levels": [1, {"x": 2.5}]}
    await consume(client, group)
    (found,) = await client.successes(["p1"], 9, 0)
    assert told([found]) == [("a", ["answer 1", "answer 3"])]
    assert (found.prompt_id, found.ground_truth, found.position, found.metadata) == ("p1", "2", 7, group.metadata)
    np.testing.assert_array_equal(found.prompt_token_ids, group.prompt_token_ids)
    for got, stored in zip(found.completions, (group.completions[1], group.completions[3]), strict=True):
        assert got.correct
        assert (got.reward, got.weight_versions) == (stored.reward, [(3, 0, 5)])
        np.testing.assert_array_equal(got.token_ids, stored.token_ids)
        np.testing.assert_array_equal(got.logprobs, stored.logprobs)


async def test_only_groups_that_were_trained_on(client: ReplayClient, make_group: MakeGroup) -> None:
    await client.add([make_group("consumed"), make_group("leased", position=1), make_group("fresh", position=2)])
    await client.take(TakeRequest(count=2, request_id="r"))
    assert await client.successes(["p1"], 9, 0) == []
    await client.ack(["consumed"])
    assert [group.id for group in await client.successes(["p1"], 9, 0)] == ["consumed"]


async def test_right_is_what_was_graded_so_whatever_the_reward(client: ReplayClient, make_group: MakeGroup) -> None:
    group = make_group("a", rewards=(0.9, -0.5))
    group.completions[0].correct, group.completions[1].correct = False, True
    await consume(client, group)
    assert told(await client.successes(["p1"], 9, 0)) == [("a", ["answer 1"])]


async def test_newest_first_until_there_are_enough(client: ReplayClient, make_group: MakeGroup) -> None:
    await consume(
        client,
        make_group("old", version=5, rewards=(1.0, 1.0, 1.0)),
        make_group("wrong", version=5, rewards=(0.0, 0.0)),
        make_group("new", version=2, rewards=(1.0, 0.0, 1.0)),  # of older weights, but trained on last
    )
    everything = [("new", ["answer 0", "answer 2"]), ("old", ["answer 0", "answer 1", "answer 2"])]
    assert told(await client.successes(["p1"], 1024, 0)) == everything
    assert told(await client.successes(["p1"], 5, 0)) == everything
    assert told(await client.successes(["p1"], 3, 0)) == [everything[0], ("old", ["answer 0"])]
    assert told(await client.successes(["p1"], 2, 0)) == everything[:1]
    assert told(await client.successes(["p1"], 1, 0)) == [("new", ["answer 0"])]


async def test_min_version_is_of_the_whole_group(client: ReplayClient, make_group: MakeGroup) -> None:
    mixed = make_group("mixed", version=4)
    mixed.completions[0].weight_versions = [(2, 0, 3)]  # the wrong one was sampled by older weights
    await consume(client, mixed, make_group("b", version=3))
    ids = {version: [group.id for group in await client.successes(["p1"], 9, version)] for version in range(5)}
    assert ids == {0: ["b", "mixed"], 1: ["b", "mixed"], 2: ["b", "mixed"], 3: ["b"], 4: []}


async def test_prompts_are_told_apart_and_unknown_ones_absent(client: ReplayClient, make_group: MakeGroup) -> None:
    await consume(
        client,
        make_group("a", prompt_id="é/1"),
        make_group("b", prompt_id="p2", rewards=(1.0, 1.0)),
        make_group("c", prompt_id="failed", rewards=(0.0, 0.0)),
        make_group("d", prompt_id=""),
    )
    asked = ["p2", "nobody", "é/1", "failed", "p2", "", "P2"]
    assert told(await client.successes(asked, 1, 0)) == [("b", ["answer 0"]), ("a", ["answer 1"]), ("d", ["answer 1"])]
    assert await client.successes(["nobody"], 1, 0) == []
    assert await client.successes([], 1, 0) == []


async def test_reading_changes_nothing(client: ReplayClient, make_group: MakeGroup) -> None:
    await consume(client, make_group("a"), make_group("b"))
    stats, listed = await client.stats(), (await client.request("GET", "/groups")).json()
    first = await client.successes(["p1"], 9, 0)
    assert wire.encode_groups(await client.successes(["p1"], 9, 0)) == wire.encode_groups(first)
    assert (await client.stats(), (await client.request("GET", "/groups")).json()) == (stats, listed)
    assert len((await client.request("GET", "/groups/a")).json()["completions"]) == 2


async def test_people_get_json(client: ReplayClient, make_group: MakeGroup) -> None:
    await consume(client, make_group("a"))
    answer = (await client.request("POST", "/groups/successes", json={"prompt_ids": ["p1"], "count": 1})).json()
    assert list(answer) == ["groups"]
    assert [item["logprobs"] for item in answer["groups"][0]["completions"]] == [[-1.5, -0.875, -0.25]]


class TestCapacity:
    @pytest.fixture
    def config(self) -> ReplaySection:
        return ReplaySection(capacity=4)

    async def test_what_has_left_is_no_success_any_more(self, client: ReplayClient, make_group: MakeGroup) -> None:
        await consume(client, make_group("a"), make_group("b"))
        await client.add([make_group("c")])
        assert [group.id for group in await client.successes(["p1"], 9, 0)] == ["b"]
        await client.request("POST", "/clear")
        assert await client.successes(["p1"], 9, 0) == []


async def test_successes_are_found_by_the_index(app: FastAPI, client: ReplayClient, make_group: MakeGroup) -> None:
    """The time of a call must not grow with the buffer: the query that was run is explained by SQLite."""
    await consume(client, make_group("a"))
    store: Database = app.state.worker.buffer.store
    queries: list[str] = []
    store.db.set_trace_callback(queries.append)
    await client.successes(["p1"], 1, 0)
    store.db.set_trace_callback(None)
    (query,) = (query for query in queries if "prompt_id" in query)
    (step,) = (row[3] for row in store.db.execute(f"EXPLAIN QUERY PLAN {query}"))  # one: nothing is sorted
    assert step.startswith("SEARCH groups USING COVERING INDEX by_success (prompt_id=?")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": "p1"}, "prompt_ids"),
        ({"prompt_ids": [1]}, "prompt_ids"),
        ({"prompt_ids": ["p1", None]}, "prompt_ids"),
        ({"prompt_ids": ["\ud800"]}, "body"),
        ({"prompt_ids": ["x" * 513]}, "prompt_ids"),
        ({"prompt_ids": ["x"] * 65537}, "prompt_ids"),
        ({"count": 0}, "count"),
        ({"count": 1025}, "count"),
        ({"count": 1.5}, "count"),
        ({"count": None}, "count"),
        ({"min_version": -1}, "min_version"),
        ({"min_version": 2**53}, "min_version"),
        ({"surprise": 1}, "surprise"),
    ],
)
async def test_bad_input_is_refused_by_name(
    client: ReplayClient, make_group: MakeGroup, change: dict[str, object], field: str
) -> None:
    await consume(client, make_group("a"))
    body = {"prompt_ids": ["p1"], "count": 1, "min_version": 0} | change
    headers = {"content-type": "application/json"}
    response = await client.http.post("/groups/successes", content=json.dumps(body), headers=headers)
    assert response.status_code == 422, response.text
    assert field in response.json()["error"]["field"]
    assert len(await client.successes(["p1"], 1, 2**53 - 1)) == 0
    assert len(await client.successes(["p1"], 1024, 0)) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 12))
def test_trimming_a_packed_group_is_trimming_the_group(right: list[bool], count: int) -> None:
    group = wire.from_plain(
        {
            "id": "a",
            "prompt_id": "p",
            "prompt": "1 + 1?",
            "ground_truth": "2",
            "prompt_token_ids": [1, 2],
            "metadata": {"x": [1.5, None, "é"]},
            "completions": [
                {
                    "token_ids": [i, 7],
                    "logprobs": [-0.1 * i, -2.0],
                    "text": f"answer {i}",
                    "finish_reason": "stop",
                    "weight_versions": [[i, 0, 2]],
                    "correct": value,
                }
                for i, value in enumerate([*right, True])
            ],
        },
        Group,
    )
    blob = right_answers(pack_group(group), count)
    group.completions = [completion for completion in group.completions if completion.correct][:count]
    assert blob == pack_group(group)
    assert wire.encode_groups(unpack_groups([blob])) == wire.encode_groups([group])
