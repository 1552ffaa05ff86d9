"""LoRA on mixtures of experts that also have dense layers: trainer, embedded engine and PEFT agree on
which layers have an adapter, and on what it changes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from common.settings.config import Config, load
from learning.ranks import Ranks
from learning.untrained_parts import Kept
from services.engine.adapters import AdapterRegistry
from services.engine.model import Model
from tests.support.batches.groups import off_policy_groups, prepared
from tests.support.batches.sharding import run_cases
from tests.support.errors import raises
from tests.support.models.tiny_models import make, with_tokenizer_of
from trainer import train_in_process
from trainer.observe.run_dir import read_lines
from trainer.policy.checkpoint import newest
from trainer.policy.lora import NewAdapter, adapter_config
from trainer.policy.policy import Policy
from trainer.policy.scorer import load_model, load_tokenizer
from trainer.weights.adapters import static_files
from trainer.weights.versions import write_version

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
_SHARED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MIXTURES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "Qwen3-MoE": ({"mlp_only_layers": [0]}, ATTENTION | MLP),
    "glm4_moe": ({**_SHARED, "first_k_dense_replace": 1}, ATTENTION | MLP),
    "deepseek_v3": ({**_SHARED, **_LATENT, "first_k_dense_replace": 1}, LATENT | MLP),
    "glm4_moe_lite": (
        {**_SHARED, **_LATENT, "mlp_layer_types": ["dense", "sparse"]},
        LATENT | MLP,
    ),
}
"""Mixtures with a dense first layer: settings, and the layers that get an adapter. All but Qwen3-MoE
have shared experts in the others."""
IDS = list(range(3, 40))


def words(model: Path, **more: str) -> list[str]:
    settings = {
        "model.name": str(model),
        "lora.rank": "4",
        "lora.alpha": "8",
        "optimizer.learning_rate": "1e-2",
        "optimizer.warmup_steps": "0",
        "algorithm.kl_coef": "0.1",
    }
    settings |= {name.replace("__", "."): value for name, value in more.items()}
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def mixture(kind: str, policy_dir: Path, directory: Path) -> Path:
    return with_tokenizer_of(policy_dir, kind, directory / "model", seed=1, **MIXTURES[kind][0])


def logprobs(model: Any) -> Tensor:
    """Returns the log-probabilities of `IDS` after the first."""
    ids = torch.tensor([IDS])
    with torch.no_grad():
        scores = torch.log_softmax(model.eval()(ids).logits[0, :-1], dim=-1)
    return scores.gather(1, ids[0, 1:, None])[:, 0]


def of_engine(model: Path, adapter: Path | None = None) -> Tensor:
    """Returns the embedded engine's log-probabilities of the same tokens."""
    engine = Model(model, 128)
    registry = AdapterRegistry(engine.module)
    if adapter is not None:
        registry.load("policy", adapter)
        registry.merge("policy")
    return torch.tensor(engine.score([IDS])[0].logprobs)


def publish(policy: Policy, form: Literal["adapter", "merged"], directory: Path) -> Path:
    config = policy.config
    config.lora.publish = form
    static = static_files(config, policy.model, load_tokenizer(config.model), directory / "static")
    write_version(policy.weights(), static, directory, "run", 3)
    return directory / "v000003"


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_engine_computes_what_the_trainer_does_from_adapter_and_merged_model(
    kind: str, policy_dir: Path, tmp_path: Path
) -> None:
    model = mixture(kind, policy_dir, tmp_path)
    policy = Policy(load(words(model), {}), Ranks())
    before = of_engine(model)
    policy.update(prepared(policy, off_policy_groups()))
    expected = logprobs(policy.model)
    assert (expected - before).abs().max() > 1e-3
    assert {name.split(".")[-3] for name, _ in policy.weights()} == MIXTURES[kind][1]
    assert not any(".experts." in name for name, _ in policy.weights())

    adapter = publish(policy, "adapter", tmp_path / "adapter")
    torch.testing.assert_close(of_engine(model, adapter), expected, atol=1e-5, rtol=0)
    merged = publish(policy, "merged", tmp_path / "merged")
    torch.testing.assert_close(of_engine(merged), expected, atol=1e-5, rtol=0)
    assert load_file(merged / "model.safetensors").keys() == (
        load_file(model / "model.safetensors").keys()
    )

    from peft import PeftModel  # slow to import, and every pytest process reads this file

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    by_peft = PeftModel.from_pretrained(base, adapter)
    torch.testing.assert_close(logprobs(by_peft), expected, atol=1e-5, rtol=0)


