"""Many LoRA runs on one frozen base model.

    run ─► its factors beside the base's layers ─► passes over packed rows ─► gradient ─► AdamW

The factors A and B of a run are one vector [N] in float32, and so are its gradient and AdamW's
moments: every rank holds the vector and the gradient, and a share of the moments. A pass reads them
through `_Place`s, which are beside the layers of the base, so that a change of the run copies
nothing. The base is sharded as the policy of a trainer is; its layers are not changed.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partialmethod, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from common.errors import InvalidInput, ServiceError
from common.settings.checks import without_adapters
from common.settings.config import Config
from learning.batching import Sizes, micro_batch_passes, split
from learning.fitting import fitted
from learning.layout import moved
from learning.loading import AddedModules
from learning.ranks import Ranks
from learning.sharding import reshard
from trainer.policy.lora import (
    adaptable_layers,
    adapter_config,
    describe_adapter,
    first_factor,
    head_name,
    placing,
)
from trainer.policy.scorer import ADAPTER_PREFIX, computes_in_bfloat16, load_scorer
from trainer.tinker import run_files
from trainer.tinker.interface import AdamParams, Array, Datum, LoraSpec, Outputs
from trainer.tinker.losses import TARGETS, Loss, check_data, checked_loss, terms_of

log = logging.getLogger(__name__)
_Method = TypeVar("_Method", bound=Callable[..., Any])
_MLP = ("mlp", "feed_forward", "ffn", "moe", "expert")
"""Parts of the names of modules that are, or are in, an MLP."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MLP_LAYERS = {
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("fc1", "fc2", "dense_h_to_4h", "dense_4h_to_h"),
}
"""Layers of an MLP in families that have no module for it."""


