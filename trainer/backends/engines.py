"""The engines of a run in one process: the embedded one, an SGLang server that it starts, or
running SGLang servers.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoModelForCausalLM

from common.clients.base import Client
from common.clients.engines import Engines
from common.clients.network import Reply
from common.clients.rollout import BASE_VERSION, RolloutClient
from common.errors import ServiceLost
from common.process.futures import cancel
from common.process.progress import Progress, bounded
from common.process.topology import ROLLOUT, Topology
from common.settings.config import Config
from common.wire.schemas import WeightManifest
from learning.loading import Pretrained
from services.http.app import free_port
from services.rollout.engine_client import (
    EngineClient,
    adapters_kept,
    engine_command,
    engine_env,
    released_memory,
)
from services.rollout.generation import GenerationProbe
from services.rollout.supervision import SupervisedProcess, Timing
from trainer.backends.backend import BackendContext
from trainer.weights.versions import Weights, version_name, write_version

_REST_S = 5.0
"""A server that did not answer gets no request for this long while others are available."""


@dataclass
class _Server:
    """A server, and the number of its requests in flight."""

    client: Client
    running: int = 0
    rests_until: float = 0.0


class ServersClient(RolloutClient):
    """`RolloutClient` of one or several servers: each attempt goes to the one with the fewest
    requests in flight.

    `check` raises ServiceLost when no server will ever answer again, and httpx.ConnectError while
    none can yet.
    """

    repeats_prompt = True  # they are SGLang

    def __init__(
        self, urls: Sequence[str], check: Callable[[], None] = lambda: None, **options: Any
    ) -> None:
        super().__init__("rollout-server", urls[0], **options)
        self.engines = Engines(self.get, [url.rstrip("/") for url in urls])
        self._servers = [_Server(Client("rollout-server", url)) for url in urls]
        self._check = check

    async def close(self) -> None:
        for server in self._servers:
            await server.client.close()
        await super().close()

    async def unhealthy_reason(self) -> str | None:
        """See `Client`: every server has to be healthy."""
        clients = [server.client for server in self._servers]
        reasons = await asyncio.gather(*(client.unhealthy_reason() for client in clients))
        named = [
            f"{client.base_url}: {reason}"
            for client, reason in zip(clients, reasons, strict=True)
            if reason
        ]
        return "; ".join(named) or None

    async def _exchange(self, *arguments: Any, **options: Any) -> Reply:
        self._check()
        now = time.monotonic()
        # One that just failed gets a request only where every other one just failed, too.
        server = min(self._servers, key=lambda server: (server.rests_until > now, server.running))
        server.running += 1
        answered = False
        try:
            response = await server.client._exchange(*arguments, **options)
            answered = not self._is_retryable(response)
            return response
        finally:
            server.running -= 1
            server.rests_until = 0.0 if answered else time.monotonic() + _REST_S


class OwnEngineClient(EngineClient):
    """The control calls of a server that this process started: none waits for one that will not be
    restarted.
    """

    def __init__(self, server: "OwnSGLang") -> None:
        super().__init__("engine", server.url)
        self._server = server

    async def _exchange(self, *arguments: Any, **options: Any) -> Reply:
        self._server.check_alive()
        return await super()._exchange(*arguments, **options)


class OwnSGLang:
    """An SGLang server that this process starts, restarts when it dies, and stops."""

    def __init__(self, config: Config, publisher: "DirectPublisher") -> None:
        port = free_port()
        rollout = config.rollout.model_copy(update={"engine_port": port})
        self._config = config.model_copy(update={"rollout": rollout})
        self._publisher = publisher
        self._topology = Topology()
        self.url = self._topology.url(ROLLOUT, port)
        self.log_file = config.state_dir / "logs" / "engine.log"
        self._run: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._api = EngineClient("engine", self.url)
        self._child = SupervisedProcess(
            "engine",
            self._launch,
            GenerationProbe(self._api, rollout.stuck_after_s, publisher.is_paused),
            env=engine_env(config) | self._topology.loopback_env(),
            log_file=self.log_file,
            timing=Timing(
                stuck_s=rollout.stuck_after_s, hang_s=rollout.hang_timeout_s, max_failed_starts=1
            ),
            stuck_field="rollout.stuck_after_s",
            on_up=self._came_up,
            shown=False,
        )

    def work(self) -> int:
        """Returns a number that grows as long as the server loads something."""
        return self._child.work()

    async def _launch(self) -> list[str]:
        model, label = self._publisher.starts_with()
        return engine_command(self._config, self._topology, str(model), label)

    async def _came_up(self) -> None:
        if self._up.is_set():  # a restart
            await self._publisher.reload()
        self._up.set()

    def check(self) -> None:
        """Raises ServiceLost when it will not be restarted, and httpx.ConnectError until it has the
        newest weights.
        """
        self.check_alive()
        if not self._child.up:
            raise httpx.ConnectError("SGLang is being started")

    def check_alive(self) -> None:
        """Raises ServiceLost when it will not be restarted."""
        if self._run is not None and self._run.done() and not self._run.cancelled():
            raise ServiceLost(
                str(self._run.exception()),
                field="engine",
                value=self.url,
                remedy=f"look at {self.log_file}, then start again",
                about={"cause": "engine_failed"},
            )

    async def start(self, stack: AsyncExitStack) -> None:
        """Returns once it answers; `stack` stops it. Raises ServiceError with the end of its output
        if it fails.
        """
        stack.push_async_callback(self._api.close)
        self._run = asyncio.create_task(self._child.run())
        up = asyncio.create_task(self._up.wait())
        stack.push_async_callback(cancel, [self._run])
        await asyncio.wait({self._run, up}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        # The supervisor ends by itself only when the server failed: `result` raises why.
        if self._run.done():
            self._run.result()


class DirectPublisher:
    """Writes a version and tells the engines to load it, as agents do on rollout nodes, but without
    a download.
    """

    def __init__(self, context: BackendContext) -> None:
        self.engines: list[EngineClient] = []
        self._context = context
        self._limit_s = context.config.rollout.stuck_after_s
        self.work: Callable[[], float] = lambda: 0
        """A number that grows as long as the engines load; servers of others show none."""
        self._base: Path | None = None
        self._newest: tuple[WeightManifest, Path] | None = None
        # Where only adapters are published, the engines keep the base model's own files.
        if context.config.lora.publishes_adapter:
            base = Pretrained(AutoModelForCausalLM, context.config.model.name)
            self._base = base.files(context.policy.ranks)
        else:
            self.write(context.policy.weights(), context.policy.step)

    def starts_with(self) -> tuple[Path, str]:
        """Returns the directory and the label of the weights that an engine starts with."""
        if self._base is not None:
            return self._base, BASE_VERSION
        assert self._newest is not None
        manifest, directory = self._newest
        return directory, str(manifest.version)

    def write(self, weights: Weights, version: int) -> tuple[WeightManifest, Path]:
        """Writes a version and removes the others; returns its manifest and directory."""
        directory = self._context.run_dir / "weights"
        shutil.rmtree(directory, ignore_errors=True)
        manifest = write_version(
            weights,
            self._context.static_files,
            directory,
            run_id=self._context.run_id,
            version=version,
        )
        self._newest = manifest, directory / version_name(version)
        return self._newest

    def publish(self, weights: Weights, version: int) -> None:
        """Waits until every engine has confirmed the version. Raises LoadFailed when one does
        not.
        """
        self.write(weights, version)
        self.wake()

    def sleep(self) -> None:
        """See `EngineMemory`."""
        memory = released_memory(self._context.config)
        self._context.loop.call(
            _together(engine.sleep(memory, self._limit_s) for engine in self.engines)
        )

    def wake(self) -> None:
        """See `EngineMemory`."""
        self._context.loop.call(self.reload())

    def is_paused(self) -> bool:
        """Whether one of the engines is paused."""
        return any(engine.is_paused for engine in self.engines)

    async def reload(self) -> None:
        """Tells the engines to load the newest version, if there is one."""
        if self._newest is None:
            return
        manifest, path = self._newest
        kept = adapters_kept(self._context.config)
        loading = _together(
            engine.load_version(manifest, path, keep=kept, timeout_s=self._limit_s)
            for engine in self.engines
        )
        waits = Progress(
            f"the engine to load weights {manifest.version}",
            self._limit_s,
            unit="steps",
            field="rollout.stuck_after_s",
            remedy="look at the log of the engine",
        )
        first = self.work()
        await bounded(loading, waits, lambda: self.work() - first)


async def _together(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Waits for all calls, even if one fails, so that none continues unnoticed. Raises the first
    error.
    """
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
