"""The embedded engine of a run, without its server: it samples given tokens again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry, Counter

from common.clients.rollout import completion_from_answer
from common.settings.config import Config
from common.wire.schemas import Float32
from services.engine.jobs import GenerationJob, SamplingParams
from services.engine.protocol import GenerateBody, answer
from services.engine.sampling import FIELDS, Inputs, uniforms
from services.engine.scheduler import Scheduler
from trainer.audit.comparison import first_difference
from trainer.backends.embedded import embedded_model

TIE = 1e-4
"""Cumulative probability by which a draw may miss a token that rounding could have given it."""


@dataclass(frozen=True)
class Request:
    """A call of the engine whose answer is a part of a completion."""

    row: int
    """Index of the completion in the batch."""
    prompt: list[int]
    """The tokens that it sent."""
    seed: int
    """Its sampling seed; no two requests of a group have the same."""
    start: int
    end: int
    """The answer's place in the completion."""


@dataclass(frozen=True)
class Span:
    """Tokens that one request sampled from one weight version.

    A request that sampled `[5, 6, 7, 8]`, the first two tokens before an update, has two spans: one
    with `earlier=[]` and `tokens=[5, 6]`, and one with `earlier=[5, 6]` and `tokens=[7, 8]`.
    """

    request: Request
    earlier: list[int]
    """The tokens that it sampled before these, from earlier versions."""
    tokens: list[int]
    logprobs: Float32
    """[tokens] as the run recorded them."""

    @property
    def start(self) -> int:
        """The index of the first token in the completion."""
        return self.request.start + len(self.earlier)

    def after(self, count: int) -> "Span":
        """Returns the rest of this span after its first `count` tokens."""
        return replace(
            self,
            earlier=self.earlier + self.tokens[:count],
            tokens=self.tokens[count:],
            logprobs=self.logprobs[count:],
        )


@dataclass(frozen=True)
class SampledAnswer:
    """What the engine sampled in the place of a span."""

    tokens: list[int]
    logprobs: Float32
    """[tokens]"""

    def first_other(self, span: Span) -> int | None:
        """Returns the index of the first token that is not the recorded one; None if all are."""
        return first_difference(span.tokens, self.tokens)


class AuditEngine:
    """Samples spans again.

    Args:
        config: the settings of the run.
        directory: a complete version of the weights.
        stop_token_ids: tokens that end a completion.
    """

    def __init__(self, config: Config, directory: Path, stop_token_ids: Sequence[int]) -> None:
        self._model = embedded_model(config, directory)
        registry = CollectorRegistry()
        self._scheduler = Scheduler(
            self._model,
            config.rollout.max_running_requests,
            "0",
            generated=Counter("generated", "Tokens", registry=registry),
            prefilled=Counter("prefilled", "Tokens", registry=registry),
        )
        sampling = config.sampling
        self._parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "stop_token_ids": list(stop_token_ids),
        }
        if not config.environment.name:  # the call of an episode has none of these
            self._parameters |= sampling.training_truncation() | sampling.stop_conditions()
        self._truncates = bool(sampling.truncation())

    def sample(self, spans: Sequence[Span]) -> list[SampledAnswer]:
        """Returns what the engine samples for each span."""
        jobs = [self._job(span) for span in spans]
        with torch.inference_mode():
            self._scheduler.enqueue(jobs)
            while self._scheduler.can_step:
                self._scheduler.step(admit=True)
        found = []
        for job, span in zip(jobs, spans, strict=True):
            (sequence,) = job.done.result()
            content = answer(sequence, self._model.tokenizer)
            completion = completion_from_answer(content, truncated=self._truncates)
            begin = len(span.earlier)
            tokens = completion.token_ids[begin:].tolist()
            found.append(SampledAnswer(tokens, completion.logprobs[begin:]))
        return found

    def could_sample(self, span: Span, at: int) -> bool:
        """Whether the token `at` of a span, after those before it, is what its random number draws
        if the probabilities are rounded a little differently.
        """
        # The random number of a token is a function of the request's seed and this place.
        count = len(span.earlier) + at
        before = span.request.prompt + span.earlier + span.tokens[:at]
        job = self._job(span)
        sampling = job.sampling
        key = np.array([job.sequences[0].key], np.int64)
        drawn = uniforms(key, np.array([count], np.int64))[0]
        near = np.clip([drawn - TIE, drawn, drawn + TIE], 0.0, np.nextafter(1.0, 0.0))
        # Three draws from one distribution: with the random number, and with it moved by the bound.
        parameters = {
            "temperature": [sampling.temperature] * 3,
            "top_p": [sampling.top_p] * 3,
            "top_k": [sampling.top_k if sampling.top_k > 0 else np.inf] * 3,
            "min_p": [sampling.min_p] * 3,
            "uniform": near,
        }
        rows: list[Any] = [parameters.get(name, [0.0] * 3) for name in FIELDS]
        if count < sampling.min_new_tokens:
            rows += [[float(token)] * 3 for token in sampling.stop_token_ids]
        with torch.inference_mode():
            logits = self._model.prefill([before], [0, 0, 0], 0)
            found = self._model.sample(logits, Inputs(np.array(rows), plain=False))
        return span.tokens[at] in found[0].astype(int).tolist()

    def _job(self, span: Span) -> GenerationJob:
        limit = len(span.earlier) + len(span.tokens)
        sampling = self._parameters | {"max_new_tokens": limit, "sampling_seed": span.request.seed}
        # The engine refuses more than the limit, which is here the length of the answer.
        if "min_new_tokens" in sampling:
            sampling["min_new_tokens"] = min(limit, sampling["min_new_tokens"])
        body = GenerateBody(sampling_params=SamplingParams(**sampling), return_logprob=True)
        (job,) = body.jobs([span.request.prompt], self._model)
        job.start(0)
        # As if the engine had been stopped there, to load these weights.
        (sequence,) = job.sequences
        sequence.tokens = list(span.earlier)
        sequence.logprobs = [0.0] * len(span.earlier)
        return job
