"""Callbacks of a run in one process: transformers' own state, control and hooks.

`on_train_begin` is called when models and services are ready, `on_step_end` when the step has been
recorded, `on_log` with the record of a step, the numbers of an evaluation, or last those of the
whole call, `on_save` when the writing of a `checkpoint` has started. An evaluation and a checkpoint
of a step follow its `on_step_end` and `on_log`, as in transformers. A hook gets `args` (the
`TrainerConfig`), `state` and `control`, and as keyword arguments also `model` and
`processing_class`. It may accept fewer of them, by name.
"""

import inspect
import json
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from transformers.trainer_callback import (
    CallbackHandler,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from common import Json
from common.errors import ConfigError, did_you_mean
from common.wire.schemas import Group
from trainer.api.output import link_checkpoint, remove_dead_links
from trainer.api.refusals import own_names
from trainer.api.settings import TrainerConfig
from trainer.api.trl import NamedNumbers
from trainer.observe.run_dir import append_line, read_lines
from trainer.run import Listener, Run
from trainer.trackers.base import Numbers

log = logging.getLogger(__name__)
_NOT_CALLED = ("on_substep_end", "on_pre_optimizer_step")
EVENTS = ("train_begin", "step_begin", "step_end", "log", "evaluate", "save", "train_end")


class Hooks(CallbackHandler):  # type: ignore[misc]  # transformers has no types
    """transformers' list of callbacks, which also calls those that declare fewer hooks and
    arguments.
    """

    def __init__(self) -> None:
        # Not that of the base class, which asks for the callback that decides about checkpoints
        # and evaluations: here the loop does.
        self.callbacks: list[Any] = []
        self.given: Json = {}
        """Further arguments of every hook."""

    def add_callback(self, callback: Any) -> None:
        """Adds a callback, or one of a class. Raises ConfigError for an object without hooks."""
        if not any(name.startswith("on_") for name in dir(callback)):
            raise ConfigError(
                "this is not a callback",
                field="callbacks",
                value=callback,
                remedy=f"give an object with any of on_{', on_'.join(EVENTS)}",
            )
        kind = callback if isinstance(callback, type) else type(callback)
        for name in _NOT_CALLED:
            if getattr(kind, name, None) not in (None, getattr(TrainerCallback, name)):
                log.warning("without effect here: %s.%s is never called", kind.__name__, name)
        super().add_callback(callback)

    def call_event(self, event: str, args: Any, state: Any, control: Any, **about: Any) -> Any:
        """Calls a hook of all callbacks; returns the control that they leave."""
        for callback in self.callbacks:
            hook = getattr(callback, event, None)
            if hook is not None:
                keywords = self.given | about
                control = _call(hook, args, state, control, keywords=keywords) or control
        return control


class Callbacks(Listener):
    """Calls the callbacks of a run, and collects what its reward functions log (`FunctionLog`)."""

    def __init__(self, args: TrainerConfig, output_dir: Path) -> None:
        self.hooks = Hooks()
        self.state = TrainerState()
        self.control = TrainerControl()
        self.args = args
        self._output_dir = output_dir
        self._num_problems = 1
        self._has_begun = False
        self._lock = threading.Lock()
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)
        self._rows: list[Json] = []
        self._before_evaluation = self._take_logged()
        self._evaluation_began = 0.0
        self._began = 0.0
        self._losses: list[float] = []
        self._held: list[Callable[[], None]] | None = None
        """Within a step, what is told after its `on_log`."""
        self.summary: Numbers = {}
        """The numbers of the newest call of `train`, by transformers' names."""
        self._carrying_out = False

    def begin(self, problems: int) -> None:
        """Resets the log history and the stop flag for a new call of `train`."""
        self._num_problems = problems
        self._has_begun = False
        self._losses = []
        self._held = None
        self.state.log_history = []
        self.state.should_training_stop = False

    # ------------------------------------------------------------ what reward functions log

    def log_metric(self, name: str, value: float) -> None:
        with self._lock:
            self._metrics[name].append(float(value))

    def log_rows(self, rows: list[Json]) -> None:
        with self._lock:
            self._rows += rows

    def in_user_names(self, text: str, settings: Iterable[str]) -> str:
        names = own_names(settings, self.args.names())
        return f"{text} ({names})" if names else text

    def measured(self, step: int) -> Numbers:
        return self._write_logged(step, {})

    def _take_logged(self) -> tuple[dict[str, list[float]], list[Json]]:
        """Returns what was logged since the last call."""
        with self._lock:
            metrics = self._metrics
            rows = self._rows
            self._metrics = defaultdict(list)
            self._rows = []
        return metrics, rows

    def _write_logged(self, step: int, about: Json) -> Numbers:
        """Writes the logged rows, with `about`; returns the means of the logged numbers."""
        metrics, rows = self._take_logged()
        for row in rows:
            as_json = json.loads(json.dumps(row, default=str))
            append_line(self._output_dir / "extras.jsonl", {"step": step, **about, **as_json})
        return {name: mean(values) for name, values in metrics.items()}

    # ------------------------------------------------------------ events

    def on_event(self, run: Run, event: str, **about: Any) -> None:
        step = run.policy.step
        per_step = run.config.trainer.batch_size
        self.state.global_step = step
        self.state.epoch = step * per_step / self._num_problems
        if not self._has_begun:  # the first event of any kind finds models and services ready
            self._has_begun = True
            self._began = time.monotonic()
            self._take_logged()  # drops what the trial of the functions logged
            self._begin_state(run)
            self._call("init_end")
            self._call("train_begin")

        if event == "evaluating":  # keeps what training answers log apart from the evaluation's
            self._before_evaluation = self._take_logged()
            self._evaluation_began = time.monotonic()
        elif event == "evaluate":
            self._evaluated(about["metrics"])
        elif event == "save":
            self._tell(partial(self._saved, about["checkpoint"]))
        elif event == "log":
            groups = [item.group for item in about["batch"].groups]
            logs = _with_names_of_trl(about["logs"], groups)
            self._losses.append(logs["loss"])
            self._log(logs, logs)
            held = self._held or []
            self._held = None
            for call in held:
                call()
        else:
            if event == "step_begin":
                self._held = []
            elif event == "train_end":
                self._log_end(run)
            for hook in self._hooks_of(event, step * per_step, per_step):
                self._call(hook, **about)

        self._carry_out(run, may_evaluate=event != "evaluating")

    def _tell(self, call: Callable[[], None]) -> None:
        """Calls hooks now, or after `on_log` within a step."""
        if self._held is None:
            call()
        else:
            self._held.append(call)

    def _saved(self, checkpoint: Path) -> None:
        # The checkpoint of a step is written after its evaluation.
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(checkpoint)
        self._call("save", checkpoint=checkpoint)

    def _log_end(self, run: Run) -> None:
        """Logs the numbers of the whole call, as transformers does last."""
        seconds = max(1e-9, time.monotonic() - self._began)
        steps = len(self._losses)
        answers = steps * run.config.trainer.batch_size * run.config.sampling.group_size
        self.summary = {
            "train_runtime": seconds,
            "train_samples_per_second": answers / seconds,
            "train_steps_per_second": steps / seconds,
            "epoch": self.state.epoch,
        }
        if self._losses:
            self.summary["train_loss"] = mean(self._losses)
        self._log(self.summary, self.summary)

    def _call(self, event: str, **about: Any) -> None:
        self.control = getattr(self.hooks, f"on_{event}")(
            self.args, self.state, self.control, **about
        )

    def _begin_state(self, run: Run) -> None:
        """Sets what the state says of the whole run."""
        settings = run.config.trainer
        self.hooks.given = {
            "model": run.policy.model,
            "processing_class": run.tokenizer,
        }
        state = self.state
        state.max_steps = run.total_steps
        state.num_train_epochs = settings.num_epochs
        if settings.max_steps is not None:
            state.num_train_epochs = math.ceil(
                run.total_steps * settings.batch_size / self._num_problems
            )
        state.logging_steps = 1
        state.train_batch_size = self.args.per_device_train_batch_size
        state.eval_steps = run.config.evaluation.every
        state.save_steps = run.config.checkpoint.every
        if state.best_metric is None:
            self.remember_best()

    def _hooks_of(self, event: str, drawn: int, per_step: int) -> list[str]:
        """Returns the hooks of an event after `drawn` problems, in transformers' order."""
        is_between_epochs = drawn // self._num_problems != (drawn - per_step) // self._num_problems
        hooks = {
            "train_begin": [],  # they were called before the first evaluation
            "step_begin": ["epoch_begin", "step_begin"],
            "step_end": ["optimizer_step", "step_end", "epoch_end"],
        }.get(event, [event])
        return [hook for hook in hooks if is_between_epochs or "epoch" not in hook]

    def _evaluated(self, summary: Json) -> None:
        logged = self._write_logged(self.state.global_step, {"evaluation": True})

        # What was logged before the evaluation belongs to the step.
        before, rows = self._before_evaluation
        with self._lock:
            for name, values in before.items():
                self._metrics[name][:0] = values
            self._rows[:0] = rows

        numbers = _named_evaluation(summary)
        numbers |= {f"eval_{name}": value for name, value in logged.items()}
        name = self._best_name(numbers)
        if name not in numbers:
            known = [each.removeprefix("eval_") for each in numbers]
            raise ConfigError(
                "the evaluations of this run have no such number",
                field="metric_for_best_model",
                value=self.args.metric_for_best_model,
                remedy=did_you_mean(name.removeprefix("eval_"), known),
            )
        seconds = max(1e-9, time.monotonic() - self._evaluation_began)
        numbers["eval_runtime"] = seconds
        numbers["eval_samples_per_second"] = summary["num_samples"] / seconds
        self._tell(
            partial(self._tell_evaluation, numbers, {**numbers, **summary, "logged": logged})
        )

    def _tell_evaluation(self, numbers: Numbers, metrics: Json) -> None:
        step = self.state.global_step
        self._log({"step": step, **numbers}, metrics)
        self._call("evaluate", metrics=NamedNumbers(metrics))
        # Only now: EarlyStoppingCallback compares with the best of the earlier evaluations.
        self._note_best(numbers, step)

    def _log(self, logs: Json, line: Json) -> None:
        """Adds a line to the history, and calls the hook."""
        state = self.state
        about = {"step": state.global_step, "epoch": state.epoch}
        state.log_history.append(NamedNumbers({**about, **line}))
        self._call("log", logs=NamedNumbers({**about, **logs}))

    def _best_name(self, numbers: Numbers) -> str:
        """Returns the number of an evaluation that `metric_for_best_model` names; by default
        accuracy, or reward if rewards are not verdicts.
        """
        named: str | None = self.args.metric_for_best_model
        if named is None:
            named = "accuracy" if "eval_accuracy" in numbers else "reward"
        return f"eval_{named.removeprefix('eval_')}"

    def remember_best(self) -> None:
        """Notes the best evaluation of earlier attempts."""
        for earlier in read_lines(self._output_dir / "evaluations.jsonl"):
            self._note_best(_named_evaluation(earlier), earlier["step"])

    def _note_best(self, numbers: Numbers, step: int) -> None:
        """Keeps the best evaluation; the one before training does not count."""
        value = numbers.get(self._best_name(numbers))
        if value is None or step == 0:
            return
        best = self.state.best_metric
        is_lower_better = self.args.greater_is_better is False
        if best is None or (value < best if is_lower_better else value > best):
            self.state.best_metric = value
            self.state.best_global_step = step

    def _carry_out(self, run: Run, may_evaluate: bool) -> None:
        """Does what callbacks asked for. After the last step nothing is left to do: the end of the
        run evaluates and saves.
        """
        control = self.control
        ends_epoch = control.should_epoch_stop and not self.state.epoch.is_integer()
        if ends_epoch and math.ceil(self.state.epoch) < self.state.num_train_epochs:
            raise ConfigError(
                "an epoch cannot end early, only the run: the next prompts are drawn already",
                field="control.should_epoch_stop",
                value=True,
                remedy="set control.should_training_stop instead",
            )
        if control.should_training_stop or ends_epoch or self.state.should_training_stop:
            run.stop()
        # An evaluation that a callback asked for is itself an event: it must not ask again.
        if self._carrying_out or run.policy.step >= run.total_steps:
            return
        self._carrying_out = True
        try:
            if control.should_evaluate and may_evaluate:
                run.evaluate_now()
            if control.should_save:
                run.save_now()
        finally:
            self._carrying_out = False