class _Frozen(AddedModules):
    """A base without gradients, in the precision `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def change(self, model: Any) -> None:
        """See `AddedModules`."""
        # Not `model.to`: its buffers (rotary frequencies) must stay float32.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self._dtype)
            parameter.requires_grad_(False)


@dataclass
class _Place:
    """Where the adapter of a run is beside one linear layer; empty while no run is there."""

    name: str
    """The layer's name in the model."""
    file_name: str
    """The layer's name in PEFT's files."""
    kind: str
    """`attn`, `mlp` or `unembed`: what `LoraSpec` calls `train_…`."""
    sizes: tuple[int, int]
    """Numbers that go into the layer, and out of it."""
    factors: tuple[Tensor, Tensor] | None = None
    """A [r, in] and B [out, r]."""
    scale: float = 1.0

    def shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        """Returns the shapes of A and B, by PEFT's names."""
        into, out = self.sizes
        return {
            f"{self.file_name}.lora_A.weight": (rank, into),
            f"{self.file_name}.lora_B.weight": (out, rank),
        }

    def parts(self, states: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns scale × A x [..., r] of the states [..., in] and B [out, r]."""
        if self.factors is None:
            return None
        lora_a, lora_b = self.factors
        low = linear(states, lora_a.to(states.dtype)) * self.scale
        return low, lora_b.to(states.dtype)

    def __call__(self, _layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """Adds scale × B A x to the output of the layer; a hook of torch."""
        parts = self.parts(inputs[0])
        return output if parts is None else output + linear(*parts)


@dataclass
class _Run:
    """A run in memory."""

    spec: LoraSpec
    shapes: dict[str, tuple[int, int]]
    """The shapes of all factors, by name, in the order of `weights`."""
    weights: Tensor
    """[N] float32, and zeros up to a multiple of the number of ranks."""
    optimizer: torch.optim.AdamW
    """Updates this rank's share of `weights`."""
    gradient: Tensor | None = None
    """Like `weights`, the sum since the last step; None for 0."""
    factors: dict[str, Tensor] = field(default_factory=dict)
    """Parts of `weights`, as leaves of autograd."""

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Returns the parts of a vector like `weights`, by name in the shapes of the factors."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = zip(self.shapes.items(), vector[: sum(sizes)].split(sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}


def _everywhere(method: _Method) -> _Method:
    """Makes a method that rank 0 calls one that every rank computes, by `RunLearner.follow`."""

    @wraps(method)
    def call(self: "RunLearner", *arguments: Any, **options: Any) -> Any:
        self._ranks.broadcast((method.__name__, arguments, options))
        return method(self, *arguments, **options)

    return cast(_Method, call)


class RunLearner:
    """All runs on one base model. Every rank has one; those above 0 `follow`.

    The operations of a run are deterministic: the same ones in the same order give the same bits,
    whatever other runs do in between. One that raises InvalidInput changes nothing.

    It must be used by one thread at a time, inside `reproducible_numbers`. `config` says which base
    (`model`), on which device and in which passes (`trainer`), how it is sharded (`parallel`), the
    scale of adapters (`lora.alpha`) and their highest rank (`lora.rank`; 0: any).

    Raises ConfigError as `load_scorer` does. A collective.
    """

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self._config = fitted(config, ranks, config.model.name)
        self._ranks = ranks
        low_precision = computes_in_bfloat16(config.model, ranks)
        self._dtype = torch.bfloat16 if low_precision else torch.float32
        self.scorer = load_scorer(
            config.model,
            ranks,
            self._config,
            added=_Frozen(self._dtype),
            max_tokens=config.rollout.context_bound,
        )
        # Nothing is dropped: a pass with gradients computes what one without them does.
        self.scorer.eval()
        self.model = self.scorer.model
        self.vocabulary = int(self.model.get_input_embeddings().num_embeddings)
        text = self.model.config.get_text_config()
        self.longest: int | None = getattr(text, "max_position_embeddings", None)
        self._places = _places(self.model, self._config)
        modules = dict(self.model.named_modules())
        for place in self._places:
            if place.kind == "unembed":  # which the scorer computes by itself
                self.scorer.adapt_head = place.parts
            else:
                modules[place.name].register_forward_hook(place)
        self._runs: dict[str, _Run] = {}

    @_everywhere
    def create(self, run: str, spec: LoraSpec) -> None:
        """Adds a run, whose adapter has no effect yet."""
        hidden = int(self.model.config.get_text_config().hidden_size)
        # SGLang reserves memory for adapters of this rank.
        highest = min(hidden, self._config.lora.rank or hidden)
        if spec.rank > highest:
            raise InvalidInput(
                f"a rank is 1 to {highest} here",
                field="lora_config.rank",
                value=spec.rank,
                remedy="use a lower one, or start the server with a higher lora.rank",
            )
        shapes = self._shapes(spec)
        if not shapes:
            raise InvalidInput(
                "the base model has no layers of the kinds that are to be trained",
                field="lora_config",
                value=spec,
                remedy="set train_attn, train_mlp or train_unembed",
            )
        first = [first_factor(spec.seed or 0, name, shape) for name, shape in shapes.items()]
        self._add(run, spec, shapes, torch.cat([factor.flatten() for factor in first]))

    @_everywhere
    def optim_step(self, run: str, adam: AdamParams) -> dict[str, float]:
        """Applies the run's gradients, which are 0 afterwards; returns the norm of the gradient
        before clipping.
        """
        known = self._runs[run]
        gradient = known.gradient
        if gradient is None:  # momentum and weight decay still apply
            gradient = torch.zeros_like(known.weights)
        norm = torch.linalg.vector_norm(gradient)
        if adam.grad_clip_norm > 0:
            gradient.mul_(torch.clamp(adam.grad_clip_norm / (norm + 1e-6), max=1.0))
        (group,) = known.optimizer.param_groups
        group.update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        (share,) = group["params"]
        share.grad = self._share(gradient)
        known.optimizer.step()
        share.grad = None
        known.gradient = None
        if self._ranks.world_size > 1:
            known.weights.copy_(self._whole(share.detach()))
        return {"grad_norm:mean": float(norm)}

    @_everywhere
    def save(self, run: str, folder: Path) -> None:
        """Writes a run, with gradients and the state of its optimiser, to a folder that does not
        exist. The folder appears when all of it is on the disk.
        """
        known = self._runs[run]
        state: dict[str, Tensor] = {}
        size = sum(math.prod(shape) for shape in known.shapes.values())
        for moments in known.optimizer.state.values():  # none before the first step
            state["step"] = moments["step"].cpu()
            for name in _MOMENTS:
                state[name] = self._whole(moments[name])[:size].cpu()
        if known.gradient is not None:
            state["gradient"] = known.gradient[:size].cpu()
        if self._ranks.is_rank_zero:
            factors = known.views(known.weights.detach().cpu())
            saved = run_files.Saved(known.spec, self._config.lora.alpha, factors, state)
            run_files.write(saved, self._adapter_config(known.spec), folder)

    def load(self, run: str, folder: Path, optimizer: bool) -> None:
        """Sets a run to what `save` wrote; creates it if it is not in memory. Without `optimizer`
        its optimiser begins anew, and gradients are 0.
        """
        self._load(run, run_files.read(folder, optimizer))

    @_everywhere
    def _load(self, run: str, saved: run_files.Saved) -> None:
        spec = self._runs[run].spec if run in self._runs else saved.spec
        shapes = self._shapes(spec)
        found = {name: tuple(factor.shape) for name, factor in saved.factors.items()}
        alpha = self._config.lora.alpha
        if shapes != found or alpha != saved.alpha:
            raise InvalidInput(
                "the run has other layers, another rank or another alpha than the saved one",
                field="path",
                value=spec,
                remedy=f"create the run with {saved.spec}, on the same base model and on a server "
                f"with lora.alpha {saved.alpha}",
            )
        flat = torch.cat([saved.factors[name].flatten() for name in shapes])
        made = self._add(run, spec, shapes, flat)
        state = saved.optimizer
        if "gradient" in state:
            made.gradient = self._padded(state["gradient"])
        if "step" in state:
            (share,) = made.optimizer.param_groups[0]["params"]
            moments = {name: self._share(self._padded(state[name])).clone() for name in _MOMENTS}
            step = state["step"].to(self._ranks.device)
            made.optimizer.state[share] = {"step": step, **moments}

    def export_adapter(self, run: str, folder: Path) -> str:
        """Writes the adapter as PEFT's files to a folder that does not exist, durably; returns the
        checksum of its weights.
        """
        known = self._runs[run]
        factors = known.views(known.weights.detach().to("cpu", self._dtype))
        return run_files.write_adapter(factors, self._adapter_config(known.spec), folder)

    @_everywhere
    def unload(self, run: str) -> None:
        """Frees the memory of a run, which is lost unless it is saved; does nothing for one that
        is not in memory.
        """
        self._runs.pop(run, None)

    def follow(self) -> None:
        """Does on another rank what rank 0 does, until it closes."""
        while True:
            command = self._ranks.broadcast(None)
            if command is None:
                return
            name, arguments, options = command
            method = getattr(type(self), name).__wrapped__
            with suppress(ServiceError):  # which rank 0 raises too
                method(self, *arguments, **options)

    def close(self) -> None:
        """Ends the other ranks' `follow`."""
        self._ranks.broadcast(None)

    def _chosen(self, spec: LoraSpec) -> list[_Place]:
        """Returns the places of a run's factors."""
        return [place for place in self._places if getattr(spec, f"train_{place.kind}")]

    def _shapes(self, spec: LoraSpec) -> dict[str, tuple[int, int]]:
        shapes: dict[str, tuple[int, int]] = {}
        for place in self._chosen(spec):
            shapes |= place.shapes(spec.rank)
        return shapes

    def _adapter_config(self, spec: LoraSpec) -> str:
        """Returns the text of PEFT's `adapter_config.json`."""
        layers: dict[str, list[str]] = {}
        for place in self._chosen(spec):
            layers.setdefault(place.name.rpartition(".")[2], []).append(place.name)
        described = describe_adapter(
            self._config.model.name,
            self.model,
            dict(sorted(layers.items())),
            rank=spec.rank,
            alpha=self._config.lora.alpha,
        )
        return adapter_config(self.model, described)

    def _add(
        self, run: str, spec: LoraSpec, shapes: dict[str, tuple[int, int]], first: Tensor
    ) -> _Run:
        weights = self._padded(first)
        share = nn.Parameter(self._share(weights))
        # The values of every step are those of its request.
        optimizer = torch.optim.AdamW([share], fused=True)
        made = _Run(spec, shapes, weights, optimizer)
        made.factors = made.views(weights.detach())
        for factor in made.factors.values():
            factor.requires_grad_()
        self._runs[run] = made
        return made

    def _padded(self, vector: Tensor) -> Tensor:
        """Returns a vector on this device, with zeros up to a multiple of the number of ranks."""
        lacking = -len(vector) % self._ranks.world_size
        return nn.functional.pad(vector, (0, lacking)).to(self._ranks.device, torch.float32)

    def _share(self, vector: Tensor) -> Tensor:
        """Returns this rank's part of a padded vector."""
        return vector.view(self._ranks.world_size, -1)[self._ranks.rank]

    def _whole(self, share: Tensor) -> Tensor:
        """Returns the vector of the shares of all ranks. A collective."""
        if self._ranks.world_size == 1:
            return share
        whole = share.new_empty(self._ranks.world_size * len(share))
        dist.all_gather_into_tensor(whole, share.contiguous())
        return whole

    @contextmanager
    def _in_place(self, run: _Run, gradient: Tensor | None) -> Iterator[None]:
        """Inside this context the base has the adapter of a run, whose gradient is added to
        `gradient`.
        """
        for name, part in run.views(gradient).items() if gradient is not None else ():
            run.factors[name].grad = part
        chosen = self._chosen(run.spec)
        for place in chosen:
            lora_a, lora_b = place.shapes(run.spec.rank)
            place.factors = (run.factors[lora_a], run.factors[lora_b])
            place.scale = self._config.lora.alpha / run.spec.rank
        try:
            yield
        finally:
            for place in chosen:
                place.factors = None
            for factor in run.factors.values():
                factor.grad = None

    @_everywhere
    def _pass(
        self,
        run: str,
        data: Sequence[Datum],
        loss: str,
        config: Mapping[str, float | str],
        *,
        backward: bool,
    ) -> Outputs:
        """Computes a loss, and adds its gradient to the run's if it is `backward`. Raises
        InvalidInput, on all ranks, also if one of the two is not finite.
        """
        known = self._runs[run]
        chosen, settings = checked_loss(loss, config, self._config.tinker.stable_reinforce)
        check_data(data, chosen, vocabulary=self.vocabulary, longest=self.longest)
        gradient = torch.zeros_like(known.weights) if backward else None
        loss_sum = torch.zeros(1, dtype=torch.float64, device=self._ranks.device)
        with self._in_place(known, gradient), torch.set_grad_enabled(backward):
            own = self._passes(data, chosen, settings, loss_sum)
        # A pass without gradients keeps the weights of the base gathered.
        reshard(self.scorer)

        self._ranks.sum_shares(loss_sum)
        finite = bool(loss_sum.isfinite())
        if gradient is not None:
            self._ranks.sum(gradient)
            finite = finite and bool(gradient.isfinite().all())
        found: dict[int, Array] = {}
        for part in self._ranks.collect(own):
            found |= part
        if not finite:
            bad = [number for number, logprobs in found.items() if not np.isfinite(logprobs).all()]
            place = min(bad, default=None)
            raise InvalidInput(
                "the loss or its gradient is not finite: nothing was added to the gradient of the "
                "run",
                field="data" if place is None else f"data[{place}]",
                value="not finite",
                remedy="look for log-probabilities of the sampler that are far below those of the "
                "run"
                if place is None
                else "load an earlier checkpoint and lower the learning rate",
            )

        if gradient is not None and known.gradient is not None:
            known.gradient += gradient
        elif gradient is not None:
            known.gradient = gradient
        logprobs = [found[number] for number in sorted(found)]
        return Outputs(logprobs, {"loss:sum": float(loss_sum)})

    forward = partialmethod(_pass, backward=False)
    forward_backward = partialmethod(_pass, backward=True)

    def _passes(
        self,
        data: Sequence[Datum],
        loss: Loss,
        settings: Mapping[str, float],
        loss_sum: Tensor,
    ) -> dict[int, Array]:
        """Computes this rank's data, with their gradients if these are enabled, and adds their loss
        to `loss_sum` [1]; returns the log-probabilities of each, in the shape of its targets.
        """
        lengths = np.array([len(datum.tokens) for datum in data])
        sizes = Sizes(
            prompts=np.ones_like(lengths),
            completions=lengths,
            groups=np.arange(len(data)),
            shared=self.scorer.layout.shared,
        )
        found: dict[int, Array] = {}
        passes = micro_batch_passes(
            self.scorer,
            self._ranks,
            sizes,
            rows=np.arange(len(data)),
            settings=self._config.trainer,
        )
        for indices, are_own in passes:
            own = [data[index] for index in indices.tolist()]
            logprobs = self._logprobs(own)
            terms = terms_of(own, loss, settings, self._ranks.device)
            losses = loss(logprobs, terms)
            if torch.is_grad_enabled():
                # A pass that only keeps the ranks in step adds nothing.
                (losses.sum() * are_own).backward()
            if not are_own:
                continue
            loss_sum += losses.detach().sum(dtype=torch.float64)
            shapes = [datum.inputs[TARGETS].shape for datum in own]
            numbers = logprobs.detach().float().cpu().numpy()
            rows = split(numbers, [math.prod(shape) for shape in shapes])
            for index, row, shape in zip(indices.tolist(), rows, shapes, strict=True):
                found[index] = row.reshape(shape)
        return found

    def _logprobs(self, data: Sequence[Datum]) -> Tensor:
        """Returns the log-probabilities of all targets, datum by datum."""
        # Every token predicts a target, whatever its successor is: the last token of what the
        # layout takes for a completion is not read.
        tokens = [np.asarray(datum.tokens, np.int32) for datum in data]
        rows = self.scorer.layout.of(
            [row[:1] for row in tokens], [np.append(row[1:], row[:1]) for row in tokens]
        )
        targets = [datum.inputs[TARGETS] for datum in data]
        repeats = [np.full(len(each), each[0].size) for each in targets]
        rows.repeat(np.concatenate(repeats))
        flat = torch.from_numpy(np.concatenate([each.reshape(-1) for each in targets]))
        device = self._ranks.device
        scored: Tensor = self.scorer(moved(rows, device), moved(flat.long(), device), 1.0).logprobs
        return scored


def _places(model: Any, config: Config) -> list[_Place]:
    """Returns the places of factors beside all layers of a model that can have an adapter, in the
    order of the model.
    """
    modules = dict(model.named_modules())
    head = head_name(model)
    layers = adaptable_layers(model) | {head: [head]}
    if config.rollout.engine == "sglang":
        left_out = without_adapters(layers)
        layers = {last: names for last, names in layers.items() if last not in left_out}
        if left_out:
            log.warning("no run trains %s: SGLang has no adapters for them", ", ".join(left_out))

    names = {name for named in layers.values() for name in named}
    placed = placing(model)
    found: list[_Place] = []
    for name, module in modules.items():
        if name not in names:
            continue
        *path, last = name.lower().split(".")
        in_mlp = any(part in step for step in path for part in _MLP)
        kind = "mlp" if in_mlp or last in _MLP_LAYERS else "attn"
        found.append(
            _Place(
                name=name,
                file_name=ADAPTER_PREFIX + placed(name),
                kind="unembed" if name == head else kind,
                sizes=(module.in_features, module.out_features),
            )
        )
    return found
