"""Model families with tiny random weights: prompt, generate, train, publish, generate again, and
score equally."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import from_mapping, load
from tests.support.models.families import FAMILIES
from tests.support.models.two_updates import PROMPTS, policy_of, two_updates
from tests.support.paths import ROOT
from trainer import train_in_process
from trainer.observe.run_dir import read_lines
from trainer.policy.scorer import load_tokenizer

pytestmark = pytest.mark.integration

NEAR = 1e-5
CASES = [
    *((name, {}) for name in FAMILIES),
    ("Qwen3", {"sampling.chat_template_kwargs": {"enable_thinking": False}}),
]
NAMES = [f"{name}{' without thinking' if settings else ''}" for name, settings in CASES]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=NAMES)
async def test_a_family_is_trained_published_and_generated(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    policy = policy_of(FAMILIES[name].write(tmp_path / "hub"), settings)
    for metrics in await two_updates(policy, tmp_path):
        assert metrics.trained_tokens > 30
        assert metrics.delta_logprob < NEAR
        assert metrics.grad_norm > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_prompt_of_a_family_is_what_its_tokenizer_makes_of_its_chat(
    name: str, tmp_path: Path
) -> None:
    config = from_mapping({"model.name": str(FAMILIES[name].write(tmp_path))})
    tokenizer = load_tokenizer(config.model)
    ids = Prompter(tokenizer, PromptStyle.of(config), []).token_ids(PROMPTS[0])
    chat = [{"role": "user", "content": PROMPTS[0].prompt}]
    assert ids == tokenizer.apply_chat_template(
        chat, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    base = Prompter(
        tokenizer, PromptStyle.of(from_mapping({"data.prompt_template": "{question}"})), []
    ).token_ids(PROMPTS[0])
    assert base == tokenizer(PROMPTS[0].prompt).input_ids
    assert base.count(tokenizer.bos_token_id) == (1 if FAMILIES[name].bos else 0)
    assert tokenizer.decode(base, skip_special_tokens=True) == PROMPTS[0].prompt


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(("name", "settings"), CASES, ids=NAMES)
def test_a_family_runs_the_whole_system(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    directory = FAMILIES[name].write(tmp_path / "hub")
    words = [
        *("--config", str(ROOT / "jobgroup/configs/tiny-cpu.yaml"), "--model.name", str(directory)),
        *(
            "--trainer.run_dir",
            str(tmp_path / "run"),
            "--state_dir",
            str(tmp_path / "state"),
            "--reward.workers",
            "1",
        ),
        *(
            "--trainer.batch_size",
            "4",
            "--trainer.max_steps",
            "3",
            "--sampling.group_size",
            "4",
            "--evaluation.samples",
            "4",
        ),
        *(
            "--optimizer.warmup_steps",
            "0",
            "--optimizer.learning_rate",
            "1e-2",
            "--algorithm.entropy_coef",
            "0.01",
        ),
        *("--rollout.max_context_tokens", "256", "--trainer.max_staleness", "0"),
        *(["--sampling.chat_template_kwargs", "enable_thinking=false"] if settings else []),
    ]
    train_in_process(load(words, {}), Console(quiet=True))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 3
    assert all(
        line["update"]["delta_logprob"] < NEAR and line["update"]["grad_norm"] > 0 for line in lines
    )
