"""A simulation of which groups are trained on when answers take longer than `trainer.max_staleness`
updates.

Collector, clients, data-server, reward-server and replay-buffer are real; the engine and its time
are simulated. The policy has one parameter, how often it reasons at length, and learns from rewards
that only long answers get.
"""

import asyncio
import heapq
import json
import math
import os
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from common.clients.data import DataClient
from common.clients.replay import ReplayClient
from common.clients.reward import RewardClient
from common.clients.rollout import RolloutClient
from common.errors import ConfigError, ServiceError
from common.process.loop_thread import LoopThread
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import Config, load
from common.wire.schemas import Group, Int32, Prompt, TakeRequest
from services.data.app import create_data_app
from services.replay.app import create_replay_app
from services.reward.app import create_reward_app
from services.reward.functions.base import Message, RewardFunction
from tests.support.errors import raises
from trainer.algorithms.batch import Batch
from trainer.algorithms.compute_advantages import compute_advantages
from trainer.policy.scorer import load_tokenizer
from trainer.rollouts.collector import CollectFailed, Collector
from trainer.rollouts.ground_truths import GroundTruthCheck
from trainer.rollouts.prompt_cursor import PromptProgress
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.services import RolloutContext, Services
from trainer.timing import StageClock

FRESH, SIZE, STALENESS = 4, 4, 1
SLOTS = (STALENESS + 1) * FRESH
SHORT, LONG, SIGMA = 20, 120, 0.3
"""Typical lengths of an answer that guesses and of one that reasons, and the spread of their
logarithms."""
RIGHT = 60
"""Answers with at least this many tokens are right."""
REASONS = 0.07
"""The share of answers that reason at the start."""
TOKENS_A_STEP = 30
"""Tokens of a completion decoded during one update: an answer that reasons takes four updates."""


class LongIsGood(RewardFunction):
    """Rewards only long answers."""

    name = "long"

    def __call__(self, completions: list[list[Message]], **_: Any) -> list[float]:
        return [float(len(answer[0]["content"]) >= RIGHT) for answer in completions]


def draw(rng: np.random.Generator, reasons: float, count: int) -> Int32:
    """Draws the lengths of answers."""
    usual = np.where(rng.random(count) < reasons, LONG, SHORT)
    return np.round(usual * rng.lognormal(0, SIGMA, count)).astype(np.int32)


class Engine(httpx.AsyncBaseTransport):
    """Answers a group once `now` reaches the end of its longest completion; running ones go on with
    new weights."""

    def __init__(self) -> None:
        self.now, self.logit, self.versions = 0.0, math.log(REASONS / (1 - REASONS)), [(0.0, 0)]
        self.running: list[tuple[float, int, asyncio.Future[None]]] = []
        self.calls = 0

    @property
    def reasons(self) -> float:
        """The probability that an answer reasons."""
        return 1 / (1 + math.exp(-self.logit))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/generate":
            return httpx.Response(200, json={})
        self.calls += 1
        seed = json.loads(await request.aread())["sampling_params"]["sampling_seed"]
        start, version = self.now, self.versions[-1][1]
        lengths = draw(np.random.default_rng([seed, version]), self.reasons, SIZE).tolist()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self.running, (start + max(lengths) / TOKENS_A_STEP, self.calls, done))
        await done
        return httpx.Response(
            200, json=[self._answer(start, version, length) for length in lengths]
        )

    def _answer(self, start: float, version: int, length: int) -> dict[str, Any]:
        changes = [
            (round((at - start) * TOKENS_A_STEP), later)
            for at, later in self.versions
            if at > start
        ]
        marks = [(0, version), *((token, later) for token, later in changes if 0 < token < length)]
        ends = [token for token, _ in marks[1:]] + [length]
        spans = [
            {"version": v, "start": at, "end": end}
            for (at, v), end in zip(marks, ends, strict=True)
            if at < end
        ]
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-1.0, 5, None]] * length,
            "weight_versions": spans,
        }
        return {"text": "x" * length, "output_ids": [5] * length, "meta_info": meta}


