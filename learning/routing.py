"""Routing replay: which experts of a mixture compute a token is decided once, by the engine.

Where two experts of a token are nearly equal, engine and trainer may choose different ones, because
they round differently, and the token's log-probability differs by far more than rounding. With
routing replay (R3, arXiv:2510.11370) the engine returns the experts that it chose, and the trainer
uses these instead of choosing:

    router logits ─► scores ─► topk ─► weights ─► experts
                                │
                     the engine's experts, with the trainer's own scores

The weights of the experts still come from the trainer's router, which so gets its gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from common.errors import ConfigError, ServiceError
from common.wire.schemas import Int32, UInt8
from learning.sharding import layers

Experts = NDArray[np.int16]
"""[tokens, layers · top_k] numbers of experts."""
_FIELD = "trainer.routing_replay"
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ROUTERS = ("gate", "router")


class RoutesNotRecorded(ServiceError):
    """The experts in a row are not those that an engine computed it with."""

    code = "routes_not_recorded"


class RoutedRow(NamedTuple):
    """The experts of a row as an engine returned them (`Completion.routed_experts`)."""

    prompt: UInt8
    completion: UInt8


class Routes(NamedTuple):
    """The experts of a row of P and L tokens; the last token is not computed."""

    prompt: Experts
    """[P, layers · top_k]"""
    completion: Experts
    """[L - 1, layers · top_k]"""


class Routers:
    """The routers of a transformers model with a mixture of experts; the model is changed in place.

    A router is the child `gate` or `router` beside a layer's `experts`, and chooses with one call
    of `torch.topk`. Raises ConfigError for a model without such routers.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        counts = (getattr(config, name, None) for name in _COUNTS)
        self.experts: int = next((count for count in counts if isinstance(count, int)), 0)
        """Experts of a layer among which a router chooses."""
        self.top_k: int = getattr(config, "num_experts_per_tok", None) or 0
        """Experts of a token in each layer."""
        self.layers: int = config.num_hidden_layers
        """Layers of the model, those without experts included."""
        self.given: Tensor | None = None
        """[layers · top_k, T] 1 + the expert to use for each token of the next passes, 0 where the
        router chooses, with one column for all tokens; None: it chooses for all. It also holds in
        the backward pass, where layers may be computed again."""
        self._recorded: list[Tensor | None] | None = None

        # Numbers of the layers with experts.
        self._routed: list[int] = []
        for index, layer in enumerate(layers(model)):
            router = _router(layer)
            if router is not None:
                router.forward = torch.compiler.disable(partial(self._route, index, router.forward))
                self._routed.append(index)
        if not (self._routed and self.experts and self.top_k):
            raise _refused(config, "it has no layer with experts and a router beside them")
        self._config = config

    @property
    def width(self) -> int:
        """Numbers of a token: an expert for each of `top_k` in each layer."""
        return self.layers * self.top_k

    def read(self, row: RoutedRow, prompt_ids: Int32, completion_ids: Int32) -> Routes:
        """Returns the experts of a row of [P] and [L] token ids.

        Raises ConfigError when they are not those of this model.
        """
        computed = max(0, len(completion_ids) - 1)
        return Routes(
            prompt=self._read(row.prompt, len(prompt_ids)),
            completion=self._read(row.completion, computed),
        )

    def _read(self, raw: UInt8, tokens: int) -> Experts:
        # Numbers up to 255 take one byte, larger ones two.
        size = 1 if len(raw) <= tokens * self.width else 2
        fits = len(raw) == size * tokens * self.width
        whole = raw if fits else raw[:0]
        numbers = whole.view("<u1" if size == 1 else "<u2").astype(np.int16)
        if not fits or int(numbers.max(initial=0)) >= self.experts:
            raise ConfigError(
                f"the experts that an engine returned for {tokens} tokens are not those of this "
                f"model, which has {self.layers} layers and chooses {self.top_k} of "
                f"{self.experts} experts",
                field=_FIELD,
                value=True,
                remedy="empty the replay-buffer with POST /clear if it has groups of another model",
            )
        self._check_distinct(numbers.reshape(tokens, self.layers, self.top_k)[:, self._routed])
        return numbers.reshape(tokens, self.width)

    def _check_distinct(self, experts: Experts) -> None:
        """Raises RoutesNotRecorded for experts [tokens, layers, top_k] of which a token has one
        twice: no router chose them.

        An engine whose kernels bypass the record leaves zeros, so the first two are enough for
        every token; to compare all pairs of the first token costs nothing.
        """
        if self.top_k == 1 or len(experts) == 0:
            return
        repeats = bool((experts[:, :, 0] == experts[:, :, 1]).any())
        first = np.sort(experts[0])  # along the last axis
        if repeats or bool((first[:, 1:] == first[:, :-1]).any()):
            raise RoutesNotRecorded(
                "an engine returned the same expert twice for a token: it did not record which "
                "experts computed it",
                field=_FIELD,
                value=True,
                remedy="set rollout.engine_args --moe-runner-backend triton, with which SGLang "
                "records them, or leave it out",
            )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside this context, `recorded` returns the experts of the latest pass."""
        self._recorded = [None] * self.layers
        try:
            yield
        finally:
            self._recorded = None

    def recorded(self) -> Tensor:
        """Returns [layers · top_k, T] the experts that the routers chose in the latest pass over T
        tokens; 0 for layers without experts.
        """
        assert self._recorded is not None, "only while recording"
        some = next(chosen for chosen in self._recorded if chosen is not None)
        nothing = torch.zeros_like(some)
        found = [nothing if chosen is None else chosen for chosen in self._recorded]
        return torch.cat(found, 1).T

    def _route(self, layer: int, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Computes the router of a layer."""
        if self.given is None and self._recorded is None:
            return forward(*inputs, **options)
        given: Tensor | None = None
        if self.given is not None:
            first = layer * self.top_k
            given = self.given[first : first + self.top_k].T
        selection = _Selection(self.experts, self.top_k, given)
        with selection:
            routed = forward(*inputs, **options)
        # Otherwise experts were chosen in a way that this class does not replace.
        if len(selection.chosen) != 1:
            raise _refused(self._config, "its routers do not choose experts with one topk")
        if self._recorded is not None:
            self._recorded[layer] = selection.chosen[0]
        return routed


