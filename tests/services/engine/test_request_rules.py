"""What a request of the embedded engine may ask for, by its rules, written anew; what becomes of an
adapter's files and of a row that is not finite."""

import base64
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from common.settings.sections import MAX_KEPT
from services.engine.adapters import AdapterRegistry, BadAdapter
from services.engine.decoder import PromptScores, UnfitModel
from services.engine.jobs import MAX_N, GenerationJob, SamplingParams, Sequence
from services.engine.model import Model
from services.engine.protocol import (
    BadRequest,
    GenerateBody,
    answer,
    bad_request,
    score_answer,
)
from services.engine.sampling import Inputs
from services.engine.scheduler import LogitsNotFinite, MemoryKind, RequestRefused, Scheduler
from tests.support.engines.engines import write_model

CONTEXT = 32
VOCABULARY = 282
SCORING = {"return_logprob": True, "logprob_start_len": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_model(tmp_path_factory.mktemp("rules") / "model", seed=0), CONTEXT)


def made(model: Model, body: dict[str, Any]) -> list[GenerationJob]:
    """Returns the jobs of a request, as the route makes them."""
    try:
        request = GenerateBody.model_validate({"input_ids": [5, 6], **body})
    except ValidationError as error:
        raise bad_request(error) from None
    prompts = request.prompts(model)
    if request.scores_prompts:
        request.check_scoring(model)
        return []
    return request.jobs(prompts, model)


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling_params": fields}


ALLOWED: list[dict[str, Any]] = [
    {"input_ids": [0]},
    {"input_ids": [VOCABULARY - 1]},
    {"input_ids": [1] * (CONTEXT - 1)},
    {"input_ids": [1] * (CONTEXT - 1), **sampling(max_new_tokens=1)},
    {"input_ids": [[5]]},
    {"stream": False, "image_data": None, "audio_data": [], "input_embeds": {}},
    {"anything": 5},
    sampling(max_new_tokens=CONTEXT - 2),
    sampling(max_new_tokens=4, min_new_tokens=4),
    sampling(n=MAX_N, top_k=-1, top_p=1, min_p=1, temperature=0),
    sampling(top_k=0, min_p=0, top_p=1e-9, temperature=100),
    sampling(top_k=MAX_KEPT) | {"return_sampling_mask": True},
    sampling(top_k=1) | {"return_sampling_mask": True},
    sampling(stop="a" * 1000),
    sampling(stop=["a"] * 256, stop_token_ids=[1] * 256),
    {"top_logprobs_num": 0, "token_ids_logprob": []},
    {"rid": "r" * 200},
    SCORING | sampling(max_new_tokens=0),
    SCORING | sampling(max_new_tokens=0) | {"token_ids_logprob": [VOCABULARY - 1]},
    SCORING | sampling(max_new_tokens=0) | {"top_logprobs_num": 1024},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids"),
    ({"input_ids": [[5], []]}, "input_ids"),
    ({"input_ids": [[5], 5]}, "input_ids"),
    ({"input_ids": [-1]}, "input_ids"),
    ({"input_ids": [VOCABULARY]}, "input_ids"),
    ({"input_ids": [True]}, "input_ids"),
    ({"input_ids": [1.0]}, "input_ids"),
    ({"input_ids": [1] * CONTEXT}, "input_ids"),
    ({"input_ids": [[1]] * 4097}, "input_ids"),
    ({"text": "Tom"}, "text"),
    ({"input_ids": [1] * (CONTEXT - 1), **sampling(max_new_tokens=2)}, "max_new_tokens"),
    ({"stream": True}, "stream"),
    ({"return_hidden_states": 1}, "return_hidden_states"),
    ({"image_data": ["a"]}, "image_data"),
    ({"input_embeds": [[0.5]]}, "input_embeds"),
    ({"return_entropy": True}, "return_entropy"),
    ({"custom_logit_processor": "a"}, "custom_logit_processor"),
    (sampling(n=0), "sampling_params.n"),
    (sampling(n=MAX_N + 1), "sampling_params.n"),
    (sampling(n=True), "sampling_params.n"),
    (sampling(max_new_tokens=-1), "sampling_params.max_new_tokens"),
    (sampling(max_new_tokens=0), "sampling_params.max_new_tokens"),
    (sampling(max_new_tokens=CONTEXT - 1), "max_new_tokens"),
    (sampling(max_new_tokens=4, min_new_tokens=5), "min_new_tokens"),
    (sampling(min_new_tokens=CONTEXT - 1), "min_new_tokens"),
    (sampling(temperature=-0.1), "sampling_params.temperature"),
    (sampling(temperature=float("nan")), "sampling_params.temperature"),
    (sampling(top_p=0), "sampling_params.top_p"),
    (sampling(top_p=1.01), "sampling_params.top_p"),
    (sampling(top_k=-2), "sampling_params.top_k"),
    (sampling(min_p=1.01), "sampling_params.min_p"),
    (sampling(stop="a" * 1001), "sampling_params.stop"),
    (sampling(stop=["a"] * 257), "sampling_params.stop"),
    (sampling(stop_token_ids=[1] * 257), "sampling_params.stop_token_ids"),
    (sampling(regex="a"), "sampling_params.regex"),
    (sampling(top_k=0) | {"return_sampling_mask": True}, "top_k"),
    (sampling(top_k=MAX_KEPT + 1) | {"return_sampling_mask": True}, "top_k"),
    ({"top_logprobs_num": 3}, "top_logprobs_num"),
    ({"token_ids_logprob": [3]}, "token_ids_logprob"),
    ({"return_routed_experts": True}, "return_routed_experts"),
    ({"rid": ""}, "rid"),
    ({"rid": "r" * 201}, "rid"),
    (SCORING, "logprob_start_len"),
    (SCORING | sampling(max_new_tokens=0, n=2), "logprob_start_len"),
    (sampling(max_new_tokens=0) | {"logprob_start_len": 0}, "logprob_start_len"),
    (SCORING | sampling(max_new_tokens=0) | {"top_logprobs_num": 1025}, "top_logprobs_num"),
    (
        SCORING | sampling(max_new_tokens=0) | {"token_ids_logprob": [VOCABULARY]},
        "token_ids_logprob",
    ),
]


