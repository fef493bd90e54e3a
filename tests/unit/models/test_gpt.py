"""megatron-core's configuration for a GPU, which is built and not run, and the embedding."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma2.modeling_gemma2 import Gemma2TextScaledWordEmbedding

from nemo_kto.architecture.architecture import Architecture, read_architecture
from nemo_kto.architecture.stages import PipelineSplit
from nemo_kto.device.kernels import uses_transformer_engine
from nemo_kto.models.gpt import _Lookup, scale_of, transformer_config
from tests.helpers.tiny_models import make_checkpoint
from tests.unit.device.test_kernels import RICH, gpu


@pytest.fixture(scope="module")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> Architecture:
    return read_architecture(make_checkpoint(tmp_path_factory.mktemp("model"), "llama"), tensor_parallel=1)


def config_of(architecture: Architecture, **settings: Any) -> TransformerConfig:
    return transformer_config(
        architecture,
        use_te=uses_transformer_engine(torch.bfloat16),
        params_dtype=torch.bfloat16,
        **{"grouped_experts": True, **settings},
    )


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ({}, {"bias_activation_fusion": True, "apply_rope_fusion": True}),
        ({"te": False}, {"bias_activation_fusion": True, "apply_rope_fusion": False}),
        ({"compiler": None}, {"bias_activation_fusion": False, "apply_rope_fusion": True}),
    ],
)
def test_a_gpu_gets_the_fusions_it_can_run(
    missing: dict[str, object], expected: dict[str, bool], architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, **{**RICH, **missing})  # type: ignore[arg-type]
    config = config_of(architecture)
    assert {name: getattr(config, name) for name in expected} == expected
    # of all layers of whichever kind: wrap_data_parallel switches it on for those whose kernel is there
    assert not config.gradient_accumulation_fusion
    assert not config.masked_softmax_fusion


@pytest.mark.parametrize(
    ("family", "engine", "fused"),
    [
        ("qwen3_moe", (2, 9), (True, True)),
        ("qwen3_moe", (2, 6), (True, False)),  # without a fused router
        ("qwen3_moe", None, (False, False)),
        ("deepseek_v3", (2, 9), (True, False)),  # its router is ours
        ("llama4_text", (2, 9), (True, False)),  # scores are sigmoids of all but the chosen logits' -inf
        ("llama", (2, 9), (False, False)),
    ],
)
def test_experts_get_the_fused_kernels_of_transformer_engine(
    family: str, engine: tuple[int, int] | None, fused: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, **{**RICH, "te": engine is not None})  # type: ignore[arg-type]
    names = ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute")
    for name in names:
        monkeypatch.setattr(moe_utils, f"fused_{name}", print if engine else None, raising=False)
    router = print if engine and engine >= (2, 7) else None
    monkeypatch.setattr(moe_utils, "fused_topk_with_score_function", router, raising=False)
    config = config_of(read_architecture(make_checkpoint(tmp_path, family), tensor_parallel=1))
    assert (config.moe_permute_fusion, config.moe_router_fusion) == fused


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_attention_factor_of_yarn_is_in_the_softmax_scale(
    on_gpu: bool, architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds of attention read the scale; fused rotary embeddings have no factor, and stay."""
    if on_gpu:
        gpu(monkeypatch, **RICH)  # type: ignore[arg-type]
    yarn = replace(architecture, rope=replace(architecture.rope, attention_factor=1.25))
    assert [config_of(model).softmax_scale for model in (architecture, yarn)] == [None, 1.25**2 / math.sqrt(8)]
    assert config_of(yarn).apply_rope_fusion == on_gpu


def test_chunks_of_a_stage_do_not_exchange_in_batches(architecture: Architecture) -> None:
    """Activations and gradients travel between the same ranks, and in a batch gloo confuses them without an error."""
    plain, chunks = (config_of(architecture, split=PipelineSplit(stages=2, chunks=chunks)) for chunks in (1, 2))
    assert [plain.virtual_pipeline_model_parallel_size, chunks.virtual_pipeline_model_parallel_size] == [None, 2]
    assert [plain.batch_p2p_comm, plain.overlap_p2p_comm] == [True, False]
    assert [chunks.batch_p2p_comm, chunks.overlap_p2p_comm] == [False, True]
    assert plain.variable_seq_lengths
    assert chunks.variable_seq_lengths


