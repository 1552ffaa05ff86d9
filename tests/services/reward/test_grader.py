"""The grader in this process: hostile answers, statuses, dead workers, cancellation and limits."""

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.errors import NotReady, ServiceLost
from common.settings.rewards import MathReward
from common.settings.sections import RewardSection
from common.wire.schemas import RewardItem
from services.reward.pool import CallFailed
from services.reward.service import RewardService
from tests.support.processes.waits import comes

pytestmark = pytest.mark.integration

HOSTILE = [
    "9^{9^{9^9}}",
    "9**9**9**9",
    "1000000!",
    "100000!!",
    "\\frac{1}{" * 50 + "2" + "}" * 50,
    "\\sqrt{" * 80 + "2" + "}" * 80,
    "(" * 500 + "1" + ")" * 500,
    "(x+1)^{100000}",
    "10^{10^{10}}",
    "2^{1000000000}",
    "\\sum_{i=1}^{10000000} \\frac{1}{i}",
    "\\prod_{i=1}^{1000000} i",
    "\\int_0^1 x^{x^{x}} dx",
    "x^{x^{x^{x}}}",
    "\\left" * 100,
    "{" * 1000,
    "1e999999999",
    "9!!!!!!!!",
    "18!!!",
    "(((2^{3})^{4})^{5})^{6}^{7}",
    "2^{2^{2^{2^{2^{2}}}}}",
    "10**10**10",
    "9^{99999999}",
    "\\binom{1000000}{500000}",
    "\\frac{1}{10^{1000000}}",
    "3^{10^{8}} \\bmod 7",
    "\\sum_{n=1}^{\\infty} \\frac{1}{n^{n^n}}",
    "\\sum_{i=1}^{1000} \\sum_{j=1}^{1000} \\sum_{k=1}^{1000} ijk",
    "\\prod_{p=1}^{\\infty} (1-\\frac{1}{p^2})",
    "\\int_0^{\\infty} \\sin(x^x) e^{-x^3} dx",
    "\\int \\int \\int \\int xyzw e^{xyzw} dx dy dz dw",
    "\\lim_{x \\to 0} \\frac{\\sin(\\tan x)-\\tan(\\sin x)}{x^{99}}",
    "\\frac{d}{dx} x^{x^{x^{x^{x}}}}",
    "(a+b+c+d+e+f)^{100}",
    "(x+1)(x+2)" * 60,
    "x^{" * 200 + "2" + "}" * 200,
    "\\log(" * 100 + "2" + ")" * 100,
    "\\sin(" * 100 + "x" + ")" * 100,
    "|" * 200,
    "-" * 900,
    "+1" * 400,
    "1/" * 400 + "1",
    "," * 900,
    "\\{" * 200 + "1" + "\\}" * 200,
    "\\begin{pmatrix}" * 40,
    "\\begin{pmatrix}" + "1&" * 300 + "1\\end{pmatrix}",
    "\\sqrt[1000000]{10^{1000000}}",
    "0." + "9" * 900,
    "9" * 900 + "!",
    "\\text{" * 200 + "}" * 200,
    "=" * 900,
    "x=" * 400 + "1",
    "\\infty",
    "nan",
    "1/0",
]
WRAPPED_HOSTILE = [
    "(" * 2000 + "1" + ")" * 2000,
    "9" * 100_000,
    "\\frac{1}{" * 20_000,
    "x" * 100_000,
    "\\boxed{" * 10_000,
]
ENORMOUS_SUM = "\\sum_{i=0}^{1000000000} 2^{i}"
HANGING = "\\sum_{i=1}^{1000000000} \\frac{1}{i}"
# Of a number, a sum that is not computed is no answer, whatever it is.
NO_NUMBER = "\\ln 5"


def boxed(answer: str, gold: str = "18") -> RewardItem:
    return RewardItem(response=f"\\boxed{{{answer}}}", ground_truth=gold)


