"""The critic of one run at a time, and its checkpoints: what the critic-server does, without HTTP."""

import json
import logging
import re
import shutil
from pathlib import Path

from common.config import Config
from common.errors import Conflict, InvalidInput, NotFound
from common.schemas import (
    CriticMetrics,
    CriticStatus,
    RestoreRequest,
    SaveRequest,
    UpdateRequest,
    ValueRequest,
    Values,
)
from common.storing import storing
from learning.ranks import Ranks
from services.critic.critic import Critic

log = logging.getLogger(__name__)
_OWNER = "critic_server.json"


class CriticKeeper:
    """Says no to whoever means another critic than the one that is here.

    A critic is named by the run it learns for and the number of batches it was trained on. After a start it is nobody's, and
    new. Its checkpoints are in `state_dir/critic`. Not for several threads at once, but for `status`.

    Raises ConfigError when the model cannot be loaded.
    """

    def __init__(self, config: Config) -> None:
        self._config, self._directory = config, config.state_dir / "critic"
        self._run_id: str | None = None
        self._applied: tuple[str, int, CriticMetrics] | None = None
        """Run and step of the last update, with its answer."""
        self._new = True
        """Is the critic as it was made from `critic.model`?"""
        self._critic: Critic | None = Critic(config, Ranks.alone(config.trainer))
        self._parameters = self._critic.model.size

    def values(self, request: ValueRequest) -> Values:
        """Values of the sequences, by any critic when the request names none. Raises Conflict when it names another."""
        critic = self._present() if request.run_id is None else self._named(request.run_id, request.step)
        return Values(critic.values(request.sequences), critic.step)

    def update(self, request: UpdateRequest) -> CriticMetrics:
        """Trains the critic on a batch; when this very batch was the last it was trained on, the answer to that.

        Raises Conflict when the request names another critic than this, and whatever `Critic.update` raises: then, unless
        the request was at fault, the critic is lost and has to be restored.
        """
        if self._applied is not None and self._applied[:2] == (request.run_id, request.step):
            return self._applied[2]
        critic = self._named(request.run_id, request.step)
        self._new = False
        try:
            metrics = critic.update(request.rows, request.seed)
        except InvalidInput:
            raise
        except BaseException:  # somewhere in the middle of an update
            self._forget()
            raise
        self._applied = (request.run_id, request.step, metrics)
        return metrics

    def restore(self, request: RestoreRequest) -> CriticStatus:
        """From now on the critic is that of `run_id`. Raises NotFound when there is no such checkpoint."""
        saved = self._find(request.step, request.saved_by) if request.step else None
        if not (saved is None and self._new and self._critic is not None):
            self._forget()  # before the other is made: both may not fit
            self._critic = Critic(self._config, Ranks.alone(self._config.trainer), saved)
            self._new = saved is None
        self._run_id, self._applied = request.run_id, None
        log.info("the critic of run %s goes on at step %d", request.run_id, request.step)
        return self.status()

    def save(self, request: SaveRequest) -> CriticStatus:
        """Writes a checkpoint, complete or not at all, and removes all but the last `keep` written.

        Raises Conflict when the request names another critic than this.
        """
        critic, target = self._named(request.run_id, request.step), self._path(request.step)
        for left_over in self._directory.glob("*.partial"):
            shutil.rmtree(left_over)
        partial = target.with_suffix(".partial")
        serial = 1 + max(map(_serial, self._directory.glob("step_*")), default=0)
        owner = {"run_id": request.run_id, "step": request.step, "serial": serial}
        try:
            with storing("the critic's checkpoint", target, "state_dir"):
                critic.save(partial)
                (partial / _OWNER).write_text(json.dumps(owner))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        self._remove_old(target, request.keep)
        return self.status()

    def status(self) -> CriticStatus:
        """Whose critic this is, and how often it was updated."""
        critic = self._critic
        return CriticStatus(run_id=self._run_id, step=critic.step if critic else 0, parameters=self._parameters)

    def _named(self, run_id: str, step: int | None) -> Critic:
        """The critic, if it is that of `run_id` at `step`."""
        critic = self._critic
        if critic is None or (self._run_id, critic.step) != (run_id, step):
            here = f"at step {critic.step} of run {self._run_id}" if critic and self._run_id else "not that of any run"
            wrong_run = self._run_id != run_id
            raise Conflict(
                f"the critic is {here}, not at step {step} of run {run_id}",
                field="run_id" if wrong_run else "step",
                value=run_id if wrong_run else step,
                remedy="POST /restore",
            )
        return critic

    def _present(self) -> Critic:
        if self._critic is None:
            raise Conflict("the critic was lost in an update that failed", remedy="POST /restore")
        return self._critic

    def _forget(self) -> None:
        self._critic, self._run_id, self._applied, self._new = None, None, None, False

    def _remove_old(self, newest: Path, keep: int) -> None:
        """By order of writing, not by step: a run that began anew at a lower step must not lose what it has just written.

        Not by the files' times either: clocks jump.
        """
        others = [path for path in self._directory.iterdir() if re.fullmatch(r"step_\d{6,}", path.name) and path != newest]
        by_age = sorted(others, key=_serial, reverse=True)
        for old in by_age[keep - 1 :]:
            shutil.rmtree(old)

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step:06d}"

    def _find(self, step: int, saved_by: str | None) -> Path:
        path = self._path(step)
        try:
            owner = json.loads((path / _OWNER).read_text())["run_id"]
        except (ValueError, KeyError, TypeError) as error:
            raise NotFound(
                f"the critic that was saved here at step {step} is damaged: {type(error).__name__} {error}",
                field="step",
                value=str(path),
                remedy="remove the trainer's checkpoint of that step to go on from the one before",
            ) from None
        except FileNotFoundError:
            raise NotFound(
                f"no critic was saved here at step {step}",
                field="step",
                value=step,
                remedy="mount a volume for STATE_DIR on critic-server, or start the run anew with --trainer.resume false",
            ) from None
        if saved_by is not None and owner != saved_by:
            raise NotFound(
                f"the critic that was saved here at step {step} is that of run {owner}",
                field="saved_by",
                value=saved_by,
                remedy="give every run a STATE_DIR of its own, or start the run anew with --trainer.resume false",
            )
        return path


def _serial(path: Path) -> int:
    """Rises with every checkpoint written here; 0 for one that does not say."""
    try:
        return int(json.loads((path / _OWNER).read_text())["serial"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
