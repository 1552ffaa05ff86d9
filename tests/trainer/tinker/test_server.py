"""The server over HTTP, with stand-ins for its models: what is accepted, once, and by whom."""

import asyncio
import json
import os
import random
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import numpy as np
import pytest

from common.clients.base import Unreachable
from common.errors import InvalidInput
from common.process.storage import StorageFailed
from common.settings.config import load
from common.weights.checksums import checksum
from services.rollout.engine_client import EngineClient
from tests.support.tinker.client import Client, serving, with_key
from tests.support.tinker.stand_ins import BASE, CountingLearner, EchoEngine, make_server
from trainer.tinker import app as app_module
from trainer.tinker import sampling, training
from trainer.tinker import server as server_module
from trainer.tinker import state as state_module
from trainer.tinker import store as store_module
from trainer.tinker.app import create_tinker_app
from trainer.tinker.clients import Clients
from trainer.tinker.interface import AdamParams, LoraSpec
from trainer.tinker.messages import MESSAGES
from trainer.tinker.records import TinkerOperation
from trainer.tinker.sampling import Adapters
from trainer.tinker.settings import TINKER_SETTINGS
from trainer.tinker.store import TinkerStore

_KILLS = int(os.environ.get("TINKER_KILLS", "6"))
_ANN = "tml-ann-0123456789"
_BOB = "tml-bob-0123456789"
_KEYS = {"TINKER_KEYS": f"ann={_ANN},bob={_BOB}"}


def _loss(response: httpx.Response) -> float:
    (metric,) = MESSAGES.decode("Outputs", response.content)["metrics"]
    assert metric["key"] == "loss:sum"
    value: float = metric["value"]
    return value


