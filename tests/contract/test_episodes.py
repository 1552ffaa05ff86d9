"""Episodes of the environment-server on both engines, behind the real router: a model that calls a
tool, its exact tokens.

The recorded episodes are compared with transformers: the chat template renders the same
conversation, and every sampled token has the model's log-probability after exactly the preceding
tokens.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.clients.rollout import RolloutClient
from common.settings.sections import EnvironmentSection, ModelSection
from common.wire.schemas import (
    EpisodeLimits,
    EpisodeRequest,
    EpisodeSampling,
    EpisodeSequence,
    EpisodeTask,
)
from examples.tool_calculator.base import build
from services.environment.app import create_environment_app
from services.environment.service import EpisodeService
from services.environment.template import load_template
from services.http.app import listen, serving
from tests.support.engines.engines import (
    engine_process,
    router_process,
    sglang_is_installed,
    sglang_process,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow]
NAME = "python:examples.tool_calculator.calculator:Calculator"
TOLERANCE = 1e-4
EPISODES = 16


@pytest.fixture(scope="module")
def calculating(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a tiny model that knows the tool."""
    directory = tmp_path_factory.mktemp("calculator")
    build(directory, console=Console(quiet=True))
    return directory / "base"


@pytest.fixture(scope="module", params=["embedded", "sglang"])
def routed_url(
    request: pytest.FixtureRequest, calculating: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    logs = tmp_path_factory.mktemp("logs")
    if request.param == "sglang":
        if not sglang_is_installed():
            pytest.skip("SGLang is not installed: `make sglang-cpu` does it")
        with (
            sglang_process(calculating, logs / "sglang.log", "7") as url,
            router_process(url, logs / "router.log") as routed,
        ):
            yield routed
    else:
        arguments = (
            "--weight-version",
            "7",
            "--max-running-requests",
            "64",
            "--max-context-tokens",
            "512",
        )
        with (
            engine_process(calculating, logs / "engine.log", *arguments) as (url, _),
            router_process(url, logs / "router.log") as routed,
        ):
            yield routed


@asynccontextmanager
async def environment_server(
    model: Path, router_url: str
) -> AsyncIterator[tuple[EpisodeService, str]]:
    template, stops = load_template(ModelSection(name=str(model)), {})
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with RolloutClient("rollout-server", router_url) as router:
        service = EpisodeService(
            EnvironmentSection(name=NAME), template, router, stop_token_ids=stops, gateway=url
        )
        async with serving(create_environment_app(service), sock):
            yield service, url


def request_of(question: str, answer: int, most: int = 60, n: int = EPISODES) -> EpisodeRequest:
    task = EpisodeTask(env=NAME, prompt=question, ground_truth=str(answer), seed=3)
    return EpisodeRequest(
        request_id=f"r-{answer}-{most}",
        n=n,
        task=task,
        sampling=EpisodeSampling(max_new_tokens=most),
        limits=EpisodeLimits(turns=3, context=400),
    )


def check_logprobs(model: Any, sequence: EpisodeSequence) -> None:
    """Asserts that only the sampled tokens have log-probabilities: the model's, given all preceding
    tokens."""
    ids = torch.tensor([[*sequence.prompt_ids.tolist(), *sequence.token_ids.tolist()]])
    with torch.inference_mode():
        scores = torch.log_softmax(model(ids).logits[0, len(sequence.prompt_ids) - 1 : -1], dim=-1)
    expected = scores.gather(1, ids[0, len(sequence.prompt_ids) :, None])[:, 0].numpy()
    sampled = sequence.mask == 1
    np.testing.assert_allclose(
        sequence.logprobs[sampled], expected[sampled], rtol=0, atol=TOLERANCE
    )
    assert not sequence.logprobs[~sampled].any()
    assert [(turn.start, turn.end) for turn in sequence.turns] == _runs(sampled.tolist())


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff([0, *map(int, mask), 0])).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


async def test_contract_episodes_with_a_tool_are_the_sampled_tokens(
    routed_url: str, calculating: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(calculating)
    model = AutoModelForCausalLM.from_pretrained(calculating)
    end = tokenizer.eos_token_id
    async with environment_server(calculating, routed_url) as (service, _):
        episodes = await service.episodes(request_of("4739 * 8526 = ?", 4739 * 8526))
    assert [episode.status for episode in episodes] == ["ok"] * EPISODES
    assert len({tuple(episode.sequences[0].token_ids.tolist()) for episode in episodes}) > 1, (
        "each has a seed of its own"
    )
    called = [
        episode
        for episode in episodes
        if episode.metrics["tool_calls"] and episode.stop_reason == "done"
    ]
    assert called, "the model knows the tool"
    for episode in episodes:
        (sequence,) = episode.sequences
        check_logprobs(model, sequence)
        assert sequence.weight_versions == [(7, 0, len(sequence.token_ids))]
        ended = [sequence.token_ids[turn.end - 1] == end for turn in sequence.turns]
        assert all(ended) == (episode.stop_reason in ("done", "turns"))
        assert (episode.reward == 1.0) == (episode.answer == f"#### {4739 * 8526}")
    for episode in called:
        (sequence,) = episode.sequences
        text = tokenizer.decode(sequence.token_ids)
        assert len(sequence.turns) == 2
        between = sequence.token_ids[sequence.turns[0].end : sequence.turns[1].start]
        result = tokenizer.decode(between)
        assert result.startswith("\n<|im_start|>user\n<tool_response>"), (
            "the stop token before it is the sampled one"
        )
        assert result.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")
        assert text.count("<tool_call>") == text.count("<tool_response>") == 1


async def test_contract_a_call_through_the_gateway_continues_an_answer_that_was_cut(
    routed_url: str, calculating: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(calculating)
    model = AutoModelForCausalLM.from_pretrained(calculating)
    async with (
        environment_server(calculating, routed_url) as (service, url),
        httpx.AsyncClient(trust_env=False, timeout=400) as http,
    ):
        session = service.open_session(request_of("12 * 34 = ?", 408, most=3))
        chat: list[dict[str, Any]] = [{"role": "user", "content": "12 * 34 = ?"}]
        finishes = []
        for _ in range(2):
            answer = await http.post(
                f"{url}/sessions/{session.id}/v1/chat/completions",
                json={"model": "policy", "messages": chat, "temperature": 0.1},
                headers={"authorization": f"Bearer {session.id}"},
            )
            (choice,) = answer.raise_for_status().json()["choices"]
            finishes.append(choice["finish_reason"])
            chat += [choice["message"], {"role": "user", "content": "Go on."}]
        session.close()
        (sequence,) = session.sequences()
    check_logprobs(model, sequence)
    first, second = sequence.turns
    assert (finishes[0], first.end - first.start) == ("length", 3)
    between = tokenizer.decode(sequence.token_ids[first.end : second.start])
    assert between == "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n", (
        "the end is the template's"
    )
    assert sequence.prompt_ids.tolist() == tokenizer.apply_chat_template(
        chat[:1], add_generation_prompt=True, return_dict=False
    ), "the whole conversation is one sequence"
