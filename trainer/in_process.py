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

from common.clients import DataClient, ReplayClient, RewardClient
from common.config import Config
from common.critic_client import CriticClient
from common.observe import Metrics
from common.rollout_client import BASE_VERSION, RolloutClient
from common.schemas import Prompt, WeightManifest
from learning.ranks import Ranks
from services.critic.app import create_critic_app
from services.data.app import create_data_app
from services.data.loaders import load_split
from services.engine.app import make_app
from services.engine.engine import Engine
from services.engine.model import Model
from services.replay.app import create_replay_app
from services.reward.app import create_reward_app
from services.reward.functions import RewardFunction
from services.rollout.engine_client import EngineClient, adapters_kept
from services.rollout.weights.adapters import load_adapter
from trainer.background import LoopThread
from trainer.lead import Lead, new_run_id, open_checkpoints, resumed_learner
from trainer.loop import save_last, train
from trainer.observe.prometheus import TrainerMetrics
from trainer.observe.run_dir import Recorder
from trainer.observe.run_dir import console as standard_console
from trainer.policy.critic import value_function
from trainer.policy.scorer import load_tokenizer, stop_token_ids
from trainer.rollouts.collector import Services
from trainer.rollouts.prompts import Prompter
from trainer.trackers.base import check
from trainer.weights.adapters import AdapterPublisher, base_directory, static_files
from trainer.weights.publisher import Weights, version_name, write_version

_BASE = "http://in-process"
_RUN = "in-process"
WrapApp = Callable[[FastAPI], httpx.AsyncBaseTransport]


@dataclass(frozen=True)
class Problems:
    """Data given by the caller, in place of `config.data`."""

    train: list[Prompt]
    held_out: list[Prompt]
    """Empty: no evaluation (`trainer.eval_samples` 0)."""


def train_in_process(
    config: Config,
    console: Console | None = None,
    rollout_transport: WrapApp | None = None,
    problems: Problems | None = None,
    rewards: Sequence[RewardFunction] | None = None,
) -> Path:
    """Trains on this machine in this process, with the embedded engine, and returns the path of the last checkpoint.

    Args:
        config: as for the job group; the sections' ports, replicas and engines, and `trainer.weight_sync`, play no role.
        console: for progress and results; standard output when None.
        rollout_transport: makes the transport to the engine's app, for example one that fails now and then in a test.
        problems: to train and to evaluate on; those that `config.data` names when None.
        rewards: grade every answer, in this process; what `config.reward` says when None.

    Raises ConfigError, or another ServiceError with the reason when training cannot go on.
    """
    check(config.trackers)
    run_dir = config.trainer.run_dir or Path("runs") / "local"
    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    torch.manual_seed(config.seed)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    ranks = Ranks.alone(config.trainer)
    learner, progress, saved = resumed_learner(config, ranks, run_dir)
    checkpoints = open_checkpoints(config, ranks, run_dir)
    tokenizer = load_tokenizer(config.model)
    static = static_files(config, learner.policy, tokenizer, run_dir / "model")
    with ExitStack() as stack:
        recorder = stack.enter_context(Recorder(run_dir, config, console or standard_console(), learner.step))
        loop = stack.enter_context(LoopThread())
        direct = _DirectPublisher(run_dir / "weights", static, loop, config)
        if config.lora.publishes_adapter:
            directory, label = base_directory(config, tokenizer, run_dir / "base"), BASE_VERSION
        else:
            directory, label = direct.write(learner.weights(), learner.step)[1], str(learner.step)
        engine = Engine(
            Model(directory, config.rollout.max_context_tokens),
            max_running=config.rollout.max_running_requests,
            seed=config.seed,
            weight_version=label,
        )
        apps = AsyncExitStack()
        stack.callback(lambda: loop.call(apps.aclose()))
        services, direct.engine = loop.call(_start(config, engine, apps, rollout_transport or _asgi, problems, rewards))
        prompter = Prompter(tokenizer, config.sampling.system_prompt, stop_token_ids(learner.policy, tokenizer))
        metrics = TrainerMetrics(Metrics("ppo-trainer"))
        run_id = new_run_id("in-process")
        publisher = AdapterPublisher(direct, services.rollout, _RUN, sglang=False) if config.lora.publishes_adapter else direct
        critic = value_function(config, ranks, services.critic, loop.call, run_id)
        lead = Lead(
            config, learner, critic, tokenizer, services, prompter, publisher, loop, recorder, metrics, progress, run_id
        )
        lead.prepare()
        if critic:
            critic.restore(saved)
        learner.total_steps = lead.total_steps
        with lead.collecting():
            train(learner, critic, ranks, lead, lead.total_steps, checkpoints)
        path = lead.conclude(lambda: save_last(checkpoints, learner, critic, lead))
        lead.goodbye([])
        return path