def _held_back(engine: EchoEngine, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Lets the engine answer only when the event is set."""
    goes_on = asyncio.Event()
    answer = engine.answer

    async def slow_answer(request: httpx.Request) -> httpx.Response:
        await goes_on.wait()
        return await answer(request)

    monkeypatch.setattr(engine, "answer", slow_answer)
    return goes_on


async def test_operations_are_applied_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    learner = CountingLearner()
    async with serving(tmp_path, learner, EchoEngine()) as client:
        run = await client.run()
        later = await client.step(run, 2)
        waiting = asyncio.create_task(client.result(later))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        first = await client.passes(run, 1)
        assert (await waiting).json()["metrics"] == {"weight:mean": 3 - 0.5 * 5}
        assert _loss(await client.result(first)) == 15
        assert (await client.result(first)).headers["content-type"] == "application/x-protobuf"


async def test_who_waits_for_a_request_that_has_not_arrived_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, CountingLearner(), EchoEngine()) as client:
        run = await client.run()
        asked = [await client.passes(run, seq) for seq in (1, 2, 4, 5)]
        await client.result(asked[1])

        monkeypatch.setattr(server_module, "POLL_S", 0.0)
        for each in asked[2:]:
            waits = await client.result(each)
            assert waits.status_code == 408
            assert waits.json()["queue_state"] == "paused_capacity"
            assert "seq_id 3 " in waits.json()["queue_state_reason"]

        monkeypatch.undo()
        await client.passes(run, 3)
        for each in asked[2:]:
            assert (await client.result(each)).status_code == 200


async def test_runs_take_turns_whatever_each_has_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = CountingLearner()
    goes_on = threading.Event()
    step = learner.optim_step

    def slow_step(run: str, adam: AdamParams) -> dict[str, float]:
        goes_on.wait(10)
        return step(run, adam)

    monkeypatch.setattr(learner, "optim_step", slow_step)
    async with serving(tmp_path, learner, EchoEngine()) as client:
        busy = await client.run(0)
        other = await client.run(1)
        ids = [await client.step(busy, number) for number in (1, 2, 3)]
        ids.append(await client.step(other, 1))
        goes_on.set()
        for each in ids:
            await client.result(each)
    runs = [run for call, run in learner.calls if call == "optim_step"]
    assert runs == [busy, other, busy, busy]


async def test_samplers_take_turns_whatever_each_has_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_AT_ONCE", 3)
    monkeypatch.setattr(sampling, "_OF_SAMPLER", 2)
    engine = EchoEngine()
    goes_on = _held_back(engine, monkeypatch)
    async with serving(tmp_path, CountingLearner(), engine) as client:
        client.session = (await client.post("create_session", tags=[]))["session_id"]
        for number in range(2):
            await client.post(
                "create_sampling_session",
                session_id=client.session,
                sampling_session_seq_id=number,
                base_model=BASE,
            )
        ids = []
        for sampler, seq, count in ((0, 0, 1), (0, 1, 9), (0, 2, 1), (1, 0, 2), (1, 1, 1)):
            made = await client.post(
                "asample",
                sampling_session_id=f"{client.session}:sample:{sampler}",
                seq_id=seq,
                prompt={"chunks": [{"tokens": [sampler, seq]}]},
                num_samples=count,
                sampling_params={"max_tokens": 4},
            )
            ids.append(made["request_id"])
        await _all_are_queued(client, ids)
        goes_on.set()
        for each in ids:
            await client.result(each)
    assert [body["input_ids"] for body in engine.requests] == [
        *([0, 0], [1, 0]),  # of its nine completions, as many count as one may have at once
        *([0, 1], [1, 1], [0, 2]),
    ]


async def _all_are_queued(client: Client, ids: list[str]) -> None:
    """Requests are read from the file before they are queued; a question reads it after them."""
    sampler = ids[-1].partition(":op:")[0]
    await client.post("retrieve_futures", target={"sampling_session_id": sampler}, timeout=0)


async def test_runs_take_turns_by_client_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client has three runs; another client's only run waits for one operation of them."""
    learner = CountingLearner()
    goes_on = threading.Event()
    step = learner.optim_step

    def slow_step(run: str, adam: AdamParams) -> dict[str, float]:
        goes_on.wait()
        return step(run, adam)

    monkeypatch.setattr(learner, "optim_step", slow_step)
    async with (
        serving(tmp_path, learner, EchoEngine(), env=_KEYS, key=_ANN) as ann,
        with_key(ann, _BOB) as bob,
    ):
        of_ann = [await ann.run(number) for number in range(3)]
        of_bob = await bob.run()
        ids = [await ann.step(run, number) for run in of_ann for number in (1, 2)]
        saved = await ann.post("save_weights", model_id=of_ann[0], seq_id=3, path="one")
        ids.append(saved["request_id"])
        ids_of_bob = [await bob.step(of_bob, number) for number in (1, 2, 3)]
        learner.calls.clear()
        goes_on.set()
        for client, asked in ((ann, ids), (bob, ids_of_bob)):
            for each in asked:
                assert (await client.result(each)).status_code == 200
    names = {**{run: f"ann {number}" for number, run in enumerate(of_ann)}, of_bob: "bob"}
    assert [(call, names[run]) for call, run in learner.calls] == [
        ("optim_step", "ann 0"),
        ("optim_step", "bob"),
        ("optim_step", "ann 1"),
        ("optim_step", "bob"),
        ("optim_step", "ann 2"),
        ("optim_step", "bob"),
        ("optim_step", "ann 0"),
        ("optim_step", "ann 1"),
        ("optim_step", "ann 2"),
        ("save", "ann 0"),
    ]


async def test_samplers_take_turns_by_client_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_AT_ONCE", 1)
    monkeypatch.setattr(sampling, "_OF_CLIENT", 1)
    monkeypatch.setattr(sampling, "_OF_SAMPLER", 1)
    engine = EchoEngine()
    goes_on = _held_back(engine, monkeypatch)
    async with (
        serving(tmp_path, CountingLearner(), engine, env=_KEYS, key=_ANN) as ann,
        with_key(ann, _BOB) as bob,
    ):
        ids = [
            await _asked(ann, sampler=sampler, seq=seq, tokens=[sampler, seq])
            for sampler in range(3)
            for seq in range(2)
        ]
        ids_of_bob = [await _asked(bob, sampler=0, seq=seq, tokens=[9, seq]) for seq in range(2)]
        await _all_are_queued(bob, ids_of_bob)
        goes_on.set()
        for client, asked in ((ann, ids), (bob, ids_of_bob)):
            for each in asked:
                await client.result(each)
    assert [body["input_ids"] for body in engine.requests] == [
        *([0, 0], [9, 0], [1, 0], [9, 1], [2, 0]),
        *([0, 1], [1, 1], [2, 1]),
    ]


async def test_one_client_leaves_room_for_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the engines, however many samplers it has; and for requests, whatever they wait for."""
    monkeypatch.setattr(sampling, "_AT_ONCE", 3)
    monkeypatch.setattr(sampling, "_OF_CLIENT", 2)
    monkeypatch.setattr(sampling, "_OF_SAMPLER", 2)
    monkeypatch.setattr(app_module, "_OF_CLIENT", 2)
    engine = EchoEngine()
    goes_on = asyncio.Event()
    answer = engine.answer

    async def slow_answer(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["input_ids"] != [9]:
            await goes_on.wait()
        return await answer(request)

    monkeypatch.setattr(engine, "answer", slow_answer)
    async with (
        serving(tmp_path, CountingLearner(), engine, env=_KEYS, key=_ANN) as ann,
        with_key(ann, _BOB) as bob,
    ):
        ids = [await _asked(ann, sampler=sampler, seq=0, tokens=[1]) for sampler in range(4)]
        (await bob.result(await _asked(bob, sampler=0, seq=0, tokens=[9]))).raise_for_status()

        waiting = [asyncio.create_task(ann.result(each)) for each in ids[:2]]
        async with asyncio.timeout(400):
            while (refused := await ann.http.get("/api/v1/healthz")).is_success:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        error = refused.json()["error"]
        assert (refused.status_code, error["field"], error["value"]) == (429, "X-API-Key", "ann")
        assert (await bob.http.get("/api/v1/healthz")).is_success
        goes_on.set()
        for each in waiting:
            assert (await each).status_code == 200
        assert (await ann.http.get("/api/v1/healthz")).is_success


async def _asked(client: Client, *, sampler: int, seq: int, tokens: list[int]) -> str:
    """Asks a sampler of the base model, which may be new, for a completion; returns the request."""
    if not client.session:
        client.session = (await client.post("create_session", tags=[]))["session_id"]
    made = await client.post(
        "create_sampling_session",
        session_id=client.session,
        sampling_session_seq_id=sampler,
        base_model=BASE,
    )
    asked = await client.post(
        "asample",
        sampling_session_id=made["sampling_session_id"],
        seq_id=seq,
        prompt={"chunks": [{"tokens": tokens}]},
        sampling_params={"max_tokens": 4},
    )
    return str(asked["request_id"])


async def test_what_is_sent_again_is_the_same_operation(tmp_path: Path) -> None:
    learner = CountingLearner()
    async with serving(tmp_path, learner, EchoEngine()) as client:
        run = await client.run()
        assert await client.run() == run
        ids = {await client.passes(run, 1) for _ in range(3)}
        step = await client.step(run, 2)
        await client.result(step)
        assert await client.step(run, 2) == step
        other = await client.http.post(
            "/api/v1/optim_step",
            json={"model_id": run, "seq_id": 2, "adam_params": {"learning_rate": 0.25}},
        )
        assert (other.status_code, other.json()["error"]["field"]) == (422, "seq_id")
    assert len(ids) == 1
    assert [call for call, _ in learner.calls] == ["create", "forward", "optim_step"]


@pytest.mark.parametrize("snapshot_s", [0.0, 1e9])
async def test_a_killed_server_continues_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot_s: float
) -> None:
    """Each of its processes is killed after it has accepted two operations, which it may or may not
    have applied.
    """
    monkeypatch.setattr(training, "SNAPSHOT_S", snapshot_s)

    async def play(directory: Path, kills: bool) -> list[bytes]:
        engine = EchoEngine()
        results: dict[str, bytes] = {}
        run = ""
        client = None
        chance = random.Random(1)
        for step in range(_KILLS):
            # Results are fetched from another process than the one that accepted.
            server = make_server(directory, CountingLearner(), engine)
            app = create_tinker_app(server, Clients({}), BASE, server.running)
            context = server.running()
            await context.__aenter__()
            http = httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
            )
            session = client.session if client else ""
            client = Client(http)
            client.session = session
            run = run or await client.run()
            accepted = [
                await client.passes(run, 2 * step + 1, token=step + 2),
                await client.step(run, 2 * step + 2),
            ]
            if kills:
                await _kill(server, after=chance.randrange(12))
                server = make_server(directory, CountingLearner(), engine)
                app = create_tinker_app(server, Clients({}), BASE, server.running)
                context = server.running()
                await context.__aenter__()
                client.http = httpx.AsyncClient(
                    transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
                )
            for request_id in accepted:
                answer = await client.result(request_id)
                assert answer.status_code == 200, answer.text
                results[request_id.partition(":")[2]] = answer.content
            await context.__aexit__(None, None, None)
        return list(results.values())

    assert await play(tmp_path / "killed", kills=True) == await play(tmp_path / "whole", False)


async def _kill(server: Any, after: int) -> None:
    """Ends a server after some switches of its tasks, without a word: nothing is written any
    more.
    """
    for _ in range(after):
        await asyncio.sleep(0.001)
    journal = server._journal
    journal._due = SimpleQueue()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)
    await asyncio.to_thread(journal._thread.shutdown)
    server._store.close()


async def test_an_operation_that_breaks_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    learner = CountingLearner()
    async with serving(tmp_path, learner, EchoEngine()) as client:
        run = await client.run()
        await client.result(await client.passes(run, 1))
        learner.breaks_at = "forward_backward"
        broken = (await client.result(await client.passes(run, 2))).json()
        assert broken["category"] == "server"
        stepped = (await client.result(await client.step(run, 3))).json()
        assert stepped["metrics"] == {"weight:mean": 3 - 0.5 * 5}
        refused = (await client.result(await client.passes(run, 4, loss="stable_reinforce"))).json()
        assert refused["category"] == "user"
        assert "loss_fn" in refused["error"]


async def test_a_run_that_breaks_as_it_comes_back_comes_back_later(tmp_path: Path) -> None:
    engine = EchoEngine()
    async with serving(tmp_path, CountingLearner(), engine) as client:
        run = await client.run()
        await client.result(await client.passes(run, 1))
    again = CountingLearner()
    again.breaks_at = "forward_backward"
    async with serving(tmp_path, again, engine) as client:
        broken = (await client.result(await client.step(run, 2))).json()
        assert broken["category"] == "server"
        stepped = (await client.result(await client.step(run, 3))).json()
        assert stepped["metrics"] == {"weight:mean": 3 - 0.5 * 5}


async def test_what_a_full_disk_keeps_waiting_is_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the run nor the sampler computes anything again when there is room."""
    monkeypatch.setattr(store_module, "AGAIN_S", 0.01)
    finish = TinkerStore.finish
    is_full = asyncio.Event()
    has_waited = asyncio.Event()
    attempts: list[str] = []
    loop = asyncio.get_running_loop()
    run = name = ""

    def finish_with_room(
        store: TinkerStore, line: str, seq: int, *result: Any, **more: Any
    ) -> None:
        if seq == 3 and is_full.is_set():
            attempts.append(line)
            if {*attempts} == {run, name} and len(attempts) > 6:
                loop.call_soon_threadsafe(has_waited.set)
            raise StorageFailed("no room", code="disk_full", status=507)
        finish(store, line, seq, *result, **more)

    monkeypatch.setattr(TinkerStore, "finish", finish_with_room)
    learner = CountingLearner()
    engine = EchoEngine()
    async with serving(tmp_path, learner, engine) as client:
        run = await client.run()
        await client.result(await client.passes(run, 1))
        made = await client.post(
            "create_sampling_session",
            session_id=client.session,
            sampling_session_seq_id=0,
            base_model=BASE,
        )
        is_full.set()
        await client.result(await client.passes(run, 2))
        waiting = [await client.passes(run, 3), await client.step(run, 4)]
        sample = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 1}}
        name = made["sampling_session_id"]
        asked = await client.post("asample", sampling_session_id=name, seq_id=3, **sample)
        async with asyncio.timeout(60):
            await has_waited.wait()
        health = await client.http.get("/health")
        assert health.status_code == 503
        assert "no room" in health.json()["reason"]
        is_full.clear()
        stepped = (await client.result(waiting[1])).json()
        assert stepped["metrics"] == {"weight:mean": 3 - 0.5 * 15}
        assert (await client.result(asked["request_id"])).status_code == 200
        assert len(engine.requests) == 1
        assert (await client.http.get("/health")).status_code == 200


