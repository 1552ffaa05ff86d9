"""Samples the completions of a step again, from the weights of their versions.

With `reproducible`, and on a machine like that of the run, tokens and log-probabilities are
compared bit for bit. Otherwise the batch in which the engine computed a token, or the machine,
changes its last bits, and near a tie the token itself; and some engines cannot sample again at all.
Then the log-probability of every recorded token, under the weights of its version, must be what the
engine reported, within a bound.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from common.clients.rollout import sample_seed
from common.settings.config import Config
from common.wire.schemas import Float32
from learning.ranks import Ranks
from trainer.audit.comparison import LOGPROB_BOUND, LOGPROB_BOUND_LOW, StageOutcome, compare_columns
from trainer.audit.engine import ReplayEngine, SampledAnswer, Span
from trainer.audit.recorded import RecordedStep
from trainer.policy.policy import Policy
from trainer.policy.scorer import computes_in_bfloat16, load_tokenizer, stop_token_ids
from trainer.policy.scoring import score_batch
from trainer.weights.adapters import static_files
from trainer.weights.versions import version_name, write_version


@dataclass(frozen=True)
class Request:
    """A call of the engine whose answer is a part of a completion."""

    row: int
    """Index of the completion in the batch."""
    prompt: list[int]
    seed: int
    """The sampling seed; no two requests of a group have the same."""
    start: int
    end: int
    """The answer's place in the completion."""


def sampling_versions(recorded: RecordedStep) -> list[int]:
    """Returns the versions that sampled a token of a fresh group, oldest first."""
    found: set[int] = set()
    for group in recorded.fresh:
        for completion in group.completions:
            found.update(version for version, _, _ in completion.weight_versions)
    return sorted(found)


def requests_of_groups(recorded: RecordedStep) -> list[Request]:
    """Returns the requests of groups of single completions, one for each completion."""
    found = []
    row = 0
    for item, group_seed in zip(recorded.groups, recorded.line.seeds, strict=True):
        prompt = item.group.prompt_token_ids.tolist()
        for index, completion in enumerate(item.group.completions):
            if not item.reused:
                found.append(
                    Request(
                        row=row,
                        prompt=prompt,
                        seed=sample_seed(group_seed, index),
                        start=0,
                        end=len(completion.token_ids),
                    )
                )
            row += 1
    return found


