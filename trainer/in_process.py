"""Training in one process: the same services, clients and loop as on a cluster, over ASGI instead of sockets."""

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from fastapi import FastAPI
from rich.console import Console

from common.clients import Client, DataClient, ReplayClient, RewardClient
from common.config import Config
from common.critic_client import CriticClient
from common.environment_client import EnvironmentClient
from common.rollout_client import BASE_VERSION, RolloutClient
from common.run_lock import RunLock
from common.schemas import Prompt, WeightManifest
from common.security import tls
from learning.device import choose_device
from learning.ranks import Ranks
from services.critic.app import create_critic_app
from services.data.app import create_data_app
from services.data.loaders import load_split
from services.engine.app import make_app
from services.engine.engine import Engine
from services.engine.model import Model
from services.environment.app import create_environment_app
from services.environment.kinds import needs_gateway
from services.environment.service import EpisodeService
from services.environment.template import Template
from services.http.app import listen, serving
from services.replay.app import create_replay_app
from services.reward.app import create_reward_app
from services.reward.functions import RewardFunction
from services.rollout.engine_client import EngineClient, adapters_kept, released_memory
from trainer.loop import train
from trainer.observe.run_dir import console as standard_console
from trainer.policy.scorer import stop_token_ids
from trainer.rollouts.services import Services
from trainer.run import Listener, Opening, Run
from trainer.weights.adapters import AdapterPublisher, base_directory
from trainer.weights.publisher import Weights, version_name, write_version
from trainer.weights.sync import WeightPublisher

_BASE = "http://in-process"
WrapApp = Callable[[FastAPI], httpx.AsyncBaseTransport]


@dataclass(frozen=True)
class Problems:
    """The caller's data, in place of `config.data`."""

    train: list[Prompt]
    held_out: list[Prompt]
    """Empty: no evaluation (`trainer.eval_samples` 0)."""


def train_in_process(
    config: Config,
    console: Console | None = None,
    rollout_transport: WrapApp | None = None,
    problems: Problems | None = None,
    rewards: Sequence[RewardFunction] | None = None,
    listener: Listener | None = None,
    engine_url: str | None = None,
) -> Path:
    """Trains on this machine in this process, with the embedded engine, and returns the path of the last checkpoint.

    Args:
        config: as for the job group; ports, replicas, engines and `trainer.weight_sync` have no effect.
        console: for progress and results; standard output when None.
        rollout_transport: makes the transport to the engine's app, for example one that fails now and then in a test.
        problems: to train and to evaluate on; those of `config.data` when None.
        rewards: grade every answer, in this process; those of `config.reward` when None.
        listener: hears of steps, evaluations and checkpoints.
        engine_url: URL of an SGLang server that sees this disk, in the place of the embedded engine.

    Raises ConfigError, or another ServiceError with the reason when training cannot go on.
    """
    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    torch.manual_seed(config.seed)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    run_dir, ranks = config.trainer.run_dir or Path("runs") / "local", Ranks.alone(config.trainer)
    wrap = rollout_transport or httpx.ASGITransport
    backend = InProcessBackend(console or standard_console(), wrap, problems, rewards, engine_url)
    with RunLock.of_new_run(run_dir, "in-process") as lock, ExitStack() as stack:
        run = Run.build(config, ranks, run_dir, lock, backend, stack, listener)
        train(run)
        return run.finish()


