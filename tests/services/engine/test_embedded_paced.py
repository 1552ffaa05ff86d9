"""Completions split over several requests to the embedded engine: same result as one request, time
limits, thoughts."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from common.clients.pacing import RequestLimits
from common.clients.rollout import RolloutClient
from services.engine.app import make_app
from services.engine.engine import Engine
from services.engine.model import Model

pytestmark = pytest.mark.integration

PROMPT = [20, 21, 22, 23]
GREEDY: dict[str, Any] = {"n": 1, "max_new_tokens": 150, "temperature": 0.0, "stop_token_ids": []}


@pytest.fixture(scope="module")
def model(base_model: Path) -> Model:
    return Model(base_model, 400)


@pytest_asyncio.fixture
async def client(model: Model) -> AsyncIterator[RolloutClient]:
    app = make_app(Engine(model, weight_version="3"))
    async with (
        app.router.lifespan_context(app),
        RolloutClient("engine", "http://in-process", transport=httpx.ASGITransport(app)) as made,
    ):
        yield made


async def test_embedded_slices_in_time_are_as_one_request(
    client: RolloutClient, model: Model
) -> None:
    whole = (await client.generate(PROMPT, **GREEDY, parameters={"ignore_eos": True}))[0]
    limits = RequestLimits(model.tokenizer, timeout_s=1e6)
    parts = (
        await client.generate(
            PROMPT, **GREEDY, parameters={"ignore_eos": True}, request_limits=limits
        )
    )[0]
    assert parts.token_ids.tolist() == whole.token_ids.tolist()
    assert (parts.text, parts.finish_reason, parts.weight_versions) == (
        whole.text,
        "length",
        [(3, 0, 150)],
    )
    assert abs(parts.logprobs - whole.logprobs).max() < 1e-4


async def test_embedded_a_completion_is_cut_in_time(client: RolloutClient, model: Model) -> None:
    """The time is up after the first request of 64 tokens."""
    options = GREEDY | {"n": 3, "temperature": 1.0, "sampling_seed": 1}
    found = await client.generate(
        PROMPT,
        **options,
        parameters={"ignore_eos": True},
        request_limits=RequestLimits(model.tokenizer, timeout_s=1e-9),
    )
    assert [(len(each.token_ids), each.finish_reason) for each in found] == [(64, "length")] * 3


async def test_embedded_a_stop_text_over_the_border_of_two_requests_ends_it(
    client: RolloutClient, model: Model
) -> None:
    free = (await client.generate(PROMPT, **GREEDY, parameters={"ignore_eos": True}))[0]
    border = free.token_ids.tolist()[62:67]  # the first request has 64 tokens
    stop = model.tokenizer.decode(border)
    shape = {"ignore_eos": True, "stop": [stop]}
    whole = (await client.generate(PROMPT, **GREEDY, parameters=shape))[0]
    parts = (
        await client.generate(
            PROMPT,
            **GREEDY,
            parameters=shape,
            request_limits=RequestLimits(model.tokenizer, timeout_s=1e6),
        )
    )[0]
    assert parts.token_ids.tolist() == whole.token_ids.tolist()
    assert (parts.text, parts.finish_reason) == (whole.text, "stop")
    assert len(parts.logprobs) == len(parts.token_ids) == parts.weight_versions[-1][2]


@pytest.mark.parametrize(
    "shape", [{"ignore_eos": True}, {"ignore_eos": True, "top_k": 5, "top_p": 0.9}]
)
async def test_embedded_a_thought_is_ended_after_its_budget(
    client: RolloutClient, model: Model, shape: dict[str, Any]
) -> None:
    prompt = model.tokenizer("2 + 3?<think>").input_ids
    end = model.tokenizer("\n</think>\n\n").input_ids
    options = GREEDY | {"n": 2, "temperature": 1.0, "max_new_tokens": 60, "sampling_seed": 4}
    for completion in await client.generate(
        prompt,
        **options,
        parameters=shape,
        request_limits=RequestLimits(model.tokenizer, thinking_tokens=10),
    ):
        ids = completion.token_ids.tolist()
        assert ids[10 : 10 + len(end)] == end
        assert len(ids) == 60
        assert completion.text == model.tokenizer.decode(ids, skip_special_tokens=True)
        written = slice(10, 10 + len(end))
        assert (completion.logprobs[written] == 0).all()
        assert (completion.kept_counts[written] == 1).all()
        assert ((completion.kept_counts > 0).all()) == ("top_k" in shape)
    closed = model.tokenizer("2 + 3?<think></think>").input_ids
    for completion in await client.generate(
        closed,
        **options,
        parameters=shape,
        request_limits=RequestLimits(model.tokenizer, thinking_tokens=10),
    ):
        assert completion.token_ids.tolist()[10 : 10 + len(end)] != end
