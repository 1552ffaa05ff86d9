"""MLflow: a tracking server, or an SQLite file in the run directory."""

import os
import time

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from trainer.trackers.base import Cell, Numbers, RunInfo

_TAG = "rlhf.run"
_MAX_VALUE = 5000
# Maximum number of parameters in one call.
_MAX_BATCH = 100


class MlflowTracker:
    """An MLflow run, found again by its tag."""

    def __init__(self, run: RunInfo) -> None:
        server = os.environ.get("MLFLOW_TRACKING_URI", "")
        uri = server or f"sqlite:///{run.directory / 'mlflow.db'}"
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(run.project)
        if experiment is None:
            artifacts = None if server else (run.directory / "mlflow").as_uri()
            experiment_id = client.create_experiment(run.project, artifacts)
        else:
            experiment_id = experiment.experiment_id
        found = client.search_runs([experiment_id], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
        else:
            made = client.create_run(experiment_id, tags={_TAG: run.id}, run_name=run.name)
            self._id = made.info.run_id
            # MLflow's parameters never change: they are those of the first start.
            parameters = [
                Param(name, str(value)[:_MAX_VALUE]) for name, value in run.parameters.items()
            ]
            for i in range(0, len(parameters), _MAX_BATCH):
                client.log_batch(self._id, params=parameters[i : i + _MAX_BATCH])
        client.update_run(self._id, status="RUNNING")
        self._client = client
        self.where = f"{uri}, experiment {run.project}, run {self._id}"

    def metrics(self, step: int, values: Numbers) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics)

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        data = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
        self._client.log_table(self._id, {"step": [step] * len(rows), **data}, f"{name}.json")

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")
