"""Weights & Biases: online, or offline in the run directory."""

import wandb

from trainer.trackers.base import Cell, Numbers, RunInfo, wandb_offline


class WandbTracker:
    """A wandb run with the step as x-axis: a resumed run repeats steps, which wandb's own counter
    does not allow.
    """

    def __init__(self, run: RunInfo) -> None:
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.directory),
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
        self._run.config.update(run.config, allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.where = (
            f"wandb sync {self._run.settings.sync_dir}" if wandb_offline() else str(self._run.url)
        )

    def metrics(self, step: int, values: Numbers) -> None:
        self._run.log({**values, "step": step})

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        self._run.log({name: wandb.Table(columns=columns, data=rows), "step": step})

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
