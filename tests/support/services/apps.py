"""Makes the app of every service as its process does."""

from pathlib import Path

import httpx
import torch
from fastapi import FastAPI

from common.clients.rollout import RolloutClient
from common.process.metrics import Metrics
from common.process.topology import Topology
from common.settings.config import Config, load
from common.settings.sections import EnvironmentSection
from common.wire.schemas import EpisodeLimits, EpisodeRequest, EpisodeSampling, EpisodeTask
from services.data.app import create_data_app
from services.data.loaders import load_split
from services.engine.app import make_app
from services.engine.engine import Engine
from services.engine.model import Model
from services.environment.app import create_environment_app
from services.environment.service import EpisodeService
from services.environment.template import Template
from services.replay.app import create_replay_app
from services.reward.app import create_reward_app
from services.rollout.app import create_agent_app
from services.rollout.first_node import FirstNodeAgent
from tests.support.environments.environments import BASE, AnsweringEngine
from tests.support.environments.own_environments import INSISTS, OPEN_SESSION
from tests.support.paths import ROOT
from tests.support.tinker.stand_ins import BASE as TINKER_BASE
from tests.support.tinker.stand_ins import CountingLearner, EchoEngine, make_server
from trainer.backends.server import create_trainer_app
from trainer.observe.prometheus import TrainerMetrics
from trainer.tinker.app import create_tinker_app
from trainer.tinker.clients import Clients
from trainer.weights.board import WeightBoard
from trainer.weights.versions import write_version

SERVICES = ("data", "reward", "replay", "environment", "engine", "agent", "trainer")
APPS = (*SERVICES, "tinker")
"""All that answer HTTP."""


def tiny(model: Path, directory: Path, *more: str) -> Config:
    """Returns the configuration of a run with two small steps on the built-in task."""
    words = [
        *("--config", str(ROOT / "jobgroup/configs/tiny-cpu.yaml"), "--model.name", str(model)),
        *("--trainer.run_dir", str(directory / "run"), "--state_dir", str(directory / "state")),
        *("--trainer.batch_size", "4", "--trainer.max_steps", "2", "--sampling.group_size", "4"),
        *("--evaluation.samples", "0", "--reward.workers", "1"),
    ]
    return load([*words, *more], {})


def make(service: str, config: Config) -> FastAPI:
    """Makes the app of one service. The agent's node is not started; the trainer has one version of
    one tensor."""
    body = config.max_body_mb << 20
    if service == "data":
        return create_data_app(
            config,
            *(load_split(config.data, split, config.seed)[:50] for split in ("train", "eval")),
        )
    if service == "reward":
        return create_reward_app(config.reward, body)
    if service == "replay":
        return create_replay_app(config.replay, config.state_dir, body)
    if service == "environment":
        return _environment(config, body)
    if service == "engine":
        return make_app(Engine(Model(Path(config.model.name), 64), max_running=8))
    if service == "agent":
        metrics = Metrics("rollout-server")
        return create_agent_app(FirstNodeAgent(config, Topology(), metrics), metrics)
    if service == "tinker":
        server = make_server(config.state_dir, CountingLearner(), EchoEngine())
        return create_tinker_app(server, Clients(), TINKER_BASE, server.running)
    board = WeightBoard(config.state_dir / "weights")
    board.announce(write_version([("weight", torch.zeros(4))], [], board.directory, "run", 1))
    metrics = Metrics("ppo-trainer")
    TrainerMetrics(metrics)
    return create_trainer_app(board, metrics)


def _environment(config: Config, body: int) -> FastAPI:
    """Makes the environment-server, with engines that always give the same answer."""
    engine, metrics = AnsweringEngine(lambda _: "ok"), Metrics("environment-server")
    stop = engine.tokenizer.eos_token_id
    router = RolloutClient("rollout-server", BASE, transport=httpx.ASGITransport(engine.app()))
    section = EnvironmentSection(name=config.environment.name or INSISTS)
    template = Template(engine.tokenizer, [stop])
    service = EpisodeService(section, template, router, stop_token_ids=[stop], metrics=metrics)
    task, sampling = EpisodeTask(env=section.name), EpisodeSampling(max_new_tokens=300)
    limits = EpisodeLimits(turns=500, sampled_tokens=10**6)
    session = service.open_session(
        EpisodeRequest(request_id="open", task=task, sampling=sampling, limits=limits)
    )
    service._sessions[OPEN_SESSION] = session
    return create_environment_app(service, body, metrics)
