"""The training loop's side of the critic: none, on the trainer's own ranks, or in a critic-server.

Every rank holds a `ValueFunction` and calls the same methods in the same order. The critic itself
is `services/critic/critic.py` in both places (docs/adr/0005-one-critic-two-places.md).
"""

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from common.clients.critic import CriticClient
from common.errors import ConfigError, Conflict, ServiceError
from common.process.loop_thread import LoopThread
from common.settings.config import Config
from common.wire.schemas import CriticMetrics, Float32, TokenSequence
from learning.batching import Sizes
from learning.parking import Resident
from learning.ranks import Ranks
from learning.saving import Snapshot
from services.critic.critic import Critic
from trainer.algorithms.batch import Batch

_T = TypeVar("_T")


class CriticLost(ServiceError):
    """The critic-server no longer holds the critic that this run trained."""

    code = "critic_lost"


class ValueFunction:
    """Base class, for algorithms without a critic. Every method is a collective call."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self._config = config
        self._ranks = ranks

    def restore(self, directory: Path | None) -> None:
        """Loads the critic of the checkpoint `directory`, or starts a new one for None. Call this
        method first.

        Only rank 0's argument counts. Raises ConfigError when there is no critic in `directory`, or
        it is damaged.
        """

    def values(self, batch: Batch) -> list[Float32] | None:
        """Returns [L] for each row of this rank: the values of the states before its completion
        tokens; None without a critic.
        """
        return None

    def start_update(self, batch: Batch, seed: int) -> Callable[[], CriticMetrics | None]:
        """Starts an update on the batch's returns. Every rank calls the returned function once, for
        the metrics.
        """
        return lambda: None

    def resident(self) -> Resident:
        """Returns the models and optimizers on the GPU during an update."""
        return [], []

    def warming_up(self, step: int) -> bool:
        """Whether only the critic learns in the step after `step` steps (`critic.warmup_steps`)."""
        return self._config.algorithm.needs_critic and step < self._config.critic.warmup_steps

    def snapshots(self, alone: bool) -> dict[str, Snapshot]:
        """Returns the critic's part of a checkpoint, by folder. See `Snapshot.take`."""
        return {}


class LocalCritic(ValueFunction):
    """The critic on the trainer's devices (`critic.location trainer`): every rank holds it and
    trains on its share.
    """

    _FOLDER = "critic"
    _critic: Critic

    def restore(self, directory: Path | None) -> None:
        saved = None if directory is None else directory / self._FOLDER
        if self._ranks.is_rank_zero and saved is not None and not saved.is_dir():
            raise _no_critic(directory)
        self._critic = Critic(self._config, self._ranks, saved)

    def values(self, batch: Batch) -> list[Float32]:
        return self._critic.values(batch.tokens, self._sizes(batch))

    def start_update(self, batch: Batch, seed: int) -> Callable[[], CriticMetrics]:
        """Completes the update before it returns."""
        metrics = self._critic.update(batch.value_targets(), seed, self._sizes(batch))
        return lambda: metrics

    def _sizes(self, batch: Batch) -> Sizes:
        return batch.sizes(self._critic.model.layout.shared)

    def resident(self) -> Resident:
        return [self._critic.model], [self._critic.optimizer]

    def snapshots(self, alone: bool) -> dict[str, Snapshot]:
        return {self._FOLDER: self._critic.snapshot(alone)}


