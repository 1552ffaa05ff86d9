"""One episode of a verifiers environment: `python verifiers_program.py ID`, started by the program
runner.

It runs in its own virtual environment, with verifiers and the package ID, and imports nothing from
this project.
"""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


def task_of(environment: Any, task: dict[str, Any]) -> vf.Task:
    """Returns the task that the row names in its column `index`. Exits with the reason if there is
    none.
    """
    index = task["columns"].get("index")
    if not str(index).isdecimal():
        sys.exit(
            f"the row names no task of the taskset: column index is {index!r}; put the position of "
            "the task there"
        )
    vf_task = next(itertools.islice(environment.taskset, int(index), None), None)
    if vf_task is None:
        sys.exit(f"the taskset has no task {index}: column index is beyond its end")
    return vf_task


async def play(identifier: str, task: dict[str, Any]) -> dict[str, float]:
    """Returns the weighted rewards of an episode, by name. Exits with the reason when it failed."""
    config = resolve_env_config(
        {"taskset": {"id": identifier}, "agent": {"runtime": {"type": "subprocess"}}}
    )
    environment = load_environment(config)
    client = EvalClientConfig(
        base_url=task["session"]["openai_base_url"], api_key_var="OPENAI_API_KEY"
    )
    async with environment.serving():
        episode = await environment.run_episode(
            task_of(environment, task), ModelContext("policy", client)
        )
    if not episode.ok:
        errors = list(episode.errors)
        for trace in episode.traces:
            errors += trace.errors
        lines = [f"{error.type}: {error.message}" for error in errors]
        sys.exit("\n".join(lines) or "the episode failed")

    rewards: dict[str, float] = {}
    for trace in episode.traces:
        for name, reward in trace.rewards.items():
            if reward is None:
                sys.exit(f"the reward {name} was not computed")
            rewards[name] = rewards.get(name, 0.0) + reward.value
    if not rewards:
        sys.exit(f"{identifier} has no reward: give its task a method with @vf.reward")
    return rewards


if __name__ == "__main__":
    reward = asyncio.run(play(sys.argv[1], json.load(sys.stdin)))
    Path(os.environ["EPISODE_REWARD_FILE"]).write_text(json.dumps(reward))
