"""The whole loop in one process, with faults injected at the transport and by other clients."""

import asyncio
import io
import json
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import httpx
import pytest
from rich.console import Console

from common.clients.data import DataClient
from common.clients.replay import ReplayClient
from common.errors import ServiceError
from common.process.run_lock import LOCK
from common.settings.config import Config
from common.wire.schemas import PromptBatch, TakenGroups, TakeRequest
from services.http.sqlite_store import sum_of
from tests.support.errors import raises
from tests.support.runs.in_process import Faulty, metrics, quiet, stored
from trainer import train_in_process
from trainer.rollouts.collector import CollectFailed

pytestmark = pytest.mark.integration


def test_a_data_server_that_lost_its_cursor_is_set_back(settings: Callable[..., Config]) -> None:
    config = settings()

    class Losing(Faulty):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            first = self.calls == 0
            response = await super().handle_async_request(request)
            if first:
                cursor = ("shuffled", 0, 0)
                with closing(sqlite3.connect(config.state_dir / "data" / "stream.db")) as db, db:
                    db.execute(
                        "REPLACE INTO cursors VALUES (?, ?, ?, ?)", (*cursor, sum_of(cursor))
                    )
                    db.execute("DELETE FROM answers")
            return response

    train_in_process(config, quiet(), lambda app: Losing(app, set(), lambda: httpx.Response(500)))
    assert [group.position for group in stored(config)] == list(range(12))
    assert len({group.prompt_id for group in stored(config)}) == 12


def test_a_run_that_is_taken_over_in_its_start_does_not_end_the_other_one(
    settings: Callable[..., Config],
) -> None:
    config = settings()

    def taking_over(app: Any) -> httpx.ASGITransport:
        holder = {"run": "another", "token": "of another"}
        assert config.trainer.run_dir is not None
        (config.trainer.run_dir / LOCK).write_text(json.dumps(holder))
        return httpx.ASGITransport(app)

    with pytest.raises(ServiceError) as caught:
        train_in_process(config, quiet(), taking_over)
    assert caught.value.code == "run_taken_over"
    with closing(sqlite3.connect(config.state_dir / "data" / "stream.db")) as db:
        assert db.execute("SELECT * FROM runs").fetchall() == [], "it has begun at no service"


def test_another_client_that_keeps_drawing_prompts_ends_the_run(
    settings: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = DataClient.prompts

    async def shared(client: DataClient, count: int, request_id: str) -> PromptBatch:
        await prompts(client, 1, f"{request_id}-of-another")
        return await prompts(client, count, request_id)

    monkeypatch.setattr(DataClient, "prompts", shared)
    with raises(CollectFailed, field="prompts"):
        train_in_process(settings(), quiet())


@pytest.fixture
def before_the_first_take(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[ReplayClient], Awaitable[None]]], None]:
    """Lets another client act on the replay-buffer once it holds a whole batch."""
    monkeypatch.setattr("trainer.rollouts.rollouts._SAY_EVERY_S", 0.2)
    take = ReplayClient.take

    def act(deed: Callable[[ReplayClient], Awaitable[None]]) -> None:
        async def first(client: ReplayClient, request: TakeRequest) -> TakenGroups:
            monkeypatch.setattr(ReplayClient, "take", take)
            while (await client.stats())["fresh"] < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await deed(client)
            return TakenGroups(groups=[], evicted=0)

        monkeypatch.setattr(ReplayClient, "take", first)

    return act


