"""The critic-server's logic without HTTP: the critic of one run at a time, and its checkpoints."""

import json
import logging
import re
import shutil
from pathlib import Path

from common.errors import Conflict, InvalidInput, NotFound
from common.process.storage import storing
from common.settings.config import Config
from common.wire.schemas import (
    CriticMetrics,
    CriticStatus,
    RestoreRequest,
    SaveRequest,
    UpdateRequest,
    ValueRequest,
    Values,
)
from learning.ranks import Ranks
from learning.saving import checksums, damaged
from services.critic.critic import Critic

log = logging.getLogger(__name__)
_OWNER = "critic_server.json"


class CriticService:
    """Holds one critic and refuses requests for any other.

    A critic is identified by its run and its number of training batches; after a start it belongs
    to no run. Checkpoints are in `state_dir/critic`. Not thread-safe, except `status`. Raises
    ConfigError when the model cannot be loaded.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._directory = config.state_dir / "critic"
        self._run_id: str | None = None
        self._applied: tuple[str, int, CriticMetrics] | None = None
        """Run, step and metrics of the last update."""
        self._new = True
        """Whether the critic was never trained."""
        self._critic: Critic | None = Critic(config, Ranks.alone(config))
        self._parameters = self._critic.model.size

    def values(self, request: ValueRequest) -> Values:
        """Returns the values of the sequences. Raises Conflict when the request names another
        critic.
        """
        critic = self._critic
        if request.run_id is not None:
            critic = self._named(request.run_id, request.step)
        if critic is None:
            raise Conflict("a failed update destroyed the critic", remedy="POST /restore")
        return Values(critic.values(request.sequences), critic.step)

    def update(self, request: UpdateRequest) -> CriticMetrics:
        """Trains the critic on a batch; a repeated request gets the same metrics again.

        Raises Conflict when the request names another critic, and the errors of `Critic.update`.
        Unless the error is InvalidInput, the critic is then lost and must be restored.
        """
        # The trainer did not get the answer and asks again: training twice would be wrong.
        if self._applied is not None and self._applied[:2] == (request.run_id, request.step):
            return self._applied[2]
        critic = self._named(request.run_id, request.step)
        self._new = False
        try:
            metrics = critic.update(request.rows, request.seed)
        except InvalidInput:
            raise
        except BaseException:  # the critic may be half updated
            self._forget()
            raise
        self._applied = (request.run_id, request.step, metrics)
        return metrics

    def restore(self, request: RestoreRequest) -> CriticStatus:
        """Loads the critic of `run_id`. Raises NotFound when there is no such checkpoint."""
        saved = self._find(request.step, request.saved_by) if request.step else None
        is_new = self._new and self._critic is not None
        if saved is not None or not is_new:
            self._forget()  # frees its memory first, because two critics may not fit
            self._critic = Critic(self._config, Ranks.alone(self._config), saved)
            self._new = saved is None
        self._run_id = request.run_id
        self._applied = None
        log.info("the critic of run %s continues at step %d", request.run_id, request.step)
        return self.status()

    def save(self, request: SaveRequest) -> CriticStatus:
        """Writes a checkpoint atomically, and removes all but the newest `keep`. Raises Conflict
        for another critic.
        """
        critic = self._named(request.run_id, request.step)
        target = self._path(request.step)
        for left_over in self._directory.glob("*.partial"):
            shutil.rmtree(left_over)
        # Under another name until it is complete, so that a crash leaves no half of a checkpoint.
        partial = target.with_suffix(".partial")
        serial = 1 + max(map(_serial, self._directory.glob("step_*")), default=0)
        try:
            with storing("the critic's checkpoint", target, "state_dir"):
                critic.save(partial)
                owner = {
                    "run_id": request.run_id,
                    "step": request.step,
                    "serial": serial,
                    "files": checksums(partial),
                }
                (partial / _OWNER).write_text(json.dumps(owner))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)

        # In order of writing: a run restarted at a lower step keeps its new checkpoints, and clocks
        # may jump.
        others = [
            path
            for path in self._directory.iterdir()
            if re.fullmatch(r"step_\d{6,}", path.name) and path != target
        ]
        for old in sorted(others, key=_serial, reverse=True)[request.keep - 1 :]:
            shutil.rmtree(old)
        return self.status()

    def status(self) -> CriticStatus:
        critic = self._critic
        return CriticStatus(
            run_id=self._run_id, step=critic.step if critic else 0, parameters=self._parameters
        )

    def _named(self, run_id: str, step: int | None) -> Critic:
        """Returns the critic if it belongs to `run_id` and is at `step`. Raises Conflict
        otherwise.
        """
        critic = self._critic
        if critic is None or (self._run_id, critic.step) != (run_id, step):
            current = f"at step {critic.step} of run {self._run_id}" if critic else "destroyed"
            raise Conflict(
                f"the critic is {current}, not at step {step} of run {run_id}",
                field="step" if self._run_id == run_id else "run_id",
                value=step if self._run_id == run_id else run_id,
                remedy="POST /restore",
            )
        return critic

    def _forget(self) -> None:
        self._critic = None
        self._run_id = None
        self._applied = None
        self._new = False

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step:06d}"

    def _find(self, step: int, saved_by: str | None) -> Path:
        path = self._path(step)
        reason = ""
        try:
            about = json.loads((path / _OWNER).read_text())
            changed = damaged(path, about["files"])
            if changed is not None:
                reason = f"it is damaged: {changed} has changed since it was written"
            elif saved_by is not None and about["run_id"] != saved_by:
                reason = f"it belongs to run {about['run_id']}"
        except FileNotFoundError:
            reason = "none was saved here"
        except (ValueError, KeyError, TypeError):
            reason = f"it is damaged: {_OWNER} has changed since it was written"
        if reason:
            raise NotFound(
                f"there is no critic of step {step} for run {saved_by}: {reason}",
                field="step",
                value=step,
                remedy="give the run a STATE_DIR of its own on a volume of critic-server; remove "
                "the trainer's checkpoint of that step to continue from the one before it, or "
                "start again with --checkpoint.resume false",
            )
        return path


def _serial(path: Path) -> int:
    """Returns the serial number of a checkpoint, which rises with every one written; 0 when it has
    none.
    """
    try:
        return int(json.loads((path / _OWNER).read_text())["serial"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
