"""A fine-tuning run on worked answers: rank 0 has the data, every rank computes its share of every
update.
"""

import gc
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from common.models.rotary import switch_length
from common.process import watchdog
from common.process.logs import set_run
from common.process.run_lock import RunLock
from common.process.topology import Topology
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import Config
from learning.ranks import Ranks
from services.data.worked import Examples
from trainer.observe.run_dir import Recorder, console, tell
from trainer.policy.checkpoint import Checkpoints, RunState, tokenizer_files
from trainer.policy.identity import Facts, identity
from trainer.policy.policy import Policy
from trainer.policy.scorer import context_length, load_tokenizer, stop_token_ids
from trainer.rank import started
from trainer.sft.learner import Learner
from trainer.sft.log import HeldOut, SftLog
from trainer.sft.rows import Batches, Encoder, TrainingSequence, pack, unpack
from trainer.trackers.base import check
from trainer.weights.adapters import static_files

TASK = "sft"


def run(config: Config, topology: Topology, examples: Examples | None) -> None:
    """Trains on this rank until the last step; only rank 0 gets `examples`."""
    with started(config, topology, TASK) as (ranks, lock), ExitStack() as stack:
        training = SftRun(config, ranks, lock, examples, console(), stack)
        gc.freeze()  # libraries and models stay: the garbage collector need not scan them
        training.train()
        ranks.barrier()


@dataclass
class _RankZero:
    """What only rank 0 has."""

    log: SftLog
    batches: Batches
    lock: RunLock
    identity: Facts