async def test_without_room_for_a_snapshot_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back from what was noted."""

    class FullDisk(CountingLearner):
        def save(self, run: str, folder: Path) -> None:
            raise StorageFailed("no room", code="disk_full", status=507)

    monkeypatch.setattr(training, "SNAPSHOT_S", 0.0)
    async with serving(tmp_path, FullDisk(), EchoEngine(), resident=1) as client:
        run = await client.run()
        await client.result(await client.passes(run, 1))
        other = await client.run(1)
        await client.result(await client.step(other, 1))
        stepped = (await client.result(await client.step(run, 2))).json()
        assert stepped["metrics"] == {"weight:mean": 3 - 0.5 * 5}
        refused = await client.post("save_weights", model_id=run, seq_id=3, path="kept")
        assert (await client.result(refused["request_id"])).json()["category"] == "server"
        stepped = (await client.result(await client.step(run, 4))).json()
        assert stepped["metrics"] == {"weight:mean": 3 - 0.5 * 5}


async def test_a_run_is_deleted_with_what_waits_for_it(tmp_path: Path) -> None:
    learner = CountingLearner()
    async with serving(tmp_path, learner, EchoEngine()) as client:
        run = await client.run()
        other = await client.run(1)
        saved = await client.post("save_weights", model_id=run, seq_id=1, path="one")
        await client.result(saved["request_id"])
        assert [each.name for each in (tmp_path / "runs").glob("*/*")] == ["weights-1"]
        for seq in (2, 3, 4, 6):
            await client.step(run, seq)
        url = f"/api/v1/training_runs/{run}"
        assert (await client.http.delete(url)).status_code == 204
        assert (await client.http.get(url)).status_code == 404
        assert run not in learner.runs
        assert (await client.http.get("/api/v1/checkpoints")).json()["checkpoints"] == []
        assert not list((tmp_path / "runs").glob("*/*"))
        assert (await client.result(await client.step(other, 1))).status_code == 200
        assert await client.run() == run
        assert (await client.result(await client.step(run, 1))).status_code == 200


async def test_an_operation_of_a_run_that_is_gone_is_in_nobodys_way(tmp_path: Path) -> None:
    """As one that was accepted while its run was deleted."""
    engine = EchoEngine()
    async with serving(tmp_path, CountingLearner(), engine) as client:
        run = await client.run()
    store = TinkerStore(tmp_path / "tinker.sqlite")
    with store.transaction():
        store.accept(TinkerOperation("gone:train:0", 1, "optim_step", b"{}"))
        store.accept(TinkerOperation("gone:sample:0", 0, "sample", b"{}"))
    store.close()
    async with serving(tmp_path, CountingLearner(), engine) as client:
        stepped = await client.result(await client.step(run, 1))
        assert stepped.json()["metrics"] == {"weight:mean": 3.0}


async def test_a_run_that_was_refused_is_in_nobodys_way(tmp_path: Path) -> None:
    async with serving(tmp_path, CountingLearner(), EchoEngine(), resident=1) as client:
        run = await client.run()
        saved = await client.post("save_weights_for_sampler", model_id=run, seq_id=1, path="one")
        path = (await client.result(saved["request_id"])).json()["path"]
        made = await client.post(
            "load_weights",
            session_id=client.session,
            model_seq_id=7,
            path=path,
            optimizer=True,
        )
        assert (await client.result(made["request_id"])).json()["category"] == "user"
        step = await client.step(made["model_id"], 1)
        assert (await client.result(step)).json()["category"] == "user"
        stepped = (await client.result(await client.step(run, 2))).json()
        assert stepped["metrics"] == {"weight:mean": 3.0}


async def test_adapters_stay_while_there_is_room_and_come_back(tmp_path: Path) -> None:
    engine = EchoEngine()
    control = EngineClient("engine", "http://engine", transport=httpx.MockTransport(engine.answer))
    adapters = Adapters(lambda: [control], most=4)
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        file = folder / "adapter_model.safetensors"
        file.write_bytes(bytes([number]))
        name = f"{number}@{checksum(file)}"
        async with adapters.use(name, folder):
            assert len(engine.adapters) == min(number + 1, 4)
    async with adapters.use(name, folder):
        engine.adapters.clear()
        async with adapters.use(name, folder, again=True):
            assert list(engine.adapters) == [name]
    assert set(adapters._users.values()) == {0}


async def test_what_cannot_be_repeated_is_told(tmp_path: Path) -> None:
    learner = CountingLearner()
    engine = EchoEngine()
    async with serving(tmp_path, learner, engine) as client:
        run = await client.run()
        await client.result(await client.passes(run, 1))
    again = CountingLearner()
    again.noise = 1e-9
    async with serving(tmp_path, again, engine) as client:
        failed = (await client.result(await client.step(run, 2))).json()
        assert failed["category"] == "server"
        assert f"{run}:op:1" in failed["error"]


async def test_idle_runs_give_way_and_come_back(tmp_path: Path) -> None:
    learner = CountingLearner()
    async with serving(tmp_path, learner, EchoEngine(), resident=2) as client:
        runs = [await client.run(number, seed=number + 1) for number in range(4)]
        for run in runs:
            await client.passes(run, 1)
        answers = [await client.result(await client.step(run, 2)) for run in runs]
        assert [answer.json()["metrics"]["weight:mean"] for answer in answers] == [
            seed - 0.5 * 5 for seed in (1, 2, 3, 4)
        ]
        assert len(learner.runs) == 2


async def test_saved_weights_load_list_expire_and_go(tmp_path: Path) -> None:
    engine = EchoEngine()
    async with serving(tmp_path, CountingLearner(), engine) as client:
        run = await client.run()
        await client.passes(run, 1)
        saved = await client.post("save_weights", model_id=run, seq_id=2, path="one")
        path = (await client.result(saved["request_id"])).json()["path"]
        assert path == f"tinker://{run}/weights/one"
        await client.step(run, 3)
        taken = await client.post("save_weights", model_id=run, seq_id=4, path="one")
        assert (await client.result(taken["request_id"])).json()["category"] == "user"
        made = await client.post(
            "load_weights",
            session_id=client.session,
            model_seq_id=7,
            path=path,
            optimizer=True,
        )
        copy = (await client.result(made["request_id"])).json()["model_id"]
        first, second = [
            (await client.result(await client.step(name, seq))).json()["metrics"]
            for name, seq in ((copy, 1), (run, 5))
        ]
        assert first == second

        listed = (await client.http.get(f"/api/v1/training_runs/{run}/checkpoints")).json()
        assert [each["checkpoint_id"] for each in listed["checkpoints"]] == ["weights/one"]
        info = await client.post("weights_info", tinker_path=path)
        assert info["lora_rank"] == 4
        gone = await client.http.delete(f"/api/v1/training_runs/{run}/checkpoints/weights/one")
        assert gone.status_code == 204
        assert (
            await client.http.post("/api/v1/weights_info", json={"tinker_path": path})
        ).status_code == 404
        assert not list((tmp_path / "runs").glob("*/weights-2"))


async def test_downloads_need_their_link_and_no_key(tmp_path: Path) -> None:
    options = {"env": _KEYS, "key": _ANN}
    async with serving(tmp_path, CountingLearner(), EchoEngine(), **options) as client:
        run = await client.run()
        saved = await client.post("save_weights_external", model_id=run, seq_id=1, path="out")
        await client.result(saved["request_id"])
        listed = await client.http.get(
            f"/api/v1/training_runs/{run}/checkpoints/external_weights/out/external_weights_urls"
        )
        url = listed.json()["urls"]["adapter_model.safetensors"]
        del client.http.headers["x-api-key"]
        assert (await client.http.get(url)).content == np.array([3.0, 0.0]).tobytes()
        for wrong in (url[:-1] + "!", url[:-1] + "%C3%A4", url.replace("expires=1", "expires=9")):
            assert (await client.http.get(wrong)).status_code == 401


async def test_samples_are_of_the_weights_that_were_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_AGAIN_S", 0.01)
    engine = EchoEngine()
    async with serving(tmp_path, CountingLearner(), engine) as client:
        run = await client.run()
        for number in range(4):
            saved = await client.post(
                "save_weights_for_sampler",
                model_id=run,
                seq_id=3 * number + 1,
                sampling_session_seq_id=number,
            )
            again = await client.post(
                "save_weights_for_sampler",
                model_id=run,
                seq_id=3 * number + 1,
                sampling_session_seq_id=number + 100,
            )
            assert again == saved
            made = (await client.result(saved["request_id"])).json()
            assert made["sampling_session_id"] == f"{run}:sample:{3 * number + 1}"
            await client.passes(run, 3 * number + 2)
            await client.step(run, 3 * number + 3)
        answers = [
            await _sampled(client, f"{run}:sample:{3 * number + 1}", seq=0)
            for number in (3, 0, 0, 1)
        ]
        weights = [_logprobs(answer)[0] for answer in answers]
        assert weights == [3 - 3 * 2.5, 3, 3, 0.5]
        assert len({answer.headers["x-sampled-from"] for answer in answers}) == 3
        # The engine keeps two of those that no request uses.
        assert len(engine.adapters) == 2

        # A restarted engine has none of them.
        engine.adapters.clear()
        engine.restarts = 2
        assert _logprobs(await _sampled(client, f"{run}:sample:4", seq=1))[0] == 0.5

        file = next((tmp_path / "runs").glob("*/sampler_weights-4/adapter_model.safetensors"))
        file.write_bytes(b"0" * 16)
        engine.adapters.clear()
        failed = (await _sampled(client, f"{run}:sample:4", seq=2)).json()
        assert failed["category"] == "server"
        assert "checksum" in failed["error"]


async def test_a_sample_waits_for_an_engine_that_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for its adapters for less long than a start takes."""
    monkeypatch.setattr(sampling, "_AGAIN_S", 0.01)
    failures = [Unreachable("engine did not answer GET /v1/models in time") for _ in range(3)]
    adapters = EngineClient.adapters

    async def adapters_later(engine: EngineClient) -> dict[str, str]:
        if failures:
            raise failures.pop()
        return await adapters(engine)

    monkeypatch.setattr(EngineClient, "adapters", adapters_later)
    async with serving(tmp_path, CountingLearner(), EchoEngine()) as client:
        run = await client.run()
        saved = await client.post("save_weights_for_sampler", model_id=run, seq_id=1)
        name = (await client.result(saved["request_id"])).json()["sampling_session_id"]
        assert _logprobs(await _sampled(client, name, seq=0))[0] == 3
    assert not failures


