"""What divided experts compute, and what they send to whom, against products in float64: random
numbers of ranks, experts and tokens. The ranks are threads of this process."""

import copy
import inspect
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import silu
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from learning import experts
from learning.sharding import _compiled, full, local, region
from tests.support.processes.thread_ranks import run_in_threads

pytestmark = pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
_HIDDEN = 8
_INNER = 8


class Layer(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Experts with random weights."""

    def __init__(self, count: int, implementation: str) -> None:
        super().__init__()
        config = Qwen3MoeConfig(
            num_experts=count, hidden_size=_HIDDEN, moe_intermediate_size=_INNER
        )
        config._experts_implementation = implementation
        self.experts = Qwen3MoeExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter)

    def divided(self, ranks: int, *, compiles: bool = False) -> tuple[Any, Any]:
        """Returns a copy with this rank's experts, and the object that computes with them."""
        copied = copy.deepcopy(self).to("meta")
        if compiles:
            copied.experts.forward = _compiled(copied.experts.forward)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("expert",))
        (module,) = experts.divide_experts(copied, mesh)
        for name, parameter in module.named_parameters():
            whole = self.experts.get_parameter(name).detach()
            share = nn.Parameter(torch.empty_like(parameter, device="cpu"))
            local(share).copy_(whole[region(share)])
            setattr(module, name, share)
        return module, inspect.unwrap(module.forward).__self__


class Case:
    """What the ranks of a group get, and what comes of it."""

    def __init__(self, seed: int) -> None:
        draws = random.Random(seed)
        self.seed = seed
        self.ranks = draws.randint(2, 4)
        self.count = self.ranks * draws.randint(1, 3)
        self.top_k = draws.randint(1, min(4, self.count))
        self.tokens = [draws.choice([0, 1, 2, 5, 9]) for _ in range(self.ranks)]
        # In some cases all tokens go to few experts, so that some ranks get none.
        self.used = draws.choice([self.count, self.top_k])
        torch.manual_seed(seed)
        self.layer = Layer(self.count, draws.choice(["eager", "grouped_mm", "batched_mm"]))

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns a rank's tokens, their experts and weights, and the gradient of the results."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        count = self.tokens[rank]
        states = torch.randn(count, _HIDDEN, generator=generator)
        chosen = torch.rand(count, self.used, generator=generator).argsort(1)[:, : self.top_k]
        weights = torch.rand(count, self.top_k, generator=generator)
        gradient = torch.randn(count, _HIDDEN, generator=generator)
        return states, chosen, weights, gradient


def by_hand(
    weights_of: dict[str, Tensor], states: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Returns the sums of every token's experts, one after the other."""
    results = []
    for token, state in enumerate(states):
        total = torch.zeros_like(state)
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            gate, up = (weights_of["gate_up_proj"][expert] @ state).chunk(2)
            total = total + weight * (weights_of["down_proj"][expert] @ (silu(gate) * up))
        results.append(total)
    return torch.stack(results) if results else 0 * states


def check_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_results_gradients_and_what_travels_are_as_by_hand(
    seed: int,
) -> None:
    case = Case(seed)

    def work(rank: int) -> Any:
        module, divided = case.layer.divided(case.ranks)
        states, chosen, weights, gradient = case.inputs(rank)
        states.requires_grad_()
        weights.requires_grad_()

        with torch.no_grad():
            scored = module(states, chosen, weights)
        travelled: list[list[int]] = []
        swapped = divided._exchange

        def noting(rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
            assert len(rows) == sum(sent)
            travelled.append(list(sent))
            result: Tensor = swapped(rows, received, sent)
            assert len(result) == sum(received)
            return result

        divided._exchange = noting
        result = module(states, chosen, weights)
        result.backward(gradient)
        of_weights = {name: full(each.grad) for name, each in module.named_parameters()}
        return scored, result.detach(), states.grad, weights.grad, of_weights, travelled

    found = run_in_threads(case.ranks, work)

    exact = {
        name: each.detach().double().requires_grad_()
        for name, each in case.layer.experts.named_parameters()
    }
    own = case.count // case.ranks
    needed = []
    for rank, (scored, result, of_states, of_router, _, _) in enumerate(found):
        states, chosen, weights, gradient = case.inputs(rank)
        states = states.double().requires_grad_()
        weights = weights.double().requires_grad_()
        expected = by_hand(exact, states, chosen, weights)
        expected.backward(gradient.double())
        check_near(result, expected.detach())
        assert torch.equal(scored, result)
        if len(states):
            check_near(of_states, states.grad)
            check_near(of_router, weights.grad)
        owners = [{int(expert) // own for expert in experts_} for experts_ in chosen]
        needed.append([sum(other in ranks for ranks in owners) for other in range(case.ranks)])
    for rank, (*_, of_weights, travelled) in enumerate(found):
        for name, tensor in exact.items():
            wanted = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            check_near(of_weights[name], wanted)
        # States, numbers and weights of every token go once to each rank that has one of its
        # experts; sums come back.
        back = [row[rank] for row in needed]
        assert travelled == [needed[rank]] * 3 + [back]


# dynamo triggers this warning.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("seed", [0, 3, 5])
@pytest.mark.integration
def test_experts_between_the_exchanges_are_one_graph(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled, they compute the same, although what disables the compiler is around them."""
    # Only the graphs of dynamo and autograd matter here, so the slow C++ compiler is left out.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    case = Case(seed)
    case.layer.experts.config._experts_implementation = "grouped_mm"

    def work(rank: int) -> list[list[Tensor]]:
        found = []
        for compiles in (False, True):
            module, _ = case.layer.divided(case.ranks, compiles=compiles)
            states, chosen, weights, gradient = case.inputs(rank)
            states.requires_grad_()
            weights.requires_grad_()
            with torch.no_grad():
                scored = module(states, chosen, weights)
            result = module(states, chosen, weights)
            result.backward(gradient)
            of_weights = [full(each.grad) for each in module.parameters()]
            found.append([scored, result.detach(), states.grad, weights.grad, *of_weights])
        return found

    for plain, compiled in run_in_threads(case.ranks, work):
        torch.testing.assert_close(compiled, plain)
    # With and without gradients, of one pair and of more.
    assert 0 < counters["stats"]["unique_graphs"] <= 8
    assert not counters["graph_break"]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_rank_without_pairs_returns_nothing_and_has_gradients_of_zero(kind: torch.dtype) -> None:
    def work(rank: int) -> Any:
        torch.manual_seed(0)
        module, divided = Layer(4, "grouped_mm").to(kind).divided(2)
        rows = torch.randn(0, _HIDDEN, dtype=kind).requires_grad_()
        weights = torch.randn(0, 2, dtype=kind).requires_grad_()
        result = divided._results(rows, torch.zeros(0, 2, dtype=torch.long), weights, 0)
        result.sum().backward()
        return result.detach(), [full(each.grad) for each in module.parameters()], rows.grad

    for result, of_weights, of_rows in run_in_threads(2, work):
        assert (result.shape, result.dtype) == ((0, _HIDDEN), kind)
        assert len(of_weights) == 2
        assert not any(map(torch.any, of_weights))
        assert of_rows.shape == (0, _HIDDEN)


def test_frozen_experts_stay_frozen() -> None:
    def work(rank: int) -> dict[str, bool]:
        layer = Layer(4, "eager").to("meta")
        layer.experts.down_proj.requires_grad_(False)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))
        (module,) = experts.divide_experts(layer, mesh)
        return {name: each.requires_grad for name, each in module.named_parameters()}

    expected = {"gate_up_proj": True, "down_proj": False}
    assert run_in_threads(2, work) == [expected, expected]
