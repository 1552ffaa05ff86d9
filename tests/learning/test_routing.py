"""Routing replay: a model computes tokens with given experts, and weighs them by its own router."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from common.errors import ConfigError
from common.settings.sections import TrainerSection
from learning.layout import Layout, Packed, Padded
from learning.routing import RoutedRow, Routers, Routes, RoutesNotRecorded
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


@pytest.mark.parametrize("kind", ["Qwen3", "jetmoe"])
def test_models_without_such_routers_are_refused(kind: str) -> None:
    with raises(ConfigError, field="trainer.routing_replay", value="True"):
        Routers(make(kind))


def test_a_router_that_chooses_otherwise_is_refused() -> None:
    """Phi-3.5-MoE takes the highest score twice, with random numbers in training."""
    model = make("phimoe")
    routers = Routers(model)
    with routers.recording(), raises(ConfigError, field="trainer.routing_replay", value="True"):
        model(input_ids=torch.arange(3, 9)[None], use_cache=False)


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
    with raises(RoutesNotRecorded, field="trainer.routing_replay"):
        read()


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
    with raises(ConfigError, code="config", field="trainer.routing_replay"):
        read()
