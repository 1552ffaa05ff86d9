"""The requests of samplers, answered by engines that have several adapters at once.

A sampler's weights never change: they are an adapter with the checksum of its file in its name, or
the base model. Engines check the file against the name, so an answer is of these weights or is
refused. Without a seed of the client, the seed follows from the weights, how often they were saved
and given to samplers before, and the request's number. So a request that is sampled again after a
crash gets the same answer, and so does a loop that goes on from its last checkpoint.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from common import Json
from common.clients.base import Unreachable
from common.clients.rollout import RolloutClient, single_seed
from common.errors import NotFound, ServiceError
from common.weights.checksums import checksum
from services.http.sqlite_store import sum_of
from services.rollout.engine_client import EngineClient
from trainer.tinker import requests
from trainer.tinker.messages import write_samples
from trainer.tinker.records import Checkpoint, Sampler, TinkerResult
from trainer.tinker.state import State
from trainer.tinker.store import Journal, TinkerStore
from trainer.tinker.training import Spawn, failure

log = logging.getLogger(__name__)
_AT_ONCE = 256
"""The most completions that the engines are asked for at a time."""
_OF_CLIENT = 224
"""The most of them for one client, so that another one's are begun at once."""
_OF_SAMPLER = 192
"""The most of them for one sampler, as of clients."""
_LOAD_S = 300.0
_AGAIN_S = 1.0
"""Between attempts to load an adapter into an engine that has just started."""


class WrongWeights(ServiceError):
    """The files of an adapter are not what was saved (500)."""

    code = "wrong_weights"


