"""The calls made by people and by the ancestor's clients, and the requests that must be refused."""

import json
from pathlib import Path

import msgpack
import numpy as np
import pytest
from fastapi import FastAPI
from msgspec.msgpack import Ext

from common.clients.replay import ReplayClient
from common.wire import codec
from common.wire.schemas import SampleRequest, TakeRequest
from services.replay.buffer import join
from tests.support.batches.replay_groups import MakeGroup

JSON = {"content-type": "application/json"}
MSGPACK = {"content-type": codec.MSGPACK}


def test_joined_groups_equal_the_wire_encoding(make_group: MakeGroup) -> None:
    groups = [make_group(f"g{i}", i) for i in range(20)]
    for some in ([], groups[:1], groups):
        assert join([codec.encode(group) for group in some], evicted=3) == codec.encode_groups(
            some, evicted=3
        )


async def test_a_person_adds_and_reads_json(client: ReplayClient, make_group: MakeGroup) -> None:
    group = make_group("a/b ü", version=2)
    body = json.dumps({"groups": [codec.plain(group)]})
    answer = await client.request("POST", "/groups", content=body, headers=JSON)
    assert answer.json() == {"added": 1, "duplicates": 0}
    shown = (await client.request("GET", "/groups/a/b ü")).json()
    assert shown["completions"][0]["logprobs"] == [-1.5, -0.875, -0.25]
    assert shown == json.loads(json.dumps(codec.plain(group)))
    (listed,) = (await client.request("GET", "/groups", params={"limit": 5})).json()["groups"]
    assert (listed["id"], listed["state"], listed["mean_reward"], listed["completions"]) == (
        group.id,
        "fresh",
        0.5,
        2,
    )
    assert (await client.request("GET", "/groups", params={"offset": 1})).json() == {"groups": []}
    taken = (
        await client.request("POST", "/groups/take", json={"count": 1, "request_id": "r"})
    ).json()
    assert (taken["groups"][0]["id"], taken["evicted"]) == (group.id, 0)
    await client.ack([group.id])
    sampled = (await client.request("POST", "/groups/sample", json={"count": 1})).json()
    assert (sampled["groups"][0]["id"], sampled["weights"]) == (group.id, [1.0])
    missing = await client.http.get("/groups/nobody")
    assert missing.status_code == 404
    assert missing.json()["error"]["value"] == "nobody"


async def test_ancestor_calls(client: ReplayClient) -> None:
    empty = (await client.request("GET", "/stats")).json()
    assert (empty["size"], empty["capacity"], empty["avg_reward"], empty["positive_ratio"]) == (
        0,
        1000,
        0.0,
        0.0,
    )
    assert (await client.request("POST", "/sample", json={"batch_size": 4})).json() == {
        "experiences": []
    }
    items = [
        {"prompt": f"p{i}", "response": "r", "reward": float(i), "ground_truth": "1"}
        for i in range(3)
    ]
    del items[0]["ground_truth"]
    assert (await client.request("POST", "/add", json={"experiences": items})).json() == {
        "added": 3,
        "buffer_size": 3,
    }
    sampled = (
        await client.request("POST", "/sample", json={"batch_size": 4, "prioritized": False})
    ).json()["experiences"]
    assert sorted(item["prompt"] for item in sampled) == ["p0", "p1", "p2"]
    assert set(sampled[0]) == {"prompt", "response", "reward", "ground_truth"}
    stats = (await client.request("GET", "/stats")).json()
    assert (stats["size"], stats["avg_reward"], stats["positive_ratio"]) == (3, 1.0, 2 / 3)
    await client.request("POST", "/clear")
    assert (await client.stats())["size"] == 0


