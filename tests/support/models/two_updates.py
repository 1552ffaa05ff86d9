"""Prompt, generate, train, publish, generate again: a run with its real parts and without its
services."""

import itertools
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from msgspec.structs import replace

from common.clients.rollout import RolloutClient
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import Config, from_mapping
from common.wire.schemas import Group, Prompt
from learning.ranks import Ranks
from services.data.tiny import problems
from services.engine.app import make_app
from services.engine.engine import Engine
from services.engine.model import Model
from services.rollout.engine_client import EngineClient
from tests.support.batches.groups import prepared
from trainer.policy.policy import Policy
from trainer.policy.scorer import load_tokenizer, stop_token_ids
from trainer.policy.update_metrics import UpdateMetrics
from trainer.weights.adapters import static_files
from trainer.weights.versions import version_name, write_version

PROMPTS = [
    Prompt(id=f"p{number}", prompt=problem.question, ground_truth=str(problem.answer))
    for number, problem in enumerate(itertools.islice(problems("train"), 3))
]
_CONTEXT = 256


def policy_of(directory: Path, settings: dict[str, Any]) -> Policy:
    """Returns the policy of a run from the model in `directory`. Raises ConfigError when the trainer
    refuses the model.
    """
    training = {
        "optimizer.learning_rate": 1e-2,
        "optimizer.warmup_steps": 0,
        "sampling.temperature": 0.9,
    }
    shape = {"sampling.top_p": 0.95, "rollout.engine": "embedded", "rollout.device": "cpu"}
    context = {"rollout.max_context_tokens": _CONTEXT, "sampling.max_new_tokens": 16}
    config = from_mapping(
        {"model.name": str(directory), **training, **shape, **context, **settings}
    )
    return Policy(config, Ranks())


async def two_updates(policy: Policy, workplace: Path) -> list[UpdateMetrics]:
    """Returns the metrics of two updates of the policy on answers that the embedded engine sampled.

    Every answer must be of the newest weights. Raises ConfigError when the engine refuses the model.
    """
    config = policy.config
    tokenizer = load_tokenizer(config.model)
    prompter = Prompter(tokenizer, PromptStyle.of(config), stop_token_ids(policy.model, tokenizer))
    static = static_files(config, policy.model, tokenizer, workplace / "static")
    write_version(policy.weights(), static, workplace / "weights", "run", 0)
    app = make_app(
        Engine(Model(workplace / "weights" / version_name(0), _CONTEXT), weight_version="0")
    )
    transport = httpx.ASGITransport(app)
    found = []
    async with (
        app.router.lifespan_context(app),
        RolloutClient("engine", "http://in-process", transport=transport) as client,
        EngineClient("engine", "http://in-process", transport=transport) as control,
    ):
        for version in range(2):
            groups = await _sampled(client, prompter, config)
            assert {
                completion.weight_version for group in groups for completion in group.completions
            } == {version}
            found.append(policy.update(prepared(policy, groups)).metrics)
            policy.step += 1
            write_version(policy.weights(), static, workplace / "weights", "run", version + 1)
            await control.load(
                workplace / "weights" / version_name(version + 1), str(version + 1), 60
            )
    return found


async def _sampled(client: RolloutClient, prompter: Prompter, config: Config) -> list[Group]:
    """Generates a group for every prompt, as the collector does."""
    groups = []
    for number, ids in enumerate(map(prompter.token_ids, PROMPTS)):
        sampling = config.sampling
        completions = await client.generate(
            ids,
            n=4,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            stop_token_ids=prompter.stop_token_ids,
            sampling_seed=number,
            parameters=sampling.training_truncation() | sampling.stop_conditions(),
        )
        rewarded = [
            replace(completion, reward=float(i % 2)) for i, completion in enumerate(completions)
        ]
        prompt = np.array(ids, np.int32)
        groups.append(
            Group(
                id=f"g{number}",
                prompt_id=f"p{number}",
                prompt="",
                ground_truth="",
                prompt_token_ids=prompt,
                completions=rewarded,
                position=number,
            )
        )
    return groups
