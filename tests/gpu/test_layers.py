"""Layers on a GPU in bf16: logits of models with torch's and Transformer Engine's layers, attention kernels, log-probs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.device import device
from nemo_kto.device.kernels import delta_rule_kernel, scan_kernel, uses_transformer_engine, varlen_attention
from nemo_kto.distributed import state
from nemo_kto.huggingface.hf_weights import load_weights
from nemo_kto.layers.attention import PackedSequences, RepeatedHeads, TorchAttention, packed_attention
from nemo_kto.layers.block_attention import QUERY_BLOCK, block_attention
from nemo_kto.layers.packing import Prompts, token_positions
from nemo_kto.mixers.gated_delta_net import fastest_delta_rule, gated_delta_rule
from nemo_kto.mixers.mamba2 import fastest_scan, state_space_scan
from nemo_kto.models.gpt import build_gpt
from tests.helpers import hf_jobs, hf_models
from tests.helpers.engine_layers import engine_layers
from tests.helpers.tiny_models import make_checkpoint
from tests.unit.distributed.test_logprobs_precision import (  # noqa: F401  # on a GPU matrix products return fp32
    test_gradients_are_rounded_once,
    test_the_log_ratio_of_slightly_moved_weights,
    test_token_log_probs_are_not_rounded_to_bf16,
)

pytestmark = pytest.mark.skipif(not device.on_gpu(), reason="needs a GPU that is used")
# Two or three times the error of bf16 on a CPU, and less than without any one of a model's caps, norms and factors there.
TORCH_MODELS = {
    "deepseek-v3-dense": 0.1,
    "gemma2": 0.04,
    "gemma3": 0.04,
    "gpt-oss": 0.15,
    "granite-hybrid": 0.08,
    "llama4": 0.15,
    "nemotron-h": 0.08,
    "olmo2": 0.06,
    "phi3-part-of-each-head-longrope": 0.1,
    "qwen3.5-text": 0.08,
    "smollm3-window-yarn-rope": 0.15,
}


def relative_error_of_logits(name: str, folder: Path, *, linear: type[torch.nn.Module] | None = None) -> float:
    """Error of a model's logits in bf16, relative to those of transformers in fp32."""
    hf_models.write_model(name, folder)
    model, architecture = hf_jobs.build(folder, state.Layout(), params_dtype=torch.bfloat16)
    if linear is not None:
        found = next(module for module_name, module in model.named_modules() if module_name.endswith(".linear_fc1"))
        assert isinstance(found, linear)
    load_weights([model], architecture, folder)
    tokens = hf_models.tokens().to(device.current_device())
    positions = torch.arange(tokens.size(1), device=tokens.device)[None].expand_as(tokens)
    with torch.no_grad():
        hidden = model.eval()(tokens, positions, None)
        logits = hf_jobs.capped(model, (hidden @ model.output_weight().T).float()).cpu()
    expected = hf_models.transformers_logits(folder)
    return float((logits - expected).norm() / expected.norm())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", TORCH_MODELS)
def test_logits_with_torch_layers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    assert relative_error_of_logits(name, tmp_path, linear=ColumnParallelLinear) < TORCH_MODELS[name]