async def test_prioritized_sampling_of_the_ancestor_prefers_high_rewards(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    await client.add([make_group("a", rewards=(0.0, 1.0))])
    item = {"prompt": "lone", "response": "", "reward": 0.0}
    await client.request("POST", "/add", json={"experiences": [item]})
    rewards = {True: 0.0, False: 0.0}
    for prioritized in rewards:
        for seed in range(100):
            body = {"batch_size": 1, "prioritized": prioritized, "seed": seed}
            rewards[prioritized] += (await client.request("POST", "/sample", json=body)).json()[
                "experiences"
            ][0]["reward"]
    assert 20 <= rewards[False] <= 47  # expected: a third
    assert 72 <= rewards[True] <= 97  # expected: 1.1 / 1.3


async def test_after_groups_of_any_size_are_gone_the_others_keep_their_completions(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    """The rewards say which completion is meant: 10.0 and 10.5 are the first and second of the
    group at position 1."""
    sizes = {"a": 2, "b": 5, "c": 3, "d": 4}
    groups = [
        make_group(
            name, position=position, rewards=tuple(10.0 * position + i / 2 for i in range(size))
        )
        for position, (name, size) in enumerate(sizes.items())
    ]
    expected = {c.reward: c.text for group in groups if group.id != "b" for c in group.completions}

    async def sampled() -> dict[float, str]:
        found = (await client.request("POST", "/sample", json={"batch_size": 99})).json()[
            "experiences"
        ]
        return {item["reward"]: item["response"] for item in found}

    await client.add(groups)
    assert len(await sampled()) == sum(sizes.values())
    taken = await client.take(TakeRequest(count=4, request_id="r"))
    await client.ack([group.id for group in taken.groups if group.id != "b"])
    await client.reset_fresh()

    assert await sampled() == expected


async def test_trap_lone_experiences_are_never_trained_on(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    items = [{"prompt": "p", "response": "r", "reward": 1.0}] * 5
    await client.request("POST", "/add", json={"experiences": items})
    assert (await client.take(TakeRequest(count=1, request_id="r"))).groups == []
    assert (await client.sample(SampleRequest(count=5))).groups == []
    await client.add([make_group("a")])
    taken = (await client.take(TakeRequest(count=1, request_id="s"))).groups
    await client.ack([group.id for group in taken])
    reused = (await client.sample(SampleRequest(count=5))).groups
    assert [group.id for group in taken + reused] == ["a", "a"]
    assert all(
        len(completion.logprobs) == len(completion.token_ids) > 0
        for completion in reused[0].completions
    )
    refused = await client.http.post(
        "/groups", json={"groups": [{"id": "x", "prompt": "p", "completions": [items[0]]}]}
    )
    assert refused.status_code == 422


def broken(make_group: MakeGroup, where: str, value: object) -> dict[str, object]:
    """Returns a good group as JSON, with one field of the group or of its first completion
    replaced."""
    content = codec.plain(make_group("a"))
    target = content if where in content else content["completions"][0]
    target[where] = value
    return {"groups": [content]}


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("id", ""),
        ("id", 5),
        ("id", "x" * 129),
        ("position", -1),
        ("position", 1.5),
        ("prompt", None),
        ("prompt_token_ids", ["a"]),
        ("metadata", []),
        ("completions", []),
        ("token_ids", []),
        ("token_ids", [1, 2, 2**40]),
        ("logprobs", [0.0]),
        ("logprobs", [-1.0, -1.0, -(10.0**300)]),
        ("reward", None),
        ("reward", 1e39),
        ("reward", True),
        ("status", "fine"),
        ("weight_versions", []),
        ("weight_versions", [[0, 0, 2]]),
        ("finish_reason", "tired"),
        ("surprise", 1),
    ],
)
async def test_wrong_fields_are_named(
    client: ReplayClient, make_group: MakeGroup, where: str, value: object
) -> None:
    response = await client.http.post("/groups", json=broken(make_group, where, value))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (422, "invalid_input")
    assert where in error["field"]
    assert error["remedy"]
    assert (await client.stats())["groups"] == 0
    await client.add([make_group("a")])


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"", MSGPACK, 422),
        (b"\xc1garbage", MSGPACK, 422),
        (b"\x81\xa6groups\xdd\xff\xff\xff\xff", MSGPACK, 422),
        (b"\x92" * 5000, MSGPACK, 422),
        (msgpack.packb({"groups": []}), MSGPACK, 422),
        (msgpack.packb({"groups": 7}), MSGPACK, 422),
        (b"\x81\xa6groups\x91\x81\xa2id\xa2\xff\xfe", MSGPACK, 422),
        (b"{}", JSON, 422),
        (b'{"groups": []}', JSON, 422),
        (b'{"groups": [NaN]}', JSON, 422),
        (b'{"groups": ["\xff"]}', JSON, 422),
        (b'{"groups": [{"id": "\\ud800"}]}', JSON, 422),
        (b"[" * 100_000, JSON, 422),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {}, 415),
        (b"x" * (1 << 20) + b"x", MSGPACK, 413),
    ],
)
async def test_bodies_that_cannot_be_used(
    client: ReplayClient, make_group: MakeGroup, body: bytes, headers: dict[str, str], status: int
) -> None:
    response = await client.http.post("/groups", content=body, headers=headers)
    assert response.status_code == status, response.text
    assert set(response.json()["error"]) >= {"code", "message", "field", "remedy"}
    assert await client.unhealthy_reason() is None
    await client.add([make_group("a")])


