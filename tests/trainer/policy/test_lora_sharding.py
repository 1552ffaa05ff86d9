"""LoRA on several ranks: the same update as on one, from files visible to all ranks or only to rank
0."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from common.settings.config import Config, load
from learning.ranks import Ranks
from tests.support.batches.groups import save
from tests.support.batches.sharding import One, run_cases
from tests.support.errors import raises
from tests.support.workers.sharded_policies import learned
from trainer.policy.checkpoint import newest
from trainer.policy.policy import Policy

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]
SETTINGS = {
    "optimizer.learning_rate": "1e-2",
    "optimizer.warmup_steps": "0",
    "optimizer.weight_decay": "0.1",
    "optimizer.max_grad_norm": "0.5",
    "trainer.micro_batch_size": "2",
    "algorithm.kl_coef": "0.1",
    "lora.rank": "4",
    "lora.alpha": "8",
}


def words(policy_dir: Path, **more: Any) -> list[str]:
    """Returns a command line; names in `more` have a double underscore instead of the dot."""
    settings = SETTINGS | {"model.name": str(policy_dir)}
    settings |= {name.replace("__", "."): str(value) for name, value in more.items()}
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


class OneAdapter(One):
    """The results of three updates in one process, and its checkpoint after two of them."""

    def __init__(self, config: Config, directory: Path) -> None:
        policy = Policy(config, Ranks())
        self.metrics = learned(policy, 2)
        save(policy, directory / "one" / "checkpoints")
        self.metrics += learned(policy, 1)
        self.weights = {name: tensor.clone() for name, tensor in policy.weights()}
        config.lora.publish = "merged"
        self.merged = {name: tensor.clone() for name, tensor in policy.weights()}


@pytest.mark.slow
def test_the_update_of_an_adapter_is_the_same_however_the_model_is_spread(
    policy_dir: Path, tmp_path: Path
) -> None:
    """With weight decay, clipping and the frozen model as reference; resumed runs continue with the
    third update."""
    one = OneAdapter(load(words(policy_dir), {}), tmp_path)
    assert one.metrics[-1][2] > 0, "the policy is no longer the reference"
    sharded, replicated = words(policy_dir), words(policy_dir, parallel__shard_size=1)
    offload = words(
        policy_dir, parallel__offload_optimizer=True, trainer__activation_checkpointing=True
    )
    cases: dict[str, dict[str, Any]] = {
        "sharded": {"settings": sharded},
        "replicated": {"settings": replicated},
        "offload": {"settings": offload},
        "from_one": {"settings": sharded, "resume": "one", "updates": 1},
        "saves": {"settings": sharded, "save": "two", "updates": 2},
        "saves_alone": {"settings": sharded, "save": "alone", "updates": 2, "hidden": True},
        "to_replicated": {"settings": replicated, "resume": "two", "updates": 1},
        "hidden": {"settings": sharded, "resume": "alone", "updates": 1, "hidden": True},
        "merged": {"settings": words(policy_dir, lora__publish="merged")},
        "low": {"settings": sharded, "low": True},
    }
    run_cases(2, tmp_path, cases)
    for name in ("sharded", "replicated", "offload", "from_one", "to_replicated", "hidden"):
        one.check(tmp_path, name, 2)
    for rank in range(2):
        found = load_file(tmp_path / f"merged-{rank}.safetensors")
        assert found.keys() == one.merged.keys()
        for name, expected in one.merged.items():
            torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=0)
    # The frozen model in bfloat16 and the adapter in float32, gathered together: equal except for
    # rounding.
    low = torch.tensor(json.loads((tmp_path / "low.json").read_text()))
    torch.testing.assert_close(low, torch.tensor(one.metrics), atol=0.02, rtol=0.1)
    assert {tensor.dtype for tensor in load_file(tmp_path / "low-0.safetensors").values()} == {
        torch.bfloat16
    }
    for name in ("two", "alone"):
        check_checkpoint(policy_dir, tmp_path / name, one)


def check_checkpoint(policy_dir: Path, run: Path, one: One) -> None:
    """Checks that it is a PEFT directory and that one process resumes it."""
    path = newest(run / "checkpoints")
    assert path is not None
    assert {file.name for file in path.iterdir()} == {
        *("adapter_config.json", "adapter_model.safetensors", "trainer_state.json", "state"),
    }
    assert load_file(path / "adapter_model.safetensors").keys() == one.weights.keys()
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    policy, _, _ = Policy.resume(load(words(policy_dir), {}), Ranks(), run)
    found = model.state_dict()
    for name, tensor in policy.model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, atol=0, rtol=0)
    assert learned(policy, 1)[0] == pytest.approx(one.metrics[-1], abs=1e-5)


def test_a_damaged_adapter_is_refused_by_name(policy_dir: Path, tmp_path: Path) -> None:
    """The damage keeps the file's size: with another size it would count as incomplete
    (`test_files.py`)."""
    config = load(words(policy_dir), {})
    path = save(Policy(config, Ranks()), tmp_path / "checkpoints")
    file = path / "adapter_model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    with raises(ConfigError, code="checkpoint_changed", value=str(path)) as caught:
        Policy.resume(config, Ranks(), tmp_path)
    assert file.name in caught.value.message
