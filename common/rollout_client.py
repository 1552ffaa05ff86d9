"""The client of the router: groups of completions, with what the engines say of each read strictly."""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import orjson

from common.clients import Client
from common.errors import NotFound, ServiceError
from common.schemas import Completion, Int32

log = logging.getLogger(__name__)


class GenerationFailed(ServiceError):
    """The engine answered, but not with completions that can be trained on."""

    status = 502
    code = "generation_failed"


_ENGINE_GONE = frozenset({"read_response_body_failed", "model_not_found"})
"""What the routers say, beside `call_upstream_…`, of an engine that is no longer there."""


class RolloutClient(Client):
    """The router in front of the engines (SGLang's HTTP API)."""

    adapter: tuple[str, int] | None = None
    """Name and weight version of the LoRA adapter that answers; None: the engines' own weights."""
    repeats_prompt = False
    """Ask for n completions of an adapter as n prompts in one request. With n > 1 SGLang (0.5.21) counts one use of the adapter
    too few, and then waits for ever when it is told to unload it. Not for engines that honour `sampling_seed`."""

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        n: int,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        sampling_seed: int | None = None,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        """n completions of one prompt: tokens in, tokens out.

        `temperature` 0 is greedy; with the same `sampling_seed` the embedded engine samples the same. Raises
        GenerationFailed when an answer was aborted or lacks what training needs.
        """
        adapter = self.adapter  # read once: it changes from another thread
        repeated = adapter is not None and self.repeats_prompt
        lora = None if adapter is None else adapter[0]
        options = (max_new_tokens, temperature, stop_token_ids, sampling_seed)
        content = await self._generate(_generate_body(input_ids, n, *options, True, lora, repeated), deadline_s)
        with _without_cycle_collection():
            version = None if adapter is None else adapter[1]
            return [completion_from_answer(answer, version) for answer in _n_answers(content, n)]

    async def answers(
        self,
        input_ids: Sequence[int],
        *,
        n: int,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        sampling_seed: int | None = None,
        deadline_s: float | None = None,
        logprobs: bool = True,
        lora_path: str | None = None,
    ) -> list[dict[str, Any]]:
        """`generate`, with the n answers as the engine gave them. Raises GenerationFailed when there are not n."""
        repeated = lora_path is not None and self.repeats_prompt
        options = (max_new_tokens, temperature, stop_token_ids, sampling_seed)
        content = await self._generate(_generate_body(input_ids, n, *options, logprobs, lora_path, repeated), deadline_s)
        with _without_cycle_collection():
            return _n_answers(content, n)

    async def _generate(self, body: bytes, deadline_s: float | None) -> bytes:
        headers = {"content-type": "application/json"}
        return (await self.request("POST", "/generate", content=body, headers=headers, deadline_s=deadline_s)).content

    def _is_passing(self, response: httpx.Response) -> bool:
        """The router says 500 when all its own tries met an engine that has just died, and smg 404 while it has no engine."""
        code = response.headers.get("x-smg-error-code", "")
        return super()._is_passing(response) or code.startswith("call_upstream_") or code in _ENGINE_GONE

    async def remove_worker(self, url: str) -> None:
        """Takes the engine at `url` out of the router; nothing happens when the router does not know it."""
        listing = orjson.loads((await self.request("GET", "/workers")).content)
        for worker in listing["workers"]:
            if worker["url"].rstrip("/") == url.rstrip("/"):
                try:
                    await self.request("DELETE", f"/workers/{worker['id']}")
                except ServiceError as error:
                    if error.status != NotFound.status:  # it has gone, perhaps by an attempt whose answer was lost
                        raise


def _generate_body(
    input_ids: Sequence[int],
    n: int,
    max_new_tokens: int,
    temperature: float,
    stop_token_ids: Sequence[int],
    sampling_seed: int | None,
    logprobs: bool,
    lora_path: str | None,
    repeated: bool,
) -> bytes:
    """`repeated`: n prompts of one completion each, in place of one of n."""
    repeated = repeated and n > 1
    prompt: list[Any] = list(input_ids)
    sampling: dict[str, Any] = {
        "n": 1 if repeated else n,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "stop_token_ids": list(stop_token_ids),
        "skip_special_tokens": True,
    }
    if sampling_seed is not None:
        sampling["sampling_seed"] = sampling_seed
    body: dict[str, Any] = {"input_ids": [prompt] * n if repeated else prompt, "sampling_params": sampling}
    body |= {"return_logprob": logprobs, "stream": False}
    if lora_path is not None:
        body["lora_path"] = lora_path
    return orjson.dumps(body)


def _n_answers(content: bytes, n: int) -> list[dict[str, Any]]:
    answers = orjson.loads(content)
    answers = answers if isinstance(answers, list) else [answers]
    if len(answers) != n:
        raise GenerationFailed(f"asked for {n} completions, got {len(answers)}")
    return answers


@contextmanager
def _without_cycle_collection() -> Iterator[None]:
    """An answer has a list for every token: making these starts the search for cycles over the whole heap again and again,
    which took ten times as long as the parsing itself (`python -m benchmarks.collector`)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


BASE_VERSION = "default"
"""What SGLang calls the weights it was started with."""


def completion_from_answer(answer: dict[str, Any], adapter_version: int | None = None) -> Completion:
    """One completion from SGLang's answer to `/generate`.

    `adapter_version` is that of the LoRA adapter which the request named: an engine's own label is of its whole model, which
    then must be the one it was started with. Raises GenerationFailed when the completion was aborted, has no tokens, no
    logprobs, or a weight version that is not a number: such an answer is never trained on as if it were empty.
    """
    try:
        meta = answer["meta_info"]
        finish = meta["finish_reason"]["type"]
        token_ids: Int32 = np.array(answer["output_ids"], np.int32)
        pairs = meta["output_token_logprobs"]
        logprobs = np.array([pair[0] for pair in pairs], np.float32)
        scored = [pair[1] for pair in pairs]
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(token_ids)}]
        if adapter_version is None:
            versions = [(int(span["version"]), int(span["start"]), int(span["end"])) for span in spans]
        elif all(span["version"] == BASE_VERSION for span in spans):
            versions = [(adapter_version, 0, len(token_ids))]
        else:
            raise ValueError(f"an adapter of the weights {BASE_VERSION} was used on {spans}")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise GenerationFailed(f"the engine's answer lacks what training needs: {error!r}", value=answer) from None
    if finish not in ("stop", "length"):
        raise GenerationFailed(f"the completion ended with {finish}", value=meta["finish_reason"])
    if len(token_ids) == 0 or answer["output_ids"] != scored or not np.isfinite(logprobs).all():
        raise GenerationFailed("tokens and logprobs of the completion do not match", value=answer)
    return Completion(token_ids, logprobs, answer["text"], finish, versions)
