"""An adapter whose tensors are not those that its model has room for is refused wherever a model is
loaded, instead of the base model being taken for it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common.errors import ConfigError
from common.settings.config import from_mapping
from common.settings.sections import ModelSection
from learning.ranks import Ranks
from services.engine.model import Model
from tests.support.errors import raises
from trainer import ModelEvaluator
from trainer.cli import export
from trainer.policy.scorer import context_length, load_model
from trainer.policy.value_model import load_value_model

# PEFT's call.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
Tensors = dict[str, Tensor]


def adapter(model: Any, base: Path, directory: Path) -> Path:
    """Writes a random adapter of a model, as one of `base`."""
    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, settings)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(directory)
    AutoTokenizer.from_pretrained(base).save_pretrained(directory)
    return directory


def own(base: Path, directory: Path) -> Path:
    return adapter(AutoModelForCausalLM.from_pretrained(base), base, directory)


def changed(change: Callable[[Tensors], Tensors]) -> Callable[[Path, Path], Path]:
    """Returns a function that writes an adapter and changes its tensors."""

    def write(base: Path, directory: Path) -> Path:
        file = own(base, directory) / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)
        return directory

    return write


def renamed(tensors: Tensors) -> Tensors:
    return {name.replace("model.layers", "transformer.h"): each for name, each in tensors.items()}


def of_the_first_layer(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "layers.0." in name}


def of_a_deeper_model(base: Path, directory: Path) -> Path:
    config = AutoConfig.from_pretrained(base)
    config.num_hidden_layers *= 2
    config.layer_types *= 2
    return adapter(AutoModelForCausalLM.from_config(config), base, directory)


def of_other_layers(base: Path, directory: Path) -> Path:
    """Nothing in the model has the name of a layer that the adapter changes."""
    own(base, directory)
    file = directory / "adapter_config.json"
    file.write_text(file.read_text().replace("q_proj", "query").replace("v_proj", "value"))
    return directory


UNFIT = {
    "fits no layer": changed(renamed),
    "fits half the layers": changed(of_the_first_layer),
    "of a deeper model": of_a_deeper_model,
    "of other layers": of_other_layers,
}


@pytest.mark.integration
@pytest.mark.parametrize("name", UNFIT)
def test_an_adapter_that_does_not_fit_is_refused(
    name: str, policy_dir: Path, tmp_path: Path
) -> None:
    directory = UNFIT[name](policy_dir, tmp_path / "adapter")
    place = str(directory)
    with raises(ConfigError, field="model.name", value=place):
        load_model(ModelSection(name=place))
    with raises(ConfigError, field="CHECKPOINT", value=place):
        export.main([place, str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    with raises(ConfigError, field="model.name", value=place):
        ModelEvaluator(directory, max_new_tokens=2).evaluate(
            [{"question": "How many?", "answer": "1"}], lambda completions, **_: [0.0]
        )


def test_one_that_fits_is_merged(policy_dir: Path, tmp_path: Path) -> None:
    directory = own(policy_dir, tmp_path / "adapter")
    base = load_file(policy_dir / "model.safetensors")
    factors = load_file(directory / "adapter_model.safetensors")
    merged = load_model(ModelSection(name=str(directory))).state_dict()
    assert context_length(ModelSection(name=str(directory))) == 512
    for name, weight in base.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        wanted = weight
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            # PEFT's default alpha is 8, and the rank 2.
            change = factors[f"{layer}.lora_B.weight"] @ factors[f"{layer}.lora_A.weight"]
            wanted = weight + 4 * change
        torch.testing.assert_close(merged[name], wanted)


def test_an_adapter_in_another_format_is_refused(policy_dir: Path, tmp_path: Path) -> None:
    directory = own(policy_dir, tmp_path / "adapter")
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors") as refused:
        load_model(ModelSection(name=str(directory)))
    assert (refused.value.field, refused.value.value) == ("model.name", str(directory))


def test_a_directory_with_a_model_and_an_adapter_is_refused(
    policy_dir: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "both"
    shutil.copytree(policy_dir, directory)
    own(policy_dir, directory)
    place = str(directory)
    with raises(ConfigError, field="model.name", value=place):
        load_model(ModelSection(name=place))
    with raises(ConfigError, field="CHECKPOINT", value=place):
        export.main([place, str(tmp_path / "out")])
    with raises(ConfigError, field="--model-path", value=place):
        Model(directory, 64)
    section = {"algorithm.name": "ppo", "critic.model": place}
    with raises(ConfigError, field="critic.model", value=place):
        load_value_model(from_mapping(section), Ranks())
