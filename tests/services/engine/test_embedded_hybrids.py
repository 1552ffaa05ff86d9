"""Models whose layers keep states, with or without attention: the engine equals transformers, which
computes each sequence alone and without a cache."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.engine.decoder import Decoder
from services.engine.engine import Engine
from services.engine.graphs import StepGraphs
from services.engine.jobs import GenerationJob, SamplingParams
from services.engine.model import Model
from tests.support.engines.held_engine import held
from tests.support.models.every_type import write_type

CONTEXT = 112
LIMIT_S = 400
NEAR = 1e-5
FAST = ("granitemoehybrid", "qwen3_5_text")
"""Mamba 2 and a gated delta rule, each with attention."""
SLOW = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_next",
    "zamba2",
    "zaya",
)


def slowly(kinds: Sequence[str]) -> list[Any]:
    return [pytest.param(kind, marks=[pytest.mark.slow, pytest.mark.integration]) for kind in kinds]


KINDS = [*FAST, *slowly(SLOW)]


@dataclass(frozen=True)
class Written:
    """Two sets of weights of one model, as files and as transformers loads them."""

    directories: tuple[Path, Path]
    plain: tuple[Any, Any]


@pytest.fixture(scope="module", params=KINDS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    base = tmp_path_factory.mktemp(request.param)
    directories = (base / "0", base / "1")
    for seed, directory in enumerate(directories):
        write_type(request.param, directory, seed)
    return Written(directories, (_loaded(directories[0]), _loaded(directories[1])))


def _loaded(directory: Path) -> Any:
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    plain.generation_config.eos_token_id = None
    return plain


@contextmanager
def running(directory: Path, rows: int = 5, **options: Any) -> Iterator[Engine]:
    engine = Engine(Model(directory, CONTEXT, **options), max_running=rows)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def jobs(n: int = 3, temperature: float = 1.0) -> list[GenerationJob]:
    """Returns jobs with prompts of one token, two of one length, and some longer than a chunk of a
    scan; rows of one prompt share it."""
    rng = random.Random(1)
    found = []
    for number, length in enumerate((3, 20, 20, 1, 65)):
        prompt = [rng.randrange(10, 250) for _ in range(length)]
        sampling = SamplingParams(
            max_new_tokens=34 - 5 * number,
            temperature=temperature,
            sampling_seed=number,
            ignore_eos=True,
        )
        found.append(GenerationJob(f"job {number}", prompt, sampling, n))
    return found


def generated(engine: Engine, chosen: Sequence[GenerationJob]) -> list[list[list[int]]]:
    """Returns the tokens of each job's completions."""
    engine.submit(list(chosen))
    return [[each.tokens for each in job.done.result(LIMIT_S)] for job in chosen]


