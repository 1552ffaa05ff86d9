"""Calls to an engine that several contract tests share."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

PROMPT = [20, 21, 22, 23]
TOKENS = 240
LIMIT_S = 400


def long_request(
    worker: httpx.Client, pool: ThreadPoolExecutor, rid: str, asked: httpx.Client | None = None
) -> "Future[Any]":
    """Starts a request of 240 tokens and waits until it runs on `worker`; `asked` is another route
    to it."""
    body = {"input_ids": PROMPT, "rid": rid, "return_logprob": True}
    body["sampling_params"] = {"max_new_tokens": TOKENS, "ignore_eos": True}
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        future = pool.submit(lambda: (asked or worker).post("/generate", json=body).json())
        while not future.done():  # on a busy machine, the request may end before this check
            if _load(worker, "num_running_reqs"):
                return future
        _check(future.result())
    raise AssertionError("the request does not start")


def paused_request(worker: httpx.Client, pool: ThreadPoolExecutor, rid: str) -> "Future[Any]":
    """Starts a request of 240 tokens as `long_request` does and pauses the engine before it ends."""
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        future = long_request(worker, pool, rid)
        response = worker.post("/pause_generation", json={"mode": "retract"})
        assert response.status_code == 200, response.text
        while not future.done():
            if _load(worker, "num_running_reqs", "num_waiting_reqs"):
                return future
        _check(future.result())  # on a busy machine, the request may end before the pause
        worker.post("/continue_generation", json={})
    raise AssertionError("the request always ends before the pause")


def _load(worker: httpx.Client, *names: str) -> int:
    [load, *_] = worker.get("/v1/loads").json()["loads"]
    return sum(int(load[name]) for name in names)


def _check(answer: Any) -> None:
    """Checks that a request that ended too early for a test at least ended well."""
    assert answer["meta_info"]["finish_reason"]["type"] == "length", answer
    assert len(answer["output_ids"]) == TOKENS


def version(worker: httpx.Client) -> str:
    return str(worker.get("/model_info").json()["weight_version"])
