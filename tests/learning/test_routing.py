"""Routing replay: a model computes tokens with given experts, and weighs them by its own router."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from common.errors import ConfigError
from common.settings.sections import TrainerSection
from learning.layout import Layout, Packed, Padded
from learning.routing import RoutedRow, Routers, Routes, RoutesNotRecorded, _Selection
from learning.sharding import prepare
from tests.support.errors import raises
from tests.support.models.tiny_models import make
from trainer.policy.scorer import Scorer

_EXPERTS = 8
_TOP_K = 3
_LAYERS = 2
_MOE: dict[str, Any] = {
    "num_experts": _EXPERTS,
    "num_experts_per_tok": _TOP_K,
    "norm_topk_prob": True,
}
REFUSED = {"field": "trainer.routing_replay", "value": "True"}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3-MoE": _MOE,
    "Mixtral": {"num_local_experts": _EXPERTS},
    "gpt_oss": {"num_local_experts": _EXPERTS},
    # Experts are chosen in groups, by scores with a bias that the weights do not have.
    "glm4_moe": {"n_routed_experts": _EXPERTS, "num_experts_per_tok": _TOP_K},
    "qwen2_moe": {"num_experts": _EXPERTS},
    "olmoe": _MOE,
    "granitemoe": {},
}


def routed_by_hooks(model: Any, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the logits, and the experts of each layer as the routers themselves return them."""
    found: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, outputs: found.append(outputs[2]))
        for name, module in model.named_modules()
        if name.endswith((".gate", ".router"))
    ]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, found


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_replays_its_own_routing_and_follows_another(kind: str) -> None:
    model = make(kind, **FAMILIES[kind])
    ids = torch.arange(3, 27).view(2, 12)
    expected, by_layer = routed_by_hooks(model, ids)

    routers = Routers(model)
    with torch.no_grad(), routers.recording():
        model(input_ids=ids, use_cache=False)
        recorded = routers.recorded()
    dense = routers.layers - len(by_layer)  # the first layers, if any, have no experts
    assert torch.equal(recorded[dense * routers.top_k :], torch.cat(by_layer, 1).T)
    assert not recorded[: dense * routers.top_k].any()

    def with_experts(given: Tensor) -> Tensor:
        routers.given = given.to(torch.int16)
        with torch.no_grad():
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits

    assert torch.equal(with_experts(recorded + 1), expected)
    assert torch.equal(with_experts(torch.zeros_like(recorded)), expected)  # it chooses
    assert not torch.allclose(with_experts((recorded + 1) % routers.experts + 1), expected)


@pytest.mark.parametrize(
    ("kind", "reason"), [("Qwen3", "no layer with experts"), ("jetmoe", "no layer with experts")]
)
def test_models_without_such_routers_are_refused(kind: str, reason: str) -> None:
    with raises(ConfigError, **REFUSED) as refused:
        Routers(make(kind))
    assert reason in str(refused.value)


def test_a_router_that_chooses_otherwise_is_refused() -> None:
    """Phi-3.5-MoE takes the highest score twice, with random numbers in training."""
    model = make("phimoe")
    routers = Routers(model)
    with routers.recording(), raises(ConfigError, **REFUSED) as refused:
        model(input_ids=torch.arange(3, 9)[None], use_cache=False)
    assert "with one topk" in str(refused.value)