def _asgi(app: FastAPI) -> httpx.AsyncBaseTransport:
    return httpx.ASGITransport(app)


async def _start(
    config: Config,
    engine: Engine,
    apps: AsyncExitStack,
    rollout_transport: WrapApp,
    problems: Problems | None,
    rewards: Sequence[RewardFunction] | None,
) -> tuple[Services, EngineClient]:
    """The services' apps, started, with a client for each."""
    body = config.max_body_mb << 20
    if problems is None:
        problems = Problems(load_split(config.data, "train", config.seed), load_split(config.data, "eval", config.seed))
    data = create_data_app(config, problems.train, problems.held_out)
    reward = create_reward_app(config.reward, body, rewards)
    replay = create_replay_app(config.replay, config.state_dir, body)
    rollout = make_app(engine)
    for app in (data, reward, replay, rollout):
        await apps.enter_async_context(app.router.lifespan_context(app))
    services = Services(
        await apps.enter_async_context(DataClient("data-server", _BASE, transport=_asgi(data))),
        await apps.enter_async_context(RolloutClient("rollout-server", _BASE, transport=rollout_transport(rollout))),
        await apps.enter_async_context(RewardClient("reward-server", _BASE, transport=_asgi(reward))),
        await apps.enter_async_context(ReplayClient("replay-buffer", _BASE, transport=_asgi(replay))),
    )
    if config.algorithm.needs_critic and config.critic.location == "server":
        critic = create_critic_app(config)
        await apps.enter_async_context(critic.router.lifespan_context(critic))
        client = CriticClient("critic-server", _BASE, transport=_asgi(critic), deadline_s=config.trainer.service_timeout_s)
        services.critic = await apps.enter_async_context(client)
    return services, await apps.enter_async_context(EngineClient("engine", _BASE, transport=_asgi(rollout)))


class _DirectPublisher:
    """Writes a version and has the one engine load it: what agents do on rollout nodes, without the download."""

    def __init__(self, directory: Path, static_files: list[Path], loop: LoopThread, config: Config) -> None:
        self.engine: EngineClient | None = None
        self._directory, self._static_files, self._loop = directory, static_files, loop
        self._timeout_s, self._kept = config.trainer.publish_timeout_s, adapters_kept(config)

    def write(self, weights: Weights, version: int) -> tuple[WeightManifest, Path]:
        """Writes a version, and removes the others."""
        shutil.rmtree(self._directory, ignore_errors=True)
        manifest = write_version(weights, self._static_files, self._directory, _RUN, version)
        return manifest, self._directory / version_name(version)

    def publish(self, weights: Weights, version: int) -> None:
        """Returns when the engine has confirmed the version. Raises LoadFailed when it does not."""
        assert self.engine is not None
        manifest, path = self.write(weights, version)
        if manifest.kind == "adapter":
            self._loop.call(load_adapter(self.engine, path, manifest, self._kept, self._timeout_s))
        else:
            self._loop.call(self.engine.load(path, str(version), self._timeout_s))
