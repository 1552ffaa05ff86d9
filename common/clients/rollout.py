"""The client of the router: requests groups of completions and validates the engines' answers."""

import asyncio
import base64
import logging
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NotRequired, TypedDict, Unpack, cast
from uuid import uuid4

import msgspec
import numpy as np
import orjson

from common import Json
from common.clients.base import Look
from common.clients.engines import GeneratingClient
from common.clients.network import Receive, Reply
from common.errors import NotFound, ServiceError, ServiceLost
from common.process.storage import storing
from common.wire.codec import without_collection
from common.wire.schemas import Completion, Float32, Int32, UInt8

log = logging.getLogger(__name__)
Tokens = Sequence[int] | Int32
_Body = bytes | Path
"""The body of an answer, or the file that has it."""
_MAX_EXPERT = 2**15 - 1
_PARSING_S = 0.1
"""Seconds of parsing after which other tasks of the event loop run."""


class GenerationFailed(ServiceError):
    """The engine's answer has no completions usable for training."""

    status = 502
    code = "generation_failed"


OTHER_ENGINE = "look at the log of rollout-server; the engine may be another version of SGLang"
_ENGINE_GONE = frozenset({"read_response_body_failed", "model_not_found"})
"""Error codes of the routers, besides `call_upstream_…`, for an engine that is gone."""


_SGLANG_SEEDS = 0x7FFFFFFF
"""The bits of a seed for SGLang, whose routers and tensors do not take all 64."""
_SEED_STRIDE = 0xD1B54A32D192ED03


def sample_seed(seed: int, index: int) -> int:
    """Returns the seed of completion `index` of a request for n completions with `seed`. A request
    for a single completion with the returned seed samples the same tokens.
    """
    return (seed + index * _SEED_STRIDE) & 0xFFFFFFFFFFFFFFFF


def single_seed(seed: int, index: int) -> int:
    """Returns `sample_seed` in the range that SGLang accepts."""
    return sample_seed(seed, index) & _SGLANG_SEEDS


class SamplingOptions(TypedDict):
    """Sampling options for the completions of one prompt."""

    n: int
    """Completions."""
    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    stop_token_ids: Sequence[int]
    sampling_seed: NotRequired[int | None]
    """With the same seed the embedded engine samples the same tokens."""
    parameters: NotRequired[Mapping[str, Any]]
    """Further parameters by SGLang's names: `top_p`, `stop`, …"""
    routed_experts: NotRequired[bool]
    """Request the experts that computed each token, for routing replay."""