@dataclass
class InProcessBackend:
    """The `Backend` of one process: the services' apps behind ASGI, the embedded engine, weights loaded from this disk.

    The fields are the arguments of `train_in_process`.
    """

    console: Console
    rollout_transport: WrapApp
    problems: Problems | None
    rewards: Sequence[RewardFunction] | None
    engine_url: str | None = None

    def start(self, opening: Opening) -> tuple[Services, WeightPublisher]:
        """See `Backend`."""
        config, policy, loop = opening.config, opening.policy, opening.loop
        publisher = DirectPublisher(opening)
        if config.lora.publishes_adapter:
            directory, label = base_directory(config, opening.tokenizer, opening.run_dir / "base"), BASE_VERSION
        else:
            directory, label = publisher.write(policy.weights(), policy.step)[1], str(policy.step)
        rollout = None if self.engine_url else self._engine(config, directory, label)
        apps = AsyncExitStack()
        opening.stack.callback(lambda: loop.call(apps.aclose()))
        template = None
        if config.environment.name:
            stops = stop_token_ids(policy.model, opening.tokenizer)
            template = Template(opening.tokenizer, stops), stops
        services, publisher.engine = loop.call(self._start(config, rollout, apps, template))
        if config.lora.publishes_adapter:
            return services, AdapterPublisher(publisher, services.rollout, opening.run_id)
        return services, publisher

    def agents(self) -> list[Client]:
        """No agents."""
        return []

    @staticmethod
    def _engine(config: Config, directory: Path, label: str) -> FastAPI:
        """Returns the app of the embedded engine."""
        device = choose_device(config.rollout.device, "rollout.device")
        model = Model(directory, config.rollout.max_context_tokens, device, config.model.dtype, config.model.fp32_head)
        if config.trainer.max_staleness:  # the trainer computes beside it: what waits for the device ends a recording
            model.graphs = None
        running = config.rollout.max_running_requests
        return make_app(Engine(model, max_running=running, seed=config.seed, weight_version=label))

    async def _start(
        self, config: Config, rollout: FastAPI | None, apps: AsyncExitStack, template: tuple[Template, list[int]] | None
    ) -> tuple[Services, EngineClient]:
        """Starts the services' apps; returns a client for each, and one for the engine."""
        body, problems = config.max_body_mb << 20, self.problems
        if problems is None:
            problems = Problems(load_split(config.data, "train", config.seed), load_split(config.data, "eval", config.seed))
        data = create_data_app(config, problems.train, problems.held_out)
        reward = create_reward_app(config.reward, body, self.rewards)
        replay = create_replay_app(config.replay, config.state_dir, body)
        base = self.engine_url or _BASE
        transport = self.rollout_transport(rollout) if rollout else None
        services = Services(
            DataClient("data-server", _BASE, transport=httpx.ASGITransport(data)),
            RolloutClient("rollout-server", base, transport=transport),
            RewardClient("reward-server", _BASE, transport=httpx.ASGITransport(reward)),
            ReplayClient("replay-buffer", _BASE, transport=httpx.ASGITransport(replay)),
        )
        services.reward.gets_tokens = self.rewards is not None
        started = [data, reward, replay, *([rollout] if rollout else [])]
        if template is not None:
            router = RolloutClient("rollout-server", base, transport=transport)
            await apps.enter_async_context(router)
            sock = listen("127.0.0.1", 0) if needs_gateway(config.environment) else None
            gateway = f"{tls().scheme}://127.0.0.1:{sock.getsockname()[1]}" if sock else ""
            episodes = EpisodeService(config.environment, template[0], router, template[1], gateway=gateway)
            environment = create_environment_app(episodes, body)
            if sock:
                await apps.enter_async_context(serving(environment, sock))
                apps.push_async_callback(episodes.close)  # first, so that no program keeps a connection open
            else:
                started.append(environment)
            services.environment = EnvironmentClient("environment-server", _BASE, transport=httpx.ASGITransport(environment))
        if config.algorithm.needs_critic and config.critic.location == "server":
            started.append(critic := create_critic_app(config))
            there, patience = httpx.ASGITransport(critic), config.trainer.service_timeout_s
            services.critic = CriticClient("critic-server", _BASE, transport=there, deadline_s=patience)
        for app in started:
            await apps.enter_async_context(app.router.lifespan_context(app))
        engine_client = EngineClient("engine", base, transport=httpx.ASGITransport(rollout) if rollout else None)
        for client in (*services.all(), engine_client):
            await apps.enter_async_context(client)
        return services, engine_client


class DirectPublisher:
    """Writes a version and has the one engine load it, as agents do on rollout nodes, but without a download."""

    def __init__(self, opening: Opening) -> None:
        self.engine: EngineClient | None = None
        self._loaded: tuple[WeightManifest, Path] | None = None
        self._directory, self._opening = opening.run_dir / "weights", opening
        self._timeout_s, self._kept = opening.config.trainer.publish_timeout_s, adapters_kept(opening.config)

    def write(self, weights: Weights, version: int) -> tuple[WeightManifest, Path]:
        """Writes a version and removes the others; returns its manifest and directory."""
        shutil.rmtree(self._directory, ignore_errors=True)
        manifest = write_version(weights, self._opening.static_files, self._directory, self._opening.run_id, version)
        return manifest, self._directory / version_name(version)

    def publish(self, weights: Weights, version: int) -> None:
        """Waits until the engine has confirmed the version. Raises LoadFailed when it does not."""
        assert self.engine is not None
        manifest, path = self.write(weights, version)
        self._load(manifest, path)

    def sleep(self) -> None:
        """See `Sleepers`."""
        assert self.engine is not None
        self._opening.loop.call(self.engine.sleep(released_memory(self._opening.config), self._timeout_s))

    def wake(self) -> None:
        """See `Sleepers`."""
        assert self._loaded is not None, "engines sleep between two versions"
        self._load(*self._loaded)

    def _load(self, manifest: WeightManifest, path: Path) -> None:
        assert self.engine is not None
        self._loaded = manifest, path
        if manifest.kind == "adapter":
            load = self.engine.load_adapter(path, manifest, self._kept, self._timeout_s)
        else:
            load = self.engine.load(path, str(manifest.version), self._timeout_s)
        self._opening.loop.call(load)
