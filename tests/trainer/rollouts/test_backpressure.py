"""Slow or full services slow down the collector: no group is dropped, and none is generated before
its turn."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from common.settings.config import Config, load
from services.reward.functions.base import Message, RewardFunction
from tests.support.paths import ROOT
from trainer import train_in_process
from trainer.observe.run_dir import read_lines

pytestmark = pytest.mark.integration

STEPS, GROUPS, SIZE = 3, 4, 4


@pytest.fixture
def config(base_model: Path, tmp_path: Path) -> Config:
    """At most one batch of groups is in progress, and the reward-server accepts one group at a
    time."""
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
            str(GROUPS),
            "--trainer.max_steps",
            str(STEPS),
            "--sampling.group_size",
            str(SIZE),
        ),
        *("--evaluation.samples", "0", "--limits.max_failed_groups", "1"),
        *("--reward.function_timeout_s", "60"),
    ]
    return load(words, {})


class Slow(RewardFunction):
    """Takes a while for every call."""

    name = "slow"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list[list[Message]], **_: Any) -> list[float]:
        self.calls += 1
        time.sleep(0.3)
        return [float(index % 2) for index, _ in enumerate(completions)]


class Counted(httpx.AsyncBaseTransport):
    """Counts the answers by path and status."""

    def __init__(self, inner: httpx.AsyncBaseTransport, counts: dict[tuple[str, int], int]) -> None:
        self.inner, self.counts = inner, counts

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self.inner.handle_async_request(request)
        key = (request.url.path, response.status_code)
        self.counts[key] = self.counts.get(key, 0) + 1
        return response


@pytest.mark.slow
def test_a_slow_reward_server_that_refuses_slows_the_run_and_drops_nothing(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: dict[tuple[str, int], int] = {}
    transport = httpx.ASGITransport
    monkeypatch.setattr(httpx, "ASGITransport", lambda app: Counted(transport(app), counts))
    monkeypatch.setattr("services.reward.app.MAX_REQUESTS", 1)
    monkeypatch.setattr("trainer.rollouts.group_maker._MAX_GRADE", SIZE)  # one call per group
    slow = Slow()
    train_in_process(config, Console(quiet=True), rewards=[slow])
    assert config.trainer.run_dir is not None
    lines = read_lines(config.trainer.run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["dropped"] == {} for line in lines)
    assert counts[("/batch_reward", 503)] > 0  # it did refuse calls
    # Every group once.
    assert counts[("/batch_reward", 200)] == slow.calls == STEPS * GROUPS
    assert (
        counts[("/generate", 200)] == STEPS * GROUPS
    )  # no group was generated without a slot for it