class RolloutClient(GeneratingClient):
    """The router in front of the engines (SGLang's HTTP API)."""

    adapter: tuple[str, int] | None = None
    """Name and weight version of the LoRA adapter that answers; None for the engines' own
    weights."""
    repeats_prompt = False
    """Request n completions with an adapter or truncated sampling as n prompts in one request. With
    n > 1, SGLang (0.5.21) first sends itself a request for 0 tokens; as a result it miscounts the
    uses of the adapter and never finishes unloading it, and fails because that request has no
    sampling mask. Not for engines that honour `sampling_seed`."""
    seeds_apart = False
    """Request n completions with a seed as n requests, each with the seed of its completion.
    SGLang, where it honours `sampling_seed`, gives all completions of a request the same seed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.readers: Executor | None = None
        """Processes that turn answers into completions; None: the event loop does."""
        self.directory: Path | None = None
        """Answers for `readers` are received into files here: they may have hundreds of MB each,
        and many may end together."""
        self._parsing_ends = 0.0
        """When parsing in this round of the event loop ends; 0 before it begins."""

    async def generate(
        self,
        input_ids: Tokens,
        adapter: tuple[str, int] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """Returns n completions (token ids) of one prompt given as token ids. `adapter`, name and
        weight version, answers in place of the client's own.

        Their `routed_experts` are of prompt and completion, [P + L - 1, layers, top_k], with two
        bytes for each number. Raises GenerationFailed when an answer was aborted or lacks data that
        training needs.
        """
        # Read once: it changes from another thread.
        name, version = adapter or self.adapter or (None, None)
        contents = await self._contents(input_ids, options, name)
        read = partial(
            read_completions,
            contents,
            version,
            n=options["n"],
            truncated=_truncates(options),
            routed=options.get("routed_experts", False),
        )
        if self.readers is not None:
            try:
                return await asyncio.get_running_loop().run_in_executor(self.readers, read)
            except BrokenExecutor as error:
                raise ServiceLost(
                    "the process that reads the engines' answers has died",
                    remedy="give the trainer's pod more memory if it was killed for that",
                ) from error
        await self._may_parse()
        return read()

    def _receiver(self, path: str) -> Receive | None:
        return self._to_file if self.directory is not None and path == "/generate" else None

    async def _to_file(self, pieces: AsyncIterable[bytes]) -> Path:
        assert self.directory is not None
        path = self.directory / f"{uuid4().hex}.answer"
        with storing("an engine's answer", path, "state_dir"):
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("wb") as file:
                    async for piece in pieces:
                        file.write(piece)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        return path

    async def answers(
        self,
        input_ids: Tokens,
        *,
        logprobs: bool = True,
        lora_path: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Json]:
        """Returns the engine's n answers unchanged. Raises GenerationFailed when there are not
        n.
        """
        contents = await self._contents(input_ids, options, lora_path, logprobs=logprobs)
        await self._may_parse()
        with without_collection():
            return _parsed(contents, options["n"], orjson.loads)

    async def _contents(
        self,
        input_ids: Tokens,
        options: SamplingOptions,
        lora_path: str | None,
        *,
        logprobs: bool = True,
    ) -> list[_Body]:
        """Returns the body of the answer to one request, or to a request for each completion
        (`seeds_apart`). Raises the error of the first that fails.
        """
        seed = options.get("sampling_seed")
        if not self.seeds_apart or seed is None:
            return [await self._generate(input_ids, options, lora_path, logprobs=logprobs)]
        started = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(options["n"]):
                    own_seed = single_seed(seed, index)
                    alone: SamplingOptions = {**options, "n": 1, "sampling_seed": own_seed}
                    request = self._generate(input_ids, alone, lora_path, logprobs=logprobs)
                    started.append(tasks.create_task(request))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return [task.result() for task in started]

    async def _may_parse(self) -> None:
        """Waits until it may parse an answer.

        Parsing thousands of answers that arrive together would block the event loop until other
        calls time out, so other tasks run after every `_PARSING_S` seconds of parsing.
        """
        loop = asyncio.get_running_loop()
        while self._parsing_ends and loop.time() > self._parsing_ends:  # noqa: ASYNC110
            await asyncio.sleep(0)
        if not self._parsing_ends:
            self._parsing_ends = loop.time() + _PARSING_S
            loop.call_soon(self._end_parsing)

    def _end_parsing(self) -> None:
        self._parsing_ends = 0.0

    async def _generate(
        self,
        input_ids: Tokens,
        options: SamplingOptions,
        lora_path: str | None,
        *,
        logprobs: bool,
    ) -> _Body:
        n = options["n"]
        asks_for_kept = logprobs and _truncates(options)
        repeated = self.repeats_prompt and n > 1 and (lora_path is not None or asks_for_kept)
        sampling = {
            "n": 1 if repeated else n,
            "max_new_tokens": options["max_new_tokens"],
            "temperature": options["temperature"],
            "stop_token_ids": list(options["stop_token_ids"]),
            "skip_special_tokens": True,
            **options.get("parameters", {}),
        }
        seed = options.get("sampling_seed")
        if seed is not None:
            sampling["sampling_seed"] = seed
        body: Json = {
            "input_ids": [input_ids] * n if repeated else input_ids,
            "sampling_params": sampling,
            "return_logprob": logprobs,
            "stream": False,
        }
        if asks_for_kept:
            body["return_sampling_mask"] = True
        if options.get("routed_experts"):
            body["return_routed_experts"] = True
        if lora_path is not None:
            body["lora_path"] = lora_path
        response = await self.request(
            "POST",
            "/generate",
            content=orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY),
            headers={"content-type": "application/json"},
        )
        return response.file or response.content

    async def _look(self, attempt: str) -> Look:
        loads = await self._loads()
        # The router waits for ever for an engine whose machine is gone.
        is_lost = bool(loads) and all(load.is_idle for load in loads or [])
        return Look(works=False if is_lost else None, progress=self.engines.progress)

    def _is_retryable(self, response: Reply) -> bool:
        """Also retries the router's 500, when its attempts met engines that just died, and smg's
        404 without one.
        """
        code = response.headers.get("x-smg-error-code", "")
        return (
            super()._is_retryable(response)
            or code.startswith("call_upstream_")
            or code in _ENGINE_GONE
        )

    async def remove_worker(self, url: str) -> None:
        """Removes the engine at `url` from the router; does nothing when the router does not know
        it.
        """
        listing = orjson.loads((await self.request("GET", "/workers")).content)
        for worker in listing["workers"]:
            if worker["url"].rstrip("/") == url.rstrip("/"):
                try:
                    await self.request("DELETE", f"/workers/{worker['id']}")
                except ServiceError as error:
                    # Not found: already removed, perhaps by an attempt whose answer was lost.
                    if error.status != NotFound.status:
                        raise


def read_completions(
    contents: list[_Body], version: int | None, *, n: int, truncated: bool, routed: bool
) -> list[Completion]:
    """Returns the completions in the answers to a request; `version` is of its LoRA adapter."""
    # The garbage collector pauses until the last number of an answer is freed.
    with without_collection():
        return [
            completion_from_answer(answer, version, truncated, routed=routed)
            for answer in _parsed(contents, n, _answers)
        ]


def _truncates(options: SamplingOptions) -> bool:
    return not {"top_p", "top_k", "min_p"}.isdisjoint(options.get("parameters", {}))


def _parsed(contents: list[_Body], n: int, parse: Callable[[bytes], Any]) -> list[Any]:
    """Returns the n answers in these bodies. Raises GenerationFailed when there are not n."""
    answers: list[Any] = []
    for content in contents:
        if isinstance(content, Path):
            body = content.read_bytes()
            content.unlink()
        else:
            body = content
        found = parse(body)
        answers += found if isinstance(found, list) else [found]
    if len(answers) != n:
        reason = f"asked for {n} completions, got {len(answers)}"
        raise GenerationFailed(reason, field="/generate", value=len(answers), remedy=OTHER_ENGINE)
    return answers


class _Answer(msgspec.Struct):
    """An answer of SGLang whose numbers are not parsed yet."""

    text: str
    output_ids: msgspec.Raw
    meta_info: dict[str, msgspec.Raw]


_ANSWERS = msgspec.json.Decoder(list[_Answer] | _Answer)


def _answers(body: bytes) -> list[_Answer] | _Answer:
    """Returns the answers in a body. Raises GenerationFailed."""
    try:
        return cast("list[_Answer] | _Answer", _ANSWERS.decode(body))
    except msgspec.DecodeError as error:
        raise GenerationFailed(
            f"the answer is not in SGLang's format: {error}",
            field="/generate",
            value=body[:1000],
            remedy=OTHER_ENGINE,
        ) from None


def _routed_experts(meta: Json, completion: Completion) -> UInt8:
    """Reads the experts of a row from SGLang's answer: int32 [P + L - 1, layers, top_k] in base64.

    Raises GenerationFailed when they are missing or not as many for every token.
    """
    found = meta.get("routed_experts")
    if found is None:
        raise GenerationFailed(
            "the engine does not say which experts computed the tokens",
            field="return_routed_experts",
            value=sorted(meta),
            remedy="set rollout.router smg, which passes that field on, and use SGLang 0.5.21 "
            "or newer; or leave out trainer.routing_replay",
        )
    tokens = meta["prompt_tokens"] + len(completion.token_ids) - 1
    try:
        numbers = np.frombuffer(base64.b64decode(found), "<i4")
        if not len(numbers) or len(numbers) % tokens:
            raise ValueError(f"{len(numbers)} numbers for {tokens} tokens")
        if numbers.min() < 0 or numbers.max() > _MAX_EXPERT:
            raise ValueError(f"numbers from {numbers.min()} to {numbers.max()}")
    except (ValueError, TypeError) as error:
        raise GenerationFailed(
            f"the engine's answer has unusable experts: {error}",
            field="routed_experts",
            value=found,
            remedy=OTHER_ENGINE,
        ) from None
    # Kernels that choose experts themselves bypass what SGLang records, and leave its zeros.
    if numbers.max() == 0:
        raise GenerationFailed(
            "the engine did not record the experts: it answers 0 for every token and layer",
            field="routed_experts",
            value=0,
            remedy="set rollout.engine_args --moe-runner-backend triton, with which SGLang records "
            "them, or leave out trainer.routing_replay",
        )
    return numbers.astype("<u2").view(np.uint8)


_READ = (
    "finish_reason",
    "output_token_sampling_logprobs",
    "output_token_sampling_mask",
    "prompt_tokens",
    "routed_experts",
    "weight_version",
    "weight_versions",
)
"""The facts about an answer that are read, besides its tokens."""
BASE_VERSION = "default"
"""SGLang's version label of the weights it was started with."""


