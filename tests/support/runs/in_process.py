"""Reads the results of runs in one process, and makes their engine fail."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx
from fastapi import FastAPI
from rich.console import Console

from common.settings.config import Config
from common.wire.codec import decode_groups
from common.wire.schemas import Group
from trainer.observe.run_dir import read_lines


def quiet() -> Console:
    return Console(quiet=True)


def metrics(config: Config) -> list[dict[str, Any]]:
    assert config.trainer.run_dir is not None
    return read_lines(config.trainer.run_dir / "metrics.jsonl")


def stored(config: Config) -> list[Group]:
    """Returns every group in the replay store, in prompt order."""
    with closing(sqlite3.connect(config.state_dir / "replay" / "replay.db")) as db:
        blobs = [row[0] for row in db.execute("SELECT data FROM blobs")]
    groups = [decode_groups(b"\x81\xa6groups\x91" + blob)[0] for blob in blobs]
    return sorted(groups, key=lambda group: group.position)


class Faulty(httpx.AsyncBaseTransport):
    """Answers calls to `/generate` whose numbers are in `failing` with `response` instead of the
    engine's answer."""

    def __init__(
        self, app: FastAPI, failing: set[int], response: Callable[[], httpx.Response]
    ) -> None:
        self.inner, self.failing, self.response, self.calls = (
            httpx.ASGITransport(app),
            failing,
            response,
            0,
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate":
            self.calls += 1
            if self.calls in self.failing:
                return self.response()
        return await self.inner.handle_async_request(request)
