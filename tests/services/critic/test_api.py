"""The critic-server over HTTP: which run owns the critic, which calls it refuses, which checkpoints
it keeps."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from fastapi import FastAPI

from common.clients.critic import CriticClient
from common.errors import ServiceError
from common.settings.config import Config
from common.wire.codec import MSGPACK, encode
from common.wire.schemas import (
    CriticMetrics,
    TokenSequence,
    UpdateRequest,
    ValueRequest,
    ValueTargets,
)
from learning.ranks import Ranks
from services.critic.app import MAX_REQUESTS
from services.critic.critic import Critic
from tests.support.batches.critic import VOCABULARY, make_rows, make_sequences

SEQUENCES = make_sequences(5)


async def values(client: CriticClient) -> np.ndarray[Any, Any]:
    return np.concatenate(await client.values(SEQUENCES))


async def refused(client: CriticClient, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """Returns the status and the error of a call that must fail."""
    response = await client.http.post(path, timeout=30, **body)
    assert not response.is_success
    return response.status_code, response.json()["error"]


def steps(config: Config) -> list[str]:
    return sorted(path.name for path in (config.state_dir / "critic").iterdir())


async def test_run_equals_one_with_a_critic_in_process(
    client: CriticClient, config: Config
) -> None:
    local = Critic(config, Ranks())
    await client.restore("a", 0)
    assert not (await values(client)).any()
    for step in range(3):
        rows = make_rows(6, seed=step)
        assert await client.update("a", step, seed=step, rows=rows) == local.update(rows, seed=step)
    assert np.array_equal(await values(client), np.concatenate(local.values(SEQUENCES)))
    status = await client.status()
    assert (status.run_id, status.step) == ("a", 3)
    assert status.parameters == sum(
        parameter.numel() for parameter in local.model.module.parameters()
    )
    metrics = (await client.request("GET", "/metrics")).text
    assert "rlhf_critic_step 3.0" in metrics
    assert "rlhf_critic_value_loss " in metrics
    await client.flush()
    assert await client.unhealthy_reason() is None


async def test_values_and_updates_are_computed_in_one_thread_beside_the_event_loop(
    client: CriticClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So `/health` answers meanwhile, and no value is computed from half-updated weights."""
    threads: list[threading.Thread] = []
    evaluate = Critic.values
    compute = Critic.update

    def noted_values(critic: Critic, sequences: Sequence[TokenSequence]) -> list[Any]:
        threads.append(threading.current_thread())
        return evaluate(critic, sequences)

    def noted_update(critic: Critic, rows: Sequence[ValueTargets], seed: int) -> CriticMetrics:
        threads.append(threading.current_thread())
        return compute(critic, rows, seed)

    monkeypatch.setattr(Critic, "values", noted_values)
    monkeypatch.setattr(Critic, "update", noted_update)
    await client.restore("a", 0)
    await client.values(SEQUENCES, "a", 0)
    await client.update("a", 0, seed=0, rows=make_rows(2))

    assert len(threads) == 2
    assert threads[0] is threads[1]
    assert threads[0] is not threading.current_thread()


