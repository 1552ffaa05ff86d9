"""Calls to an engine that several contract tests share."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

PROMPT = [20, 21, 22, 23]


def long_request(worker: httpx.Client, pool: ThreadPoolExecutor, rid: str, asked: httpx.Client | None = None) -> "Future[Any]":
    """Starts a request of 240 tokens and waits until it runs on `worker`; `asked` is another route to it."""
    body = {"input_ids": PROMPT, "rid": rid, "return_logprob": True}
    body["sampling_params"] = {"max_new_tokens": 240, "ignore_eos": True}
    limit = time.monotonic() + 400
    while time.monotonic() < limit:
        future = pool.submit(lambda: (asked or worker).post("/generate", json=body).json())
        while not future.done():  # on a busy machine, the request may end before this check
            if worker.get("/v1/loads").json()["loads"][0]["num_running_reqs"]:
                return future
    raise AssertionError("the request does not start")


def version(worker: httpx.Client) -> str:
    return str(worker.get("/model_info").json()["weight_version"])
