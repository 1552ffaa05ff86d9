"""The teacher of on-policy distillation: a model behind an endpoint that scores the tokens sampled
by the policy.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import orjson

from common import Json
from common.clients.engines import GeneratingClient
from common.clients.network import Reply
from common.errors import ConfigError, ServiceError, Unauthorized, shorten
from common.settings.sections import TeacherSection
from common.wire.schemas import Float32, Int32

API_KEY = "TEACHER_API_KEY"
_PROBE = "Tom has 12 apples and buys 3.5 more.\n\n\tdef f(x): return x**2  # == 0"


class TeacherFailed(ServiceError):
    """The teacher's answer lacks log-probabilities of the requested tokens."""

    status = 502
    code = "teacher_failed"


class Teacher(GeneratingClient):
    """A teacher behind SGLang's `/generate` or, if the URL ends with /v1, OpenAI's `/completions`.

    Both receive the engines' token ids and return log-probabilities at temperature 1.
    """

    def __init__(
        self, settings: TeacherSection, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        key = os.environ.get(API_KEY)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = settings.url.rstrip("/")
        super().__init__(
            "teacher", url, transport=transport, deadline_s=settings.timeout_s, headers=headers
        )
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.concurrency)

    async def score(self, prompt_ids: Sequence[int], completions: Sequence[Int32]) -> list[Float32]:
        """Returns [L] log-probabilities, in nats, of the tokens of each completion of a prompt.
        Raises ServiceError.
        """
        rows = [[*map(int, prompt_ids), *tokens.tolist()] for tokens in completions]
        async with self._slots:
            scored = await self._ask(rows, len(prompt_ids))
        # A server that does not tell its load was busy with this call, and the others waited.
        self.engines.progress += 1
        found: list[Float32] = []
        for tokens, pairs in zip(completions, scored, strict=True):
            of_tokens = pairs[-len(tokens) :]
            if [token for _, token in of_tokens] != tokens.tolist():
                raise self._unfit(
                    "the teacher scored tokens that it did not receive", TeacherFailed
                )
            # None becomes NaN.
            logprobs = np.array([logprob for logprob, _ in of_tokens], np.float32)
            if not np.isfinite(logprobs).all():
                raise self._unfit(
                    "the teacher returned log-probabilities that are not finite", TeacherFailed
                )
            found.append(logprobs)
        return found

    async def check(self, tokenizer: Any, patience_s: float) -> None:
        """Waits until the teacher answers. Raises ConfigError for another tokenizer or missing
        log-probabilities.

        Compares the tokens of a probe text with all special tokens: their ids (SGLang) or their
        texts (OpenAI).
        """
        probe = _PROBE + "".join(str(token) for token in tokenizer.all_special_tokens)
        token_ids: list[int] = tokenizer(probe).input_ids
        try:
            own_tokens: list[Any]
            teacher_tokens: list[Any]
            if self._settings.is_openai:
                body = self._completions([token_ids])
                answer = await self._json("/completions", body, patience_s)
                (choice,) = answer["choices"]
                texts = choice["logprobs"]["tokens"][: len(token_ids)]
                teacher_tokens = [_written(text) for text in texts]
                own_tokens = [_written(tokenizer.decode([token])) for token in token_ids]
            else:
                body = {"text": probe, **_SCORED, "logprob_start_len": 0}
                answer = await self._json("/generate", body, patience_s)
                pairs = answer["meta_info"]["input_token_logprobs"]
                teacher_tokens = [pair[1] for pair in pairs]
                own_tokens = token_ids
            if teacher_tokens == own_tokens:
                await self.score(token_ids[:1], [np.array(token_ids[1:], np.int32)])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._unfit(
                f"the teacher does not return log-probabilities of a prompt: {error!r}"
            ) from None
        except TeacherFailed as error:
            raise self._unfit(error.message) from None
        # Scores are per token: with another tokenizer they would belong to other tokens.
        if teacher_tokens != own_tokens:
            both = enumerate(zip(teacher_tokens, own_tokens, strict=False))
            at = next((i for i, (theirs, own) in both if theirs != own), len(own_tokens))
            raise ConfigError(
                "the teacher's tokenizer differs from that of the trained model: "
                f"{shorten(_PROBE)!r} and the special tokens are {teacher_tokens[at : at + 3]} "
                f"there and {own_tokens[at : at + 3]} here, from token {at} on",
                field="teacher.url",
                value=self.base_url,
                remedy="use a teacher with the tokenizer of model.name, because its scores are per "
                "token",
                settings=("model.name",),
            )

    def _unfit(self, reason: str, kind: type[ServiceError] = ConfigError) -> ServiceError:
        return kind(
            reason,
            field="teacher.url",
            value=self.base_url,
            remedy="use SGLang, this system's engine, or (with /v1) an endpoint whose /completions "
            "supports echo with logprobs",
        )

    async def _ask(self, rows: list[list[int]], start: int) -> list[list[tuple[float | None, int]]]:
        """Returns (log-probability, token) pairs for the end of each row, at least from `start`
        on.
        """
        try:
            if not self._settings.is_openai:
                body = {"input_ids": rows, **_SCORED, "logprob_start_len": start - 1}
                answers = await self._json("/generate", body)
                scored = []
                for answer, _ in zip(answers, rows, strict=True):
                    triples = answer["meta_info"]["input_token_logprobs"]
                    scored.append([(logprob, token) for logprob, token, *_ in triples])
                return scored

            answer = await self._json("/completions", self._completions(rows))
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            scored = []
            for choice, row in zip(choices, rows, strict=True):
                # The endpoint also scored the token that it had to generate.
                logprobs = choice["logprobs"]["token_logprobs"][: len(row)]
                scored.append(list(zip(logprobs, row, strict=True)))
            return scored
        except (KeyError, TypeError, ValueError, IndexError) as error:
            reason = f"the teacher's answer has no log-probabilities of the prompt: {error!r}"
            raise self._unfit(reason, TeacherFailed) from None

    def _completions(self, rows: list[list[int]]) -> Json:
        """Returns the body of an OpenAI request, which has to generate at least one token."""
        return {
            "model": self._settings.model,
            "prompt": rows,
            "max_tokens": 1,
            "temperature": 1,
            "echo": True,
            "logprobs": 1,
        }

    async def _json(self, path: str, body: Json, patience_s: float | None = None) -> Any:
        headers = {"content-type": "application/json"}
        response = await self.request(
            "POST", path, content=orjson.dumps(body), headers=headers, deadline_s=patience_s
        )
        return orjson.loads(response.content)

    def _error(self, response: Reply) -> ServiceError:
        error = super()._error(response)
        if response.status_code == Unauthorized.status:
            error.remedy = f"set {API_KEY} in the environment of the trainer"
        return error


_SCORED = {
    "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
    "return_logprob": True,
    "stream": False,
}


def _written(token: Any) -> str:
    """Returns a normalised token text: servers write the space before a word in several ways."""
    return (
        str(token)
        .replace("Ġ", " ")
        .replace("▁", " ")
        .replace("Ċ", "\n")
        .replace("ĉ", "\t")
        .strip(" ")
    )
