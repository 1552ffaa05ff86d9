"""Re-executes what a Tinker server has computed since the last snapshot of each run, and compares
answers and saved weights with the recorded ones, bit for bit.
"""

import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from common.errors import ServiceError
from common.settings.config import Config
from learning.device import reproducible_numbers
from learning.ranks import Ranks
from trainer.audit.comparison import differences
from trainer.observe.audit import Setup
from trainer.tinker.learner import RunLearner
from trainer.tinker.records import Checkpoint, TinkerRun
from trainer.tinker.run import Recorded
from trainer.tinker.run_files import RUN
from trainer.tinker.settings import RECORDED
from trainer.tinker.state import State
from trainer.tinker.store import TinkerStore
from trainer.tinker.training import NotReproduced, repeat

_JOIN_S = 60.0


def recorded_settings(directory: Path) -> Recorded:
    """Returns what the bits of a server's results depend on."""
    return msgspec.json.decode((directory / RECORDED).read_bytes(), type=Recorded)


def audit_tinker(directory: Path) -> int:
    """Prints a line for each run of a server that has ended; returns 1 if any differs, else 0. With
    several ranks, each calls it.

    Raises ConfigError for a file that is damaged, or in use by the server.
    """
    recorded = recorded_settings(directory)
    setup = recorded.setup
    torch.set_num_threads(setup.threads)
    config = Config(**recorded.config)
    with Ranks.from_env(_JOIN_S, config) as ranks, reproducible_numbers(config.reproducible):
        learner = RunLearner(config, ranks)
        if not ranks.is_rank_zero:
            learner.follow()
            return 0
        for reason in differences(setup, Setup.here(ranks)):
            print(f"numbers may differ: {reason}", flush=True)
        try:
            return _all_runs(directory.absolute(), learner)
        finally:
            learner.close()


def _all_runs(directory: Path, learner: RunLearner) -> int:
    store = TinkerStore(directory / "tinker.sqlite")
    state = State(directory, most_runs=0)
    for record in store.records():
        state.add(record)
    status = 0
    for run in state.all(TinkerRun):
        try:
            print(f"{run.id}: {_one_run(run, learner, state, store=store)}", flush=True)
        except NotReproduced as error:
            print(f"{run.id}: differs: {error.message}", flush=True)
            status = 1
        with suppress(ServiceError):
            learner.unload(run.id)
    store.close()
    return status


def _one_run(run: TinkerRun, learner: RunLearner, state: State, *, store: TinkerStore) -> str:
    """Returns what was compared. Raises NotReproduced."""
    since = store.since(run)
    # It was asked for, and the server ended before it was made.
    if run.snapshot < 0 and not since:
        return "was never created"
    saved: dict[int, Checkpoint] = {}
    for checkpoint in state.owned(Checkpoint, run.owner, run=run.id):
        number = int(checkpoint.folder.rpartition("-")[2])
        # What was saved before the snapshot is not re-executed.
        if number > run.snapshot:
            saved[number] = checkpoint
    compared = len(saved)

    def compare(number: float) -> None:
        """Compares the weights that were saved before an operation, and not compared yet."""
        for earlier in sorted(saved):
            if earlier < number:
                _compare_saved(learner, saved.pop(earlier), state)

    repeat(learner, run, state.snapshot(run), since=since, before=compare)
    compare(float("inf"))
    return f"{len(since)} operations and {compared} saved weights are the same"


def _compare_saved(learner: RunLearner, checkpoint: Checkpoint, state: State) -> None:
    """Raises NotReproduced when a run's weights, or its optimiser's state where that was saved,
    differ from a checkpoint.
    """
    with tempfile.TemporaryDirectory() as scratch:
        again = Path(scratch) / "again"
        if checkpoint.kind == "weights":
            learner.save(checkpoint.run, again)
            # It has the checksums of all files.
            equal = (again / RUN).read_bytes() == (state.files(checkpoint) / RUN).read_bytes()
        else:
            equal = learner.export_adapter(checkpoint.run, again) == checkpoint.checksum
    if not equal:
        raise NotReproduced(f"the weights in {checkpoint.path}")
