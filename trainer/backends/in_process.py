"""The backend of a run in one process: the same services and clients as on a cluster, over ASGI
instead of sockets.
"""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import httpx
from fastapi import FastAPI
from rich.console import Console

from common.clients.base import Client
from common.clients.data import DataClient
from common.clients.environment import EnvironmentClient
from common.clients.replay import ReplayClient
from common.clients.reward import RewardClient
from common.clients.rollout import RolloutClient
from common.errors import ConfigError
from common.process.security import tls
from common.settings.config import Config
from services.data.app import create_data_app
from services.data.loaders import load_split
from services.engine.app import make_app
from services.environment.app import create_environment_app
from services.environment.environments import Environment
from services.environment.runners import needs_gateway
from services.environment.service import EpisodeService
from services.environment.template import Template
from services.http.app import listen, serving
from services.replay.app import create_replay_app
from services.reward.app import create_reward_app
from services.reward.functions import RewardFunction
from services.rollout.engine_client import EngineClient
from trainer.backends.backend import Backend, BackendContext
from trainer.backends.embedded import embedded_engine
from trainer.backends.engines import DirectPublisher, OwnEngineClient, OwnSGLang, ServersClient
from trainer.observe.audit import Given
from trainer.observe.problems import Problems, keep_problems
from trainer.policy.scorer import stop_token_ids
from trainer.rollouts.services import Services
from trainer.weights.adapters import AdapterPublisher
from trainer.weights.sync import WeightPublisher

_BASE = "http://in-process"
_SETTINGS = {"--model-path": "model.name", "--max-context-tokens": "rollout.max_context_tokens"}
"""The settings for the options of an engine that is a process."""
_C = TypeVar("_C", bound=Client)
WrapApp = Callable[[FastAPI], httpx.AsyncBaseTransport]


