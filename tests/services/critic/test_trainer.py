"""The value functions that the training loop calls: a critic in its own process, and one behind
HTTP."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from common.clients.critic import CriticClient
from common.errors import ConfigError, ServiceError
from common.process.loop_thread import LoopThread
from common.settings.config import Config
from common.wire.schemas import CriticMetrics
from learning.ranks import Ranks
from tests.support.batches.critic import Start, make_batch
from tests.support.batches.groups import known
from tests.support.processes.ranks import run_ranks
from trainer.algorithms.batch import Batch
from trainer.policy.critic import CriticLost, LocalCritic, ValueFunction, value_function

pytestmark = pytest.mark.integration


def restored(function: ValueFunction, directory: Path | None = None) -> ValueFunction:
    function.restore(directory)
    return function


def update(function: ValueFunction, batch: Batch, seed: int) -> CriticMetrics:
    metrics = function.start_update(batch, seed)()
    assert metrics is not None
    return metrics


def write(function: ValueFunction, directory: Path) -> None:
    for folder, snapshot in function.snapshots(alone=False).items():
        snapshot.write(directory / folder)


def test_a_local_critic_goes_on_from_its_checkpoint(config: Config, tmp_path: Path) -> None:
    one = restored(LocalCritic(config, Ranks()))
    update(one, make_batch(6), seed=0)
    write(one, tmp_path / "one")
    again = restored(LocalCritic(config, Ranks()), tmp_path / "one")
    write(again, tmp_path / "again")
    files = [tmp_path / name / "critic" / "model.safetensors" for name in ("one", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    values, expected = (known(function.values(make_batch(4))) for function in (again, one))
    for mine, theirs in zip(values, expected, strict=True):
        np.testing.assert_allclose(
            mine, theirs, rtol=0, atol=1e-7
        )  # rounding depends on memory layout
    metrics = [asdict(update(function, make_batch(6, seed=1), seed=1)) for function in (again, one)]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-6)


def test_a_checkpoint_of_a_run_without_a_critic_is_refused(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no critic") as error:
        LocalCritic(config, Ranks()).restore(tmp_path)
    assert error.value.field == "critic.location"


@contextmanager
def served(port: int) -> Iterator[tuple[CriticClient, LoopThread]]:
    """Yields a client of the critic-server on `port`, and its event loop."""
    with LoopThread() as loop:
        client = CriticClient("critic-server", f"http://127.0.0.1:{port}", deadline_s=120)
        yield client, loop
        loop.call(client.close())


def remote(config: Config, place: tuple[CriticClient, LoopThread], run_id: str) -> ValueFunction:
    config = config.model_copy(deep=True)
    config.critic.location = "server"
    client, loop = place
    return value_function(config, Ranks(), client, loop, run_id)


def learn(function: ValueFunction, batches: range) -> list[CriticMetrics]:
    """Makes successive updates, each with the function's own old values."""
    metrics = []
    for seed in batches:
        batch = make_batch(7, seed)
        batch.values = known(function.values(batch))
        metrics.append(update(function, batch, seed))
    return metrics


def test_a_critic_server_gives_what_the_trainer_would_compute_itself(
    start: Start, port: int, config: Config, tmp_path: Path
) -> None:
    """Also with a checkpoint, a killed server, and an attempt that continues from the
    checkpoint."""
    local = restored(LocalCritic(config, Ranks()))
    expected = learn(local, range(4))
    process = start()
    with served(port) as place:
        first = restored(remote(config, place, "first"))
        found = learn(first, range(2))
        write(first, tmp_path / "checkpoint")
        learn(first, range(2, 3))
        process.kill()
        process.wait()
        start()
        with pytest.raises(CriticLost, match="lost the critic of this run") as error:
            first.values(make_batch(2))
        assert "continues from its newest checkpoint" in str(error.value.remedy)
        with pytest.raises(CriticLost):
            first.start_update(make_batch(2), seed=0)()
        with pytest.raises(CriticLost):
            first.snapshots(alone=False)
        second = restored(remote(config, place, "second"), tmp_path / "checkpoint")
        found += learn(second, range(2, 4))
        for mine, theirs in zip(found, expected, strict=True):
            assert asdict(mine) == pytest.approx(asdict(theirs), abs=1e-6)
        both = (known(function.values(make_batch(9))) for function in (second, local))
        for values, others in zip(*both, strict=True):
            np.testing.assert_allclose(values, others, atol=1e-6)
            assert values.flags.writeable
        with pytest.raises(CriticLost):  # another attempt has taken the critic over
            first.values(make_batch(2))
        with pytest.raises(ConfigError, match="holds no critic"):
            remote(config, place, "third").restore(tmp_path)
        shutil.rmtree(config.state_dir / "critic")
        with pytest.raises(ServiceError, match="no critic of step 2") as missing:
            remote(config, place, "third").restore(tmp_path / "checkpoint")
        assert missing.value.status == 404


def test_both_ranks_of_a_trainer_get_the_answers_of_the_critic_server(
    start: Start, port: int, config: Config, settings: list[str], tmp_path: Path
) -> None:
    start()
    words = ("--critic.location", "server", "--critic.port", str(port))
    run_ranks(2, "remote_critic", str(tmp_path), *settings, *words)
    told = [json.loads((tmp_path / f"told{rank}.json").read_text()) for rank in (0, 1)]
    assert told[0] == told[1]
    local = restored(LocalCritic(config, Ranks()))
    metrics = asdict(update(local, make_batch(6), seed=3))
    assert told[0]["metrics"] == pytest.approx(metrics, abs=1e-6)
    assert told[0]["values"] == pytest.approx(
        np.concatenate(known(local.values(make_batch(5)))).tolist(), abs=1e-6
    )
