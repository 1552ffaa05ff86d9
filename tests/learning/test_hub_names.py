"""Published and saved tensors have the names, shapes and values of the hub's files, even for
converted models."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from common.settings.config import Config
from learning.hub_names import from_hub, hub_shapes, to_hub
from learning.ranks import Ranks
from learning.sharding import named_tensors
from services.engine.weights import BadWeights, check_tensors, copy_tensors, load_into, own_tensors
from tests.support.errors import raises
from tests.support.models.tiny_models import GEMMA, KINDS, hub_names, make, write
from tests.support.runs.small_run import small_run
from trainer.policy.policy import Policy

EVERY = [*KINDS, GEMMA]
OTHERS = [
    "olmoe",
    "deepseek_v3",
    "glm4_moe",
    "granitemoe",
    "ernie4_5_moe",
    "qwen3_next",
    "minimax",
    "gpt_neox",
]
_OTHER_SIZES: dict[str, Any] = dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4
)
_OTHER_SIZES |= dict.fromkeys(
    ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16
)
_OTHER_SIZES |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
_OTHER_SIZES |= {"num_experts_per_tok": 2, "moe_k": 2, "n_group": 1, "topk_group": 1}
IDS = torch.arange(3, 33).view(2, 15)


class Sharded(Ranks):
    """One process that shards its models, as on a GPU."""

    @property
    def sharded(self) -> bool:
        return True


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with request.param(device_kind="cpu") as made:
        yield made


def settings(model: Path, tmp_path: Path, **lora: Any) -> Config:
    config = small_run(model, tmp_path)
    return config.model_copy(update={"lora": config.lora.model_copy(update=lora)})


def logits(directory: Path) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = (
            AutoModelForCausalLM.from_pretrained(directory).eval()(input_ids=IDS).logits
        )
    return found


def of_text(files: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of the language model, without those of a vision tower."""
    others = ("vision_tower.", "multi_modal_projector.")
    return {name: tensor for name, tensor in files.items() if not name.startswith(others)}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("ranks", [Ranks, Sharded], indirect=True)
@pytest.mark.parametrize("kind", EVERY)
def test_published_and_saved_tensors_equal_those_of_the_files(
    kind: str, ranks: Ranks, tmp_path: Path
) -> None:
    directory = write(kind, tmp_path / "hub")
    files = load_file(directory / "model.safetensors")
    assert files.keys() == hub_names(kind)
    config = settings(directory, tmp_path)
    policy = Policy(config, ranks)
    assert_equal(dict(policy.weights()), of_text(files))
    saved = tmp_path / "checkpoint"
    policy.snapshots(gathered=False)["."].write(saved)
    written = [load_file(file) for file in saved.glob("*.safetensors")]
    assert_equal({name: tensor for tensors in written for name, tensor in tensors.items()}, files)
    assert torch.equal(logits(saved), logits(directory))
    assert_equal(dict(Policy(config, ranks, saved).weights()), of_text(files))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [Ranks, Sharded], indirect=True)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_are_published_as_save_pretrained_writes_them(
    kind: str, ranks: Ranks, tmp_path: Path
) -> None:
    # DeepSeek's attention has as many heads of keys as of queries.
    heads: dict[str, Any] = {"num_key_value_heads": 4} if kind == "deepseek_v3" else {}
    make(kind, **_OTHER_SIZES, **heads).save_pretrained(tmp_path / "hub")
    files = load_file(tmp_path / "hub" / "model.safetensors")
    published = dict(Policy(settings(tmp_path / "hub", tmp_path), ranks).weights())
    assert_equal(
        published, {name: tensor.to(published[name].dtype) for name, tensor in files.items()}
    )


@pytest.mark.parametrize("ranks", [Ranks, Sharded], indirect=True)
def test_a_prefix_that_the_files_have_is_published(ranks: Ranks, tmp_path: Path) -> None:
    """A text and image model that is loaded without its vision tower, as Qwen3.5's are."""
    make("qwen3_5_text", **_OTHER_SIZES).save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    longer = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(
        longer | {"model.visual.patch_embed.proj.weight": torch.ones(2)},
        file,
        metadata={"format": "pt"},
    )
    assert_equal(dict(Policy(settings(tmp_path / "hub", tmp_path), ranks).weights()), longer)


@pytest.mark.parametrize("kind", EVERY)
def test_the_embedded_engine_loads_the_tensors_whole_and_in_parts(
    kind: str, tmp_path: Path
) -> None:
    new = write(kind, tmp_path / "new", seed=1)
    engine: Any = AutoModelForCausalLM.from_pretrained(write(kind, tmp_path / "old"))
    before, files = dict(own_tensors(engine)), load_file(new / "model.safetensors")
    load_into(engine, new)
    assert_equal(dict(own_tensors(engine)), files)
    with torch.inference_mode():
        torch.testing.assert_close(engine(input_ids=IDS).logits, logits(new))
    check_tensors(engine, before)
    copy_tensors(engine, {name: before[name] for name in reversed(before)})
    assert_equal(dict(own_tensors(engine)), before)


