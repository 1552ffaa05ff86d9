"""Callbacks of a run in one process: hooks like those of transformers, with a state to read and a
control to set.
"""

import inspect
import json
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from common.errors import ConfigError
from trainer.api.settings import in_own_words
from trainer.observe.run_dir import append_line
from trainer.run import Listener, Run

EVENTS = ("train_begin", "step_begin", "step_end", "log", "evaluate", "save", "train_end")


@dataclass(slots=True)
class TrainerState:
    """The progress of a run, for callbacks and reward functions."""

    global_step: int = 0
    max_steps: int = 0
    """Steps of the whole run."""
    epoch: float = 0.0
    """Passes over the training data so far."""
    num_train_epochs: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    """A record of every step and evaluation of this call of `train`."""
    best_metric: float | None = None
    """The best accuracy in an evaluation so far, or the best mean reward when rewards are not
    verdicts."""
    best_global_step: int | None = None
    should_training_stop: bool = False
    """Set it to end the run after the current step."""
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True


@dataclass(slots=True)
class TrainerControl:
    """Requests of a callback, which are carried out when its hook returns."""

    should_training_stop: bool = False
    """End the run after the current step, with the usual final evaluation and checkpoint."""
    should_save: bool = False
    """Write a checkpoint of the current step."""
    should_evaluate: bool = False
    """Evaluate the current weights on the held-out problems."""
    should_log: bool = False
    """Has no effect: every step is logged."""


class TrainerCallback:
    """Base class of callbacks. Override any of the hooks; transformers callbacks are accepted too.

    Hooks: `on_train_begin` (models and services are ready), `on_step_begin`, `on_step_end` (the
    step has been recorded), `on_log` (its record: `logs`), `on_evaluate` (`metrics`), `on_save`
    (the writing of a `checkpoint` has started), `on_train_end`; and transformers' `on_init_end`,
    `on_epoch_begin`, `on_epoch_end` and `on_optimizer_step`. A hook gets `args` (the
    `TrainerConfig`), `state` and `control`, and as keyword arguments also `model` and
    `processing_class`. It may accept fewer of them, by name.
    """


