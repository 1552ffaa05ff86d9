"""LoRA: the policy is the frozen model with a low-rank adapter (Hu et al. 2021, arXiv:2106.09685),
in PEFT's format.

PEFT inserts the adapter's matrices into the Hugging Face model in place. For a matrix with an
adapter, the model's state then holds `NAME.base_layer.weight` (W), `NAME.lora_A.default.weight` (A)
and `NAME.lora_B.default.weight` (B); the layer computes (W + alpha / rank × B A) x. Published and
saved tensors are made from that state one at a time.

In every family the same layers can have an adapter: the linear layers of attention and of dense
MLPs, among them the shared experts of a mixture. Its routed experts, which are stacked in one
parameter, and its routers have none.
"""

import copy
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from common.errors import ConfigError
from common.settings.checks import unloadable_adapter
from common.settings.config import Config
from learning.loading import AddedModules, fill, from_memory, not_in_files
from learning.ranks import Ranks
from learning.saving import Contents
from learning.sharding import named_tensors
from trainer.policy.scorer import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    Scorer,
    TokenScores,
    computes_in_bfloat16,
    load_scorer,
)

_A = ".lora_A.default.weight"
_B = ".lora_B.default.weight"
_BASE = ".base_layer."
_ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Names of modules that choose experts or weigh them."""


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
        _insert(self._config, model, _adapted_layers(self._config, model))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    def name(self, name: str) -> str:
        """Returns the name without PEFT's part."""
        return name.replace(_BASE, ".")

    def first(self, name: str, shape: Sequence[int]) -> Tensor | None:
        """Returns PEFT's initial A or B (`first_factor`)."""
        if not name.endswith((_A, _B)):
            return None
        return first_factor(self._config.seed, name, shape)


def first_factor(seed: int, name: str, shape: Sequence[int]) -> Tensor:
    """Returns PEFT's initial A or B: A is random, B is 0. It depends only on seed and name, so that
    every rank gets the same.
    """
    if ".lora_B." in name:
        return torch.zeros(tuple(shape))
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    bound = shape[1] ** -0.5
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


def load_policy(config: Config, ranks: Ranks, directory: Path | None) -> Scorer:
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
        targets = dict(adapter_tensors(scorer.model))
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


def adaptable_layers(model: Any) -> dict[str, list[str]]:
    """Returns the names of the decoder's layers that can have an adapter, by their last
    components.
    """
    decoder = model.get_decoder()
    inside = decoder_name(model)
    linear: dict[str, list[str]] = {}
    for name, module in decoder.named_modules():
        path = name.split(".")
        skipped = module is model.get_output_embeddings() or not _ROUTERS.isdisjoint(path)
        if isinstance(module, nn.Linear) and not skipped and not _in_kernel(decoder, name):
            linear.setdefault(path[-1], []).append(f"{inside}.{name}".removeprefix("."))
    return linear


def _adapted_layers(config: Config, model: Any) -> dict[str, list[str]]:
    """Returns the names of the layers that get an adapter, by their last components.

    Raises ConfigError for `lora.target_modules` that the model lacks, and for layers whose adapters
    the engine would not load.
    """
    lora = config.lora
    linear = adaptable_layers(model)
    if not linear:
        raise ConfigError(
            "the decoder of this model has no linear layers, to which an adapter could be added",
            field="lora.rank",
            value=lora.rank,
            remedy="set it to 0, which trains the whole model",
        )
    unknown = sorted(set(lora.target_modules) - set(linear))
    if unknown:
        raise ConfigError(
            f"no linear layer {unknown[0]} can have an adapter: outside of routed experts and "
            "routers the model has none",
            field="lora.target_modules",
            value=lora.target_modules,
            remedy=f"use some of {', '.join(sorted(linear))}, or leave the setting empty for all",
        )
    chosen = lora.target_modules or list(linear)
    problem = unloadable_adapter(chosen)
    if problem and lora.publishes_adapter and config.rollout.engine == "sglang":
        raise ConfigError(
            f"this model's adapter {problem}",
            field="lora.target_modules",
            value=lora.target_modules,
            remedy="set lora.publish merged, or name other layers",
        )
    return {last: linear[last] for last in sorted(chosen)}


