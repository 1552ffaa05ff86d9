"""MLflow: a tracking server, or an SQLite file in the run directory."""

import os
import time

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from trainer.trackers.base import Cell, RunInfo

_TAG = "rlhf.run"
_MAX_VALUE = 5000


class MlflowTracker:
    """An MLflow run, found again by its tag."""

    def __init__(self, run: RunInfo) -> None:
        server = os.environ.get("MLFLOW_TRACKING_URI", "")
        uri = server or f"sqlite:///{run.directory / 'mlflow.db'}"
        artifacts = None if server else (run.directory / "mlflow").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        experiment_id = self._experiment(run.project, artifacts)
        own_runs = f"tags.`{_TAG}` = '{run.id}'"
        found = self._client.search_runs([experiment_id], own_runs, max_results=1)
        if found:
            logged = found[0]
        else:
            tags = {_TAG: run.id}
            logged = self._client.create_run(experiment_id, tags=tags, run_name=run.name)
        self._id = logged.info.run_id
        if not found:  # MLflow's parameters never change: they are those of the first start
            parameters = [
                Param(name, str(value)[:_MAX_VALUE]) for name, value in run.parameters.items()
            ]
            for i in range(0, len(parameters), 100):
                self._client.log_batch(self._id, params=parameters[i : i + 100])
        self._client.update_run(self._id, status="RUNNING")

        self.where = f"{uri}, experiment {run.project}, run {self._id}"

    def _experiment(self, name: str, artifacts: str | None) -> str:
        """Returns the id of an experiment, which is created when there is none of this name."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment:
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(name, artifacts))

    def metrics(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, [Metric(name, value, now, step) for name, value in values.items()]
        )

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        data: dict[str, list[Cell]] = {"step": [step] * len(rows)}
        for i, column in enumerate(columns):
            data[column] = [row[i] for row in rows]
        self._client.log_table(self._id, data, f"{name}.json")

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")
