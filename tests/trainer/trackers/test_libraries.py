"""Each tracker with its real library, offline: the library can read back what it was given, also
after a resume."""

import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from common.settings.config import Config
from common.settings.sections import TrackersSection
from trainer.trackers.base import RunInfo
from trainer.trackers.thread import TrackerThread

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries warn about each other
COLUMNS = ["prompt", "completion", "reward", "correct"]
ROWS = [["1 | 2?", "three\nfour", 0.5, True], ["<b>", "", 0.0, False]]


def track(
    name: str,
    directory: Path,
    step: int,
    steps: range,
    finished: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    """Tracks one attempt of a run that continues after `step`; returns the messages."""
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_DIR"):
        monkeypatch.delenv(variable, raising=False)
    if name == "wandb":
        monkeypatch.setenv("WANDB_MODE", "offline")
    config = Config(trackers=TrackersSection(names=[name]))
    run = RunInfo(
        "a1b2c3d4e5f6", "first try", "math", directory, config.model_dump(mode="json"), step
    )
    told: list[str] = []
    counted: list[str] = []
    thread = TrackerThread(name, run, told.append, counted.append)
    for each in steps:
        thread.put("metrics", step=each, values={"reward": each / 8, "update/kl_reference": 0.5})
        thread.put("table", step=each, name="samples", columns=COLUMNS, rows=ROWS)
    thread.end(finished)
    thread.wait(time.monotonic() + 400)
    assert counted == ["written"] * 2 * len(steps), told
    return told


def twice(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tracks a run that was interrupted after step 4 and resumed from its checkpoint of step 2."""
    told = track(name, directory, 0, range(1, 5), finished=False, monkeypatch=monkeypatch)
    return told + track(name, directory, 2, range(3, 6), finished=True, monkeypatch=monkeypatch)


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not installed: pip install -e '.[tensorboard]'"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert "tensorboard --logdir" in twice("tensorboard", tmp_path, monkeypatch)[0]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "a1b2c3d4e5f6"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [
        (step, step / 8) for step in range(1, 6)
    ]
    text = events.Tensors("samples/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "| 1 \\| 2? | three<br>four | 0.5 | True |" in text
    plugins = events.summary_metadata
    assert any(metadata.plugin_data.plugin_name == "hparams" for metadata in plugins.values())


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install -e '.[wandb]'")
    told = twice("wandb", tmp_path, monkeypatch)
    assert told[0].startswith("tracker wandb: wandb sync ")
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert [run.name.endswith("-a1b2c3d4e5f6") for run in runs] == [True, True], (
        "both attempts are of one run"
    )
    stored = [record for run in runs for record in history(next(run.glob("*.wandb")))]
    assert [(record["step"], record["reward"]) for record in stored if "reward" in record] == [
        (step, step / 8) for step in (1, 2, 3, 4, 3, 4, 5)
    ]
    assert any(record.get("samples/_type") == "table-file" for record in stored)


def history(path: Path) -> list[dict[str, Any]]:
    """The logged records of a wandb file: seven bytes, then records in LevelDB's log format in
    blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole, found = path.read_bytes(), 7, b"", list[dict[str, Any]]()
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found.append(
                    {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in items
                    }
                )
            whole = b""
    return found


def test_mlflow_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install -e '.[mlflow]'")
    from mlflow import MlflowClient

    twice("mlflow", tmp_path, monkeypatch)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("math")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first try", "FINISHED")
    assert run.data.params["trainer.batch_size"] == "4"
    values = sorted(
        (metric.step, metric.value)
        for metric in client.get_metric_history(run.info.run_id, "reward")
    )
    assert values == [(step, step / 8) for step in (1, 2, 3, 3, 4, 4, 5)]
    table = json.loads(
        (Path(client.download_artifacts(run.info.run_id, "samples.json"))).read_text()
    )
    assert table["columns"] == ["step", *COLUMNS]
    assert table["data"][0] == [1, *ROWS[0]]


def test_trackio_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    assert "trackio" not in sys.modules, "its folder is read when it is imported"
    trackio = pytest.importorskip(
        "trackio", reason="trackio is not installed: pip install -e '.[trackio]'"
    )
    twice("trackio", tmp_path, monkeypatch)
    (run,) = trackio.Api().runs("math")
    assert run.name == "first try-a1b2c3"
    assert run.config["trainer"]["batch_size"] == 4
    from trackio.sqlite_storage import SQLiteStorage

    lines = SQLiteStorage.get_logs("math", run.name, run_id=run.id)
    values = sorted((line["step"], line["reward"]) for line in lines if "reward" in line)
    assert values == [(step, step / 8) for step in (1, 2, 3, 3, 4, 4, 5)]
    assert [line["samples"]["_type"] for line in lines if "samples" in line] == [
        "trackio.table"
    ] * 7