def logprobs(plain: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """Returns the log-probabilities of `tokens` after `prompt`, computed alone and at once."""
    ids = torch.tensor([prompt + tokens])
    with torch.inference_mode():
        logits = plain(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_hybrid_rows_of_different_lengths_have_the_logprobs_of_each_alone(written: Written) -> None:
    """More rows than run at once come and go, so that states move."""
    chosen = jobs()
    with running(written.directories[0]) as engine:
        first = generated(engine, chosen)
        assert generated(engine, jobs()) == first
    with running(written.directories[0], rows=20) as engine:
        assert generated(engine, jobs()[::-1])[::-1] == first
    for job in chosen:
        for sequence in job.done.result():
            found = torch.tensor(sequence.logprobs)
            wanted = logprobs(written.plain[0], job.prompt, sequence.tokens)
            torch.testing.assert_close(found, wanted, atol=NEAR, rtol=NEAR)


def test_hybrid_greedy_equals_generate(written: Written) -> None:
    chosen = jobs(n=1, temperature=0.0)
    with running(written.directories[0]) as engine:
        found = generated(engine, chosen)
    for job, (tokens,) in zip(chosen, found, strict=True):
        ids = torch.tensor([job.prompt])
        with torch.inference_mode():
            output = written.plain[0].generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=job.sampling.max_new_tokens,
            )
        assert tokens == output[0, len(job.prompt) :].tolist()


def test_hybrid_rows_go_on_after_a_pause_and_an_abort_beside_them(written: Written) -> None:
    with running(written.directories[0], rows=20) as engine:
        calm = generated(engine, jobs())
        chosen = jobs()
        victim = GenerationJob("victim", [20, 21], SamplingParams(max_new_tokens=60), n=2)
        with held(engine):
            engine.submit([victim, *chosen])
            until(lambda: engine.running == 17)
            aborted = engine.call(
                lambda scheduler: scheduler.abort(lambda sequence: sequence.job is victim)
            )
            paused = engine.call(lambda scheduler: scheduler.pause())
        aborted.result(LIMIT_S)
        paused.result(LIMIT_S)
        assert engine.running == 0
        # The first of the rows have two tokens by now.
        engine.call(lambda scheduler: scheduler.resume()).result(LIMIT_S)
        found = [[each.tokens for each in job.done.result(LIMIT_S)] for job in chosen]
        assert found == calm
        retractions = {each.retractions for job in chosen for each in job.done.result()}
        assert 1 in retractions


def test_hybrid_rows_go_on_under_new_weights_as_if_these_had_read_all_of_them(
    written: Written,
) -> None:
    chosen = jobs()
    with running(written.directories[0], rows=20) as engine:
        engine.call(lambda scheduler: setattr(scheduler, "weight_version", "0")).result(LIMIT_S)
        with held(engine):
            engine.submit(chosen)
            until(lambda: engine.running == 15)
            paused = engine.call(lambda scheduler: scheduler.pause())
        paused.result(LIMIT_S)
        engine.call(
            lambda scheduler: scheduler.update_weights(written.directories[1], "1"), exclusive=True
        ).result(LIMIT_S)
        engine.call(lambda scheduler: scheduler.resume()).result(LIMIT_S)
        for job in chosen:
            for sequence in job.done.result(LIMIT_S):
                spans = sequence.spans()
                assert [span["version"] for span in spans] == ["0", "1"]
                for plain, span in zip(written.plain, spans, strict=True):
                    part = slice(span["start"], span["end"])
                    wanted = logprobs(plain, job.prompt, sequence.tokens)[part]
                    found = torch.tensor(sequence.logprobs)[part]
                    torch.testing.assert_close(found, wanted, atol=NEAR, rtol=NEAR)


@pytest.mark.parametrize("written", FAST[:1], indirect=True)
def test_hybrid_scores_are_those_of_a_forward_and_disturb_no_row(written: Written) -> None:
    prompts = [job.prompt for job in jobs() if len(job.prompt) > 1]
    with running(written.directories[0], rows=20) as engine:
        calm = generated(engine, jobs())
        chosen = jobs()
        with held(engine):
            engine.submit(chosen)
            until(lambda: engine.running == 15)
            scored = engine.call(lambda scheduler: scheduler.score(prompts))
        scores, _ = scored.result(LIMIT_S)
        assert [[each.tokens for each in job.done.result(LIMIT_S)] for job in chosen] == calm
    for prompt, found in zip(prompts, scores, strict=True):
        wanted = logprobs(written.plain[0], prompt[:1], prompt[1:])
        torch.testing.assert_close(torch.tensor(found.logprobs), wanted, atol=NEAR, rtol=NEAR)


@pytest.mark.parametrize("written", FAST[:1], indirect=True)
def test_hybrid_recorded_steps_compute_no_token_twice(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a CUDA graph, this record runs its step once before it is used."""

    def record(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        step()
        return step

    with running(written.directories[0], rows=12) as engine:
        calm = generated(engine, jobs())
    monkeypatch.setattr("services.engine.decoder.recorder", lambda: record)
    model = Model(written.directories[0], CONTEXT)
    model.graphs = StepGraphs(model._step, model._recorder(), model.device)
    with torch.inference_mode():
        model.reserve(12)
        model.cache.allocate(12, 128)
    engine = Engine(model, max_running=12)
    engine.start()
    try:
        assert generated(engine, jobs()) == calm
    finally:
        engine.stop()
    assert model.graphs._records


def test_hybrid_deterministic_answers_do_not_depend_on_the_batch(written: Written) -> None:
    def answer(engine: Engine, beside: list[GenerationJob]) -> list[tuple[list[int], list[float]]]:
        wanted = GenerationJob("wanted", [20, 30, 40], SamplingParams(max_new_tokens=12), 3)
        wanted.sampling = SamplingParams(max_new_tokens=12, sampling_seed=1)
        generated(engine, [*beside, wanted])
        return [(each.tokens, each.logprobs) for each in wanted.done.result()]

    with running(written.directories[0], rows=40, deterministic=True) as engine:
        alone = answer(engine, [])
        for n in (1, 3):
            assert answer(engine, jobs(n)) == alone
    for tokens, found in alone:
        wanted = logprobs(written.plain[0], [20, 30, 40], tokens)
        torch.testing.assert_close(torch.tensor(found), wanted, atol=NEAR, rtol=NEAR)


@pytest.mark.parametrize("written", FAST[:1], indirect=True)
def test_hybrid_memory_of_a_row_has_its_states(written: Written) -> None:
    decoder = Decoder(_loaded(written.directories[0]), CONTEXT)
    with torch.inference_mode():
        decoder.prefill([[1, 2, 3]], [0, 0], 0)
    cache = decoder.cache
    states = cache.bytes_per_row(0)
    assert states > 0
    held_bytes = sum(tensor.numel() * tensor.element_size() for tensor in cache.tensors())
    assert cache.rows * cache.bytes_per_row(cache.columns) == held_bytes
