"""Re-executes a recorded step on this rank, stage by stage. Rank 0 compares."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from common.prompts.prompter import Prompter, PromptStyle
from common.wire.schemas import Float32, Group, Prompt
from learning.ranks import Ranks
from services.data.loaders import load_split
from services.data.stream import permutation
from trainer.audit.comparison import (
    LOGPROB_BOUND,
    LOGPROB_BOUND_LOW,
    NORM_BOUND,
    Outcome,
    Stage,
    checksum,
    columns,
    differences,
)
from trainer.audit.completions import Sampler, Span, is_reproducible, published, seed_of
from trainer.audit.grading import graded_again
from trainer.audit.history import (
    History,
    Reexecuted,
    batch_of,
    config_of,
    fresh,
    recorded_batch,
    versions_of,
)
from trainer.observe.audit import AuditedStart, AuditedStep, AuditRecord, Setup
from trainer.observe.group_files import RecordedGroup
from trainer.policy.scorer import computes_in_bfloat16, load_tokenizer, stop_token_ids
from trainer.policy.scoring import score_batch
from trainer.weights.adapters import static_files

_PATIENCE_S = 7200.0
"""Seconds for which a rank waits for rank 0, which samples and grades."""


@dataclass
class Replay:
    """The replay of one step of the run in `run_dir`, on one rank.

    Args:
        run_dir: the directory of the run.
        step: the step to re-execute.
        stages: those to compare.
        tell: receives each outcome as soon as it is known; rank 0 only.

    Raises ConfigError when the record is missing or damaged.
    """

    run_dir: Path
    step: int
    stages: Sequence[Stage]
    tell: Callable[[Outcome], None]
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.record = AuditRecord(self.run_dir)
        self.line: AuditedStep = self.record.step(self.step)
        self.start: AuditedStart = self.record.start(self.line)
        self.groups: list[RecordedGroup] = recorded_batch(self.run_dir, self.line)
        self.fresh: list[Group] = fresh(self.groups)

    def ranks(self) -> Ranks:
        """Returns this rank among those that the replay needs, which are as many as the run had."""
        trainer = self.start.config["trainer"]
        return Ranks.from_env(
            device_kind="cpu" if self.start.setup.device == "cpu" else "auto",
            timeout_s=_PATIENCE_S,
            shard_size=trainer["shard_size"],
            offload=trainer["offload_optimizer"],
        )

    def run(self, ranks: Ranks) -> list[Outcome]:
        """Returns the outcomes of the stages in order; on ranks above 0 those of none. A
        collective.
        """
        self._ranks = ranks
        self._config = config_of(self.start, self.run_dir, ranks.device.type)
        if is_reproducible(self._config):
            torch.use_deterministic_algorithms(True)  # as in the run
        self._why_rounded = differences(self.start.setup, Setup.here(ranks))
        self._prompts = self._load_prompts() if ranks.is_rank_zero else {}
        if ranks.is_rank_zero:
            self._compare_prompts()
        if self._only("prompts"):
            return self.outcomes
        if self._only("prompts", "rewards"):
            self._compare_rewards()
            return self.outcomes

        if self._bring_to_step():
            self._compare_rewards()
            self._compare_update()
        return self.outcomes

    def _only(self, *stages: Stage) -> bool:
        """Whether nothing but these stages is to be compared."""
        return set(self.stages) <= set(stages)

    def _add(self, outcome: Outcome) -> None:
        is_told = outcome.stage in self.stages or outcome.state == "differs"
        if self._ranks.is_rank_zero and is_told:
            self.outcomes.append(outcome)
            self.tell(outcome)

    # prompts

    def _load_prompts(self) -> dict[str, Prompt]:
        """Returns the rows of the data set by id, in the order of the data set; empty when the
        caller of the Python API gave them.
        """
        if self.start.own_prompts:
            return {}
        rows = load_split(self._config.data, "train", self._config.seed)
        return {row.id: row for row in rows}

    def _compare_prompts(self) -> None:
        if self.start.own_prompts:
            reason = "the caller of the Python API gave the prompts, which the run does not keep"
            self._add(Outcome("prompts", "not compared", reason))
            return
        config = self._config
        ids = list(self._prompts)
        tokenizer = load_tokenizer(config.model)
        prompter = Prompter(tokenizer, PromptStyle.of(config), [])
        detail = f"{len(self.fresh)} prompts of {config.data.source}, their order and their tokens"
        for group in self.fresh:
            place = f"group {group.id}, position {group.position}"
            row = self._prompts.get(group.prompt_id)
            in_order = (
                config.data.curriculum != "none"
                or ids[_place(config.seed, group.position, len(ids))] == group.prompt_id
            )
            if row is None or not in_order:
                found = "no such row" if row is None else "another row"
                wrong = (place, group.prompt_id, found)
            elif (row.prompt, row.ground_truth) != (group.prompt, group.ground_truth):
                was = f"{group.prompt!r}, answer {group.ground_truth!r}"
                wrong = (place, was, f"{row.prompt!r}, answer {row.ground_truth!r}")
            elif config.environment.name:
                continue  # the environment makes the first tokens
            else:
                tokens = list(prompter.all_token_ids([row])[0])
                recorded = group.prompt_token_ids.tolist()
                if tokens == recorded:
                    continue
                wrong = (f"{place}, tokens of the prompt", str(recorded), str(tokens))
            self._add(Outcome("prompts", "differs", detail, *wrong))
            return
        self._add(Outcome("prompts", "equal", detail))

    # weights and completions

    def _bring_to_step(self) -> bool:
        """Takes the models to the weights before the step, verifying every version on the way, and
        compares the completions with what their versions sample. Returns whether the weights are
        those of the run. A collective.
        """
        last = self.step - 1
        needed = [version for version in versions_of(self.fresh) if version <= last]
        wants_completions = "completions" in self.stages
        first = min(needed) if needed and wants_completions else last
        self._history = History(self.record, self.run_dir, self._config, self._ranks, first)
        changed = self._history.changed_file()
        if changed:
            assert self._history.saved is not None
            file = f"{self._history.saved.name}/{changed}"
            self._add(
                Outcome(
                    "weights",
                    "differs",
                    f"the checkpoint {self._history.saved.name}",
                    file,
                    expected="the checksum in its trainer_state.json",
                    found="another: the file has changed since it was written",
                )
            )
            return False
        self._history.load()

        begun = self._history.policy.step
        sampled = _Sampled()
        while True:
            step = self._history.policy.step
            if not self._verify(step, begun):
                return False
            if wants_completions and step in needed:
                self._sample(step, sampled)
            if step == last:
                break
            self._history.advance()
        if wants_completions:
            self._compare_completions(sampled)
        return True

    def _verify(self, step: int, begun: int) -> bool:
        """Compares the weights of a version; returns False when they differ."""
        expected = self.record.weights_at(step)
        found = self._history.policy.digest()
        saved = self._history.saved
        origin = saved.name if saved else f"the initial model ({self._config.model.name})"
        more = f", then {step - begun} recorded updates" if step > begun else ""
        what = f"version {step}, from {origin}{more}:"
        outcome = checksum("weights", what, expected, found)
        is_last = step == self.step - 1
        if outcome.state == "differs" and self._why_rounded and step > begun:
            # The updates were re-executed with another rounding, whose bits nobody can expect.
            reason = f"{what} bits cannot be compared: {self._why_rounded[0]}"
            outcome = Outcome("weights", "not compared", reason)
        if outcome.state == "differs" or is_last:
            self._add(outcome)
        return outcome.state != "differs"

    def _sample(self, version: int, sampled: "_Sampled") -> None:
        """Samples the spans of a version again, and scores all tokens with its weights."""
        policy = self._history.policy
        batch = batch_of(self.groups, self._config, self.step - 1)
        sampled.scores[version] = score_batch(policy.scorer, batch, self._config, self._ranks)
        if self._ranks.is_rank_zero and not sampled.why_not:
            sampled.why_not = self._why_no_engine()
        if self._ranks.broadcast(sampled.why_not):
            return
        spans = self._spans(version) if self._ranks.is_rank_zero else []
        if not self._ranks.is_rank_zero:
            deque(policy.weights(), maxlen=0)  # gathers every tensor and keeps none
            return
        tokenizer = load_tokenizer(self._config.model)
        stops = stop_token_ids(policy.model, tokenizer, self._config.sampling.stop_token_ids)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="rlhf-replay-")))
            files = static_files(self._config, policy.model, tokenizer, folder / "model")
            directory = stack.enter_context(published(policy.weights(), files, version))
            completions = Sampler(self._config, directory, stops).sample(spans)
        for span, completion in zip(spans, completions, strict=True):
            sampled.spans.append((span, completion))

    def _why_no_engine(self) -> str:
        """Returns why the engine cannot sample again; empty when it can."""
        if self.start.engine != "embedded":
            return f"{self.start.engine} sampled them"
        if self._config.lora.publishes_adapter:
            return "an adapter sampled them"
        if self._config.environment.name:
            return "they are answers in episodes"
        return ""

    def _spans(self, version: int) -> list[Span]:
        """Returns the spans that a version sampled, in batch order."""
        spans = []
        row = 0
        for number, (item, seed) in enumerate(zip(self.groups, self.line.seeds, strict=True)):
            group = item.group
            for index, completion in enumerate(group.completions):
                tokens = completion.token_ids.tolist()
                for of_version, start, end in completion.weight_versions:
                    if of_version != version or item.reused:
                        continue
                    span = Span(
                        row=row,
                        name=f"group {number} ({group.id}), completion {index}",
                        prompt=group.prompt_token_ids.tolist(),
                        earlier=tokens[:start],
                        seed=seed_of(seed, index),
                        version=version,
                        start=start,
                        tokens=tokens[start:end],
                        logprobs=completion.logprobs[start:end].tolist(),
                    )
                    spans.append(span)
                row += 1
        return spans

    def _compare_completions(self, sampled: "_Sampled") -> None:
        if not self._ranks.is_rank_zero:
            return
        self._add(self._completions(sampled))

    def _completions(self, sampled: "_Sampled") -> Outcome:
        """Returns the outcome of the completions: token by token where the engine sampled again,
        and otherwise by the log-probability of every token.
        """
        twice = _equal_seeds(self._spans_of_all())
        if twice:
            return Outcome("completions", "differs", "the seeds of a group", *twice)
        count = 0
        rounded = 0
        exact = is_reproducible(self._config) and not self._why_rounded
        for span, completion in sampled.spans:
            tokens = completion.token_ids.tolist()[span.start :]
            logprobs = completion.logprobs[span.start :]
            count += len(span.tokens)
            if tokens == span.tokens and logprobs.tolist() == span.logprobs:
                continue
            if exact:
                return _first_token(span, tokens, logprobs)
            rounded += 1

        forced = self._forced(sampled)
        if forced.state == "differs" or sampled.why_not:
            return forced
        what = f"{len(sampled.spans)} completions of {count} tokens sampled again"
        if not rounded:
            return Outcome("completions", "equal", what + self._of_reused())
        detail = (
            f"{what}, {len(sampled.spans) - rounded} equal; the others are within rounding: "
            f"{forced.detail} (without reproducible, the batch of a token changes its last bits)"
        )
        return Outcome("completions", "close", detail)

    def _of_reused(self) -> str:
        count = sum(item.reused for item in self.groups)
        return f"; {count} reused groups belong to earlier steps" if count else ""

    def _forced(self, sampled: "_Sampled") -> Outcome:
        """Compares the log-probability of every sampled token with that under the weights of its
        version.
        """
        low = computes_in_bfloat16(self._config.model, self._ranks)
        low |= self.start.setup.device != "cpu" or self.start.engine != "embedded"
        bound = LOGPROB_BOUND_LOW if low else LOGPROB_BOUND
        expected: list[Float32 | None] = []
        found: list[Float32 | None] = []
        row = 0
        for item in self.groups:
            for completion in item.group.completions:
                known = completion.weight_version in sampled.scores and not item.reused
                expected.append(completion.trained(completion.logprobs) if known else None)
                scores = np.zeros(len(completion.token_ids), np.float32)
                for version, start, end in completion.weight_versions:
                    if version in sampled.scores:
                        of_version = completion.spread(sampled.scores[version][row])
                        scores[start:end] = of_version[start:end]
                found.append(completion.trained(scores) if known else None)
                row += 1
        outcome = columns(
            "completions",
            "sampled tokens scored by the trainer's model",
            expected,
            found,
            names=self._names(),
            bound=bound,
        )
        if sampled.why_not and outcome.state != "differs":
            detail = f"not sampled again, because {sampled.why_not}: {outcome.detail}"
            return Outcome("completions", "close", detail)
        return outcome

    def _spans_of_all(self) -> list[tuple[str, list[int]]]:
        """Returns each group's name and the seeds of its completions."""
        return [
            (
                f"group {number} ({item.group.id})",
                [seed_of(seed, index) for index in range(len(item.group.completions))],
            )
            for number, (item, seed) in enumerate(zip(self.groups, self.line.seeds, strict=True))
        ]

    def _names(self) -> list[str]:
        """Returns the name of every row of the batch, for messages."""
        return [
            f"group {number} ({item.group.id}), completion {index}"
            for number, item in enumerate(self.groups)
            for index in range(len(item.group.completions))
        ]

    # rewards

    def _compare_rewards(self) -> None:
        if not self._ranks.is_rank_zero or "rewards" not in self.stages:
            return
        if self.start.own_rewards:
            reason = "the caller of the Python API gave the reward functions"
            self._add(Outcome("rewards", "not compared", reason))
        elif self._config.environment.name:
            self._add(Outcome("rewards", "not compared", "the environment gave them"))
        else:
            self._add(graded_again(self._config, self.fresh, self._prompts))

    # the update

    def _compare_update(self) -> None:
        """Re-executes the update and compares what came of it. A collective."""
        if self._only("prompts", "weights", "completions", "rewards"):
            return
        again = self._history.advance()
        if not self._ranks.is_rank_zero:
            return
        bound = LOGPROB_BOUND if self._why_rounded else 0.0
        self._add(self._logprobs(again, bound))
        recorded = [row for item in self.groups for row in item.advantages]
        assert again.batch.advantages is not None
        advantages = columns(
            "advantages",
            "advantages",
            recorded,
            again.batch.advantages,
            names=self._names(),
            bound=bound,
        )
        self._add(advantages)
        self._add(self._gradients(again))
        if self._why_rounded and again.line.weights != self.line.weights:
            reason = f"bits cannot be compared: {self._why_rounded[0]}"
            self._add(Outcome("new weights", "not compared", reason))
            return
        what = f"version {self.step}:"
        self._add(checksum("new weights", what, self.line.weights, again.line.weights))
        if self.line.critic != again.line.critic:
            what = "the critic's weights after the step"
            self._add(checksum("new weights", what, self.line.critic, again.line.critic))

    def _logprobs(self, again: Reexecuted, bound: float) -> Outcome:
        recorded = [row for item in self.groups for row in item.logprobs]
        found: Sequence[Float32 | None] = [None] * len(recorded)
        scored = again.batch.old_logprobs or again.update.logprobs
        if scored is not None:
            found = scored
        outcome = columns(
            "logprobs",
            "log-probabilities of the policy",
            recorded,
            found,
            names=self._names(),
            bound=bound,
        )
        if outcome.state == "differs" or bound:
            return outcome
        others = {
            "the reference's log-probabilities": (
                self.line.reference_logprobs,
                again.line.reference_logprobs,
            ),
            "the critic's values": (self.line.values, again.line.values),
        }
        for what, (expected, is_now) in others.items():
            if expected != is_now:
                return checksum("logprobs", what, expected, is_now)
        more = [what for what, (expected, _) in others.items() if expected]
        return Outcome("logprobs", "equal", ", ".join([outcome.detail, *more]))

    def _gradients(self, again: Reexecuted) -> Outcome:
        expected = list(zip(self.line.norms, self.line.gradients, strict=True))
        found = list(zip(again.line.norms, again.line.gradients, strict=True))
        if len(expected) != len(found):
            where = "number of updates"
            sizes = (str(len(expected)), str(len(found)))
            return Outcome("gradients", "differs", "updates of the step", where, *sizes)
        for number, ((norm, sum_), (norm_now, sum_now)) in enumerate(
            zip(expected, found, strict=True)
        ):
            close = abs(norm - norm_now) <= NORM_BOUND * abs(norm)
            if sum_ == sum_now and norm == norm_now:
                continue
            if self._why_rounded and close:
                continue
            was = f"norm {norm!r}, checksum {sum_}"
            is_now = f"norm {norm_now!r}, checksum {sum_now}"
            return Outcome(
                "gradients", "differs", "gradients", f"update {number}", expected=was, found=is_now
            )
        norms = ", ".join(f"{norm:.6g}" for norm, _ in expected) or "none"
        if self._why_rounded:
            detail = f"norms {norms} within {NORM_BOUND:g}, because {self._why_rounded[0]}"
            return Outcome("gradients", "close", detail)
        sums = ", ".join(sum_ for _, sum_ in expected)
        return Outcome("gradients", "equal", f"norm {norms}, checksum {sums}")