class SftRun:
    """The run on this rank. Only rank 0 has `lock` and `examples`; `stack` closes everything.

    The constructor loads or resumes the model. It is a collective, like `train`. Raises ConfigError
    or another ServiceError.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        lock: RunLock | None,
        examples: Examples | None,
        console: Console,
        stack: ExitStack,
    ) -> None:
        self._config, self._ranks, self._stack = config, ranks, stack
        run_dir = config.trainer.run_dir
        assert run_dir is not None, "`load` sets it"
        if ranks.is_rank_zero:
            check(config.trackers)
        watchdog.at("loading the model")
        self._policy, _, _ = Policy.resume(config, ranks, run_dir, "answers")
        self._learner, self._held_out, self._evaluated = (
            Learner(self._policy),
            list[TrainingSequence](),
            -1,
        )
        keep = config.trainer.keep_checkpoints
        self._checkpoints = Checkpoints(
            run_dir / "checkpoints", ranks, keep, lambda: tokenizer_files(run_dir / "model")
        )
        self._loss: float | None = None
        self._told, body = None, b""
        if ranks.is_rank_zero:
            assert lock is not None
            assert examples is not None
            self._told, body = self._begin(run_dir, lock, examples, console)
        sizes, _, held_out = ranks.broadcast(body).partition(b"\n")
        self._positions, self._total, self._num_held_out = (int(number) for number in sizes.split())
        self._policy.total_steps = self._total
        self._held_out = unpack(held_out)

    def _begin(
        self, run_dir: Path, lock: RunLock, examples: Examples, console: Console
    ) -> tuple[_RankZero, bytes]:
        """Reads the data and opens the log; returns rank 0's parts and the message to the other
        ranks.
        """
        config, policy, settings = self._config, self._policy, self._config.trainer
        set_run(lock.run)
        tell(
            console,
            f"run directory {run_dir}"
            + (f", continuing after step {policy.step}" if policy.step else ""),
        )
        tokenizer = load_tokenizer(config.model)
        static_files(config, policy.model, tokenizer, run_dir / "model")
        prompter = Prompter(
            tokenizer,
            PromptStyle.of(config),
            stop_token_ids(policy.model, tokenizer, config.sampling.stop_token_ids),
        )
        vocabulary = policy.model.get_input_embeddings().num_embeddings
        # All rows are within the length up to which LongRoPE computes each as if alone.
        switches_at = switch_length(policy.model.config.get_text_config().to_dict())
        bounds = [
            bound for bound in (context_length(config.model), switches_at) if bound is not None
        ]
        encoder = Encoder(prompter, vocabulary, min(bounds, default=None))
        train, held_out = (
            [encoder.rows(each) for each in part] for part in (examples.train, examples.held_out)
        )
        positions = len(train) * settings.num_epochs
        if settings.max_steps is not None:
            positions = settings.max_steps * settings.batch_size
        total = -(-positions // settings.batch_size)
        tokens = sum(int(row.learned.sum()) for rows in train for row in rows)
        tell(
            console,
            f"{len(train)} examples with {tokens:,} tokens to learn, {len(held_out)} held out; {total} steps",
        )
        recorder = Recorder(run_dir, config, console, policy.step, None, lock.run, ("metrics",))
        gpus = policy.ranks.world_size if policy.ranks.on_gpu else 0
        log = SftLog(self._stack.enter_context(recorder), total, gpus)
        if policy.step >= total:
            recorder.say(
                f"already finished: all {total} steps were trained before, and their result is below"
            )
        told = _RankZero(
            log, Batches(train, settings.batch_size, config.seed), lock, identity(config, "answers")
        )
        return told, f"{positions} {total} {len(held_out)}\n".encode() + pack(
            [row for rows in held_out for row in rows]
        )

    def train(self) -> Path:
        """Trains until the last step, evaluates and saves; returns the checkpoint."""
        policy, settings, told = self._policy, self._config.trainer, self._told
        if policy.step == 0:
            self._evaluate()
        progress = told.log.recorder.progress(policy.step, self._total) if told else nullcontext()
        with self._checkpoints, progress:
            if told:
                told.log.begin()
            while policy.step < self._total:
                self._step()
                if policy.step < self._total:
                    if settings.eval_every and policy.step % settings.eval_every == 0:
                        self._evaluate()
                    if settings.checkpoint_every and policy.step % settings.checkpoint_every == 0:
                        self._save()
            return self._finish()

    def _step(self) -> None:
        policy, told = self._policy, self._told
        self._checkpoints.check()
        torch.manual_seed((policy.seed * 4096 + self._ranks.rank) % 2**63)
        watchdog.at(f"the update of step {policy.step + 1}")
        if told:
            told.lock.check()
        with told.log.clock.stage("update") if told else nullcontext():
            own = pack(told.batches.rows(policy.step, self._positions)) if told else b""
            update = self._learner.learn(unpack(self._ranks.broadcast(own)))
        if told:
            size = self._config.trainer.batch_size
            done = min(policy.step * size, self._positions)
            told.log.step(
                policy.step, done / len(told.batches), done - (policy.step - 1) * size, update
            )

    def _evaluate(self) -> None:
        if not self._held_out:
            return
        watchdog.at(f"the evaluation at step {self._policy.step}")
        with self._told.log.clock.stage("evaluation") if self._told else nullcontext():
            self._loss, self._evaluated = self._learner.loss(self._held_out), self._policy.step
        if self._told:
            self._told.log.evaluation(HeldOut(self._evaluated, self._loss, self._num_held_out))

    def _save(self) -> Path:
        watchdog.at(f"the checkpoint of step {self._policy.step}")
        told, step = self._told, self._policy.step
        rating = (
            None if self._loss is None or self._evaluated != step else -self._loss
        )  # the best has the lowest loss
        same, run_id = (told.identity, told.lock.run) if told else ({}, "")
        state = RunState(
            step,
            step * self._config.trainer.batch_size,
            run_id,
            0.0,
            mean_reward=rating,
            identity=same,
        )
        return self._checkpoints.save(state, self._policy.snapshots(self._checkpoints.alone))

    def _finish(self) -> Path:
        if self._evaluated != self._policy.step:
            self._evaluate()
        saved = self._checkpoints.newest()
        if saved is None or saved.name != self._checkpoints.name(self._policy.step):
            saved = self._save()
            self._checkpoints.wait()
        if self._told:
            self._told.log.report(saved)
            self._tell_next(saved)
        return saved

    def _tell_next(self, saved: Path) -> None:
        """Prints the commands that evaluate the model, after merging an adapter."""
        config, model = self._config, saved
        assert self._told is not None
        if config.lora.rank:
            model = self._told.log.recorder.directory / "merged"
            self._told.log.recorder.say(f"merge:      python -m trainer.export {saved} {model}")
        source = f"--dataset {config.data.source}"
        self._told.log.recorder.say(
            f"evaluate:   python -m trainer.evaluate_model --model {model} {source}"
        )
