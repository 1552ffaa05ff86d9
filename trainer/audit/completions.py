"""Samples the completions of a step again, from the weights of their version."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter

from common.clients.rollout import completion_from_answer
from common.settings.config import Config
from common.wire.schemas import Completion
from learning.device import choose_device
from services.engine.jobs import GenerationJob
from services.engine.model import Model
from services.engine.protocol import GenerateBody, answer
from services.engine.sampling import sample_seed
from services.engine.scheduler import Scheduler
from trainer.weights.versions import Weights, version_name, write_version


@dataclass(frozen=True)
class Span:
    """Tokens of a completion that one request sampled from one weight version."""

    row: int
    """Index of the completion in the batch."""
    name: str
    """The completion, in messages."""
    prompt: list[int]
    """The tokens that the request sent."""
    earlier: list[int]
    """Tokens that the request had sampled from earlier versions."""
    seed: int
    version: int
    start: int
    """Index of the first token in the completion."""
    tokens: list[int]
    logprobs: list[float]


def is_reproducible(config: Config) -> bool:
    """Whether the run's engines computed every completion as if alone (`reproducible`)."""
    return bool(getattr(config, "reproducible", False))


class Sampler:
    """The embedded engine, as a run has it, without a server.

    Args:
        config: the settings of the run.
        directory: a complete version of the weights.
        stop_token_ids: tokens that end a completion.
    """

    def __init__(self, config: Config, directory: Path, stop_token_ids: Sequence[int]) -> None:
        rollout = config.rollout
        options = {"deterministic": True} if is_reproducible(config) else {}
        model = Model(
            directory,
            rollout.max_context_tokens,
            choose_device(rollout.device, "rollout.device"),
            dtype=config.model.dtype,
            fp32_head=config.model.fp32_head,
            **options,
        )
        registry = CollectorRegistry()
        self._model = model
        self._scheduler = Scheduler(
            model,
            rollout.max_running_requests,
            "0",
            generated=Counter("generated", "Tokens", registry=registry),
            prefilled=Counter("prefilled", "Tokens", registry=registry),
        )
        sampling = config.sampling
        self._parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "stop_token_ids": list(stop_token_ids),
            "skip_special_tokens": True,
            **sampling.training_truncation(),
            **sampling.stop_conditions(),
        }
        self._truncated = bool(sampling.truncation())

    def sample(self, spans: Sequence[Span]) -> list[Completion]:
        """Returns what the engine samples for each span, its earlier tokens included."""
        jobs = [self._job(span) for span in spans]
        with torch.inference_mode():
            self._scheduler.enqueue(jobs)
            while self._scheduler.can_step:
                self._scheduler.step(admit=True)
        found = []
        for job in jobs:
            (sequence,) = job.done.result()
            content = answer(sequence, self._model.tokenizer)
            found.append(completion_from_answer(content, truncated=self._truncated))
        return found

    def _job(self, span: Span) -> GenerationJob:
        limit = len(span.earlier) + len(span.tokens)
        sampling = self._parameters | {"max_new_tokens": limit, "sampling_seed": span.seed}
        if "min_new_tokens" in sampling:
            sampling["min_new_tokens"] = min(limit, sampling["min_new_tokens"])
        body = GenerateBody(input_ids=span.prompt, sampling_params=sampling, return_logprob=True)
        if self._truncated:
            body.return_sampling_mask = True
        (job,) = body.jobs(self._model)
        job.start(0, lambda: "again")
        (sequence,) = job.sequences
        # As if the engine had been stopped there to load these weights.
        sequence.tokens = list(span.earlier)
        sequence.logprobs = [0.0] * len(span.earlier)
        return job


@contextmanager
def published(weights: Weights, static_files: list[Path], version: int) -> Iterator[Path]:
    """Yields a directory with a complete version of the weights."""
    with tempfile.TemporaryDirectory(prefix="rlhf-replay-") as directory:
        write_version(weights, static_files, Path(directory), "replay", version)
        yield Path(directory) / version_name(version)


def seed_of(group_seed: int, index: int) -> int:
    """Returns the seed of one of the n completions of a request."""
    return sample_seed(group_seed, index)
