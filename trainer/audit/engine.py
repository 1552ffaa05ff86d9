"""The embedded engine of a run, without its server: it samples given tokens again."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter

from common.clients.rollout import completion_from_answer
from common.settings.config import Config
from common.wire.schemas import Float32
from learning.device import choose_device
from services.engine.jobs import GenerationJob
from services.engine.model import Model
from services.engine.protocol import GenerateBody, answer
from services.engine.scheduler import Scheduler


@dataclass(frozen=True)
class Span:
    """Tokens that one request sampled from one weight version."""

    row: int
    """Index of the completion in the batch."""
    prompt: list[int]
    """The tokens that the request sent."""
    earlier: list[int]
    """The tokens that it sampled before these, from earlier versions."""
    seed: int
    """Of the request, for one completion."""
    start: int
    """Index of the first token in the completion."""
    tokens: list[int]
    logprobs: Float32
    """[tokens] as the run recorded them."""


@dataclass(frozen=True)
class Sampled:
    """What the engine sampled in the place of a span."""

    tokens: list[int]
    logprobs: Float32
    """[tokens]"""

    def equals(self, span: Span) -> bool:
        """Whether tokens and log-probabilities are the recorded ones, bit for bit."""
        same_tokens = self.tokens == span.tokens
        return same_tokens and self.logprobs.tobytes() == span.logprobs.tobytes()


def is_reproducible(config: Config) -> bool:
    """Whether the run's engines computed every completion as if alone (`reproducible`)."""
    return bool(getattr(config, "reproducible", False))


class ReplayEngine:
    """Samples spans again.

    Args:
        config: the settings of the run.
        directory: a complete version of the weights.
        stop_token_ids: tokens that end a completion.
    """

    def __init__(self, config: Config, directory: Path, stop_token_ids: Sequence[int]) -> None:
        rollout = config.rollout
        # The setting and the argument come together.
        options: dict[str, Any] = {"deterministic": True} if is_reproducible(config) else {}
        self._model = Model(
            directory,
            rollout.max_context_tokens,
            choose_device(rollout.device, "rollout.device"),
            dtype=config.model.dtype,
            fp32_head=config.model.fp32_head,
            **options,
        )
        registry = CollectorRegistry()
        self._scheduler = Scheduler(
            self._model,
            rollout.max_running_requests,
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

    def sample(self, spans: Sequence[Span]) -> list[Sampled]:
        """Returns what the engine samples for each span."""
        jobs = [self._job(span) for span in spans]
        with torch.inference_mode():
            self._scheduler.enqueue(jobs)
            while self._scheduler.can_step:
                self._scheduler.step(admit=True)
        return [self._sampled(job, span) for job, span in zip(jobs, spans, strict=True)]

    def _sampled(self, job: GenerationJob, span: Span) -> Sampled:
        (sequence,) = job.done.result()
        completion = completion_from_answer(
            answer(sequence, self._model.tokenizer), truncated=self._truncates
        )
        begin = len(span.earlier)
        return Sampled(completion.token_ids[begin:].tolist(), completion.logprobs[begin:])

    def _job(self, span: Span) -> GenerationJob:
        limit = len(span.earlier) + len(span.tokens)
        sampling = self._parameters | {"max_new_tokens": limit, "sampling_seed": span.seed}
        if "min_new_tokens" in sampling:
            sampling["min_new_tokens"] = min(limit, sampling["min_new_tokens"])
        body = GenerateBody(
            input_ids=span.prompt,
            sampling_params=sampling,
            return_logprob=True,
            return_sampling_mask=self._truncates,
        )
        (job,) = body.jobs(self._model)
        job.start(0, lambda: "again")
        # As if the engine had been stopped there, to load these weights.
        (sequence,) = job.sequences
        sequence.tokens = list(span.earlier)
        sequence.logprobs = [0.0] * len(span.earlier)
        return job