@dataclass
class Completions:
    """The completions of a step, which each of their versions samples again.

    Every rank has one, and calls `take` in the same order; the requests are rank 0's.
    """

    recorded: RecordedStep
    config: Config
    ranks: Ranks
    requests: Sequence[Request]
    why_not: str
    """Why no engine can sample again; empty when one can."""
    why_rounded: str
    """Why the bits of two executions may differ; empty when they may not."""
    _pairs: list[tuple[Span, SampledAnswer]] = field(default_factory=list)
    _ties: int = 0
    """Tokens that another rounding would have sampled too."""
    _scores: dict[int, list[Float32]] = field(default_factory=dict)
    """By version, [L] for every row of the batch."""

    @property
    def _is_exact(self) -> bool:
        """Whether an answer has to be equal bit for bit."""
        return self.config.reproducible and not self.why_rounded

    def versions(self) -> list[int]:
        """Returns the versions that sampled a token of a fresh group, oldest first."""
        return sampling_versions(self.recorded)

    def take(self, policy: Policy) -> None:
        """Samples and scores the tokens of version `policy.step`. A collective."""
        batch = self.recorded.batch(self.config)
        scores = score_batch(policy.scorer, batch, self.config, self.ranks)
        self._scores[policy.step] = scores
        if self.why_not:
            return
        if not self.ranks.is_rank_zero:
            deque(policy.weights(), maxlen=0)  # gathers every tensor and keeps none
            return

        spans = self._spans(policy.step)
        tokenizer = load_tokenizer(self.config.model)
        stops = stop_token_ids(policy.model, tokenizer, self.config.sampling.stop_token_ids)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="rlhf-replay-")))
            files = static_files(self.config, policy.model, tokenizer, folder / "model")
            write_version(policy.weights(), files, folder, run_id="replay", version=policy.step)
            engine = ReplayEngine(self.config, folder / version_name(policy.step), stops)
            self._sample(engine, spans)

    def _sample(self, engine: ReplayEngine, spans: list[Span]) -> None:
        """Samples spans. After a token that rounding may have decided otherwise, the rest of its
        span is sampled again, with the recorded token before it.
        """
        while spans:
            left: list[Span] = []
            for span, sampled in zip(spans, engine.sample(spans), strict=True):
                at = sampled.first_other(span)
                is_tie = (
                    at is not None
                    and at < len(span.tokens)
                    and not self._is_exact
                    and engine.could_sample(span, at)
                )
                if at is None or not is_tie:
                    self._pairs.append((span, sampled))
                    continue
                self._ties += 1
                if at > 0:
                    self._pairs.append((span.part(0, at), sampled.part(at)))
                if at + 1 < len(span.tokens):
                    left.append(span.part(at + 1, len(span.tokens)))
            spans = left

    def _spans(self, version: int) -> list[Span]:
        """Returns the tokens that a version sampled, in batch order."""
        rows = [
            completion for item in self.recorded.groups for completion in item.group.completions
        ]
        found = []
        for request in self.requests:
            completion = rows[request.row]
            tokens = completion.token_ids.tolist()
            for of_version, first, last in completion.weight_versions:
                start = max(first, request.start)
                end = min(last, request.end)
                if of_version == version and start < end:
                    span = Span(
                        row=request.row,
                        prompt=request.prompt,
                        earlier=tokens[request.start : start],
                        seed=request.seed,
                        start=start,
                        tokens=tokens[start:end],
                        logprobs=completion.logprobs[start:end],
                    )
                    found.append(span)
        return found

    def outcome(self) -> StageOutcome:
        """Compares what was sampled; rank 0 only."""
        twice = self._equal_seeds()
        if twice is not None:
            return twice
        unequal = [(span, sampled) for span, sampled in self._pairs if not sampled.equals(span)]
        if self._is_exact and not self.why_not and unequal:
            return self._first_difference(*unequal[0])

        for span, sampled in unequal:
            if sampled.tokens != span.tokens:
                return self._first_difference(span, sampled)
        scored = self._scored()
        if scored.state == "differs":
            return scored
        if self.why_not:
            detail = f"not sampled again, because {self.why_not}; {scored.detail}"
            return StageOutcome("completions", "close", detail)

        tokens = sum(len(span.tokens) for span, _ in self._pairs) + self._ties
        detail = f"{tokens} tokens of {len(self.requests)} answers sampled again{self._left_out()}"
        if not unequal and not self._ties:
            return StageOutcome("completions", "equal", detail)
        rounded = sum(len(span.tokens) for span, _ in unequal)
        ties = f" except {self._ties} that rounding decides" if self._ties else ""
        why = "as they may without reproducible"
        if self.config.reproducible:
            why = f"because {self.why_rounded}"
        detail += (
            f", equal{ties}; the log-probabilities of {rounded} differ in their last bits, {why} "
            f"({scored.detail})"
        )
        return StageOutcome("completions", "close", detail)

    def _left_out(self) -> str:
        reused = sum(item.reused for item in self.recorded.groups)
        return f" ({reused} reused groups belong to earlier steps)" if reused else ""

    def _equal_seeds(self) -> StageOutcome | None:
        """Returns the outcome for answers to one prompt with one seed; None when there are none."""
        known: dict[tuple[int, ...], int] = {}
        for request in self.requests:
            key = (request.seed, *request.prompt)
            if key in known:
                return StageOutcome(
                    "completions",
                    "differs",
                    "two answers to one prompt have one seed",
                    self.recorded.names[request.row],
                    expected=f"another seed than {self.recorded.names[known[key]]}",
                    found=str(request.seed),
                )
            known[key] = request.row
        return None

    def _scored(self) -> StageOutcome:
        """Compares the log-probability of every sampled token with that under the weights of its
        version.
        """
        setup = self.recorded.start.setup
        low = computes_in_bfloat16(self.config.model, self.ranks)
        low |= setup.device != "cpu" or self.recorded.start.engine != "embedded"
        expected: list[Float32 | None] = []
        found: list[Float32 | None] = []
        row = 0
        for item in self.recorded.groups:
            for completion in item.group.completions:
                scores = np.zeros(len(completion.token_ids), np.float32)
                known = not item.reused
                for version, start, end in completion.weight_versions:
                    known &= version in self._scores
                    if known:
                        of_version = completion.spread(self._scores[version][row])
                        scores[start:end] = of_version[start:end]
                expected.append(completion.trained(completion.logprobs) if known else None)
                found.append(completion.trained(scores) if known else None)
                row += 1
        return compare_columns(
            "completions",
            "sampled tokens scored by the trainer's model",
            expected,
            found,
            names=self.recorded.names,
            bound=LOGPROB_BOUND_LOW if low else LOGPROB_BOUND,
        )

    def _first_difference(self, span: Span, sampled: SampledAnswer) -> StageOutcome:
        """Returns the outcome for an answer that was sampled differently: at its first other
        token, or, when all tokens are the same, at its first other log-probability.
        """
        at = sampled.first_other(span)
        if at is None:  # log-probabilities before another token may differ by rounding alone
            at = int(np.flatnonzero(span.logprobs != sampled.logprobs)[0])
        return StageOutcome(
            "completions",
            "differs",
            "answers sampled again",
            f"{self.recorded.names[span.row]}, token {span.start + at}",
            expected=_told(span.tokens, span.logprobs, at),
            found=_told(sampled.tokens, sampled.logprobs, at),
        )


def _told(tokens: Sequence[int], logprobs: Float32, at: int) -> str:
    if at >= len(tokens):
        return f"the end, after {len(tokens)} tokens"
    return f"token {tokens[at]}, log-probability {logprobs[at]:.9g}"