async def test_a_loop_that_goes_on_from_a_checkpoint_gets_the_same_samples(tmp_path: Path) -> None:
    async def sampled(client: Client, run: str, seq: int) -> bytes:
        saved = await client.post("save_weights_for_sampler", model_id=run, seq_id=seq)
        name = (await client.result(saved["request_id"])).json()["sampling_session_id"]
        return (await _sampled(client, name, seq=0)).content

    async with serving(tmp_path, CountingLearner(), EchoEngine()) as client:
        run = await client.run()
        first = await sampled(client, run, 1)
        saved = await client.post("save_weights", model_id=run, seq_id=2, path="one")
        path = (await client.result(saved["request_id"])).json()["path"]
        expected = await sampled(client, run, 3)
        assert expected != first  # the weights are the same, but the samples are others

        client.session = (await client.post("create_session", tags=[]))["session_id"]
        made = await client.post(
            "load_weights", session_id=client.session, model_seq_id=0, path=path, optimizer=True
        )
        again = (await client.result(made["request_id"])).json()["model_id"]
        assert await sampled(client, again, 1) == expected
        assert await sampled(client, again, 2) not in (expected, first)
        await client.step(again, 3)
        assert (
            await sampled(client, again, 4) == first
        )  # of a gradient of 0: the weights are the same

        for number in range(2):
            await client.post(
                "create_sampling_session",
                session_id=client.session,
                sampling_session_seq_id=number,
                base_model=BASE,
            )
        samples = [
            (await _sampled(client, f"{client.session}:sample:{number}", seq=0)).content
            for number in range(2)
        ]
        assert samples[0] != samples[1]
        last = {"prompt_logprobs": False, "prompt_logprobs_last_n": 1}
        answer = await _sampled(client, f"{client.session}:sample:1", seq=1, **last)
        assert answer.headers["content-type"] == "application/x-protobuf"


