"""The app of every service, as its process makes it."""

from pathlib import Path

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
from tests.conftest import ROOT
from trainer.publish import WeightBoard
from trainer.server import create_trainer_app


def tiny(model: Path, directory: Path, *more: str) -> Config:
    """A run of two small steps on the built-in task."""
    words = [
        *("--config", str(ROOT / "jobgroup/configs/tiny-cpu.yaml"), "--model.name", str(model)),
        *("--trainer.run_dir", str(directory / "run"), "--state_dir", str(directory / "state")),
        *("--trainer.batch_size", "4", "--trainer.max_steps", "2", "--sampling.group_size", "4"),
        *("--trainer.eval_samples", "0", "--reward.workers", "1"),
    ]
    return load([*words, *more], {})


def every_app(model: Path, directory: Path) -> dict[str, FastAPI]:
    """By the name of the service. None of them is started."""
    config = tiny(model, directory, "--algorithm.name", "ppo")
    split = {name: load_split(config.data, name, config.seed)[:4] for name in ("train", "eval")}
    metrics = Metrics("rollout_server")
    return {
        "data": create_data_app(config, split["train"], split["eval"]),
        "reward": create_reward_app(config.reward, 1 << 20),
        "replay": create_replay_app(config.replay, config.state_dir, 1 << 20),
        "critic": create_critic_app(config),
        "engine": make_app(Engine(Model(model, 64), max_running=4)),
        "agent": create_agent_app(Agent(config, Topology(), metrics), metrics),
        "trainer": create_trainer_app(WeightBoard(directory / "weights"), Metrics("ppo_trainer")),
    }
