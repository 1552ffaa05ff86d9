"""The embedded engine: its numbers compared with transformers', its batches, pauses and weights."""

import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.clients.rollout import sample_seed
from common.errors import ConfigError, NotReady, ServiceLost
from services.engine.engine import Engine
from services.engine.jobs import GenerationJob, SamplingParams, Sequence
from services.engine.model import Model
from services.engine.scheduler import LogitsNotFinite
from services.engine.weights import BadWeights
from tests.support.engines.engines import write_model
from tests.support.engines.held_engine import held
from tests.support.errors import raises

LIMIT_S = 400


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("engine") / "model", seed=0)


@pytest.fixture
def engine(model_dir: Path) -> Iterator[Engine]:
    made = Engine(Model(model_dir, 256), max_running=24, max_waiting=100, weight_version="0")
    made.start()
    yield made
    made.stop()


def job(prompt: list[int], n: int = 1, **options: Any) -> GenerationJob:
    return GenerationJob(f"job-{random.random()}", prompt, SamplingParams(**options), n)


def run(engine: Engine, *jobs: GenerationJob) -> list[list[Sequence]]:
    engine.submit(list(jobs))
    return [each.done.result(LIMIT_S) for each in jobs]


def update_weights(engine: Engine, source: Path, version: str) -> "Future[None]":
    return engine.call(lambda scheduler: scheduler.update_weights(source, version), exclusive=True)


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.002)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 250) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


