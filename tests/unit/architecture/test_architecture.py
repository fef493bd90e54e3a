from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, BartConfig, PretrainedConfig, T5Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.architecture.families import FAMILIES
from nemo_kto.errors import UserError
from nemo_kto.layers.layer_settings import Experts, Temperature
from nemo_kto.mixers import NO_MIXER, SOFTMAX_ATTENTION, GatedDeltaNet, LatentAttention, Mamba2
from nemo_kto.mixers.param_mapping import Layers
from tests.helpers.messages import Message, raises

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 259,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
}


def folder(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **changes}))
    return tmp_path


def of(architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": FAMILIES[architecture].name}


ROUTED = {**of("Glm4MoeForCausalLM"), "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
HUNYUAN = {**of("HunYuanMoEV1ForCausalLM"), "num_experts": 4, "moe_topk": 2}
LLAMA4, SMOLLM3 = of("Llama4ForCausalLM"), of("SmolLM3ForCausalLM")


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"block_ff_dim": 6656}, 4608),  # LFM2-350M
        ({"intermediate_size": 6656}, 4608),
        ({"intermediate_size": 8192, "block_ff_dim": 12288}, 8192),
        ({"block_ff_dim": 10752, "block_auto_adjust_ff_dim": False}, 10752),  # LFM2-2.6B
        ({"block_ff_dim": 96, "block_multiple_of": 10, "block_ffn_dim_multiplier": 1.3}, 90),
        ({}, 8192),
    ],
)
def test_mlp_width_of_lfm2(changes: dict[str, Any], width: int, tmp_path: Path) -> None:
    """Two thirds of the field's, rounded up, as Lfm2MLP has it."""
    given = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "full_attn_idxs": [1], "intermediate_size": None}
    fields = {name: value for name, value in (BASE | given | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    read = read_architecture(tmp_path, tensor_parallel=1)
    assert read.ffn_hidden_size == width
    assert Lfm2MLP(AutoConfig.from_pretrained(tmp_path)).w1.out_features == width
    assert [mixer.kind for mixer in read.mixers] == ["short convolution", "softmax attention", "short convolution"]


def test_groups_of_channels_of_lfm2_have_equal_sizes(tmp_path: Path) -> None:
    """Also if the number of heads, whose size config.json then has, does not divide the channels."""
    given = {**of("Lfm2ForCausalLM"), "hidden_size": 64, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(BASE | given | {"layer_types": ["conv"] * 3}))
    assert read_architecture(tmp_path, tensor_parallel=1).sizes["conv_groups"] == 4


def test_routers(tmp_path: Path) -> None:
    """Two shared experts are one of double width; the layers without experts are the first, or outside of an interval."""
    given = {**ROUTED, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    glm = read_architecture(folder(tmp_path, **given), tensor_parallel=1).experts
    assert glm is not None
    assert (glm.sigmoid, glm.correction, glm.groups, glm.chosen_groups, glm.scale) == (True, (8,), 4, 2, 2.5)
    assert (glm.number, glm.per_token, glm.normalized, glm.shared_ffn_hidden_size) == (8, 3, True, 32)
    assert glm.layers == (False, True, True)
    names = {"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "moe_layer_end_index": 1}
    ernie = read_architecture(folder(tmp_path, **names, moe_num_experts=4, moe_k=2), tensor_parallel=1).experts
    assert ernie is not None
    assert (ernie.sigmoid, ernie.correction, ernie.least_sum, ernie.layers) == (False, (1, 4), 1e-12, (False, True, False))
    lfm = {**of("Lfm2MoeForCausalLM"), "layer_types": ["conv"] * 3, "num_experts": 8, "num_dense_layers": 1}
    liquid = read_architecture(folder(tmp_path, **lfm, moe_intermediate_size=16), tensor_parallel=1).experts
    assert liquid is not None
    assert (liquid.sigmoid, liquid.correction, liquid.added_sum, liquid.layers) == (True, (8,), 1e-6, (False, True, True))
    hunyuan = read_architecture(folder(tmp_path, **HUNYUAN, num_shared_expert=[1] * 3), tensor_parallel=1).experts
    assert hunyuan is not None
    assert (hunyuan.per_token, hunyuan.shared_ffn_hidden_size, hunyuan.shared_gate) == (2, 96, False)


LATENT: dict[str, Any] = {
    **of("DeepseekV3ForCausalLM"), "num_key_value_heads": 8,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "moe_intermediate_size": 12, "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.5},
}  # fmt: skip


V2 = {**LATENT, **of("DeepseekV2ForCausalLM"), "num_experts_per_tok": 6}


def test_latent_attention(tmp_path: Path) -> None:
    """The attention factor of YaRN is in the tables of the part that rotates, and mscale_all_dim in the softmax scale."""
    read = read_architecture(folder(tmp_path, **LATENT), tensor_parallel=3)
    (mixer,) = {*read.mixers}
    assert isinstance(mixer, LatentAttention)
    assert (mixer.query_rank, mixer.key_value_rank, mixer.query_dim, mixer.value_dim) == (24, 16, 16, 8)
    assert (mixer.kind, mixer.padded_heads(3), read.head_dim, len(read.rope.frequencies)) == ("latent attention", 9, 16, 2)
    scale = 0.05 * math.log(40) + 1
    assert read.rope.factor_in_table
    assert read.rope.attention_factor == pytest.approx((0.1 * math.log(40) + 1) / scale)
    assert read.softmax_scale == pytest.approx(scale**2 / 4)
    assert read.unsupported_by_te == ("latent attention",)
    # published under another name, which transformers does not know
    assert read_architecture(folder(tmp_path, **{**LATENT, "model_type": "kimi_k2"}), tensor_parallel=3) == read
    text = {key: value for key, value in {**BASE, **LATENT}.items() if key != "architectures"}
    for name, kind in (("KimiK25ForConditionalGeneration", "kimi_k2"), ("Kimi_K25ForConditionalGeneration", "deepseek_v3")):
        given = {"architectures": [name], "model_type": "kimi_k25", "text_config": {**text, "model_type": kind}}
        of_images = read_architecture(folder(tmp_path, **given, tie_word_embeddings=False), tensor_parallel=3)
        assert of_images.family.text_type
        assert replace(of_images, family=read.family) == read
    (mixer,) = {*read_architecture(folder(tmp_path, **{**LATENT, "q_lora_rank": None}), tensor_parallel=1).mixers}
    assert mixer.kind == "latent attention with direct queries"
    lite = {**LATENT, "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
    kinds = read_architecture(folder(tmp_path, **lite, mlp_layer_types=["sparse", "dense", "sparse"]), tensor_parallel=1)
    assert kinds.sparse_layers == (True, False, True)


def test_defaults_of_the_family_are_filled_in(tmp_path: Path) -> None:
    read = read_architecture(folder(tmp_path), tensor_parallel=1)
    assert read.family is FAMILIES["LlamaForCausalLM"]
    assert (read.num_layers, read.hidden_size, read.num_attention_heads, read.num_query_groups) == (3, 64, 8, 8)
    assert (read.head_dim, read.ffn_hidden_size, read.vocab_size, read.max_position_embeddings) == (8, 96, 259, 2048)
    assert (read.norm_epsilon, read.rope.attention_factor, read.tied) == (1e-5, 1.0, False)
    assert read.rope.frequencies == pytest.approx([5e5 ** -(pair / 4) for pair in range(4)], rel=1e-6)
    assert (read.qkv_bias, read.output_bias, read.mlp_bias, read.qk_norm) == (False, False, False, False)
    assert read.windows == (None, None, None)


@pytest.mark.parametrize(
    ("architecture", "changes", "flags"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("MistralForCausalLM", {}, (False, False, False, False)),
        ("Olmo2ForCausalLM", {}, (False, False, False, True)),
        ("Olmo2ForCausalLM", {"attention_bias": True}, (True, True, False, True)),
        ("Qwen2ForCausalLM", {}, (True, False, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False, True)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False, True)),
        ("SeedOssForCausalLM", {}, (True, False, False, False)),
        ("SeedOssForCausalLM", {"attention_out_bias": True, "mlp_bias": True}, (True, True, True, False)),
    ],
)
def test_biases_and_norms(tmp_path: Path, architecture: str, changes: dict[str, Any], flags: tuple[bool, ...]) -> None:
    read = read_architecture(folder(tmp_path, **of(architecture), **changes), tensor_parallel=1)
    assert (read.qkv_bias, read.output_bias, read.mlp_bias, read.qk_norm) == flags


@pytest.mark.parametrize(("head_dim", "names"), [(100, ("heads", "multiple of 8")), (264, ("heads", "more than 256"))])
def test_head_sizes_that_transformer_engine_lacks(head_dim: int, names: tuple[str, ...], tmp_path: Path) -> None:
    read = read_architecture(folder(tmp_path, **of("LlamaForCausalLM"), head_dim=head_dim), tensor_parallel=1)
    assert (read.unsupported_by_te, read.largest_head) == ((Message(*names),), head_dim)


def test_features_that_transformer_engine_lacks(tmp_path: Path) -> None:
    found = {
        name: read_architecture(folder(tmp_path, **of(name)), tensor_parallel=1).unsupported_by_te
        for name in (
            *("Cohere2ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "GraniteForCausalLM"),
            *("GemmaForCausalLM", "LlamaForCausalLM", "Olmo2ForCausalLM", "Qwen3ForCausalLM"),
        )
    }
    assert found == {
        "Cohere2ForCausalLM": (Message("norms", "bias"), Message("parallel"), Message("RoPE", "interleaved")),
        "GraniteForCausalLM": (),
        "Gemma2ForCausalLM": (Message("MLP", "attention"), Message("scores", "soft"), Message("activation", "SiLU")),
        "GemmaForCausalLM": (Message("activation", "SiLU"),),
        "Gemma3ForCausalLM": (Message("MLP", "attention"), Message("layers", "window"), Message("activation", "SiLU")),
        "GptOssForCausalLM": (Message("softmax", "sinks"), Message("experts", "biases"), "a clamped activation"),
        "LlamaForCausalLM": (),
        "Olmo2ForCausalLM": (Message("MLP", "attention"), Message("all", "norms")),
        "Qwen3ForCausalLM": (),
    }


def test_olmo3_scales_only_the_rope_of_layers_without_a_window(tmp_path: Path) -> None:
    """The form of the published files."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "attention_factor": 1.25}
    given = {"num_hidden_layers": 4, "sliding_window": 12, "rope_scaling": scaling}
    read = read_architecture(folder(tmp_path, **of("Olmo3ForCausalLM"), **given), tensor_parallel=1)
    assert read.windows == (12, 12, 12, None)
    assert read.local_rope is not None
    assert read.local_rope.frequencies == pytest.approx([5e5 ** -(pair / 4) for pair in range(4)], rel=1e-6)
    assert (read.local_rope.attention_factor, read.rope.attention_factor, read.rope.factor_in_table) == (1.0, 1.25, True)
    assert read.rope.frequencies != read.local_rope.frequencies


def test_numbers_of_gpt_oss(tmp_path: Path) -> None:
    """The configurations have the form of the published files."""
    scaling = {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    given = {**of("GptOssForCausalLM"), "num_local_experts": 32, "head_dim": 8, "rope_scaling": scaling}
    read = read_architecture(folder(tmp_path, **given, swiglu_limit=7.5), tensor_parallel=2)
    assert (read.swiglu_alpha, read.swiglu_limit, read.sinks, read.expert_bias) == (1.702, 7.5, True, True)
    assert (read.qkv_bias, read.output_bias, read.mlp_bias, read.windows) == (True, True, False, (128, None, 128))
    assert read.softmax_scale == pytest.approx((0.1 * math.log(32) + 1) ** 2 / 8**0.5)
    assert read.experts is not None
    assert (read.experts.number, read.experts.per_token, read.experts.normalized) == (32, 4, True)


def test_llama4_as_published(tmp_path: Path) -> None:
    """Every fourth layer sees everything and has no rope; the others see chunks of 8192 tokens."""
    given = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size_mlp": 192}
    read = read_architecture(folder(tmp_path, **LLAMA4, **given), tensor_parallel=1)
    assert (read.head_dim, read.ffn_hidden_size, read.qkv_bias, read.qk_norm) == (128, 192, False, False)
    assert (read.windows, read.family.chunked) == ((8192, 8192, 8192, None), True)
    assert (read.rotates, read.family.interleaved_rotary, read.rotated_norm) == ((True, True, True, False), True, True)
    assert read.temperature == Temperature(floor=8192, scale=0.1)
    assert read.experts == Experts(
        number=16,
        per_token=1,
        ffn_hidden_size=96,
        normalized=False,
        layers=(True,) * 4,
        shared_ffn_hidden_size=96,
        shared_gate=False,
        weighs_input=True,
    )
    assert read.unsupported_by_te == (
        Message("attention", "chunks"),
        "interleaved RoPE",
        Message("RoPE", "norms"),
        "attention temperature scaling",
    )


QWEN3_NEXT = {
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "rope_theta": 1e7,
    "partial_rotary_factor": 0.25, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "norm_topk_prob": True,
}  # fmt: skip


def test_qwen3_next_as_published(tmp_path: Path) -> None:
    """Every fourth layer has attention, which rotates a quarter of each head."""
    given = {**of("Qwen3NextForCausalLM"), **QWEN3_NEXT}
    read = read_architecture(folder(tmp_path, **given), tensor_parallel=8)
    net = GatedDeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
    assert read.mixers == (net, net, net, SOFTMAX_ATTENTION)
    assert (read.output_gate, read.qk_norm, read.zero_centered_norm, read.windows) == (True, True, True, (None,) * 4)
    assert read.rope.frequencies == pytest.approx([1e7 ** -(pair / 32) for pair in range(32)], rel=1e-6)
    assert read.experts is not None
    assert (read.experts.number, read.experts.shared_ffn_hidden_size, read.experts.shared_gate) == (512, 512, True)
    assert read.unsupported_by_te == ("gated delta nets", Message("attention", "gated"))
    with raises(UserError, "config.json", "linear_num_value_heads", "linear_num_key_heads", "31", "16", "correct"):
        read_architecture(folder(tmp_path, **{**given, "linear_num_value_heads": 31}), tensor_parallel=1)


NEMOTRON_3_NANO = {
    "num_hidden_layers": 7, "hybrid_override_pattern": "MEM*-ME", "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "intermediate_size": 1856, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128,
    "n_groups": 8, "conv_kernel": 4, "mlp_hidden_act": "relu2", "n_routed_experts": 128, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, 100.0],
}  # fmt: skip


GRANITE_4_H_TINY = {
    "num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"], "hidden_size": 1536,
    "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 512, "shared_intermediate_size": 1024,
    "num_local_experts": 64, "num_experts_per_tok": 6, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True,
    "mamba_proj_bias": False, "position_embedding_type": "nope", "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 6, "rope_theta": 10000, "rope_scaling": None,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_granite_4_as_published(tmp_path: Path) -> None:
    """Layers have a mixer, and experts beside a shared one, or an MLP as wide; all of Granite 4.0 Micro's have attention."""
    given = {**of("GraniteMoeHybridForCausalLM"), **GRANITE_4_H_TINY}
    read = read_architecture(folder(tmp_path, **given), tensor_parallel=1)
    mamba = Mamba2(heads=48, groups=1, head_dim=64, state_dim=128, kernel=4, step_limits=(0.0, math.inf))
    assert read.mixers == (mamba, mamba, SOFTMAX_ATTENTION, mamba)
    assert (read.rotates, read.norms, read.softmax_scale, read.tied) == ((False,) * 4, 2, 0.0078125, True)
    assert (read.embedding_multiplier, read.residual_multiplier, read.logit_multiplier) == (12, 0.22, 1 / 6)
    assert (read.sizes["mamba_in"], read.sizes["mamba_convolved"]) == (6448, 3328)
    assert read.experts is not None
    assert (read.experts.number, read.experts.per_token, read.experts.ffn_hidden_size) == (64, 6, 512)
    assert (read.experts.layers, read.experts.shared_ffn_hidden_size) == ((True,) * 4, 1024)
    automatic = read_architecture(folder(tmp_path, **{**given, "mamba_d_head": "auto"}), tensor_parallel=1)
    assert automatic == read
    dense = {**given, "num_local_experts": 0, "num_experts_per_tok": 0}  # as Granite 4.0 H-Micro
    read = read_architecture(folder(tmp_path, **dense), tensor_parallel=2)
    assert (read.experts, read.ffn_hidden_size, read.mixers[0]) == (None, 1024, mamba)
    micro = {**dense, "layer_types": ["attention"] * 4, "position_embedding_type": "rope"}
    read = read_architecture(folder(tmp_path, **micro), tensor_parallel=2)
    assert (read.mixers, read.rotates) == ((SOFTMAX_ATTENTION,) * 4, (True,) * 4)
    assert read.rope.frequencies[:2] == (1.0, pytest.approx(10000 ** (-1 / 64)))


def test_nemotron_as_published(tmp_path: Path) -> None:
    """Each layer has a mixer, or an MLP or experts; steps have the limits of time_step_limit, not time_step_min."""
    given = {**of("NemotronHForCausalLM"), **NEMOTRON_3_NANO}
    read = read_architecture(folder(tmp_path, **given), tensor_parallel=4)
    mamba = Mamba2(heads=64, groups=8, head_dim=64, state_dim=128, kernel=4, step_limits=(0.0, 100.0))
    assert read.mixers == (mamba, NO_MIXER, mamba, SOFTMAX_ATTENTION, NO_MIXER, mamba, NO_MIXER)
    assert (read.num_layers, read.rotates, read.norms, read.norm_epsilon) == (7, (False,) * 7, 1, 1e-5)
    assert (read.sizes["mamba_in"], read.sizes["mamba_convolved"]) == (10304, 6144)
    assert read.layers_with[Layers.DENSE] == (False, False, False, False, True, False, False)
    assert read.experts is not None
    assert read.experts.layers == (False, True, False, False, False, False, True)
    assert (read.experts.shared_ffn_hidden_size, read.experts.scale, read.experts.correction) == (3712, 2.5, (128,))
    dense = {**given, "hybrid_override_pattern": "M-M*-M-"}  # as Nemotron Nano 2, whose configuration has no experts
    assert read_architecture(folder(tmp_path, **dense), tensor_parallel=4).experts is None


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({"interleave_moe_layer_step": 2}, (False, True, False)),
        ({"interleave_moe_layer_step": 3}, (False, False, True)),
        ({"moe_layers": [0, 2, 7], "interleave_moe_layer_step": 2}, (True, False, True)),
        ({"moe_layers": None}, (True, True, True)),
    ],
)
def test_layers_of_llama4_with_experts(tmp_path: Path, changes: dict[str, Any], sparse: tuple[bool, ...]) -> None:
    given = {**BASE, **LLAMA4, **changes}
    read = read_architecture(folder(tmp_path, **given), tensor_parallel=1)
    assert read.sparse_layers == sparse
    assert read.family.experts is not None
    assert read.family.experts.layers(given, 3) == {layer for layer in range(3) if sparse[layer]}, "as in the launcher"


LINEAR = {"rope_type": "linear", "factor": 8.0}
# in the form of transformers 5
ROPES = {
    "full_attention": {**LINEAR, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
}


@pytest.mark.parametrize(
    ("changes", "theta", "factor", "local_theta"),
    [
        # as published, in the old form
        ({"rope_theta": 1e6, "rope_local_base_freq": 3e4, "rope_scaling": LINEAR}, 1e6, 8.0, 3e4),
        ({"rope_theta": 1e6, "rope_local_base_freq": 3e4, "rope_scaling": None}, 1e6, 1.0, 3e4),
        ({"rope_parameters": ROPES}, 1e6, 8.0, 3e4),
        ({"rope_theta": 2e6}, 2e6, 1.0, 1e4),  # transformers' default
    ],
)
def test_gemma3_has_two_ropes(
    tmp_path: Path, changes: dict[str, Any], theta: float, factor: float, local_theta: float
) -> None:
    given = {**of("Gemma3ForCausalLM"), "head_dim": 8, "num_hidden_layers": 7, "sliding_window": 32, **changes}
    read = read_architecture(folder(tmp_path, **given), tensor_parallel=1)
    assert read.rope.frequencies == pytest.approx([theta ** -(pair / 4) / factor for pair in range(4)], rel=1e-6)
    assert read.local_rope is not None
    assert read.local_rope.frequencies == pytest.approx([local_theta ** -(pair / 4) for pair in range(4)], rel=1e-6)
    assert read.windows == (32, 32, 32, 32, 32, None, 32)
    assert (read.qk_norm, read.attention_softcap, read.logit_softcap) == (True, None, None)


CHUNKS, FULL, CHUNKED = {"attention_chunk_size": 16}, "full_attention", "chunked_attention"


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 16}, (16, 16, 16)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
        ("Phi3ForCausalLM", {"sliding_window": 16}, (16, 16, 16)),
        ("Phi3ForCausalLM", {}, (None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 16}, (None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, (None, 16, 16)),
        ("Llama4ForCausalLM", {**CHUNKS, "no_rope_layers": [1, 0, 1]}, (16, None, 16)),
        # as published: every fourth layer
        ("Llama4ForCausalLM", {**CHUNKS, "no_rope_layers": [], "num_hidden_layers": 4}, (16, 16, 16, None)),
        ("Llama4ForCausalLM", {**CHUNKS, "layer_types": [FULL, FULL, CHUNKED]}, (None, None, 16)),
        ("Qwen2MoeForCausalLM", {"sliding_window": 0, "use_sliding_window": False}, (None, None, None)),
        ("Qwen2MoeForCausalLM", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}, (9, None, None)),
    ],
)
def test_windows(tmp_path: Path, architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read_architecture(folder(tmp_path, **of(architecture), **changes), tensor_parallel=1).windows == windows


@pytest.mark.parametrize(
    ("changes", "rotates"),
    [
        ({}, (True, True, True)),  # of twelve layers the fourth, eighth and last have no rope
        ({"no_rope_layer_interval": 2}, (True, False, True)),
        ({"no_rope_layers": [0, 1, 1]}, (False, True, True)),
        ({"no_rope_layers": [0, 1, 1, 0, 0]}, (False, True, True)),
    ],
)
def test_layers_without_rotary_embeddings(tmp_path: Path, changes: dict[str, Any], rotates: tuple[bool, ...]) -> None:
    assert read_architecture(folder(tmp_path, **SMOLLM3, **changes), tensor_parallel=1).rotates == rotates


@pytest.mark.parametrize(("part", "channels"), [(1.0, 8), (0.75, 6), (0.5, 4)])
def test_phi3_with_partial_rotation(tmp_path: Path, part: float, channels: int) -> None:
    phi3 = folder(tmp_path, **of("Phi3ForCausalLM"), partial_rotary_factor=part, pad_token_id=0)
    frequencies = [5e5 ** -(channel / channels) for channel in range(0, channels, 2)]
    assert read_architecture(phi3, tensor_parallel=1).rope.frequencies == pytest.approx(frequencies, rel=1e-6)


LONGROPE = {"rope_type": "longrope", "long_factor": [4.0] * 3, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("architecture", "changes", "in_table"),
    [
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, False),
        ("SmolLM3ForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "no_rope_layers": [1, 1, 1]}, False),
        ("SmolLM3ForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "no_rope_layers": [1, 0, 1]}, True),
        ("Gemma3ForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, True),
        # a norm after the rotation undoes the factor
        ("Llama4ForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "no_rope_layers": [1, 1, 1]}, True),
        ("Phi3ForCausalLM", {"rope_scaling": {**LONGROPE, "short_factor": [2.0] * 4, "long_factor": [4.0] * 4}}, False),
        ("Phi3ForCausalLM", {"rope_scaling": {**LONGROPE, "short_factor": [2.0] * 3}, "partial_rotary_factor": 0.75}, True),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.75}, False),  # there is no factor
    ],
)
def test_an_attention_factor_of_some_layers_is_in_the_rotary_table(
    tmp_path: Path, architecture: str, changes: dict[str, Any], in_table: bool
) -> None:
    given = {**of(architecture), "original_max_position_embeddings": 16, "max_position_embeddings": 64, "pad_token_id": 0}
    read = read_architecture(folder(tmp_path, **given, **changes), tensor_parallel=1)
    assert read.rope.factor_in_table == in_table
    assert any("attention factor" in reason for reason in read.unsupported_by_te) == in_table
    assert in_table == (read.rope.attention_factor != 1.0 and read.softmax_scale is None)


@pytest.mark.parametrize(
    ("heads", "groups", "tensor_parallel", "padded"),
    [
        (8, 8, 2, (8, 8)),
        (8, 2, 2, (8, 2)),
        (8, 2, 4, (8, 2)),  # two ranks share a key-value head
        (9, 3, 1, (9, 3)),
        (9, 3, 2, (12, 4)),
        (9, 3, 4, (12, 4)),
        (9, 9, 2, (10, 10)),
        (6, 1, 4, (24, 4)),  # six query heads cannot be shared out over four ranks
    ],
)
def test_heads_are_padded_only_if_ranks_cannot_divide_them(
    tmp_path: Path, heads: int, groups: int, tensor_parallel: int, padded: tuple[int, int]
) -> None:
    changes = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": 8}
    read = read_architecture(folder(tmp_path, **changes, hidden_size=8 * heads), tensor_parallel=tensor_parallel)
    assert (read.padded_attention_heads, read.padded_query_groups) == padded


@pytest.mark.parametrize(("tensor_parallel", "padded"), [(1, 259), (2, 260), (4, 260), (8, 264)])
def test_vocabulary_is_padded_to_equal_shards(tmp_path: Path, tensor_parallel: int, padded: int) -> None:
    assert read_architecture(folder(tmp_path), tensor_parallel=tensor_parallel).padded_vocab_size == padded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 97}, Message("intermediate_size", "97", "2")),
        ({"mlp_bias": True}, Message("mlp_bias=true", "attention_bias=false")),
        ({**ROUTED, "n_group": 3}, Message("n_group", "8", "groups", "3")),
        ({**ROUTED, "n_group": 2, "topk_group": 3}, Message("n_group", "topk_group", "2", "3")),
        ({**ROUTED, "n_group": 4, "topk_group": 1}, Message("num_experts_per_tok", "2", "topk_group", "3")),
        ({**HUNYUAN, "moe_topk": [2, 2, 3]}, Message("moe_topk", "same", "[2, 2, 3]", "choose")),
        ({**HUNYUAN, "moe_topk": [5, 5, 5]}, Message("moe_topk", "4", "5")),
        ({**HUNYUAN, "moe_topk": 1}, Message("moe_topk", "2", "normalized", "1")),
        ({**LATENT, "num_key_value_heads": 4}, Message("num_key_value_heads", "num_attention_heads", "8", "4", "correct")),
        ({**LATENT, "attention_bias": True}, Message("attention_bias", "false", "true", "choose")),
        ({**V2, "topk_method": "noaux_tc"}, Message("topk_method", "group_limited_greedy", "noaux_tc", "choose")),
        ({**V2, "norm_topk_prob": True}, Message("norm_topk_prob", "false", "deepseek_v2", "true", "choose")),
        ({**V2, "topk_method": "greedy", "n_group": 4, "topk_group": 4}, Message("topk_method", "n_group", "4", "choose")),
        ({**of("SeedOssForCausalLM"), "mlp_bias": True}, Message("mlp_bias=true", "attention_out_bias=false")),
        (
            {**LLAMA4, "layer_types": [FULL, "sliding_attention", FULL]},
            Message("layer_types", FULL, CHUNKED, "sliding_attention", "choose"),
        ),
        ({**LLAMA4, "attention_chunk_size": None}, Message("attention_chunk_size", "layer_types", CHUNKED, "null", "add")),
        ({**LLAMA4, "attn_temperature_tuning": "4"}, Message("attn_temperature_tuning", "true", "false", "'4'", "correct")),
        ({**of("Qwen2ForCausalLM"), "layer_types": [FULL, CHUNKED, FULL]}, Message("layer_types", CHUNKED)),
        ({**SMOLLM3, "no_rope_layers": [1, 0]}, Message("no_rope_layers", "0", "1", "3", "2")),
        ({**SMOLLM3, "no_rope_layers": [1, 0, 2]}, Message("no_rope_layers", "list", "0", "[1, 0, 2]")),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: Message) -> None:
    with raises(ValueError, *message.parts) as error:
        read_architecture(folder(tmp_path, **changes), tensor_parallel=2)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize("config", [T5Config(), BartConfig()], ids=["t5", "bart"])
def test_encoder_decoder_models_are_refused_with_the_reason(tmp_path: Path, config: PretrainedConfig) -> None:
    """The files are those that transformers writes."""
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError) as error:
        read_architecture(tmp_path, tensor_parallel=1)
    assert str(error.value) == Message(f"{tmp_path / 'config.json'}", f"{config.model_type}", "trained", "prompt", "choose")


def test_no_configuration(tmp_path: Path) -> None:
    with raises(UserError, "folder", "config.json"):
        read_architecture(tmp_path, tensor_parallel=1)