class Simulation:
    """A run with one value of `when_stale`."""

    def __init__(
        self,
        config: Config,
        rollouts: Rollouts,
        loop: LoopThread,
        engine: Engine,
        replay: "LateAnswers",
    ) -> None:
        self.replay = replay
        self.config, self.rollouts, self.loop, self.engine = config, rollouts, loop, engine
        self.collector: Collector = rollouts._collector
        self.trained: list[Group] = []
        self.ages: list[int] = []

    def run(self, steps: int, learning_rate: float) -> None:
        """Makes `steps` policy gradient updates of the logit of reasoning."""
        settings = self.config.trainer
        slots = (settings.max_staleness + 1) * FRESH
        with self.rollouts.collecting(0, 10 * steps):
            for step in range(steps):
                self._settle(slots)
                while not self._ready(step):
                    self._next_event(slots)
                batch = Batch.of(self.rollouts.next(step), self.config, step)
                self._train(batch, step, learning_rate)
                self._settle(slots - FRESH)
                begun = self.engine.now
                while self.engine.running and self.engine.running[0][0] <= begun + 1:
                    self._next_event(slots - FRESH)
                self.engine.now = begun + 1
                self.engine.versions.append((self.engine.now, step + 1))
                self.rollouts.start_acknowledging(batch)
                served: Future[None] = Future()
                self.rollouts.free_slots(batch, when=served)
                served.set_result(None)

    async def generate(self, count: int) -> None:
        """Waits until `count` groups are being generated, and ends them."""
        while len(self.engine.running) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        while self.engine.running:
            heapq.heappop(self.engine.running)[2].set_result(None)

    async def take(self, count: int) -> None:
        request = TakeRequest(
            count=count, min_version=0, wait_s=30.0, request_id="take", run_id="run"
        )
        taken: list[Group] = []
        while len(taken) < count:
            taken = await self.collector.take(request)

    def _train(self, batch: Batch, step: int, learning_rate: float) -> None:
        batch.old_logprobs = [row.rollout_logprobs for row in batch.tokens.values()]
        batch.advantages, _ = compute_advantages(batch, self.config, 0.0)
        reasoned = np.array(batch.lengths) >= RIGHT
        advantages = np.array([column[0] for column in batch.advantages])
        self.engine.logit += learning_rate * float(
            np.mean(advantages * (reasoned - self.engine.reasons))
        )
        self.trained += batch.fresh
        self.ages += [step - group.weight_version for group in batch.fresh]

    def _ready(self, step: int) -> bool:
        """Returns whether the next batch is available without more time."""
        when, oldest = self.config.trainer.when_stale, step - STALENESS

        async def look() -> bool:
            untaken = list(self.collector.untaken.values())
            if when == "wait":
                return all(each.is_stored for each in untaken[:FRESH])
            stored = [each.graded for each in untaken if each.graded and each.is_stored]
            young = [group for group in stored if when == "train" or group.weight_version >= oldest]
            return len(young) >= FRESH

        return self.loop.call(look())

    def _next_event(self, open_slots: int) -> None:
        async def finish() -> None:
            self.engine.now, _, done = heapq.heappop(self.engine.running)
            done.set_result(None)

        self.loop.call(finish())
        self._settle(open_slots)

    def _settle(self, open_slots: int) -> None:
        """Waits until every group in a slot is being generated or is stored."""

        async def settled() -> None:
            def is_settled() -> bool:
                untaken = self.collector.untaken.values()
                generating = sum(not each.is_stored for each in untaken)
                return len(untaken) == open_slots and generating == len(self.engine.running)

            while not is_settled():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

        self.loop.call(settled())


class LateAnswers(httpx.ASGITransport):
    """A replay buffer whose answers to stored groups wait for `released`, and that gets neither
    these nor takes before `arrives`."""

    released: asyncio.Event | None = None
    arrives: asyncio.Event | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        is_held = request.method == "POST" and request.url.path in ("/groups", "/groups/take")
        if self.arrives is not None and is_held:
            await self.arrives.wait()
        response = await super().handle_async_request(request)
        if self.released is not None and (request.method, request.url.path) == ("POST", "/groups"):
            await self.released.wait()
        return response