class RemoteCritic(ValueFunction):
    """The critic of a critic-server (`critic.location server`). Rank 0 calls it and shares the
    answers.

    Every method raises CriticLost when the critic-server no longer has this run's critic at the
    run's step: the run does not continue with another critic, but can be restarted from its newest
    checkpoint.

    Args:
        client: of the critic-server; only rank 0 needs this and the following arguments.
        loop: runs the client's calls.
        run_id: of this attempt, so that another attempt's critic is not mistaken for this one's.
    """

    _FOLDER = "critic-server"
    _SAVED = "saved.json"

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        client: CriticClient | None,
        loop: LoopThread | None,
        run_id: str,
    ) -> None:
        super().__init__(config, ranks)
        self._client = client
        self._loop = loop
        self._run_id = run_id
        self._step = 0
        """The critic's step; only rank 0's counts."""

    def restore(self, directory: Path | None) -> None:
        """See `ValueFunction`. Raises ServiceError (404) when the critic-server lacks the
        checkpoint's critic.
        """
        if not self._ranks.is_rank_zero:
            return
        step = 0
        saved_by: str | None = None
        if directory is not None:
            try:
                saved = json.loads((directory / self._FOLDER / self._SAVED).read_text())
                step = saved["step"]
                saved_by = saved["run_id"]
            except (OSError, ValueError, KeyError, TypeError):
                raise _no_critic(directory) from None
        server = self._server
        self._step = self._begin(server.restore(self._run_id, step, saved_by))().step

    def values(self, batch: Batch) -> list[Float32]:
        values: list[Float32] = []
        if self._ranks.is_rank_zero:
            sequences = [
                TokenSequence(row.prompt_ids, row.completion_ids) for row in batch.tokens.values()
            ]
            call = self._begin(self._server.values(sequences, self._run_id, self._step))
            # Copied: those from the wire are read-only, which torch warns of.
            values = [row.copy() for row in call()]
        return self._ranks.broadcast(values)

    def start_update(self, batch: Batch, seed: int) -> Callable[[], CriticMetrics]:
        """See `ValueFunction`. The critic-server computes in the background."""
        wait: Callable[[], CriticMetrics] | None = None
        assert batch.returns is not None
        batch.returns = batch.whole(batch.returns, self._ranks)
        if self._ranks.is_rank_zero:
            rows = list(batch.value_targets().values())
            wait = self._begin(self._server.update(self._run_id, self._step, seed, rows))

        def finish() -> CriticMetrics:
            metrics = self._ranks.broadcast(wait and wait())
            assert metrics is not None, "rank 0 has them"
            self._step += 1
            return metrics

        return finish

    def snapshots(self, alone: bool) -> dict[str, Snapshot]:
        """Tells the critic-server to save; returns a note that names the saved critic.

        The server keeps one more than `checkpoint.keep`: the previous one counts until
        this one is complete.
        """
        if not self._ranks.is_rank_zero:
            return {self._FOLDER: Snapshot()}
        keep = self._config.checkpoint.keep + 1
        status = self._begin(self._server.save(self._run_id, self._step, keep))()
        text = json.dumps({"run_id": self._run_id, "step": status.step})
        return {self._FOLDER: Snapshot(texts={self._SAVED: text})}

    @property
    def _server(self) -> CriticClient:
        assert self._client is not None, "rank 0 has a client"
        return self._client

    def _begin(self, coroutine: Coroutine[Any, Any, _T]) -> Callable[[], _T]:
        """Starts a call; the returned function waits for the answer."""
        assert self._loop is not None, "rank 0 has an event loop"
        wait = self._loop.begin(coroutine)

        def answer() -> _T:
            try:
                return wait()
            except ServiceError as error:
                if error.status != Conflict.status:
                    raise
                reason = error.message.removeprefix(f"{self._server.service}: ")
                raise CriticLost(
                    f"the critic-server lost the critic of this run: {reason}",
                    field=error.field,
                    value=error.value,
                    remedy="start the run again: "
                    "it continues from its newest checkpoint and that checkpoint's critic",
                ) from None

        return answer


def value_function(
    config: Config,
    ranks: Ranks,
    client: CriticClient | None = None,
    loop: LoopThread | None = None,
    run_id: str = "",
) -> ValueFunction:
    """Returns the critic of this run on this rank; call its `restore` next. For the arguments see
    `RemoteCritic`.
    """
    if not config.algorithm.needs_critic:
        return ValueFunction(config, ranks)
    if config.critic.location == "trainer":
        return LocalCritic(config, ranks)
    return RemoteCritic(config, ranks, client, loop=loop, run_id=run_id)


def _no_critic(directory: Path | None) -> ConfigError:
    """Returns the error for a checkpoint whose run had no critic, or one in another location."""
    return ConfigError(
        "the checkpoint holds no critic that this run can continue with",
        field="critic.location",
        value=str(directory),
        remedy="keep algorithm.advantage and critic.location as they were in that run, "
        "or set another trainer.run_dir",
    )