@dataclass
class _Sampled:
    """What the versions of a step gave again."""

    spans: list[tuple[Span, Any]] = field(default_factory=list)
    """With the completion that begins with the span's earlier tokens; rank 0 only."""
    scores: dict[int, list[Float32]] = field(default_factory=dict)
    """By version, [L] for each row of the batch."""
    why_not: str = ""
    """Why the engine did not sample again; rank 0 only."""


def _place(seed: int, position: int, size: int) -> int:
    """Returns the row of the data set at a position of the stream of prompts."""
    epoch, place = divmod(position, size)
    return int(permutation(seed, epoch, size)[place])


def _equal_seeds(groups: Sequence[tuple[str, list[int]]]) -> tuple[str, str, str] | None:
    """Returns where two completions of a group have one seed, what was expected and what was found;
    None when all seeds differ.
    """
    for name, seeds in groups:
        if len(set(seeds)) != len(seeds):
            return name, f"{len(seeds)} different seeds", f"{len(set(seeds))}"
    return None


def _first_token(span: Span, tokens: list[int], logprobs: Float32) -> Outcome:
    """Returns the outcome for a completion that was sampled differently."""
    at = next(
        (
            index
            for index, (one, other) in enumerate(zip(span.tokens, tokens, strict=False))
            if one != other or span.logprobs[index] != float(logprobs[index])
        ),
        min(len(span.tokens), len(tokens)),
    )

    def told(ids: Sequence[int], values: Sequence[float]) -> str:
        if at >= len(ids):
            return f"the end after {len(ids)} tokens"
        return f"token {ids[at]}, log-probability {values[at]:.9g}"

    return Outcome(
        "completions",
        "differs",
        f"sampled again by version {span.version}",
        f"{span.name}, token {span.start + at}",
        expected=told(span.tokens, span.logprobs),
        found=told(tokens, logprobs.tolist()),
    )