class Callbacks(Listener):
    """Calls the callbacks of a run, and collects what its reward functions log (`FunctionLog`).

    Raises ConfigError for an object without hooks.
    """

    def __init__(self, callbacks: Sequence[Any], args: Any, extras: Path) -> None:
        self.callbacks: list[Any] = []
        self.state = TrainerState()
        self._args = args
        self._extras = extras
        self._num_problems = 1
        self._lock = threading.Lock()
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)
        self._rows: list[dict[str, Any]] = []
        self._before_evaluation = self._take_logged()
        self._carrying_out = False
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        """Adds a callback. Raises ConfigError as the constructor does."""
        hooks = [name for name in dir(callback) if name.startswith("on_")]
        if isinstance(callback, type) or not hooks:
            raise ConfigError(
                "this is not a callback",
                field="callbacks",
                value=callback,
                remedy=f"give an object (not its class) with any of on_{', on_'.join(EVENTS)}",
            )
        self.callbacks.append(callback)

    def remove(self, callback: Any) -> None:
        """Removes a callback, or those of a class; does nothing without one."""
        kept = []
        for each in self.callbacks:
            is_meant = type(each) is callback if isinstance(callback, type) else each is callback
            if not is_meant:
                kept.append(each)
        self.callbacks = kept

    def begin(self, problems: int) -> None:
        """Resets the log history and the stop flag for a new call of `train`."""
        self._num_problems = problems
        self.state.log_history = []
        self.state.should_training_stop = False

    # ------------------------------------------------------------ what reward functions log

    def log_metric(self, name: str, value: float) -> None:
        """See `FunctionLog`."""
        with self._lock:
            self._metrics[name].append(float(value))

    def log_rows(self, rows: list[dict[str, Any]]) -> None:
        """See `FunctionLog`."""
        with self._lock:
            self._rows += rows

    def words(self, text: str) -> str:
        """See `Listener`."""
        return in_own_words(text, self._args)

    def measured(self, step: int) -> dict[str, float]:
        """See `Listener`."""
        return self._write_logged(step, {})

    def _take_logged(self) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
        """Returns what was logged since the last call."""
        with self._lock:
            metrics = self._metrics
            rows = self._rows
            self._metrics = defaultdict(list)
            self._rows = []
        return metrics, rows

    def _restore(self) -> None:
        """Puts back what was logged before the evaluation."""
        metrics, rows = self._before_evaluation
        with self._lock:
            for name, values in metrics.items():
                self._metrics[name][:0] = values
            self._rows[:0] = rows

    def _write_logged(self, step: int, about: dict[str, Any]) -> dict[str, float]:
        """Writes the logged rows, with `about`; returns the means of the logged numbers."""
        metrics, rows = self._take_logged()
        for row in rows:
            as_json = json.loads(json.dumps(row, default=str))
            append_line(self._extras, {"step": step, **about, **as_json})
        return {name: mean(values) for name, values in metrics.items()}

    # ------------------------------------------------------------ events

    def on_event(self, run: Run, event: str, **about: Any) -> None:
        """See `Listener`."""
        state = self.state
        step = run.policy.step
        settings = run.config.trainer
        if event == "evaluating":  # keeps what training answers log apart from the evaluation's
            self._before_evaluation = self._take_logged()
            return
        if event == "evaluate":
            logged = self._write_logged(step, {"evaluation": True})
            about["metrics"] = {**about["metrics"], "logged": logged}
            self._restore()

        state.global_step = step
        state.epoch = step * settings.batch_size / self._num_problems
        if event == "train_begin":
            self._take_logged()  # drops what the trial of the functions logged
            state.max_steps = run.total_steps
            state.num_train_epochs = settings.num_epochs
            if settings.max_steps is not None:
                drawn = run.total_steps * settings.batch_size
                state.num_train_epochs = -(-drawn // self._num_problems)  # rounded up
        elif event == "log":
            about["logs"] = _with_names_of_trl(about["logs"])
            state.log_history.append({"step": step, "epoch": state.epoch, **about["logs"]})
        elif event == "evaluate":
            about["metrics"] = {"eval_reward": about["metrics"]["mean_reward"], **about["metrics"]}
            state.log_history.append({"step": step, "epoch": state.epoch, **about["metrics"]})
            self._note_best(about["metrics"], step)

        control = TrainerControl()
        keywords = {"model": run.policy.model, "processing_class": run.tokenizer, **about}
        for name in self._hooks(
            event, drawn=step * settings.batch_size, of_step=settings.batch_size
        ):
            for callback in self.callbacks:
                hook = getattr(callback, name, None)
                if hook is not None:
                    answer = _call(hook, self._args, state, control, keywords=keywords)
                    control = answer or control
        self._carry_out(run, control)

    def _hooks(self, event: str, drawn: int, of_step: int) -> list[str]:
        """Returns the hooks of an event after `drawn` problems, in transformers' order."""
        is_between_epochs = drawn // self._num_problems != (drawn - of_step) // self._num_problems
        hooks = [f"on_{event}"]
        if event == "train_begin":
            hooks.insert(0, "on_init_end")
        elif event == "step_begin" and is_between_epochs:
            hooks.insert(0, "on_epoch_begin")
        elif event == "step_end":
            hooks.insert(0, "on_optimizer_step")
            if is_between_epochs:
                hooks.append("on_epoch_end")
        return hooks

    def _note_best(self, metrics: dict[str, Any], step: int) -> None:
        found = metrics["mean_reward"] if metrics["accuracy"] is None else metrics["accuracy"]
        if self.state.best_metric is None or found > self.state.best_metric:
            self.state.best_metric = found
            self.state.best_global_step = step

    def _carry_out(self, run: Run, control: TrainerControl) -> None:
        """Carries out the requests of callbacks; requests made during that, other than to stop, are
        ignored.
        """
        if self.state.should_training_stop or control.should_training_stop:
            run.stop()
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            if control.should_evaluate:
                run.evaluate_now()
            if control.should_save:
                run.save_now()
        finally:
            self._carrying_out = False


def _with_names_of_trl(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record of a step, also with the names by which callbacks of TRL read it."""
    update = record["update"]
    named = {name: update[name] for name in ("loss", "grad_norm", "learning_rate", "entropy")}
    named["kl"] = update["kl_reference"]
    named["completions/mean_length"] = record["completion_tokens"]
    named["completions/clipped_ratio"] = record["truncated"]
    for name, mean_reward in record["rewards"].items():
        named[f"rewards/{name}/mean"] = mean_reward
    return {**record.get("logged", {}), **named, **record}


def _call(hook: Any, args: Any, state: Any, control: Any, *, keywords: dict[str, Any]) -> Any:
    """Calls a hook with (args, state, control) and those of `keywords` that it accepts, or only
    with what it names.
    """
    parameters = inspect.signature(hook).parameters
    names_only = next(iter(parameters), "state") in ("state", "control")
    if names_only:
        keywords = {"args": args, "state": state, "control": control, **keywords}
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if not takes_all:
        keywords = {name: keywords[name] for name in parameters if name in keywords}
    return hook(**keywords) if names_only else hook(args, state, control, **keywords)