class Adapters:
    """The adapters that the engines have loaded.

    Args:
        engines: returns a client for each engine; called whenever an adapter is loaded.
        most: adapters that stay loaded; more are loaded only while requests use them.
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
        max_context_tokens: of prompt and answer.
        spawn: begins a task, which ends with the server.
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
        spawn: Spawn,
        finished: Callable[[str, int], None],
    ) -> None:
        self._client = client
        self._adapters = adapters
        self._state = state
        self._journal = journal
        self._max_context_tokens = max_context_tokens
        self._spawn = spawn
        self._finished = finished
        self._tasks: dict[str, dict[int, asyncio.Task[None]]] = defaultdict(dict)
        """The requests of each sampler by number."""
        # One request of a sampler at a time waits among those of its client, and one of a client
        # for the engines.
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._freed = asyncio.Event()
        self._working: Counter[str] = Counter()
        """Completions that the engines are asked for: of each sampler, of each client, and all."""

    def add(self, name: str, number: int) -> None:
        """Answers a request of a sampler."""
        sampler = self._state.get(Sampler, name)
        if sampler is None:  # its session was finished
            return
        task = self._spawn(self._one(sampler, number))
        self._tasks[name][number] = task
        task.add_done_callback(lambda _: self._forget(name, number))

    def _forget(self, name: str, number: int) -> None:
        del self._tasks[name][number]
        if not self._tasks[name]:
            del self._tasks[name]
            del self._working[name]
            self._turns.pop(name, None)

    def queue(self, name: str) -> tuple[int, int]:
        """Returns how many requests of a sampler have no answer yet, and the lowest number that one
        may have.
        """
        return len(self._tasks.get(name, ())), 0

    async def cancel(self, name: str, number: int) -> None:
        """Ends a request that nobody waits for."""
        task = self._tasks.get(name, {}).get(number)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            error = ServiceError("the client cancelled this request", status=499)
            await self._end(name, number, failure(error))

    async def _one(self, sampler: Sampler, number: int) -> None:
        find = partial(TinkerStore.operation, line=sampler.id, seq=number)
        try:
            operation = await self._journal.run(find)
            asked = orjson.loads(operation.body).get("num_samples", 1)
            del operation  # thousands may wait, and prompts are long
            async with self._room(sampler, min(asked, _OF_SAMPLER)):
                # Raises NotFound when its session was finished.
                operation = await self._journal.run(find)
                body = requests.parse(requests.Sample, operation.body)
                content, weights = await self._answer(sampler, body)
            result = TinkerResult(ok=True, content=content, is_json=False, weights=weights)
        except Exception as error:
            if not isinstance(error, ServiceError):
                log.exception("request %s:op:%d failed", sampler.id, number)
            result = failure(error)
        await self._end(sampler.id, number, result)

    @asynccontextmanager
    async def _room(self, sampler: Sampler, count: int) -> AsyncIterator[None]:
        """Waits until the engines have room for `count` completions of a sampler."""
        # No client has an empty name.
        limits = {sampler.id: _OF_SAMPLER, sampler.owner: _OF_CLIENT, "": _AT_ONCE}
        async with AsyncExitStack() as turns:
            for whose, most in limits.items():
                await turns.enter_async_context(self._turns[whose])
                while self._working[whose] + count > most:
                    self._freed.clear()
                    await self._freed.wait()
            self._working.update(dict.fromkeys(limits, count))
        try:
            yield
        finally:
            self._working.subtract(dict.fromkeys(limits, count))
            self._freed.set()

    async def _end(self, name: str, number: int, result: TinkerResult) -> None:
        await self._journal.settle(
            lambda store: store.finish(name, number, result, repeatable=False)
        )
        self._finished(name, number)

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
        seed = f"{checkpoint.checksum} {checkpoint.copies} {sampler.copy}"
        weights = f"{checkpoint.path}@{checkpoint.checksum}"

        deadline = time.monotonic() + _LOAD_S
        again = False
        while True:
            try:
                async with self._adapters.use(name, self._state.files(checkpoint), again=again):
                    return await self._generate(body, name, seed), weights
            except ServiceError as error:
                # SGLang's errors have no code of ours, only words: "is not loaded".
                is_foreign = error.code == ServiceError.code
                is_missing = (
                    isinstance(error, Unreachable)
                    or error.code == "bad_adapter"
                    or (is_foreign and error.status == 400 and "loaded" in error.message)
                )
                if not is_missing or time.monotonic() > deadline:
                    raise
            # An engine is starting, or was started again since. The router may know it before its
            # node has reported.
            await asyncio.sleep(_AGAIN_S if again else 0)
            again = True

    async def _generate(self, body: requests.Sample, adapter: str | None, seed: str) -> bytes:
        given = body.sampling_params
        sampling: Json = {
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
        if scores and body.prompt_logprobs_last_n is not None:
            skipped = max(0, len(body.tokens) - body.prompt_logprobs_last_n)
            for name in ("input_token_logprobs", "input_top_logprobs"):
                scores[name][:skipped] = [None] * skipped

        samples = await self._completions(body.tokens, sampling, adapter)
        for sample in samples if body.topk_sample_logprobs else ():
            tokens = [*body.tokens, *sample["tokens"]]
            top = await self._score(tokens, adapter, top=body.topk_sample_logprobs)
            sample["top"] = top["input_top_logprobs"][len(body.tokens) :]
        own = [place and place[0] for place in scores.get("input_token_logprobs", ())]
        return write_samples(
            samples,
            own if body.prompt_logprobs else None,
            scores["input_top_logprobs"] if body.topk_prompt_logprobs else None,
            targets.answer(scores["input_token_ids_logprobs"]) if targets else None,
        )

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
            if not asked:
                found[name] = [None] * len(tokens)
            elif len(found.get(name, ())) != len(tokens):
                raise ServiceError(
                    "the engine does not score other tokens beside those of a prompt",
                    field=name,
                    value=len(found.get(name, ())),
                    remedy="use engines, and a router, that know top_logprobs_num and "
                    "token_ids_logprob",
                )
        return found

    async def _completions(
        self, tokens: list[int], sampling: Json, adapter: str | None
    ) -> list[Json]:
        """Returns n completions as `write_samples` reads them, with a request for each where the
        engine gives all of a request the same seed.
        """
        each_alone = [sampling]
        if self._client.seeds_apart:
            seed = sampling["sampling_seed"]
            each_alone = [
                {**sampling, "n": 1, "sampling_seed": single_seed(seed, index)}
                for index in range(sampling["n"])
            ]
        found = await asyncio.gather(*(self._post(tokens, each, adapter) for each in each_alone))
        return [_sampled(answer) for answers in found for answer in answers]

    async def _post(
        self, tokens: list[int], sampling: Json, adapter: str | None, **more: Any
    ) -> list[Json]:
        body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, **more}
        if adapter is not None:
            body["lora_path"] = adapter
        response = await self._client.request("POST", "/generate", json=body)
        found = orjson.loads(response.content)
        return found if isinstance(found, list) else [found]


def _sampled(answer: Json) -> Json:
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
    return {"tokens": answer["output_ids"], "logprobs": logprobs, "reason": reason}
