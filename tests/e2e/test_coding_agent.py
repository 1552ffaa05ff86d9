"""Coding agents on Harbor tasks, each episode in a sandbox: every sampled token is recorded once
and trained on, and no episode is lost.
"""

import json
from pathlib import Path

import pytest
from rich.console import Console

from common.settings import config as settings
from common.settings.sections import RuntimeSection
from examples.coding_agent.agent import SUBMITTED
from examples.coding_agent.base import build
from examples.coding_agent.tasks import Repair, write
from services.data.loaders import load_split
from tests.support.environments.agent_environments import python_of
from tests.support.environments.environments import request_for, served
from tests.support.models.trap_models import letters
from tests.support.paths import ROOT
from trainer.observe.problems import Problems
from trainer.observe.run_dir import read_lines
from trainer.start.in_process import train_in_process

pytestmark = [pytest.mark.integration, pytest.mark.slow]
FOLDER = ROOT / "examples" / "coding_agent"
OWN = f"harbor:/usr/bin/python3 -I {FOLDER / 'agent.py'}"
MINI = (
    "harbor:env MSWEA_CONFIGURED=true LITELLM_LOCAL_MODEL_COST_MAP=True {mini} -m openai/policy "
    f"-c {FOLDER / 'mini' / 'mini.yaml'} --exit-immediately -o /episode/trajectory.json -t {{prompt}}"
)


def mini() -> tuple[str, list[str]]:
    """Returns the environment with mini-swe-agent, and the tools that it needs."""
    folder = Path(python_of("swe")).parents[1]
    return MINI.replace("{mini}", str(folder / "bin" / "mini")), [str(FOLDER), str(folder)]


async def test_every_token_of_mini_swe_agent_is_recorded_once(tmp_path: Path) -> None:
    name, tools = mini()
    repair = Repair("area", "multiplies", "+")
    write(repair, tmp_path / "area")
    commands = [repair.command("/"), "false", repair.command("*"), f"echo {SUBMITTED}"]
    said = []
    for command in commands:
        call = {"name": "bash", "arguments": {"command": command}}
        said.append(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    answers = iter(said)

    runtime = RuntimeSection(kind="sandbox", tools=tools)
    async with served(name, lambda _: next(answers), runtime=runtime) as server:
        request = request_for(name, repair.instruction)
        request.task.columns = {"harbor_task": str(tmp_path / "area")}
        (episode,) = await server.client.episodes(request)
        assert (episode.status, episode.detail, episode.reward) == ("ok", "", 1.0)
        (sequence,) = episode.sequences
        tokenizer = server.engine.tokenizer
        sampled = sequence.token_ids[sequence.mask == 1].tolist()
        assert sampled == [token for answer in said for token in letters(tokenizer, answer)]


def train(directory: Path, name: str, tools: list[str], steps: int) -> list[float]:
    """Trains on the recipe's tasks; returns the mean reward of each step."""
    build(directory, console=Console(quiet=True))
    config = settings.load(
        ["--config", str(FOLDER / "grpo.yaml"), "--trainer.run_dir", str(directory / "run")],
        env={},
    )
    config.model.name = str(directory / "base")
    config.data.source = str(directory / "tasks")
    config.environment.name = name
    config.runtime.tools = tools
    config.trainer.max_steps = steps
    config.trainer.batch_size = 1
    config.sampling.group_size = 4
    config.evaluation.samples = 0
    problems = Problems(load_split(config.data, "train", seed=0), [])
    train_in_process(config, Console(quiet=True), problems=problems, rewards=[])

    records = read_lines(directory / "run" / "metrics.jsonl")
    assert len(records) == steps
    for record in records:
        assert record["dropped"] == {}
        # Four equal rewards teach nothing.
        assert record["update"]["trained_tokens"] > 0 or record["zero_variance_groups"] == 1
        assert record["update"]["delta_logprob"] < 1e-6
    return [record["reward"] for record in records]


def test_the_recipe_is_trained(tmp_path: Path) -> None:
    train(tmp_path, OWN, [str(FOLDER)], steps=1)


def test_the_recipe_is_trained_with_mini_swe_agent(tmp_path: Path) -> None:
    name, tools = mini()
    train(tmp_path, name, tools, steps=2)