@pytest.mark.parametrize("kind", ["Qwen3-MoE", "Mixtral"])
def test_an_engine_refuses_incomplete_experts_and_keeps_its_own(kind: str, tmp_path: Path) -> None:
    engine: Any = AutoModelForCausalLM.from_pretrained(write(kind, tmp_path / "old"))
    before = {name: tensor.clone() for name, tensor in own_tensors(engine)}
    some = {name: tensor + 1 for name, tensor in before.items() if ".experts.1." not in name}
    check_tensors(engine, some)
    with raises(BadWeights, code="bad_weights") as caught:
        copy_tensors(engine, some)
    assert ".experts." in str(caught.value.field)
    assert_equal(dict(own_tensors(engine)), before)


@pytest.mark.parametrize("kind", ["Phi-3", "Qwen3-MoE", "Mixtral", GEMMA])
def test_a_merged_adapter_is_published_by_the_same_names(kind: str, tmp_path: Path) -> None:
    directory = write(kind, tmp_path / "hub")
    policy = Policy(
        settings(directory, tmp_path, rank=2, publish="merged"), Ranks(device_kind="cpu")
    )
    files = load_file(directory / "model.safetensors")
    assert_equal(dict(policy.weights()), of_text(files))  # a new adapter changes nothing


def test_an_adapter_leaves_the_vision_tower_alone(tmp_path: Path) -> None:
    """Its layers have the same numbers as the language model's, so SGLang would confuse the two."""
    policy = Policy(
        settings(write(GEMMA, tmp_path / "hub"), tmp_path, rank=2), Ranks(device_kind="cpu")
    )
    names = [name for name, _ in policy.weights()]
    assert len(names) == 2 * 2 * 7
    assert all(".language_model." in name for name in names)


def test_a_tensor_made_of_several_waits_for_all_of_them() -> None:
    """Tests a converter with several targets: transformers splits one tensor of the files into
    several."""
    from transformers.core_model_loading import Chunk, WeightConverter

    model = make("Llama 3")
    parts = [f"mlp.{name}_proj.weight" for name in ("gate", "up")]
    model._weight_conversions = [WeightConverter("mlp.both.weight", parts, [Chunk(dim=0)])]
    own = named_tensors(model)
    found = dict(to_hub(model, reversed(own.items()), own))
    first = "model.layers.0.mlp."
    both = torch.cat([own[f"{first}gate_proj.weight"], own[f"{first}up_proj.weight"]])
    assert torch.equal(found[f"{first}both.weight"], both)
    assert f"{first}gate_proj.weight" not in found
    assert {name: tensor.shape for name, tensor in found.items()} == {
        n: t.shape for n, t in hub_shapes(model, own).items()
    }
    assert_equal(from_hub(model, found), {name: tensor.detach() for name, tensor in own.items()})


def rename(directory: Path, change: dict[str, str]) -> None:
    file = directory / "model.safetensors"
    tensors = {change.get(name, name): tensor for name, tensor in load_file(file).items()}
    save_file(
        {name: tensor for name, tensor in tensors.items() if name}, file, metadata={"format": "pt"}
    )


@pytest.mark.parametrize("ranks", [Ranks, Sharded], indirect=True)
@pytest.mark.parametrize(
    "missing", ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_a_run_does_not_start_if_the_files_lack_tensors(
    missing: str, ranks: Ranks, tmp_path: Path
) -> None:
    """transformers would fill them with random numbers, and the engine would skip them."""
    directory = write("Llama 3", tmp_path / "hub")
    rename(directory, {missing: ""})
    with raises(ConfigError, field="model.name", value=str(directory)) as caught:
        Policy(settings(directory, tmp_path), ranks)
    assert missing in caught.value.message


def test_a_quantised_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers converts its files to something that engines do not have."""
    directory = write("Llama 3", tmp_path / "hub")
    monkeypatch.setattr(
        "transformers.LlamaConfig.quantization_config", {"quant_method": "fp8"}, raising=False
    )
    with pytest.raises(ConfigError, match="not quantised"):
        Policy(settings(directory, tmp_path), Ranks(device_kind="cpu"))


def test_a_checkpoint_with_other_names_than_the_models_files_is_refused(tmp_path: Path) -> None:
    """Earlier versions saved a mixture's experts as transformers holds them; engines skip those."""
    directory = write("Qwen3-MoE", tmp_path / "hub")
    make("Qwen3-MoE").save_pretrained(tmp_path / "fused", save_original_format=False)
    with pytest.raises(ConfigError, match=r"mlp\.experts\.gate_up_proj \[3, 32, 32\]"):
        Policy(settings(directory, tmp_path), Ranks(device_kind="cpu"), tmp_path / "fused")


def test_a_version_directory_of_a_mixture_is_a_whole_model(tmp_path: Path) -> None:
    from trainer.weights.versions import write_version

    directory = write("Mixtral", tmp_path / "hub")
    policy = Policy(settings(directory, tmp_path), Ranks(device_kind="cpu"))
    policy.model.config.save_pretrained(tmp_path / "static")
    write_version(
        policy.weights(), [tmp_path / "static" / "config.json"], tmp_path / "weights", "run", 1
    )
    assert torch.equal(logits(tmp_path / "weights" / "v000001"), logits(directory))
    assert json.loads((tmp_path / "weights" / "v000001" / "config.json").read_text())[
        "architectures"
    ] == ["MixtralForCausalLM"]