@pytest.mark.parametrize(
    ("token", "places"),
    [
        pytest.param(0, [(0, 2), (1, 2)], id="the last two of the first token"),
        pytest.param(4, [(1, 0), (1, 1)], id="the first two of a later token"),
    ],
)
def test_experts_that_no_router_chose_are_refused(
    token: int, places: list[tuple[int, int]]
) -> None:
    """A kernel that bypasses SGLang's record leaves zeros: expert 0, k times."""
    routers = Routers(make("Qwen3-MoE", **_MOE))
    prompts, completions, routes = rows()
    computed = len(completions[1]) - 1
    of_prompt = routes[1].prompt.astype(np.uint8)
    experts = routes[1].completion.astype(np.uint8).reshape(computed, _LAYERS, _TOP_K)

    def read() -> Routes:
        row = RoutedRow(of_prompt.reshape(-1), experts.reshape(-1))
        return routers.read(row, prompts[1], completions[1])

    assert np.array_equal(read().completion, routes[1].completion)
    (layer, place), (_, other) = places
    experts[token, layer, other if place == 0 else 1] = experts[token, layer, place]
    with raises(RoutesNotRecorded, **REFUSED):
        read()


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(10))
def test_experts_are_refused_if_a_check_by_hand_finds_one_twice(top_k: int, seed: int) -> None:
    """In the first two places of any token, and in all places of the first; the layer without
    experts, which has zeros, does not count."""
    model = make(
        "glm4_moe", n_routed_experts=40, num_experts_per_tok=top_k, num_hidden_layers=4, n_group=1
    )
    routers = Routers(model)
    dense = 1
    rng = np.random.default_rng(seed)
    for tokens in range(5):
        experts = rng.integers(0, 40, (tokens, routers.layers, top_k))
        experts[:, :dense] = 0
        first_twice = any(
            len(set(layer[:2])) < len(layer[:2])
            for token in experts.tolist()
            for layer in token[dense:]
        )
        some_twice = any(
            len(set(layer)) < top_k for token in experts[:1].tolist() for layer in token[dense:]
        )
        of_row = RoutedRow(
            prompt=experts.astype(np.uint8).reshape(-1), completion=np.zeros(0, np.uint8)
        )
        prompt = np.arange(tokens, dtype=np.int32)
        read = partial(routers.read, of_row, prompt, np.zeros(1, np.int32))
        if first_twice or some_twice:
            with raises(RoutesNotRecorded, **REFUSED):
                read()
        else:
            assert np.array_equal(read().prompt, experts.reshape(tokens, routers.width))