def test_groups_that_another_client_forgets_are_stored_again(
    settings: Callable[..., Config],
    before_the_first_take: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def clear(client: ReplayClient) -> None:
        await client.request("POST", "/clear", json={})

    before_the_first_take(clear)
    config = settings()
    train_in_process(config, quiet())
    assert [group.position for group in stored(config)] == list(range(12))
    assert "dropped 4 groups: they are stored again" in caplog.text


def test_groups_that_another_client_acknowledges_end_the_run(
    settings: Callable[..., Config], before_the_first_take: Callable[..., None]
) -> None:
    async def steal(client: ReplayClient) -> None:
        taken = await client.take(
            TakeRequest(count=3, min_version=0, wait_s=0, request_id="thief", run_id="")
        )
        await client.ack([group.id for group in taken.groups])

    before_the_first_take(steal)
    with raises(CollectFailed, field="/groups/ack", value="3"):
        train_in_process(settings(), quiet())


@pytest.mark.parametrize(
    "response",
    [
        lambda: httpx.Response(400, json={"error": {"message": "refused"}}),
        lambda: httpx.Response(200, json=[{"text": "", "output_ids": [], "meta_info": {}}] * 4),
        lambda: httpx.Response(
            200,
            json=[
                {
                    "text": "",
                    "output_ids": [5],
                    "meta_info": {
                        "finish_reason": {"type": "abort", "message": "gone"},
                        "output_token_logprobs": [[-1.0, 5, None]],
                        "weight_version": "0",
                    },
                }
            ]
            * 4,
        ),
    ],
    ids=["refused", "empty", "aborted"],
)
def test_trap_a_failed_generation_is_dropped_never_trained_on(
    settings: Callable[..., Config], response: Callable[[], httpx.Response]
) -> None:
    """Trap: a failed generation trained on as "". Here its group is dropped and counted, and its
    prompt tried again."""
    config = settings()
    train_in_process(config, quiet(), lambda app: Faulty(app, {2, 6, 7}, response))
    assert metrics(config)[-1]["dropped"] == {"generation": 3}
    groups = stored(config)
    assert len(groups) == 12
    assert all(
        len(completion.token_ids) > 0 for group in groups for completion in group.completions
    )
    assert [group.position for group in groups] == list(range(12))


def test_a_prompt_that_always_fails_is_left_out_and_its_place_taken_by_another(
    settings: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(Faulty):
        """Always refuses the prompt that it is asked for first."""

        refused: list[int] | None = None

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/generate":
                prompt = json.loads(await request.aread())["input_ids"]
                self.refused = self.refused or prompt
                if prompt == self.refused:
                    return httpx.Response(400, json={"error": {"message": "refused"}})
            return await super().handle_async_request(request)

    config = settings()
    train_in_process(config, quiet(), lambda app: Refusing(app, set(), lambda: httpx.Response(500)))
    assert metrics(config)[-1]["dropped"] == {"generation": 3}
    positions = [group.position for group in stored(config)]
    [left_out] = set(range(13)) - set(positions)
    assert len(set(positions)) == len(positions) == 12
    assert f"at {left_out} is skipped after 3 tries" in caplog.text


@pytest.mark.parametrize("off", [0.0, 0.1])
def test_an_engine_that_computes_another_policy_raises_an_alarm(
    settings: Callable[..., Config], off: float
) -> None:
    class Off(Faulty):
        """Shifts its log-probabilities by `off` on average, as weights in another precision
        would."""

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            response = await super().handle_async_request(request)
            if request.url.path != "/generate":
                return response
            answers = json.loads(await response.aread())
            for answer in answers:
                for i, pair in enumerate(answer["meta_info"]["output_token_logprobs"]):
                    pair[0] += off if i % 2 else -off
            return httpx.Response(200, json=answers)

    config, said = settings(), io.StringIO()
    train_in_process(
        config,
        Console(file=said, width=400),
        lambda app: Off(app, set(), lambda: httpx.Response(500)),
    )
    assert all(("delta_logprob" in line["alarms"]) == (off > 0) for line in metrics(config))
    # Reported once.
    assert said.getvalue().count("alarm: mean |Δ logprob| between rollout engine and trainer") == (
        off > 0
    )


def test_too_many_failures_stop_the_run_with_the_reason(settings: Callable[..., Config]) -> None:
    config = settings("--limits.max_failed_groups", "5")

    def response() -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": "the engine is out of order"}})

    with raises(
        CollectFailed, code="groups_dropped", field="limits.max_failed_groups", value="5"
    ) as raised:
        train_in_process(config, quiet(), lambda app: Faulty(app, set(range(1, 1000)), response))

    # The run has diagnosed itself, and the error says where.
    assert config.trainer.run_dir is not None
    file = config.trainer.run_dir / "diagnosis.txt"
    said = file.read_text().partition("\n")[0]
    assert said.startswith("Completions cannot be generated: 5 groups in a row were dropped")
    assert raised.value.__notes__ == [f"diagnosis: {said} ({file})"]


def test_failures_between_successes_do_not_stop_the_run(settings: Callable[..., Config]) -> None:
    """One group at a time: every second one fails, so there are never two failures in a row."""
    words = (
        "--trainer.batch_size",
        "1",
        "--trainer.max_steps",
        "3",
        "--limits.max_failed_groups",
        "2",
    )
    config = settings(*words)

    train_in_process(
        config, quiet(), lambda app: Faulty(app, {1, 3, 5}, lambda: httpx.Response(500))
    )

    assert [line["step"] for line in metrics(config)] == [1, 2, 3]
    assert metrics(config)[-1]["dropped"] == {"generation": 3}


def test_trap_tokens_are_kept_and_never_retokenised(settings: Callable[..., Config]) -> None:
    """Trap: text tokenised again, log-probabilities lost. The stored tokens are the engine's, with
    the end token."""
    answers: dict[tuple[int, ...], list[float]] = {}  # prompt and completion -> logprobs

    class Watching(Faulty):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            response = await super().handle_async_request(request)
            if request.url.path == "/generate":
                prompt = json.loads(await request.aread())["input_ids"]
                for answer in json.loads(await response.aread()):
                    pairs = answer["meta_info"]["output_token_logprobs"]
                    answers[*prompt, *answer["output_ids"]] = [pair[0] for pair in pairs]
            return response

    config = settings()
    train_in_process(config, quiet(), lambda app: Watching(app, set(), lambda: httpx.Response(500)))
    groups = stored(config)
    assert len(groups) == 12
    for group in groups:
        for completion in group.completions:
            expected = answers[*group.prompt_token_ids.tolist(), *completion.token_ids.tolist()]
            assert completion.logprobs.tolist() == pytest.approx(expected, abs=1e-6)
