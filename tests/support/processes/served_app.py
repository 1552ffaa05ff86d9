"""`python -m tests.support.processes.served_app SERVICE PORT DIRECTORY MODEL` runs one service in a process
until SIGTERM."""

import sys
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from fastapi import FastAPI

from services.http.app import serve
from tests.support.services.apps import make, tiny

SMALL = (
    "--algorithm.name",
    "ppo",
    "--reward.functions",
    '{"name": "math", "timeout_s": 0.5}',
    "--max_body_mb",
    "1",
    "--data.curriculum",
    "difficulty",
)


def fuzzed(service: str, directory: Path, model: Path) -> FastAPI:
    """Makes the app with small limits and its state in `directory`."""
    app = make(service, tiny(model, directory, *SMALL, "--replay.capacity", "2000"))
    if service == "agent":  # its node never starts: engine and router have their own tests

        @asynccontextmanager
        async def life(_: FastAPI):  # type: ignore[no-untyped-def]
            app.state.draining.clear()
            yield

        app.router.lifespan_context = life
    return app


if __name__ == "__main__":
    service, port, directory, model = sys.argv[1:]
    torch.set_num_threads(1)
    serve(fuzzed(service, Path(directory), Path(model)), "127.0.0.1", int(port))
