"""Fixtures shared by all tests."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.paths import ROOT

# The same examples on every run; `make fuzz` looks for new ones.
settings.register_profile("repeatable", derandomize="FUZZ_SECONDS" not in os.environ, deadline=None)
settings.load_profile("repeatable")
# torch writes hundreds of lines of DEBUG for every checkpoint, which would hide what failed.
logging.getLogger("c10d-NullHandler-dcp_logger").disabled = True


@pytest.fixture(scope="session")
def base_model() -> Path:
    """The cached tiny base model (`make test` makes it first); made here when it is not there."""
    path = ROOT / ".cache" / "tiny-base"
    if not (path / "config.json").exists():
        subprocess.run([sys.executable, "-m", "trainer.tiny_model", str(path)], cwd=ROOT, check=True)
    return path


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a random tiny Qwen2."""
    import torch  # here: the tests of most services need none of this

    from tests.support.groups import VOCABULARY
    from trainer.cli.tiny_model import make_model, make_tokenizer

    directory = tmp_path_factory.mktemp("policy")
    tokenizer = make_tokenizer(iter(["How many apples now? 1 2 3", "#### 12"]))
    torch.manual_seed(0)
    model = make_model(max(VOCABULARY, len(tokenizer)), tokenizer.eos_token_id, tokenizer.pad_token_id)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