@pytest.mark.parametrize("array", ["logprobs", "reward"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
async def test_nan_and_infinity_are_refused(
    client: ReplayClient, make_group: MakeGroup, array: str, number: float
) -> None:
    group = make_group("a")
    if array == "logprobs":
        group.completions[1].logprobs = np.full(3, number, np.float32)
    else:
        group.completions[1].reward = number
    response = await client.http.post(
        "/groups", content=codec.encode_groups([group]), headers=MSGPACK
    )
    assert response.status_code == 422
    assert response.json()["error"]["field"] == f"groups[0].completions[1].{array}"
    assert (await client.stats())["groups"] == 0


@pytest.mark.parametrize(
    "metadata", [{"x": b"\xff"}, {"x": float("nan")}, {"x": Ext(5, b"x")}, {b"x": 1}]
)
async def test_metadata_must_be_representable_as_json(
    client: ReplayClient, make_group: MakeGroup, metadata: dict[str, object]
) -> None:
    group = make_group("a")
    group.metadata = metadata
    response = await client.http.post(
        "/groups", content=codec.encode_groups([group]), headers=MSGPACK
    )
    assert response.status_code == 422
    extension = any(
        isinstance(value, Ext) for value in metadata.values()
    )  # refused before unpacking
    assert response.json()["error"]["field"] == ("body" if extension else "groups[0].metadata")


async def test_a_version_over_64_bits_is_refused(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    group = make_group("a", version=2**64 - 1)
    response = await client.http.post(
        "/groups", content=codec.encode_groups([group]), headers=MSGPACK
    )
    assert response.status_code == 422
    assert (await client.stats())["groups"] == 0


async def test_very_large_whole_numbers_in_arrays_are_refused(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    body = json.dumps(broken(make_group, "logprobs", [10**400, -1, -1]))
    response = await client.http.post("/groups", content=body, headers=JSON)
    assert response.status_code == 422


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/groups/take", {"count": 0, "request_id": "r"}),
        ("/groups/take", {"count": "many", "request_id": "r"}),
        ("/groups/take", {"count": 1}),
        ("/groups/take", {"count": 1, "request_id": ""}),
        ("/groups/take", {"count": 1, "request_id": "r", "min_version": 10**30}),
        ("/groups/take", {"count": 1, "request_id": "r", "wait_s": 1e9}),
        ("/groups/ack", {"ids": []}),
        ("/groups/ack", {"ids": "a"}),
        ("/groups/sample", {"count": 1, "importance_exponent": 2}),
        ("/groups/sample", {"count": 1, "seed": -1}),
        ("/groups/sample", {"count": 1, "recency_half_life": 4.0}),
        ("/add", {"experiences": [{"prompt": "p", "response": "\ud800", "reward": 1}]}),
        ("/add", {"experiences": []}),
        ("/add", {"experiences": [{"prompt": "p", "response": "r"}]}),
        ("/add", {"experiences": [{"prompt": "p", "response": "r", "reward": "high"}]}),
        ("/sample", {"batch_size": 0}),
        ("/sample", {"batch_size": None}),
    ],
)
async def test_wrong_requests_are_refused(
    client: ReplayClient, make_group: MakeGroup, path: str, body: object
) -> None:
    response = await client.http.post(path, content=json.dumps(body), headers=JSON)
    assert response.status_code == 422, response.text
    assert response.json()["error"]["field"]
    await client.add([make_group("a")])


async def test_reward_that_is_not_finite_is_refused_for_lone_experiences(
    client: ReplayClient,
) -> None:
    for number in ("NaN", "Infinity", "1e999", "1e308"):
        body = f'{{"experiences":[{{"prompt":"p","response":"r","reward":{number}}}]}}'
        response = await client.http.post("/add", content=body, headers=JSON)
        assert response.status_code == 422, number
    assert (await client.stats())["avg_reward"] == 0.0


async def test_answers_of_100_000_characters_are_kept(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    group = make_group("long")
    group.completions[0].text = "é" * 100_000
    await client.add([group])
    taken = (await client.take(TakeRequest(count=1, request_id="r"))).groups[0]
    assert taken.completions[0].text == group.completions[0].text


async def test_metrics_show_the_buffer(client: ReplayClient, make_group: MakeGroup) -> None:
    await client.add([make_group("a"), make_group("b")])
    text = (await client.request("GET", "/metrics")).text
    assert 'rlhf_replay_groups{state="fresh"} 2.0' in text
    assert 'rlhf_replay_completions{state="fresh"} 4.0' in text


async def test_a_full_disk_is_named_and_changes_nothing(
    app: FastAPI, client: ReplayClient, make_group: MakeGroup
) -> None:
    await client.add([make_group("a")])
    worker = app.state.worker
    pages = worker.buffer.store.db.execute("PRAGMA page_count").fetchone()[0]
    worker.buffer.store.db.execute(
        f"PRAGMA max_page_count = {pages}"
    )  # SQLite's own "database or disk is full"
    big = make_group("big", tokens=50_000)
    response = await client.http.post(
        "/groups", content=codec.encode_groups([big]), headers=MSGPACK
    )
    assert (response.status_code, response.json()["error"]["code"]) == (507, "disk_full")
    assert (await client.stats())["groups"] == 1
    worker.buffer.store.db.execute("PRAGMA max_page_count = 1000000")
    await client.add([big])
    taken = (await client.take(TakeRequest(count=2, request_id="r"))).groups
    assert {group.id for group in taken} == {"a", "big"}


async def test_sqlite_error_is_reported(
    app: FastAPI, client: ReplayClient, make_group: MakeGroup
) -> None:
    app.state.worker.buffer.store.db.execute("PRAGMA query_only = 1")
    response = await client.http.post(
        "/groups", content=codec.encode_groups([make_group("a")]), headers=MSGPACK
    )
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (500, "storage_failed")
    assert "readonly database" in error["message"]


async def test_flush_moves_everything_into_the_file(
    client: ReplayClient, make_group: MakeGroup, tmp_path: Path
) -> None:
    await client.add([make_group("a", tokens=10_000)])
    log = tmp_path / "replay" / "replay.db-wal"
    assert log.stat().st_size > 0
    await client.flush()
    assert log.stat().st_size == 0
