"""Composes the server: the learner on every rank, and on rank 0 engines, store and HTTP."""

import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI
from transformers import AutoModelForCausalLM

from common import Json
from common.clients.rollout import BASE_VERSION, RolloutClient
from common.errors import ConfigError
from common.process.metrics import Metrics
from common.process.security import is_loopback
from common.process.topology import ROLLOUT, TINKER, Topology
from common.settings.config import Config
from learning.loading import Pretrained
from learning.ranks import Ranks
from services.engine.app import make_app
from services.http.app import serve
from services.rollout.engine_client import TINKER_ADAPTERS, EngineClient
from trainer.backends.embedded import embedded_engine
from trainer.backends.server import add_nodes
from trainer.observe.audit import Setup
from trainer.policy.scorer import context_length
from trainer.start.rank import started
from trainer.tinker.app import create_tinker_app
from trainer.tinker.clients import Clients
from trainer.tinker.learner import RunLearner
from trainer.tinker.sampling import Adapters
from trainer.tinker.server import TinkerServer
from trainer.tinker.settings import RECORDED
from trainer.trackers.base import flatten
from trainer.weights.board import WeightBoard

log = logging.getLogger(__name__)
_IN_PROCESS = "http://in-process"


def run(config: Config, topology: Topology, clients: Clients) -> None:
    """Serves Tinker's API on rank 0 until the end; the other ranks compute what rank 0 asks for."""
    with started(config, topology, TINKER) as (ranks, lock):
        assert config.trainer.run_dir is not None, "`load` sets it"
        if lock is not None:
            _record_settings(config, Setup.here(ranks), config.trainer.run_dir)
        learner = RunLearner(config, ranks)
        if lock is None:
            learner.follow()
            return
        host, port = topology.bind(TINKER, config.tinker.port)
        host = config.tinker.host or host
        if not is_loopback(host) and not clients.are_told_apart:
            log.warning("anyone who reaches %s:%d can use this server: set TINKER_KEYS", host, port)
        app = _composed(config, topology, ranks, learner=learner, clients=clients)
        try:
            serve(app, host, port, f"model={config.model.name} dir={config.trainer.run_dir}")
        finally:
            learner.close()


class Recorded(msgspec.Struct):
    """What the bits of a server's results depend on."""

    config: Json
    setup: Setup


def _record_settings(config: Config, setup: Setup, directory: Path) -> None:
    """Writes what the bits of all runs depend on. Raises ConfigError when the directory is of a
    server with another base model or scale, in which no run would come back as it was.
    """
    file = directory / RECORDED
    recorded = Recorded(config.model_dump(mode="json"), setup)
    if file.exists():
        before = flatten(msgspec.json.decode(file.read_bytes(), type=Recorded).config)
        now = flatten(recorded.config)
        for name in ("model.name", "model.dtype", "lora.alpha"):
            if now[name] != before[name]:
                raise ConfigError(
                    f"the runs in {directory} were made with another {name}",
                    field=name,
                    value=now[name],
                    remedy=f"set it to {before[name]}, or name another directory",
                )
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(recorded))
    new.replace(file)


def _composed(
    config: Config, topology: Topology, ranks: Ranks, *, learner: RunLearner, clients: Clients
) -> FastAPI:
    """Returns the app of the server with its engines: in this process, or in a job group those of
    rollout-server.
    """
    directory = config.trainer.run_dir
    assert directory is not None, "`load` sets it"
    limit_s = config.limits.service_timeout_s
    board: WeightBoard | None = None
    entered: list[AbstractAsyncContextManager[Any, Any]]
    if topology.group is None:
        files = Pretrained(AutoModelForCausalLM, config.model.name).files(ranks)
        engine = embedded_engine(config, files, BASE_VERSION, beside_trainer=True)
        app = make_app(engine)
        transport = httpx.ASGITransport(app)
        client = RolloutClient("engine", _IN_PROCESS, transport=transport, deadline_s=limit_s)
        control = EngineClient("engine", _IN_PROCESS, transport=transport)
        adapters = Adapters(lambda: [control], TINKER_ADAPTERS)
        context = engine.model.max_context_tokens
        entered = [app.router.lifespan_context(app), client, control]
    else:
        # It has no weights for the nodes: each engine starts with the base model and gets adapters.
        board = WeightBoard(directory / "weights")
        url = topology.url(ROLLOUT, config.rollout.router_port)
        client = RolloutClient(ROLLOUT, url, deadline_s=limit_s)
        client.seeds_apart = config.rollout.engine == "sglang"
        engines = AsyncExitStack()
        adapters = Adapters(partial(_engines, board, {}, engines), TINKER_ADAPTERS)
        context = context_length(config.model) or config.rollout.max_context_tokens
        if config.rollout.engine == "embedded":
            context = min(context, config.rollout.max_context_tokens)
        entered = [engines, client]

    name = config.tinker.name or config.model.name
    server = TinkerServer(
        directory.absolute(),
        learner,
        client,
        adapters,
        base_model=name,
        max_context_tokens=context,
        most_runs=config.tinker.max_runs,
        resident=config.tinker.resident_runs,
        seed=config.seed,
        stable_reinforce=config.tinker.stable_reinforce,
    )

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        async with AsyncExitStack() as parts:
            for part in (*entered, server.running()):
                await parts.enter_async_context(part)
            yield

    # Clients load the tokenizer by a name, or from a directory of this machine.
    tokenizer = str(Path(name).absolute()) if Path(name).is_dir() else name
    made = create_tinker_app(server, clients, tokenizer, lifespan, metrics=Metrics(TINKER))
    if board is not None:
        add_nodes(made, board)
    return made


def _engines(
    board: WeightBoard, known: dict[str, EngineClient], end: AsyncExitStack
) -> list[EngineClient]:
    """Returns a client for each engine whose node reports that it serves; `end` closes them."""
    urls = [worker.url for worker in board.workers() if worker.state == "ready"]
    for url in urls:
        if url not in known:
            known[url] = EngineClient("engine", url)
            end.push_async_callback(known[url].close)
    return [known[url] for url in urls]
