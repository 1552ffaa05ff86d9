"""Rollouts beside training: publishing overlaps, staleness is bounded, and a resumed run trains on
each prompt once."""

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from rich.console import Console

from common.errors import ConfigError, ServiceError
from common.settings.config import Config, load
from common.wire.codec import decode_groups
from common.wire.schemas import Group, WeightManifest
from services.engine.scheduler import Scheduler
from tests.support.batches.groups import batch_of
from tests.support.errors import raises
from tests.support.paths import ROOT
from tests.support.runs.in_process import metrics
from trainer import train_in_process
from trainer.algorithms.batch import Batch
from trainer.backends.engines import DirectPublisher
from trainer.policy import checkpoint
from trainer.policy.policy import Policy
from trainer.rollouts.collector import CollectFailed
from trainer.timing import PUBLISHING, StageClock
from trainer.weights.versions import Weights

pytestmark = pytest.mark.integration

Settings = Callable[..., Config]
FRESH = 4
"""Groups per step."""
LONG = 180
"""Tokens of a long answer."""


@pytest.fixture
def settings(base_model: Path, tmp_path: Path) -> Settings:
    """Makes the settings of a run of small steps on the built-in task."""

    def make(*more: str) -> Config:
        words = [
            *(
                "--config",
                str(ROOT / "jobgroup/configs/tiny-cpu.yaml"),
                "--model.name",
                str(base_model),
            ),
            *("--trainer.run_dir", str(tmp_path / "run"), "--state_dir", str(tmp_path / "state")),
            *(
                "--trainer.batch_size",
                str(FRESH),
                "--trainer.max_steps",
                "5",
                "--sampling.group_size",
                "4",
            ),
            *(
                "--evaluation.samples",
                "0",
                "--optimizer.warmup_steps",
                "0",
                "--reward.workers",
                "1",
            ),
        ]
        return load([*words, *more], {})

    return make


def run(
    config: Config, transport: Callable[[FastAPI], httpx.AsyncBaseTransport] | None = None
) -> None:
    train_in_process(config, Console(quiet=True), transport)


def trained(config: Config) -> list[Group]:
    """Returns the groups that were trained on, in the order of their prompts."""
    with closing(sqlite3.connect(config.state_dir / "replay" / "replay.db")) as db:
        blobs = [
            row[0]
            for row in db.execute(
                "SELECT data FROM groups JOIN blobs USING (key) WHERE state = 'consumed'"
            )
        ]
    groups = [decode_groups(b"\x81\xa6groups\x91" + blob)[0] for blob in blobs]
    return sorted(groups, key=lambda group: group.position)


class Numbered(httpx.AsyncBaseTransport):
    """Counts the calls to `/generate`, from 1."""

    def __init__(self, app: FastAPI) -> None:
        self.inner, self.calls = httpx.ASGITransport(app), 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/generate":
            return await self.inner.handle_async_request(request)
        self.calls += 1
        return await self.generate(request, self.calls)

    async def generate(self, request: httpx.Request, call: int) -> httpx.Response:
        return await self.inner.handle_async_request(request)


@pytest.mark.slow
def test_an_interrupted_run_trains_on_every_prompt_exactly_once(settings: Settings) -> None:
    class Interrupted(Numbered):
        """Never answers the second prompt, so all others overtake it; fails every call after the
        first 4 × FRESH."""

        async def generate(self, request: httpx.Request, call: int) -> httpx.Response:
            if call == 2:
                await asyncio.Event().wait()
            if call > 4 * FRESH:
                return httpx.Response(400, json={"error": {"message": "interrupted"}})
            return await super().generate(request, call)

    words = (
        "--trainer.max_staleness",
        "2",
        "--trainer.when_stale",
        "drop",
        "--data.num_samples",
        "24",
        "--trainer.num_epochs",
        "1",
        "--trainer.max_steps",
        "6",
    )
    config = settings(*words, "--checkpoint.every", "1", "--limits.max_failed_groups", "1")
    with pytest.raises(CollectFailed, match="interrupted"):
        run(config, Interrupted)
    assert config.trainer.run_dir is not None
    path = checkpoint.newest(config.trainer.run_dir / "checkpoints")
    assert path is not None
    state = checkpoint.load_state(checkpoint.read_state(path), path)
    assert state.position == 1
    assert len(state.finished) >= FRESH * state.step - 1 > 0
    assert state.finished == sorted({group.position for group in trained(config)} - {0})
    run(settings(*words))
    groups = trained(config)
    assert [group.position for group in groups] == list(range(24))
    assert len({group.prompt_id for group in groups}) == 24
    assert [line["step"] for line in metrics(config)] == list(range(1, 7))


