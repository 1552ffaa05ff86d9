"""Ranks that compute every row together make the update of one rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.errors import ConfigError
from common.settings.config import load
from learning.ranks import Ranks
from tests.support.batches.groups import VOCABULARY
from tests.support.batches.sharding import One, arguments, run_cases
from tests.support.errors import raises
from tests.support.models.tiny_models import MLA, write
from tests.support.processes.ranks import run_ranks
from tests.support.workers import long_row
from tests.support.workers.sharded_policies import learned
from trainer.policy.policy import Policy

_NEAR = 1e-6
_SETTINGS = {
    "optimizer.warmup_steps": "0",
    "trainer.micro_batch_size": "3",
    "algorithm.kl_coef": "0.1",
}


def words(model: Path, settings: dict[str, Any]) -> list[str]:
    every = _SETTINGS | {"model.name": str(model)} | settings
    return [word for name, value in every.items() for word in (f"--{name}", str(value))]


def check_cases(
    count: int, model: Path, directory: Path, cases: dict[str, dict[str, Any]], **common: Any
) -> None:
    """Compares losses and gradient norms of two updates on `count` ranks with those of one."""
    policy = Policy(load(words(model, common), {}), Ranks())
    expected = torch.tensor(learned(policy, 2))
    run_cases(
        count,
        directory,
        {
            name: {"settings": words(model, common | settings), "updates": 2}
            for name, settings in cases.items()
        },
    )
    for name in cases:
        found = torch.tensor(json.loads((directory / f"{name}.json").read_text()))
        torch.testing.assert_close(found, expected, atol=_NEAR, rtol=5 * _NEAR, msg=name)


@pytest.mark.integration
def test_two_ranks_with_half_of_every_row(policy_dir: Path, tmp_path: Path) -> None:
    """Three updates with a reference and weight decay, sharded and not."""
    one = One(policy_dir, tmp_path)
    together = arguments(policy_dir, context_size=2)
    cases: dict[str, dict[str, Any]] = {
        "sharded": {"settings": together},
        "replicated": {"settings": [*together, "--parallel.shard_size", "1"]},
        "recomputed": {"settings": [*together, "--trainer.activation_checkpointing", "true"]},
        "saves": {"settings": together, "save": "two", "updates": 2},
        "resumes_apart": {"settings": arguments(policy_dir), "resume": "two", "updates": 1},
        "resumes": {"settings": together, "resume": "one", "updates": 1},
    }
    run_cases(2, tmp_path, cases)
    for name, case in cases.items():
        if "save" not in case:
            one.check(tmp_path, name, 2)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Qwen3-MoE", {}),
        ("Llama 3", {}),
        ("Gemma 3 text", {}),
        ("Mistral", {}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("deepseek_v3", MLA),
    ],
)
def test_families_on_four_ranks(tmp_path: Path, kind: str, more: dict[str, Any]) -> None:
    """Two key and value heads on four ranks, windows of attention, experts, sinks, values of
    another size."""
    model = write(kind, tmp_path / "model", vocab_size=VOCABULARY, **more)
    check_cases(
        4,
        model,
        tmp_path,
        {
            "four": {"parallel.context_size": 4},
            "two_and_two": {"parallel.context_size": 2},
            "two_copies": {"parallel.context_size": 2, "parallel.shard_size": 2},
        },
    )


@pytest.mark.integration
@pytest.mark.slow
def test_ranks_replay_the_experts_of_their_part_of_a_row(tmp_path: Path) -> None:
    """Also with layers that are computed again, with rows that each rank has alone, and with experts
    that the ranks have divided."""
    model = write("Qwen3-MoE", tmp_path / "model", vocab_size=VOCABULARY, num_experts=8)
    check_cases(
        2,
        model,
        tmp_path,
        {
            "together": {"parallel.context_size": 2},
            "recomputed": {
                "parallel.context_size": 2,
                "trainer.activation_checkpointing": "true",
            },
            "apart": {},
            "divided": {"parallel.expert_size": 2},
        },
        **{"trainer.routing_replay": "true", "rollout.engine": "embedded"},
    )
    # The experts make a difference at all.
    chosen = Policy(load(words(model, {}), {}), Ranks())
    replayed = Policy(
        load(words(model, {"trainer.routing_replay": "true", "rollout.engine": "embedded"}), {}),
        Ranks(),
    )
    losses = [torch.tensor(learned(policy, 1)) for policy in (chosen, replayed)]
    assert float((losses[0] - losses[1]).abs().max()) > 1e-3


@pytest.mark.integration
def test_a_row_of_4096_tokens_on_four_ranks(tmp_path: Path) -> None:
    """Each computes a quarter; what they exchange is q, k, v and the result, there and back."""
    model = write("Qwen3", tmp_path / "model", vocab_size=VOCABULARY, max_position_embeddings=8192)
    settings = {"parallel.shard_size": 1, "parallel.context_size": 4}
    run_ranks(4, "long_row", str(tmp_path), str(model), json.dumps(settings))
    found = load_file(tmp_path / "scored.safetensors")
    expected = long_row.scored(long_row.loaded(str(model), Ranks()), Ranks())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        assert float((found[name] - tensor).abs().max()) < 5e-6 * scale, name

    tokens = long_row.PROMPT + sum(answer - 1 for answer in long_row.ANSWERS)
    part = -(-tokens // 4)
    # Four heads each: the two of keys and values are repeated, because four ranks need them.
    numbers = 4 * 4 * 8 * part
    layers = 2
    for rank in range(4):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert report["widths"] == [part]
        assert report["exchanged"] == 2 * layers * numbers


@pytest.mark.integration
def test_heads_that_cannot_be_divided_are_refused(policy_dir: Path, tmp_path: Path) -> None:
    """The built-in model has two heads."""
    settings = words(policy_dir, {"parallel.context_size": 4})
    with pytest.raises(RuntimeError, match=r"2 attention heads.*parallel\.context_size"):
        run_cases(4, tmp_path, {"refused": {"settings": settings}})


@pytest.mark.integration
def test_models_that_are_not_packed_are_refused(policy_dir: Path, tmp_path: Path) -> None:
    padded = {"parallel.context_size": 2, "trainer.packing": "off"}
    with pytest.raises(RuntimeError, match=r"it is off.*parallel\.context_size"):
        run_cases(2, tmp_path, {"refused": {"settings": words(policy_dir, padded)}})


@pytest.mark.parametrize(("ranks", "size"), [(1, 2), (4, 3)])
def test_ranks_that_cannot_be_divided_are_refused(ranks: int, size: int) -> None:
    with raises(ConfigError, field="parallel.context_size"):
        Ranks(world_size=ranks, context_size=size)