CALLS: dict[str, Callable[[Tensor, int], Any]] = {
    "a function": lambda scores, count: torch.topk(scores, count),
    "a method": lambda scores, count: scores.topk(count, dim=-1),
    "by name": lambda scores, count: torch.topk(input=scores, k=count, dim=-1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("seed", range(6))
def test_a_selection_is_by_hand_where_experts_are_given(
    call: Callable[[Tensor, int], Any], seed: int
) -> None:
    """0 stands for the router's own choice. Other calls are left as they are."""
    draws = np.random.default_rng(seed)
    experts = int(draws.integers(3, 9))
    top_k = int(draws.integers(1, experts))
    tokens = int(draws.integers(1, 7))
    torch.manual_seed(seed)
    scores = torch.rand(tokens, experts)
    if seed % 2:
        scores = scores[None]  # routers see [T, experts] or [1, T, experts]
    own = scores.topk(top_k).indices.reshape(tokens, top_k)
    rows = 1 if seed % 3 == 0 else tokens
    given = torch.from_numpy(draws.integers(0, experts + 1, (rows, top_k)).astype(np.int16))
    expected = [
        [int(wish) - 1 if wish else int(choice) for wish, choice in zip(*pair, strict=True)]
        for pair in zip(given.expand(tokens, top_k), own, strict=True)
    ]

    for wishes, indices in ((given, torch.tensor(expected)), (None, own)):
        selection = _Selection(experts, top_k, wishes)
        with selection:
            others = call(scores[..., 1:], min(top_k, experts - 1))
            fewer = call(scores, top_k - 1)
            values, found = call(scores, top_k)
            ordered = scores.sort().indices
        assert torch.equal(found, indices.view_as(found))
        assert torch.equal(values, scores.gather(-1, found))
        assert [chosen.tolist() for chosen in selection.chosen] == [indices.tolist()]
        assert torch.equal(others.indices, scores[..., 1:].topk(min(top_k, experts - 1)).indices)
        assert torch.equal(fewer.indices, scores.topk(top_k - 1).indices)
        assert torch.equal(ordered, scores.sort().indices)


class Mixture(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Layers of which some have experts, and a router beside them by the name given."""

    base_model_prefix = "model"

    def __init__(self, routers: list[str | None], **sizes: Any) -> None:
        super().__init__()
        sizes = {"num_hidden_layers": len(routers), "num_experts_per_tok": 2} | sizes
        text = SimpleNamespace(model_type="stub", **sizes)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        for name in routers:
            block = nn.Module()
            block.add_module("gate_proj", nn.Linear(4, 4))
            if name is not None:
                block.add_module("experts", nn.Linear(4, 4))
                block.add_module(name, Chooser())
            self.model.layers.append(nn.ModuleDict({"norm": nn.Linear(1, 1), "mlp": block}))

    def route(self, scores: Tensor) -> list[Tensor]:
        found = []
        for layer in self.model.layers:
            for name, part in layer.mlp.named_children():
                if isinstance(part, Chooser):
                    assert name in ("gate", "router")
                    found.append(part(scores, top_k=2))
        return found


class Chooser(nn.Module):  # type: ignore[misc]
    def forward(self, scores: Tensor, *, top_k: int) -> Tensor:
        indices: Tensor = scores.topk(top_k).indices
        return indices


@pytest.mark.parametrize("count", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_routers_are_found_by_their_names_and_sizes_and_given_experts_layer_by_layer(
    count: str,
) -> None:
    model = Mixture([None, "gate", None, "router"], **{count: 5})
    routers = Routers(model)
    assert (routers.experts, routers.top_k, routers.layers, routers.width) == (5, 2, 4, 8)

    scores = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    own = scores.topk(2).indices
    assert all(torch.equal(found, own) for found in model.route(scores))
    # Experts of the first two tokens; the router chooses those of the third.
    given = torch.randint(1, 6, (8, 3), generator=torch.Generator().manual_seed(1))
    given[:, 2] = 0
    routers.given = given.to(torch.int16)
    expected = [
        torch.cat([given[2:4, :2].T - 1, own[2:]]),
        torch.cat([given[6:8, :2].T - 1, own[2:]]),
    ]
    with routers.recording():
        found = model.route(scores)
        recorded = routers.recorded()
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    nothing = torch.zeros(3, 2, dtype=torch.long)
    by_layer = torch.cat([nothing, expected[0], nothing, expected[1]], 1)
    assert torch.equal(recorded, by_layer.T)
    with pytest.raises(AssertionError):
        routers.recorded()


@pytest.mark.parametrize(
    ("routers", "sizes"),
    [
        ([None, None], {"num_experts": 4}),
        (["other"], {"num_experts": 4}),
        (["gate"], {}),
        (["gate"], {"num_experts": None}),
        (["gate"], {"num_experts": 4, "num_experts_per_tok": None}),
    ],
)
def test_a_model_is_refused_that_lacks_a_router_or_its_sizes(
    routers: list[str | None], sizes: dict[str, Any]
) -> None:
    with raises(ConfigError, **REFUSED):
        Routers(Mixture(routers, **sizes))


def follow_by_hand(model: Any, experts: Tensor) -> None:
    """Makes Qwen3-MoE compute one row with experts [layers, T, top_k], by the formula of its
    publication: the probabilities of the chosen experts, divided by their sum."""
    for index, layer in enumerate(model.model.layers):

        def routed(
            states: Tensor, gate: Any = layer.mlp.gate, chosen: Tensor = experts[index]
        ) -> tuple[Tensor, Tensor, Tensor]:
            logits = linear(states, gate.weight)
            own = torch.gather(logits.softmax(-1), 1, chosen)
            return logits, own / own.sum(-1, keepdim=True), chosen

        layer.mlp.gate.forward = routed


def rows() -> tuple[list[np.ndarray], list[np.ndarray], list[Routes]]:
    """Returns two groups of two rows with random experts. The groups have the same prompt, computed
    with different experts."""
    rng = np.random.default_rng(0)

    def chosen(tokens: int) -> np.ndarray:
        experts = np.tile(np.arange(_EXPERTS, dtype=np.int16), (tokens, _LAYERS, 1))
        some = rng.permuted(experts, axis=2)[:, :, :_TOP_K]  # no expert twice
        return some.reshape(tokens, _LAYERS * _TOP_K)

    prompt = rng.integers(3, 96, 5).astype(np.int32)
    prompts: list[np.ndarray] = []
    completions: list[np.ndarray] = []
    routes: list[Routes] = []
    for lengths in ((4, 7), (1, 6)):
        of_prompt = chosen(len(prompt))
        for length in lengths:
            prompts.append(prompt)
            completions.append(rng.integers(3, 96, length).astype(np.int32))
            routes.append(Routes(of_prompt, chosen(length - 1)))
    return prompts, completions, routes


def scored(
    scorer: Scorer, layout: type[Layout], routes: list[Routes]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns log-probabilities and the gradient of their weighted sum."""
    prompts, completions, _ = rows()
    targets = torch.from_numpy(np.concatenate(completions)).long()
    logprobs = scorer(layout.of(prompts, completions, [], routes), targets, 0.7).logprobs
    (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
    gradients = {
        name: parameter.grad
        for name, parameter in scorer.model.named_parameters()
        if parameter.grad is not None
    }
    return logprobs.detach(), gradients


def expected_scores(routes: list[Routes]) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes every row alone, with the routers replaced by a formula."""
    model = make("Qwen3-MoE", **_MOE)
    prompts, completions, _ = rows()
    found: list[Tensor] = []
    for prompt, completion, route in zip(prompts, completions, routes, strict=True):
        by_token = torch.from_numpy(np.concatenate(route)).long()
        follow_by_hand(model, by_token.view(-1, _LAYERS, _TOP_K).transpose(0, 1))
        ids = torch.from_numpy(np.concatenate([prompt, completion])).long()
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        of_answer = (logits[len(prompt) - 1 :] / 0.7).log_softmax(-1)
        found.append(of_answer.gather(1, ids[len(prompt) :, None])[:, 0])
    logprobs = torch.cat(found)
    (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
    return logprobs.detach(), {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def shifted(routes: list[Routes]) -> list[Routes]:
    """Returns the experts of the token before."""
    return [
        Routes(*np.split(np.roll(np.concatenate(route), 1, axis=0), [len(route.prompt)]))
        for route in routes
    ]


@pytest.mark.parametrize("layout", [Packed, Padded])
@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_rows_are_scored_with_the_given_experts(
    layout: type[Layout], checkpointing: bool | str
) -> None:
    """Log-probabilities and gradients, that of the routers included, whether layers are computed
    once or again."""
    _, _, routes = rows()
    expected, gradients = expected_scores(routes)
    assert any(name.endswith("gate.weight") for name in gradients)

    def found(given: list[Routes]) -> tuple[Tensor, dict[str, Tensor]]:
        model = make("Qwen3-MoE", **_MOE)
        settings = TrainerSection.model_validate({"activation_checkpointing": checkpointing})
        scorer = Scorer(model, "on" if layout is Packed else "off", routing_replay=True)
        prepare(model, settings, trained=True, device=torch.device("cpu"))
        return scored(scorer, layout, given)

    logprobs, of_scorer = found(routes)
    torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=0)
    assert of_scorer.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(of_scorer[name], gradient, atol=2e-4, rtol=1e-4, msg=name)

    wrong, _ = found(shifted(routes))
    assert float((wrong - expected).abs().max()) > 0.1
    chosen, _ = found([])
    assert float((chosen - expected).abs().max()) > 0.1


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # of torch's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo triggers it
@pytest.mark.slow
@pytest.mark.integration
def test_compiled_layers_compute_with_the_given_experts() -> None:
    """Twice, with other experts, since a compiled layer is used again."""
    _, _, routes = rows()
    model = make("Qwen3-MoE", **_MOE)
    scorer = Scorer(model, "on", routing_replay=True)
    settings = TrainerSection(compile=True, activation_checkpointing=True)
    prepare(model, settings, trained=True, device=torch.device("cpu"))
    for given in (shifted(routes), routes):
        expected, gradients = expected_scores(given)
        model.zero_grad()
        logprobs, found = scored(scorer, Packed, given)
        torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, atol=2e-4, rtol=1e-4, msg=name)


def test_only_rows_that_share_the_experts_of_their_prompt_share_its_computation() -> None:
    prompts, completions, routes = rows()
    computed = sum(len(completion) - 1 for completion in completions)
    laid_out = Packed.of(prompts, completions, [], routes)
    assert laid_out.input_ids.shape[1] == 2 * len(prompts[0]) + computed
    assert Packed.of(prompts, completions).input_ids.shape[1] == len(prompts[0]) + computed


def raw(numbers: list[int], size: str) -> RoutedRow:
    return RoutedRow(
        prompt=np.array(numbers, size).view(np.uint8), completion=np.zeros(0, np.uint8)
    )


@pytest.mark.parametrize("size", ["<u1", "<u2"])
def test_numbers_of_one_and_two_bytes_are_read(size: str) -> None:
    routers = Routers(make("Qwen3-MoE", **_MOE))
    numbers = [0, 1, 2, 3, 4, 7]
    ids = np.array([5], np.int32)
    routes = routers.read(raw(numbers, size), ids, ids)
    assert routes.prompt.tolist() == [numbers]
    assert routes.completion.shape == (0, _LAYERS * _TOP_K)


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3, 4, 8], [0, 1, 2]])
def test_experts_of_another_model_are_refused(numbers: list[int]) -> None:
    routers = Routers(make("Qwen3-MoE", **_MOE))
    ids = np.array([5], np.int32)
    read: Callable[[], Routes] = lambda: routers.read(raw(numbers, "<u1"), ids, ids)  # noqa: E731
    with raises(ConfigError, **REFUSED) as refused:
        read()
    assert "are not those of this model" in str(refused.value)