@pytest.mark.slow
def test_publishing_goes_on_beside_the_next_update_in_order(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, updated, published, busy = threading.Event(), threading.Event(), [], threading.Lock()
    publish, update = DirectPublisher.publish, Policy.update

    def watched_publish(self: DirectPublisher, weights: Weights, version: int) -> None:
        assert busy.acquire(blocking=False), "two versions on their way"
        # Version 1 is published only after the second update, which must not wait for it.
        if version == 1:
            assert updated.wait(400)
        publish(self, weights, version)
        published.append(version)
        busy.release()

    def watched_update(self: Policy, batch: Batch) -> Any:
        is_second = self.step == 1
        # The third batch was sampled with version 0 then, however slow the engine is.
        if is_second:
            assert answered.wait(400)
        found = update(self, batch)
        if is_second:
            updated.set()
        return found

    class Watched(Numbered):
        done = 0

        async def generate(self, request: httpx.Request, call: int) -> httpx.Response:
            response = await super().generate(request, call)
            self.done += 1
            if self.done == 3 * FRESH:
                answered.set()
            return response

    monkeypatch.setattr(DirectPublisher, "publish", watched_publish)
    monkeypatch.setattr(Policy, "update", watched_update)
    config = settings("--trainer.max_staleness", "2")
    run(config, Watched)
    assert published == [0, 1, 2, 3, 4, 5]
    lines = metrics(config)
    assert max(line["staleness"] for line in lines) == 2
    assert not any(line["dropped"] for line in lines)


def test_weights_that_the_engine_refuses_stop_the_run_with_the_reason(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = DirectPublisher.write

    def damaged(
        self: DirectPublisher, weights: Weights, version: int
    ) -> tuple[WeightManifest, Path]:
        manifest, directory = write(self, weights, version)
        if version == 2:
            (directory / "model.safetensors").write_bytes(b"damaged")
        return manifest, directory

    monkeypatch.setattr(DirectPublisher, "write", damaged)
    config = settings("--trainer.max_staleness", "1")
    with pytest.raises(ServiceError, match=r"engine: .*the weights cannot be read"):
        run(config)
    # The next batch may have been collected already.
    assert [line["step"] for line in metrics(config)] in ([1, 2], [1, 2, 3])


def test_an_evaluation_has_the_weights_of_its_step(settings: Settings) -> None:
    versions: list[int] = []

    class Watching(Numbered):
        async def generate(self, request: httpx.Request, call: int) -> httpx.Response:
            response = await super().generate(request, call)
            if json.loads(await request.aread())["sampling_params"]["temperature"] == 0:
                answer = json.loads(await response.aread())
                versions.append(int(answer["meta_info"]["weight_version"]))
            return response

    words = (
        "--evaluation.samples",
        "3",
        "--evaluation.every",
        "1",
        "--evaluation.pass_samples",
        "0",
    )
    config = settings("--trainer.max_staleness", "2", *words)
    run(config, Watching)
    assert versions == [step for step in range(6) for _ in range(3)]


def test_a_generation_across_an_update_is_trained_on_and_one_too_old_is_not(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts 4 to 7 get long answers, half done when version 1 arrives; the answers to prompt 4
    come too late."""
    step, publish, running = Scheduler.step, DirectPublisher.publish, threading.Event()

    def patient(self: Scheduler, admit: bool) -> None:
        """Computes the second half of the long answers only with version 1."""
        count, limit = (self.rows.state[name][: len(self.rows)] for name in ("count", "limit"))
        long = count[limit == LONG]
        if self.weight_version != "0" or (long < LONG / 2).all():
            step(self, admit)
            return
        if admit:
            self._admit()
        if len(long) == 4 * FRESH:
            running.set()
        time.sleep(0.001)

    def watched(self: DirectPublisher, weights: Weights, version: int) -> None:
        if version == 1:
            assert running.wait(400)
        publish(self, weights, version)

    class Long(Numbered):
        def __init__(self, app: FastAPI) -> None:
            super().__init__(app)
            self.short, self.answered, self.long, self.late = 0, 0, asyncio.Event(), asyncio.Event()
            self.first = asyncio.Event()

        async def generate(self, request: httpx.Request, call: int) -> httpx.Response:
            if 2 * FRESH < call <= 3 * FRESH:  # these overtake only prompt 4
                await self.long.wait()
            if call == 3 * FRESH + 1:  # starts after version 2 was confirmed
                self.late.set()
            if not FRESH < call <= 2 * FRESH:
                response = await super().generate(request, call)
                self.short += 1
                if self.short == FRESH:
                    self.first.set()
                return response
            await self.first.wait()
            body = json.loads(await request.aread())
            body["sampling_params"] |= {
                "max_new_tokens": LONG,
                "ignore_eos": True,
                "stop_token_ids": [],
            }
            response = await super().generate(httpx.Request("POST", request.url, json=body), call)
            if call == FRESH + 1:
                await self.late.wait()
            self.answered += 1
            if self.answered == FRESH - 1:
                self.long.set()
            return response

    monkeypatch.setattr(Scheduler, "step", patient)
    monkeypatch.setattr(DirectPublisher, "publish", watched)
    config = settings("--trainer.max_staleness", "1", "--trainer.when_stale", "drop")
    run(config, Long)
    lines, groups = metrics(config), trained(config)
    stale = lines[-1]["dropped"]["stale"]
    assert stale >= 1
    positions = [group.position for group in groups]
    assert positions == list(range(20)), "the prompt whose answers came too late was tried again"
    assert max(line["staleness"] for line in lines) <= 1
    long = [group for group in groups if FRESH < group.position < 2 * FRESH]
    for group in long:
        for completion in group.completions:
            (first, start, middle), (second, again, end) = completion.weight_versions
            assert (first, second) == (0, 1)
            assert 0 == start < middle == again < end == len(completion.token_ids) == LONG
            assert completion.weight_version == 0
    assert group_is_current(long[0], config, step=0)
    assert not group_is_current(long[0], config, step=1)
    assert lines[1]["staleness"] > 0


def group_is_current(group: Group, config: Config, step: int) -> bool:
    [current] = {row.current for row in batch_of([group], config, step).rows}
    return current


@pytest.mark.parametrize("given", [None, "none", "mask"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_off_policy_runs_are_corrected_unless_told_otherwise(
    staleness: int, given: str | None
) -> None:
    words = ["--trainer.max_staleness", str(staleness), "--rollout.device", "cpu"]
    words += ["--algorithm.rollout_correction", given] if given else []
    expected = given or ("truncate" if staleness else "none")
    config = load(words, {})
    assert config.algorithm.rollout_correction == expected
    assert (
        Config.model_validate(config.model_dump()).algorithm == config.algorithm
    )  # as the run saves it
    cap = [*words, "--algorithm.correction_cap", "3"]
    if expected == "none":
        with raises(ConfigError, field="algorithm.correction_cap"):
            load(cap, {})
    else:
        assert load(cap, {}).algorithm.correction_cap == 3


def test_background_publishing_counts_only_while_nothing_else_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = StageClock()
    with clock.stage(PUBLISHING):
        with clock.stage("update"):
            now = 3.0
        with clock.stage("generation"):
            now = 7.0
        now = 12.0
    seconds = clock.lap()
    assert PUBLISHING not in seconds
    assert (seconds["update"], seconds["generation"], seconds["publish"], seconds["waiting"]) == (
        3.0,
        4.0,
        5.0,
        0.0,
    )