@contextmanager
def simulation(
    base_model: Path, directory: Path, when_stale: str, staleness: int = STALENESS
) -> Iterator[Simulation]:
    words = [
        *(
            "--model.name",
            str(base_model),
            "--state_dir",
            str(directory),
            "--algorithm.advantage",
            "group_centred",
        ),
        *(
            "--trainer.batch_size",
            str(FRESH),
            "--sampling.group_size",
            str(SIZE),
            "--trainer.num_epochs",
            "100",
        ),
        *("--trainer.max_staleness", str(staleness), "--trainer.when_stale", when_stale),
    ]
    config, engine, apps = load(words, {}), Engine(), AsyncExitStack()
    prompts = [Prompt(id=f"p{i}", prompt=f"problem {i}", ground_truth="1") for i in range(500)]
    started = [
        create_data_app(config, prompts, []),
        create_reward_app(config.reward, functions=[LongIsGood()]),
        create_replay_app(config.replay, config.state_dir),
    ]

    transports = [LateAnswers(app) for app in started]

    async def start() -> Services:
        for app in started:
            await apps.enter_async_context(app.router.lifespan_context(app))
        data, reward, replay = transports
        services = Services(
            DataClient("data-server", "http://x", transport=data),
            RolloutClient("rollout-server", "http://x", transport=engine),
            RewardClient("reward-server", "http://x", transport=reward),
            ReplayClient("replay-buffer", "http://x", transport=replay),
        )
        for client in services.all():
            await apps.enter_async_context(client)
        return services

    with ExitStack() as stack:
        loop = stack.enter_context(LoopThread())
        services = loop.call(start())
        stack.callback(lambda: loop.call(apps.aclose()))
        prompter = Prompter(load_tokenizer(config.model), PromptStyle(), [0])
        context = RolloutContext(config, services, prompter, clock=StageClock(), run_id="run")
        rollouts = Rollouts(
            context,
            loop,
            progress=PromptProgress(),
            ground_truths=GroundTruthCheck(services, Path(os.devnull)),
        )
        rollouts.prepare(0, known=True)
        yield Simulation(config, rollouts, loop, engine, transports[2])


Runs = Callable[[str, int, float], Simulation]


@pytest.fixture
def run(base_model: Path, tmp_path: Path) -> Runs:
    def runs(when_stale: str, steps: int, learning_rate: float) -> Simulation:
        with simulation(base_model, tmp_path / when_stale, when_stale) as made:
            made.run(steps, learning_rate)
        return made

    return runs