class CheckpointLinks(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Gives the checkpoints in `directory` the names that transformers gives its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_save(self, *_: Any, checkpoint: Path, **__: Any) -> None:
        link_checkpoint(self._directory, checkpoint)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        # The last checkpoint has taken the place of an older one since its link was made.
        remove_dead_links(self._directory)


def _named_evaluation(summary: Json) -> Numbers:
    """Returns the numbers of an evaluation by the names that TRL and transformers give them."""
    numbers = {"eval_reward": summary["mean_reward"]}
    for name in ("mean_reward", "accuracy", "standard_error", "pass_at_k"):
        if summary[name] is not None:
            numbers[f"eval_{name}"] = summary[name]
    return numbers


def _with_names_of_trl(record: Json, groups: Sequence[Group]) -> Json:
    """Returns the record of a step, also with the names by which callbacks of TRL read it."""
    update = record["update"]
    seconds = record["seconds"]
    named = {name: update[name] for name in ("loss", "grad_norm", "learning_rate", "entropy")}
    named["kl"] = update["kl_reference"]
    named["clip_ratio/region_mean"] = update["clip_fraction"]
    named["completions/mean_length"] = record["completion_tokens"]
    named["completions/clipped_ratio"] = record["truncated"]
    named["frac_reward_zero_std"] = record["zero_variance_groups"] / len(groups)
    named["step_time"] = sum(seconds.values()) - seconds.get("evaluation", 0.0)
    for name, mean_reward in record["rewards"].items():
        named[f"rewards/{name}/mean"] = mean_reward
    return {**record.get("logged", {}), **named, **_of_answers(groups), **record}


def _of_answers(groups: Sequence[Group]) -> Numbers:
    """Returns the numbers of a step's answers that TRL logs and the record lacks."""
    answers = list(chain.from_iterable(group.answers for group in groups))
    found: Numbers = {}
    rewards = {"reward_std": [answer.reward for answer in answers]}
    for name in {name for answer in answers for name in answer.components}:
        scores = [answer.components.get(name) for answer in answers]
        rewards[f"rewards/{name}/std"] = [score for score in scores if score is not None]
    for name, values in rewards.items():
        if len(values) > 1:
            found[name] = stdev(values)

    # An episode may have several sequences, none of which has its length.
    if len(answers) == sum(len(group.completions) for group in groups):
        ended = [answer for answer in answers if answer.finish_reason != "length"]
        lengths = {
            "": [len(answer.token_ids) for answer in answers] or [0],
            "terminated_": [len(answer.token_ids) for answer in ended] or [0],
        }
        for name, counts in lengths.items():
            found[f"completions/min_{name}length"] = min(counts)
            found[f"completions/max_{name}length"] = max(counts)
        found["completions/mean_terminated_length"] = mean(lengths["terminated_"])
    return found


def _call(hook: Any, args: Any, state: Any, control: Any, *, keywords: Json) -> Any:
    """Calls a hook by name if it requires nothing else, else with (args, state, control) and the
    `keywords` that it accepts.
    """
    parameters = inspect.signature(hook).parameters
    by_name = {"args": args, "state": state, "control": control, **keywords}
    is_by_name = all(
        each.kind is not each.VAR_POSITIONAL
        and (name in by_name or each.kind is each.VAR_KEYWORD or each.default is not each.empty)
        for name, each in parameters.items()
    )
    if is_by_name:
        keywords = by_name
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        keywords = {name: keywords[name] for name in parameters if name in keywords}
    return hook(**keywords) if is_by_name else hook(args, state, control, **keywords)
