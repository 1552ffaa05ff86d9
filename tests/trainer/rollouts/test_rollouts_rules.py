"""What the training loop gets from its rollouts, and what it makes them do, for every way to train on
groups: the collector is a stand-in that notes its calls, and the clock is virtual.
"""

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from common.errors import ServiceError
from common.process import progress as process_progress
from common.settings.config import Config
from common.wire.schemas import Completion, Group, SampledGroups, SampleRequest, TakeRequest
from tests.simulation.virtual_time import VirtualLoop, simulated
from tests.support.errors import raises
from trainer.algorithms.batch import TrainingGroup
from trainer.rollouts import rollouts as rollouts_module
from trainer.rollouts.collector import CollectFailed
from trainer.rollouts.drops import Drops
from trainer.rollouts.prompt_cursor import PromptProgress
from trainer.rollouts.rollouts import Rollouts
from trainer.timing import StageClock

VOCABULARY = 50
When = Literal["wait", "drop", "train"]


def group(position: int, *, version: int = 0, equal: bool = False) -> Group:
    return Group(
        id=f"g{position}",
        prompt_id=f"p{position}",
        position=position,
        prompt_token_ids=np.array([1, 2], np.int32),
        completions=[
            Completion(
                token_ids=np.array([3, 4], np.int32),
                logprobs=np.zeros(2, np.float32),
                finish_reason="stop",
                weight_versions=[(version, 0, 2)],
                reward=reward,
            )
            for reward in (0.5, 0.5 if equal else 1.0)
        ],
    )


