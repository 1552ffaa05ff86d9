"""The requests of samplers, answered by engines that have several adapters at once.

A sampler's weights never change: they are an adapter with the checksum of its file in its name, or
the base model. Engines check the file against the name, so an answer is of these weights or is
refused. Without a seed of the client, the seed follows from the weights, how often they were saved
and given to samplers before, and the request's number. So a request that is sampled again after a
crash gets the same answer, and so does a loop that goes on from its last checkpoint.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from common.clients.rollout import RolloutClient, single_seed
from common.errors import NotFound, ServiceError
from common.weights.checksums import checksum
from services.http.sqlite_store import sum_of
from services.rollout.engine_client import EngineClient
from trainer.tinker import requests
from trainer.tinker.messages import SampleAnswer, write_samples
from trainer.tinker.records import Checkpoint, Sampler, TinkerResult
from trainer.tinker.state import State
from trainer.tinker.store import Journal
from trainer.tinker.training import failure
from trainer.tinker.turns import Turns

log = logging.getLogger(__name__)
_LOAD_S = 300.0


class WrongWeights(ServiceError):
    """The files of an adapter are not what was saved (500)."""

    code = "wrong_weights"


class Adapters:
    """The adapters that the engines have, at most `most` that no request uses.

    Args:
        engines: one client for each engine; asked for whenever one is loaded.
    """

    def __init__(self, engines: Callable[[], Sequence[EngineClient]], most: int) -> None:
        self._engines = engines
        self._most = most
        self._users: dict[str, int] = {}
        """Requests that use an adapter, by its name; the one that was used last is last."""
        self._loading = asyncio.Lock()

    @asynccontextmanager
    async def use(self, name: str, files: Path, *, again: bool = False) -> AsyncIterator[None]:
        """Keeps an adapter loaded on every engine inside the context. `again`: an engine lacks it,
        as after a restart.
        """
        async with self._loading:
            if again or name not in self._users:
                await self._load(name, files)
            self._users[name] = self._users.pop(name, 0) + 1
        try:
            yield
        finally:
            self._users[name] -= 1

    async def _load(self, name: str, files: Path) -> None:
        stated = name.rpartition("@")[2]
        found = await asyncio.to_thread(checksum, files / "adapter_model.safetensors")
        if found != stated:
            raise WrongWeights(
                "an adapter's file differs from what was saved",
                field="adapter_model.safetensors",
                value=found,
                remedy=f"restore {files}, whose checksum is {stated}, or save the weights again",
            )
        idle = [other for other, users in self._users.items() if not users and other != name]
        superfluous = max(0, len({*self._users, name}) - self._most)
        for engine in self._engines():
            if name not in await engine.adapters():
                body = {"lora_name": name, "lora_path": str(files)}
                await engine.change_adapters("/load_lora_adapter", body, _LOAD_S, wanted=True)
        for other in idle[:superfluous]:
            del self._users[other]
            for engine in self._engines():
                body = {"lora_name": other}
                await engine.change_adapters("/unload_lora_adapter", body, _LOAD_S, wanted=False)


class Sampling:
    """Answers the requests of all samplers, taking turns.

    Args:
        client: the engines, or the router in front of them.
        at_once: the most requests that the engines have at a time.
        max_context_tokens: of prompt and answer.
        finished: called with line and number when a result is on disk.
    """

    def __init__(
        self,
        client: RolloutClient,
        adapters: Adapters,
        state: State,
        journal: Journal,
        *,
        max_context_tokens: int,
        finished: Callable[[str, int], None],
        at_once: int = 256,
    ) -> None:
        self.turns = Turns(in_order=False)
        self._client = client
        self._adapters = adapters
        self._state = state
        self._journal = journal
        self._max_context_tokens = max_context_tokens
        self._finished = finished
        self._free = asyncio.Semaphore(at_once)
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._unwanted: set[tuple[str, int]] = set()
        """Requests in work that were cancelled by their clients."""

    async def work(self) -> None:
        """Answers requests for ever."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._free.acquire()
                line, number = await self.turns.take()
                task = tasks.create_task(self._one(line, number))
                self._tasks[line, number] = task
                task.add_done_callback(partial(self._done, line, number))

    def _done(self, line: str, number: int, _: asyncio.Task[None]) -> None:
        del self._tasks[line, number]
        self._unwanted.discard((line, number))
        self._free.release()

    async def cancel(self, line: str, number: int) -> None:
        """Ends a request that nobody waits for."""
        if self.turns.drop(line, number):
            await self._end(line, number, _cancelled())
        elif (line, number) in self._tasks:
            self._unwanted.add((line, number))
            self._tasks[line, number].cancel()

    async def _one(self, line: str, number: int) -> None:
        sampler = self._state.get(Sampler, line)
        if sampler is None:  # its session was finished
            return
        try:
            operation = await self._journal.run(lambda store: store.operation(line, number))
            body = requests.parse(requests.Sample, operation.body)
            content, weights = await self._answer(sampler, body)
            result = TinkerResult(ok=True, content=content, is_json=False, weights=weights)
        except asyncio.CancelledError:
            if (line, number) not in self._unwanted:  # the server ends
                raise
            result = _cancelled()
        except Exception as error:
            if not isinstance(error, ServiceError):
                log.exception("request %s:op:%d failed", line, number)
            result = failure(error)
        await self._end(line, number, result)

    async def _end(self, line: str, number: int, result: TinkerResult) -> None:
        await self._journal.run(lambda store: store.finish(line, number, result, repeatable=False))
        self._finished(line, number)

    async def _answer(self, sampler: Sampler, body: requests.Sample) -> tuple[bytes, str]:
        """Returns the answer, and the path and the checksum of its weights."""
        if sampler.path is None:
            return await self._generate(body, None, f"{sampler.copy}"), "base"
        try:
            checkpoint = self._state.find(Checkpoint, sampler.path, sampler.owner)
        except NotFound as error:
            error.remedy = "save weights with a name to keep them: of others a run has the newest"
            raise
        name = f"{checkpoint.run.replace(':', '-')}-{checkpoint.folder}@{checkpoint.checksum}"
        files = self._state.files(checkpoint)
        seed = f"{checkpoint.checksum} {checkpoint.copies} {sampler.copy}"
        weights = f"{checkpoint.path}@{checkpoint.checksum}"

        async def answer(*, again: bool) -> tuple[bytes, str]:
            async with self._adapters.use(name, files, again=again):
                return await self._generate(body, name, seed), weights

        try:
            return await answer(again=False)
        except ServiceError as error:
            if error.status != 400 or "loaded" not in str(error):
                raise
        # An engine was restarted since.
        return await answer(again=True)

    async def _generate(self, body: requests.Sample, adapter: str | None, seed: str) -> bytes:
        given = body.sampling_params
        sampling: dict[str, Any] = {
            "n": body.num_samples,
            "temperature": given.temperature,
            "top_p": given.top_p,
            "top_k": given.top_k,
            "max_new_tokens": given.max_tokens or self._max_context_tokens - len(body.tokens),
            "ignore_eos": given.stop == [],
            "sampling_seed": sum_of((given.seed, seed, body.seq_id))
            if given.seed is None
            else given.seed % 2**63,
        }
        stops = [given.stop] if isinstance(given.stop, str) else given.stop or []
        sampling["stop"] = [stop for stop in stops if isinstance(stop, str)]
        sampling["stop_token_ids"] = [stop for stop in stops if isinstance(stop, int)]

        scores: dict[str, list[Any]] = {}
        targets = body.target_prompt_logprobs
        if body.prompt_logprobs or body.topk_prompt_logprobs or targets:
            chosen = targets.tokens if targets else []
            scores = await self._score(
                body.tokens, adapter, top=body.topk_prompt_logprobs, chosen=chosen
            )
        if body.prompt_logprobs_last_n is not None:
            skipped = max(0, len(body.tokens) - body.prompt_logprobs_last_n)
            for name in ("input_token_logprobs", "input_top_logprobs"):
                scores[name][:skipped] = [None] * skipped

        answers = await self._completions(body.tokens, sampling, adapter)
        samples = [_sampled(answer) for answer in answers]
        if body.topk_sample_logprobs:
            samples = [await self._with_top(body, sample, adapter) for sample in samples]
        own = [place and place[0] for place in scores.get("input_token_logprobs", ())]
        return write_samples(
            samples,
            own if body.prompt_logprobs else None,
            scores["input_top_logprobs"] if body.topk_prompt_logprobs else None,
            targets and targets.answer(scores["input_token_ids_logprobs"]),
        )

    async def _with_top(
        self, body: requests.Sample, sample: SampleAnswer, adapter: str | None
    ) -> SampleAnswer:
        """Returns a sample with the likeliest tokens at its places, at temperature 1."""
        tokens = [*body.tokens, *sample.tokens]
        scores = await self._score(tokens, adapter, top=body.topk_sample_logprobs)
        return replace(sample, top=scores["input_top_logprobs"][len(body.tokens) :])

    async def _score(
        self, tokens: list[int], adapter: str | None, *, top: int, chosen: Sequence[int] = ()
    ) -> dict[str, list[Any]]:
        """Returns SGLang's triples (log-probability, token, text) of tokens, of the `top` likeliest
        in their places, and of those `chosen`; the first token has none.
        """
        sampling = {"max_new_tokens": 0, "temperature": 1.0}
        others = {"top_logprobs_num": top, "token_ids_logprob": list(chosen)}
        (answer,) = await self._post(tokens, sampling, adapter, logprob_start_len=0, **others)
        found: dict[str, list[Any]] = answer["meta_info"]
        for asked, name in ((top, "input_top_logprobs"), (chosen, "input_token_ids_logprobs")):
            if asked and len(found.get(name, ())) != len(tokens):
                raise ServiceError(
                    "the engine does not score other tokens beside those of a prompt",
                    field=name,
                    value=len(found.get(name, ())),
                    remedy="use engines, and a router, that know top_logprobs_num and "
                    "token_ids_logprob",
                )
        return {**found, "input_top_logprobs": found.get("input_top_logprobs", [])}

    async def _completions(
        self, tokens: list[int], sampling: dict[str, Any], adapter: str | None
    ) -> list[dict[str, Any]]:
        """Returns n completions, with a request for each where the engine gives all of a request
        the same seed.
        """
        if not self._client.seeds_apart:
            return await self._post(tokens, sampling, adapter)
        alone = [
            {**sampling, "n": 1, "sampling_seed": single_seed(sampling["sampling_seed"], index)}
            for index in range(sampling["n"])
        ]
        found = await asyncio.gather(*(self._post(tokens, each, adapter) for each in alone))
        return [answer for (answer,) in found]

    async def _post(
        self, tokens: list[int], sampling: dict[str, Any], adapter: str | None, **more: Any
    ) -> list[dict[str, Any]]:
        body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, **more}
        if adapter is not None:
            body["lora_path"] = adapter
        response = await self._client.request("POST", "/generate", json=body)
        found = orjson.loads(response.content)
        return found if isinstance(found, list) else [found]


def _cancelled() -> TinkerResult:
    return failure(ServiceError("the client cancelled this request", status=499))


def _sampled(answer: dict[str, Any]) -> SampleAnswer:
    meta = answer["meta_info"]
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length"):
        raise ServiceError(
            "the engine ended a completion before it was complete",
            field="finish_reason",
            value=meta["finish_reason"],
            remedy="send the request again; see the engine's log",
        )
    logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
    return SampleAnswer(answer["output_ids"], logprobs, reason)
