"""A tiny random policy and settings of a small run."""

from pathlib import Path

import pytest
import torch

from common.config import Config
from tests.trainer.groups import VOCABULARY
from trainer.cli.tiny_model import make_model, make_tokenizer


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a random tiny Qwen2."""
    directory = tmp_path_factory.mktemp("policy")
    tokenizer = make_tokenizer(iter(["How many apples now? 1 2 3", "#### 12"]))
    torch.manual_seed(0)
    model = make_model(max(VOCABULARY, len(tokenizer)), tokenizer.eos_token_id, tokenizer.pad_token_id)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def config(policy_dir: Path, tmp_path: Path) -> Config:
    """Settings of a small run."""
    config = Config()
    config.model.name = str(policy_dir)
    config.trainer.learning_rate = 1e-3
    config.trainer.warmup_steps = 0
    config.trainer.run_dir = tmp_path / "run"
    config.state_dir = tmp_path / "state"
    return config