async def _sampled(client: Client, sampler: str, seq: int, **more: Any) -> httpx.Response:
    made = await client.post(
        "asample",
        sampling_session_id=sampler,
        seq_id=seq,
        prompt={"chunks": [{"tokens": more.pop("tokens", [1, 2]), "type": "encoded_text"}]},
        sampling_params={"max_tokens": 4, **more.pop("params", {})},
        num_samples=2,
        prompt_logprobs=more.pop("prompt_logprobs", True),
        **more,
    )
    assert len(made["sample_sequence_ids"]) == 2
    return await client.result(made["request_id"])


def _logprobs(response: httpx.Response) -> list[float]:
    sequence = MESSAGES.decode("Samples", response.content)["sequences"][-1]
    found: list[float] = np.frombuffer(sequence["logprobs"], "<f4").tolist()
    return found


async def test_one_question_tells_what_a_sampler_has_finished(tmp_path: Path) -> None:
    engine = EchoEngine()
    async with serving(tmp_path, CountingLearner(), engine) as client:
        sampler = await client.sampler_of_base()
        answers = [await _sampled(client, sampler, seq=seq) for seq in (0, 1, 0)]
        assert answers[0].content == answers[2].content != answers[1].content
        target = {"sampling_session_id": sampler}
        news = await client.post("retrieve_futures", target=target)
        ids = [each["request_id"] for each in news["completions"]]
        assert sorted(ids) == [f"{sampler}:op:0", f"{sampler}:op:1"]
        assert await client.post("join_sampling_session", sampling_session_id=sampler) == {
            "type": "join_sampling_session",
            "client_counter": 1,
        }
        rest = await client.post(
            "retrieve_futures",
            target=target,
            prev_cursor=news["cursor"],
            timeout=0,
            retrieved_request_ids=ids,
        )
        assert rest["completions"] == []
        assert (await client.result(ids[0])).status_code == 404


