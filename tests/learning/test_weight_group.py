"""Joining the group that carries weights: no rank has joined until all have joined."""

import asyncio
import gc
import threading
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from learning import weight_group
from learning.weight_group import join
from services.engine import distributed
from services.engine.scheduler import RequestRefused
from tests.support.errors import raises


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False
    )


def test_a_rank_that_is_alone_has_not_joined(store: dist.TCPStore) -> None:
    with pytest.raises(RuntimeError):
        join(
            "127.0.0.1",
            store.port,
            rank=0,
            world_size=2,
            name="alone",
            backend="gloo",
            timeout_s=0.5,
        )


def test_nccl_connects_when_it_joins(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device, NCCL would connect only at the first weights. What NCCL itself does needs
    GPUs."""
    asked: list[dict[str, Any]] = []

    def make(*_: Any, **options: Any) -> tuple[Any, None]:
        asked.append(options)
        return object(), None

    monkeypatch.setattr(weight_group, "_new_process_group_helper", make)
    monkeypatch.setattr(weight_group, "_world", type("World", (), {"pg_group_ranks": {}}))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for backend in ("nccl", "gloo"):
        join(
            "127.0.0.1",
            store.port,
            rank=0,
            world_size=1,
            name="all",
            backend=backend,
            timeout_s=5.0,
        )
    assert [options["device_id"] for options in asked] == [torch.device("cuda", 3), None]


async def test_an_engine_that_leaves_a_forming_group_keeps_the_next_one_of_that_name(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        distributed, "_TIMEOUT_S", 1.0
    )  # nobody else joins: the abandoned threads must end
    updates = distributed.WeightUpdates(cast(Any, None))  # groups do not need the engine
    place = {
        "master_address": "127.0.0.1",
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": 2,
    }
    body = distributed.InitBody.model_validate(place | {"backend": "gloo"})
    first = asyncio.create_task(updates.init(body))
    await asyncio.sleep(0)
    await updates.destroy(body)
    second = asyncio.create_task(updates.init(body))
    with raises(RequestRefused, field="group_name", value=body.group_name):
        await first
    await updates.destroy(body)
    with raises(RequestRefused, field="group_name", value=body.group_name):
        await second


async def test_a_join_that_is_abandoned_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    left = asyncio.Event()
    goes_on = threading.Event()

    def come() -> None:
        goes_on.wait(400)
        raise RuntimeError("nobody else has come")

    left.set()
    with raises(RequestRefused, field="group_name"):
        await distributed._until_left(left, come)
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "weights":
            thread.join()
    await asyncio.sleep(0.1)  # a log that came later would only be missed
    gc.collect()
    assert "never retrieved" not in caplog.text
