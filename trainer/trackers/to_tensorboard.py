"""TensorBoard: event files in the run directory."""

import json
from collections.abc import Sequence

from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from torch.utils.tensorboard import SummaryWriter

from trainer.trackers.base import Cell, Numbers, RunInfo

# Characters of a text that a cell of a Markdown table cannot have as they are.
_MARKDOWN = str.maketrans({"\\": "\\\\", "|": "\\|", "<": "&lt;", "\n": "<br>"})


class TensorBoardTracker:
    """Event files for `tensorboard --logdir RUN_DIR/trackers`, or for a folder of many runs."""

    def __init__(self, run: RunInfo) -> None:
        directory = run.directory / "tensorboard" / run.id
        self.where = f"tensorboard --logdir {directory}"
        # Hides later steps of an interrupted attempt.
        self._writer = SummaryWriter(str(directory), purge_step=run.step + 1)
        parameters = hparams_pb(run.parameters, trial_id=run.id)
        self._writer.file_writer.add_summary(parameters, run.step)
        config = json.dumps(run.config, indent=1)
        self._writer.add_text("config", f"```json\n{config}\n```", run.step)

    def metrics(self, step: int, values: Numbers) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        lines: list[Sequence[Cell]] = [columns, ["---"] * len(columns), *rows]
        markdown = []
        for line in lines:
            cells = [str(cell).translate(_MARKDOWN) for cell in line]
            markdown.append(f"| {' | '.join(cells)} |")
        self._writer.add_text(name, "\n".join(markdown), step)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()