class _Selection(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Replaces what `torch.topk` selects among the scores of the experts.

    Args:
        experts: number of scores of a token, by which the call is recognised.
        top_k: number of experts of a token, likewise.
        given: [T or 1, top_k] as `Routers.given`.
    """

    def __init__(self, experts: int, top_k: int, given: Tensor | None) -> None:
        super().__init__()
        self.chosen: list[Tensor] = []
        """[T, top_k] the experts to use, for each call that selected experts."""
        self._experts = experts
        self._top_k = top_k
        self._given = given

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        found = function(*args, **options)
        if function not in (torch.topk, Tensor.topk):
            return found
        scores = args[0] if args else options["input"]
        shape = (scores.shape[-1], found.indices.shape[-1])
        if shape != (self._experts, self._top_k):  # of groups of experts, for instance
            return found

        indices = found.indices
        if self._given is not None:
            given = self._given.long() - 1
            if len(given) > 1:
                given = given.reshape(indices.shape)
            indices = torch.where(given < 0, indices, given)
            found = torch.return_types.topk((scores.gather(-1, indices), indices))
        self.chosen.append(indices.reshape(-1, self._top_k))
        return found


def _router(layer: nn.Module) -> nn.Module | None:
    """Returns the router of a decoder layer; None for a layer without experts."""
    for module in layer.modules():
        children = dict(module.named_children())
        if "experts" in children:
            return next((children[name] for name in _ROUTERS if name in children), None)
    return None


def _refused(config: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"the routing of {config.model_type} cannot be replayed: {reason}",
        field=_FIELD,
        value=True,
        remedy="leave it out",
    )