def completion_from_answer(
    answer: Json | _Answer,
    adapter_version: int | None = None,
    truncated: bool = False,
    *,
    routed: bool = False,
) -> Completion:
    """Reads one completion from SGLang's answer to `/generate`.

    `adapter_version` is the version of the LoRA adapter named in the request; the engine's own
    label must then be that of the model it was started with. With `truncated` sampling the
    log-probabilities are relative to the tokens that truncation kept, which the answer must list;
    if `routed`, it must list the experts too. Raises GenerationFailed when the completion was
    aborted or lacks data for training.
    """
    if isinstance(answer, dict):
        answer = cast("_Answer", _answers(orjson.dumps(answer)))
    try:
        token_ids, logprobs, matches = _sampled(answer)
        meta = {
            name: orjson.loads(memoryview(value))
            for name, value in answer.meta_info.items()
            if name in _READ
        }
        finish = meta["finish_reason"]["type"]

        kept_tokens: Int32 = np.zeros(0, np.int32)
        kept_counts: Int32 = kept_tokens
        if truncated or "output_token_sampling_mask" in meta:
            if "output_token_sampling_mask" not in meta:
                raise GenerationFailed(
                    "the engine does not say which tokens it sampled from, so truncated sampling "
                    "cannot be trained on",
                    field="return_sampling_mask",
                    value=sorted(answer.meta_info),
                    remedy="use SGLang 0.5.21 or newer, directly or behind smg, because "
                    "sglang-router drops that field; or truncate nothing (sampling.top_p 1, "
                    "no sampling.top_k, sampling.min_p 0)",
                )
            lists = meta["output_token_sampling_mask"]
            kept_tokens = np.fromiter(chain.from_iterable(lists), np.int32)
            kept_counts = np.fromiter(map(len, lists), np.int32)
            logprobs = np.array(meta["output_token_sampling_logprobs"], np.float32)
            matches &= len(kept_counts) == len(token_ids) == len(logprobs)
        versions = _version_spans(meta, len(token_ids), adapter_version)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        reason = f"the engine's answer lacks what training needs: {error!r}"
        raise GenerationFailed(
            reason, field="/generate", value=sorted(answer.meta_info), remedy=OTHER_ENGINE
        ) from None

    reason = _problem(finish, token_ids, logprobs, matches=matches)
    if reason:
        raise GenerationFailed(reason, field="/generate", value=meta, remedy=OTHER_ENGINE)

    completion = Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        text=answer.text,
        finish_reason=finish,
        weight_versions=versions,
        kept_tokens=kept_tokens,
        kept_counts=kept_counts,
    )
    if routed:
        completion.routed_experts = _routed_experts(meta, completion)
    return completion


