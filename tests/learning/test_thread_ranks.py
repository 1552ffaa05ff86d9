"""Sharded models and divided experts on several ranks, which are threads of this process: the
gradients and weights are those of one process.

`tests/trainer/policy` has whole updates in real processes.
"""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.errors import ConfigError
from common.settings.sections import TrainerSection
from learning import experts, sharding
from learning.ranks import Ranks
from learning.routing import RoutedRow, Routers
from learning.sharding import (
    full,
    layers,
    local,
    named_tensors,
    prepare,
    region,
    reshard,
    shard,
    sum_gradients_after,
)
from tests.support.errors import raises
from tests.support.models.tiny_models import make
from tests.support.processes.thread_ranks import run_in_threads

pytestmark = pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
IDS = torch.arange(3, 67).view(8, 8)
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": MOE,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


class Root(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """As a policy has a model inside it."""

    gathers_once: bool

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


class Critic(Root):
    """Its head computes in float32."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.head = nn.Linear(96, 1)

    def forward(self, ids: Tensor) -> Tensor:
        values: Tensor = self.head(super().forward(ids).float())
        return values


def loss(logits: Tensor) -> Tensor:
    return logits.float().logsumexp(-1).pow(2).sum()


def gradients(model: Any) -> dict[str, Tensor]:
    return {
        name: full(tensor.grad)
        for name, tensor in named_tensors(model).items()
        if tensor.grad is not None
    }


def sharded(whole: Any, ranks: Ranks, **settings: Any) -> Root:
    """Returns a copy of a model with this rank's share of its weights."""
    model = copy.deepcopy(whole)
    root: Root = Root(model).to("meta")
    options = {"low_precision": False, "offload": False, "trained": True, **settings}
    shard(root, model, ranks, **options)
    root.to_empty(device="cpu")
    values = named_tensors(whole)
    for name, tensor in named_tensors(model).items():
        local(tensor).copy_(values[name].detach()[region(tensor)])
    buffers = dict(whole.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return root


@pytest.fixture(scope="module")
def moe() -> Any:
    return make("qwen3_moe", **MOE)


def expected_of(whole: Any) -> dict[str, Tensor]:
    alone = copy.deepcopy(whole)
    loss(Root(alone)(IDS)).backward()
    return gradients(alone)


def check_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(found[name], tensor, atol=2e-6 * scale, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("kind", "count", "form"),
    [
        ("qwen3_moe", 2, {}),
        ("qwen3_moe", 4, {"expert_size": 2}),
        ("qwen3_moe", 4, {"expert_size": 2, "shard_size": 2}),
        ("gpt_oss", 2, {"expert_size": 2}),
    ],
)
def test_gradients_and_weights_are_those_of_one_process(
    kind: str, count: int, form: dict[str, Any]
) -> None:
    whole = make(kind, **FAMILIES[kind])

    def work(rank: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        ranks = Ranks(rank=rank, world_size=count, device_kind="cpu", **form)
        root = sharded(whole, ranks)
        logits = root(IDS.chunk(count)[rank])
        loss(logits).backward()
        weights = {
            name: full(tensor).detach() for name, tensor in named_tensors(root.model).items()
        }
        return logits.detach(), gradients(root.model), weights

    found = run_in_threads(count, work)
    with torch.no_grad():
        logits = Root(whole)(IDS)
    torch.testing.assert_close(torch.cat([each[0] for each in found]), logits, atol=1e-5, rtol=1e-4)
    expected = expected_of(whole)
    for _, of_rank, weights in found:
        check_close(of_rank, expected)
        for name, tensor in named_tensors(whole).items():
            assert torch.equal(weights[name], tensor), name


def test_a_rank_whose_experts_nobody_needs_goes_along(moe: Any) -> None:
    """The router sends all tokens to the first two of four experts."""
    whole = copy.deepcopy(moe)
    for layer in layers(whole):
        weight = layer.mlp.gate.weight
        with torch.no_grad():
            weight[2:] = weight[:2].mean(0) - 5 * weight[:2].sum(0).sign()

    def forced(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, index, weights = given
        return hidden, index % 2, weights

    def force(model: Any) -> None:
        for layer in layers(model):
            layer.mlp.experts.register_forward_pre_hook(forced)

    def work(rank: int) -> dict[str, Tensor]:
        root = sharded(whole, Ranks(rank=rank, world_size=2, device_kind="cpu", expert_size=2))
        force(root.model)
        loss(root(IDS.chunk(2)[rank])).backward()
        return gradients(root.model)

    alone = copy.deepcopy(whole)
    force(alone)
    loss(Root(alone)(IDS)).backward()
    expected = gradients(alone)
    for found in run_in_threads(2, work):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            scale = float(tensor.abs().max())
            assert float((found[name] - tensor).abs().max()) <= 1e-5 * scale + 1e-9, name


@pytest.mark.parametrize(
    ("gathers_once", "sums_once", "shard_size"),
    [(True, False, 2), (False, False, None), (True, True, None)],
)
def test_micro_batches_sum_to_one_and_the_next_update_sees_new_weights(
    moe: Any,
    monkeypatch: pytest.MonkeyPatch,
    gathers_once: bool,
    sums_once: bool,
    shard_size: int | None,
) -> None:
    """Gathered weights are freed after an update: others would be those of before it."""
    count = 2 * (shard_size or 1)
    numbers = sum(parameter.numel() for parameter in moe.parameters())

    def has_room(trained: int, ranks: int) -> bool:
        assert (trained, ranks) == (numbers, count)
        return sums_once

    monkeypatch.setattr(sharding, "sums_once", has_room)

    def work(rank: int) -> tuple[dict[str, Tensor], list[bool], Tensor]:
        ranks = Ranks(rank=rank, world_size=count, device_kind="cpu", shard_size=shard_size)
        root = sharded(moe, ranks, gathers_once=gathers_once)
        layer = layers(root.model)[0]
        freed = []
        for part in (0, 1):
            sum_gradients_after(root, ranks, last=part == 1)
            loss(root(IDS.chunk(2)[part].chunk(count)[rank])).backward()
            freed.append(isinstance(next(layer.parameters()), DTensor))
        found = gradients(root.model)
        with torch.no_grad():
            for tensor in root.parameters():
                local(tensor).mul_(0.5)
            logits = root(IDS[:1])
        reshard(root)
        assert all(isinstance(tensor, DTensor) for tensor in root.parameters())
        return found, freed, logits

    halved = copy.deepcopy(moe)
    with torch.no_grad():
        for tensor in halved.parameters():
            tensor.mul_(0.5)
        after = Root(halved)(IDS[:1])
    for found, freed, logits in run_in_threads(count, work):
        check_close(found, expected_of(moe))
        assert freed == [not gathers_once, True]
        torch.testing.assert_close(logits, after)


def test_a_model_that_is_not_trained_is_freed_after_every_pass(moe: Any) -> None:
    def work(rank: int) -> list[bool]:
        ranks = Ranks(rank=rank, world_size=2, device_kind="cpu")
        root = sharded(moe, ranks, trained=False, gathers_once=True)
        assert not root.gathers_once
        with torch.no_grad():
            root(IDS[:1])
        return [isinstance(tensor, DTensor) for tensor in root.parameters()]

    assert all(map(all, run_in_threads(2, work)))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_passes_in_bfloat16_sum_gradients_in_float32_and_some_modules_are_exact(moe: Any) -> None:
    critic = Critic(copy.deepcopy(moe))

    def work(rank: int) -> tuple[dict[str, Tensor], dict[str, set[Any]]]:
        ranks = Ranks(rank=rank, world_size=2, device_kind="cpu")
        model = copy.deepcopy(moe)
        root = Critic(model)
        root.load_state_dict(critic.state_dict())
        shard(
            root,
            model,
            ranks,
            low_precision=True,
            offload=False,
            trained=True,
            exact=[root.head],
        )
        seen: dict[str, set[Any]] = {"layer": set(), "exact": set()}
        layer = layers(model)[0]
        inner = {"layer": layer.self_attn.q_proj, "exact": root.head}
        for name, module in inner.items():
            module.register_forward_hook(
                lambda module, given, _, name=name: seen[name].update(
                    [module.weight.dtype, given[0].dtype]
                )
            )
        loss(root(IDS.chunk(2)[rank])).backward()
        return gradients(root), seen

    loss(critic(IDS)).backward()
    expected = gradients(critic)
    for found, seen in run_in_threads(2, work):
        assert seen["layer"] == {torch.bfloat16}
        assert seen["exact"] == {torch.float32}
        for name, tensor in expected.items():
            assert found[name].dtype == torch.float32
            cosine = torch.cosine_similarity(found[name].flatten(), tensor.flatten(), dim=0)
            assert cosine > 0.9, name
        # Sums of two ranks' bfloat16 numbers mostly have more digits.
        summed = found["model.lm_head.weight"]
        assert not torch.equal(summed.bfloat16().float(), summed)


@pytest.mark.parametrize(("sizes", "count"), [({"num_experts": 3}, 2), ({"num_experts": 6}, 4)])
def test_experts_that_cannot_be_divided_are_refused(sizes: dict[str, int], count: int) -> None:
    model = make("qwen3_moe", **MOE | sizes)
    with raises(ConfigError, field="parallel.expert_size", value=str(count)):
        experts.divide_experts(model, SimpleNamespace(size=lambda: count))


def test_a_model_without_experts_is_refused() -> None:
    with raises(ConfigError, field="parallel.expert_size", value="2"):
        experts.divide_experts(make("Qwen3"), SimpleNamespace(size=lambda: 2))


def test_a_tensor_that_is_not_sharded_is_whole() -> None:
    tensor = torch.ones(2, 3)
    assert full(tensor) is tensor
    assert torch.equal(local(tensor), tensor)
    assert tensor[region(tensor)].shape == tensor.shape
    sum_gradients_after(nn.Linear(2, 2), Ranks(), last=True)
    tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight
    assert list(named_tensors(tied)) == ["a.weight", "a.bias", "b.bias"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def record(forward: Any) -> Any:
        found.append(forward)
        return forward

    monkeypatch.setattr(sharding, "_compiled", record)
    return found


def runs_of_an_mlp(model: Any) -> tuple[int, dict[str, Tensor]]:
    """Returns how often a layer's MLP is computed in an update, and the gradients."""
    runs: list[int] = []
    hook = layers(model)[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    loss(Root(model)(IDS)).backward()
    hook.remove()
    return len(runs), gradients(model)


@pytest.mark.parametrize(
    ("checkpointing", "trained", "runs"),
    [
        (False, True, 1),
        ("auto", True, 1),
        (True, True, 2),
        ("selective", True, 2),
        (True, False, 1),
    ],
)
@pytest.mark.parametrize("compiles", [False, True])
def test_layers_are_computed_again_and_compiled_as_set(
    compiled: list[Any], checkpointing: Any, trained: bool, runs: int, compiles: bool
) -> None:
    model = make("Qwen3")
    _, expected = runs_of_an_mlp(copy.deepcopy(model))
    names = set(dict(model.named_modules()))
    settings = TrainerSection(activation_checkpointing=checkpointing, compile=compiles)
    prepare(model, settings, trained, torch.device("cpu"))
    assert set(dict(model.named_modules())) == names
    found, of_pass = runs_of_an_mlp(model)
    assert found == runs
    check_close(of_pass, expected)
    assert len(compiled) == (len(layers(model)) if compiles else 0)


def test_a_layer_with_calls_over_rows_is_compiled_around_them(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("Qwen3")
    first, *_ = layers(model)
    monkeypatch.setattr(sharding, "is_by_rows", lambda module: module is first.self_attn)
    around = [part.forward for part in first.children() if part is not first.self_attn]
    expected = [*around, *(layer.forward for layer in layers(model)[1:])]
    prepare(model, TrainerSection(compile=True), True, torch.device("cpu"))
    assert compiled == expected

    compiled.clear()
    settings = TrainerSection(compile=True, activation_checkpointing="selective")
    prepare(make("Qwen3"), settings, True, torch.device("cpu"))
    assert len(compiled) == 2
    compiled.clear()
    other = make("Qwen3")
    attention = layers(other)[0].self_attn
    monkeypatch.setattr(sharding, "is_by_rows", lambda module: module is attention)
    prepare(other, settings, True, torch.device("cpu"))
    assert len(compiled) == 1


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("divides", [False, True])
def test_experts_are_compiled_by_themselves_where_they_are_divided(
    compiled: list[Any], moe: Any, checkpointing: Any, compiles: bool, divides: bool
) -> None:
    """But not inside a selective checkpoint, which sees operators and no graphs."""
    model = copy.deepcopy(moe)
    own = [module.forward for module in experts.expert_modules(model)]
    settings = TrainerSection(activation_checkpointing=checkpointing, compile=compiles)
    prepare(model, settings, True, torch.device("cpu"), divides_experts=divides)
    by_themselves = [forward for forward in own if forward in compiled]
    expected = compiles and divides and checkpointing != "selective"
    assert by_themselves == (own if expected else [])
    assert len(compiled) == len(by_themselves) + (len(layers(model)) if compiles else 0)


def test_the_decoder_layers_of_models_without_a_stack() -> None:
    class Block(nn.Module):  # type: ignore[misc]
        pass

    class Other(nn.Module):  # type: ignore[misc]
        base_model_prefix = "body"

        def __init__(self) -> None:
            super().__init__()
            self._no_split_modules: list[str] | None = ["Block"]
            self.body = nn.Sequential(Block(), nn.Linear(1, 1), Block())

    model = Other()
    assert layers(model) == [model.body[0], model.body[2]]

    class Multimodal(Other):
        def get_decoder(self) -> Any:
            return self.text

    both = Multimodal()
    both.text = nn.Module()
    both.text.layers = nn.ModuleList([Block(), Block(), Block()])
    assert layers(both) == list(both.text.layers)
    model._no_split_modules = None
    with pytest.raises(ConfigError) as refused:
        layers(model)
    assert (refused.value.field, refused.value.value) == ("parallel.shard_size", "Other")


@pytest.mark.parametrize("count", [5, 200, 256, 300])
def test_the_experts_of_a_row_have_one_byte_or_two(count: int) -> None:
    """Two bytes where an expert has a number above 255. An expert beyond the last is refused."""
    routers = Routers(make("Qwen3-MoE", num_experts=count, num_experts_per_tok=3))
    draws = np.random.default_rng(count)
    kind = np.uint8 if count <= 256 else np.uint16

    def drawn(tokens: int) -> Any:
        chosen = [
            draws.choice(count, size=3, replace=False) for _ in range(tokens * routers.layers)
        ]
        return np.array(chosen).reshape(tokens, routers.width)

    prompt, completion = drawn(4), drawn(2)
    prompt[0, 0] = count - 1 if count - 1 not in prompt[0, :3] else prompt[0, 0]

    def read(of_prompt: Any) -> Any:
        row = RoutedRow(
            prompt=of_prompt.astype(kind).reshape(-1).view(np.uint8),
            completion=completion.astype(kind).reshape(-1).view(np.uint8),
        )
        return routers.read(row, np.arange(4, dtype=np.int32), np.arange(3, dtype=np.int32))

    found = read(prompt)
    assert np.array_equal(found.prompt, prompt)
    assert np.array_equal(found.completion, completion)
    assert found.prompt.dtype == np.int16
    if count != 256:
        beyond = prompt.copy()
        beyond[-1, -1] = count
        with pytest.raises(ConfigError) as refused:
            read(beyond)
        assert (refused.value.field, refused.value.value) == ("trainer.routing_replay", "True")
    for wrong in (prompt[:3], prompt[:, 1:], np.concatenate([prompt, prompt[:1]])):
        with pytest.raises(ConfigError):
            read(wrong)
