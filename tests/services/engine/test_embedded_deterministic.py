"""A deterministic engine: the same tokens and log-probabilities, to the last bit, whatever is beside
a request, however its prompt was computed, and with any number of threads."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from common.clients.rollout import RolloutClient, SamplingOptions, sample_seed
from services.engine.app import make_app
from services.engine.blocks import ROWS, attended_columns, blocks_of
from services.engine.decoder import UnfitModel
from services.engine.engine import Engine
from services.engine.jobs import GenerationJob, SamplingParams, Sequence
from services.engine.model import Model
from tests.support.engines.engines import write_model
from tests.support.errors import raises
from tests.support.models.every_type import write_type

LIMIT_S = 400
PROMPT = [40, 50, 60, 70, 80, 90, 100]
MIXTURES = ("deepseek_v3", "gpt_oss", "qwen3_5_moe_text")
Answers = list[tuple[list[int], list[float], list[int]]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("deterministic") / "model", seed=0)


@contextmanager
def running(
    directory: Path, context: int = 256, rows: int = 200, **options: Any
) -> Iterator[Engine]:
    options = {"deterministic": True, **options}
    engine = Engine(Model(directory, context, **options), max_running=rows)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def job(prompt: list[int], n: int = 1, **options: Any) -> GenerationJob:
    returns_kept = options.pop("returns_kept", False)
    sampling = SamplingParams(**options)
    return GenerationJob(f"job-{random.random()}", prompt, sampling, n, returns_kept=returns_kept)


def group(n: int = 8, seed: int = 5, **options: Any) -> GenerationJob:
    return job(
        PROMPT, n, **{"sampling_seed": seed, "max_new_tokens": 60, "temperature": 0.9, **options}
    )


def mates(count: int, seed: int) -> list[GenerationJob]:
    rng = random.Random(seed)
    found = []
    for number in range(count):
        prompt = [rng.randrange(10, 250) for _ in range(rng.randrange(1, 90))]
        options = {"top_p": 0.6} if number % 2 else {"temperature": 0.0}
        found.append(
            job(prompt, rng.randrange(1, 6), max_new_tokens=rng.randrange(1, 50), **options)
        )
    return found


def answers(engine: Engine, wanted: GenerationJob, beside: list[GenerationJob]) -> Answers:
    """Returns the completions of `wanted`, which begins after some of those beside it and before
    others."""
    half = len(beside) // 2
    engine.submit([*beside[:half], wanted, *beside[half:]])
    for each in beside:
        each.done.result(LIMIT_S)
    return read(wanted.done.result(LIMIT_S))


def read(sequences: list[Sequence]) -> Answers:
    return [
        (each.tokens, each.logprobs, [int(token) for _, kept in each.kept for token in kept])
        for each in sequences
    ]


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.8, "top_k": 40, "returns_kept": True}, {"temperature": 0.0}]
)
def test_deterministic_answers_are_those_of_a_request_alone(
    model_dir: Path, options: dict[str, Any]
) -> None:
    with running(model_dir) as engine:
        alone = answers(engine, group(**options), [])
        for count in (3, 12):
            assert answers(engine, group(**options), mates(count, count)) == alone
    # Another engine, with another room, other rows and other memory.
    with running(model_dir, context=400, rows=9) as engine:
        assert answers(engine, group(**options), mates(5, 9)) == alone


def test_deterministic_completions_of_a_group_equal_single_requests(model_dir: Path) -> None:
    with running(model_dir) as engine:
        together = answers(engine, group(n=8), mates(5, 1))
        singles = [
            answers(engine, group(n=1, sampling_seed=sample_seed(5, i)), [])[0] for i in range(8)
        ]
    assert together == singles
    assert len({tuple(tokens) for tokens, _, _ in together}) == 8


async def test_completions_requested_apart_have_their_own_seeds(model_dir: Path) -> None:
    """SGLang would give all eight completions of one request the same seed."""
    options: SamplingOptions = {
        "n": 8, "max_new_tokens": 12, "temperature": 1.0, "stop_token_ids": [], "sampling_seed": 77
    }  # fmt: skip
    asked: list[dict[str, Any]] = []

    class Recording(httpx.ASGITransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            asked.append(json.loads(await request.aread())["sampling_params"])
            return await super().handle_async_request(request)

    app = make_app(Engine(Model(model_dir, 256, deterministic=True), weight_version="3"))
    async with app.router.lifespan_context(app):
        transport = Recording(app)
        async with RolloutClient("engine", "http://engine", transport=transport) as client:
            client.seeds_apart = True
            found = await client.generate(PROMPT, **options)
            seeds = [each["sampling_seed"] for each in asked]
            again = await client.generate(PROMPT, **{**options, "n": 1, "sampling_seed": seeds[6]})
    assert [each["n"] for each in asked] == [1] * 9
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 1 << 31 for seed in seeds)
    assert len({tuple(each.token_ids) for each in found}) == 8
    order = [seed % (1 << 31) for seed in (sample_seed(77, index) for index in range(8))]
    by_seed = dict(zip(order, found, strict=True))
    assert by_seed[seeds[6]].token_ids.tolist() == again[0].token_ids.tolist()
    assert by_seed[seeds[6]].logprobs.tolist() == again[0].logprobs.tolist()


def test_deterministic_answers_survive_pauses_that_compute_their_tokens_again(
    model_dir: Path,
) -> None:
    with running(model_dir) as engine:
        alone = answers(engine, group(max_new_tokens=90), [])
        wanted = group(max_new_tokens=90)
        pauses = 0

        def pause(scheduler: Any) -> None:
            nonlocal pauses
            pauses += bool(scheduler.rows.sequences)
            scheduler.pause()
            scheduler.resume()

        engine.submit([wanted])
        while not wanted.done.done():
            engine.call(pause).result(LIMIT_S)
        assert pauses > 3
        assert read(wanted.done.result()) == alone
        assert all(each.retractions > 1 for each in wanted.done.result())


def test_deterministic_prompts_may_be_computed_in_any_parts_and_with_any_threads(
    model_dir: Path,
) -> None:
    model = Model(model_dir, 256, deterministic=True)
    rng = np.random.default_rng(3)
    prompt = rng.integers(10, 250, 150).tolist()
    threads = torch.get_num_threads()
    found = []
    with torch.inference_mode():
        for others, count in ((0, 1), (1, 1), (5, 2), (40, 2)):
            torch.set_num_threads(count)
            try:
                short = [[11 + number] * (1 + number % 7) for number in range(others)]
                prompts = [*short, prompt]
                found.append(model.prefill(prompts, range(len(prompts)), first=0)[-1])
            finally:
                torch.set_num_threads(threads)
    for logits in found[1:]:
        assert torch.equal(logits, found[0])


def test_deterministic_logprobs_are_those_of_a_plain_forward(model_dir: Path) -> None:
    with running(model_dir) as engine:
        found = answers(engine, group(max_new_tokens=100), mates(6, 2))
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for tokens, logprobs, _ in found:
        with torch.inference_mode():
            logits = plain(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
        wanted = (logits / 0.9).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), wanted, atol=1e-5, rtol=1e-5)


def test_deterministic_attention_has_its_windows(model_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "mistral"
    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=290, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, sliding_window=8, initializer_range=0.2, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((model_dir / name).read_bytes())
    with running(directory) as engine:
        found = answers(engine, group(), mates(6, 4))
        assert answers(engine, group(), []) == found
    for tokens, logprobs, _ in found:
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
        wanted = (logits / 0.9).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), wanted, atol=1e-5, rtol=1e-5)


def test_a_model_that_mixes_its_tokens_is_refused(
    model_dir: Path,
) -> None:
    """The change is too small for the check that a sequence is computed as if alone."""
    model = Model(model_dir, 256, deterministic=True)

    def mix(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits + 1e-6 * logits.mean(0, keepdim=True)

    refused = raises(UnfitModel, field="--model-path", value=model.config.model_type)
    with model.module.get_output_embeddings().register_forward_hook(mix), refused:
        Engine(model)
    Engine(model)
    other = Model(model_dir, 256)
    with other.module.get_output_embeddings().register_forward_hook(mix):
        Engine(other)  # which promises less


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_compute_whole_blocks_and_else_the_model_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompt alone, and among others that choose the same experts."""
    plain = write_type(kind, tmp_path)
    rng = np.random.default_rng(0)
    wanted = rng.integers(10, 250, 5).tolist()
    model = Model(tmp_path, 112, deterministic=True)
    model.reserve(41)
    with torch.inference_mode():
        alone = model.prefill([wanted], [0], 0)[0]
        torch.testing.assert_close(alone, plain(torch.tensor([wanted])).logits[0, -1])
        for count in (1, 5, 20, 40):
            others = [
                rng.integers(10, 250, length).tolist() for length in rng.integers(1, 9, count)
            ]
            prompts = [*others[: count // 2], wanted, *others[count // 2 :]]
            beside = model.prefill(prompts, range(count + 1), 0)[count // 2]
            assert torch.equal(beside, alone)

    monkeypatch.setattr("services.engine.decoder.compute_experts_in_blocks", lambda _: None)
    with raises(UnfitModel, field="--model-path") as refused:
        Model(tmp_path, 112, deterministic=True).reserve(41)
    assert "reproducible false" in str(refused.value.remedy)


def test_blocks_hold_every_token_once_and_none_before_one_that_it_attends_to() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 300, 20)
    positions = np.concatenate([np.arange(length) for length in lengths])
    rows = np.repeat(np.arange(20), lengths)
    done = np.zeros(20, np.int64)
    for block in blocks_of(positions):
        assert len(block.members) == ROWS
        assert (block.members[block.count :] == block.members[block.count - 1]).all()
        for member in block.own:
            assert attended_columns(int(positions[member])) == block.columns > positions[member]
            assert positions[member] == done[rows[member]]
            done[rows[member]] += 1
    assert (done == lengths).all()