@pytest.mark.parametrize("body", ALLOWED)
def test_what_is_within_the_bounds_is_allowed(model: Model, body: dict[str, Any]) -> None:
    made(model, body)


@pytest.mark.parametrize(("body", "field"), REFUSED)
def test_what_is_out_of_bounds_is_refused_by_its_field(
    model: Model, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        made(model, body)
    assert refused.value.field == field
    assert refused.value.value is not None
    assert refused.value.remedy


def test_jobs_have_what_was_asked_for(model: Model) -> None:
    """Their names, their room in the context, their stop tokens and what they return."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = rng.integers(1, CONTEXT, rng.integers(1, 4)).tolist()
        is_batch = len(sizes) > 1 or rng.random() < 0.5
        prompts = [rng.integers(0, VOCABULARY, size).tolist() for size in sizes]
        top_k = int(rng.choice([-1, 0, 1, 50, MAX_KEPT, MAX_KEPT + 1]))
        stops = rng.choice([2, 7, 9, VOCABULARY, -5], 2).tolist()
        ignores = bool(rng.random() < 0.3)
        logprobs, mask = (rng.random(2) < 0.5).tolist()
        can_mask = 0 < top_k <= MAX_KEPT
        adapter = rng.choice(["", "a"])
        jobs = made(
            model,
            {
                "input_ids": prompts if is_batch else prompts[0],
                "rid": "r",
                "return_logprob": logprobs,
                "return_sampling_mask": mask and can_mask,
                "lora_path": str(adapter),
                **sampling(n=3, top_k=top_k, stop_token_ids=stops, ignore_eos=ignores),
            },
        )
        assert [job.prompt for job in jobs] == prompts
        names = [f"r_{place}" for place in range(len(prompts))] if is_batch else ["r"]
        assert [job.rid for job in jobs] == names
        known = {2, *stops} & set(range(VOCABULARY))
        for job in jobs:
            assert job.n == 3
            assert job.sampling.max_new_tokens == min(128, CONTEXT - len(job.prompt))
            assert set(job.sampling.stop_token_ids) == (set() if ignores else known)
            assert job.returns_logprobs is logprobs
            assert job.returns_kept is (can_mask and (logprobs or mask))
            assert job.returns_experts is False
            assert job.adapter == (adapter or None)


def test_requests_without_a_name_have_names_of_their_own(model: Model) -> None:
    names = [job.rid for _ in range(3) for job in made(model, {"input_ids": [[5], [6]]})]
    assert len(set(names)) == 6


def _last(model: Model, tokens: list[int], count: int) -> str:
    text: str = model.tokenizer.decode(tokens[-count:])
    return text


def test_a_stop_text_is_found_wherever_its_tokens_begin_and_end(model: Model) -> None:
    """In bytes and words: a text is reached when its last byte is there, and not before."""
    rng = np.random.default_rng(1)
    letters = model.tokenizer("abcdef" * 2).input_ids
    words = [260, 262, 266, 268, 271, 272, 279, 281]
    for _ in range(300):
        pool = letters if rng.random() < 0.5 else [*letters, *words]
        tokens = rng.choice(pool, 14).tolist()
        text = model.tokenizer.decode(tokens)
        start = int(rng.integers(len(text)))
        stop = text[start : start + int(rng.integers(1, 9))]
        stops = ["never", stop] if rng.random() < 0.5 else stop
        params = SamplingParams(stop=stops)
        found = []
        for count in range(1, 15):
            so_far = tokens[:count]
            found.append(params.stop_in(partial(_last, model, so_far)))
        first = found.index(stop)
        assert found[:first] == [None] * first
        assert stop in model.tokenizer.decode(tokens[: first + 1])
        assert stop not in model.tokenizer.decode(tokens[:first])


def test_a_text_ends_before_the_first_stop_text_and_without_the_stop_token(model: Model) -> None:
    tokens = model.tokenizer("Tom has apples").input_ids
    text = "Tom has apples"
    job = GenerationJob("r", [5], SamplingParams(stop="pp"))
    for finish, wanted in (
        ({"type": "stop", "matched": "p"}, "Tom has a"),
        ({"type": "stop", "matched": "s"}, "Tom ha"),
        ({"type": "stop", "matched": 2}, text),
        ({"type": "length", "length": 9}, text + "<|im_end|>"),
        (None, text + "<|im_end|>"),
    ):
        sequence = Sequence(job, "r", 0, [*tokens, 2], finish=finish)
        assert sequence.text(model.tokenizer) == wanted.removesuffix("<|im_end|>")
        job.sampling = SamplingParams(skip_special_tokens=False)
        assert sequence.text(model.tokenizer) == wanted
        job.sampling = SamplingParams()


def test_experts_are_in_an_answer_once_they_were_computed(model: Model) -> None:
    job = GenerationJob("r", [5, 6], SamplingParams(), returns_experts=True)
    sequence = Sequence(job, "r", 0)
    assert "routed_experts" not in answer(sequence, model.tokenizer)["meta_info"]
    sequence.experts = [np.array([[1, 2], [3, 4]], np.int16), np.array([[5, 6]], np.int16)]
    sent = answer(sequence, model.tokenizer)["meta_info"]["routed_experts"]
    assert np.frombuffer(base64.b64decode(sent), "<i4").tolist() == [1, 2, 3, 4, 5, 6]
    job.returns_experts = False
    assert "routed_experts" not in answer(sequence, model.tokenizer)["meta_info"]


def test_scored_prompts_have_names_of_their_own(model: Model) -> None:
    body = GenerateBody.model_validate({"input_ids": [5, 6], **SCORING})
    scores = PromptScores([-1.5], top=[[]], top_tokens=[[]], chosen=[[]])
    found = [score_answer(body, [5, 6], scores, "7")["meta_info"] for _ in range(2)]
    assert len({meta["id"] for meta in found}) == 2
    for meta in found:
        assert meta["input_token_logprobs"] == [[None, 5, None], [-1.5, 6, None]]
        assert (meta["prompt_tokens"], meta["weight_version"]) == (2, "7")


def test_a_longer_stop_text_of_several_decides_how_far_it_looks_back(model: Model) -> None:
    tokens = model.tokenizer("abcdefg").input_ids
    assert len(tokens) == 7
    params = SamplingParams(stop=["g!", "abcdefg", "z"])
    assert params.stop_in(partial(_last, model, tokens)) == "abcdefg"
    assert SamplingParams(stop=[]).stop_in(lambda _: "text") is None
    assert SamplingParams(stop="").stop_in(lambda _: "text") is None


Spoil = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]
_A = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
_B = _A.replace("lora_A", "lora_B")
SPOILED: dict[str, Spoil] = {
    "no B": lambda tensors, _: tensors.pop(_B),
    "no A": lambda tensors, _: tensors.pop(_A),
    "nothing": lambda tensors, _: tensors.clear(),
    "other ranks": lambda tensors, _: tensors.update({_B: torch.ones(64, 3)}),
    "too many rows": lambda tensors, _: tensors.update({_B: torch.ones(65, 2)}),
    "too few columns": lambda tensors, _: tensors.update({_A: torch.ones(2, 31)}),
    "a tensor too many": lambda tensors, _: tensors.update({"extra": torch.ones(1)}),
    "not finite": lambda tensors, _: tensors[_A].fill_(torch.inf),
    "B is not finite": lambda tensors, _: tensors[_B][1].fill_(torch.nan),
    "an unknown module": lambda tensors, _: tensors.update(
        {
            _A.replace("up_proj", "side"): tensors.pop(_A),
            _B.replace("up_proj", "side"): tensors.pop(_B),
        }
    ),
    "no alpha": lambda _, config: config.pop("lora_alpha"),
    "no rank": lambda _, config: config.pop("r"),
    "a rank of zero": lambda _, config: config.update(r=0),
    "a bias": lambda _, config: config.update(bias="all"),
    "another method": lambda _, config: config.update(peft_type="IA3"),
    "DoRA": lambda _, config: config.update(use_dora=True),
    "another scale": lambda _, config: config.update(use_rslora=True),
    "transposed": lambda _, config: config.update(fan_in_fan_out=True),
    "whole modules": lambda _, config: config.update(modules_to_save=["lm_head"]),
    "ranks of their own": lambda _, config: config.update(rank_pattern={"up_proj": 3}),
    "alphas of their own": lambda _, config: config.update(alpha_pattern={"up_proj": 3}),
}


def _write_adapter(directory: Path, spoil: Spoil) -> Path:
    tensors = {_A: torch.full((2, 32), 0.1), _B: torch.full((64, 2), 0.1)}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 3,
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
    }
    spoil(tensors, config)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("what", SPOILED)
def test_an_adapter_that_is_not_understood_is_refused_and_nothing_changes(
    model: Model, tmp_path: Path, what: str
) -> None:
    registry = AdapterRegistry(model.module)
    registry.load("good", _write_adapter(tmp_path / "good", lambda *_: None))
    path = _write_adapter(tmp_path / "spoiled", SPOILED[what])
    with pytest.raises(BadAdapter) as refused:
        registry.load("spoiled", path)
    assert refused.value.field == "lora_path"
    assert refused.value.value == str(path)
    assert registry.paths() == {"good": str(tmp_path / "good")}
    assert registry.active is None


def test_adapters_change_places_and_leave_the_base_as_it_was(model: Model, tmp_path: Path) -> None:
    registry = AdapterRegistry(model.module)
    weight = model.module.model.layers[0].mlp.up_proj.weight
    base = weight.clone()

    def ones(scale: float) -> Spoil:
        return lambda tensors, config: config.update(lora_alpha=scale)

    for name, alpha in (("two", 2.0), ("ten", 10.0)):
        registry.load(name, _write_adapter(tmp_path / name, ones(alpha)))
    # B A is 2 × 0.1 × 0.1 everywhere, and its scale alpha / 2.
    wanted = {None: base, "two": base + 0.02, "ten": base + 0.1}
    registry.merge("two")
    for merged in ("ten", "two", None, "ten", "ten"):
        with registry.only(merged):
            torch.testing.assert_close(weight.data, wanted[merged].data)
        assert registry.active == "two"
        torch.testing.assert_close(weight.data, wanted["two"].data)
    # Rows of the merged one may run while another goes.
    registry.load("other", tmp_path / "ten")
    registry.drop("other")
    assert registry.active == "two"
    torch.testing.assert_close(weight.data, wanted["two"].data)
    registry.drop("two")
    assert registry.active is None
    assert torch.equal(weight, base)
    assert list(registry.paths()) == ["ten"]


def _scheduler(model: Model, rows: int) -> Scheduler:
    registry = CollectorRegistry()
    counters = {name: Counter(name, name, registry=registry) for name in ("generated", "prefilled")}
    return Scheduler(model, rows, "7", **counters)


def _started(model: Model, prompt: list[int], n: int, seed: int) -> GenerationJob:
    fields = {"n": n, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": seed}
    (job,) = made(model, {"input_ids": prompt, **sampling(**fields)})
    job.start(0)
    return job


@pytest.mark.parametrize("broken", range(2))
def test_a_job_that_is_not_finite_ends_whole_and_harms_no_other(
    model: Model, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of it breaks; another row and two that still wait end with it."""
    # Attention with a mask, in which even a masked number that is not finite would spread.
    monkeypatch.setattr(model, "_lean", None)
    with torch.inference_mode():
        scheduler = _scheduler(model, 5)
        other = _started(model, [9, 8, 7], 3, seed=1)
        scheduler.enqueue([other])
        while scheduler.can_step:
            scheduler.step(admit=True)
        alone = [sequence.tokens for sequence in other.done.result(0)]

        beside = _started(model, [9, 8, 7], 3, seed=1)
        victim = _started(model, [20, 21], 2, seed=2)
        scheduler.enqueue([beside, victim])
        victim.sequences += _started(model, [20, 21], 2, seed=3).sequences
        for sequence in victim.sequences:
            sequence.job = victim
        scheduler._queue.append(victim.sequences[2:])
        scheduler.waiting += 2
        decode = model.decode
        steps = 0

        def breaks(inputs: Inputs) -> NDArray[np.float64]:
            nonlocal steps
            steps += 1
            found = decode(inputs)
            if steps == 3:
                row = scheduler.rows.sequences.index(victim.sequences[broken])
                found[1, row] = np.nan
                for states in model.cache.tensors():
                    states[row] = np.nan
            return found

        monkeypatch.setattr(model, "decode", breaks)
        for _ in range(3):
            scheduler.step(admit=True)
        error = victim.done.exception(0)
        assert isinstance(error, LogitsNotFinite)
        assert error.value == "7"
        assert scheduler.waiting == 0
        assert len(scheduler.rows) == 3
        # Whoever gets the rows next is not harmed.
        later = _started(model, [9, 8, 7], 2, seed=1)
        scheduler.enqueue([later])
        while scheduler.can_step:
            scheduler.step(admit=True)
        assert [sequence.tokens for sequence in beside.done.result(0)] == alone
        assert [sequence.tokens for sequence in later.done.result(0)] == alone[:2]


def test_a_model_that_cannot_be_computed_is_refused_with_its_reason(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_lean", model._lean)
    for error, said, remedy, is_final in (
        (ConfigError("it is odd", remedy="use another"), "it is odd", "use another", True),
        (ValueError("it is broken"), "ValueError: it is broken", "sglang", True),
        (torch.OutOfMemoryError("it is large"), "it is large", "", False),
    ):
        monkeypatch.setattr(model, "prefill", partial(_fail, error))
        with pytest.raises(ConfigError) as refused:
            model.reserve(2)
        assert isinstance(refused.value, UnfitModel) is is_final
        assert refused.value.code == "unfit_model"
        assert (refused.value.field, refused.value.value) == ("--model-path", "qwen2")
        assert said in refused.value.message
        assert remedy in str(refused.value.remedy)


def _fail(error: Exception, *_: object, **__: object) -> None:
    raise error


def test_memory_is_released_only_where_nothing_needs_it(model: Model, tmp_path: Path) -> None:
    with torch.inference_mode():
        scheduler = _scheduler(model, 4)
        scheduler.enqueue([_started(model, [5, 6], 2, seed=1)])
        scheduler.step(admit=True)
        with pytest.raises(RequestRefused) as refused:
            scheduler.release_memory(["kv_cache"])
        assert (refused.value.field, refused.value.value) == ("requests", "2")
        assert not scheduler.paused
        scheduler.pause()

        path = _write_adapter(tmp_path / "adapter", lambda *_: None)
        scheduler.adapters.load("a", path)
        with pytest.raises(RequestRefused) as refused:
            scheduler.release_memory(["kv_cache", "weights"])
        assert refused.value.value == "weights"
        assert scheduler.released == {}
        scheduler.adapters.drop("a")

        scheduler.release_memory(["kv_cache"])
        calls: list[tuple[list[MemoryKind], Callable[[list[MemoryKind]], None]]] = [
            (["kv_cache"], scheduler.release_memory),
            (["weights"], scheduler.resume_memory),
            (["kv_cache", "weights"], scheduler.resume_memory),
        ]
        for kinds, call in calls:
            with pytest.raises(RequestRefused) as refused:
                call(kinds)
            wanted = "kv_cache" if call == scheduler.release_memory else "weights"
            assert (refused.value.field, refused.value.value) == ("tags", wanted)
            assert list(scheduler.released) == ["kv_cache"]
        with pytest.raises(RequestRefused):
            scheduler.score([[5, 6]])
        # New weights may come before the cache.
        tensors = load_file(model.path / "model.safetensors")
        scheduler.update_weights(tensors, None)
        assert scheduler.weight_version == "7"
        scheduler.resume_memory(["kv_cache"])
        scheduler.resume()
        while scheduler.can_step:
            scheduler.step(admit=True)
        assert scheduler.waiting == 0


def test_the_bytes_of_a_row_are_those_that_it_takes(model: Model) -> None:
    with torch.inference_mode():
        scheduler = _scheduler(model, 4)
        scheduler.enqueue([_started(model, [5, 6], 3, seed=1)])
        scheduler.step(admit=True)
        stored = sum(states.nbytes for states in model.cache.tensors())
        assert model.cache.bytes_per_row(model.cache.columns) * model.cache.rows == stored
        model.cache.allocate(2, 96)
        sizes = {(states.shape[0], states.shape[2]) for states in model.cache.tensors()}
        assert sizes == {(2, 96)}
        model.cache.reserve(2, 96)
        with pytest.raises(AssertionError, match="more than there is room for"):
            model.cache.reserve(3, 96)
        model.cache.fixed = False
        model.cache.release()
