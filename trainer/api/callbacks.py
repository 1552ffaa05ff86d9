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
from trainer.observe.run_dir import append_line
from trainer.run import Listener, Run

EVENTS = ("train_begin", "step_begin", "step_end", "log", "evaluate", "save", "train_end")
_NEVER_CALLED = (
    "init_end",
    "epoch_begin",
    "epoch_end",
    "substep_end",
    "pre_optimizer_step",
    "optimizer_step",
    "predict",
    "prediction_step",
    "push_begin",
)
"""Hooks of transformers that a run here never calls."""


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

    A hook gets `args` (the `TrainerConfig`), `state` and `control`, and as keyword arguments
    `model`, `processing_class`, `logs` (`on_log`), `metrics` (`on_evaluate`) or `checkpoint`
    (`on_save`). It may accept fewer of them, by name.
    """

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called when models and services are ready, before the first step."""

    def on_step_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called before a step."""

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called after a step has been recorded."""

    def on_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Another name for `on_step_end`."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        """Called after `on_step_end` with the record of the step (`logs`)."""

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called after an evaluation with its result (`metrics`)."""

    def on_save(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called when the writing of a checkpoint has started (`checkpoint`)."""

    def on_train_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any:
        """Called after the last step."""


class Callbacks(Listener):
    """Calls the callbacks of a run, and collects what its reward functions log (`FunctionLog`).

    Raises ConfigError for an object without hooks, and for a hook that a run never calls.
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
        _check(callback)
        self.callbacks.append(callback)

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
            state.log_history.append({"step": step, "epoch": state.epoch, **about["logs"]})
        elif event == "evaluate":
            state.log_history.append({"step": step, "epoch": state.epoch, **about["metrics"]})
            self._note_best(about["metrics"], step)

        control = TrainerControl()
        keywords = {"model": run.policy.model, "processing_class": run.tokenizer, **about}
        names = ["on_step_end", "on_step"] if event == "step_end" else [f"on_{event}"]
        for callback in self.callbacks:
            for name in names:
                hook = getattr(callback, name, None)
                if hook is not None:
                    answer = _call(hook, self._args, state, control=control, keywords=keywords)
                    control = answer or control
        self._carry_out(run, control)

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


def _check(callback: Any) -> None:
    names = [f"on_{event}" for event in EVENTS]
    has_hook = any(callable(getattr(callback, name, None)) for name in [*names, "on_step"])
    if isinstance(callback, type) or not has_hook:
        hint = f"give an object with any of {', '.join(names)}"
        if isinstance(callback, type):
            hint = "add parentheses to make an instance"
        raise ConfigError("this is not a callback", field="callbacks", value=callback, remedy=hint)

    # A transformers callback inherits every hook; only those that it overrides are its own.
    kind = type(callback)
    library = [base for base in kind.__mro__ if base.__module__.startswith("transformers.")]
    inherited_from = library[0] if library else object
    for event in _NEVER_CALLED:
        name = f"on_{event}"
        own = getattr(kind, name, None)
        if own is not None and own is not getattr(inherited_from, name, None):
            raise ConfigError(
                f"{name} would never be called: a step here is one batch, with its updates, "
                "evaluation and checkpoint",
                field="callbacks",
                value=kind.__name__,
                remedy="move its work to on_step_begin or on_step_end",
            )


def _call(
    hook: Any,
    args: Any,
    state: TrainerState,
    control: TrainerControl,
    keywords: dict[str, Any],
) -> Any:
    """Calls a hook with (args, state, control) and those of `keywords` that it accepts, or only
    with what it names.
    """
    parameters = inspect.signature(hook).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    def accepted(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if takes_all or name in parameters}

    first = next(iter(parameters), "state")
    if first in ("state", "control"):
        return hook(**accepted({"state": state, "control": control, "args": args} | keywords))
    return hook(args, state, control, **accepted(keywords))
