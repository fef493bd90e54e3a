"""The weights that the dense families share, under the names that Hugging Face gives them."""

from __future__ import annotations

from nemo_kto.models.families.table import ParamMapping, Split

_MCORE = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."
_ATTENTION = _HF + "self_attn."
_MLP = _HF + "mlp."

DENSE_MAPPINGS = (
    ParamMapping(
        mcore_name="embedding.word_embeddings.weight",
        hf_names={"model.embed_tokens.weight": ("vocabulary", "hidden")},
        split=Split.VOCABULARY,
    ),
    ParamMapping(
        mcore_name=_MCORE + "input_layernorm.weight",
        hf_names={_HF + "input_layernorm.weight": ("hidden",)},
        split=Split.REPLICATED,
    ),
    ParamMapping(
        mcore_name=_MCORE + "self_attention.linear_qkv.weight",
        hf_names={
            _ATTENTION + "q_proj.weight": ("query", "hidden"),
            _ATTENTION + "k_proj.weight": ("key_value", "hidden"),
            _ATTENTION + "v_proj.weight": ("key_value", "hidden"),
        },
        split=Split.QKV,
    ),
    ParamMapping(
        mcore_name=_MCORE + "self_attention.linear_qkv.bias",
        hf_names={
            _ATTENTION + "q_proj.bias": ("query",),
            _ATTENTION + "k_proj.bias": ("key_value",),
            _ATTENTION + "v_proj.bias": ("key_value",),
        },
        split=Split.QKV,
        required_flag="qkv_bias",
    ),
    ParamMapping(
        mcore_name=_MCORE + "self_attention.linear_proj.weight",
        hf_names={_ATTENTION + "o_proj.weight": ("hidden", "query")},
        split=Split.HEADS,
    ),
    ParamMapping(
        mcore_name=_MCORE + "self_attention.linear_proj.bias",
        hf_names={_ATTENTION + "o_proj.bias": ("hidden",)},
        split=Split.REPLICATED,
        required_flag="output_bias",
    ),
    ParamMapping(
        mcore_name=_MCORE + "pre_mlp_layernorm.weight",
        hf_names={_HF + "post_attention_layernorm.weight": ("hidden",)},
        split=Split.REPLICATED,
    ),
    ParamMapping(
        mcore_name=_MCORE + "mlp.linear_fc1.weight",
        hf_names={_MLP + "gate_proj.weight": ("ffn", "hidden"), _MLP + "up_proj.weight": ("ffn", "hidden")},
        split=Split.GATED,
    ),
    ParamMapping(
        mcore_name=_MCORE + "mlp.linear_fc1.bias",
        hf_names={_MLP + "gate_proj.bias": ("ffn",), _MLP + "up_proj.bias": ("ffn",)},
        split=Split.GATED,
        required_flag="mlp_bias",
    ),
    ParamMapping(
        mcore_name=_MCORE + "mlp.linear_fc2.weight",
        hf_names={_MLP + "down_proj.weight": ("hidden", "ffn")},
        split=Split.ROW_PARALLEL,
    ),
    ParamMapping(
        mcore_name=_MCORE + "mlp.linear_fc2.bias",
        hf_names={_MLP + "down_proj.bias": ("hidden",)},
        split=Split.REPLICATED,
        required_flag="mlp_bias",
    ),
    ParamMapping(
        mcore_name="decoder.final_layernorm.weight", hf_names={"model.norm.weight": ("hidden",)}, split=Split.REPLICATED
    ),
    ParamMapping(
        mcore_name="output_layer.weight",
        hf_names={"lm_head.weight": ("vocabulary", "hidden")},
        split=Split.VOCABULARY,
        required_flag="untied",
    ),
)

QK_NORM_MAPPINGS = (
    ParamMapping(
        mcore_name=_MCORE + "self_attention.q_layernorm.weight",
        hf_names={_ATTENTION + "q_norm.weight": ("head",)},
        split=Split.REPLICATED,
    ),
    ParamMapping(
        mcore_name=_MCORE + "self_attention.k_layernorm.weight",
        hf_names={_ATTENTION + "k_norm.weight": ("head",)},
        split=Split.REPLICATED,
    ),
)
