"""Selection of kernels on a GPU and warnings about missing ones; the tests need no GPU."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers
from megatron.core.utils import local_multi_tensor_applier, local_multi_tensor_l2_norm

from nemo_kto.device import device, kernels, patches
from nemo_kto.distributed import gradients
from tests.distributed.training.test_no_waiting import Asked
from tests.helpers.messages import Message

BF16, FP32 = torch.bfloat16, torch.float32
RICH = {"te": True, "apex": True, "wide": True, "triton": True, "compiler": True, "headers": True}


def gpu(
    patch: pytest.MonkeyPatch,
    *,
    te: bool,
    apex: bool,
    wide: bool,
    triton: bool,
    compiler: bool,
    headers: bool,
    hopper: bool = True,
) -> None:
    """A machine with a GPU and these packages; ``wide``: its torch adds products of bf16 matrices to fp32 sums."""
    patch.setattr(device, "on_gpu", lambda: True)
    patch.setattr(device, "compute_capability", lambda: (9, 0) if hopper else (10, 0))
    patch.setattr(gpt_layer_specs, "HAVE_TE", te)
    patch.setattr(rope_utils, "fused_apply_rotary_pos_emb", print if te else None)
    patch.setattr(layers, "_grad_accum_fusion_available", apex)
    patch.setattr(kernels, "adds_wide_products", lambda: wide)
    has = {"triton": triton, "gcc": compiler, "Python.h": headers}
    patch.setattr(device, "missing_for_compiling", lambda: [name for name, found in has.items() if not found])


def test_a_cpu_has_no_kernels_and_reports_none_missing() -> None:
    assert kernels.slow_paths(FP32, tensor_parallel=2) == []
    assert [kernels.uses_transformer_engine(BF16), kernels.fused_rope()] == [False, False]
    assert [kernels.compiles(), kernels.adds_products(BF16), kernels.adds_products(FP32)] == [False, False, True]


NO_ENGINE = Message("layers", "transformer-engine[pytorch]")
NO_ADDING = Message("gradients", "torch 2.11", "apex")
NO_ROPE = Message("compile", "activations", "log-probs", "rotary", "gcc")
NO_GCC = Message("compile", "activations", "gcc")
NO_HEADERS = Message("compile", "activations", "triton", "Python.h")
NO_OVERLAP = Message("CUDA_DEVICE_MAX_CONNECTIONS", "1")
SLOW_TYPE = Message("fp32", "trainer.precision=bf16")


@pytest.mark.parametrize(
    ("machine", "dtype", "tensor_parallel", "connections", "expected"),
    [
        (RICH, BF16, 2, "1", []),
        (RICH, FP32, 1, "1", [SLOW_TYPE]),
        ({**RICH, "apex": False}, BF16, 1, "1", []),  # Transformer Engine's layers need no apex
        ({**RICH, "te": False}, BF16, 1, "1", [NO_ENGINE]),
        ({**RICH, "te": False, "apex": False, "wide": False}, BF16, 1, "1", [NO_ENGINE, NO_ADDING]),
        ({**RICH, "te": False, "compiler": False}, BF16, 1, "1", [NO_ENGINE, NO_ROPE]),
        ({**RICH, "compiler": False}, BF16, 1, "1", [NO_GCC]),
        ({**RICH, "triton": False, "headers": False}, BF16, 1, "1", [NO_HEADERS]),
        (RICH, BF16, 2, "32", [NO_OVERLAP]),
        ({**RICH, "hopper": False}, BF16, 2, "32", []),
    ],
)
def test_each_slow_path_is_reported(
    machine: dict[str, Any],
    dtype: torch.dtype,
    tensor_parallel: int,
    connections: str,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu(monkeypatch, **machine)
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    assert kernels.uses_transformer_engine(dtype) is (machine["te"] and dtype == BF16), "its products in fp32 are in TF32"
    assert kernels.slow_paths(dtype, tensor_parallel=tensor_parallel, environment=environment) == expected


@pytest.mark.parametrize("has_bf16", [False, True])
def test_torch_attends_to_packs_on_gpus_with_bf16_instructions(has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(device, "gpu_has_bf16", lambda: has_bf16)
    released: Any = lambda query, *, window_size=(-1, -1): query  # noqa: E731
    for call, expected in ((released, released), (lambda query: query, None)):  # torch 2.11; 2.10, without windows
        monkeypatch.setattr(varlen, "varlen_attn", call)
        kernels.varlen_attention.cache_clear()
        assert kernels.varlen_attention(BF16) is (expected if has_bf16 else None)
        assert kernels.varlen_attention(FP32) is None
    kernels.varlen_attention.cache_clear()


@pytest.mark.parametrize(("share_prompts", "torch_has_it"), [(True, False), (True, True), (False, False)])
def test_shared_prompts_without_a_kernel_for_packed_sequences(
    share_prompts: bool, torch_has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, **RICH)
    monkeypatch.setattr(kernels, "varlen_attention", lambda dtype: print if torch_has_it else None)
    found = kernels.slow_paths(BF16, tensor_parallel=1, share_prompts=share_prompts, environment={})
    assert found == [Message("shared prompts", "answer", "torch 2.11")] * (share_prompts and not torch_has_it)
    options: dict[str, Any] = {"tensor_parallel": 1, "share_prompts": share_prompts, "large_heads": 264, "environment": {}}
    assert kernels.slow_paths(BF16, **options) == [Message("packs", "sequence by sequence", "heads of 264")]


def test_a_model_without_transformer_engine_layers_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, **{**RICH, "apex": False, "wide": False})
    parts = ["norms over all heads", "a clamped activation"]
    assert kernels.slow_paths(BF16, tensor_parallel=1, unsupported_by_te=parts, environment={}) == [
        Message("layers", "Transformer Engine", *parts),
        NO_ADDING,
    ]
    sums_in_bf16 = kernels.slow_paths(BF16, tensor_parallel=1, reduce_in_fp32=False, unsupported_by_te=parts, environment={})
    assert sums_in_bf16 == [Message("layers", "Transformer Engine", *parts)], "any torch adds bf16 to bf16"
    assert kernels.slow_paths(FP32, tensor_parallel=1, unsupported_by_te=parts, environment={})[0] == SLOW_TYPE


MIXERS = [
    ("delta_nets", "delta_rule_kernel", "fla", Message("gated delta nets", "install flash-linear-attention")),
    ("mamba", "scan_kernel", "mamba_ssm", Message("Mamba-2", "install mamba-ssm")),
]


@pytest.mark.parametrize(("mixer", "kernel", "library", "expected"), MIXERS)
def test_mixers_without_the_kernel_of_a_library(
    mixer: str,
    kernel: str,
    library: str,
    expected: Message,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """A library that is installed but fails when it is imported is named in a warning."""
    gpu(monkeypatch, **RICH)
    find = getattr(kernels, kernel)

    options: dict[str, Any] = {mixer: True}

    def slow(dtype: torch.dtype) -> list[str]:
        find.cache_clear()
        return kernels.slow_paths(dtype, tensor_parallel=1, environment={}, **options)

    if importlib.util.find_spec(library) is None:
        assert [slow(BF16), slow(FP32), caplog.messages] == [[expected], [SLOW_TYPE], []]
    monkeypatch.delitem(sys.modules, library, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{library}.py").write_text("raise ImportError('undefined symbol: c10\\nmore')")
    assert slow(BF16) == [expected]
    assert caplog.messages == [Message(library, "ImportError: undefined symbol: c10", "reinstall")]
    monkeypatch.setattr(kernels, kernel, lambda dtype: print)
    assert kernels.slow_paths(BF16, tensor_parallel=1, environment={}, **options) == []
    find.cache_clear()


@pytest.mark.parametrize(("apex", "wide"), [(False, False), (True, False), (False, True)])
def test_gradient_accumulation_is_fused_if_a_kernel_exists(apex: bool, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, **{**RICH, "apex": apex, "wide": wide})
    own = layers.ColumnParallelLinear.__new__(layers.ColumnParallelLinear)
    torch.nn.Module.__init__(own)
    own.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=BF16))
    engines = torch.nn.Linear(2, 2)
    engines.fuse_wgrad_accumulation = False  # type: ignore[assignment]  # Transformer Engine's name
    gradients.add_products_to_main_grads(torch.nn.Sequential(own, engines))
    assert own.gradient_accumulation_fusion is (apex or wide)
    gradients.add_products_to_main_grads(own, reduce_in_fp32=False)  # any torch can add bf16 to bf16
    assert own.gradient_accumulation_fusion
    assert engines.fuse_wgrad_accumulation is True


@pytest.mark.parametrize("apex", [False, True])
def test_torch_adds_weight_gradients_without_apex(apex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU lacks the product of bf16 matrices that is added to an fp32 sum; it is registered here."""
    gpu(monkeypatch, **{**RICH, "apex": apex})
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", apexs := object(), raising=False)
    patches.add_weight_gradients()
    if apex:
        assert layers.fused_weight_gradient_mlp_cuda is apexs
        return
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("addmm.dtype_out", lambda total, a, b, dtype, *, out, **_: out.add_(a.to(dtype) @ b.to(dtype)))
    draw = torch.Generator().manual_seed(0)
    inputs, grads = torch.randn(5, 3, generator=draw), torch.randn(5, 4, generator=draw)
    for dtype, of_sum in ((FP32, "fp32"), (BF16, "fp32"), (BF16, "fp16")):  # apex's name for sums in half precision
        total = torch.ones(4, 3, dtype=FP32 if of_sum == "fp32" else BF16)
        inputs, grads = inputs.to(dtype), grads.to(dtype)
        getattr(layers.fused_weight_gradient_mlp_cuda, f"wgrad_gemm_accum_{of_sum}")(inputs, grads, total)
        torch.testing.assert_close(total, (1 + grads.float().t() @ inputs.float()).to(total.dtype))
    library._destroy()


def test_the_router_of_experts_needs_no_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core 0.16.1 uses a name that it imports only with it, on GPUs too."""
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    patches.define_missing_names()
    weight, tokens = torch.randn(3, 4), torch.randn(2, 4)
    logits = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
    torch.testing.assert_close(logits, tokens @ weight.t())


def test_the_gradient_norm_needs_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel of Transformer Engine or apex is missing, megatron-core asks for that of each parameter."""
    monkeypatch.setattr(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
    patches.keep_norm_on_device()
    gradients = [torch.randn(size) for size in (5, 0, 300, 2)]
    lists, counts = [gradients[:2], gradients[2:]], Counter[str]()
    with Asked(counts):
        norm_1, _ = local_multi_tensor_applier(clip_grads.l2_norm_impl, torch.zeros(1), lists, False)
    assert not any(counts.values())
    torch.testing.assert_close(norm_1, torch.cat(gradients).norm().view(1))
