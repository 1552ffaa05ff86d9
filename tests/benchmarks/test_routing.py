"""Runs by the real path: with the engine's experts, engine and trainer differ by rounding alone."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.routing import bytes_of_experts, run, shifted_by_one, write_model
from common.errors import ConfigError
from tests.support.errors import raises

_LAYERS = 4
_TOP_K = 8


@pytest.mark.integration
@pytest.mark.slow
def test_replayed_experts_leave_rounding_and_shifted_ones_do_not(
    base_model: Path, tmp_path: Path
) -> None:
    """A router whose experts are nearly tied: the rounding of float32 tips its choices."""
    model = tmp_path / "model"
    write_model(model, 64, tied=True, tokenizer=base_model)
    largest: dict[str, float] = {}
    for experts in ("own", "replayed", "shifted"):
        replays = experts != "own"
        with shifted_by_one(experts == "shifted"):
            watched = run(model, tmp_path / experts, 2, **{"trainer.routing_replay": replays})
        largest[experts] = float(np.concatenate(watched.differences).max())
        expected_bytes = _LAYERS * _TOP_K if replays else 0
        assert bytes_of_experts(watched.groups) == expected_bytes
    assert largest["replayed"] < 2e-5
    assert largest["own"] > 1e-2
    assert largest["shifted"] > 1e-2


@pytest.mark.integration
@pytest.mark.slow
def test_a_model_without_experts_is_refused_at_the_start(base_model: Path, tmp_path: Path) -> None:
    with raises(ConfigError, field="trainer.routing_replay"):
        run(base_model, tmp_path / "run", 1, **{"trainer.routing_replay": True})
