"""Which part of a model is sharded over which ranks and in which precision, by the rules written
anew, without a process group; which modules hold experts, and the sums of what they compute."""

import itertools
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from common.errors import ConfigError
from common.settings.sections import TrainerSection
from learning import experts, sharding
from learning.sharding import prepare, shard, sum_gradients_after
from tests.support.errors import raises
from tests.support.models.tiny_models import make

CASES = list(itertools.product([False, True], repeat=6))


class Mesh:
    """A mesh whose parts are named by their dimensions."""

    def __init__(self, *names: str) -> None:
        self.mesh_dim_names = names

    def __getitem__(self, names: Any) -> "Mesh":
        return Mesh(*([names] if isinstance(names, str) else names))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self.mesh_dim_names == other.mesh_dim_names

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("low_precision", "offload", "trained", "gathers_once", "has_experts", "on_gpu"), CASES
)
def test_every_part_of_a_model_is_sharded_by_its_kind(
    monkeypatch: pytest.MonkeyPatch,
    low_precision: bool,
    offload: bool,
    trained: bool,
    gathers_once: bool,
    has_experts: bool,
    on_gpu: bool,
) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(
        sharding, "fully_shard", lambda module, **options: calls.append((module, options))
    )
    model = make("Qwen3")
    of_experts = [nn.Linear(2, 2), nn.Linear(3, 3)]
    divided: list[Any] = []

    def divide(model: Any, mesh: Any) -> list[nn.Module]:
        divided.append((model, mesh))
        return list(of_experts)

    def mesh(*, of_experts: bool = False) -> Mesh:
        return Mesh("replicate", "shard", "expert") if of_experts else Mesh("shard")

    monkeypatch.setattr(sharding, "divide_experts", divide)
    device = SimpleNamespace(type="cuda" if on_gpu else "cpu")
    ranks: Any = SimpleNamespace(mesh=mesh, expert_size=1 + has_experts, device=device)
    head = nn.Linear(1, 1)
    root: Any = nn.Module()
    shard(
        root,
        model,
        ranks,
        low_precision=low_precision,
        offload=offload,
        trained=trained,
        gathers_once=gathers_once,
        exact=[head],
    )

    numbers: dict[str, Any] = {}
    if low_precision:
        numbers = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    as_given = MixedPrecisionPolicy(**numbers, cast_forward_inputs=False)
    place = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
    keeps = trained and gathers_once
    whole = Mesh("shard")
    owners = Mesh("replicate", "shard")
    found = {id(module): options for module, options in calls}
    assert len(found) == len(calls)

    def options(mesh: Mesh, precision: MixedPrecisionPolicy, **more: bool) -> dict[str, Any]:
        return {"mesh": mesh, "mp_policy": precision, "offload_policy": place, **more}

    for layer in sharding.layers(model):
        precision = MixedPrecisionPolicy(**numbers)
        assert found[id(layer)] == options(whole, precision, reshard_after_forward=not keeps)
    for module in of_experts:
        expected = options(owners, as_given, reshard_after_forward=not keeps)
        assert found.get(id(module)) == (expected if has_experts else None)
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    assert found[id(head)] == options(whole, plain)
    assert found[id(root)] == options(whole, as_given, reshard_after_forward=not trained)
    # Parts come before what they are in.
    assert calls[-1][0] is root
    assert [id(module) for module, _ in calls[: 2 * has_experts]] == [
        id(module) for module in of_experts[: 2 * has_experts]
    ]
    assert root.gathers_once == keeps
    assert divided == [(model, Mesh("expert"))] * has_experts


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("compiles", ["auto", True, False])
def test_layers_are_compiled_where_there_is_triton_unless_it_is_set(
    monkeypatch: pytest.MonkeyPatch, kind: str, compiles: Any
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(sharding, "has_triton", lambda device: device == "cuda")

    def record(forward: Any) -> Any:
        compiled.append(forward)
        return forward

    monkeypatch.setattr(sharding, "_compiled", record)
    model = make("Qwen3")
    prepare(model, TrainerSection(compile=compiles), True, torch.device(kind))
    expected = {"auto": kind == "cuda"}.get(compiles, compiles)
    assert len(compiled) == (len(sharding.layers(model)) if expected else 0)


def test_a_model_whose_layers_nobody_knows_needs_none_unless_something_is_set() -> None:
    """`auto` computes nothing again where the memory is not known, and so asks for no layers."""
    model: Any = nn.Module()
    model.base_model_prefix = "body"
    model.body = nn.Module()
    model._no_split_modules = None
    device = torch.device("cpu")
    for checkpointing, trained in (("auto", True), (False, True), (True, False)):
        settings = TrainerSection(activation_checkpointing=checkpointing, compile="auto")
        prepare(model, settings, trained, device)
    for settings in (TrainerSection(activation_checkpointing=True), TrainerSection(compile=True)):
        with raises(ConfigError, field="parallel.shard_size", value="Module"):
            prepare(model, settings, True, device)


@pytest.mark.parametrize(
    ("has_room", "gathers_once", "last"), list(itertools.product([False, True], repeat=3))
)
def test_which_pass_sums_gradients_and_frees_weights(
    monkeypatch: pytest.MonkeyPatch, has_room: bool, gathers_once: bool, last: bool
) -> None:
    told: list[tuple[str, bool]] = []
    asked: list[tuple[int, int]] = []

    class Sharded(nn.Module):  # type: ignore[misc]  # torch is not typed here
        def __init__(self) -> None:
            super().__init__()
            self.gathers_once = gathers_once
            self.adapter = nn.Linear(3, 5, bias=False)
            self.frozen = nn.Linear(7, 7).requires_grad_(False)

        def set_requires_gradient_sync(self, value: bool) -> None:
            told.append(("sum over all ranks", value))

        def set_requires_all_reduce(self, value: bool) -> None:
            told.append(("sum over the copies", value))

        def set_reshard_after_backward(self, value: bool) -> None:
            told.append(("free", value))

    def sums_once(trained: int, ranks: int) -> bool:
        asked.append((trained, ranks))
        return has_room

    monkeypatch.setattr(sharding, "FSDPModule", Sharded)
    monkeypatch.setattr(sharding, "sums_once", sums_once)
    ranks: Any = SimpleNamespace(world_size=6)
    sum_gradients_after(Sharded(), ranks, last)
    frees = [("free", last)] if gathers_once else []
    over = "sum over all ranks" if has_room else "sum over the copies"
    assert told == [(over, last), *frees]
    assert asked == [(15, 6)]


@pytest.mark.parametrize("is_an_argument", [True, False])
def test_many_graphs_are_allowed_as_torch_wants_to_be_told(
    monkeypatch: pytest.MonkeyPatch, is_an_argument: bool
) -> None:
    asked: list[Any] = []

    def compile_(forward: Any, **options: Any) -> str:
        asked.append((forward, options))
        return "compiled"

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(sharding, "_LIMIT_IS_AN_ARGUMENT", is_an_argument)
    config = SimpleNamespace(recompile_limit=8)
    monkeypatch.setattr(torch._dynamo, "config", config)
    assert sharding._compiled("a forward") == "compiled"
    options = {"dynamic": True, "recompile_limit": 64} if is_an_argument else {"dynamic": True}
    assert asked == [("a forward", options)]
    assert config.recompile_limit == (8 if is_an_argument else 64)


class Experts(nn.Module):  # type: ignore[misc]  # torch is not typed here
    def __init__(self, count: int | None, *rows: int) -> None:
        super().__init__()
        self.num_experts = count
        for number, size in enumerate(rows):
            self.register_parameter(f"w{number}", nn.Parameter(torch.zeros(size, 2)))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states


class OfGptOss(Experts):
    def forward(
        self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor
    ) -> Tensor:
        return hidden_states


class Other(Experts):
    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, top_k_weights: Tensor, top_k_index: Tensor
    ) -> Tensor:
        return hidden_states


