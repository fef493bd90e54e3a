"""Activations of MLPs, and ranks whose micro-batches must run in step because they share experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.lfm2_moe.configuration_lfm2_moe import Lfm2MoeConfig
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.layers.layer_settings import Experts
from nemo_kto.layers.mlp import ClampedSwiGLU, CorrectedRouter, GeGLU, SwiGLU, experts_span_copies
from nemo_kto.models.gpt import transformer_config
from tests.helpers.tiny_models import make_checkpoint

Activation = Callable[[torch.Tensor], torch.Tensor]
# ours, and what is done to the gate
KINDS = pytest.mark.parametrize(
    ("kind", "activation"), [(SwiGLU, F.silu), (GeGLU, partial(F.gelu, approximate="tanh"))], ids=["silu", "gelu"]
)


def gated(kind: type[SwiGLU | GeGLU]) -> SwiGLU | GeGLU:
    return kind(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2))


@KINDS
def test_values_equal_the_two_halves(kind: type[SwiGLU | GeGLU], activation: Activation) -> None:
    torch.manual_seed(0)
    gate_and_up = torch.randn(5, 2, 12)
    gate, up = gate_and_up.chunk(2, dim=-1)
    assert torch.equal(gated(kind)(gate_and_up), activation(gate) * up)


@KINDS
def test_gradients_equal_autograd_bitwise(kind: type[SwiGLU | GeGLU], activation: Activation) -> None:
    torch.manual_seed(0)
    gate_and_up, grad = torch.randn(5, 2, 12, requires_grad=True), torch.randn(5, 2, 6)
    gate, up = gate_and_up.chunk(2, dim=-1)
    (expected,) = torch.autograd.grad(activation(gate) * up, gate_and_up, grad)
    (found,) = torch.autograd.grad(gated(kind)(gate_and_up), gate_and_up, grad)
    assert torch.equal(found, expected)


def test_only_the_input_is_saved_for_the_backward_pass() -> None:
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    gate_and_up = torch.randn(5, 2, 12, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gated(SwiGLU)(gate_and_up)
    assert kept == [gate_and_up.data_ptr()]


def test_the_clamped_form_equals_autograd() -> None:
    """Values beyond the limits too, and on them, where torch's clamp still has a slope."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=8, intermediate_size=6, num_local_experts=1, swiglu_alpha=1.3, swiglu_limit=0.75)
    gate_and_up, grad = 2 * torch.randn(5, 2, 12, dtype=torch.float64), torch.randn(5, 2, 6, dtype=torch.float64)
    gate_and_up[0, 0, :6], gate_and_up[0, 1, 6:9], gate_and_up[0, 1, 9:] = 0.75, 0.75, -0.75
    gate_and_up.requires_grad_()
    in_turn = torch.stack(gate_and_up.chunk(2, dim=-1), dim=-1).flatten(-2)  # as transformers has them
    expected = GptOssExperts(config)._apply_gate(in_turn)
    plain = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    found = ClampedSwiGLU(plain, alpha=1.3, limit=0.75)(gate_and_up)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (wanted,), (got,) = (torch.autograd.grad(values, gate_and_up, grad) for values in (expected, found))
    assert 0 < int((wanted == 0).sum()) < wanted.numel()
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("tensor", "expert", "expert_tensor", "spans"),
    [
        (1, 1, 1, False),
        (1, 2, 1, True),
        (1, 1, 2, True),
        (2, 2, 1, False),  # the experts are shared out over ranks that have the same sequences
        (2, 1, 2, False),
        (4, 2, 1, False),
        (2, 2, 2, True),
        (2, 4, 1, True),
    ],
)
def test_experts_span_copies(tmp_path: Path, tensor: int, expert: int, expert_tensor: int, spans: bool) -> None:
    folder = make_checkpoint(tmp_path, "mixtral")
    architecture = read_architecture(folder, tensor_parallel=tensor, expert_tensor_parallel=expert_tensor)
    degree: dict[str, Any] = {"expert_model_parallel_size": expert}
    config = transformer_config(architecture, use_te=False, grouped_experts=True, params_dtype=torch.float32, **degree)
    assert experts_span_copies(config) == spans


def test_weights_of_unlikely_experts_of_lfm2_equal_transformers() -> None:
    """Its 1e-6 in the denominator shows where all scores are small."""
    config = Lfm2MoeConfig(hidden_size=4, num_experts=6, num_experts_per_tok=3, routed_scaling_factor=1.5)
    theirs, bias_E = Lfm2MoeTopKRouter(config), torch.randn(6)
    experts = Experts(
        number=6, per_token=3, ffn_hidden_size=1, normalized=True, layers=(True,), sigmoid=True, scale=1.5,
        added_sum=1e-6,
    )  # fmt: skip
    ours = SimpleNamespace(experts=experts, topk=3, correction_bias=bias_E)
    ours._scores = MethodType(CorrectedRouter._scores, ours)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(6, 4) - 30)
        hidden_TH = torch.rand(5, 4)
        logits_TE, weights_Tk, chosen_Tk = theirs(hidden_TH, bias_E)
        found_TE, _ = CorrectedRouter._choose(ours, logits_TE)  # type: ignore[arg-type]
    assert weights_Tk.sum(-1).max() < 1.4
    torch.testing.assert_close(found_TE.gather(-1, chosen_Tk), weights_Tk, rtol=1e-6, atol=0)
