"""A supervised fine-tuning run: rank 0 has the data, every rank computes its share of every
update.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from common.models.rotary import switch_length
from common.process import garbage, watchdog
from common.process.logs import set_run
from common.process.run_lock import RunLock
from common.process.topology import Topology
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import Config
from common.wire.codec import decode, encode
from common.wire.schemas import Prompt
from learning.ranks import Ranks
from services.data.sft_examples import Examples
from trainer.observe.run_dir import Recorder, console, tell
from trainer.policy.checkpoint import Checkpoints, RunState, tokenizer_files
from trainer.policy.identity import Identity, identity
from trainer.policy.policy import Policy
from trainer.policy.scorer import context_length, load_tokenizer, stop_token_ids
from trainer.policy.trained_prompts import TRAINED_PROMPTS, TrainedPrompts, style_of
from trainer.sft.learner import Learner
from trainer.sft.log import SftLog
from trainer.sft.rows import Batches, Encoder, TrainingSequence
from trainer.start.rank import started
from trainer.trackers.base import check
from trainer.weights.adapters import static_files

TASK = "sft"


def run(config: Config, topology: Topology, examples: Examples | None) -> None:
    """Trains on this rank until the last step; only rank 0 gets `examples`."""
    with started(config, topology, TASK) as (ranks, lock), ExitStack() as stack:
        training = SftRun(
            config, ranks, lock=lock, examples=examples, console=console(), stack=stack
        )
        garbage.collect_less_often(garbage.OF_TRAINER)
        training.train()
        ranks.barrier()


@dataclass
class _RankZero:
    """What only rank 0 has."""

    log: SftLog
    examples: Sequence[Prompt]
    batches: Batches
    trained: TrainedPrompts
    lock: RunLock
    identity: Identity


@dataclass
class _Data:
    """What every rank knows of the data."""

    positions: int
    """Examples of the whole run, each counted as often as it is learned."""
    total_steps: int
    num_held_out: int
    held_out: list[TrainingSequence]


class SftRun:
    """The run on this rank. Only rank 0 has `lock` and `examples`; `stack` closes everything.

    The constructor loads or resumes the model. It is a collective, like `train`. Raises ConfigError
    or another ServiceError.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        *,
        lock: RunLock | None,
        examples: Examples | None,
        console: Console,
        stack: ExitStack,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._stack = stack
        run_dir = config.trainer.run_dir
        assert run_dir is not None, "`load` sets it"
        if ranks.is_rank_zero:
            check(config.trackers)
        watchdog.at("loading the model")
        self._policy, _, saved = Policy.resume(config, ranks, run_dir, "answers")
        self._learner = Learner(self._policy)
        self._checkpoints = Checkpoints(
            run_dir / "checkpoints",
            ranks,
            config.checkpoint.keep,
            lambda: tokenizer_files(run_dir / "model"),
        )
        # Held-out loss after `_evaluated_step` steps.
        self._loss: float | None = None
        self._evaluated_step = -1

        self._leader: _RankZero | None = None
        message = b""
        if ranks.is_rank_zero:
            assert lock is not None
            assert examples is not None
            self._leader, message = self._begin(
                run_dir, lock, examples, console=console, saved=saved
            )
        self._data = decode(ranks.broadcast(message), _Data)
        self._policy.total_steps = self._data.total_steps

    def _begin(
        self,
        run_dir: Path,
        lock: RunLock,
        examples: Examples,
        *,
        console: Console,
        saved: Path | None,
    ) -> tuple[_RankZero, bytes]:
        """Reads the data and opens the log; returns rank 0's parts and the message to the other
        ranks.
        """
        config = self._config
        policy = self._policy
        settings = config.trainer
        set_run(lock.run)
        continuing = f", continuing after step {policy.step}" if policy.step else ""
        tell(console, f"run directory {run_dir}{continuing}")

        tokenizer = load_tokenizer(config.model)
        static_files(config, policy.model, tokenizer, run_dir / "model")
        encoder = self._encoder(tokenizer)
        train = [encoder.rows(example) for example in examples.train]
        held_out = [encoder.rows(example) for example in examples.held_out]

        positions = len(train) * settings.num_epochs
        if settings.max_steps is not None:
            positions = settings.max_steps * settings.batch_size
        total_steps = -(-positions // settings.batch_size)  # the last batch may be smaller
        tokens = sum(int(row.learned.sum()) for row in chain.from_iterable(train))
        tell(
            console,
            f"{len(train)} examples with {tokens:,} tokens to learn, {len(held_out)} held out; "
            f"{total_steps} steps",
        )

        recorder = Recorder(
            run_dir,
            config,
            console,
            step=policy.step,
            run_id=lock.run,
            files=("metrics",),
        )
        gpus = policy.ranks.world_size if policy.ranks.on_gpu else 0
        log = SftLog(self._stack.enter_context(recorder), total_steps, gpus)
        if policy.step >= total_steps:
            recorder.say(
                f"already finished: {policy.step} steps were trained before, this run has "
                f"{total_steps}, and their result is below"
            )
        trained = TrainedPrompts.of(saved or config.model.name)
        trained.style = style_of(PromptStyle.of(config))
        leader = _RankZero(
            log=log,
            examples=examples.train,
            batches=Batches(train, settings.batch_size, config.seed),
            trained=trained,
            lock=lock,
            identity=identity(config, "answers"),
        )
        data = _Data(
            positions=positions,
            total_steps=total_steps,
            num_held_out=len(held_out),
            held_out=list(chain.from_iterable(held_out)),
        )
        return leader, encode(data)

    def _encoder(self, tokenizer: Any) -> Encoder:
        config = self._config
        model = self._policy.model
        stops = stop_token_ids(model, tokenizer, config.sampling.stop_token_ids)
        prompter = Prompter(tokenizer, PromptStyle.of(config), stops)
        vocabulary = model.get_input_embeddings().num_embeddings
        # All rows are within the length up to which LongRoPE computes each independently.
        switches_at = switch_length(model.config.get_text_config().to_dict())
        limits = [context_length(config.model), switches_at]
        context = min((limit for limit in limits if limit is not None), default=None)
        return Encoder(prompter, vocabulary, context)

    def train(self) -> Path:
        """Trains until the last step, evaluates and saves; returns the checkpoint."""
        policy = self._policy
        evaluates_every = self._config.evaluation.every
        saves_every = self._config.checkpoint.every
        leader = self._leader
        if policy.step == 0:
            self._evaluate()
        progress: AbstractContextManager[Any] = nullcontext()
        if leader:
            progress = leader.log.recorder.progress(policy.step, self._data.total_steps)
        with self._checkpoints, progress:
            if leader:
                leader.log.begin()
            while policy.step < self._data.total_steps:
                self._step()
                if policy.step == self._data.total_steps:
                    break
                if evaluates_every and policy.step % evaluates_every == 0:
                    self._evaluate()
                if saves_every and policy.step % saves_every == 0:
                    self._save()
            return self._finish()

    def _step(self) -> None:
        policy = self._policy
        leader = self._leader
        self._checkpoints.check()
        # Every rank and step has dropout of its own, which a resumed run repeats.
        torch.manual_seed((policy.seed * 4096 + self._ranks.rank) % 2**63)
        watchdog.at(f"the update of step {policy.step + 1}")
        if leader:
            leader.lock.check()
        with leader.log.clock.stage("update") if leader else nullcontext():
            body = b""
            if leader:
                learned = leader.batches.indices(policy.step, self._data.positions)
                body = encode(leader.batches.rows(learned))
                leader.trained.add((leader.examples[index].prompt, "") for index in learned)
            rows = decode(self._ranks.broadcast(body), list[TrainingSequence])
            update = self._learner.learn(rows)
        if leader:
            size = self._config.trainer.batch_size
            before = (policy.step - 1) * size
            done = min(policy.step * size, self._data.positions)
            leader.log.step(
                policy.step,
                epoch=done / len(leader.batches),
                examples=done - before,
                update=update,
            )

    def _evaluate(self) -> None:
        if not self._data.held_out:
            return
        watchdog.at(f"the evaluation at step {self._policy.step}")
        leader = self._leader
        with leader.log.clock.stage("evaluation") if leader else nullcontext():
            self._loss = self._learner.loss(self._data.held_out)
            self._evaluated_step = self._policy.step
        if leader:
            leader.log.evaluation(self._evaluated_step, self._loss, self._data.num_held_out)

    def _save(self) -> Path:
        step = self._policy.step
        leader = self._leader
        watchdog.at(f"the checkpoint of step {step}")
        rating = None
        if self._loss is not None and self._evaluated_step == step:
            rating = -self._loss  # the best checkpoint has the highest rating, the lowest loss
        state = RunState(
            step=step,
            position=step * self._config.trainer.batch_size,
            run_id=leader.lock.run if leader else "",
            kl_coef=0.0,
            mean_reward=rating,
            identity=leader.identity if leader else {},
        )
        files = {TRAINED_PROMPTS: leader.trained.file()} if leader else {}
        snapshots = self._policy.snapshots(self._checkpoints.gathered)
        return self._checkpoints.save(state, snapshots, files)

    def _finish(self) -> Path:
        if self._evaluated_step != self._policy.step:
            self._evaluate()
        saved = self._checkpoints.newest()
        if saved is None or saved.name != self._checkpoints.name(self._policy.step):
            saved = self._save()
            self._checkpoints.wait()
        if self._leader:
            recorder = self._leader.log.recorder
            recorder.report(saved)
            model = saved
            if self._config.lora.rank:
                model = recorder.directory / "merged"
                recorder.say(f"merge:      rlhf export {saved} {model}")
            source = self._config.data.source
            recorder.say(f"evaluate:   rlhf eval --model {model} --dataset {source}")
        return saved
