"""The modelled engine of the rehearsal at true size: its answers are SGLang's, its speed the model's."""

import asyncio
import base64
import json
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.true_size.cases import CASES, Case
from benchmarks.true_size.rank import Device
from benchmarks.true_size.stand_in.sglang.launch_server import Engine, Speed
from common.clients.rollout import completion_from_answer

SPEED = Speed(
    slots=4,
    kv_tokens=10_000,
    weights_s=0.01,
    kv_s=0.0,
    load_s=1.0,
    clock=1.0,
    vocabulary=1000,
    shortest=1.0,
    layers=0,
    top_k=0,
)


async def answers(engine: Engine, count: int, tokens: int) -> list[dict[str, object]]:
    """Returns `count` answers of `tokens` tokens, with the clock moved by hand."""
    waiting = [asyncio.ensure_future(engine.complete(10, tokens, True)) for _ in range(count)]
    while not all(each.done() for each in waiting):
        await asyncio.sleep(0)
        engine.advance(0.05)
    return [json.loads(each.result()) for each in waiting]


async def test_an_answer_is_read_like_sglangs_with_the_versions_that_sampled_it() -> None:
    engine = Engine(SPEED, "3")
    task = asyncio.ensure_future(engine.complete(10, 700, False))
    await asyncio.sleep(0)
    engine.advance(0.01 * 300)
    engine.load("4")
    while not task.done():
        engine.advance(0.05)
        await asyncio.sleep(0)
    completion = completion_from_answer(json.loads(await task))
    assert len(completion.token_ids) == 700
    assert completion.weight_versions == [(3, 0, 300), (4, 300, 700)]
    assert completion.text.endswith(("#### 12", "#### 13"))


@pytest.mark.parametrize(("count", "steps"), [(4, 100), (5, 200)])
async def test_sequences_wait_for_a_slot(count: int, steps: int) -> None:
    engine = Engine(SPEED, "0")
    assert len(await answers(engine, count, 100)) == count
    assert engine.steps == pytest.approx(steps, rel=0.1)


async def test_sequences_wait_for_room_for_their_keys_and_values() -> None:
    engine = Engine(replace(SPEED, kv_tokens=250), "0")
    await answers(engine, 4, 100)
    assert engine.steps == pytest.approx(200, rel=0.1)


async def test_the_experts_of_a_token_are_distinct() -> None:
    engine = Engine(replace(SPEED, layers=3, top_k=8), "0")
    (answer,) = await answers(engine, 1, 300)
    meta = answer["meta_info"]
    assert isinstance(meta, dict)
    experts = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(309, 3, 8)
    ordered = np.sort(experts, axis=2)
    assert (ordered[:, :, 1:] > ordered[:, :, :-1]).all()


def test_a_modelled_gpu_that_waits_for_the_host_names_what_the_host_did() -> None:
    device = Device(seconds_per_token=0.0, clock=1.0, max_staleness=0)
    start = time.perf_counter()
    device.did("take", start, start + 0.5)
    device.did("wait", start, start + 2.0)
    device.count_idle(start, start + 3.0)
    assert device.idle == pytest.approx({"take": 0.5, "wait": 1.5, "rest": 1.0})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_share_of_a_case_has_the_speed_of_the_whole(case: Case) -> None:
    """However many engines a process stands for, full memory is read in the same time."""
    one = case.speed(engines=case.engines, share=1.0, clock=1.0, slots=256)
    half = case.speed(engines=case.engines // 8, share=0.5, clock=1.0, slots=256)
    assert half["slots"] == 4 * one["slots"]
    assert half["kv_s"] * half["kv_tokens"] == pytest.approx(one["kv_s"] * one["kv_tokens"])