def test_what_holds_experts_has_all_of_them_in_every_parameter() -> None:
    holding = [Experts(4, 4), Experts(4, 4, 4), OfGptOss(3, 3)]
    others = [Experts(4), Experts(None, 4), Experts(4, 4, 3), Experts(3, 4), Other(4, 4)]
    scalar = Experts(4, 4)
    scalar.register_parameter("scale", nn.Parameter(torch.ones(())))
    model = nn.ModuleList([others[0], holding[0], *others[1:], scalar, *holding[1:]])
    assert experts.expert_modules(model) == holding


def test_sums_are_made_in_float32_and_given_in_the_precision_of_the_results() -> None:
    """256 and 1 and 1 in bfloat16 would stay 256."""
    results = torch.tensor([[256.0], [1.0], [1.0], [3.0]]).bfloat16()
    found = experts._sums(results, torch.tensor([2, 2, 2, 0]), 4)
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [[3.0], [0.0], [258.0], [0.0]]


def test_own_weights_are_there_inside_and_the_shares_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Share:
        def to_local(self) -> str:
            return "own"

    monkeypatch.setattr(experts, "DTensor", Share)
    inner = SimpleNamespace(_parameters={"a": Share(), "b": "plain"})
    outer: Any = SimpleNamespace(_parameters={"c": Share()}, modules=lambda: [outer, inner])
    before = [dict(part._parameters) for part in (outer, inner)]
    with suppress(ZeroDivisionError), experts._own_weights(outer):
        inside = [dict(part._parameters) for part in (outer, inner)]
        raise ZeroDivisionError
    assert inside == [{"c": "own"}, {"a": "own", "b": "plain"}]
    assert [outer._parameters, inner._parameters] == before