class Thread:
    """Stands for the thread of the event loop: what it is given runs while it is waited for."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> Callable[[], Any]:
        task = self.loop.create_task(coroutine)
        return lambda: self.loop.run_until_complete(task)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(coroutine)
        self.call(asyncio.sleep(0.01))
        return task

    def cancel(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self.call(asyncio.wait([task]))


class Collector:
    """Stands for the collector: gives out what a test has put into `ready`, `count` at once."""

    def __init__(self, *_: object) -> None:
        self.drops = Drops()
        self.stored_groups = 0
        self.calls: list[Any] = []
        self.ready: list[Group] = []
        self.late = 0
        """Attempts that find nothing before one does."""
        self.idle_after = 0
        self.failure: BaseException | None = None
        self.on_wait: Callable[[], None] = lambda: None

    def note(self, *call: Any) -> None:
        self.calls.append(call)

    def named(self, name: str) -> list[Any]:
        return [call for call in self.calls if call[0] == name]

    async def _finds(self, count: int, wait_s: float) -> bool:
        assert 0 < wait_s <= 1.0
        self.on_wait()
        if self.late or len(self.ready) < count:
            self.late -= 1
            await asyncio.sleep(wait_s)
            return False
        return True

    async def run(self, groups: int, slots: int) -> None:
        self.note("run", groups, slots)
        if self.failure is not None:
            raise self.failure
        try:
            await asyncio.sleep(math.inf)
        finally:
            self.note("ended")

    async def wait_for_graded(self, count: int, wait_s: float) -> list[Group]:
        self.note("graded", count)
        return self.ready[:count] if await self._finds(count, wait_s) else []

    async def wait_for_oldest(self, count: int, wait_s: float) -> bool:
        self.note("oldest", count)
        return await self._finds(count, wait_s)

    async def take(self, request: TakeRequest) -> list[Group]:
        self.note("take", request)
        if not await self._finds(request.count, request.wait_s):
            return []
        taken = self.ready[: request.count]
        del self.ready[: request.count]
        return taken

    async def wait_until_idle(self, wait_s: float) -> bool:
        self.note("idle", wait_s)
        self.idle_after -= 1
        return self.idle_after < 0

    async def replace_equal(self, groups: list[Group]) -> None:
        self.note("replaced", [each.id for each in groups])

    async def acknowledge(self, groups: list[Group]) -> None:
        await asyncio.sleep(0.5)
        self.note("acknowledged", [each.id for each in groups])

    async def store_lost(self) -> None:
        self.note("store_lost", asyncio.get_running_loop().time())

    async def wait_until_sent(self, wait_s: float) -> None:
        self.note("sent", wait_s)

    def expect_slots(self, count: int) -> None:
        self.note("expected", count)

    def free_slots(self, count: int) -> None:
        self.note("freed", count)


class Run:
    """Rollouts whose collector is a stand-in."""

    def __init__(self, loop: VirtualLoop, patch: pytest.MonkeyPatch, config: Config) -> None:
        patch.setattr(rollouts_module, "Collector", Collector)
        self.loop = loop
        self.config = config
        self.sampled: list[SampleRequest] = []
        self.reusable: list[Group] = []
        self.clock = StageClock()
        services = SimpleNamespace(
            replay=SimpleNamespace(sample=self.sample, set_priorities=self.set_priorities),
            data=SimpleNamespace(report_pass_rates=self.report),
        )
        context: Any = SimpleNamespace(
            config=config, services=services, clock=self.clock, run_id="run"
        )
        self.rollouts = Rollouts(
            context,
            Thread(loop),  # type: ignore[arg-type]
            progress=PromptProgress(4, [6]),
            ground_truths=None,  # type: ignore[arg-type]
            vocabulary=VOCABULARY,
        )
        self.collector: Any = self.rollouts._collector

    async def sample(self, request: SampleRequest) -> SampledGroups:
        assert self.clock.active() == "replay 1"
        self.sampled.append(request)
        weights = np.array([0.5 + number for number in range(len(self.reusable))], np.float32)
        return SampledGroups(groups=self.reusable, weights=weights)

    async def set_priorities(self, priorities: dict[str, float], request_id: str) -> None:
        self.collector.note("priorities", priorities, request_id)

    async def report(self, ids: list[str], rates: list[float], request_id: str) -> None:
        self.collector.note("rates", ids, rates, request_id)


def config_of(
    *, staleness: int = 0, when: When = "wait", dynamic: bool = False, reuse: float = 0.0
) -> Config:
    config = Config()
    config.trainer.batch_size = 4
    config.trainer.max_staleness = staleness
    config.trainer.when_stale = when
    config.algorithm.dynamic_sampling = dynamic
    config.algorithm.dynamic_sampling_rounds = 2
    config.replay.reuse_ratio = reuse
    config.limits.stuck_after_s = 40.0
    return config


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    with simulated(0) as found:
        yield found
        found.end_tasks()


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("when", ["wait", "drop", "train"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_batch_has_the_next_groups_in_their_order(
    staleness: int,
    when: When,
    dynamic: bool,
    late: int,
    loop: VirtualLoop,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(staleness=staleness, when=when, dynamic=dynamic)
    run = Run(loop, monkeypatch, config)
    collector = run.collector
    for step in (1, 5):
        collector.ready = [group(at, version=step) for at in (3, 1, 2, 0, 9)]
        collector.late = late
        collector.calls.clear()
        found = run.rollouts.next(step)
        assert [each.group.position for each in found] == [0, 1, 2, 3]
        assert all(each.weight == 1.0 and not each.reused for each in found)
        loop.run_until_complete(asyncio.sleep(0.0))

        oldest = 0 if when == "train" and staleness else max(0, step - staleness)
        requests = [call[1] for call in collector.named("take")]
        assert {each.min_version for each in requests} == {oldest}
        assert {each.count for each in requests} == {4}
        assert all(each.ids_only and each.run_id == "run" for each in requests)
        names = [each.request_id for each in requests]
        assert len({*names}) == len(names)
        assert all(name.startswith("run-take-") for name in names)
        is_ahead = staleness == 0 and not dynamic
        in_order = staleness > 0 and when == "wait"
        assert len(collector.named("graded")) == (late + 1 if is_ahead else 0)
        assert len(collector.named("oldest")) == (late + 1 if in_order else 0)
        assert len(requests) == (late + 1 if not is_ahead and not in_order else 1)


@pytest.mark.parametrize("taken_at_once", [False, True])
def test_groups_that_are_used_before_they_are_handed_out_are_confirmed(
    taken_at_once: bool, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(loop, monkeypatch, config_of())
    collector = run.collector
    collector.ready = [group(at) for at in range(4)]
    found = run.rollouts.next(0)
    assert [each.group.position for each in found] == [0, 1, 2, 3]
    assert len(collector.ready) == 4, "nothing waits for the replay-buffer"
    collector.late = 0 if taken_at_once else 1
    run.rollouts.start_acknowledging(batch_of(found))
    assert collector.ready == []
    assert len(collector.named("take")) == (1 if taken_at_once else 2)
    # Once only.
    run.rollouts.start_acknowledging(batch_of(found))
    assert len(collector.named("take")) == (1 if taken_at_once else 2)


def test_groups_that_are_too_old_are_not_used_before_they_are_handed_out(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(loop, monkeypatch, config_of())
    collector = run.collector
    for oldest, is_used in ((3, True), (2, False)):
        collector.ready = [group(at, version=oldest if at == 1 else 3) for at in range(4)]
        run.rollouts.next(3)
        assert (len(collector.ready) == 4) == is_used
        run.rollouts._confirm()


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_groups_of_equal_rewards_are_replaced_for_some_rounds(
    rounds: int, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(dynamic=True)
    config.algorithm.dynamic_sampling_rounds = rounds
    equal = [2, *range(4, 3 + rounds)]
    run = Run(loop, monkeypatch, config)
    collector = run.collector
    collector.ready = [group(at, equal=at in equal) for at in range(4 + rounds)]
    found = run.rollouts.next(0)
    # The groups of the last round count as well.
    assert [each.group.position for each in found] == [0, 1, 3, 3 + rounds]
    assert [call[1] for call in collector.named("replaced")] == [[f"g{at}"] for at in equal]
    assert [call[1].count for call in collector.named("take")] == [4, *[1] * rounds]

    collector.ready = [group(at, equal=at != 1) for at in range(40)]
    collector.calls.clear()
    field = "algorithm.dynamic_sampling_rounds"
    with raises(CollectFailed, code="equal_rewards", field=field, value=str(rounds)) as error:
        run.rollouts.next(0)
    assert error.value.message.startswith(f"{rounds} rounds ")
    assert [call[1].count for call in collector.named("take")] == [4, *[3] * rounds]


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("helps", [False, True])
def test_a_wait_without_progress_ends_and_one_with_progress_does_not(
    helps: bool, staleness: int, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(loop, monkeypatch, config_of(staleness=staleness))
    collector = run.collector
    ends = 200.0
    graded = random.Random(3)

    def waits() -> None:
        if helps and loop.time() < ends:
            # Either a group, or tokens of one in an engine.
            if graded.random() < 0.5:
                collector.stored_groups += 1
            else:
                process_progress.others_moved()

    collector.on_wait = waits
    collector.stored_groups = 7
    began = loop.time()
    with raises(
        CollectFailed, code="no_batch", field="limits.stuck_after_s", value="40.0"
    ) as error:
        run.rollouts.next(0)
    waited = loop.time() - began
    assert 40.0 <= waited - (ends if helps else 0.0) <= 43.0
    assert f"a batch of 4 groups after {waited:.3g} s" in error.value.message
    assert f"{collector.stored_groups - 7} groups were graded" in error.value.message
    # Groups that were lost are looked for every half a minute.
    looks = [call[1] for call in collector.named("store_lost")]
    assert len(looks) == waited // 31
    assert all(30.0 <= after - before <= 32.0 for before, after in itertools.pairwise(looks))


@pytest.mark.parametrize("reuse", [0.25, 0.5])
def test_the_rest_of_a_batch_is_reused(
    reuse: float, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(loop, monkeypatch, config_of(reuse=reuse))
    many = round(4 * reuse)
    collector = run.collector
    for number in (1, 2):
        collector.ready = [group(at) for at in range(4)]
        run.reusable = [group(100 + at) for at in range(many)]
        found = run.rollouts.next(number)
        positions = [each.group.position for each in found]
        assert positions == [*range(4 - many), *range(100, 100 + many)]
        assert [each.reused for each in found] == [False] * (4 - many) + [True] * many
        assert [each.weight for each in found[4 - many :]] == [0.5 + at for at in range(many)]
        request = run.sampled[-1]
        assert (request.count, request.step) == (many, number)
        assert request.request_id == f"run-sample-{number}"
        # One step in all, until `prepare` has said how many there are.
        assert request.importance_exponent == 1.0
        run.rollouts._confirm()


def test_experts_of_reused_groups_are_kept_on_the_disk(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(reuse=0.5)
    config.trainer.routing_replay = True
    run = Run(loop, monkeypatch, config)
    kept: list[Any] = []
    monkeypatch.setattr(rollouts_module, "spool", lambda *given: kept.append(given))
    run.collector.ready = [group(at) for at in range(2)]
    run.reusable = [group(7), group(8)]
    run.rollouts.next(0)
    assert kept == [(each, config.state_dir / "experts") for each in run.reusable]


@pytest.mark.parametrize("place", ["prompt", "answer", "kept", "own prompt"])
@pytest.mark.parametrize("token", [-1, 0, VOCABULARY - 1, VOCABULARY])
def test_a_token_that_the_model_lacks_is_named(
    place: str, token: int, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(loop, monkeypatch, config_of())
    run.collector.ready = [group(at) for at in range(4)]
    given = run.collector.ready[2]
    tokens = np.array([5, token], np.int32)
    answer = given.completions[1]
    match place:
        case "prompt":
            given.prompt_token_ids = tokens
        case "answer":
            answer.token_ids = tokens
        case "kept":
            answer.kept_tokens = tokens
        case _:
            answer.prompt_ids = tokens
    if 0 <= token < VOCABULARY:
        run.rollouts.next(0)
    else:
        with raises(CollectFailed, field="token_ids", value=str(token)) as error:
            run.rollouts.next(0)
        assert "group g2 " in error.value.message
        assert str(VOCABULARY) in error.value.message


def batch_of(groups: list[TrainingGroup]) -> Any:
    return SimpleNamespace(
        groups=groups,
        fresh=[each.group for each in groups if not each.reused],
        mean_advantages=lambda: [[float(number + 1)] for number, _ in enumerate(groups)],
        pass_rates=[number / 8 for number, _ in enumerate(groups)],
    )


@pytest.mark.parametrize("curriculum", ["none", "pass_rate"])
@pytest.mark.parametrize("reuse", [0.0, 0.5])
def test_what_is_told_to_the_services_of_a_batch_and_in_which_order(
    curriculum: Any, reuse: float, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(reuse=reuse)
    config.data.curriculum = curriculum
    run = Run(loop, monkeypatch, config)
    collector = run.collector
    many = round(4 * reuse)
    collector.ready = [group(at) for at in range(4 - many)]
    run.reusable = [group(7), group(8)][:many]
    found = run.rollouts.next(0)
    batch = batch_of(found)
    run.rollouts.start_acknowledging(batch)
    served = Future[None]()
    run.rollouts.free_slots(batch, when=served)

    fresh = [f"g{at}" for at in range(4 - many)]
    expected: list[Any] = [("expected", len(fresh))]
    acknowledged: list[Any] = [("acknowledged", fresh)]
    if reuse:
        priorities = {each.group.id: at + 1.0 for at, each in enumerate(found)}
        acknowledged.append(("priorities", priorities, "run-batch-1"))
    if curriculum == "none":
        wanted = [*expected, *acknowledged]
    else:
        prompts = [f"p{at}" for at in range(4 - many)]
        rates = [at / 8 for at in range(4 - many)]
        rates_told = ("rates", prompts, rates, "run-pass-rates-1")
        wanted = [*acknowledged, rates_told, *expected]
    told = [call for call in collector.calls if call[0] not in ("graded", "take")]
    assert told == wanted

    served.set_result(None)
    loop.run_until_complete(asyncio.sleep(0.1))
    assert collector.calls[-1] == ("freed", len(fresh))
    assert not collector.named("sent"), "the engines are not waited for"


def test_what_is_served_already_frees_its_slots_at_once(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(loop, monkeypatch, config_of())
    served = Future[None]()
    served.set_result(None)
    run.rollouts.free_slots(batch_of([TrainingGroup(group(1))]), when=served)
    # First, and not after the requests of these slots have been waited for.
    assert run.collector.calls == [("freed", 1), ("sent", 0.02)]


def test_weights_that_are_not_served_stop_the_run(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(loop, monkeypatch, config_of())
    batch = batch_of([TrainingGroup(group(1))])
    faults = [ServiceError("first"), ServiceError("second")]
    for fault in faults:
        served = Future[None]()
        run.rollouts.free_slots(batch, when=served)
        served.set_exception(fault)
    loop.run_until_complete(asyncio.sleep(0.1))
    assert not run.collector.named("freed")
    run.collector.ready = [group(at) for at in range(4)]
    with pytest.raises(ServiceError) as error:
        run.rollouts.next(0)
    assert error.value is faults[0]
    run.collector.idle_after = 1
    with pytest.raises(ServiceError):
        run.rollouts.wait_until_idle()


@pytest.mark.parametrize(
    ("step", "total", "groups", "slots"), [(0, 10, 40, 12), (8, 10, 8, 8), (9, 10, 4, 4)]
)
def test_no_more_is_collected_than_can_be_trained_on(
    step: int,
    total: int,
    groups: int,
    slots: int,
    loop: VirtualLoop,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(loop, monkeypatch, config_of(staleness=2))
    with run.rollouts.collecting(step, total):
        assert run.collector.calls == [("run", groups, slots)]
    assert run.collector.calls[1:] == [("ended",)]


@pytest.mark.parametrize("kind", ["errors", "exit"])
def test_what_ends_the_collecting_ends_the_run(
    kind: str, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(loop, monkeypatch, config_of())
    collector = run.collector
    first = ServiceError("first")
    several = BaseExceptionGroup("several", [first, ServiceError("second")])
    collector.failure = SystemExit(4) if kind == "exit" else several
    collector.ready = [group(at) for at in range(4)]
    with run.rollouts.collecting(0, 1), pytest.raises(ServiceError) as error:
        run.rollouts.next(0)
    if kind == "exit":
        assert error.value.code == "collect_failed"
        assert error.value.message == "collecting was ended by SystemExit: 4"
    else:
        assert error.value is first
    # A later failure does not hide the first.
    collector.failure = SystemExit(5)
    with run.rollouts.collecting(0, 1), pytest.raises(ServiceError) as again:
        run.rollouts.next(0)
    assert again.value is error.value


def test_the_run_is_idle_when_the_collector_is(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(loop, monkeypatch, config_of())
    run.collector.idle_after = 2
    run.rollouts.wait_until_idle()
    assert run.collector.calls == [("idle", 1.0)] * 3
    assert run.rollouts.progress == PromptProgress(4, [6])
    assert run.rollouts.drops is run.collector.drops


@pytest.mark.parametrize("reuse", [0.0, 0.3, 0.5])
def test_a_run_begins_where_its_prompts_ended(
    reuse: float, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(loop, monkeypatch, config_of(reuse=reuse))
    begun: list[Any] = []

    async def begin(context: Any, *given: Any, **named: Any) -> int:
        assert context.run_id == "run"
        begun.append((*given, named))
        return 101

    monkeypatch.setattr(rollouts_module, "begin", begin)
    assert run.rollouts.prepare(3, known=True) == 101
    assert begun == [(4 - int(4 * reuse), 3, 4, {"known": True})]
    if reuse == 0.5:
        run.collector.ready = [group(at) for at in range(4)]
        run.rollouts.next(50)
        assert run.sampled[0].importance_exponent == pytest.approx(0.7)
