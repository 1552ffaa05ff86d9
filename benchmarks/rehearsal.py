"""Rehearses one update of the real policy at full size, without a GPU and without computing
anything.

torch's fake tensors have shapes, types and lifetimes but no contents, and FSDP2 shards over the
`fake` process group, which communicates with nobody. One process therefore finds the bytes and
FLOPs of one of any number of ranks in seconds. Times come from a roofline, not a measurement. Fake
CPU tensors stand in for GPU tensors, and the code takes the GPU's paths. Host and rank share one
device here, so settings that offload cannot be rehearsed; without them, the held bytes (weights,
gradients, optimiser) are what those settings would move to the host.

    .venv/bin/python -m benchmarks.rehearsal MODEL --ranks 8 --profile
    --trainer.activation_checkpointing true

MODEL is a directory with a `config.json`. Any settings of a run may follow the options.
"""

import json
import math
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula

from benchmarks.command import command_parser
from benchmarks.h100 import BANDWIDTH, PEAK, gemm_share
from benchmarks.update import GROUPS, full_groups
from common.errors import ConfigError
from common.models.memory import ModelShape, trainer_memory
from common.process.cli import fail
from common.settings.config import Config, load
from learning import attention, experts, head, loading
from learning.final_logits import FinalLogits
from learning.ranks import Ranks
from learning.sharding import local
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.policy import logprobs, scorer
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference

_BLOCK = 512
"""CUDA's allocator rounds up to a multiple of this many bytes."""
_ATTENTION = 0.35
"""The share of the peak of the arithmetic that attention reaches with FlashAttention 2."""
LAUNCH_S = 4e-6
"""Seconds to launch a kernel."""
_FREE = (
    "empty",
    "detach",
    "alias",
    "_unsafe_view",
    "_reshape_alias",
    "lift",
    "new_empty",
    "is_same_size",
)
"""Operations without a kernel that torch does not call views."""


@dataclass
class Cost:
    """The cost of some kernels."""

    calls: int = 0
    bytes: float = 0.0
    """Bytes read and written."""
    flops: float = 0.0
    seconds: float = 0.0
    """Roofline time: the slower of bandwidth and arithmetic for every call."""

    def add(
        self,
        size: float,
        flops: float = 0.0,
        launch: float = LAUNCH_S,
        times: float = 1,
        share: float = 1.0,
    ) -> None:
        """Adds a kernel that runs `times` times, takes at least `launch` seconds and reaches
        `share` of the peak.
        """
        self.calls += int(times)
        self.bytes += times * size
        self.flops += times * flops
        self.seconds += times * max(size / BANDWIDTH, flops / (share * PEAK), launch)

    def __iadd__(self, other: "Cost") -> "Cost":
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        return self


@dataclass
class Rehearsal:
    """Bytes and operations of one rank."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    reference: int = 0
    beside: int = 0
    """Other bytes kept after the update: step counters and buffers."""
    unknown: int = 0
    """Bytes kept in no other category; more than a few hundred mean a leak."""
    peak: int = 0
    """Peak of the allocated bytes, rounded as by CUDA's allocator."""
    costs: dict[tuple[str, str], Cost] = field(default_factory=lambda: defaultdict(Cost))
    """The cost by part of the update and by operation."""
    messages: dict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))
    """The number of collective operations by name."""

    @property
    def held(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference


_T = TypeVar("_T")


class _Rank(Ranks):
    """Looks to the policy like a rank with a GPU, but communicates with nobody and reads no
    files.
    """

    on_gpu = property(lambda _: True)
    device = property(lambda _: torch.device("cpu"), lambda *_: None)
    gpu_bytes = property(lambda _: None)
    is_rank_zero = property(lambda _: False)

    def broadcast(self, value: _T) -> _T:
        return value

    def all_equal(self, body: bytes) -> bool:
        return False

    def sum(self, values: Tensor) -> Tensor:
        return values

    def barrier(self) -> None: ...


def kernel_tensors(func: Any, args: Any, kwargs: Any, out: Any) -> list[Tensor]:
    """Returns the tensors that the kernel of an operation reads and writes; none without a
    kernel.
    """
    name = func._schema.name.removeprefix("aten::")
    if func.is_view or name.startswith((*_FREE, "prim::")):
        return []
    leaves = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)]
    return list({id(each): each for each in leaves}.values())