def _insert(config: Config, model: Any, layers: Mapping[str, list[str]]) -> None:
    """Inserts PEFT's layers for these layers of the model, and describes the adapter in
    `model.peft_config`.
    """
    from peft import inject_adapter_in_model

    lora = config.lora
    described = describe_adapter(config.model.name, model, layers, rank=lora.rank, alpha=lora.alpha)
    described.lora_dropout = lora.dropout
    modules = described.target_modules
    parameters = described.target_parameters
    described.target_modules = set(modules)
    described.target_parameters = None
    # Only these keys tell PEFT exactly which layers: it takes the names `gate_proj` and `down_proj`
    # in a mixture for those of the experts, of which there are none in it any more.
    keys = dict.fromkeys(f"{name}.lora_A.weight" for names in layers.values() for name in names)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "While injecting the PEFT adapters", RuntimeWarning)
        inject_adapter_in_model(described, model, "default", state_dict=keys)
    model._hf_peft_config_loaded = True
    described.target_modules = modules
    described.target_parameters = parameters


def describe_adapter(
    base: str, model: Any, layers: Mapping[str, list[str]], *, rank: int, alpha: float
) -> Any:
    """Returns PEFT's config of an adapter of these layers of the model, whose files are in `base`.
    Whoever reads the adapter finds the same layers by it.
    """
    from peft import LoraConfig

    local = Path(base)
    by_name = [last for last in layers if not _names_experts(last, model)]
    described = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=by_name,
        target_parameters=[
            f"{name}.weight" for last in layers if last not in by_name for name in layers[last]
        ],
        # Absolute, to be found from any working directory.
        base_model_name_or_path=str(local.resolve()) if local.is_dir() else base,
        task_type="CAUSAL_LM",
    )
    described.target_modules = by_name  # PEFT makes it a set, whose order in a file varies
    return described


def _in_kernel(decoder: nn.Module, name: str) -> bool:
    """Whether a layer is the last one of a Mamba block, whose kernel takes the matrix itself: an
    adapter beside it would change nothing.
    """
    block, _, last = name.rpartition(".")
    parameters = dict(decoder.get_submodule(block).named_parameters(recurse=False))
    return last == "out_proj" and {"A_log", "D"} <= parameters.keys()


def decoder_name(model: Any) -> str:
    """Returns the name of the decoder among the modules of the model."""
    return _name_of(model.get_decoder(), model)


def _names_experts(name: str, model: Any) -> bool:
    """Whether PEFT takes this name of a layer of the model for one of its routed experts."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    probe = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(probe, model, None)
    except ValueError:  # it wants its other half, the up projection of a gate
        return True
    return name not in (probe.target_modules or ())


def adapter_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the adapter's tensors in the model, with PEFT's names."""
    placed = placing(model)
    for name, tensor in named_tensors(model).items():
        if name.endswith((_A, _B)):
            yield ADAPTER_PREFIX + placed(name.removesuffix(".default.weight")) + ".weight", tensor


def head_name(model: Any) -> str:
    """Returns the name of the head among the modules of the model."""
    return _name_of(model.get_output_embeddings(), model)


def _name_of(part: nn.Module, model: Any) -> str:
    return str(next(name for name, module in model.named_modules() if module is part))


def placing(model: Any) -> Callable[[str], str]:
    """Returns a function that converts a module's name in the trained model to its name in the
    model of the files. They differ where only the language part of a multimodal model is trained:
    PEFT adds an adapter to the whole model.
    """
    if not model.kept.has_more_than(model.config):
        return lambda name: name
    own = decoder_name(model)
    whole = model.kept.decoder_path
    head = head_name(model)
    return lambda name: name if name.startswith(head) else whole + name.removeprefix(own)


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
    tensors = dict(adapter_tensors(policy))
    return Contents(
        tensors, dict.fromkeys(tensors, ADAPTER_WEIGHTS), {ADAPTER_CONFIG: adapter_config(policy)}
    )


def adapter_config(policy: Any, described: Any = None) -> str:
    """Returns the text of PEFT's `adapter_config.json`, of the policy's own adapter unless another
    is `described`.
    """
    written = copy.copy(described or policy.peft_config["default"])
    written.inference_mode = True
    placed = placing(policy)
    written.target_parameters = [placed(name) for name in written.target_parameters or ()]
    inside = placed(decoder_name(policy))
    head = head_name(policy)
    # A vision tower's layers have the same numbers: SGLang would mistake them for the decoder's.
    written.exclude_modules = rf"(?!{re.escape(inside)}\.|{head}$).*" if "." in inside else None
    if written.target_parameters:
        written.lora_dropout = 0.0  # PEFT knows none for parameters, and a reader needs none
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