@dataclass
class InProcessBackend(Backend):
    """The `Backend` of one process: the services' apps behind ASGI, and engines that load weights
    from this disk.

    The fields are the arguments of `train_in_process`.
    """

    console: Console
    rollout_transport: WrapApp
    problems: Problems | None
    rewards: Sequence[RewardFunction] | None
    engine: str | Sequence[str] = "embedded"
    environment: Environment | None = None
    _engine_gpus: int | None = None

    def __post_init__(self) -> None:
        parts: dict[Given, object] = {
            "prompts": self.problems,
            "rewards": self.rewards,
            "environment": self.environment,
        }
        self.given = [name for name, part in parts.items() if part is not None]
        self.data = "" if self.problems is None else "rows of the caller"

    def start(self, context: BackendContext) -> tuple[Services, WeightPublisher]:
        """See `Backend`."""
        loop = context.loop
        if context.config.reproducible and self.engine not in ("embedded", "sglang"):
            raise ConfigError(
                "reproducible needs engines that this run starts itself, since it cannot see how "
                "others compute",
                field="engine",
                value=self.engine,
                remedy="use embedded or sglang, or set reproducible false",
            )
        if self.problems is not None and context.config.trainer.audit:
            keep_problems(context.run_dir, self.problems)
        publisher = DirectPublisher(context)
        embedded = None
        if self.engine == "embedded":
            weights, label = publisher.starts_with()
            embedded = self._engine(context.config, weights, label)
        template = None
        if context.config.environment.name:
            # Before an engine starts, which takes minutes: it raises for an unusable chat template.
            template = Template(
                context.tokenizer,
                _stop_token_ids(context),
                context.config.sampling.chat_template_kwargs,
            )

        apps = AsyncExitStack()
        context.stack.callback(lambda: loop.call(apps.aclose()))
        new_client = loop.call(self._rollout(context, publisher, embedded, apps))
        services = loop.call(self._services(context, new_client, template, apps))
        if context.config.lora.publishes_adapter:
            return services, AdapterPublisher(publisher, services.rollout, context.run_id)
        return services, publisher

    @property
    def engine_kind(self) -> Literal["embedded", "sglang"]:
        return "embedded" if self.engine == "embedded" else "sglang"

    @property
    def engine_gpus(self) -> int | None:
        return self._engine_gpus

    @staticmethod
    def _engine(config: Config, directory: Path, label: str) -> FastAPI:
        """Returns the app of the embedded engine."""
        try:
            is_beside = config.trainer.max_staleness > 0
            engine = embedded_engine(config, directory, label, beside_trainer=is_beside)
            return make_app(engine)
        except ConfigError as error:
            raise ConfigError(
                error.message,
                field=_SETTINGS.get(error.field or "", error.field),
                value=error.value,
                remedy=error.remedy,
            ) from error

    async def _rollout(
        self,
        context: BackendContext,
        publisher: DirectPublisher,
        embedded: FastAPI | None,
        apps: AsyncExitStack,
    ) -> Callable[[], RolloutClient]:
        """Starts the engine, or connects to servers, and returns a function that makes a client for
        generation.
        """
        new_client: Callable[[], RolloutClient]
        limit_s = context.config.limits.service_timeout_s
        if embedded is not None:
            self._engine_gpus = 0
            await apps.enter_async_context(embedded.router.lifespan_context(embedded))
            publisher.engines = [
                EngineClient("engine", _BASE, transport=httpx.ASGITransport(embedded))
            ]
            transport = self.rollout_transport(embedded)
            new_client = partial(
                RolloutClient, "rollout-server", _BASE, transport=transport, deadline_s=limit_s
            )
        elif self.engine == "sglang":
            rollout = context.config.rollout
            has_own_gpus = not rollout.colocate and rollout.device != "cpu"
            self._engine_gpus = rollout.tensor_parallel_size if has_own_gpus else 0
            own = OwnSGLang(context.config, publisher)
            context.say(f"starting SGLang, whose log is {own.log_file}")
            await own.start(apps)
            publisher.engines = [OwnEngineClient(own)]
            publisher.work = own.work
            new_client = partial(ServersClient, [own.url], own.check, deadline_s=limit_s)
        else:
            urls = [self.engine] if isinstance(self.engine, str) else self.engine
            publisher.engines = [EngineClient("engine", url) for url in urls]
            new_client = partial(ServersClient, urls, deadline_s=limit_s)
        for client in publisher.engines:
            await apps.enter_async_context(client)
        return new_client

    async def _services(
        self,
        context: BackendContext,
        new_rollout_client: Callable[[], RolloutClient],
        template: Template | None,
        apps: AsyncExitStack,
    ) -> Services:
        """Starts the services' apps and returns a client for each."""
        config = context.config
        max_body_bytes = config.max_body_mb << 20
        problems = self.problems
        if problems is None:
            train = load_split(config.data, "train", config.seed)
            # A data set that nothing evaluates on need not have such a split.
            is_evaluated = config.evaluation.samples > 0
            held_out = load_split(config.data, "eval", config.seed) if is_evaluated else []
            problems = Problems(train, held_out)
        data = create_data_app(config, problems.train, problems.held_out)
        reward = create_reward_app(config.reward, max_body_bytes, self.rewards)
        replay = create_replay_app(config.replay, config.state_dir, max_body_bytes)
        to_start = [data, reward, replay]

        def client(kind: type[_C], app: FastAPI) -> _C:
            limit_s = config.limits.service_timeout_s
            return kind(app.title, _BASE, transport=httpx.ASGITransport(app), deadline_s=limit_s)

        services = Services(
            data=client(DataClient, data),
            rollout=new_rollout_client(),
            reward=client(RewardClient, reward),
            replay=client(ReplayClient, replay),
            rewards_tried=self.rewards is not None,
        )
        services.reward.gets_tokens = self.rewards is not None
        services.rollout.seeds_apart = config.reproducible and self.engine == "sglang"
        if template is not None:
            router = await apps.enter_async_context(new_rollout_client())
            environment, is_serving = await self._environment(context, template, router, apps)
            services.environment = client(EnvironmentClient, environment)
            if not is_serving:
                to_start.append(environment)

        for app in to_start:
            await apps.enter_async_context(app.router.lifespan_context(app))
        for each in services.all():
            await apps.enter_async_context(each)
        return services

    async def _environment(
        self,
        context: BackendContext,
        template: Template,
        router: RolloutClient,
        apps: AsyncExitStack,
    ) -> tuple[FastAPI, bool]:
        """Returns the environment-server's app, and whether it is serving already.

        An environment that runs programs has a gateway, which they reach through a socket.
        """
        config = context.config
        sock = listen("127.0.0.1", 0) if needs_gateway(config.environment) else None
        episodes = EpisodeService(
            config.environment,
            template,
            router,
            stop_token_ids=_stop_token_ids(context),
            gateway=f"{tls().scheme}://127.0.0.1:{sock.getsockname()[1]}" if sock else "",
            environment=self.environment,
            runtime=config.runtime,
        )
        app = create_environment_app(episodes, config.max_body_mb << 20)
        if sock is None:
            return app, False
        await apps.enter_async_context(serving(app, sock))
        # Closes first, so that no program keeps a connection open.
        apps.push_async_callback(episodes.close)
        return app, True


def _stop_token_ids(context: BackendContext) -> list[int]:
    return stop_token_ids(context.policy.model, context.tokenizer)
