"""Model families with tiny random weights: prompt, generate, train, publish, generate again, and score equally."""

import itertools
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from common.config import Config, from_mapping, load
from common.prompts import Prompter, PromptStyle
from common.rollout_client import RolloutClient
from common.schemas import Group, Prompt
from learning.ranks import Ranks
from services.data.tiny import problems
from services.engine.app import make_app
from services.engine.engine import Engine
from services.engine.model import Model
from services.rollout.engine_client import EngineClient
from tests.support.families import FAMILIES
from tests.support.groups import prepared
from tests.support.paths import ROOT
from trainer import train_in_process
from trainer.observe.run_dir import read_lines
from trainer.policy.policy import Policy
from trainer.policy.scorer import load_tokenizer, stop_token_ids
from trainer.weights.adapters import static_files
from trainer.weights.publisher import version_name, write_version

pytestmark = pytest.mark.integration

NEAR = 1e-5
CASES = [*((name, {}) for name in FAMILIES), ("Qwen3", {"sampling.chat_template_kwargs": {"enable_thinking": False}})]
NAMES = [f"{name}{' without thinking' if settings else ''}" for name, settings in CASES]
PROMPTS = [
    Prompt(id=f"p{number}", prompt=problem.question, ground_truth=str(problem.answer))
    for number, problem in enumerate(itertools.islice(problems("train"), 3))
]


async def sampled(client: RolloutClient, prompter: Prompter, config: Config) -> list[Group]:
    """Generates a group for every prompt, as the collector does."""
    groups = []
    for number, ids in enumerate(prompter.all_token_ids(PROMPTS)):
        sampling = config.sampling
        completions = await client.generate(
            ids,
            n=4,
            max_new_tokens=16,
            temperature=sampling.temperature,
            stop_token_ids=prompter.stop_token_ids,
            sampling_seed=number,
            shape=sampling.bounded_cuts() | sampling.ends(),
        )
        rewarded = [replace(completion, reward=float(i % 2)) for i, completion in enumerate(completions)]
        prompt = np.array(ids, np.int32)
        groups.append(Group(f"g{number}", f"p{number}", "", "", prompt, rewarded, position=number))
    return groups


@pytest.mark.parametrize(("name", "settings"), CASES, ids=NAMES)
async def test_a_family_is_trained_published_and_generated(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    directory = FAMILIES[name].write(tmp_path / "hub")
    training = {"trainer.learning_rate": 1e-2, "trainer.warmup_steps": 0, "sampling.temperature": 0.9}
    shape = {"sampling.top_p": 0.95, "rollout.engine": "embedded", "rollout.device": "cpu"}
    config = from_mapping({"model.name": str(directory), **training, **shape, **settings})
    policy, tokenizer = Policy(config, Ranks()), load_tokenizer(config.model)
    prompter = Prompter(tokenizer, PromptStyle.of(config), stop_token_ids(policy.model, tokenizer))
    static = static_files(config, policy.model, tokenizer, tmp_path / "static")
    write_version(policy.weights(), static, tmp_path / "weights", "run", 0)
    app = make_app(Engine(Model(tmp_path / "weights" / version_name(0), 256), weight_version="0"))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        RolloutClient("engine", "http://in-process", transport=transport) as client,
        EngineClient("engine", "http://in-process", transport=transport) as control,
    ):
        for version in range(2):
            groups = await sampled(client, prompter, config)
            assert {completion.weight_version for group in groups for completion in group.completions} == {version}
            metrics = policy.update(prepared(policy, groups)).metrics
            assert metrics.trained_tokens > 30
            assert metrics.delta_logprob < NEAR
            assert metrics.grad_norm > 0
            write_version(policy.weights(), static, tmp_path / "weights", "run", version + 1)
            await control.load(tmp_path / "weights" / version_name(version + 1), str(version + 1), 60)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_prompt_of_a_family_is_what_its_tokenizer_makes_of_its_chat(name: str, tmp_path: Path) -> None:
    config = from_mapping({"model.name": str(FAMILIES[name].write(tmp_path))})
    tokenizer = load_tokenizer(config.model)
    ids = Prompter(tokenizer, PromptStyle.of(config), []).token_ids(PROMPTS[0])
    chat = [{"role": "user", "content": PROMPTS[0].prompt}]
    assert ids == tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
    base = Prompter(tokenizer, PromptStyle.of(from_mapping({"data.prompt_template": "{question}"})), []).token_ids(PROMPTS[0])
    assert base == tokenizer(PROMPTS[0].prompt).input_ids
    assert base.count(tokenizer.bos_token_id) == (1 if FAMILIES[name].bos else 0)
    assert tokenizer.decode(base, skip_special_tokens=True) == PROMPTS[0].prompt


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(("name", "settings"), CASES, ids=NAMES)
def test_a_family_runs_the_whole_system(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    directory = FAMILIES[name].write(tmp_path / "hub")
    words = [
        *("--config", str(ROOT / "jobgroup/configs/tiny-cpu.yaml"), "--model.name", str(directory)),
        *("--trainer.run_dir", str(tmp_path / "run"), "--state_dir", str(tmp_path / "state"), "--reward.workers", "1"),
        *("--trainer.batch_size", "4", "--trainer.max_steps", "3", "--sampling.group_size", "4", "--trainer.eval_samples", "4"),
        *("--trainer.warmup_steps", "0", "--trainer.learning_rate", "1e-2", "--algorithm.entropy_coef", "0.01"),
        *("--rollout.max_context_tokens", "256", "--trainer.max_staleness", "0"),
        *(["--sampling.chat_template_kwargs", "enable_thinking=false"] if settings else []),
    ]
    train_in_process(load(words, {}), Console(quiet=True))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 3
    assert all(line["update"]["delta_logprob"] < NEAR and line["update"]["grad_norm"] > 0 for line in lines)
