"""What the training loop asks of a critic, wherever it computes: on the trainer's own ranks or in a critic-server.

Every rank makes a `ValueFunction` and calls the same methods in the same order with the same arguments (but for the
directories, which only rank 0 has); every rank gets the same results:

    critic = value_function(config, ranks, client, call, run_id)   # client, call and run_id: rank 0's, for a critic-server
    critic.restore(path of the checkpoint the run goes on from, on rank 0; None for a new run and on other ranks)
    each step:
        batch.values = critic.values(batch)
        pending = critic.start_update(batch, seed)   # then the policy's own update, while a critic-server computes
        metrics = pending()
    parts = critic.snapshots(alone)   # of a checkpoint, by folder

Without a critic `NoCritic` does nothing.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from common.config import Config
from common.critic_client import CriticClient
from common.errors import ConfigError, Conflict, ServiceError
from common.schemas import CriticMetrics, Float32
from learning.batching import split
from learning.ranks import Ranks
from learning.saving import ModelSnapshot
from services.critic.critic import Critic
from trainer.algorithms.batch import Batch

_T = TypeVar("_T")
Call = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine in an event loop of another thread and waits for its result."""


class CriticLost(ServiceError):
    """The critic-server has another critic than this run trained."""

    code = "critic_lost"


class ValueFunction(Protocol):
    """A critic, as the training loop uses it. Every method is a collective."""

    def restore(self, directory: Path | None) -> None:
        """Before anything else: a new critic, or the one of the checkpoint `directory`.

        Only rank 0's argument counts. Raises ConfigError when there is no critic in `directory`, or it is damaged.
        """

    def values(self, batch: Batch) -> list[Float32] | None:
        """[L] for each row: the value of the state before each of its completion tokens; None without a critic."""

    def start_update(self, batch: Batch, seed: int) -> Callable[[], CriticMetrics | None]:
        """Starts to learn from the batch's returns. The function returned waits for the end; every rank calls it once."""

    def warming_up(self, step: int) -> bool:
        """Whether the critic alone learns in the step after `step` steps (`critic.warmup_steps`)."""

    def snapshots(self, alone: bool) -> dict[str, ModelSnapshot]:
        """The critic's part of a checkpoint, by folder. See `ModelSnapshot.take`."""


class NoCritic:
    """For an algorithm without a critic."""

    def restore(self, directory: Path | None) -> None:
        """See `ValueFunction`."""

    def values(self, batch: Batch) -> None:
        """See `ValueFunction`."""

    def start_update(self, batch: Batch, seed: int) -> Callable[[], None]:
        """See `ValueFunction`."""
        return lambda: None

    def warming_up(self, step: int) -> bool:
        """See `ValueFunction`."""
        return False

    def snapshots(self, alone: bool) -> dict[str, ModelSnapshot]:
        """See `ValueFunction`."""
        return {}


class LocalCritic:
    """The critic on the trainer's own devices (`critic.location trainer`): every rank holds it and learns from its share."""

    _FOLDER = "critic"

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._critic: Critic | None = None

    def restore(self, directory: Path | None) -> None:
        """See `ValueFunction`."""
        saved = None if directory is None else directory / self._FOLDER
        if self._ranks.first and saved is not None and not saved.is_dir():
            raise no_critic(directory)
        self._critic = Critic(self._config, self._ranks, saved)

    def values(self, batch: Batch) -> list[Float32]:
        """See `ValueFunction`."""
        return self._restored().values(batch.sequences())

    def start_update(self, batch: Batch, seed: int) -> Callable[[], CriticMetrics]:
        """See `ValueFunction`. Here the update is done when this returns."""
        metrics = self._restored().update(batch.value_targets(), seed)
        return lambda: metrics

    def warming_up(self, step: int) -> bool:
        """See `ValueFunction`."""
        return step < self._config.critic.warmup_steps

    def snapshots(self, alone: bool) -> dict[str, ModelSnapshot]:
        """See `ValueFunction`: `critic`, a Hugging Face model with the optimiser's state beside it."""
        return {self._FOLDER: self._restored().snapshot(alone)}

    def _restored(self) -> Critic:
        assert self._critic is not None, "restore comes first"
        return self._critic


