"""The walk of a prompt can be counted."""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.integration
@pytest.mark.usefixtures("base_model")
def test_a_prompt_is_followed_from_the_data_server_to_an_update() -> None:
    command = [sys.executable, "-m", "tests.support.package.walk", "--names"]
    printed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout

    names = [line.split()[1] for line in printed.splitlines() if line.startswith("  ")]
    on_the_way = {
        "PromptStream.take",
        "Collector._collect",
        "RolloutClient.generate",
        "RewardService.score",
        "Store.take",
        "Batch.of",
        "compute_advantages",
        "Policy._backward",
    }
    assert on_the_way <= set(names)
    assert f"weights: {len(names)} functions in" in printed