def descendants() -> list[psutil.Process]:
    """Returns the pools' processes under this process; other tests keep engines and routers running
    beside them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            if process.status() != psutil.STATUS_ZOMBIE and any(
                "reward/worker.py" in word for word in process.cmdline()
            ):
                found.append(process)
    return found


def workers() -> list[psutil.Process]:
    """Returns the graders, which are children of the process that forks them."""
    found = []
    for process in descendants():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            if process.ppid() != os.getpid():
                found.append(process)
    return found


@pytest.fixture
async def grader() -> AsyncIterator[RewardService]:
    async with RewardService(
        RewardSection(workers=2, functions=[MathReward(timeout_s=100)])
    ) as started:
        assert started.not_ready()
        await started.ready()
        assert started.not_ready() is None
        yield started
    assert not descendants()


@pytest.mark.slow
async def test_hostile_answers_come_back_and_the_good_ones_beside_them_are_right() -> None:
    async with RewardService(
        RewardSection(workers=2, functions=[MathReward(timeout_s=0.5)])
    ) as grader:
        await grader.ready()
        hostile = [boxed(text, NO_NUMBER) for text in HOSTILE] + [
            boxed(text) for text in WRAPPED_HOSTILE
        ]
        hostile += [RewardItem(response=text, ground_truth="18") for text in WRAPPED_HOSTILE]
        good = [
            boxed("18"),
            boxed("x+1", "1+x"),
            boxed("\\sqrt{12}", "2\\sqrt{3}"),
            boxed("19"),
        ] * len(hostile)
        items = [
            item for trio in zip(hostile, good[::2], good[1::2], strict=False) for item in trio
        ]
        results = await grader.score(items)
    for item, result in zip(items, results, strict=True):
        assert result.ground_truth == item.ground_truth
        assert (result.reward is None) == (result.status in ("timeout", "died"))
        assert not (result.status == "unparsable" and result.reward)
    for item, result in zip(items, results, strict=True):
        if item in good:
            assert (result.status, result.correct) == ("ok", item.response != "\\boxed{19}"), (
                item.response[:50]
            )
        else:
            assert not result.correct, item.response[:50]
    assert sum(result.status == "timeout" for result in results) >= 5
    assert grader.stats()["graded"]["timeout"] == sum(
        result.status == "timeout" for result in results
    )


@pytest.mark.parametrize(("require_stop", "reward"), [(True, 0.0), (False, 1.0)])
async def test_a_cut_completion_earns_nothing_when_stopping_is_required(
    require_stop: bool, reward: float
) -> None:
    grader = RewardService(RewardSection(require_stop=require_stop))  # a number needs no worker
    item = RewardItem(response="\\boxed{18}", ground_truth="18", finish_reason="length")
    [result] = await grader.score([item])
    [stopped] = await grader.score([boxed("18")])
    assert (result.status, result.reward, result.correct) == ("ok", reward, reward == 1.0)
    assert stopped.reward == 1.0


async def test_more_waiting_answers_than_the_queue_holds_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.reward.hosts.QUEUE_LIMIT", 8)
    async with RewardService(
        RewardSection(workers=1, functions=[MathReward(timeout_s=30)])
    ) as grader:
        await grader.ready()
        busy = [
            asyncio.create_task(grader.score([boxed(HANGING, NO_NUMBER)] * 2)) for _ in range(4)
        ]
        await comes(lambda: grader.stats()["unfinished"] == 8)
        with pytest.raises(NotReady):
            await grader.score([boxed("x+1", "1+x")])
        [plain] = await grader.score([boxed("18")])
        assert plain.correct, "what needs no worker is graded even then"
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)


async def test_cancelling_frees_the_workers() -> None:
    async with RewardService(
        RewardSection(workers=2, functions=[MathReward(timeout_s=100)])
    ) as grader:
        await grader.ready()
        task = asyncio.create_task(grader.score([boxed(HANGING, NO_NUMBER)] * 20))
        await comes(lambda: grader.stats()["unfinished"] == 20)
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert grader.stats()["unfinished"] == 0
        async with asyncio.timeout(400):
            results = await grader.score([boxed("x+1", "1+x")] * 4)
        assert all(result.correct for result in results)


async def test_idle_workers_killed_from_outside_are_replaced_and_cost_no_answer(
    grader: RewardService,
) -> None:
    await comes(lambda: len(workers()) == 4)  # two of them are spares
    victims = workers()
    for victim in victims:
        victim.kill()
    await asyncio.sleep(0.5)
    results = await grader.score([boxed("x+1", "1+x")] * 4)
    assert [result.status for result in results] == ["ok"] * 4
    assert all(result.correct for result in results)
    assert grader._restarts._value.get() >= 2


async def test_an_answer_sent_to_workers_that_died_before_they_read_it_goes_to_another_worker() -> (
    None
):
    async with RewardService(
        RewardSection(workers=1, functions=[MathReward(timeout_s=100)])
    ) as grader:
        await grader.ready()
        await comes(lambda: sum(pool._idle.qsize() for pool in grader._pools) == 2)
        victims = workers()
        for victim in victims:
            victim.suspend()  # it cannot read its input
        task = asyncio.create_task(grader.score([boxed("x+1", "1+x")]))
        await comes(lambda: grader.stats()["unfinished"] == 1)
        await asyncio.sleep(0.1)
        for victim in victims:
            victim.kill()
        [result] = await task
        assert (result.status, result.correct) == ("ok", True)
        assert grader._restarts._value.get() == 2


async def test_a_worker_killed_while_it_starts_fails_no_answer() -> None:
    async with RewardService(
        RewardSection(workers=1, functions=[MathReward(timeout_s=100)])
    ) as grader:
        await grader.ready()
        (pool,) = grader._pools
        await comes(lambda: pool._idle.qsize() == 2)
        spawn, failures = pool._spawn, [CallFailed("died", "killed while it started")]

        async def once() -> Any:
            if failures:
                raise failures.pop()
            return await spawn()

        pool._spawn = once  # type: ignore[method-assign]
        for worker in workers():
            worker.kill()
        [result] = await grader.score([boxed("x+1", "1+x")])
        assert (result.status, result.correct, failures) == ("ok", True, [])


async def test_a_worker_killed_while_it_grades_is_an_error_and_not_a_zero() -> None:
    async with RewardService(
        RewardSection(workers=1, functions=[MathReward(timeout_s=100)])
    ) as grader:
        await grader.ready()
        task = asyncio.create_task(grader.score([boxed(HANGING, NO_NUMBER), boxed("x+1", "1+x")]))
        await comes(
            lambda: any(sum(worker.cpu_times()[:2]) > 0.5 for worker in workers())
        )  # one worker is busy
        for worker in workers():  # the busy one, and its spare
            worker.kill()
        died, good = await task
    assert (died.status, died.reward) == ("died", None)
    assert (good.status, good.correct) == ("ok", True)


async def test_the_process_that_forks_graders_is_replaced_too(grader: RewardService) -> None:
    parents = {worker.ppid() for worker in workers()}
    for process in [*parents, *(worker.pid for worker in workers())]:
        with contextlib.suppress(ProcessLookupError):  # it ended with its parent
            os.kill(process, signal.SIGKILL)
    await asyncio.sleep(0.5)
    results = await grader.score([boxed("x+1", "1+x")] * 2)
    assert all(result.correct for result in results)


async def test_graders_lost_while_no_file_can_be_opened_are_replaced_afterwards(
    grader: RewardService, caplog: pytest.LogCaptureFixture
) -> None:
    """The task that starts them must outlive the fault: every later answer waits for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    (pool,) = grader._pools
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        # as if one had died; closing its connection would make room for another file
        pool._missing.release()
        await comes(lambda: "no grader can be started" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert pool._filling is not None
    assert not pool._filling.done()
    await comes(lambda: pool._missing.locked())


async def test_graders_that_never_start_fail_every_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "worker.py"
    broken.write_text("raise SystemExit('no math-verify here')\n")
    monkeypatch.setattr("services.reward.pool._SCRIPT", broken)
    monkeypatch.setattr("services.reward.pool._RETRY_S", 0.01)
    async with RewardService(RewardSection(workers=1)) as scorer:
        results = await scorer.score([boxed("x+1", "1+x"), boxed("x+2", "1+x")])
        assert isinstance(scorer.not_ready(), ServiceLost)
    assert [(result.status, result.reward) for result in results] == [("died", None)] * 2


@pytest.mark.slow
async def test_a_grader_out_of_memory_is_an_error_and_harms_no_other_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.reward.functions.answers.MEMORY_MB", 256)
    async with RewardService(
        RewardSection(workers=1, functions=[MathReward(timeout_s=60)])
    ) as grader:
        bomb, good = await grader.score([boxed(ENORMOUS_SUM, NO_NUMBER), boxed("x+1", "1+x")])
    assert (bomb.status, bomb.reward) == ("died", None)
    assert (good.status, good.correct) == ("ok", True)
