"""LoRA adapters in PEFT's format. Any number can be loaded; one at a time is merged into the
weights.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.errors import ServiceError
from common.weights.checksums import checksum
from learning.hub_names import of_language_part

_PREFIX = "base_model.model."
_WEIGHTS = "adapter_model.safetensors"
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}
"""PEFT's settings with the values that this engine supports; others would change the meaning of the
matrices."""


class BadAdapter(ServiceError):
    """The adapter does not exist or does not fit the model (400)."""

    status = 400
    code = "bad_adapter"


@dataclass(frozen=True)
class Adapter:
    """A low-rank update: W + scale × B A for each matrix W that has factors."""

    path: Path
    scale: float
    factors: dict[str, tuple[Tensor, Tensor]]
    """A [r, in] and B [out, r], by the name of the model's weight."""


class AdapterRegistry:
    """The adapters of one model. Its methods run on the engine's thread between two steps."""

    def __init__(self, module: Any) -> None:
        self._weights = {name: parameter.data for name, parameter in module.named_parameters()}
        head = module.get_output_embeddings()
        prefix = next(name for name, part in module.named_modules() if part is head)
        self._head_weight = f"{prefix}.weight"
        self._head = head
        self._tied: Any = None
        """The embeddings' weight if it is also the head's, which has no name of its own then."""
        if self._head_weight not in self._weights:
            self._tied = head.weight
            self._weights[self._head_weight] = head.weight.data
        self._known: dict[str, Adapter] = {}
        self._base: dict[str, Tensor] = {}
        self.retired: set[str] = set()
        """Names that new requests may no longer use."""
        self.active: str | None = None
        """The adapter merged into the weights; None: the weights are the base model's."""

    def paths(self) -> dict[str, str]:
        """Returns the directories of the adapters that requests may use, by name."""
        known = tuple(self._known.items())  # copied, as other threads read it too
        return {name: str(adapter.path) for name, adapter in known if name not in self.retired}

    def load(self, name: str, path: Path) -> None:
        """Loads an adapter. Raises BadAdapter, and changes nothing, for a name in use and for files
        that do not fit, or whose checksum differs from that in a name `NAME@CHECKSUM`.
        """
        if name in self._known:
            reason = f"Failed to load LoRA adapter {name} because it is already loaded"
            raise BadAdapter(
                reason, field="lora_name", value=name, remedy="unload it first, or use another name"
            )
        adapter = self._read(path)
        stated = name.partition("@")[2]
        if stated and stated != checksum(path / _WEIGHTS):
            raise _unusable("these are not the weights that the adapter's name states", path)
        self._known[name] = adapter

    def drop(self, name: str) -> None:
        """Removes an adapter that no request uses."""
        if self.active == name:
            self.merge(None)
        del self._known[name]
        self.retired.discard(name)

    def merge(self, name: str | None) -> None:
        """Merges this adapter into the weights; None restores the base model's weights exactly."""
        if name == self.active:
            return
        # Copied back, not subtracted: rounding would leave another base after every change.
        for weight, tensor in self._base.items():
            self._weights[weight].copy_(tensor)
        if self._tied is not None:
            self._head.weight = self._tied
        self._base = {}
        self.active = None
        if name is None:
            return
        adapter = self._known[name]
        for weight, (lora_a, lora_b) in adapter.factors.items():
            if self._tied is not None and weight == self._head_weight:
                # An adapter of the head changes no embedding.
                changed = torch.add(self._tied, lora_b @ lora_a, alpha=adapter.scale)
                self._head.weight = torch.nn.Parameter(changed, requires_grad=False)
                continue
            self._base[weight] = self._weights[weight].clone()
            self._weights[weight].add_(lora_b @ lora_a, alpha=adapter.scale)
        self.active = name

    @contextmanager
    def only(self, name: str | None) -> Iterator[None]:
        """Merges this adapter inside the context; None: the weights are the base model's."""
        active = self.active
        self.merge(name)
        try:
            yield
        finally:
            self.merge(active)

    def _read(self, path: Path) -> Adapter:
        device = next(iter(self._weights.values())).device
        try:
            config = json.loads((path / "adapter_config.json").read_text())
            stored = load_file(path / _WEIGHTS)
            tensors = {name: tensor.to(device, torch.float32) for name, tensor in stored.items()}
            scale = config["lora_alpha"] / config["r"]
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            ArithmeticError,
            RecursionError,
            SafetensorError,
        ) as error:
            raise _unusable(f"the adapter cannot be read: {error}", path) from None
        for name, values in _SUPPORTED.items():
            if name in config and config[name] not in values:
                reason = f"{name} {config[name]!r} is not supported by the embedded engine"
                raise _unusable(reason, path, "set rollout.engine sglang")
        return Adapter(path, scale, self._factors(tensors, path))

    def _factors(self, tensors: dict[str, Tensor], path: Path) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns A [r, in] and B [out, r] of every weight that the adapter changes."""
        factors: dict[str, tuple[Tensor, Tensor]] = {}
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                remedy = "look for a training step that diverged"
                raise _unusable(f"{name} has values that are not finite", path, remedy)
            module, found, _ = name.removeprefix(_PREFIX).rpartition(".lora_A.weight")
            if not found:
                continue
            weight = f"{of_language_part(module)}.weight"
            base = self._weights.get(weight)
            lora_b = tensors.get(f"{_PREFIX}{module}.lora_B.weight")
            fits = (
                base is not None
                and lora_b is not None
                and tensor.shape[:1] == lora_b.shape[1:]
                and base.shape == lora_b.shape[:1] + tensor.shape[1:]
            )
            if lora_b is None or not fits:
                raise _unusable(f"the adapter does not fit the model: {name}", path)
            if weight == self._head_weight and self._tied is not None and tensor.is_cuda:
                # Captured graphs read the tensor that the head shares with the embeddings.
                raise _unusable(
                    "on a GPU, an adapter of a head that shares its weight is not supported",
                    path,
                    "set rollout.engine sglang, or train an adapter without the head",
                )
            factors[weight] = (tensor, lora_b)
        if not factors or len(tensors) != 2 * len(factors):
            raise _unusable("the tensors are not pairs of lora_A and lora_B", path)
        return factors


def _unusable(
    reason: str, path: Path, remedy: str = "load an adapter of this model in PEFT's format"
) -> BadAdapter:
    return BadAdapter(reason, field="lora_path", value=str(path), remedy=remedy)