def test_the_next_requests_are_out_when_slots_were_freed(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the training thread does next would take Python's lock from the one that sends them."""
    monkeypatch.setattr("trainer.rollouts.rollouts._SEND_S", 60.0)
    with simulation(base_model, tmp_path, "train") as made, made.rollouts.collecting(0, 10):
        made._settle(SLOTS)
        made.loop.call(made.generate(SLOTS))
        batch = Batch.of(made.rollouts.next(0), made.config, 0)
        made._train(batch, 0, learning_rate=0.0)
        made.rollouts.start_acknowledging(batch)
        sent = made.engine.calls
        served: Future[None] = Future()
        served.set_result(None)
        made.rollouts.free_slots(batch, when=served)
        assert made.engine.calls - sent == FRESH


@contextmanager
def ahead(
    base_model: Path, directory: Path
) -> Iterator[tuple[Simulation, Batch, Callable[[], object]]]:
    """A run without staleness that trains on a batch whose groups have not arrived in the
    replay-buffer, nor has the request for them; both do after a call of the function.
    """
    with simulation(base_model, directory, "wait", staleness=0) as made:
        arrives = made.replay.arrives = asyncio.Event()
        with made.rollouts.collecting(0, 10):
            made.loop.call(made.generate(FRESH))
            batch = Batch.of(made.rollouts.next(0), made.config, 0)
            assert made.collector.stored_groups == 0
            made._train(batch, 0, learning_rate=0.0)
            yield made, batch, partial(made.loop.loop.call_soon_threadsafe, arrives.set)


def test_without_staleness_an_update_begins_before_its_batch_is_stored(
    base_model: Path, tmp_path: Path
) -> None:
    with ahead(base_model, tmp_path) as (made, batch, arrive):
        arrive()
        made.rollouts.start_acknowledging(batch)
        served: Future[None] = Future()
        made.rollouts.free_slots(batch, when=served)
        stats = made.loop.call(made.collector._services.replay.stats())
        assert (stats["consumed"], stats["fresh"], stats["leased"]) == (FRESH, 0, 0)


def test_an_update_on_groups_that_are_not_handed_out_ends_the_run(
    base_model: Path, tmp_path: Path
) -> None:
    """Another run began meanwhile: what the update has made must not be published."""
    with ahead(base_model, tmp_path) as (made, batch, arrive):
        transport = httpx.ASGITransport(made.replay.app)
        other = ReplayClient("replay-buffer", "http://x", transport=transport)
        made.loop.call(other.reset_fresh(run_id="other"))
        arrive()
        with raises(ServiceError, code="superseded", field="run_id"):
            made.rollouts.start_acknowledging(batch)


def test_a_group_that_is_taken_before_the_answer_about_it_is_forgotten(
    base_model: Path, tmp_path: Path
) -> None:
    with simulation(base_model, tmp_path, "train") as made:
        collector = made.collector
        transport = made.replay

        async def take_first() -> None:
            transport.released = asyncio.Event()
            await made.generate(FRESH)
            await made.take(FRESH)
            assert not collector.untaken
            transport.released.set()
            await collector._until(lambda: collector.stored_groups > 0)
            assert not collector.untaken

        with made.rollouts.collecting(0, 1):
            made.loop.call(take_first())


async def acknowledge_one(other: ReplayClient) -> None:
    """Acknowledges a group that waits for the trainer."""
    taken = await other.take(TakeRequest(count=1, min_version=0, wait_s=0, request_id="other"))
    await other.ack([group.id for group in taken.groups])


async def forget_all(other: ReplayClient) -> None:
    """Drops the group that waits, which can be stored again, and those of the trainer."""
    await other.reset_fresh()


@pytest.mark.parametrize(
    ("deed", "field", "lost"),
    [(acknowledge_one, "/groups/ack", 1), (forget_all, "leased", FRESH - 1)],
)
def test_the_groups_that_the_trainer_holds_do_not_hide_the_loss_of_others(
    base_model: Path,
    tmp_path: Path,
    deed: Callable[[ReplayClient], Awaitable[None]],
    field: str,
    lost: int,
) -> None:
    """Dynamic sampling holds groups that differ while it waits for others."""
    with simulation(base_model, tmp_path, "train") as made:

        async def lose() -> None:
            await made.generate(FRESH)
            assert await made.collector.wait_for_oldest(FRESH, 30.0)
            await made.take(FRESH - 1)
            await made.collector.store_lost()  # nothing is lost yet
            await deed(ReplayClient("replay-buffer", "http://x", transport=made.replay))
            with raises(CollectFailed, field=field, value=str(lost)):
                await made.collector.store_lost()

        with made.rollouts.collecting(0, 1):
            made.loop.call(lose())


@pytest.mark.parametrize("when", ["wait", "drop", "train"])
def test_a_group_that_does_not_wait_to_be_trained_on_ends_the_run(
    base_model: Path, tmp_path: Path, when: str
) -> None:
    """As after a replay-buffer was set back: it hands out what was trained on."""
    with simulation(base_model, tmp_path, when) as made:

        async def lose() -> None:
            await made.generate(FRESH)
            assert await made.collector.wait_for_oldest(FRESH, 30.0)
            other = ReplayClient("replay-buffer", "http://x", transport=made.replay)
            (listed, *_) = await other.listing("fresh")
            trained = await other.group(listed["id"])
            trained.id = "run-0-trained"
            await other.add([trained])
            with raises(CollectFailed, field="id", value=trained.id):
                await made.take(FRESH + 1)

        with made.rollouts.collecting(0, 1):
            made.loop.call(lose())


def test_a_group_that_is_handed_out_twice_ends_the_run(base_model: Path, tmp_path: Path) -> None:
    with simulation(base_model, tmp_path, "train") as made:

        async def lose() -> None:
            await made.generate(FRESH)
            assert await made.collector.wait_for_oldest(FRESH, 30.0)
            made.collector._held = {group.id for group in made.collector._graded()}
            with pytest.raises(CollectFailed, match="handed out before") as error:
                await made.take(FRESH)
            assert error.value.field == "id"

        with made.rollouts.collecting(0, 1):
            made.loop.call(lose())


@pytest.mark.parametrize(("when", "dropped"), [("wait", SLOTS), ("drop", SLOTS), ("train", 0)])
def test_a_group_beyond_the_bound_of_age_is_dropped_and_counted(
    base_model: Path, tmp_path: Path, when: str, dropped: int
) -> None:
    """With `wait` that happens only after a fault: its groups were leased to nobody for long."""
    with simulation(base_model, tmp_path, when) as made:

        async def made_by_first_weights() -> None:
            await made.generate(SLOTS)
            assert await made.collector.wait_for_oldest(SLOTS, 30.0)
            made.engine.versions = [(made.engine.now - 1, 9)]

        async def go_on() -> None:
            while True:
                await made.generate(1)

        with made.rollouts.collecting(0, 10):
            made.loop.call(made_by_first_weights())
            task = made.loop.start(go_on())
            batch = made.rollouts.next(step=9)
            made.loop.cancel(task)
    ages = [9 - item.group.weight_version for item in batch]
    assert made.rollouts.drops.counts["stale"] == dropped
    assert max(ages) == (9 if when == "train" else 0)


def chi_square(groups: list[Group]) -> float:
    """Compares the lengths with those the first policy samples, in nine bins with 8 degrees of
    freedom."""
    lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
    sampled = draw(np.random.default_rng(0), REASONS, 400_000)
    edges = [*np.quantile(sampled, np.arange(0.12, 0.9, 0.12)), RIGHT]
    expected = (
        np.bincount(np.searchsorted(edges, sampled), minlength=9) * len(lengths) / len(sampled)
    )
    found = np.bincount(np.searchsorted(edges, lengths), minlength=9)
    return float(((found - expected) ** 2 / expected).sum())


@pytest.mark.slow
def test_lengths_that_are_trained_on_are_distributed_as_those_that_are_sampled(run: Runs) -> None:
    waiting, dropping = run("wait", 50, 0.0), run("drop", 50, 0.0)
    assert not waiting.rollouts.drops.counts
    assert [group.position for group in waiting.trained] == list(range(50 * FRESH)), (
        "in the order of the prompts"
    )
    assert max(waiting.ages) == STALENESS
    spans = [
        len(completion.weight_versions)
        for group in waiting.trained
        for completion in group.completions
    ]
    assert max(spans) > 1, "some went on over an update"
    assert waiting.engine.calls <= (50 + STALENESS + 1) * FRESH, "and none was generated again"
    assert dropping.rollouts.drops.counts["stale"] > 20
    assert (
        chi_square(waiting.trained) < 20.09 < chi_square(dropping.trained)
    )  # 20.09 is the 99 % quantile


@pytest.mark.slow
def test_dropping_what_is_long_learns_to_be_short_and_waiting_does_not(run: Runs) -> None:
    waiting, training, dropping = (run(when, 30, 1.0) for when in ("wait", "train", "drop"))
    assert min(waiting.engine.reasons, training.engine.reasons) > dropping.engine.reasons + 0.1
    assert max(waiting.ages) == max(dropping.ages) == STALENESS < max(training.ages)
    assert not waiting.rollouts.drops.counts
    assert not training.rollouts.drops.counts


def test_when_stale_is_read_only_if_staleness_is_allowed() -> None:
    with raises(ConfigError, field="trainer.when_stale"):
        load(["--trainer.when_stale", "train"], {})
