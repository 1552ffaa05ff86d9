"""Files that disagree with their `config.json`: ranks that share a model hold what transformers
loads, tensor by tensor.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from common.settings.config import load
from learning.ranks import Ranks
from tests.support.batches.groups import VOCABULARY
from tests.support.batches.sharding import arguments, run_cases
from tests.support.errors import raises
from tests.support.models.tiny_models import make
from trainer.policy.policy import Policy

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
Change = Callable[[Path], None]


def with_tensors(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Changes the tensors in the files of a model, not its configuration."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def own_head(directory: Path) -> None:
    with_tensors(directory, lambda found: found.update({HEAD: found[EMBEDDING].flip(0) * 2}))


def same_head(directory: Path) -> None:
    with_tensors(directory, lambda found: found.update({HEAD: found[EMBEDDING].clone()}))


def own_head_in_two_files(directory: Path) -> None:
    own_head(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="100KB")
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"]


def shards_of_an_older_save(directory: Path) -> None:
    new = load_file(directory / "model.safetensors")
    old = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        old.model.embed_tokens.weight.add_(1)
    old.save_pretrained(directory, max_shard_size="100KB")
    save_file(new, directory / "model.safetensors", metadata={"format": "pt"})
    assert (directory / "model.safetensors.index.json").exists()


def more_tensors(directory: Path) -> None:
    """A bias that the configuration does not want, and a head of another kind of model."""
    extra = {"model.layers.0.mlp.up_proj.bias": torch.ones(8), "score.weight": torch.ones(1, 8)}
    with_tensors(directory, lambda found: found.update(extra))


def own_head_of_a_mixture(directory: Path) -> None:
    make("Qwen3-MoE", vocab_size=VOCABULARY, tie_word_embeddings=True).save_pretrained(directory)
    own_head(directory)


def own_head_of_gemma(directory: Path) -> None:
    """Its class ties the two: its config.json need not say so."""
    make("Gemma 3 text", vocab_size=VOCABULARY).save_pretrained(directory)
    own_head(directory)


CHANGES: list[Change] = [same_head, shards_of_an_older_save, more_tensors]
OWN_HEADS: list[Change] = [
    own_head,
    own_head_in_two_files,
    own_head_of_a_mixture,
    own_head_of_gemma,
]


def loaded_by_transformers(directory: Path) -> dict[str, Tensor]:
    """Returns the tensors by name; of tied ones only the embedding."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.save_pretrained(directory / "again")
    found: dict[str, Tensor] = load_file(directory / "again" / "model.safetensors")
    return found


@pytest.fixture(scope="module")
def directories(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model for each change."""
    made: dict[str, Path] = {}
    for change in CHANGES:
        made[change.__name__] = tmp_path_factory.mktemp(change.__name__) / "model"
        shutil.copytree(policy_dir, made[change.__name__])
        change(made[change.__name__])
    return made


@pytest.fixture(scope="module")
def on_two_ranks(
    directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Tensor]]]:
    """The tensors of both ranks that share a model, by the change to its files."""
    directory = tmp_path_factory.mktemp("ranks")
    cases: dict[str, dict[str, Any]] = {
        name: {"settings": arguments(path), "updates": 0} for name, path in directories.items()
    }
    run_cases(2, directory, cases)
    return {
        name: [load_file(directory / f"{name}-{rank}.safetensors") for rank in range(2)]
        for name in cases
    }


@pytest.mark.integration
@pytest.mark.parametrize("name", [change.__name__ for change in CHANGES])
def test_every_rank_holds_what_transformers_loads(
    name: str, directories: dict[str, Path], on_two_ranks: dict[str, list[dict[str, Tensor]]]
) -> None:
    directory = directories[name]
    expected = loaded_by_transformers(directory)
    alone = dict(Policy(load(arguments(directory), {}), Ranks()).weights())
    for found in (alone, *on_two_ranks[name]):
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), key
    assert HEAD not in expected


@pytest.mark.parametrize("change", OWN_HEADS)
def test_a_head_that_config_json_denies_is_refused(
    change: Change, policy_dir: Path, tmp_path: Path
) -> None:
    """transformers keeps it, and SGLang leaves it out."""
    directory = tmp_path / "model"
    shutil.copytree(policy_dir, directory)
    change(directory)
    with raises(ConfigError, field="model.name", value=str(directory)) as error:
        Policy(load(arguments(directory), {}), Ranks())
    assert "tie_word_embeddings" in str(error.value.remedy)


@pytest.mark.integration
def test_ranks_that_find_other_files_at_the_path_get_those_of_rank_0(
    policy_dir: Path, tmp_path: Path
) -> None:
    """As nodes with disks of their own, one of which has an older version of the model: the files
    have the same names and sizes."""
    for folder in (tmp_path, tmp_path / "node"):
        shutil.copytree(policy_dir, folder / "model")
    layer = "model.layers.0.mlp.up_proj.weight"
    with_tensors(tmp_path / "node" / "model", lambda found: found[layer].add_(1))
    case = {"settings": arguments(Path("model")), "updates": 0, "apart": "node"}
    run_cases(2, tmp_path, {"apart": case})
    expected = load_file(policy_dir / "model.safetensors")
    for rank in range(2):
        found = load_file(tmp_path / f"apart-{rank}.safetensors")
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