def test_query_pre_attn_scalar_replaces_the_head_size(architecture: Architecture) -> None:
    scales = [config_of(replace(architecture, query_pre_attn_scalar=scalar)).softmax_scale for scalar in (None, 8, 24)]
    assert scales == [None, None, 1 / math.sqrt(24)]


def test_only_silu_has_a_fused_activation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's fused gelu is chosen by another function than the one it computes."""
    gpu(monkeypatch, **RICH)  # type: ignore[arg-type]
    gemma2 = read_architecture(make_checkpoint(tmp_path, "gemma2"), tensor_parallel=1)
    config = transformer_config(gemma2, use_te=False, grouped_experts=True, params_dtype=torch.bfloat16)
    assert (config.bias_activation_fusion, config.use_te_activation_func) == (False, True)
    assert config.layernorm_zero_centered_gamma


@pytest.mark.parametrize("fp8", [None, "hybrid", "e4m3"])
def test_fp8_scales_are_stateless(fp8: str | None, architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and attention stay in bf16."""
    gpu(monkeypatch, **RICH)  # type: ignore[arg-type]
    config = config_of(architecture, fp8=fp8)
    assert (config.fp8, config.fp8_recipe, config.params_dtype) == (fp8, "tensorwise", torch.bfloat16)
    assert [config.fp8_param, config.fp8_dot_product_attention, config.fp8_multi_head_attention] == [False] * 3


@pytest.mark.parametrize("on_gpu", [False, True])
def test_experts_are_grouped_if_possible(on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_gpu:
        gpu(monkeypatch, **RICH)  # type: ignore[arg-type]
    folder = make_checkpoint(tmp_path, "qwen3_moe", norm_topk_prob=False)
    architecture = read_architecture(folder, tensor_parallel=1)
    config = config_of(architecture, expert_model_parallel_size=4)
    assert config.moe_grouped_gemm == on_gpu
    assert not config_of(architecture, grouped_experts=False).moe_grouped_gemm, "separate experts, as adapters require"
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (8, 3, 32)
    assert config.moe_layer_freq == [1, 0, 1, 1]
    assert config.moe_router_pre_softmax
    assert (config.moe_aux_loss_coeff, config.moe_expert_capacity_factor) == (0.0, None), "no loss per micro-batch, no drops"


def test_recomputation_of_mlps_includes_experts(architecture: Architecture, tmp_path: Path) -> None:
    mixture = read_architecture(make_checkpoint(tmp_path, "mixtral"), tensor_parallel=1)
    options: dict[str, Any] = {"recompute_granularity": "selective"}
    assert config_of(mixture, recompute_modules=["mlp"], **options).recompute_modules == ["mlp", "moe"]
    assert config_of(mixture, recompute_modules=["core_attn"], **options).recompute_modules == ["core_attn"]
    assert config_of(architecture, recompute_modules=["mlp"], **options).recompute_modules == ["mlp"]


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 55.5), (torch.float32, 55.42562484741211)])
def test_the_scale_is_rounded_as_in_transformers(dtype: torch.dtype, scale: float) -> None:
    theirs = Gemma2TextScaledWordEmbedding(2, 4, 0, embed_scale=3072**0.5).to(dtype)
    assert scale_of(3072, dtype) == scale
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(2, 4, generator=torch.Generator().manual_seed(0)))
        assert torch.equal(theirs(torch.tensor([1])), theirs.weight[1:] * scale)


class DtypesOfSums(TorchDispatchMode):
    """Notes the dtypes of the sums that ``index_add_`` adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_add_.default:
            self.found.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_the_gradient_of_a_frequent_token_is_summed_in_fp32() -> None:
    """On a GPU each addition rounds, and a sum of ones in bf16 would end at 256."""
    weight, tokens = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True), torch.ones(1, 4096, dtype=torch.long)
    with DtypesOfSums() as sums:
        _Lookup.apply(weight, tokens, tokens.bool()).sum().backward()
    assert sums.found == [torch.float32]
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0.0] * 3, [4096.0] * 3]
