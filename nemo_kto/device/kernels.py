"""Optional fast GPU kernels: detection, checks, slow paths where they are missing, and kernels that torch.compile fuses."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.device.environment import MAX_CONNECTIONS

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_CLOSE = 0.03  # relative to the norm of the values or of a gradient; bf16 has 8 bits
# the pack: a sequence over several chunks, an answer to it, and a sequence that begins within a chunk
_LENGTHS, _PROMPTS = (150, 20, 170), (None, 0, None)
_GROUPS = 2
_ON_HOST = torch.device("cpu")  # where tensors are created by default, unless a model is built without values ("meta")

Form = Callable[..., Tensor]
"""A function of a pack's inputs, ``lengths`` and ``prompts`` (see ``layers/packing.py``) that returns its outputs."""


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Return whether layers of this dtype are Transformer Engine's; never in fp32, whose products would be in TF32."""
    return bool(gpt_layer_specs.HAVE_TE) and device.on_gpu() and dtype != torch.float32


def fused_rope() -> bool:
    """Return whether Transformer Engine's fused rotary embedding is available, for layers of any kind."""
    return device.on_gpu() and rope_utils.fused_apply_rotary_pos_emb is not None


def has_expert_kernel(name: str) -> bool:
    """Return whether megatron-core has found a kernel of Transformer Engine for experts.

    "unpermute" is in version 2.1 or newer, together with the others that sort tokens by expert and back;
    "topk_with_score_function", a router in one kernel, in 2.7 or newer.
    """
    return device.on_gpu() and getattr(moe_utils, f"fused_{name}", None) is not None


def compiles() -> bool:
    """Return whether torch can compile fused kernels; otherwise compilation is disabled for all libraries."""
    return device.on_gpu() and not device.missing_for_compiling()


def adds_products(dtype: torch.dtype) -> bool:
    """Return whether the weight gradients of megatron-core's own linear layers can be added to main_grad in their product.

    apex has a kernel for it. ``device.patches`` replaces a missing one by torch's product, which can add fp32 matrices to an
    fp32 sum, and on some GPUs bf16 matrices.
    """
    if not device.on_gpu():
        return dtype == torch.float32
    return bool(layers._grad_accum_fusion_available) or dtype == torch.float32 or adds_wide_products()


@functools.cache
def adds_wide_products() -> bool:
    """Return whether torch can add a product of bf16 matrices to an fp32 sum in place, on this GPU."""
    if not device.on_gpu():
        return False
    # ``torch.addmm`` with ``out_dtype`` accepts an fp32 sum since torch 2.11 (aten/src/ATen/native/cuda/Blas.cpp). Builds in
    # NVIDIA's images are between releases, so the call is tried once instead of comparing versions.
    total = torch.zeros(8, 8, device=device.current_device())
    factor = total.bfloat16()
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)
    except RuntimeError:
        return False
    return True


@functools.cache
def varlen_attention(dtype: torch.dtype) -> Callable[..., Any] | None:
    """Return torch's flash attention for sequences of different lengths, in half precision on GPUs; None if unavailable.

    torch has it since 2.10, and with sliding windows since 2.11. Its kernel takes grouped heads; 2.11 passes them on without
    a check, and later releases want ``enable_gqa``. GPUs before Ampere, without bf16, have no such kernel.
    """
    if not device.on_gpu() or dtype not in (torch.bfloat16, torch.float16) or not device.gpu_has_bf16():
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    options = inspect.signature(varlen_attn).parameters
    if "window_size" not in options:
        return None
    return functools.partial(varlen_attn, enable_gqa=True) if "enable_gqa" in options else varlen_attn


@functools.cache
def delta_rule_kernel(dtype: torch.dtype) -> Callable[..., Any] | None:
    """Return fla's kernel of the gated delta rule, in bf16 on GPUs; None if unavailable."""
    return _kernel(dtype, "fla.ops.gated_delta_rule", "chunk_gated_delta_rule")


@functools.cache
def scan_kernel(dtype: torch.dtype) -> Callable[..., Any] | None:
    """Return mamba_ssm's kernel of the scan of Mamba-2, in bf16 on GPUs; None if unavailable.

    It must not be ``mamba_split_conv1d_scan_combined``, which also multiplies by the weight of the output projection: that
    projection's adapters would have no effect and get no gradient.
    """
    return _kernel(dtype, "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")


def _kernel(dtype: torch.dtype, module: str, name: str) -> Callable[..., Any] | None:
    """Return a function of a library of kernels, in bf16 on GPUs; None if unavailable, with a warning if it is broken."""
    if not device.on_gpu() or dtype != torch.bfloat16:
        return None
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    except Exception as error:  # Triton raises errors of several types where it does not fit torch or the driver
        if getattr(error, "name", None) != module.partition(".")[0]:  # not absent
            reason = next(iter(str(error).strip().splitlines()), "")
            logger.warning("%s cannot be imported (%s: %s); reinstall it", module, type(error).__name__, reason)
        return None


