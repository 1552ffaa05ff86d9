"""`python -m tests.fuzz.served SERVICE PORT DIRECTORY MODEL`: the app of a service, alone in a process, until SIGTERM."""

import sys
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from fastapi import FastAPI

from common.config import Config, load
from common.observe import Metrics
from common.topology import Topology
from services.critic.app import create_critic_app
from services.data.app import create_data_app
from services.data.loaders import load_split
from services.replay.app import create_replay_app
from services.reward.app import create_reward_app
from services.rollout.agent import Agent
from services.rollout.app import create_agent_app
from services.rollout.embedded.app import make_app
from services.rollout.embedded.engine import Engine
from services.rollout.embedded.model import Model
from services.server import serve
from trainer.publish import WeightBoard, write_version
from trainer.server import create_trainer_app

SERVICES = ("data", "reward", "replay", "critic", "engine", "agent", "trainer")
MAX_BODY_BYTES = 1 << 20


def make(service: str, directory: Path, model: Path) -> FastAPI:
    """The app as its process makes it, with small limits; state is in `directory`."""
    words = ["--config", "jobgroup/configs/tiny-cpu.yaml", "--model.name", str(model), "--state_dir", str(directory)]
    words += ["--algorithm.name", "ppo", "--reward.workers", "1", "--reward.timeout_s", "0.5", "--max_body_mb", "1"]
    words += ["--data.curriculum", "difficulty", "--replay.capacity", "2000"]
    config = load(words, {})
    makers = {
        "data": lambda: _data(config),
        "reward": lambda: create_reward_app(config.reward, MAX_BODY_BYTES),
        "replay": lambda: create_replay_app(config.replay, directory, MAX_BODY_BYTES),
        "critic": lambda: create_critic_app(config),
        "engine": lambda: make_app(Engine(Model(model, 64), max_running=8)),
        "agent": lambda: _agent(config),
        "trainer": lambda: _trainer(directory),
    }
    return makers[service]()


def _data(config: Config) -> FastAPI:
    splits = [load_split(config.data, name, config.seed)[:50] for name in ("train", "eval")]
    return create_data_app(config, *splits)


def _agent(config: Config) -> FastAPI:
    """Of a node that never begins: its engine and router have tests of their own."""
    metrics = Metrics("rollout_server")
    app = create_agent_app(Agent(config, Topology(), metrics), metrics)

    @asynccontextmanager
    async def life(_: FastAPI):  # type: ignore[no-untyped-def]
        app.state.draining = False
        yield

    app.router.lifespan_context = life
    return app


def _trainer(directory: Path) -> FastAPI:
    """With one weight version of one small tensor."""
    board = WeightBoard(directory / "weights")
    board.announce(write_version([("weight", torch.zeros(4))], [], board.directory, "run", 1))
    return create_trainer_app(board, Metrics("ppo_trainer"))


if __name__ == "__main__":
    service, port, directory, model = sys.argv[1:]
    torch.set_num_threads(1)
    serve(make(service, Path(directory), Path(model)), "127.0.0.1", int(port))
