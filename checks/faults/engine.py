"""Faults of the rollout engine: other numbers, other weights, no answers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import torch
from fastapi import FastAPI

from checks.faults.fault import fault
from checks.faults.lab import GROUPS, Answers, Lab, replaced
from services.engine import weights as engine_weights
from trainer.start.in_process import train_in_process

_STEPS = 6
_LIMIT_S = 3.0
_NONE_IN_A_ROW = 8
_TOLD = (
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
    "output_token_sampling_mask_length",
)
"""With these, an engine says what it left out, and the trainer takes it into account."""
_load_into = engine_weights.load_into


def _logprobs(answers: Answers) -> list[list[Any]]:
    return [pair for answer in answers for pair in answer["meta_info"]["output_token_logprobs"]]


class _Asks(httpx.AsyncBaseTransport):
    """Asks the engine for something else than the trainer did."""

    def __init__(self, app: FastAPI, lab: Lab, sampling: dict[str, Any]) -> None:
        self._inner = httpx.ASGITransport(app)
        self._lab = lab
        self._sampling = sampling
        self._calls = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/generate":
            return await self._inner.handle_async_request(request)
        body = json.loads(await request.aread())
        if self._calls >= self._lab.first_call:
            self._lab.strike()
            body["sampling_params"] |= self._sampling
        self._calls += 1
        headers = {
            name: value
            for name, value in request.headers.items()
            if name not in ("content-length", "host")
        }
        sent = httpx.Request(request.method, request.url, headers=headers, json=body)
        response = await self._inner.handle_async_request(sent)
        answers = json.loads(await response.aread())
        for answer in answers if isinstance(answers, list) else ():
            for name in _TOLD:
                answer["meta_info"].pop(name, None)
        return httpx.Response(response.status_code, json=answers)


def _asked(lab: Lab, **sampling: Any) -> None:
    config = lab.settings(
        trainer__max_steps=_STEPS, trainer__batch_size=16, sampling__temperature=1.5
    )
    lab.strike_step = 0
    lab.log(config)
    train_in_process(config, rollout_transport=lambda app: _Asks(app, lab, sampling))


# ------------------------------------------------------------ other numbers


@fault(
    "the engine computes in another precision",
    r"precision|quantis|dtype",
    r"engine",
    reported="https://github.com/verl-project/verl/pull/3694",
)
def engine_other_precision(lab: Lab) -> None:
    def change(number: int, body: Any, answers: Answers) -> Answers:
        lab.strike()
        for index, pair in enumerate(_logprobs(answers)):
            pair[0] += 0.1 if index % 2 else -0.1
        return answers

    lab.train(lab.settings(trainer__max_steps=_STEPS), change)


@fault(
    "the numbers of the engine drift away from the trainer's, step by step",
    r"precision|quantis|weights|drift|grow",
    r"engine",
    reported="https://github.com/vllm-project/vime/issues/64",
)
def engine_drifts(lab: Lab) -> None:
    def change(number: int, body: Any, answers: Answers) -> Answers:
        off = 0.012 * (number // GROUPS)
        if off:
            lab.strike()
        for index, pair in enumerate(_logprobs(answers)):
            pair[0] += off if index % 2 else -off
        return answers

    lab.train(lab.settings(trainer__max_steps=10), change)


@fault(
    "a default of the engine (top-k 1) makes it greedy without the trainer's knowledge",
    r"greedi|filter|top[-_]?[kp]|truncat",
    r"engine",
    reported="https://github.com/huggingface/trl/issues/5783",
)
def engine_hidden_top_k(lab: Lab) -> None:
    _asked(lab, top_k=1)


@fault(
    "the engine samples at another temperature than the trainer assumes",
    r"temperature|filter",
    r"engine",
    reported="https://github.com/huggingface/trl/issues/4159",
)
def engine_other_temperature(lab: Lab) -> None:
    _asked(lab, temperature=0.6)


# ------------------------------------------------------------ other weights


def _loads(lab: Lab, disturbed: Any) -> None:
    """Trains with an engine whose loading of weights is `disturbed` after some versions."""
    loads = 0

    def load(module: Any, directory: Path) -> None:
        nonlocal loads
        loads += 1
        if loads <= lab.strike_step:
            _load_into(module, directory)
            return
        lab.strike()
        disturbed(module, directory)

    config = lab.settings(trainer__max_steps=_STEPS + 2, optimizer__learning_rate=2e-3)
    with replaced("services.engine.scheduler.load_into", load):
        lab.train(config)


@fault(
    "the engine confirms new weights and serves the old ones",
    r"weights",
    r"old|earlier|stale|did not arrive|not loaded|version",
    reported="https://github.com/THUDM/slime/issues/2104",
)
def engine_old_weights(lab: Lab) -> None:
    _loads(lab, lambda module, directory: None)


@fault(
    "a tensor of the engine's weights is damaged",
    r"weights",
    r"damage|whole|differ|not arrive|corrupt|old|earlier",
    reported="https://github.com/OpenRLHF/OpenRLHF/issues/1120",
)
def engine_damaged_weights(lab: Lab) -> None:
    def damaged(module: Any, directory: Path) -> None:
        _load_into(module, directory)
        with torch.no_grad():
            _, tensor = list(module.named_parameters())[1]
            tensor.mul_(-0.5)

    _loads(lab, damaged)


@fault(
    "only a part of the weights arrives at the engine",
    r"weights",
    r"part|whole|differ|not arrive|old|earlier",
    reported="https://github.com/THUDM/slime/issues/2104",
)
def engine_partial_weights(lab: Lab) -> None:
    def partial(module: Any, directory: Path) -> None:
        kept = {
            name: tensor.clone()
            for name, tensor in module.state_dict().items()
            if "layers.1" in name or "embed" in name
        }
        _load_into(module, directory)
        module.load_state_dict(kept, strict=False)

    _loads(lab, partial)


@fault(
    "the file of new weights is cut",
    r"weights",
    r"cannot be read|damage|incomplete|cut|header|invalid",
)
def engine_cut_weights(lab: Lab) -> None:
    def cut(module: Any, directory: Path) -> None:
        path = directory / "model.safetensors"
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[: len(content) // 2])
        _load_into(module, directory)

    _loads(lab, cut)


@fault(
    "the engine does not say which weights it serves",
    r"version",
    reported="https://github.com/vllm-project/vime/pull/45",
)
def engine_no_version(lab: Lab) -> None:
    def change(number: int, body: Any, answers: Answers) -> Answers:
        if number >= lab.first_call:
            lab.strike()
            for answer in answers:
                answer["meta_info"].pop("weight_version", None)
                answer["meta_info"].pop("weight_versions", None)
        return answers

    lab.train(lab.settings(limits__max_failed_groups=_NONE_IN_A_ROW), change)


@fault(
    "the engine serves another model: tokens that the trainer's does not have",
    r"vocabulary",
    r"token",
)
def engine_other_vocabulary(lab: Lab) -> None:
    def change(number: int, body: Any, answers: Answers) -> Answers:
        if number >= lab.first_call:
            lab.strike()
            for answer in answers:
                answer["output_ids"][0] = 150_000
                answer["meta_info"]["output_token_logprobs"][0][1] = 150_000
        return answers

    lab.train(lab.settings(limits__max_failed_groups=_NONE_IN_A_ROW), change)


# ------------------------------------------------------------ no answers, or half ones


def _answers(lab: Lab, response: Any, share: float = 1.0, **settings: Any) -> None:
    """Trains with an engine that answers a share of the calls with `response(answers)`."""

    def change(number: int, body: Any, answers: Answers) -> Any:
        if number < lab.first_call or lab.rng.random() >= share:
            return answers
        lab.strike()
        return response(answers)

    values: dict[str, Any] = {"limits__max_failed_groups": _NONE_IN_A_ROW} | settings
    lab.train(lab.settings(**values), change)


@fault(
    "the engine refuses every request",
    r"generat|rollout|engine",
    r"not loaded yet",
    reported="https://github.com/verl-project/verl/issues/1368",
)
def engine_refuses(lab: Lab) -> None:
    error = {"error": {"message": "the adapter is not loaded yet"}}
    _answers(lab, lambda answers: httpx.Response(400, json=error))


@fault(
    "a fifth of the requests fails in the engine",
    r"generat",
    r"dropped",
    r"engine|rollout",
    in_steps=True,
    reported="https://github.com/PrimeIntellect-ai/prime-rl/pull/1622",
)
def engine_refuses_some(lab: Lab) -> None:
    error = {"error": {"message": "CUDA error: an illegal memory access was encountered"}}
    _answers(lab, lambda answers: httpx.Response(400, json=error), share=0.2, trainer__max_steps=13)


@fault(
    "the engine returns empty answers",
    r"empty|no tokens?|without tokens?|0 tokens?",
    r"answer|completion|generat",
)
def engine_empty_answers(lab: Lab) -> None:
    def empty(answers: Answers) -> Answers:
        for answer in answers:
            answer["text"] = ""
            answer["output_ids"] = []
            answer["meta_info"]["output_token_logprobs"] = []
            answer["meta_info"]["weight_versions"] = []
        return answers

    _answers(lab, empty)


@fault(
    "the engine returns fewer answers than were asked for",
    r"\d (answers?|completions?)",
    r"instead|of|for|not \d",
)
def engine_fewer_answers(lab: Lab) -> None:
    _answers(lab, lambda answers: answers[:-1])


@fault("the engine aborts requests", r"abort", r"generat|engine|rollout")
def engine_aborts(lab: Lab) -> None:
    def aborted(answers: Answers) -> Answers:
        for answer in answers:
            answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "out of KV cache"}
        return answers

    _answers(lab, aborted)


@fault(
    "the engine returns NaN as log-probabilities",
    r"log-?prob",
    r"nan|finite|number|null|none|missing",
    reported="https://github.com/verl-project/verl/issues/747",
)
def engine_nan_logprobs(lab: Lab) -> None:
    def without(answers: Answers) -> Answers:
        for pair in _logprobs(answers):
            pair[0] = None
        return answers

    _answers(lab, without)


@fault(
    "the engine never answers",
    r"generat|rollout",
    r"no answer|timed? ?out|within|not answer",
    reported="https://github.com/huggingface/trl/issues/3467",
    timeout="limits.service_timeout_s",
    timeout_s=_LIMIT_S,
)
def engine_hangs(lab: Lab) -> None:
    class Hangs(httpx.AsyncBaseTransport):
        def __init__(self, app: FastAPI) -> None:
            self.inner = httpx.ASGITransport(app)
            self.calls = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/generate":
                self.calls += 1
                if self.calls > lab.first_call:
                    lab.strike()
                    limits = request.extensions["timeout"]
                    await asyncio.sleep(min(3600, limits.get("read") or 3600))
                    raise httpx.ReadTimeout("", request=request)
            return await self.inner.handle_async_request(request)

    config = lab.settings(
        limits__service_timeout_s=_LIMIT_S, limits__max_failed_groups=_NONE_IN_A_ROW
    )
    lab.log(config)
    train_in_process(config, rollout_transport=Hangs)


@fault(
    "the engine is so slow that the trainer waits for it most of the time",
    r"wait",
    r"completions|generat",
    r"\d+ ?%",
    reported="https://github.com/verl-project/verl/issues/7029",
    in_steps=True,
)
def engine_slow(lab: Lab) -> None:
    class Slow(httpx.AsyncBaseTransport):
        def __init__(self, app: FastAPI) -> None:
            self.inner = httpx.ASGITransport(app)

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/generate":
                lab.strike()
                await asyncio.sleep(1.5)
            return await self.inner.handle_async_request(request)

    config = lab.settings(trainer__max_steps=13)
    lab.log(config)
    train_in_process(config, rollout_transport=Slow)


@fault(
    "the engine is out of memory",
    r"engine",
    r"out of ?memory|OutOfMemory",
    reported="https://github.com/NovaSky-AI/SkyRL/issues/1673",
)
def engine_out_of_memory(lab: Lab) -> None:
    from services.engine.scheduler import Scheduler

    step = Scheduler.step
    steps = 0

    def fails(scheduler: Scheduler, admit: bool = True) -> None:
        nonlocal steps
        steps += 1
        if steps > 20 * lab.strike_step:
            lab.strike()
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
                "79.11 GiB of which 1.06 GiB is free."
            )
        step(scheduler, admit=admit)

    with replaced("services.engine.scheduler.Scheduler.step", fails):
        lab.train()