def slow_paths(
    dtype: torch.dtype,
    *,
    tensor_parallel: int,
    reduce_in_fp32: bool = True,  # gradients are summed in fp32, not in the dtype of the weights
    unsupported_by_te: Sequence[str] = (),  # features of the model that Transformer Engine's layers do not support
    delta_nets: bool = False,  # the model has some
    mamba: bool = False,  # the model has layers with Mamba-2
    share_prompts: bool = False,
    large_heads: int = 0,  # their size, if sequences are packed and no kernel attends to packs of such heads
    environment: Mapping[str, str] = os.environ,
) -> list[str]:
    """Return one line for each fast path that a run on this GPU cannot use, with its remedy; empty on the CPU."""
    if not device.on_gpu():
        return []
    found, te_layers = [], uses_transformer_engine(dtype) and not unsupported_by_te
    if dtype == torch.float32:
        found.append("fp32: no tensor cores; trainer.precision=bf16 is many times faster")
    elif unsupported_by_te:
        found.append(f"layers without Transformer Engine, which does not support {' and '.join(unsupported_by_te)}")
    elif not te_layers:
        found.append("layers without Transformer Engine; install transformer-engine[pytorch]")
    if not te_layers and reduce_in_fp32 and not adds_products(dtype):
        found.append(
            "no fused accumulation of the gradients of linear layers; install torch 2.11, or apex with its extensions"
        )
    if delta_nets and dtype != torch.float32 and delta_rule_kernel(dtype) is None:
        found.append("gated delta nets without fla's kernel; install flash-linear-attention")
    if mamba and dtype != torch.float32 and scan_kernel(dtype) is None:
        found.append("Mamba-2 without mamba_ssm's kernel; install mamba-ssm")
    if large_heads and dtype != torch.float32:
        found.append(
            f"packs: attention is computed sequence by sequence, because no kernel takes heads of {large_heads} values"
        )
    elif share_prompts and dtype != torch.float32 and varlen_attention(dtype) is None:
        found.append("shared prompts: attention is computed answer by answer; install torch 2.11")
    if not compiles():
        missing = " and ".join(device.missing_for_compiling())
        not_fused = ["activations", "log-probs", *["the rotary embedding"] * (not fused_rope())]
        names = f"{', '.join(not_fused[:-1])} and {not_fused[-1]}"
        found.append(f"torch.compile disabled, so that {names} are not fused; install {missing}")
    if tensor_parallel > 1 and environment.get(MAX_CONNECTIONS) != "1" and device.compute_capability() < (10, 0):
        found.append(f"tensor-parallel communication does not overlap; unset {MAX_CONNECTIONS} or set it to 1")
    return found


class FusedKernel(Generic[Arguments, Result]):
    """Elementwise operations and reductions that torch.compile fuses; two forms with the same result up to rounding.

    The compiled form runs where ``compiles()`` is true. It is compiled when it is first called, for all sizes. If
    this fails, a warning names the error, and this process uses the eager form from then on.
    """

    def __init__(self, *, compiled: Callable[Arguments, Result], eager: Callable[Arguments, Result]) -> None:
        """Pair two forms.

        Args:
            compiled: writes to none of its arguments; in eager mode each of its operations would write a tensor of its own.
            eager: may overwrite its arguments in order to save memory, so the caller must not use them afterwards.
        """
        self.eager = eager
        self.fusable = compiled
        self._compiled: Callable[Arguments, Result] | None = None
        self._failed = False

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if self._failed or not compiles():
            return self.eager(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self.fusable, dynamic=True, fullgraph=True)
        try:
            return self._compiled(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # dynamo, inductor, Triton and the C compiler raise errors of different types
            self._failed = True
            reason = next(iter(str(error).strip().splitlines()), "")
            logger.warning(
                "torch.compile failed for %s (%s: %s); it runs without fused kernels, which is slower",
                getattr(self.fusable, "__name__", "a kernel"),
                type(error).__name__,
                reason,
            )
            return self.eager(*args, **kwargs)


def draw_inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Return standard normal values of the pack for :func:`agreeing`, on the host, [t, g, *shape] for each shape."""
    draw = torch.Generator().manual_seed(0)
    with _ON_HOST:
        return [torch.randn(sum(_LENGTHS), _GROUPS, *shape, generator=draw) for shape in shapes]


def agreeing(kernel: Form, own: Form, *, name: str, inputs: Sequence[Tensor], own_name: str = "torch's operations") -> Form:
    """Return ``kernel`` if its values and gradients agree with those of ``own``, else ``own``, with a warning that says why.

    Args:
        name, own_name: of the forms, for the warning; the second is a plural.
        inputs: values from :func:`draw_inputs`, in the dtypes that the model passes.
    """
    try:
        difference = _difference(kernel, own, inputs)
        if difference < _CLOSE:
            return kernel
        got = f"results that differ by {difference:.2g} of their norm"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton and the C compiler raise errors of different types
        got = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    logger.warning("%s must agree with %s, got %s; %s are used, which are slower", name, own_name, got, own_name)
    return own


def _difference(kernel: Form, own: Form, inputs: Sequence[Tensor]) -> float:
    """Return how much outputs and gradients of the pack differ, at most, relative to their norms."""

    def results(form: Form) -> list[Tensor]:
        leaves = [each.requires_grad_() for each in device.upload([each.detach() for each in inputs])]
        output = form(*leaves, lengths=_LENGTHS, prompts=_PROMPTS).float()
        (weight,) = device.upload([torch.randn(output.shape, generator=torch.Generator().manual_seed(1))])
        return [each.detach().float() for each in (output, *torch.autograd.grad((output * weight).sum(), leaves))]

    with torch.enable_grad(), _ON_HOST:
        pairs = zip(results(kernel), results(own), strict=True)
    # a maximum of tensors, because that of floats overlooks NaN
    return float(torch.stack([(found - expected).norm() / expected.norm() for found, expected in pairs]).max())