@pytest.mark.integration
@pytest.mark.parametrize("kind", MIXTURES)
def test_two_ranks_make_the_same_adapter_and_save_one_that_peft_reads(
    kind: str, policy_dir: Path, tmp_path: Path
) -> None:
    model = mixture(kind, policy_dir, tmp_path)
    cases: dict[str, dict[str, Any]] = {
        "adapter": {"settings": words(model), "updates": 2, "save": "saved"},
        "merged": {"settings": words(model, lora__publish="merged"), "updates": 2},
        "resumed": {"settings": words(model), "updates": 1, "resume": "saved"},
    }
    run_cases(2, tmp_path, cases)
    policy = Policy(load(words(model), {}), Ranks())
    for _ in range(2):
        batch = [off_policy_groups()[i] for i in (0, 3)]
        policy.update(prepared(policy, batch))
        policy.step += 1
    expected = logprobs(policy.model)

    own = {name: tensor.clone() for name, tensor in policy.weights()}
    of_two = load_file(tmp_path / "adapter-1.safetensors")
    assert of_two.keys() == own.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(of_two[name], tensor, atol=1e-4, rtol=0)
    saved = newest(tmp_path / "saved" / "checkpoints")
    assert saved is not None
    read = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    torch.testing.assert_close(logprobs(read), expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(of_engine(model, saved), logprobs(read), atol=1e-5, rtol=0)

    names = load_file(model / "model.safetensors").keys()
    assert load_file(tmp_path / "merged-0.safetensors").keys() == names
    section = load(words(saved), {}).model
    torch.testing.assert_close(logprobs(load_model(section)), logprobs(read), atol=1e-5, rtol=0)


@pytest.mark.integration
@pytest.mark.parametrize("publish", ["adapter", "merged"])
def test_a_run_samples_from_the_policy_that_it_trains(
    publish: str, settings: Callable[..., Config], base_model: Path, tmp_path: Path
) -> None:
    model = mixture("Qwen3-MoE", base_model, tmp_path)
    config = settings(*words(model, lora__publish=publish))
    saved = train_in_process(config, Console(quiet=True))
    assert (saved / "adapter_model.safetensors").is_file()
    assert config.trainer.run_dir is not None
    lines = read_lines(config.trainer.run_dir / "metrics.jsonl")
    assert max(line["update"]["delta_logprob_current"] for line in lines) < 1e-5


def adapted(kind: str, config: Config, **more: Any) -> tuple[set[str], dict[str, Any]]:
    """Returns the last names of a tiny model's layers with an adapter, and what describes it."""
    model = make(kind, **more)
    model.kept = Kept(model.config)  # as loading leaves it
    NewAdapter(config, torch.float32).change(model)
    names = {
        name.removesuffix(".lora_A.default.weight").rpartition(".")[2]
        for name, _ in model.named_parameters()
        if ".lora_A." in name
    }
    return names, json.loads(adapter_config(model))


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("Qwen2", ATTENTION | MLP),
        ("Qwen3-MoE", ATTENTION),
        ("Mixtral", ATTENTION),
        ("gpt_oss", ATTENTION),
        ("qwen2_moe", ATTENTION | MLP),
        ("llama4_text", ATTENTION | MLP),
        ("granitemoe", ATTENTION),
        ("Gemma 3 4B", ATTENTION | MLP),
    ],
)
def test_the_default_is_attention_and_dense_mlps_in_every_family(
    kind: str, layers: set[str]
) -> None:
    """Not routed experts, not routers, not the head."""
    found, described = adapted(kind, load(words(Path("model")), {}))
    assert found == layers
    assert set(described["target_modules"]) == layers
    assert not described["rank_pattern"]
    assert not described["target_parameters"]


def test_dense_layers_of_a_mixture_can_be_named_alone() -> None:
    config = load(words(Path("model"), lora__target_modules="gate_proj,up_proj"), {})
    config.lora.dropout = 0.1
    found, described = adapted("Qwen3-MoE", config, mlp_only_layers=[0])
    assert found == {"gate_proj", "up_proj"}
    assert described["target_modules"] == []
    assert described["target_parameters"] == [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ]
    # PEFT reads adapters of parameters only without dropout.
    assert described["lora_dropout"] == 0


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("lfm2", {}, r"w1, w2, w3, for which SGLang has no adapters"),
        ("deepseek_v3", {**_SHARED, **_LATENT, "q_lora_rank": None}, r"q_proj without v_proj"),
    ],
)
def test_layers_without_adapters_in_sglang_are_refused_before_the_run(
    kind: str, more: dict[str, Any], reason: str
) -> None:
    config = load(words(Path("model"), rollout__engine="sglang"), {})
    with raises(ConfigError, field="lora.target_modules", value="[]") as caught:
        adapted(kind, config, **more)
    assert reason in caught.value.message
    config.lora.publish = "merged"
    assert adapted(kind, config, **more)[0]