async def test_other_tokens_are_scored_where_the_client_asks(tmp_path: Path) -> None:
    # The stand-in says −place − token / 64.
    async with serving(
        tmp_path, CountingLearner(), EchoEngine(), stable_reinforce="cispo"
    ) as client:
        sampler = await client.sampler_of_base()
        dense = {"data": [9, -1, 3, 8], "dtype": "int64", "shape": [2, 2]}
        prompt = [5, 6, 7]
        answer = await _sampled(
            client,
            sampler,
            seq=0,
            tokens=prompt,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=1,
            prompt_logprobs_last_n=2,
            target_prompt_logprobs=dense,
            record_stability_info=True,
        )
        found = MESSAGES.decode("Samples", answer.content)
        top = found["top_of_prompt"]
        assert np.frombuffer(top["tokens"], "<i4").tolist() == [0, 0, 0, 1, 0, 1]
        logprobs = np.frombuffer(top["logprobs"], "<f4").tolist()
        assert logprobs[2:] == [-1, -1 - 1 / 64, -2, -2 - 1 / 64]
        # Of the two sampled tokens, behind a prompt of three.
        sampled = found["sequences"][0]["top"]
        assert np.frombuffer(sampled["logprobs"], "<f4").tolist() == [-3, -4]
        targets = np.frombuffer(found["targets"]["dense"], "<f4")
        assert targets.tolist() == [-1 - 9 / 64, 0, -2 - 3 / 64, -2 - 8 / 64]

        sparse = {**dense, "data": [3, 9], "sparse_crow_indices": [0, 0, 2]}
        sparse["sparse_col_indices"] = [0, 1]
        answer = await _sampled(
            client, sampler, seq=1, tokens=prompt, target_prompt_logprobs=sparse
        )
        layout = MESSAGES.decode("Samples", answer.content)["targets"]["sparse"]
        assert np.frombuffer(layout["values"], "<f4").tolist() == [-2 - 3 / 64, -2 - 9 / 64]
        assert np.frombuffer(layout["row_ends"], "<i8").tolist() == [0, 0, 2]
        nothing = await _sampled(
            client,
            sampler,
            seq=2,
            tokens=prompt,
            target_prompt_logprobs={**dense, "data": [-1, -1, -1, -1]},
        )
        targets = MESSAGES.decode("Samples", nothing.content)["targets"]["dense"]
        assert np.frombuffer(targets, "<f4").tolist() == [0, 0, 0, 0]

        others: list[dict[str, Any]] = [
            {**dense, "shape": [3, 2]},
            {**dense, "shape": [1 << 40, 1 << 40]},
            {**dense, "data": [3]},
            {**sparse, "sparse_crow_indices": []},
            {**sparse, "sparse_crow_indices": [0, 2]},
            {**sparse, "sparse_crow_indices": [2, 1, 0]},
            {**sparse, "sparse_col_indices": []},
            {**sparse, "sparse_col_indices": [0, 2]},
            {**sparse, "sparse_col_indices": [-1, 0]},
        ]
        for number, other in enumerate(others):
            wrong = await _sampled(
                client, sampler, seq=3 + number, tokens=prompt, target_prompt_logprobs=other
            )
            assert wrong.json()["category"] == "user", other
            assert "target_prompt_logprobs" in wrong.json()["error"]


async def test_clients_see_only_what_is_theirs(tmp_path: Path) -> None:
    engine = EchoEngine()
    options = {"env": _KEYS, "key": _ANN, "most_runs": 1}
    async with serving(tmp_path, CountingLearner(), engine, **options) as one:
        run = await one.run()
        over = await one.http.post(
            "/api/v1/create_model",
            json={
                "session_id": one.session,
                "model_seq_id": 1,
                "base_model": BASE,
                "lora_config": {"rank": 1},
            },
        )
        assert over.status_code == 413
        one.http.headers["x-api-key"] = _BOB
        for call in ("get_info", "optim_step"):
            body = {"model_id": run, "seq_id": 1, "adam_params": {}}
            if call == "get_info":
                body = {"model_id": run}
            assert (await one.http.post(f"/api/v1/{call}", json=body)).status_code == 404
        assert (await one.result(f"{run}:op:0")).status_code == 404
        assert (await one.http.get("/api/v1/training_runs")).json()["training_runs"] == []
        for wrong in ("", "tml-nobody-0123456789"):
            one.http.headers["x-api-key"] = wrong
            assert (await one.http.get("/api/v1/healthz")).status_code == 401
        one.http.headers["x-api-key"] = _ANN
        await one.http.delete(f"/api/v1/training_runs/{run}")
        assert await one.run(1) != run


class _Refusing(CountingLearner):
    def create(self, run: str, spec: LoraSpec) -> None:
        if spec.rank == 7:
            raise InvalidInput("no such rank", field="lora_config.rank", value=spec.rank)
        if spec.rank == 8:
            raise RuntimeError("out of memory")
        super().create(run, spec)


async def _created(client: Client, number: int, rank: int = 4) -> httpx.Response:
    """Asks for a run."""
    if not client.session:
        client.session = (await client.post("create_session", tags=[]))["session_id"]
    body = {"session_id": client.session, "model_seq_id": number, "base_model": BASE}
    lora = {"rank": rank}
    return await client.http.post("/api/v1/create_model", json={**body, "lora_config": lora})