class RemoteCritic:
    """The critic of a critic-server (`critic.location server`). Rank 0 asks it, the other ranks are told.

    A critic-server that no longer has the critic of this run at the step it is at raises CriticLost: the run does not go on
    with another critic, but from its newest checkpoint when it is started again.

    Args:
        config: of the run.
        ranks: this process among the trainer's processes.
        client: of the critic-server; rank 0 alone needs it, and what follows.
        call: runs the client's calls.
        run_id: of this attempt, so that no other attempt's critic is taken for this one's.
    """

    _FOLDER, _SAVED = "critic-server", "saved.json"

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        client: CriticClient | None = None,
        call: Call | None = None,
        run_id: str = "",
    ) -> None:
        self._config, self._ranks, self._client, self._call, self._run_id = config, ranks, client, call, run_id
        self._step = 0
        """Of the critic, as rank 0 knows it."""

    def restore(self, directory: Path | None) -> None:
        """See `ValueFunction`. Raises ServiceError (404) when the critic-server does not have what the checkpoint names."""
        if not self._ranks.first:
            return
        step, saved_by = 0, None
        if directory is not None:
            try:
                saved = json.loads((directory / self._FOLDER / self._SAVED).read_text())
                step, saved_by = saved["step"], saved["run_id"]
            except (OSError, ValueError, KeyError, TypeError):
                raise no_critic(directory) from None
        self._step = self._ask(self._server().restore(self._run_id, step, saved_by)).step

    def values(self, batch: Batch) -> list[Float32]:
        """See `ValueFunction`."""
        body, sequences = b"", batch.sequences()
        if self._ranks.first:
            values = self._ask(self._server().values(sequences, self._run_id, self._step))
            body = np.concatenate(values).tobytes()
        flat = np.frombuffer(bytearray(self._ranks.broadcast(body)), np.float32)  # a bytearray can be written to
        return split(flat, [len(sequence.completion_ids) for sequence in sequences])

    def warming_up(self, step: int) -> bool:
        """See `ValueFunction`."""
        return step < self._config.critic.warmup_steps

    def start_update(self, batch: Batch, seed: int) -> Callable[[], CriticMetrics]:
        """See `ValueFunction`. The critic-server computes meanwhile."""
        task: asyncio.Task[CriticMetrics] | None = None
        if self._ranks.first:
            task = self._ask(_begun(self._server().update(self._run_id, self._step, seed, batch.value_targets())))

        def finish() -> CriticMetrics:
            body = b""
            if task is not None:
                body = json.dumps(asdict(self._ask(_ended(task)))).encode()
                self._step += 1
            return CriticMetrics(**json.loads(self._ranks.broadcast(body)))

        return finish

    def snapshots(self, alone: bool) -> dict[str, ModelSnapshot]:
        """Has the critic-server save, and gives what it saved in writing.

        One more than `trainer.keep_checkpoints` stay: until this checkpoint is complete, the one before is the newest.
        """
        if not self._ranks.first:
            return {self._FOLDER: ModelSnapshot()}
        keep = self._config.trainer.keep_checkpoints + 1
        status = self._ask(self._server().save(self._run_id, self._step, keep))
        text = json.dumps({"run_id": self._run_id, "step": status.step})
        return {self._FOLDER: ModelSnapshot(texts={self._SAVED: text})}

    def _server(self) -> CriticClient:
        assert self._client is not None, "rank 0 has a client"
        return self._client

    def _ask(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """The answer of the critic-server. Raises CriticLost when it does not have the critic that was meant."""
        assert self._call is not None, "rank 0 has an event loop"
        try:
            answer: _T = self._call(coroutine)
            return answer
        except ServiceError as error:
            if error.status != Conflict.status:
                raise
            raise CriticLost(
                f"the critic-server lost the critic of this run: {error.message.removeprefix(f'{self._server().service}: ')}",
                field=error.field,
                value=error.value,
                remedy="start the run again: it goes on from its newest checkpoint, with the critic of that time",
            ) from None


async def _begun(coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    return asyncio.create_task(coroutine)


async def _ended(task: asyncio.Task[_T]) -> _T:
    return await task


def value_function(
    config: Config, ranks: Ranks, client: CriticClient | None = None, call: Call | None = None, run_id: str = ""
) -> ValueFunction:
    """The critic of this run on this rank, to be restored. Arguments: see `RemoteCritic`."""
    if not config.algorithm.needs_critic:
        return NoCritic()
    if config.critic.location == "trainer":
        return LocalCritic(config, ranks)
    return RemoteCritic(config, ranks, client, call, run_id)


def no_critic(directory: Path | None) -> ConfigError:
    """The run of this checkpoint had no critic, or one in another place."""
    return ConfigError(
        "the checkpoint holds no critic that this run could go on with",
        field="critic.location",
        value=str(directory),
        remedy="keep algorithm.advantage and critic.location as they were in that run, or take another trainer.run_dir",
    )
