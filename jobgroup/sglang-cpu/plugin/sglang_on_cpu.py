"""A platform for SGLang, found by its entry point: plain torch on a CPU.

SGLang's own CPU platform calls compiled operators (`sgl_kernel`) whose wheels are built for CUDA
only. On a platform that is not its own SGLang takes every layer's implementation in torch instead,
which is all a small model needs.
"""

import functools
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuSRTPlatform  # type: ignore[import-not-found]
from sglang.srt.platforms.device_mixin import PlatformEnum  # type: ignore[import-not-found]
from torch.nn.functional import rms_norm, silu, softplus

# Declared operators vanish with the object that declared them.
_KEPT: list[torch.library.Library] = []


def activate() -> str:
    """Called by SGLang once in every process, before it imports a model; returns the name of the
    platform's class.
    """
    _make_torchvision_importable()
    if not torch.cuda.is_available():
        torch.cuda.synchronize = _nothing_to_wait_for  # `/weights_checker` calls it on every device
    _leave_memory_unpinned()
    torch.cpu.device = nullcontext  # Mamba's kernels are launched on the device of their tensors
    return f"{__name__}.TorchCpu"


class TorchCpu(CpuSRTPlatform):  # type: ignore[misc]
    """SGLang's CPU device, declared as a platform from outside; what is not overridden is off
    (graphs, pinned memory, fp8).
    """

    _enum = PlatformEnum.OOT

    def init_backend(self) -> None:
        """Leaves the widths of MLPs and experts as they are, and memory for the experts of tokens
        (`--enable-return-routed-experts`) unpinned: called once, when all of SGLang's modules are
        imported.

        On CPUs SGLang pads them to a multiple of 32 for the compiled operators that are not used
        here. The padding of experts is never written, so the model would compute with what the
        memory held before.
        """
        from sglang.srt.configs import update_config  # type: ignore[import-not-found]
        from sglang.srt.mem_cache.pool_host import common  # type: ignore[import-not-found]

        update_config.DEFAULT_MOE_PADDING_SIZE = 1
        common.ALLOC_MEMORY_FUNCS["cpu"] = common.alloc_with_pin_memory
        _compute_linear_layers()

    def get_default_attention_backend(self) -> str:
        """Scaled dot-product attention of torch."""
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        """The KV cache of SGLang itself: nothing in it needs a GPU."""
        from sglang.srt.mem_cache import memory_pool  # type: ignore[import-not-found]

        pool: type = memory_pool.MHATokenToKVPool
        return pool

    def get_paged_allocator_cls(self) -> type:
        """SGLang's allocator for pages of one token; the one for larger pages is a GPU kernel."""
        from sglang.srt.mem_cache import allocator

        _add_residuals_once()

        class TokenAllocator(allocator.TokenToKVPoolAllocator):  # type: ignore[misc]
            def __init__(self, size: int, *, page_size: int, **rest: Any) -> None:
                if page_size != 1:
                    raise ValueError(
                        f"--page-size {page_size} cannot be used on a CPU: leave it at 1"
                    )
                super().__init__(size, **rest)

        return TokenAllocator


def _compute_linear_layers() -> None:
    """Lets linear layers compute. Triton's interpreter runs SGLang's kernels of Mamba and of
    convolutions, which SGLang binds on an XPU, and on a CPU not at all. Those of a gated delta rule
    are tuned on a GPU and refuse float32: torch computes it, token by token.
    """
    from sglang.kernels.ops.attention.fla import layernorm_gated  # type: ignore[import-not-found]
    from sglang.kernels.ops.mamba import causal_conv1d_triton  # type: ignore[import-not-found]
    from sglang.srt.layers.attention.linear.kernels import (  # type: ignore[import-not-found]
        gdn_triton,
    )
    from sglang.srt.layers.attention.mamba import mamba  # type: ignore[import-not-found]

    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        kernel = getattr(causal_conv1d_triton, name)
        setattr(mamba, name, kernel)
        setattr(mamba, f"{name}_triton", kernel)
    gdn_triton.chunk_gated_delta_rule = _delta_rule
    gdn_triton.TritonGDNKernel.packed_decode = _delta_rule_step
    layernorm_gated.RMSNorm.forward = _gated_norm