def plain_logprobs(
    path: Path, prompt: list[int], tokens: list[int], temperature: float
) -> torch.Tensor:
    """Returns the log-probabilities of tokens after a prompt, from one plain forward pass."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_embedded_logprobs_equal_a_plain_forward_for_rows_that_join_midway(
    engine: Engine, model_dir: Path
) -> None:
    waves = [prompts(6, seed) for seed in range(4)]
    jobs = []
    with held(engine):
        for chosen in waves:
            new = [
                job(prompt, n=3, max_new_tokens=random.Random(i).randrange(1, 60), temperature=0.7)
                for i, prompt in enumerate(chosen)
            ]
            engine.submit(new)
            jobs += new
            until(lambda: engine.running > 0)
    for each in jobs:
        for sequence in each.done.result(LIMIT_S):
            wanted = plain_logprobs(model_dir, each.prompt, sequence.tokens, 0.7)
            torch.testing.assert_close(
                torch.tensor(sequence.logprobs), wanted, atol=1e-5, rtol=1e-5
            )


def test_embedded_greedy_equals_generate(engine: Engine, model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    chosen = prompts(12)
    found = run(
        engine,
        *(job(prompt, temperature=0.0, max_new_tokens=30, stop_token_ids=[2]) for prompt in chosen),
    )
    for prompt, (sequence,) in zip(chosen, found, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=30,
                pad_token_id=0,
            )
        assert sequence.tokens == output[0, len(prompt) :].tolist()


def test_embedded_seeds_repeat_whatever_else_is_in_the_batch(engine: Engine) -> None:
    chosen = [20, 30, 40]
    (alone,) = run(engine, job(chosen, n=4, sampling_seed=5, max_new_tokens=40))
    mates = [job(prompt, n=2, max_new_tokens=25, top_p=0.5) for prompt in prompts(8)]
    crowd = job(chosen, n=4, sampling_seed=5, max_new_tokens=40)
    with held(engine):
        engine.submit(mates)
        until(lambda: engine.running > 0)
        engine.submit([crowd])
    crowded = crowd.done.result(LIMIT_S)
    assert [sequence.tokens for sequence in alone] == [sequence.tokens for sequence in crowded]
    (other,) = run(engine, job(chosen, n=4, sampling_seed=6, max_new_tokens=40))
    assert [sequence.tokens for sequence in other] != [sequence.tokens for sequence in alone]


def test_embedded_eight_samples_equal_eight_single_requests(engine: Engine) -> None:
    (group,) = run(engine, job([50, 60], n=8, sampling_seed=9, max_new_tokens=20))
    singles = run(
        engine,
        *(job([50, 60], sampling_seed=sample_seed(9, i), max_new_tokens=20) for i in range(8)),
    )
    assert [sequence.tokens for sequence in group] == [single[0].tokens for single in singles]
    assert len({tuple(sequence.tokens) for sequence in group}) == 8
    assert [sequence.cached_tokens for sequence in group] == [0] + [2] * 7
    # Equal prompts that arrive together are computed once, whoever sent them.
    assert [single[0].cached_tokens for single in singles] == [0] + [2] * 7


def test_embedded_without_seeds_completions_differ_between_requests(engine: Engine) -> None:
    first, second = (run(engine, job([50, 60], max_new_tokens=20))[0][0].tokens for _ in range(2))
    assert first != second


def test_embedded_more_samples_than_rows_are_all_answered(engine: Engine) -> None:
    (found,) = run(engine, job([50, 60], n=70, sampling_seed=1, max_new_tokens=5))
    assert [len(sequence.tokens) for sequence in found] == [5] * 70
    assert engine.running == engine.waiting == 0


def test_embedded_stop_tokens(engine: Engine) -> None:
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 20}
    ((free,),) = run(engine, job([20, 21], **options))
    stop = free.tokens[3]
    at = free.tokens.index(stop)
    ((stopped,),) = run(engine, job([20, 21], stop_token_ids=[stop], **options))
    assert stopped.tokens == free.tokens[: at + 1]
    assert stopped.finish == {"type": "stop", "matched": stop}
    tokenizer = engine.model.tokenizer
    assert stopped.text(tokenizer) == tokenizer.decode(
        stopped.tokens[:-1], skip_special_tokens=True
    )


def test_embedded_a_pause_changes_nothing_but_the_counters(engine: Engine) -> None:
    (calm,) = run(engine, job([20, 21], n=6, sampling_seed=3, max_new_tokens=150))
    disturbed = job([20, 21], n=6, sampling_seed=3, max_new_tokens=150)
    with held(engine):
        engine.submit([disturbed])
        until(lambda: engine.running == 6)
        paused = engine.call(lambda scheduler: scheduler.pause())
    paused.result(LIMIT_S)
    assert (engine.running, engine.waiting) == (0, 6)
    engine.call(lambda scheduler: scheduler.resume()).result(LIMIT_S)
    found = disturbed.done.result(LIMIT_S)
    assert [sequence.tokens for sequence in found] == [sequence.tokens for sequence in calm]
    assert {sequence.retractions for sequence in found} == {1}


def test_embedded_abort_of_one_job_leaves_the_others(engine: Engine) -> None:
    victim, other = (
        job([20], n=4, max_new_tokens=200),
        job([21], n=4, max_new_tokens=60, sampling_seed=1),
    )
    with held(engine):
        engine.submit([victim, other])
        until(lambda: engine.running == 8)
        aborted = engine.call(
            lambda scheduler: scheduler.abort(lambda sequence: sequence.job is victim)
        )
    aborted.result(LIMIT_S)
    assert {(sequence.finish or {})["type"] for sequence in victim.done.result(LIMIT_S)} == {
        "abort"
    }
    assert [len(sequence.tokens) for sequence in other.done.result(LIMIT_S)] == [60] * 4
    (again,) = run(engine, job([21], n=4, max_new_tokens=60, sampling_seed=1))
    assert [sequence.tokens for sequence in again] == [
        sequence.tokens for sequence in other.sequences
    ]


def test_embedded_an_update_changes_the_numbers_and_the_version(
    engine: Engine, model_dir: Path, tmp_path: Path
) -> None:
    new = write_model(tmp_path / "new", seed=1)
    engine.call(lambda scheduler: scheduler.pause()).result(LIMIT_S)
    waiting = job([20, 21, 22], n=2, sampling_seed=1, max_new_tokens=20)
    engine.submit([waiting])
    update_weights(engine, new, "1").result(LIMIT_S)
    engine.call(lambda scheduler: scheduler.resume()).result(LIMIT_S)
    for sequence in waiting.done.result(LIMIT_S):
        wanted = plain_logprobs(new, [20, 21, 22], sequence.tokens, 1.0)
        torch.testing.assert_close(torch.tensor(sequence.logprobs), wanted, atol=1e-5, rtol=1e-5)
        assert sequence.version == "1"
        assert sequence.spans() == [{"version": "1", "start": 0, "end": 20}]


def break_missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def break_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(3)


def break_unknown(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.surprise"] = torch.ones(3)


def break_numbers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][0] = torch.nan


@pytest.mark.parametrize("spoil", [break_missing, break_shape, break_unknown, break_numbers])
def test_embedded_bad_weights_are_refused_and_the_old_ones_serve(
    engine: Engine,
    model_dir: Path,
    tmp_path: Path,
    spoil: Callable[[dict[str, torch.Tensor]], None],
) -> None:
    before = run(engine, job([20], temperature=0.0, max_new_tokens=10))[0][0].tokens
    tensors = {
        name: tensor * 2 for name, tensor in load_file(model_dir / "model.safetensors").items()
    }
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadWeights):
        update_weights(engine, tmp_path, "9").result(LIMIT_S)
    assert engine.scheduler.weight_version == "0"
    assert run(engine, job([20], temperature=0.0, max_new_tokens=10))[0][0].tokens == before


def test_embedded_a_damaged_file_is_refused(
    engine: Engine, model_dir: Path, tmp_path: Path
) -> None:
    content = (model_dir / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(BadWeights):
        update_weights(engine, tmp_path, "9").result(LIMIT_S)


def test_embedded_logits_that_are_not_finite_fail_their_job_and_leave_clean_rows(
    engine: Engine,
) -> None:
    chosen = job([20, 21], n=3, sampling_seed=2, max_new_tokens=10)
    (before,) = run(engine, chosen)
    weight = engine.model.module.model.norm.weight
    good = weight.clone()
    engine.call(lambda scheduler: scheduler.pause()).result(LIMIT_S)
    engine.call(lambda scheduler: scheduler.model.cache.release()).result(LIMIT_S)
    weight.data.fill_(torch.nan)
    engine.call(lambda scheduler: scheduler.resume()).result(LIMIT_S)
    with pytest.raises(LogitsNotFinite):
        run(engine, job([20, 21], n=3, max_new_tokens=10))
    weight.data.copy_(good)
    (after,) = run(engine, job([20, 21], n=3, sampling_seed=2, max_new_tokens=10))
    assert [sequence.tokens for sequence in after] == [sequence.tokens for sequence in before]


def test_embedded_a_full_queue_refuses(engine: Engine) -> None:
    engine.call(lambda scheduler: scheduler.pause()).result(LIMIT_S)
    engine.submit([job([20], n=100, max_new_tokens=1)])
    with pytest.raises(NotReady):
        engine.submit([job([20], max_new_tokens=1)])
    engine.call(lambda scheduler: scheduler.resume()).result(LIMIT_S)
    until(lambda: engine.running == engine.waiting == 0)
    run(engine, job([20], max_new_tokens=1))


def test_embedded_crash_answers_every_caller_and_is_reported(model_dir: Path) -> None:
    crashed: list[bool] = []
    broken = Engine(Model(model_dir, 256), max_running=4, on_crash=lambda: crashed.append(True))
    broken.model.decode = None  # type: ignore[method-assign, assignment]
    broken.start()
    waiting = job([20], n=8, max_new_tokens=5)
    broken.submit([waiting])
    with pytest.raises(ServiceLost):
        waiting.done.result(LIMIT_S)
    until(lambda: bool(crashed))
    with pytest.raises(ServiceLost, match="NoneType"):
        broken.submit([job([20])])


def test_embedded_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with raises(ConfigError, field="--model-path"):
        Model(tmp_path, 256)


def test_embedded_files_that_lack_a_layer_are_refused(model_dir: Path, tmp_path: Path) -> None:
    """transformers would fill the layer with random numbers, and every answer would be wrong."""
    incomplete = tmp_path / "model"
    shutil.copytree(model_dir, incomplete)
    kept = {
        name: tensor
        for name, tensor in load_file(model_dir / "model.safetensors").items()
        if ".layers.0." not in name
    }
    save_file(kept, incomplete / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"would be random: model\.layers\.0\."):
        Model(incomplete, 256)
