"""What an evaluation during training measures: accuracy on greedy answers, and pass@k on sampled
ones alone."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from common.settings.config import Config
from services.reward.functions.base import Message, RewardFunction
from tests.support.runs.in_process import Faulty, quiet
from trainer import train_in_process
from trainer.observe.run_dir import read_lines

pytestmark = pytest.mark.integration

RIGHT = "right"


class Marked(RewardFunction):
    """Calls an answer right if it says so."""

    name = "marked"
    gives_verdicts = True

    def __call__(self, completions: list[list[Message]], **_: Any) -> list[float]:
        return [float(completion[-1]["content"] == RIGHT) for completion in completions]


class OnlyGreedyIsRight(Faulty):
    """Writes `RIGHT` over greedy answers, and something else over sampled ones."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if request.url.path != "/generate":
            return response
        greedy = json.loads(await request.aread())["sampling_params"]["temperature"] == 0
        found = json.loads(await response.aread())
        for answer in found if isinstance(found, list) else [found]:  # one answer is no list
            answer["text"] = RIGHT if greedy else "wrong"
        return httpx.Response(200, json=found)


def test_pass_at_k_leaves_out_the_greedy_answer(settings: Callable[..., Config]) -> None:
    config = settings("--trainer.max_steps", "1", "--evaluation.samples", "3")

    def wrapped(app: FastAPI) -> OnlyGreedyIsRight:
        return OnlyGreedyIsRight(app, set(), lambda: httpx.Response(500))

    train_in_process(config, quiet(), wrapped, rewards=[Marked()])

    assert config.trainer.run_dir is not None
    evaluations = read_lines(config.trainer.run_dir / "evaluations.jsonl")
    assert [line["accuracy"] for line in evaluations] == [1.0, 1.0]
    assert [line["pass_at_k"] for line in evaluations if line["pass_at_k"] is not None] == [
        0.0,
        0.0,
    ]
