"""TensorBoard: event files in the run directory, by its own writer (torch's would load all of torch into this process)."""

import json
import time
from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from trainer.trackers.base import Cell, RunInfo


class Made:
    """`tensorboard --logdir RUN_DIR/trackers`, or a folder of many runs."""

    def __init__(self, run: RunInfo) -> None:
        directory = run.directory / "tensorboard" / run.id
        self.where = f"tensorboard --logdir {directory}"
        self._writer = EventFileWriter(str(directory))
        # Hides what an interrupted attempt wrote of later steps.
        self._event(run.step + 1, session_log=SessionLog(status=SessionLog.START))
        self._event(run.step, summary=hparams_pb(run.parameters, trial_id=run.id))
        self._text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```", run.step)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._event(step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]))

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        lines: list[Sequence[Cell]] = [columns, ["---"] * len(columns), *rows]
        self._text(name, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)

    def close(self, finished: bool) -> None:
        self._writer.close()

    def _text(self, tag: str, markdown: str, step: int) -> None:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[markdown.encode()], tensor_shape=shape)
        metadata = create_summary_metadata(display_name=tag, description="")
        self._event(step, summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]))

    def _event(self, step: int, **content: Summary | SessionLog) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))
        self._writer.flush()


def _cell(value: Cell) -> str:
    """In a Markdown table."""
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")