def product_share(sizes: Sequence[int], flops: float) -> float:
    """Returns the share of the peak FLOP/s that a matrix product with a result of these sizes
    reaches.
    """
    if not flops or len(sizes) < 2:
        return 1.0
    columns = sizes[-1]
    rows = math.prod(sizes[:-1])
    return gemm_share(rows, columns, terms=flops / 2 / rows / columns)


def _grouped_flops(rows: Any, weights: Any, *_: object, **__: object) -> int:
    """Returns the FLOPs of a grouped product: every row takes part in one, whatever the groups."""
    flops: int = 2 * math.prod(rows) * weights[-1]
    return flops


_GROUPED = torch.ops.aten._grouped_mm
if _GROUPED not in flop_registry:  # a later torch may count it itself
    register_flop_formula(_GROUPED)(_grouped_flops)


def kernel_flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    counter = flop_registry.get(func._overloadpacket)
    return float(counter(*args, **kwargs, out_val=out)) if counter else 0.0


def touched(tensors: Sequence[Tensor]) -> int:
    """Returns the bytes of tensors without contents."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Recorder(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed for mypy here
    """Tracks every storage from its first to its last use and, on request, every operation."""

    def __init__(self, vocabulary: int, pair_flops: float, profile: bool) -> None:
        super().__init__()
        self.found = Rehearsal()
        self.phase = ""
        """Nothing is counted in the phase ""."""
        self._vocabulary = vocabulary
        self._pair_flops = pair_flops
        self._profile = profile
        self._live: dict[int, tuple[int, int]] = {}
        """Bytes of the existing storages, exact and rounded."""
        self._now = 0

    @property
    def exact(self) -> int:
        """Returns the bytes of all existing tensors."""
        return sum(size for size, _ in self._live.values())

    def start(self) -> None:
        """Starts counting from the current storages."""
        self.phase = "layers"
        self.found.peak = self._now

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # the most frequent call of all
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # a loss or a norm: any number will do
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        if self._profile and self.phase:
            self._count(func, args, kwargs or {}, out)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = (
            tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        ).untyped_storage()
        if storage._cdata not in self._live and tensor.device.type != "meta":
            self._live[storage._cdata] = 0, 0
            self._resize(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._drop, storage._cdata)

    def resized(self, storage: Any) -> None:
        """Records a resized storage: FSDP2 frees and allocates gathered weights this way."""
        if storage._cdata in self._live:
            self._resize(storage._cdata, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        rounded = -(-size // _BLOCK) * _BLOCK
        self._now += rounded - self._live[key][1]
        self._live[key] = size, rounded
        self.found.peak = max(self.found.peak, self._now)

    def _drop(self, key: int) -> None:
        self._now -= self._live.pop(key)[1]

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        tensors = kernel_tensors(func, args, kwargs, out)
        if not tensors:
            return
        size = touched(tensors)
        if name.startswith(("c10d::", "_c10d_functional::")):
            self.found.messages[name.partition("::")[2]].add(size)
            return
        backward = torch._C._current_graph_task_id() != -1
        flops = kernel_flops(func, args, kwargs, out)
        if "_varlen_attn" in name:
            flops = self._pair_flops * (2.5 if "backward" in name else 1)
        at_head = self.phase == "layers" and any(
            self._vocabulary in tensor.shape for tensor in tensors
        )
        largest = max(tensors, key=torch.Tensor.numel)
        if name in ("embedding", "gather", "scatter_add_"):  # these touch single rows of the matrix
            size = 2 * touched([each for each in tensors if each.shape != largest.shape])
        phase = f"{'head' if at_head else self.phase}, {'backward' if backward else 'forward'}"
        share = product_share(out.shape, flops) if isinstance(out, Tensor) else _ATTENTION
        part = self.phase if self.phase == "optimiser" else phase
        self.found.costs[part, name].add(size, flops, share=share)


def rehearse(config: Config, ranks: int, profile: bool = False) -> Rehearsal:
    """Rehearses an update of two full micro-batches on one of `ranks` GPUs, after a first update.

    `config.model.name` is a directory with a `config.json`. Raises ConfigError for settings that
    cannot be rehearsed.
    """
    parallel = config.parallel
    for name in ("offload_optimizer", "offload_reference"):
        value = getattr(parallel, name)
        if value:
            raise ConfigError(
                "offloading cannot be rehearsed",
                field=f"parallel.{name}",
                value=value,
                remedy="leave it out, and subtract what is held",
            )
    if parallel.expert_size not in (1, parallel.shard_size or ranks):
        raise ConfigError(
            "experts that each of several ranks holds a part of cannot be rehearsed",
            field="parallel.expert_size",
            value=parallel.expert_size,
            remedy=f"use {parallel.shard_size or ranks}, the ranks of a copy of the model, or 1",
        )
    shape = json.loads((Path(config.model.name) / "config.json").read_text())
    batch, pairs = _batch(config, ranks)
    width = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    recorder = _Recorder(
        shape["vocab_size"], 4.0 * pairs * shape["num_attention_heads"] * width, profile
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh_of = _Rank(
            0,
            ranks,
            shard_size=parallel.shard_size,
            context_size=parallel.context_size,
            expert_size=parallel.expert_size,
        )
        mesh_of.mesh()  # the meshes need real tensors
        mesh_of.mesh(of_experts=True)
        mesh_of.context()
        routing = _even_routing(shape.get("num_experts_per_tok", 0))
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        with _gpu_paths(recorder), routing, fakes, recorder:
            policy = Policy(config, mesh_of)
            reference = Reference(policy)
            keys = ("exp_avg", "exp_avg_sq", "step")
            names = [f"{name}.{key}" for name in policy.optimizer._named for key in keys]
            policy.optimizer.load_state_dict(policy.optimizer.empty_state(names))
            recorder.start()
            with patch.object(
                policy.optimizer, "step", _within(recorder, "optimiser", policy.optimizer.step)
            ):
                policy.update(batch)
                policy.step += 1
            recorder.phase = ""
            _sort(recorder, policy, reference)
    finally:
        dist.destroy_process_group()
    return recorder.found


def _sort(recorder: _Recorder, policy: Policy, reference: Reference) -> None:
    """Counts the held bytes by kind."""
    found = recorder.found
    parameters = list(policy.model.parameters())
    state = policy.optimizer.state_dict().values()
    found.weights = _bytes(parameters)
    found.gradients = _bytes([each.grad for each in parameters if each.grad is not None])
    found.optimizer = _bytes([tensor for tensor in state if tensor.ndim])
    buffers = list(policy.model.buffers())
    if reference.scorer is not None and reference.scorer.model is not policy.model:
        found.reference = _bytes(list(reference.scorer.model.parameters()))
        buffers += reference.scorer.model.buffers()
    counters = [tensor for tensor in state if not tensor.ndim]
    found.beside = _bytes([*counters, *buffers])
    found.unknown = recorder.exact - found.held - found.beside


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def _within(recorder: _Recorder, phase: str, work: Any) -> Any:
    def run(*arguments: Any) -> Any:
        before = recorder.phase
        recorder.phase = phase
        try:
            return work(*arguments)
        finally:
            recorder.phase = before

    return run


@contextmanager
def _gpu_paths(recorder: _Recorder) -> Iterator[None]:
    """Makes fake CPU tensors take the GPU's code paths, which never look at contents, and reports
    resized storages.
    """
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        recorder.resized(storage)
        return result

    concatenate = DeviceMesh._concatenate

    def real_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():  # a rank finds its place in the contents of a mesh
            return concatenate(meshes)

    def product(left: Tensor, right: Tensor) -> Tensor:
        if left.dtype == torch.float32:
            return torch.mm(left, right)
        return torch.mm(left, right, out_dtype=torch.float32)

    with (
        patch.object(attention, "_has_kernel", lambda _: True),
        patch.object(logprobs, "_CPU_CHUNK", sys.maxsize),
        patch.object(logprobs, "_kernels", lambda _: _Kernels),
        patch.object(logprobs, "float32_product", product),
        patch.object(head, "float32_product", product),
        patch.object(loading, "read_weights", lambda *_: None),
        patch.object(scorer, "final_logits", lambda _: FinalLogits()),
        patch.object(scorer, "check_batch_independence", lambda *_, **__: set()),
        patch.object(torch.UntypedStorage, "resize_", resized),
        patch.object(DeviceMesh, "_concatenate", real_mesh),
    ):
        yield


def _even_routing(chosen: int) -> AbstractContextManager[Any]:
    """Returns a context in which every expert gets equally many of the tokens, of which each
    chooses `chosen`: fake numbers of experts say nothing.
    """

    def numbers(_: Any, choices: Tensor) -> tuple[list[int], list[int], int]:
        tokens, ranks = choices.shape
        visits = round(tokens * (1 - (1 - 1 / ranks) ** chosen))
        return [visits] * ranks, [visits] * ranks, tokens * chosen

    return patch.object(experts._DividedExperts, "_numbers", numbers)


class _Kernels:
    """The interface of `trainer/policy/fused_head.py`, whose kernels allocate nothing."""

    @staticmethod
    def statistics(*_: object, **__: object) -> None: ...

    @staticmethod
    def gradient(*_: object, **__: object) -> None: ...


def _batch(config: Config, ranks: int) -> tuple[Batch, int]:
    """Returns a batch of full micro-batches for every rank, and the number of attending token pairs
    per micro-batch.
    """
    groups = full_groups(config, ranks)
    batch = Batch.of([TrainingGroup(group) for group in groups], config)
    ones = [np.ones(row.completion_tokens, np.float32) for row in batch.rows]
    batch.advantages = batch.old_logprobs = batch.ref_logprobs = ones
    prompt = len(groups[0].prompt_token_ids)
    pairs = prompt**2 // 2
    for completion in groups[0].completions:
        length = len(completion.token_ids) - 1
        pairs += length * prompt + length**2 // 2
    return batch, GROUPS * pairs


def main() -> None:
    parser = command_parser("benchmarks.rehearsal", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a directory with a config.json")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="GPUs of the trainer (default 1)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="bytes, FLOPs and roofline milliseconds by operation"
    )
    options, words = parser.parse_known_args()
    try:
        config = load(
            ["--model.name", str(options.model), "--optimizer.warmup_steps", "0", *words], {}
        )
        shape = ModelShape.of(json.loads((options.model / "config.json").read_text()))
        estimate = trainer_memory(shape, config, options.ranks)
        found = rehearse(config, options.ranks, options.profile)
    except (ConfigError, OSError) as error:
        fail(
            error
            if isinstance(error, ConfigError)
            else ConfigError(str(error), field="MODEL", value=str(options.model))
        )
    table = Table("GB on a GPU", "rehearsed", "estimated")
    for name in ("weights", "gradients", "optimizer", "reference", "held"):
        table.add_row(
            name, f"{getattr(found, name) / 1e9:.3f}", f"{getattr(estimate, name) / 1e9:.3f}"
        )
    table.add_row(
        "peak, without CUDA's own",
        f"{found.peak / 1e9:.3f}",
        f"{(estimate.total - estimate.overhead) / 1e9:.3f}",
    )
    Console().print(table)
    if options.profile:
        _print_profile(found)


def _print_profile(found: Rehearsal) -> None:
    table = Table("part", "operation", "calls", "GB", "TFLOP", "ms by roofline")
    parts: dict[str, Cost] = defaultdict(Cost)
    for (part, _), cost in found.costs.items():
        parts[part] += cost
        parts["update"] += cost
    rows = [((part, "all"), cost) for part, cost in parts.items()]
    rows += sorted(found.costs.items(), key=lambda item: -item[1].seconds)[:40]
    rows += [(("messages", name), cost) for name, cost in found.messages.items()]
    for (part, name), cost in rows:
        time = "" if part == "messages" else f"{cost.seconds * 1e3:.2f}"
        table.add_row(
            part,
            name,
            f"{cost.calls:,}",
            f"{cost.bytes / 1e9:.2f}",
            f"{cost.flops / 1e12:.2f}",
            time,
        )
    Console().print(table)


if __name__ == "__main__":
    main()