async def test_only_runs_that_there_are_count_for_a_client(tmp_path: Path) -> None:
    """Not what failed at creation, for the client's reason or the server's, and not what was
    deleted; neither at once nor after the server was started again.
    """
    runs = {}
    engine = EchoEngine()
    async with serving(tmp_path, _Refusing(), engine, most_runs=2) as client:
        await client.run(0)
        for number, rank in ((1, 7), (2, 8), (3, 7)):
            made = (await _created(client, number, rank)).json()
            runs[number] = made["model_id"]
            assert "category" in (await client.result(made["request_id"])).json()
        saved = await client.post(
            "save_weights_for_sampler", model_id=client.session + ":train:0", seq_id=1, path="one"
        )
        path = (await client.result(saved["request_id"])).json()["path"]
        loaded = await client.post(
            "load_weights", session_id=client.session, model_seq_id=4, path=path, optimizer=True
        )
        assert (await client.result(loaded["request_id"])).json()["category"] == "user"
        session = client.session

    for number in (5, 6):
        async with serving(tmp_path, _Refusing(), engine, most_runs=2) as client:
            client.session = session
            # What failed is told again, also to who creates it again.
            again = (await _created(client, 1, rank=7)).json()
            assert "no such rank" in (await client.result(again["request_id"])).json()["error"]
            listed = (await client.http.get("/api/v1/training_runs")).json()["training_runs"]
            assert [each["training_run_id"] for each in listed] == [f"{session}:train:0"]
            found = (await client.http.get(f"/api/v1/sessions/{session}")).json()
            assert found["training_run_ids"] == [f"{session}:train:0"]

            made = await _created(client, number)
            assert (await client.result(made.json()["request_id"])).json()["model_id"]
            assert (await _created(client, number + 10)).status_code == 413
            await client.http.delete(f"/api/v1/training_runs/{made.json()['model_id']}")