@functools.cache
def _add_residuals_once() -> None:
    """Corrects SGLang's Granite 4 hybrid, whose last norm adds the input of the last layer's MLP
    again. Called when all models are imported, and before any of them runs.
    """
    from sglang.srt.models import granitemoehybrid  # type: ignore[import-not-found]

    def corrected(forward: Callable[..., Any]) -> Callable[..., Any]:
        def forwarded(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            states, _residual = forward(*arguments, **options)
            return states, torch.zeros_like(states)

        return forwarded

    for layer in granitemoehybrid.ALL_DECODER_LAYER_TYPES.values():
        layer.forward = corrected(layer.forward)


def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    """Takes the place of `chunk_gated_delta_rule` for sequences one after another: q and k [1, T,
    heads, K], v [1, T, value heads, V], g and beta [1, T, value heads], which end at `cu_seqlens`.

    Returns outputs like v; changes the states [slots, value heads, V, K] of the sequences in place.
    """
    repeats = v.shape[2] // q.shape[2]
    units = [x[0] * (x[0].square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k)]
    queries, keys = [unit.repeat_interleave(repeats, 1) for unit in units]
    queries = queries * q.shape[-1] ** -0.5
    outputs = torch.empty_like(v)
    ends = cu_seqlens.tolist()
    for slot, start, end in zip(initial_state_indices.tolist(), ends, ends[1:], strict=False):
        state = initial_state[slot]
        for t in range(start, end):
            state *= g[0, t].exp()[:, None, None]
            change = beta[0, t][:, None] * (v[0, t] - (state @ keys[t][..., None])[..., 0])
            state += change[..., None] * keys[t][:, None]
            outputs[0, t] = (state @ queries[t][..., None])[..., 0]
    return outputs, None, None


def _delta_rule_step(
    _self: object,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Takes the place of `TritonGDNKernel.packed_decode` for a token of each sequence."""
    count = len(mixed_qkv)
    _slots, value_heads, value_dim, key_dim = ssm_states.shape
    of_values = value_heads * value_dim
    of_keys = (mixed_qkv.shape[1] - of_values) // 2
    q, k, v = mixed_qkv[None].split([of_keys, of_keys, of_values], -1)
    outputs, _none, _none = _delta_rule(
        q.unflatten(-1, (-1, key_dim)),
        k.unflatten(-1, (-1, key_dim)),
        v.unflatten(-1, (value_heads, value_dim)),
        (-A_log.exp() * softplus(a + dt_bias))[None],
        beta=b.sigmoid()[None],
        initial_state=ssm_states,
        initial_state_indices=cache_indices,
        cu_seqlens=torch.arange(count + 1),
    )
    return outputs


def _gated_norm(self: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Takes the place of the forward of SGLang's RMSNorm with a gate after it."""
    return rms_norm(x, x.shape[-1:], self.weight, self.eps) * silu(z.view_as(x))


def _nothing_to_wait_for(device: object = None) -> None:
    """Does nothing: a CPU has computed its result when the call returns."""


def _make_torchvision_importable() -> None:
    """Lets modules of SGLang import torchvision, which they never use here.

    The package index has it built for CUDA only. Beside a torch without CUDA its library cannot be
    loaded, and its Python part fails at once, because it registers two operators of that library.
    They are declared here, without an implementation.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return
    library = Path(spec.submodule_search_locations[0]) / "_C.so"
    try:
        torch.ops.load_library(str(library))
    except OSError:
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(declared)


def _leave_memory_unpinned() -> None:
    """SGLang's LoRA code always asks for pinned memory, which torch refuses without an
    accelerator.
    """
    for name in ("tensor", "empty", "zeros", "ones", "arange"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*arguments: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return make(*arguments, **options)

    return made
