"""Re-executes a recorded step on this rank, stage by stage. Rank 0 compares."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from common.process import watchdog
from common.wire.schemas import Prompt
from learning.device import reproducible_numbers
from learning.ranks import Ranks
from trainer.audit.comparison import Stage, StageOutcome, compare_checksums, differences
from trainer.audit.completions import Completions, requests_of_groups, sampling_versions
from trainer.audit.episodes import PlayedAgain, play_again
from trainer.audit.grading import answers_of_groups, graded_again
from trainer.audit.history import Reexecuted, WeightHistory
from trainer.audit.prompts import compare_prompts, load_rows
from trainer.audit.recorded import RecordedStep, config_of
from trainer.audit.updates import compare_update
from trainer.observe.audit import AuditRecord, Setup
from trainer.policy.scorer import load_tokenizer, stop_token_ids

_JOIN_S = 600.0
"""Seconds for all ranks to join."""
_OF_UPDATE: frozenset[Stage] = frozenset({"logprobs", "advantages", "gradients", "new weights"})


@dataclass
class StepReexecution:
    """The re-execution of one step of a run, on one rank.

    Args:
        run_dir: the directory of the run.
        step: the step to re-execute.
        stages: those to compare.
        tell: receives each outcome as soon as it is known, on rank 0.
        recorded_tools: of episodes, take what the tools said from the record and call none.

    Raises ConfigError when the record is missing or damaged.
    """

    run_dir: Path
    step: int
    stages: Sequence[Stage]
    tell: Callable[[StageOutcome], None]
    recorded_tools: bool = False
    outcomes: list[StageOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._record = AuditRecord(self.run_dir)
        self.recorded = RecordedStep.read(self.run_dir, self._record, self.step)

    @cached_property
    def _versions(self) -> list[int]:
        """The versions that sample completions again, oldest first."""
        return sampling_versions(self.recorded) if "completions" in self.stages else []

    def ranks(self) -> Ranks:
        """Returns this rank among those of the re-execution, which are as many as the run had."""
        return Ranks.from_env(_JOIN_S, config_of(self.recorded.start, self.run_dir))

    def run(self, ranks: Ranks) -> list[StageOutcome]:
        """Compares the stages and returns their outcomes in order; those of a rank above 0 are
        empty. A collective.

        Where the weights before the step are others, no later stage can be compared.
        """
        self._ranks = ranks
        start = self.recorded.start
        self._config = config_of(start, self.run_dir, ranks.device.type)
        reasons = differences(start.setup, Setup.here(ranks))
        self._why_rounded = "; ".join(reasons)

        with reproducible_numbers(self._config.reproducible):
            if "checkpoint" in self.stages:
                self._compare_checkpoint()
            if set(self.stages) - {"checkpoint"}:
                self._compare()
        return self.outcomes

    def _add(self, outcome: StageOutcome) -> None:
        """Adds the outcome of a wanted stage, or of one that ends the re-execution; rank 0 only."""
        if not self._ranks.is_rank_zero:
            return
        if outcome.stage in self.stages or outcome.state == "differs":
            self.outcomes.append(outcome)
            self.tell(outcome)

    def _compare(self) -> None:
        """Compares the stages. A collective."""
        watchdog.at("drawing the prompts again")
        rows: dict[str, Prompt] = {}
        if self._ranks.is_rank_zero:
            rows = load_rows(self.recorded, self._config)
            self._add(compare_prompts(self.recorded, self._config, rows))
        is_episodes = bool(self._config.environment.name)
        # An episode can only be played, and so graded, with the model's tokens.
        without_models: set[Stage] = {"prompts"} if is_episodes else {"prompts", "rewards"}
        # These stages need no weights: what loads and executes updates is left out.
        if without_models.issuperset(self.stages):
            self._compare_rewards(rows, None)
            return

        history = self._loaded(min([self.step - 1, *self._versions]))
        if history is None:
            return
        played: PlayedAgain | None = None
        if is_episodes and self._ranks.is_rank_zero:
            played = self._played(history, rows)
        completions = self._completions(played)
        if not self._bring_to_step(history, completions):
            return  # with other weights, no later stage can be compared
        if played is not None:
            self._add(played.outcome)
        if "completions" in self.stages and self._ranks.is_rank_zero:
            self._add(completions.outcome())
        self._compare_rewards(rows, played)
        if not _OF_UPDATE.isdisjoint(self.stages):
            watchdog.at(f"re-executing step {self.step}")
            for outcome in self._compared(history.advance()):
                self._add(outcome)

    def _played(self, history: WeightHistory, rows: Mapping[str, Prompt]) -> PlayedAgain:
        """Plays the episodes of the step again; with `recorded_tools` they are taken from the
        record instead.
        """
        if self.recorded_tools:
            reason = "what the tools said is taken from the record"
            return PlayedAgain(StageOutcome("episodes", "not compared", reason))
        stops = stop_token_ids(history.policy.model, load_tokenizer(self._config.model))
        return play_again(self.recorded, self._config, rows, stops)

    def _compare_checkpoint(self) -> None:
        """Compares the weights in the checkpoint of the step. A collective."""
        history = self._loaded(self.step)
        if history is None:
            return
        if history.policy.step < self.step:
            self._add(StageOutcome("checkpoint", "not compared", "the step has none"))
            return
        recorded = self._record.weights_at(self.step)
        what = f"the weights in {history.origin}"
        self._add(compare_checksums("checkpoint", what, recorded, history.policy.digest()))

    def _loaded(self, first: int) -> WeightHistory | None:
        """Returns the models of the newest checkpoint of at most the step `first`; None if it is
        damaged. A collective.
        """
        history = WeightHistory(self._record, self.run_dir, self._config, self._ranks, first=first)
        changed = history.changed_file()
        if not changed:
            history.load()
            return history
        outcome = StageOutcome(
            "weights",
            "differs",
            f"the checkpoint {history.origin}",
            f"{history.origin}/{changed}",
            expected="the checksum in its trainer_state.json",
            found="another: the file has changed since it was written",
        )
        self._add(outcome)
        return None

    def _completions(self, played: PlayedAgain | None) -> Completions:
        """Returns the completions that are to be sampled again. A collective."""
        why_not = ""
        if self.recorded.start.engine != "embedded":
            why_not = f"{self.recorded.start.engine} sampled them"
        elif self._config.lora.publishes_adapter:
            why_not = "the engine sampled them with an adapter"
        elif played is not None and played.outcome.state != "equal":
            why_not = "their episodes were not played again"
        return Completions(
            recorded=self.recorded,
            config=self._config,
            ranks=self._ranks,
            requests=requests_of_groups(self.recorded) if played is None else played.requests,
            why_not=self._ranks.broadcast(why_not),
            why_rounded=self._why_rounded,
        )

    def _bring_to_step(self, history: WeightHistory, completions: Completions) -> bool:
        """Takes the models to the weights before the step and verifies every version; on the way
        each version samples its completions again. Returns whether the weights are those of the
        run. A collective.
        """
        begun = history.policy.step
        again: Reexecuted | None = None
        while True:
            step = history.policy.step
            outcome = self._verified(history, begun, again)
            is_last = step == self.step - 1
            if is_last or outcome.state == "differs":
                self._add(outcome)
            if outcome.state == "differs":
                return False
            if step in self._versions:
                watchdog.at(f"sampling the completions of version {step} again")
                completions.take(history.policy)
            if is_last:
                return True
            watchdog.at(f"re-executing step {step + 1}, which is before step {self.step}")
            again = history.advance()

    def _verified(
        self, history: WeightHistory, begun: int, again: Reexecuted | None
    ) -> StageOutcome:
        """Compares the models' present weights with the recorded ones; `again` is the re-executed
        step that made them, None for weights from a checkpoint. A collective.
        """
        step = history.policy.step
        updates = step - begun
        what = f"version {step} from {history.origin}"
        if updates:
            what += f" and {updates} recorded update" + ("s" if updates > 1 else "")
        expected = self._record.weights_at(step)
        outcome = compare_checksums("weights", what, expected, history.policy.digest())
        if outcome.state == "equal" or again is None:
            return outcome

        # The weights before this update were those of the run: its own record is another one.
        differing = [each for each in self._compared(again) if each.state == "differs"]
        first = self._ranks.broadcast(differing[0] if differing else None)
        if first is not None:
            return replace(
                outcome,
                where=f"the record of step {step} (groups/step_{step:06d}.zip or its line in "
                f"audit.jsonl), at {first.stage}: {first.where}",
                expected=first.expected,
                found=first.found,
            )
        if self._why_rounded:
            # The updates were executed with another rounding, so that nobody can expect the bits.
            reason = f"{what}: no bits, because {self._why_rounded}"
            return StageOutcome("weights", "not compared", reason)
        return outcome

    def _compared(self, again: Reexecuted) -> list[StageOutcome]:
        """Returns the outcomes of the stages of an update; none on ranks above 0."""
        return list(compare_update(again, self._why_rounded)) if self._ranks.is_rank_zero else []

    def _compare_rewards(self, rows: dict[str, Prompt], played: PlayedAgain | None) -> None:
        if "rewards" not in self.stages or not self._ranks.is_rank_zero:
            return
        watchdog.at("grading the answers again")
        if "rewards" in self.recorded.start.given:
            reason = "the caller of the Python API gave the reward functions"
            outcome = StageOutcome("rewards", "not compared", reason)
        elif played is None:
            outcome = graded_again(self._config, answers_of_groups(self.recorded, rows))
        elif played.outcome.state == "not compared":
            outcome = StageOutcome("rewards", "not compared", played.outcome.detail)
        elif played.wrong_reward is not None:
            outcome = played.wrong_reward
        elif played.answers:
            outcome = graded_again(self._config, played.answers)
        else:
            given = f"{played.given} rewards given again by {self._config.environment.name}"
            outcome = StageOutcome("rewards", "equal", given)
        self._add(outcome)
