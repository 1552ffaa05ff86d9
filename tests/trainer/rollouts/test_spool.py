"""Experts on the disk of rank 0."""

import gc
from pathlib import Path

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from common.clients import base
from common.errors import NotFound
from common.settings.config import Config
from common.settings.sections import TrainerSection
from tests.support.batches.groups import batch_of, off_policy_groups
from trainer.algorithms import spool as module
from trainer.algorithms.spool import SpooledExperts, loaded, spool
from trainer.backends.server import add_experts


def test_experts_are_read_from_the_file_which_ends_with_its_group(tmp_path: Path) -> None:
    config = Config(trainer=TrainerSection(routing_replay=True))
    group = off_policy_groups()[0]
    rng = np.random.default_rng(0)
    expected = [rng.integers(0, 9, size).astype(np.uint8) for size in (12, 40, 8, 16, 4)]
    group.prompt_routed_experts = expected[0]
    for completion, experts in zip(group.completions, expected[1:], strict=True):
        completion.routed_experts = experts
    spool(group, tmp_path / "experts")

    (path,) = (tmp_path / "experts").iterdir()
    assert path.stat().st_size == sum(map(len, expected))
    batch = batch_of([group], config)
    for row, experts in zip(batch.tokens.values(), expected[1:], strict=True):
        assert row.experts is not None
        assert isinstance(row.experts[1], SpooledExperts), "a rank is told where they are"
        assert np.array_equal(loaded(row.experts[0]), expected[0])
        assert np.array_equal(loaded(row.experts[1]), experts)

    del batch, group, completion, row
    gc.collect()
    assert not path.exists(), "the group was trained on"


async def test_a_rank_of_another_node_asks_rank_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = FastAPI()
    add_experts(app, tmp_path)
    name = f"{'a' * 32}.experts"
    (tmp_path / name).write_bytes(bytes(range(100)))

    class There(base.Client):
        def __init__(self, service: str, url: str, deadline_s: float) -> None:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            super().__init__(service, url, deadline_s=deadline_s, transport=transport)

    monkeypatch.setattr(module, "Client", There)
    elsewhere = SpooledExperts(tmp_path / "no" / name, 10, 5, "http://rank-zero")
    assert await elsewhere._fetch() == bytes(range(10, 15))
    with pytest.raises(NotFound):
        module.read_part(tmp_path / "no" / name, 0, 1)
