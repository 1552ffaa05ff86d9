"""Composes the server: the learner on every rank, and on rank 0 engines, store and HTTP."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
from transformers import AutoModelForCausalLM

from common.clients.rollout import BASE_VERSION, RolloutClient
from common.process.metrics import Metrics
from common.process.security import is_loopback
from common.process.topology import Topology
from common.settings.config import Config
from learning.device import choose_device
from learning.loading import Pretrained
from learning.ranks import Ranks
from services.engine.app import make_app
from services.engine.engine import Engine
from services.engine.model import Model
from services.http.app import serve
from services.rollout.engine_client import EngineClient
from trainer.start.rank import started
from trainer.tinker.app import create_tinker_app
from trainer.tinker.clients import Clients
from trainer.tinker.interface import Learner
from trainer.tinker.learner import RunLearner
from trainer.tinker.sampling import Adapters
from trainer.tinker.server import TinkerServer

log = logging.getLogger(__name__)
TASK = "tinker-server"
_IN_PROCESS = "http://in-process"
_ADAPTERS = 8
"""Adapters that an engine keeps, of those that no request uses."""


def run(config: Config, topology: Topology, clients: Clients) -> None:
    """Serves on rank 0, and computes what it says on the others, until the end."""
    with started(config, topology, TASK) as (ranks, lock):
        learner = RunLearner(config, ranks)
        if lock is None:
            learner.follow()
            return
        host, port = topology.bind(TASK, config.tinker.port)
        host = config.tinker.host or host
        if not is_loopback(host) and not clients.are_told_apart:
            log.warning("anyone who reaches %s:%d can use this server: set TINKER_KEYS", host, port)
        metrics = Metrics(TASK)
        server, lifespan = _composed(config, ranks, learner)
        app = create_tinker_app(server, clients, _tokenizer(config), lifespan, metrics)
        try:
            serve(app, host, port, f"model={server.base_model} dir={config.trainer.run_dir}")
        finally:
            learner.close()


def _tokenizer(config: Config) -> str:
    """Returns what clients load the tokenizer from: a name, or a directory of this machine."""
    name = config.tinker.name or config.model.name
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def _composed(
    config: Config, ranks: Ranks, learner: Learner
) -> tuple[TinkerServer, Callable[[], AbstractAsyncContextManager[None]]]:
    """Returns the server, and its lifespan with that of the engine."""
    directory = config.trainer.run_dir
    assert directory is not None, "`load` sets it"
    files = Pretrained(AutoModelForCausalLM, config.model.name).files(ranks)
    engine = _engine(config, files)
    app = make_app(engine)
    transport = httpx.ASGITransport(app)
    limit_s = config.limits.service_timeout_s
    client = RolloutClient("engine", _IN_PROCESS, transport=transport, deadline_s=limit_s)
    control = EngineClient("engine", _IN_PROCESS, transport=transport)
    server = TinkerServer(
        directory.absolute(),
        learner,
        client,
        Adapters(lambda: [control], _ADAPTERS),
        base_model=config.tinker.name or config.model.name,
        max_context_tokens=engine.model.max_context_tokens,
        most_runs=config.tinker.max_runs,
        resident=config.tinker.resident_runs,
        seed=config.seed,
    )

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(app.router.lifespan_context(app))
            await stack.enter_async_context(client)
            await stack.enter_async_context(control)
            await stack.enter_async_context(server.running())
            yield

    return server, lifespan


def _engine(config: Config, files: Path) -> Engine:
    rollout = config.rollout
    model = Model(
        files,
        rollout.max_context_tokens,
        choose_device(rollout.device, "rollout.device"),
        dtype=config.model.dtype,
        fp32_head=config.model.fp32_head,
        deterministic=config.reproducible,
    )
    # Passes of the learner synchronise the device, which would abort a capture.
    model.graphs = None
    return Engine(
        model,
        max_running=rollout.max_running_requests,
        seed=config.seed,
        weight_version=BASE_VERSION,
    )
