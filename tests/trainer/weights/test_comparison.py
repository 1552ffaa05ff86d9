"""Checksums of engines against the tensors that were sent, as SGLang arranges them on one or
several GPUs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from learning.sharding import named_tensors
from learning.weight_group import digest
from tests.support.models.tiny_models import GEMMA, make
from trainer.weights.comparison import Checksums
from trainer.weights.layouts import Sharding
from trainer.weights.tensor_hash import gpu_digest

DIGESTS: dict[bool, Callable[[Tensor], str]] = {False: digest, True: gpu_digest}
Tensors = dict[str, Tensor]


def sent(kind: str) -> Tensors:
    """The tensors published for a model whose vocabulary is no multiple of 64, in the precision of
    GPUs."""
    model = make(kind, vocab_size=90)
    tensors = revert_weight_conversion(model, named_tensors(model))
    return {name: tensor.detach().bfloat16() for name, tensor in tensors.items()}


def engine(tensors: Tensors, rank: int = 0, size: int = 1) -> Tensors:
    """The parameters of one rank of SGLang, derived from SGLang's model files, not from the code
    under test."""
    found: Tensors = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        before, _, module = name.removesuffix(".weight").rpartition(".")
        if ".experts." in name:
            block, _, expert = before.partition(".experts.")
            experts.setdefault(f"{block}.experts", {})[int(expert), module] = tensor
        elif module == "q_proj" and not name.endswith("bias"):
            k, v = (tensors[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))
            heads = 2  # heads of keys and values, with 8 rows each
            own = rank * heads // size
            kv = [
                part.view(heads, 8, -1)[own : own + max(1, heads // size)].flatten(0, 1)
                for part in (k, v)
            ]
            found[f"{before}.qkv_proj.weight"] = torch.cat([tensor.chunk(size)[rank], *kv])
        elif module == "gate_proj":
            up = tensors[name.replace("gate_proj", "up_proj")]
            found[f"{before}.gate_up_proj.weight"] = torch.cat(
                [tensor.chunk(size)[rank], up.chunk(size)[rank]]
            )
        elif module in ("o_proj", "down_proj"):
            found[name] = tensor.chunk(size, 1)[rank]
        elif module in ("embed_tokens", "lm_head", "position_embedding"):
            found[name] = torch.cat(
                [tensor, tensor.new_zeros(-len(tensor) % 64, tensor.shape[1])]
            ).chunk(size)[rank]
        elif module == "out_proj":
            found[name.replace("out_proj", "proj")] = tensor.chunk(size, 1)[rank]
        elif module not in ("k_proj", "v_proj", "up_proj"):
            found[name] = tensor
    for block, parts in experts.items():
        gate, down, up = (
            ("gate_proj", "down_proj", "up_proj")
            if (0, "gate_proj") in parts
            else ("w1", "w2", "w3")
        )
        both = [
            torch.cat([parts[i, name].chunk(size)[rank] for name in (gate, up)]) for i in range(3)
        ]
        found[f"{block}.w13_weight"] = torch.stack(both)
        found[f"{block}.w2_weight"] = torch.stack(
            [parts[i, down].chunk(size, 1)[rank] for i in range(3)]
        )
    return found


def sums_of(parameters: Tensors, on_gpu: bool) -> dict[str, str]:
    return {name: DIGESTS[on_gpu](tensor) for name, tensor in parameters.items()}


@pytest.mark.parametrize("kind", ["Qwen3", "Llama 3", "Mistral", "Qwen3-MoE", "Mixtral", GEMMA])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_every_tensor_that_was_sent_is_compared_on_every_gpu(
    kind: str, size: int, on_gpu: bool
) -> None:
    """With four GPUs, two of them share a head of keys."""
    tensors, checksums = sent(kind), Checksums(on_gpu)
    ranks = [sums_of(engine(tensors, rank, size), on_gpu) for rank in range(size)]
    found = checksums.compare(tensors, ranks)
    assert (found.problem, found.unseen, found.unknown) == (None, [], [])
    assert str(found) == f"{len(tensors)} of {len(tensors)} tensors with the trainer's"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_one_changed_number_anywhere_is_found(on_gpu: bool) -> None:
    tensors, checksums = sent("Qwen3-MoE"), Checksums(on_gpu)
    parameters = engine(tensors, 1, 2)
    checksums.compare(
        tensors, [sums_of(engine(tensors, 0, 2), on_gpu), sums_of(parameters, on_gpu)]
    )
    for name, tensor in parameters.items():
        changed = tensor.clone()
        changed.view(-1)[-1 if "embed" not in name and "lm_head" not in name else 0] += 1
        spoiled = sums_of(parameters | {name: changed}, on_gpu)
        found = checksums.compare(tensors, [sums_of(engine(tensors, 0, 2), on_gpu), spoiled])
        assert found.wrong == [name]
        assert (found.unseen, found.compared) == ([], len(tensors)), "it has them, but wrong ones"
        assert found.problem is not None
        assert name in found.problem


def test_an_engine_that_kept_its_old_experts_is_found() -> None:
    """SGLang silently skips names it does not know."""
    old, new = sent("Qwen3-MoE"), {name: tensor + 1 for name, tensor in sent("Qwen3-MoE").items()}
    kept = {name: tensor for name, tensor in engine(old).items() if ".experts." in name}
    found = Checksums(on_gpu=True).compare(new, [sums_of(engine(new) | kept, True)])
    assert found.wrong == list(kept)


def test_an_engine_may_have_experts_up_first_or_transposed() -> None:
    tensors = sent("Mixtral")
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda w: torch.cat(w.chunk(2, 1)[::-1], 1),
        lambda w: w.transpose(1, 2),
    ]
    for change in changes:
        found = {
            name: change(w) if name.endswith("w13_weight") else w
            for name, w in engine(tensors).items()
        }
        assert Checksums(on_gpu=True).compare(tensors, [sums_of(found, True)]).problem is None


def test_a_tensor_that_no_parameter_has_did_not_arrive() -> None:
    tensors = sent("Llama 3") | {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 2)}
    parameters = engine(sent("Llama 3"))
    assert "1 tensors did not reach the engine: model.layers.0.mlp.experts.gate_up_proj" in str(
        Checksums(on_gpu=True).compare(tensors, [sums_of(parameters, True)]).problem
    )
    renamed = parameters | {"model.layers.0.mlp.something": torch.ones(2, 2)}
    found = Checksums(on_gpu=True).compare(tensors, [sums_of(renamed, True)])
    assert found.problem is None
    count = len(sent("Llama 3"))
    assert str(found) == (
        f"{count} of {count + 1} tensors with the trainer's; the engine has "
        "model.layers.0.mlp.experts.gate_up_proj and 0 more by other names"
    )
    assert "no parameter" in str(Checksums(on_gpu=True).compare(tensors, [{"other": "0"}]).problem)


def test_an_engine_may_compute_in_another_precision_than_the_trainer_sends() -> None:
    tensors = sent("Qwen3")
    lower = {name: tensor.bfloat16() for name, tensor in engine(tensors).items()}
    higher = {name: tensor.float() for name, tensor in tensors.items()}
    assert Checksums(on_gpu=True).compare(higher, [sums_of(lower, True)]).problem is None


def test_checksums_of_another_version_are_computed_again() -> None:
    tensors, checksums = sent("Qwen3"), Checksums(on_gpu=False)
    assert checksums.compare(tensors, [sums_of(engine(tensors), False)]).problem is None
    newer = {name: tensor * 2 for name, tensor in tensors.items()}
    checksums.prepare(newer)
    assert checksums.compare(newer, [sums_of(engine(newer), False)]).problem is None
    assert checksums.compare(newer, [sums_of(engine(tensors), False)]).problem is not None


def test_layouts_that_interleave_tensors_are_compared_version_after_version() -> None:
    """Transposed experts, of which one number comes from gate and the next from up, and rows of an
    odd number of halves."""
    checksums = Checksums(on_gpu=True)
    for version in range(3):
        tensors = {name: tensor + version for name, tensor in sent("Mixtral").items()}
        odd = {
            f"model.layers.0.self_attn.{name}_proj.bias": torch.full((3,), version).bfloat16()
            for name in "qkv"
        }
        fused = {"model.layers.0.self_attn.qkv_proj.bias": torch.cat(list(odd.values()))}
        turned = {
            name: w.transpose(1, 2) if name.endswith("w13_weight") else w
            for name, w in engine(tensors).items()
        }
        checksums.prepare(tensors | odd)
        found = checksums.compare(tensors | odd, [sums_of(turned | fused, True)])
        assert (found.problem, found.unknown) == (None, [])


def mixture() -> Tensors:
    """Returns a layer of attention and four experts."""
    torch.manual_seed(0)
    shapes = {f"m.self_attn.{part}_proj.weight": (8, 6) for part in "qkv"}
    shapes["m.self_attn.o_proj.weight"] = (6, 8)
    shapes["m.mlp.gate.weight"] = (4, 6)
    for expert in range(4):
        shapes |= {f"m.mlp.experts.{expert}.{part}_proj.weight": (4, 6) for part in ("gate", "up")}
        shapes[f"m.mlp.experts.{expert}.down_proj.weight"] = (6, 4)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def rank_of_mixture(sent: Tensors, rank: int, experts: int, attention: int) -> Tensors:
    """Returns what one of four ranks holds of `mixture`, by the sizes of SGLang's groups: ranks
    within a group of experts cut each of them, as ranks within a group of attention cut that.
    """
    cut = 4 // experts
    own = range((rank // cut) * (4 // experts), (rank // cut + 1) * (4 // experts))
    shares = 4 // attention
    part = rank % shares
    stacks = []
    for expert in own:
        gate, up = (sent[f"m.mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up"))
        stacks.append(torch.cat([gate.chunk(cut)[rank % cut], up.chunk(cut)[rank % cut]]))
    downs = [
        sent[f"m.mlp.experts.{expert}.down_proj.weight"].chunk(cut, 1)[rank % cut] for expert in own
    ]
    stacked = [sent[f"m.self_attn.{name}_proj.weight"].chunk(shares)[part] for name in "qkv"]
    return {
        "m.self_attn.qkv_proj.weight": torch.cat(stacked),
        "m.self_attn.o_proj.weight": sent["m.self_attn.o_proj.weight"].chunk(shares, 1)[part],
        "m.mlp.gate.weight": sent["m.mlp.gate.weight"],
        "m.mlp.experts.w13_weight": torch.stack(stacks),
        "m.mlp.experts.w2_weight": torch.stack(downs),
    }


@pytest.mark.parametrize(("experts", "attention"), [(1, 2), (2, 1), (2, 2), (4, 4)])
def test_shares_of_experts_and_of_attention_are_those_of_the_engines_groups(
    experts: int, attention: int
) -> None:
    sent = mixture()
    ranks = [
        sums_of(rank_of_mixture(sent, rank, experts, attention), on_gpu=False) for rank in range(4)
    ]
    checksums = Checksums(False, Sharding(experts, attention))
    found = checksums.compare(sent, ranks)
    assert (found.problem, found.unseen, found.compared) == (None, [], len(sent))
    assert Checksums(False).compare(sent, ranks).wrong  # for an engine of tensor parallelism alone
    if experts > 1:
        exchanged = [ranks[3], *ranks[1:3], ranks[0]]
        assert "m.mlp.experts.w13_weight" in checksums.compare(sent, exchanged).wrong


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12])
def test_ranks_share_heads_evenly_or_several_have_the_same(size: int) -> None:
    """24 heads of queries, and of keys any number that divides it."""
    rows = 2
    for heads in (1, 2, 3, 4, 6, 8, 12, 24):
        if heads % size and size % heads:
            continue
        torch.manual_seed(heads)
        names = {part: f"m.self_attn.{part}_proj.weight" for part in "qkv"}
        sent = {names["q"]: torch.randn(24 * rows, 5)}
        sent |= {names[part]: torch.randn(heads * rows, 5) for part in "kv"}
        ranks = []
        for rank in range(size):
            first = rank * heads // size * rows
            own = slice(first, first + max(1, heads // size) * rows)
            held = [sent[names["q"]].chunk(size)[rank], *(sent[names[part]][own] for part in "kv")]
            ranks.append(sums_of({"m.self_attn.qkv_proj.weight": torch.cat(held)}, False))
        found = Checksums(False).compare(sent, ranks)
        assert (found.wrong, found.unseen) == ([], []), heads
        if size > 1:
            assert Checksums(False).compare(sent, ranks[::-1]).wrong


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_vocabulary_has_a_multiple_of_64_rows_that_all_ranks_share(name: str) -> None:
    for seed in range(30):
        torch.manual_seed(seed)
        size = 1 + seed % 8
        rows = int(torch.randint(1, 900, ()))
        sent = {name: torch.randn(rows, 2)}
        padded = -(-rows // 64) * 64
        if padded % size:
            padded = -(-rows // (64 * size)) * 64 * size
        whole = torch.zeros(padded, 2)
        whole[:rows] = sent[name]
        ranks = [sums_of({name: part}, False) for part in whole.chunk(size)]
        assert Checksums(False).compare(sent, ranks).wrong == [], (rows, size)
        spoiled = whole.clone()
        spoiled[-1, -1] += 1  # in the padding, or the last number
        other = [sums_of({name: part}, False) for part in spoiled.chunk(size)]
        assert Checksums(False).compare(sent, other).wrong == [name]


def test_only_numbers_with_a_fraction_change_their_precision() -> None:
    floats = (torch.float32, torch.bfloat16, torch.float16)
    for sent_dtype in (*floats, torch.int32, torch.uint8):
        sent = {"a": torch.arange(6).reshape(2, 3).to(sent_dtype)}
        for dtype in (*floats, torch.float64):
            held = sums_of({"a": sent["a"].to(dtype)}, False)
            is_right = sent_dtype in floats and dtype in floats
            assert (Checksums(False).compare(sent, [held]).wrong == []) == is_right
