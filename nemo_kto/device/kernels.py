"""Which fast kernels this rank's GPU can use, and what is slow without them. The CPU has none, and misses none."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core import optimizer
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import layers

from nemo_kto.device import device, imports

MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """True where layers of this type are Transformer Engine's: it is installed and there is a GPU.

    Never in fp32: its products would be those of TF32, with 10 bits of the 23.
    """
    return bool(gpt_layer_specs.HAVE_TE) and device.on_gpu() and dtype != torch.float32


def fused_rope() -> bool:
    """Whether Transformer Engine's rotary embedding is there, for whatever layers."""
    return device.on_gpu() and rope_utils.fused_apply_rotary_pos_emb is not None


def compiles() -> bool:
    """Whether torch can compile small fusions; otherwise none is compiled, whosever it is."""
    return device.on_gpu() and not imports.missing_for_compiling()


def adds_products() -> bool:
    """Whether apex's kernel is there, by which megatron-core's own linear layers add a gradient in the product itself."""
    return device.on_gpu() and bool(layers._grad_accum_fusion_available)


@functools.cache
def adds_wide_products() -> bool:
    """Whether torch can add a product of bf16 matrices to an fp32 sum in place, on this GPU.

    ``torch.addmm`` with ``out_dtype`` takes a sum in fp32 in torch 2.11 and 2.13 (aten/src/ATen/native/cuda/Blas.cpp). Older
    ones have the argument and refuse such a sum, and builds for NVIDIA's images lie between versions: it is tried, once.
    """
    if not device.on_gpu():
        return False
    total = torch.zeros(8, 8, device=device.current_device())
    factor = total.bfloat16()
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)
    except RuntimeError:
        return False
    return True


@functools.cache
def varlen_attention(dtype: torch.dtype) -> Callable[..., Any] | None:
    """torch's flash attention over sequences of unlike length, for half precision on GPUs; None where there is none.

    torch has it since 2.10, with sliding windows since 2.11, and with grouped heads (``enable_gqa``) in later releases.
    Where it lacks these, keys and values are repeated for each query head.
    """
    if not device.on_gpu() or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    options = inspect.signature(varlen_attn).parameters
    if "window_size" not in options:
        return None
    return varlen_attn if "enable_gqa" in options else functools.partial(_with_repeated_heads, varlen_attn)


def _with_repeated_heads(
    kernel: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *lengths: object,
    enable_gqa: bool,
    **options: object,
) -> Any:
    """Attention of grouped heads with a kernel that knows only as many key heads as query heads; [tokens, heads, size]."""
    if enable_gqa:
        repeats = query.size(1) // key.size(1)
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    return kernel(query, key, value, *lengths, **options)


def slow_paths(
    dtype: torch.dtype,
    *,
    tensor_parallel: int,
    not_in_engine: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> list[str]:
    """What a run on this GPU goes without, and what would change that; a line each, none on the CPU.

    ``not_in_engine`` is what the model has that Transformer Engine's layers have not.
    """
    if not device.on_gpu():
        return []
    found, engine = [], uses_transformer_engine(dtype) and not not_in_engine
    if dtype == torch.float32:
        found.append("fp32: no tensor cores; trainer.precision=bf16 is many times faster")
    elif not_in_engine:
        found.append(f"layers without Transformer Engine's kernels, which lack {' and '.join(not_in_engine)}")
    elif not engine:
        found.append("layers without Transformer Engine's kernels; install transformer-engine[pytorch]")
    if not engine and not adds_products():
        found.append("gradients of linear layers are made before they are added; install apex with its CUDA extensions")
    if not fused_rope():
        found.append("rotary embeddings in several kernels; install transformer-engine[pytorch]")
    if not compiles():
        missing = " and ".join(imports.missing_for_compiling())
        found.append(f"nothing is compiled, activations take several kernels; install {missing}")
    if optimizer.USING_PYTORCH_OPTIMIZER:
        found.append("the optimizer in several kernels; install transformer-engine[pytorch] or apex")
    if tensor_parallel > 1 and environment.get(MAX_CONNECTIONS) != "1" and device.compute_capability() < (10, 0):
        found.append(f"tensor-parallel communication does not overlap; unset {MAX_CONNECTIONS} or set it to 1")
    return found
