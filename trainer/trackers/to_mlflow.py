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
        given = os.environ.get("MLFLOW_TRACKING_URI", "")
        uri = given or f"sqlite:///{run.directory / 'mlflow.db'}"
        artifacts = None if given else (run.directory / "mlflow").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(run.project)
        number = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(run.project, artifacts)
        )
        found = self._client.search_runs([number], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        one = (
            found[0]
            if found
            else self._client.create_run(number, tags={_TAG: run.id}, run_name=run.name)
        )
        self._id = one.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        # MLflow parameters are immutable: a value that a resumed run has changed gets a new name.
        parameters = [
            Param(name if name not in one.data.params else f"{name}.after_step_{run.step}", value)
            for name, each in run.parameters.items()
            if one.data.params.get(name) != (value := str(each)[:_MAX_VALUE])
        ]
        for i in range(0, len(parameters), 100):
            self._client.log_batch(self._id, params=parameters[i : i + 100])
        self.where = f"{uri}, experiment {run.project}, run {self._id}"

    def metrics(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, [Metric(name, value, now, step) for name, value in values.items()]
        )

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        data = {"step": [step] * len(rows)} | {
            column: [row[i] for row in rows] for i, column in enumerate(columns)
        }
        self._client.log_table(self._id, data, f"{name}.json")

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")
