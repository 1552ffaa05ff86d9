"""LoRA: the policy is the frozen model with a low-rank adapter (Hu et al. 2021, arXiv:2106.09685),
in PEFT's format.

PEFT inserts the adapter's matrices into the Hugging Face model in place. For a matrix with an
adapter, the model's state then holds `NAME.base_layer.weight` (W), `NAME.lora_A.default.weight` (A)
and `NAME.lora_B.default.weight` (B); the layer computes (W + alpha / rank × B A) x. Published and
saved tensors are made from that state one at a time.
"""

import copy
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from common.errors import ConfigError
from common.settings.config import Config
from learning.loading import AddedModules, fill, from_memory, not_in_files
from learning.ranks import Ranks
from learning.saving import Contents
from learning.sharding import named_tensors
from trainer.policy.scorer import (
    ADAPTER_CONFIG,
    Scorer,
    TokenScores,
    computes_in_bfloat16,
    load_scorer,
)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Prefix of every name in PEFT's files."""
_A = ".lora_A.default.weight"
_B = ".lora_B.default.weight"
_BASE = ".base_layer."


class NewAdapter(AddedModules):
    """A new adapter with no effect yet: A is random by `seed`, B is 0. It is float32, the frozen
    model `frozen`.
    """

    def __init__(self, config: Config, frozen: torch.dtype) -> None:
        self._config = config
        self._frozen = frozen

    def change(self, model: Any) -> None:
        """Inserts PEFT's layers. Raises ConfigError for `lora.target_modules` that the model
        lacks.
        """
        # Not `model.to`: its buffers (rotary frequencies) must stay float32.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self._frozen)
        model.add_adapter(_peft_config(self._config, model))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    def name(self, name: str) -> str:
        """Returns the name without PEFT's part."""
        return name.replace(_BASE, ".")

    def first(self, name: str, shape: Sequence[int]) -> Tensor | None:
        """Returns PEFT's initial A or B. It depends only on name and seed, so that every rank gets
        the same.
        """
        if name.endswith(_B):
            return torch.zeros(tuple(shape))
        if not name.endswith(_A):
            return None
        seed = zlib.crc32(f"{self._config.seed} {name}".encode())
        generator = torch.Generator().manual_seed(seed)
        bound = shape[1] ** -0.5
        return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


def load_policy(config: Config, ranks: Ranks, directory: Path | None = None) -> Scorer:
    """Loads `config.model.name` or the checkpoint `directory`, with an adapter when `lora.rank` is
    set.

    With an adapter the model itself is frozen, in bfloat16 if it computes in that precision. A
    collective; only rank 0 needs to see the checkpoint, which belongs to this run
    (`trainer.policy.identity`). Raises ConfigError when a model cannot be loaded.
    """
    # All of the model is trained.
    if config.lora.rank == 0:
        scorer = load_scorer(
            config.model, ranks, config, directory, max_tokens=config.rollout.context_bound
        )
        scorer.model.kept.announce()
        _check_published(scorer.model, named_tensors(scorer.model), config, ranks)
        return scorer
    frozen = torch.bfloat16 if computes_in_bfloat16(config.model, ranks) else torch.float32
    added = NewAdapter(config, frozen)
    max_tokens = config.rollout.context_bound
    scorer = load_scorer(config.model, ranks, config, added=added, max_tokens=max_tokens)
    if not config.lora.publishes_adapter:
        _check_published(scorer.model, base_tensors(named_tensors(scorer.model)), config, ranks)
    if directory is not None:
        targets = dict(adapter_tensors(named_tensors(scorer.model).items()))
        read = from_memory(load_file(directory / ADAPTER_WEIGHTS)) if ranks.is_rank_zero else None
        fill(targets, read, ranks, everywhere=ranks.world_size == 1)
    return scorer


def _check_published(model: Any, own: Mapping[str, Tensor], config: Config, ranks: Ranks) -> None:
    """Raises ConfigError, on every rank, when the engines could not load what this run will
    publish.

    Engines load the files of `model.name`, and skip tensors whose names are not in these files.
    """
    problem = ""
    # Files of quantised weights have other tensors than those that are published.
    if ranks.is_rank_zero and getattr(model.config, "quantization_config", None) is not None:
        problem = "tensors that are not quantised"
    elif ranks.is_rank_zero:
        problem = not_in_files(model, own, config.model.name) or ""
    problem = ranks.broadcast(problem)
    if problem:
        raise ConfigError(
            "the model's files do not match the tensors that the trainer would publish "
            f"to the engines: {problem}",
            field="model.name",
            value=config.model.name,
            remedy="use a complete, unquantised model in its publisher's format, "
            "with its language-model head",
        )


