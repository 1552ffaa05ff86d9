"""Ranks that own the experts of every layer together make the update of one rank."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from common.settings.config import load
from learning.ranks import Ranks
from tests.support.batches.groups import VOCABULARY
from tests.support.batches.sharding import One, arguments, run_cases
from tests.support.errors import raises
from tests.support.models.tiny_models import make, write
from tests.support.processes.ranks import run_ranks
from tests.support.workers import long_row
from tests.support.workers.sharded_policies import learned
from trainer.cli.tiny_base import make_tokenizer
from trainer.policy.checkpoint import newest
from trainer.policy.policy import Policy

_NEAR = 5e-6
_NEAR_WEIGHT = 2e-5
"""A hundredth of a weight's change in two updates. One in 500 may be farther: AdamW divides a
gradient near 0 by its own rounded size, with FSDP2 alone too."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}
"""Tiny sizes of models of transformers with experts, by model type."""


def written(directory: Path, kind: str = "qwen3_moe", **more: Any) -> Path:
    sizes = FAMILIES[kind] | {"vocab_size": VOCABULARY} | more
    return write(kind, directory / "model", **sizes)


def check_cases(ranks: int, model: Path, directory: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Compares two updates on several ranks with those of one: losses, gradient norms, KL and new
    weights. The second starts from weights that AdamW has rounded differently.

    Values of `cases` are settings of the trainer.
    """
    policy = Policy(load(arguments(model), {}), Ranks())
    expected = torch.tensor(learned(policy, 2))
    expected_weights = {name: tensor.clone() for name, tensor in policy.weights()}
    made = {
        name: {"settings": arguments(model, **settings), "updates": 2}
        for name, settings in cases.items()
    }
    run_cases(ranks, directory, made)
    for name in cases:
        found = torch.tensor(json.loads((directory / f"{name}.json").read_text()))
        torch.testing.assert_close(found[0], expected[0], atol=1e-7, rtol=1e-6, msg=name)
        torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5, msg=name)
        for rank in range(ranks):
            weights = load_file(directory / f"{name}-{rank}.safetensors")
            assert weights.keys() == expected_weights.keys()
            for key, tensor in expected_weights.items():
                far = (weights[key] - tensor).abs() > _NEAR_WEIGHT
                assert int(far.sum()) <= far.numel() // 500, f"{name} {key}"


@pytest.mark.integration
def test_two_ranks_with_half_of_the_experts(tmp_path: Path) -> None:
    check_cases(2, written(tmp_path), tmp_path, {"two": {"expert_size": 2}})


@pytest.mark.integration
@pytest.mark.slow
def test_four_ranks_in_every_form(tmp_path: Path) -> None:
    two = {"expert_size": 2}
    check_cases(
        4,
        written(tmp_path),
        tmp_path,
        {
            "four": {"expert_size": 4},
            "two_and_two": two,
            "copies": two | {"shard_size": 2},
            "context": two | {"context_size": 2},
            "larger_than_context": {"expert_size": 4, "context_size": 2},
            "recomputed": two | {"activation_checkpointing": True},
            "selective": two | {"activation_checkpointing": "selective"},
            "offloaded": two | {"offload_optimizer": True, "offload_reference": True},
        },
    )


@pytest.mark.integration
@pytest.mark.slow
def test_compiled_layers(tmp_path: Path) -> None:
    compiled = {"expert_size": 2, "compile": True}
    selective = compiled | {"activation_checkpointing": "selective"}
    check_cases(2, written(tmp_path), tmp_path, {"compiled": compiled, "selective": selective})


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "glm4_moe", "deepseek_v3"])
def test_families(tmp_path: Path, kind: str) -> None:
    two = {"expert_size": 2}
    check_cases(
        4, written(tmp_path, kind), tmp_path, {"two": two, "copies": two | {"shard_size": 2}}
    )


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("experts", [6, 2])
def test_experts_that_the_remaining_ranks_cannot_share_evenly(tmp_path: Path, experts: int) -> None:
    """Each of two ranks owns 2 and 1 experts, or 1 and none."""
    model = written(tmp_path, num_experts=experts)
    check_cases(4, model, tmp_path, {"two": {"expert_size": 2}})


@pytest.mark.integration
@pytest.mark.slow
def test_a_rank_whose_experts_nobody_needs(tmp_path: Path) -> None:
    """A bias of the router sends all tokens to the first two experts of four."""
    model = make("glm4_moe", vocab_size=VOCABULARY, **FAMILIES["glm4_moe"])
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor([10.0, 10.0, 0.0, 0.0]))
    routed: list[Tensor] = []
    experts = model.get_decoder().layers[1].mlp.experts
    with experts.register_forward_pre_hook(lambda _, given: routed.append(given[1])):
        model(torch.arange(3, 40)[None])
    assert set(routed[0].flatten().tolist()) == {0, 1}
    model.save_pretrained(tmp_path / "model")
    check_cases(
        4,
        tmp_path / "model",
        tmp_path,
        {
            "two": {"expert_size": 2},
            "four": {"expert_size": 4, "activation_checkpointing": True},
        },
    )


@pytest.mark.integration
@pytest.mark.slow
def test_checkpoints_change_their_form(tmp_path: Path) -> None:
    """Four ranks that divide the experts, two that do not, one, and back; also from a disk that
    only rank 0 sees."""
    model = written(tmp_path)
    make_tokenizer(iter(["1 + 1 = 2"])).save_pretrained(model)  # checkpoints know whose they are
    one = One(model, tmp_path)
    plain = arguments(model)
    divided = arguments(model, expert_size=2)
    copies = arguments(model, expert_size=2, shard_size=2)
    third: dict[str, Any] = {"updates": 1}
    resumed: dict[int, dict[str, dict[str, Any]]] = {
        4: {
            "from_one": third | {"settings": divided, "resume": "one"},
            "from_two": third | {"settings": copies, "resume": "two"},
            "hidden": third | {"settings": divided, "resume": "four", "hidden": True},
        },
        2: {
            "apart": third | {"settings": plain, "resume": "four"},
            "divided": third | {"settings": divided, "resume": "four"},
        },
        1: {"alone": third | {"settings": plain, "resume": "four"}},
    }
    run_cases(4, tmp_path, {"saves": {"settings": divided, "save": "four", "updates": 2}})
    run_cases(2, tmp_path, {"saves": {"settings": plain, "save": "two", "updates": 2}})
    for ranks, cases in resumed.items():
        run_cases(ranks, tmp_path, cases)
        for name in cases:
            one.check(tmp_path, name, ranks)

    path = newest(tmp_path / "four" / "checkpoints")
    assert path is not None
    AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.integration
@pytest.mark.slow
def test_published_weights_are_the_bytes_of_one_rank(tmp_path: Path) -> None:
    """Before an update: with the hub's names, each expert by itself."""
    model = written(tmp_path)
    run_cases(
        4,
        tmp_path,
        {"new": {"settings": arguments(model, expert_size=2), "updates": 0}},
    )
    published = load_file(tmp_path / "new-0.safetensors")
    files = load_file(model / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in files
    assert published.keys() == files.keys()
    for name, tensor in files.items():
        assert torch.equal(published[name], tensor), name


@pytest.mark.integration
@pytest.mark.slow
def test_passes_in_bfloat16(tmp_path: Path) -> None:
    """Against FSDP2 alone: only sums over experts are rounded in another order."""
    model = written(tmp_path)
    forms: dict[str, dict[str, Any]] = {"plain": {}, "divided": {"expert_size": 2}}
    made = {
        name: {"settings": arguments(model, **settings), "updates": 1, "low": True}
        for name, settings in forms.items()
    }
    run_cases(2, tmp_path, made)
    plain, divided = (json.loads((tmp_path / f"{name}.json").read_text()) for name in forms)
    torch.testing.assert_close(torch.tensor(divided), torch.tensor(plain), atol=1e-4, rtol=1e-3)


@pytest.mark.integration
@pytest.mark.slow
def test_adapters_beside_divided_experts(tmp_path: Path) -> None:
    """The experts are frozen, the matrices of attention are trained."""
    model = written(tmp_path)
    run_cases(1, tmp_path, {"one": {"settings": [*arguments(model), *_LORA]}})
    divided = arguments(model, expert_size=2)
    run_cases(4, tmp_path, {"divided": {"settings": [*divided, *_LORA]}})
    one, found = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "divided")
    )
    torch.testing.assert_close(torch.tensor(found), torch.tensor(one), atol=1e-6, rtol=_NEAR)


