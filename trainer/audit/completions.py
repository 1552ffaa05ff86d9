"""Samples the completions of a step again, from the weights of their versions.

With `reproducible`, and on a machine like that of the run, tokens and log-probabilities are
compared bit for bit. Otherwise the batch in which the engine computed a token, or the machine,
changes its last bits, and near a tie the token itself; and some engines cannot sample again at all.
Then the log-probability of every recorded token, under the weights of its version, must be what the
engine reported, within a bound.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from common.clients.rollout import sample_seed
from common.settings.config import Config
from common.wire.schemas import Float32
from learning.ranks import Ranks
from trainer.audit.comparison import LOGPROB_BOUND, LOGPROB_BOUND_LOW, StageOutcome, compare_columns
from trainer.audit.engine import AuditEngine, Request, SampledAnswer, Span
from trainer.audit.recorded import RecordedStep
from trainer.policy.policy import Policy
from trainer.policy.scorer import computes_in_bfloat16, load_tokenizer, stop_token_ids
from trainer.policy.scoring import score_batch
from trainer.weights.adapters import static_files
from trainer.weights.versions import version_name, write_version


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
            # Reused groups were sampled for an earlier step, by versions that may be gone.
            if not item.reused:
                seed = sample_seed(group_seed, index)
                end = len(completion.token_ids)
                found.append(Request(row=row, prompt=prompt, seed=seed, start=0, end=end))
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
    _tokens: int = 0
    """Tokens that were sampled again."""
    _rounded: int = 0
    """Tokens of answers whose log-probabilities differ in their last bits."""
    _ties: int = 0
    """Tokens that another rounding would have sampled too."""
    _difference: StageOutcome | None = None
    """The outcome for the first answer that came out differently."""
    _scores: dict[int, list[Float32]] = field(default_factory=dict)
    """By version, [L] for every row of the batch."""

    @property
    def _is_exact(self) -> bool:
        """Whether an answer has to be equal bit for bit."""
        return self.config.reproducible and not self.why_rounded

    def take(self, policy: Policy) -> None:
        """Samples and scores the tokens of version `policy.step`. A collective."""
        batch = self.recorded.batch(self.config)
        policy.assign(batch)
        scores = score_batch(policy.scorer, batch, self.config, self.ranks)
        self._scores[policy.step] = batch.gathered(scores, self.ranks)
        if self.why_not:
            return
        if not self.ranks.is_rank_zero:
            deque(policy.weights(), maxlen=0)  # gathers every tensor and keeps none
            return

        spans = self._spans(policy.step)
        tokenizer = load_tokenizer(self.config.model)
        stops = stop_token_ids(policy.model, tokenizer, self.config.sampling.stop_token_ids)
        with TemporaryDirectory(prefix="rlhf-audit-") as name:
            folder = Path(name)
            files = static_files(self.config, policy.model, tokenizer, folder / "model")
            write_version(policy.weights(), files, folder, run_id="audit", version=policy.step)
            engine = AuditEngine(self.config, folder / version_name(policy.step), stops)
            self._sample(engine, spans)

    def _sample(self, engine: AuditEngine, spans: list[Span]) -> None:
        """Samples spans. After a token that rounding may have decided otherwise, the rest of its
        span is sampled again, with the recorded token before it.
        """
        while spans:
            left: list[Span] = []
            for span, sampled in zip(spans, engine.sample(spans), strict=True):
                at = sampled.first_other(span)
                # Beyond the recorded tokens there is none that rounding could have decided.
                may_round = at is not None and at < len(span.tokens) and not self._is_exact
                if at is not None and may_round and engine.could_sample(span, at):
                    # Another rounding takes the other token, and from there on everything differs.
                    self._ties += 1
                    left.append(span.after(at + 1))
                    kept = replace(span, tokens=span.tokens[:at], logprobs=span.logprobs[:at])
                    self._compare(kept, SampledAnswer(kept.tokens, sampled.logprobs[:at]))
                else:
                    self._compare(span, sampled)
            spans = [span for span in left if span.tokens]

    def _compare(self, span: Span, sampled: SampledAnswer) -> None:
        """Compares what was sampled again with the recorded tokens."""
        self._tokens += len(span.tokens)
        at = sampled.first_other(span)
        if at is None:
            # By their bits, in which 0.0 is not -0.0.
            apart = span.logprobs.view(np.int32) != sampled.logprobs.view(np.int32)
            if apart.any():
                self._rounded += len(span.tokens)
                if self._is_exact:
                    at = int(apart.argmax())
        # The first one is told; those after it may follow from it.
        if at is None or self._difference is not None:
            return
        self._difference = StageOutcome(
            "completions",
            "differs",
            "answers sampled again",
            f"{self.recorded.names[span.request.row]}, token {span.start + at}",
            expected=_shown(span.tokens, span.logprobs, at),
            found=_shown(sampled.tokens, sampled.logprobs, at),
        )

    def _spans(self, version: int) -> list[Span]:
        """Returns the tokens that a version sampled, in batch order."""
        rows = self.recorded.completions
        found = []
        for request in self.requests:
            completion = rows[request.row]
            tokens = completion.token_ids.tolist()
            for of_version, first, last in completion.weight_versions:
                start = max(first, request.start)
                end = min(last, request.end)
                if of_version == version and start < end:
                    span = Span(
                        request=request,
                        earlier=tokens[request.start : start],
                        tokens=tokens[start:end],
                        logprobs=completion.logprobs[start:end],
                    )
                    found.append(span)
        return found

    def outcome(self) -> StageOutcome:
        """Compares what was sampled; rank 0 only."""
        difference = self._equal_seeds() or self._difference
        if difference is not None:
            return difference
        scored = self._scored()
        if scored.state == "differs":
            return scored
        if self.why_not:
            detail = f"not sampled again, because {self.why_not}; {scored.detail}"
            return StageOutcome("completions", "close", detail)

        tokens = self._tokens + self._ties
        detail = f"{tokens} tokens of {len(self.requests)} answers sampled again"
        reused = sum(item.reused for item in self.recorded.groups)
        if reused:
            detail += f" ({reused} reused groups belong to earlier steps)"
        if not self._rounded and not self._ties:
            return StageOutcome("completions", "equal", detail)
        ties = f" except {self._ties} that rounding decides" if self._ties else ""
        why = "as they may without reproducible"
        if self.config.reproducible:
            why = f"because {self.why_rounded}"
        detail += (
            f", equal{ties}; the log-probabilities of {self._rounded} differ in their last bits, "
            f"{why} ({scored.detail})"
        )
        return StageOutcome("completions", "close", detail)

    def _equal_seeds(self) -> StageOutcome | None:
        """Returns the outcome for answers to one prompt with one seed; None when there are none."""
        names = self.recorded.names
        known: dict[tuple[int, ...], int] = {}
        for request in self.requests:
            # They would be equal, and the group would compare an answer with itself.
            row = known.setdefault((request.seed, *request.prompt), request.row)
            if row != request.row:
                return StageOutcome(
                    "completions",
                    "differs",
                    "two answers to one prompt have one seed",
                    names[request.row],
                    expected=f"another seed than {names[row]}",
                    found=str(request.seed),
                )
        return None

    def _scored(self) -> StageOutcome:
        """Compares the log-probability of every sampled token with that under the weights of its
        version.
        """
        setup = self.recorded.start.setup
        low = computes_in_bfloat16(self.config.model, self.ranks)
        # SGLang and GPUs round every layer in their own way, whatever the dtype.
        low |= setup.device != "cpu" or self.recorded.start.engine != "embedded"
        expected: list[Float32 | None] = []
        found: list[Float32 | None] = []
        for row, completion in enumerate(self.recorded.completions):
            scores = np.zeros(len(completion.token_ids), np.float32)
            versions = completion.weight_versions
            # Versions that do not sample again, such as those of reused groups, have no scores.
            is_known = all(version in self._scores for version, _, _ in versions)
            for version, start, end in versions if is_known else ():
                scores[start:end] = completion.spread(self._scores[version][row])[start:end]
            expected.append(completion.trained(completion.logprobs) if is_known else None)
            found.append(completion.trained(scores) if is_known else None)
        return compare_columns(
            "completions",
            "sampled tokens scored by the trainer's model",
            expected,
            found,
            names=self.recorded.names,
            bound=LOGPROB_BOUND_LOW if low else LOGPROB_BOUND,
        )


def _shown(tokens: Sequence[int], logprobs: Float32, at: int) -> str:
    if at >= len(tokens):
        return f"the end, after {len(tokens)} tokens"
    return f"token {tokens[at]}, log-probability {logprobs[at]:.9g}"