def _sampled(answer: _Answer) -> tuple[Int32, Float32, bool]:
    """Returns the tokens, their log-probabilities, and whether the answer's two lists of tokens are
    the same.
    """
    lists = bytes(answer.meta_info["output_token_logprobs"])
    flat: list[Any]  # log-probability, token and token text alternate
    if b'"' in lists:  # of texts, which may have brackets of their own
        flat = list(chain.from_iterable(orjson.loads(lists)))
    else:
        # Parsed without the brackets between: lists of three numbers take most of the memory of an
        # answer, which is spread over that of a long run, and so of its time.
        flat = orjson.loads(b"[%b]" % lists.translate(None, b"[]"))
    ids = flat[1::3]
    listed = bytes(answer.output_ids)
    # Most engines write no spaces; then the text is the same too.
    matches = orjson.dumps(ids) == listed or orjson.loads(listed) == ids
    token_ids: Int32 = np.fromiter(ids, np.int32, len(ids))
    logprobs: Float32 = np.fromiter(flat[::3], np.float32, len(ids))
    return token_ids, logprobs, matches and len(flat) == 3 * len(ids)


def _problem(finish: str, token_ids: Int32, logprobs: Float32, *, matches: bool) -> str:
    """Returns why a completion cannot be trained on; empty if it can."""
    if finish not in ("stop", "length"):
        return f"the completion ended with {finish}"
    if not matches:
        return "tokens and logprobs of the completion do not match"
    if not len(token_ids):
        return "the completion is empty: it has no tokens, not even the one that ends it"
    if not np.isfinite(logprobs).all():
        return "a log-probability of the completion is not a finite number (NaN, infinite or null)"
    return ""


def _version_spans(
    meta: Json, tokens: int, adapter_version: int | None
) -> list[tuple[int, int, int]]:
    """Returns which weights sampled which tokens, as (version, start, end)."""
    whole = {"start": 0, "end": tokens}
    # Only an answer across an update of the weights has several spans.
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], **whole}]
    if adapter_version is None:
        return [(int(span["version"]), int(span["start"]), int(span["end"])) for span in spans]
    # An engine that serves adapters keeps the weights of its start, so its label must be theirs.
    if all(span["version"] == BASE_VERSION for span in spans):
        return [(adapter_version, 0, tokens)]
    raise ValueError(f"an adapter of the weights {BASE_VERSION} was used on {spans}")