def _peft_config(config: Config, model: Any) -> Any:
    from peft import LoraConfig

    lora = config.lora
    local = Path(config.model.name)
    decoder = model.get_decoder()
    linear = {
        name.rpartition(".")[2]
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear)
    }
    inside = next(name for name, module in model.named_modules() if module is decoder)
    unknown = sorted(set(lora.target_modules) - linear)
    if unknown:
        raise ConfigError(
            f"the model has no linear layer {unknown[0]}",
            field="lora.target_modules",
            value=lora.target_modules,
            remedy=f"use some of {', '.join(sorted(linear))}, or leave the setting empty for all",
        )
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=sorted(lora.target_modules or linear),
        # A vision tower's layers have the same numbers: SGLang would mistake them for the
        # decoder's.
        exclude_modules=rf"(?!{re.escape(inside)}\.).*" if "." in inside else None,
        # Absolute, to be found from any working directory.
        base_model_name_or_path=str(local.resolve()) if local.is_dir() else config.model.name,
        task_type="CAUSAL_LM",
    )


def adapter_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the adapter's tensors in the model's state, with PEFT's names."""
    for name, tensor in named:
        if name.endswith((_A, _B)):
            yield _PREFIX + name.removesuffix(".default.weight") + ".weight", tensor


def merged_tensors(
    named: Iterable[tuple[str, Tensor]], scale: float
) -> Iterator[tuple[str, Tensor]]:
    """Yields the model's state with the adapter merged: W + scale × B A, with Hugging Face names,
    in W's precision.

    In the state W comes before its A, and A before its B, so at most one W is held at a time.
    """
    base_name = ""
    base: Tensor | None = None
    lora_a: Tensor | None = None
    for name, tensor in named:
        if name.endswith(_BASE + "weight"):
            base_name = name.replace(_BASE, ".")
            base = tensor
        elif name.endswith(_A):
            lora_a = tensor
        elif name.endswith(_B):
            assert base is not None, f"no matrix before {name}"
            assert lora_a is not None, f"no lora_A before {name}"
            update = scale * (tensor.float() @ lora_a.float())
            yield base_name, (base.float() + update).to(base.dtype)
            base = None
            lora_a = None
        else:
            yield name.replace(_BASE, "."), tensor
    assert base is None, f"{base_name} has no adapter in the state"


def base_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state of a model without its adapter, with the names that `merged_tensors`
    yields.
    """
    return {
        name.replace(_BASE, "."): tensor
        for name, tensor in tensors.items()
        if not name.endswith((_A, _B))
    }


def adapter_contents(policy: Any) -> Contents:
    """Returns the contents of a directory in PEFT's format."""
    tensors = dict(adapter_tensors(named_tensors(policy).items()))
    return Contents(
        tensors, dict.fromkeys(tensors, ADAPTER_WEIGHTS), {ADAPTER_CONFIG: adapter_config(policy)}
    )


def adapter_config(policy: Any) -> str:
    """Returns the text of PEFT's `adapter_config.json`."""
    written = copy.copy(policy.peft_config["default"])
    written.inference_mode = True
    with TemporaryDirectory(prefix="rlhf-math-") as directory:
        written.save_pretrained(directory)
        return (Path(directory) / ADAPTER_CONFIG).read_text()


class BaseScorer(Scorer):
    """The frozen model as reference: scores with the adapter of `policy` switched off, without a
    second copy.
    """

    def __init__(self, policy: Scorer) -> None:
        nn.Module.__init__(self)
        self.layout = policy.layout
        self.routers = None  # a reference chooses experts for itself
        self.model = policy.model
        self._policy = [policy]  # in a list, so that it does not become a submodule

    def forward(self, *arguments: Any, **options: Any) -> TokenScores:
        """See `Scorer`."""
        with _without_adapter(self.model):
            # Not `.forward`: a sharded model has hooks.
            scores: TokenScores = self._policy[0](*arguments, **options)
        return scores


@contextmanager
def _without_adapter(model: nn.Module) -> Iterator[None]:
    """Switches the adapter off inside the block.

    PEFT's own switch also freezes the adapter's parameters, and FSDP2 records in its first pass
    which are trained.
    """
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