@pytest.mark.skipif(varlen_attention(torch.bfloat16) is None, reason="needs torch 2.11 or newer")
@pytest.mark.parametrize(("size", "window"), [(2, None), (64, 5), (100, None), (100, 5), (256, None), (264, 5)])
def test_packs_in_one_kernel_equal_sequences(size: int, window: int | None) -> None:
    """Outputs and gradients of a prompt with two answers, and another sequence; only the largest heads do not fit."""
    settings: dict[str, Any] = {"num_layers": 1, "hidden_size": 4 * size, "num_attention_heads": 4, "num_query_groups": 2}
    settings |= {"kv_channels": size, "attention_dropout": 0.0, "params_dtype": torch.bfloat16}
    settings |= {"window_size": None if window is None else (window - 1, 0)}
    layer = TorchAttention(TransformerConfig(**settings), 1, AttnMaskType.causal, "self")
    kernel, calls = layer.packed_kernel, list[int]()
    assert kernel is not None
    assert not isinstance(kernel, RepeatedHeads)

    def counted(*heads: Any, **options: Any) -> Any:
        calls.append(1)
        return kernel(*heads, **options)

    packed, draw = PackedSequences.of([(40, 9, 1, 30)], [(None, 0, 0, None)])[0], torch.Generator().manual_seed(0)
    parts = [torch.randn(80, heads, size, generator=draw, dtype=torch.bfloat16) for heads in (4, 2, 2, 4)]
    *heads, weight = device.upload(parts)
    leaves, found = [each.requires_grad_() for each in heads], []
    for layer.packed_kernel in (counted, None):
        output = layer(*leaves, None, packed_seq_params=packed)
        found.append([output, *torch.autograd.grad((output * weight.flatten(1)).sum(), leaves)])
    assert len(calls) == (size <= 256)
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).float().norm() / theirs.float().norm()) < 0.02


@pytest.mark.skipif(varlen_attention(torch.bfloat16) is None, reason="needs torch 2.11 or newer")
def test_grouped_heads_without_an_option_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.11, whose call passes the heads on to the kernel without a check."""

    def released(*inputs: Any, scale: float, window_size: tuple[int, int]) -> Any:
        return torch.ops.torch_attn._varlen_attn(*inputs, window_size == (-1, 0), scale, [*window_size])[0]

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", released)
    for each in (varlen_attention, packed_attention):
        each.cache_clear()
    chosen = packed_attention(torch.bfloat16)
    for each in (varlen_attention, packed_attention):
        each.cache_clear()
    assert chosen is released


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "head size": ({"size": 12}, "multiple of 8"),
    "large heads": ({"size": 264}, "256"),
    "fp32": ({"dtype": torch.float32}, "fp16 and bf16"),
    "groups": ({"groups": 3}, "divide|multiple"),
    "starts": ({"starts": torch.int64}, "int32"),
    "strides": ({"transposed": True}, "contiguous last dimension"),
}


@pytest.mark.skipif(varlen_attention(torch.bfloat16) is None, reason="needs torch 2.11 or newer")
@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernel_for_packs_refuses(case: str) -> None:
    """torch's kernel and its emulation alike; grouped heads it takes."""
    kernel, (changes, message) = varlen_attention(torch.bfloat16), REFUSED[case]
    assert kernel is not None
    for refused in (False, True):
        given: dict[str, Any] = {"size": 8, "groups": 2, "dtype": torch.bfloat16, "starts": torch.int32, "transposed": False}
        given |= changes if refused else {}
        query, key = (torch.ones(5, heads, given["size"], dtype=given["dtype"]) for heads in (4, given["groups"]))
        query, key, starts = device.upload([query, key, torch.tensor([0, 5], dtype=given["starts"])])
        query = query.transpose(1, 2).contiguous().transpose(1, 2) if given["transposed"] else query
        with pytest.raises((RuntimeError, ValueError), match=message) if refused else contextlib.nullcontext():
            assert kernel(query, key, key, starts, starts, 5, 5, window_size=(-1, 0)).shape == query.shape


@pytest.mark.skipif(delta_rule_kernel(torch.bfloat16) is None, reason="needs flash-linear-attention")
def test_the_kernel_of_fla_agrees_with_torch() -> None:
    assert fastest_delta_rule(torch.bfloat16, key_dim=128, value_dim=128, values_per_key=2) is not gated_delta_rule


@pytest.mark.skipif(scan_kernel(torch.bfloat16) is None, reason="needs mamba-ssm")
@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_kernel_of_mamba_ssm_agrees_with_torch(head_dim: int) -> None:
    assert fastest_scan(torch.bfloat16, heads=16, head_dim=head_dim, state_dim=128) is not state_space_scan