async def test_flush_answers_after_the_running_update(
    client: CriticClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    compute = Critic.update

    def update(critic: Critic, rows: Sequence[ValueTargets], seed: int) -> CriticMetrics:
        begun.set()
        return compute(critic, rows, seed)

    monkeypatch.setattr(Critic, "update", update)
    await client.restore("a", 0)
    running = asyncio.create_task(client.update("a", 0, seed=0, rows=make_rows(200)))
    assert await asyncio.to_thread(begun.wait, 400)
    await client.flush()
    assert (await client.status()).step == 1
    await running


async def test_a_busy_critic_refuses_and_every_call_gets_its_answer_in_the_end(
    app: FastAPI, client: CriticClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, compute = threading.Event(), Critic.values

    def gated(critic: Critic, sequences: Sequence[TokenSequence]) -> list[Any]:
        assert gate.wait(400)
        return compute(critic, sequences)

    await client.restore("a", 0)
    await client.update("a", 0, seed=0, rows=make_rows(6))
    alone = await client.values(SEQUENCES, "a", 1)
    monkeypatch.setattr(Critic, "values", gated)
    client.deadline_s = 400
    waiting = [
        asyncio.create_task(client.values(SEQUENCES, "a", 1)) for _ in range(MAX_REQUESTS + 4)
    ]
    async with asyncio.timeout(400):
        while app.state.load.stats()["refused"] < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert app.state.load.stats()["requests"] == MAX_REQUESTS
    answer = await client.http.post("/values", content=b"whatever")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert answer.headers["retry-after"] == "1"
    gate.set()
    for served in await asyncio.gather(*waiting):
        assert all(np.array_equal(now, then) for now, then in zip(served, alone, strict=True))
    assert app.state.load.stats()["refused"] >= 5


async def test_a_repeated_update_is_applied_once(client: CriticClient) -> None:
    await client.restore("a", 0)
    rows = make_rows(6)
    first = await client.update("a", 0, seed=0, rows=rows)
    before = await values(client)
    assert await client.update("a", 0, seed=0, rows=rows) == first
    assert np.array_equal(await values(client), before)
    assert (await client.status()).step == 1


async def test_call_meant_for_another_critic_is_a_conflict(client: CriticClient) -> None:
    with pytest.raises(ServiceError, match=r"not at step 0 of run a") as error:
        await client.update("a", 0, seed=0, rows=make_rows(2))
    assert (error.value.status, error.value.field, error.value.value) == (409, "run_id", "a")
    assert error.value.remedy == "POST /restore"
    await client.restore("a", 0)
    await client.update("a", 0, seed=0, rows=make_rows(2))
    calls: list[Callable[[], Any]] = [
        lambda: client.update("a", 2, seed=0, rows=make_rows(2)),
        lambda: client.values(SEQUENCES, "a", 0),
        lambda: client.save("a", 0, keep=1),
    ]
    for call in calls:
        with pytest.raises(
            ServiceError, match=r"the critic is at step 1 of run a, not at step \d of run a"
        ) as error:
            await call()
        assert (error.value.status, error.value.field) == (409, "step")
    for step in (0, 1):  # the last update of run a was at step 0
        with pytest.raises(
            ServiceError, match=rf"at step 1 of run a, not at step {step} of run b"
        ) as error:
            await client.update("b", step, seed=0, rows=make_rows(2))
        assert error.value.field == "run_id"
    assert len(await client.values(SEQUENCES, "a", 1)) == len(SEQUENCES)


async def test_restore_begins_anew_or_continues_from_a_checkpoint(
    client: CriticClient, config: Config
) -> None:
    await client.restore("a", 0)
    for step in range(2):
        await client.update("a", step, seed=step, rows=make_rows(6, seed=step))
    await client.save("a", 2, keep=2)
    at_two = await values(client)
    third = await client.update("a", 2, seed=2, rows=make_rows(6, seed=2))
    at_three = await values(client)
    assert (await client.restore("b", 0)).step == 0
    assert not (await values(client)).any()
    for _ in range(2):  # repeating it changes nothing
        assert (await client.restore("c", 2, saved_by="a")).run_id == "c"
        assert np.array_equal(await values(client), at_two)
    again = await client.update("c", 2, seed=2, rows=make_rows(6, seed=2))
    assert asdict(again) == pytest.approx(
        asdict(third), rel=1e-5
    )  # rounding of sums depends on memory layout
    np.testing.assert_allclose(await values(client), at_three, rtol=1e-5, atol=1e-6)


async def test_restoring_an_unsaved_step_fails_and_changes_nothing(client: CriticClient) -> None:
    await client.restore("a", 0)
    await client.update("a", 0, seed=0, rows=make_rows(6))
    await client.save("a", 1, keep=1)
    with pytest.raises(ServiceError, match="none was saved here") as error:
        await client.restore("a", 7)
    assert (error.value.status, error.value.field, error.value.value) == (404, "step", "7")
    assert "on a volume of critic-server" in str(error.value.remedy)
    with pytest.raises(ServiceError, match="belongs to run a") as error:
        await client.restore("b", 1, saved_by="elsewhere")
    assert (error.value.status, error.value.field) == (404, "step")
    assert (await client.status()).run_id == "a"


async def test_the_last_checkpoints_written_stay(client: CriticClient, config: Config) -> None:
    await client.restore("a", 0)
    for step in range(4):
        await client.update("a", step, seed=0, rows=make_rows(2))
        (config.state_dir / "critic" / "step_000099.partial").mkdir(
            parents=True
        )  # left by an interrupted save
        for _ in range(2):  # repeating it changes nothing
            await client.save("a", step + 1, keep=3)
    assert steps(config) == ["step_000002", "step_000003", "step_000004"]
    await client.restore("b", 0)
    await client.update("b", 0, seed=0, rows=make_rows(2))
    await client.save("b", 1, keep=5)
    assert steps(config) == ["step_000001", "step_000002", "step_000003", "step_000004"]
    await client.save("b", 1, keep=1)
    assert steps(config) == ["step_000001"]


async def test_update_that_fails_midway_leaves_a_critic_without_a_run(
    client: CriticClient, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learning.optimizer.MAX_SKIPPED_UPDATES", 0)
    await client.restore("a", 0)
    await client.update("a", 0, seed=0, rows=make_rows(6))
    await client.save("a", 1, keep=1)
    await client.restore("a", 1)  # with the setting above
    before = await values(client)
    rows = make_rows(6)
    rows[3].returns[:] = 1e38  # the norm of the gradient is not finite
    with pytest.raises(ServiceError, match="not finite") as error:
        await client.update("a", 1, seed=0, rows=rows)
    assert (error.value.code, error.value.field) == ("not_finite", "critic.learning_rate")
    with pytest.raises(ServiceError, match="POST /restore") as error:
        await values(client)
    assert error.value.status == 409
    assert (await client.status()).run_id is None
    await client.restore("a", 1)
    assert np.array_equal(await values(client), before)


def update_body(**changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = msgpack.unpackb(encode(UpdateRequest("a", 0, 0, make_rows(2))))
    for name, value in changes.items():
        (body if name in body else body["rows"][1])[name] = value
    return body


BAD_UPDATES: list[tuple[str, Any, str]] = [
    ("run_id", "", "run_id"),
    ("run_id", 5, "run_id"),
    ("step", -1, "step"),
    ("step", True, "step"),
    ("seed", 0.5, "seed"),
    ("rows", {}, "rows"),
    ("rows", [5], "rows[0]"),
    ("rows", [], "rows"),
    ("prompt_ids", b"", "rows[1].prompt_ids"),
    ("prompt_ids", b"abc", "rows[1].prompt_ids"),
    ("completion_ids", [], "rows[1].completion_ids"),
    ("completion_ids", None, "rows[1].completion_ids"),
    ("prompt_ids", [VOCABULARY], "rows[1]"),
    ("prompt_ids", [-1], "rows[1].prompt_ids[0]"),
    ("prompt_ids", [2**31], "rows[1].prompt_ids[0]"),
    ("prompt_ids", [5] * 600, "rows[1]"),
    ("old_values", [0.5] * 99, "rows[1].old_values"),
    ("returns", [float("nan")], "rows[1].returns[0]"),
    ("returns", np.array([np.inf], "<f4").tobytes(), "rows[1].returns"),
    ("returns", "text", "rows[1].returns"),
    ("weight", -1.0, "rows[1].weight"),
    ("weight", float("nan"), "rows[1].weight"),
    ("weight", 1e39, "rows[1].weight"),
    ("weight", None, "rows[1].weight"),
    ("surprise", 1, "rows[1].surprise"),
]


async def test_bad_input_is_named_and_changes_nothing(client: CriticClient) -> None:
    await client.restore("a", 0)
    headers = {"content-type": MSGPACK}
    for name, value, field in BAD_UPDATES:
        status, error = await refused(
            client, "/update", content=msgpack.packb(update_body(**{name: value})), headers=headers
        )
        assert (status, error["code"], error["field"]) == (422, "invalid_input", field), (
            name,
            value,
            error,
        )
    request = msgpack.unpackb(encode(ValueRequest(SEQUENCES)))
    for changes, field in (
        ({"sequences": 5}, "sequences"),
        (
            {"sequences": [{"prompt_ids": [1], "completion_ids": [VOCABULARY]}]},
            "sequences[0]",
        ),
        (
            {"sequences": [{"prompt_ids": [1], "completion_ids": [1], "weight": 1.0}]},
            "sequences[0].weight",
        ),
        ({"run_id": "a"}, "step"),
        ({"step": 0}, "run_id"),
        ({"surprise": 1}, "surprise"),
    ):
        status, error = await refused(
            client, "/values", content=msgpack.packb(request | changes), headers=headers
        )
        assert (status, error["field"]) == (422, field), (changes, error)
    for path in ("/values", "/update"):
        for content in (b"", b"{}", b"\xc1", b"\x93\x01\x02\x03"):
            status, error = await refused(client, path, content=content, headers=headers)
            assert (status, error["code"]) == (422, "invalid_input")
        status, error = await refused(client, path, content=b"x" * (1 << 20 | 1), headers=headers)
        assert (status, error["code"]) == (413, "too_large")
    for path, body, field in (
        ("/restore", {"run_id": "", "step": 0}, "run_id"),
        ("/restore", {"run_id": "a", "step": -1}, "step"),
        ("/save", {"run_id": "a", "step": 0, "keep": 0}, "keep"),
        ("/save", {"run_id": "a", "step": 0, "directory": "/"}, "directory"),
    ):
        status, error = await refused(client, path, json=body)
        assert (status, error["field"]) == (422, field), (path, body, error)
    assert (await client.status()).step == 0
    assert not (await values(client)).any()


async def test_values_survive_the_wire_whatever_their_type(
    app: FastAPI, client: CriticClient
) -> None:
    """A caller may compute in float64."""
    await client.restore("a", 0)
    rows = make_rows(3)
    expected = await client.update("a", 0, seed=0, rows=rows)
    await client.restore("b", 0)
    for row in rows:
        row.returns, row.old_values = (
            row.returns.astype(np.float64),
            row.old_values.astype(np.float64),
        )
        row.prompt_ids = row.prompt_ids.astype(np.int64)
    assert await client.update("b", 0, seed=0, rows=rows) == expected


def test_the_checkpoint_is_a_hugging_face_model(config: Config, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForTokenClassification

    critic = Critic(config, Ranks())
    critic.update(make_rows(6), seed=0)
    critic.save(tmp_path)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert torch.equal(model.score.weight, critic.model.module.score.weight)
    assert json.loads((tmp_path / "critic_state.json").read_text()) == {"format": 2, "step": 1}
