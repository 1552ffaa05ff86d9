"""Trackio: an SQLite file in the run directory, or in TRACKIO_DIR."""

import os

from trainer.trackers.base import Cell, Numbers, RunInfo


class TrackioTracker:
    """A Trackio run, found again by its name, which contains the run's id."""

    def __init__(self, run: RunInfo) -> None:
        # Trackio reads the variable when it is imported.
        directory = os.environ.setdefault("TRACKIO_DIR", str(run.directory / "trackio"))
        import pandas
        import trackio

        self._trackio = trackio
        self._pandas = pandas
        name = f"{run.name}-{run.id[:6]}"
        trackio.init(project=run.project, name=name, config=run.config, resume="allow", embed=False)
        self.where = f"TRACKIO_DIR={directory} trackio show --project {run.project}"

    def metrics(self, step: int, values: Numbers) -> None:
        self._trackio.log(dict(values), step=step)

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        table = self._trackio.Table(dataframe=self._pandas.DataFrame(rows, columns=columns))
        self._trackio.log({name: table}, step=step)

    def close(self, finished: bool) -> None:
        self._trackio.finish()
