"""Tinker runs on several ranks are those of one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.batches.tinker import learner, story
from tests.support.processes.ranks import run_ranks

pytestmark = pytest.mark.integration
CASES = {
    "sharded": {"trainer__micro_batch_size": 2},
    "checkpointed": {"trainer__activation_checkpointing": True},
    "replicated": {"parallel__shard_size": 1},
    "context": {"parallel__context_size": 2},
}


def test_two_ranks_learn_what_one_does(policy_dir: Path, tmp_path: Path) -> None:
    """Two runs in turn, of which one leaves memory and comes back, between requests that fail."""
    expected = torch.tensor(story(learner(policy_dir), tmp_path / "one"))
    run_ranks(2, "tinker_ranks", str(tmp_path), str(policy_dir), json.dumps(CASES))
    for case in CASES:
        found = torch.tensor(json.loads((tmp_path / f"{case}.json").read_text()))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5, msg=case)
        for run in ("a", "b"):
            for file in ("adapter_model.safetensors", "optimizer.safetensors"):
                one = load_file(tmp_path / "one" / run / file)
                two = load_file(tmp_path / case / run / file)
                assert one.keys() == two.keys()
                for name, tensor in one.items():
                    largest = tensor.abs().max().item()
                    near = {"atol": 1e-4 * largest, "rtol": 0.0}
                    torch.testing.assert_close(two[name], tensor, msg=f"{case} {name}", **near)