@pytest.mark.usefixtures("one_rank")
@pytest.mark.skipif(not uses_transformer_engine(torch.bfloat16), reason="needs Transformer Engine")
@pytest.mark.parametrize("name", ["llama-yarn-rope", "phi3-part-of-each-head"])
def test_logits_with_transformer_engine_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Without the attention factor of yarn, or with whole heads rotated, the error is several times 0.1."""
    assert relative_error_of_logits(name, tmp_path) < 0.1


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("window", [None, 6])
def test_shared_prompts_with_transformer_engine(window: int | None, tmp_path: Path) -> None:
    """Hidden states and gradients in bf16 are those of a sequence for each answer; a stand-in where it is not installed."""
    folder = make_checkpoint(tmp_path / "model", "mistral", sliding_window=window)
    architecture = read_architecture(folder, tensor_parallel=1)
    stand_in = contextlib.nullcontext() if uses_transformer_engine(torch.bfloat16) else engine_layers(architecture)
    with stand_in:
        model = build_gpt(architecture, params_dtype=torch.bfloat16, share_prompts=True)
    load_weights([model], architecture, folder)
    core = model.decoder.layers[0].self_attention.core_attention
    assert type(core).__name__ == "SharedPromptAttention"
    calls = list[int]()
    core.with_prompts.register_forward_hook(lambda *_: calls.append(1))
    # a prompt of nine tokens with two answers, and a sequence of its own; the pack's token of each token of the sequences
    lengths, prompts, index_t = (9, 4, 6, 7), (None, 0, 0, None), torch.tensor([*range(13), *range(9), *range(13, 26)])
    draw = torch.Generator().manual_seed(5)
    tokens_s, weight_t1 = torch.randint(0, 200, (26,), generator=draw), torch.randn(len(index_t), 1, generator=draw)
    index_t, tokens_s, weight_t1 = device.upload([index_t, tokens_s, weight_t1])

    def passes(tokens_s: torch.Tensor, lengths: tuple[int, ...], prompts: Prompts) -> list[torch.Tensor]:
        packed, positions = PackedSequences.of([lengths], [prompts])[0], token_positions(lengths, prompts=prompts)
        hidden = model(tokens_s[None], *device.upload([positions[None]]), None, packed_seq_params=packed)[0]
        hidden = hidden if prompts is None else hidden[index_t]
        parameters = [each for name, each in model.named_parameters() if not name.startswith("output_layer")]
        return [hidden, *torch.autograd.grad((weight_t1 * hidden.float()).sum(), parameters)]

    found, expected = passes(tokens_s, lengths, prompts), passes(tokens_s[index_t], (13, 15, 7), None)
    assert calls == [1]
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).float().norm() / theirs.float().norm()) < 0.03


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("more", [{"cap": 2.0}, {"window": 50}], ids=["cap", "sinks and window"])
def test_block_attention_equals_the_cpu(more: dict[str, Any], dtype: torch.dtype, close: float) -> None:
    """Values and gradients, over more than one block of queries; fp32 products may be those of TF32."""
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, heads, QUERY_BLOCK + 72, 64, generator=draw).to(dtype) for heads in (8, 4, 4)]
    parts += [torch.randn(8, generator=draw).to(dtype)] * ("window" in more)
    settings = {"scale": 0.125, **more}
    found = []
    for place, kind in (("cpu", torch.float32), (device.current_device(), dtype)):
        here = [part.to(place, kind).requires_grad_() for part in parts]
        values = block_attention(*here[:3], **settings, sinks_h=here[3] if len(here) > 3 else None)
        found.append([values, *torch.autograd.grad(values.square().sum(), here)])
    for expected, other in zip(*found, strict=True):
        error = (other.float().cpu() - expected).norm() / expected.norm()
        assert float(error) < close