async def test_of_runs_asked_for_at_once_no_more_than_allowed_are_created(tmp_path: Path) -> None:
    async with serving(tmp_path, CountingLearner(), EchoEngine(), most_runs=2) as client:
        client.session = (await client.post("create_session", tags=[]))["session_id"]
        answers = await asyncio.gather(*(_created(client, number) for number in range(5)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 413, 413, 413]


async def test_a_run_whose_server_was_killed_before_it_was_created_counts_once(
    tmp_path: Path,
) -> None:
    """It is created, or fails, when the server is started again."""
    for number, (rank, counts) in enumerate([(4, True), (7, False)]):
        directory = tmp_path / str(number)
        server = make_server(directory, _Refusing(), EchoEngine(), most_runs=1)
        app = create_tinker_app(server, Clients({}), BASE, server.running)
        context = server.running()
        await context.__aenter__()
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
        client = Client(http)
        made = (await _created(client, 0, rank)).json()
        await _kill(server, after=0)
        async with serving(directory, _Refusing(), EchoEngine(), most_runs=1) as again:
            again.session = client.session
            await again.result(made["request_id"])
            other = await _created(again, 1)
            assert other.status_code == (413 if counts else 200)


@pytest.mark.parametrize(
    ("call", "body", "field"),
    [
        ("copy_weights", {}, "path"),
        ("create_custom_loss", {}, "path"),
        ("create_model", {"base_model": BASE}, "lora_config"),
        ("asample", {"prompt_alt_tokens_k": 3}, "prompt_alt_tokens_k"),
        ("asample", {"record_stability_info": True}, "record_stability_info"),
        ("asample", {"prompt": {"chunks": [{"type": "image", "data": "eA=="}]}}, "prompt.chunks"),
        ("load_weights", {"weights_access_token": "x"}, "weights_access_token"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, call: str, body: dict[str, Any], field: str
) -> None:
    whole: dict[str, dict[str, Any]] = {
        "create_model": {"session_id": "s", "model_seq_id": 0},
        "asample": {
            "prompt": {"chunks": []},
            "sampling_params": {},
            "sampling_session_id": "s",
            "seq_id": 0,
        },
        "load_weights": {"session_id": "s", "model_seq_id": 0, "path": "p", "optimizer": True},
    }
    async with serving(tmp_path, CountingLearner(), EchoEngine()) as client:
        answer = await client.http.post(f"/api/v1/{call}", json={**whole.get(call, {}), **body})
        assert answer.status_code in (404, 422)
        error = answer.json()["error"]
        assert error["field"] == field
        assert error["remedy"].startswith("use ")


_IMAGE = {"data": [{"model_input": [{"image": b"x"}]}], "loss": "cross_entropy"}


@pytest.mark.parametrize(
    ("call", "body", "field"),
    [
        ("optim_step", {"adam_params": {"learning_rate": "nan"}}, "adam_params.learning_rate"),
        ("optim_step", {"adam_params": {"learning_rate": -1}}, "adam_params.learning_rate"),
        ("optim_step", {"adam_params": {"beta2": 1}}, "adam_params.beta2"),
        ("optim_step", {"adam_params": {"eps": "inf"}}, "adam_params.eps"),
        ("optim_step", {"adam_params": {"beta3": 0}}, "adam_params.beta3"),
        ("optim_step", {}, "adam_params"),
        ("save_weights", {"path": "../größe"}, "path"),
        ("save_weights", {"ttl_seconds": 5}, "ttl_seconds"),
        ("save_weights_for_sampler", {"kind": "inflight"}, "kind"),
        ("save_weights_external", {"path": "p", "age_encryption_recipients": ["age1x"]}, "age_enc"),
        ("load_weights", {"path": "tinker://none", "optimizer": True}, "checkpoint"),
        ("load_weights", {"optimizer": 7}, "path"),
        ("forward_backward", _IMAGE, "data.0.model_input"),
    ],
)
async def test_a_refused_operation_counts_and_those_after_it_are_applied(
    tmp_path: Path, call: str, body: dict[str, Any], field: str
) -> None:
    """The SDK goes on with the next number, whatever became of the one before."""
    async with serving(tmp_path, CountingLearner(), EchoEngine()) as client:
        run = await client.run()
        later = await client.step(run, 2)
        if call == "forward_backward":
            content = MESSAGES.encode("Pass", {"run": run, "seq": 1, **body})
            kind = {"content-type": "application/x-protobuf"}
            answer = await client.http.post(f"/api/v1/{call}", content=content, headers=kind)
            refused = answer.json()["request_id"]
        else:
            refused = (await client.post(call, model_id=run, seq_id=1, **body))["request_id"]
        failed = await client.result(refused)
        assert failed.json()["category"] == "user"
        assert f"field: {field}" in failed.json()["error"]
        assert (await client.result(later)).json()["metrics"] == {"weight:mean": 3.0}


async def test_numbers_beyond_those_of_a_file_are_refused(tmp_path: Path) -> None:
    """By their names, and nothing else fails with them."""
    async with serving(tmp_path, CountingLearner(), EchoEngine()) as client:
        run = await client.run()
        asked = await _asked(client, sampler=0, seq=0, tokens=[1])
        sampler = asked.partition(":op:")[0]
        sample = {"prompt": {"chunks": []}, "sampling_params": {}, "sampling_session_id": sampler}
        target = {"sampling_session_id": sampler}
        for number in (1 << 63, (1 << 64) - 1):
            for call, body, field in (
                ("optim_step", {"model_id": run, "seq_id": number}, "seq_id"),
                ("asample", {**sample, "seq_id": number}, "seq_id"),
                ("retrieve_futures", {"target": target, "prev_cursor": number}, "prev_cursor"),
                (
                    "retrieve_futures",
                    {"target": {**target, "cloned_sampler_id": number}},
                    "target.cloned_sampler_id",
                ),
            ):
                answer = await client.http.post(f"/api/v1/{call}", json=body)
                assert (answer.status_code, answer.json()["error"]["field"]) == (422, field)
            content = MESSAGES.encode("Pass", {"run": run, "seq": number})
            kind = {"content-type": "application/x-protobuf"}
            answer = await client.http.post("/api/v1/forward", content=content, headers=kind)
            assert (answer.status_code, answer.json()["error"]["field"]) == (422, "seq_id")
            for request_id in (f"{run}:op:{number}", f"{run}:op:\u0661", f"{run}:op:\u00b2"):
                assert (await client.result(request_id)).status_code == 404
            gone = {
                "target": target,
                "timeout": 0,
                "retrieved_request_ids": [f"{sampler}:op:{number}"],
            }
            assert (await client.http.post("/api/v1/retrieve_futures", json=gone)).is_success
        assert (await client.result(await client.step(run, 1))).status_code == 200


async def test_a_sampler_keeps_its_weights_and_the_numbers_of_its_clients(tmp_path: Path) -> None:
    async with serving(tmp_path, CountingLearner(), EchoEngine()) as client:
        run = await client.run()
        saved = await client.post(
            "save_weights_for_sampler", model_id=run, seq_id=1, path="weights"
        )
        path = (await client.result(saved["request_id"])).json()["path"]
        made = {"session_id": client.session, "sampling_session_seq_id": 5}
        name = (await client.post("create_sampling_session", **made, base_model=BASE))[
            "sampling_session_id"
        ]
        joined = await client.post("join_sampling_session", sampling_session_id=name)
        await client.post("create_sampling_session", **made, base_model=BASE)
        again = await client.post("join_sampling_session", sampling_session_id=name)
        assert again["client_counter"] == joined["client_counter"] + 1
        other = await client.http.post(
            "/api/v1/create_sampling_session", json={**made, "model_path": path}
        )
        assert (other.status_code, other.json()["error"]["field"]) == (
            422,
            "sampling_session_seq_id",
        )


async def test_queues_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_WAITING", 3)
    async with serving(tmp_path, CountingLearner(), EchoEngine()) as client:
        run = await client.run()
        for seq in (2, 3, 4):  # 1 never comes
            await client.step(run, seq)
        body = {"model_id": run, "seq_id": 5, "adam_params": {}}
        assert (await client.http.post("/api/v1/optim_step", json=body)).status_code == 429


async def test_a_finished_session_takes_nothing_more(tmp_path: Path) -> None:
    async with serving(tmp_path, CountingLearner(), EchoEngine()) as client:
        run = await client.run()
        body = {"session_id": client.session}
        await client.post("session_heartbeat", **body)
        url = f"/api/v1/sessions/{client.session}/finish"
        assert (await client.http.post(url, json={"detail": None})).status_code == 204
        assert (await client.http.post("/api/v1/session_heartbeat", json=body)).status_code == 410
        # Its runs stay, for whoever continues them.
        assert (await client.post("get_info", model_id=run))["model_id"] == run
        found = (await client.http.get(f"/api/v1/sessions/{client.session}")).json()
        assert found["training_run_ids"] == [run]


async def test_a_sample_in_work_survives_the_end_of_a_server_but_not_its_client(
    tmp_path: Path,
) -> None:
    engine = EchoEngine()
    engine.hangs = True
    ids = []
    async with serving(tmp_path, CountingLearner(), engine) as client:
        session = (await client.post("create_session", tags=[]))["session_id"]
        await client.post(
            "create_sampling_session",
            session_id=session,
            sampling_session_seq_id=0,
            base_model=BASE,
        )
        for seq in range(2):
            made = await client.post(
                "asample",
                sampling_session_id=f"{session}:sample:0",
                seq_id=seq,
                prompt={"chunks": [{"tokens": [1]}]},
                sampling_params={"max_tokens": 4},
            )
            ids.append(made["request_id"])
        await asyncio.sleep(0.05)
        cancelled = await client.http.post("/api/v1/cancel_future", json={"request_id": ids[1]})
        assert cancelled.status_code == 204
        assert (await client.result(ids[1])).json()["category"] == "user"
    engine.hangs = False
    async with serving(tmp_path, CountingLearner(), engine) as client:
        answer = await client.result(ids[0])
        assert answer.headers["content-type"] == "application/x-protobuf"


async def test_only_the_newest_unnamed_weights_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "KEPT_UNNAMED", 2)
    async with serving(tmp_path, CountingLearner(), EchoEngine()) as client:
        run = await client.run()
        for number in range(4):
            saved = await client.post(
                "save_weights_for_sampler",
                model_id=run,
                seq_id=number + 1,
                sampling_session_seq_id=number,
                **({"path": "named"} if number == 0 else {}),
            )
            await client.result(saved["request_id"])
        found = (await client.http.get(f"/api/v1/sessions/{client.session}")).json()
        assert {name[-1] for name in found["sampler_ids"]} == {"3", "4"}
        folders = await asyncio.to_thread(list, tmp_path.glob("runs/*/sampler_weights-*"))  # noqa: ASYNC240
        assert len(folders) == 3


def test_a_short_context_needs_no_other_setting() -> None:
    words = ["--model.name", "model", "--rollout.max_context_tokens", "256"]
    config = load(words, {}, prog="rlhf tinker", subset=TINKER_SETTINGS)
    assert config.rollout.max_context_tokens == 256