_LORA = ["--lora.rank", "4", "--algorithm.reference_refresh", "0"]


@pytest.mark.integration
@pytest.mark.slow
def test_a_token_travels_once_to_every_rank_that_owns_one_of_its_experts(tmp_path: Path) -> None:
    """A prompt with long answers on four ranks, each of which has all rows: scores and gradients
    are those of one, and the numbers exchanged are those of the formula."""
    experts, ranks, chosen, hidden, layers = 8, 4, 3, 32, 2
    model = written(
        tmp_path,
        num_experts=experts,
        num_experts_per_tok=chosen,
        max_position_embeddings=8192,
    )
    settings = json.dumps({"parallel.expert_size": ranks})
    run_ranks(ranks, "long_row", str(tmp_path), str(model), settings)

    scorer = long_row.loaded(str(model), Ranks())
    routed: list[Tensor] = []
    for layer in scorer.model.get_decoder().layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: routed.append(given[1]))
    expected = long_row.scored(scorer, Ranks())

    found = load_file(tmp_path / "scored.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        of_all_ranks = tensor if name in ("logprobs", "entropy") else ranks * tensor
        scale = float(of_all_ranks.abs().max())
        assert float((found[name] - of_all_ranks).abs().max()) < _NEAR * scale, name

    # There and back, in both passes; the numbers of the experts once, their weights there and back.
    assert len(routed) == layers
    owners = torch.cat(routed) // (experts // ranks)
    visits = sum(len(set(row)) for row in owners.tolist())
    assert visits < owners.numel(), "some tokens have several experts on a rank"
    exchanged = Counter[str]()
    for rank in range(ranks):
        exchanged.update(json.loads((tmp_path / f"{rank}.json").read_text()))
    assert exchanged["exchanged"] == ranks * visits * (4 * hidden + 3 * chosen)


@pytest.mark.integration
@pytest.mark.slow
def test_models_without_divisible_experts_are_refused(policy_dir: Path, tmp_path: Path) -> None:
    dense = {"refused": {"settings": arguments(policy_dir, expert_size=2)}}
    with pytest.raises(RuntimeError, match=r"no layer that keeps all.*expert_size"):
        run_cases(2, tmp_path, dense)
    three = written(tmp_path, num_experts=3)
    odd = {"refused": {"settings": arguments(three, expert_size=2)}}
    with pytest.raises(RuntimeError, match=r"3 experts cannot be divided among 2 ranks"):
        run_cases(2, tmp_path, odd)


@pytest.mark.parametrize(("ranks", "shard", "size"), [(1, None, 2), (4, None, 3), (4, 2, 4)])
def test_ranks_that_cannot_be_divided_are_refused(ranks: int, shard: int | None, size: int) -> None:
    with raises(ConfigError, field="parallel.expert_size"):
        Ranks(world_size=ranks, shard_size=shard, expert_size=size)
