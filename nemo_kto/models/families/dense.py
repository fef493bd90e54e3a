"""The weights that the dense families share, under the names that Hugging Face gives them."""

from __future__ import annotations

from nemo_kto.models.families.table import Row, Split

_OURS = "decoder.layers.{layer}."
_THEIRS = "model.layers.{layer}."
_ATTENTION = _THEIRS + "self_attn."
_MLP = _THEIRS + "mlp."

DENSE_ROWS = (
    Row(
        ours="embedding.word_embeddings.weight",
        theirs={"model.embed_tokens.weight": ("vocabulary", "hidden")},
        split=Split.VOCABULARY,
    ),
    Row(
        ours=_OURS + "input_layernorm.weight",
        theirs={_THEIRS + "input_layernorm.weight": ("hidden",)},
        split=Split.WHOLE,
    ),
    Row(
        ours=_OURS + "self_attention.linear_qkv.weight",
        theirs={
            _ATTENTION + "q_proj.weight": ("query", "hidden"),
            _ATTENTION + "k_proj.weight": ("key_value", "hidden"),
            _ATTENTION + "v_proj.weight": ("key_value", "hidden"),
        },
        split=Split.QKV,
    ),
    Row(
        ours=_OURS + "self_attention.linear_qkv.bias",
        theirs={
            _ATTENTION + "q_proj.bias": ("query",),
            _ATTENTION + "k_proj.bias": ("key_value",),
            _ATTENTION + "v_proj.bias": ("key_value",),
        },
        split=Split.QKV,
        when="qkv_bias",
    ),
    Row(
        ours=_OURS + "self_attention.linear_proj.weight",
        theirs={_ATTENTION + "o_proj.weight": ("hidden", "query")},
        split=Split.HEADS,
    ),
    Row(
        ours=_OURS + "self_attention.linear_proj.bias",
        theirs={_ATTENTION + "o_proj.bias": ("hidden",)},
        split=Split.WHOLE,
        when="output_bias",
    ),
    Row(
        ours=_OURS + "pre_mlp_layernorm.weight",
        theirs={_THEIRS + "post_attention_layernorm.weight": ("hidden",)},
        split=Split.WHOLE,
    ),
    Row(
        ours=_OURS + "mlp.linear_fc1.weight",
        theirs={_MLP + "gate_proj.weight": ("ffn", "hidden"), _MLP + "up_proj.weight": ("ffn", "hidden")},
        split=Split.GATED,
    ),
    Row(
        ours=_OURS + "mlp.linear_fc1.bias",
        theirs={_MLP + "gate_proj.bias": ("ffn",), _MLP + "up_proj.bias": ("ffn",)},
        split=Split.GATED,
        when="mlp_bias",
    ),
    Row(
        ours=_OURS + "mlp.linear_fc2.weight",
        theirs={_MLP + "down_proj.weight": ("hidden", "ffn")},
        split=Split.COLUMNS,
    ),
    Row(
        ours=_OURS + "mlp.linear_fc2.bias",
        theirs={_MLP + "down_proj.bias": ("hidden",)},
        split=Split.WHOLE,
        when="mlp_bias",
    ),
    Row(ours="decoder.final_layernorm.weight", theirs={"model.norm.weight": ("hidden",)}, split=Split.WHOLE),
    Row(
        ours="output_layer.weight",
        theirs={"lm_head.weight": ("vocabulary", "hidden")},
        split=Split.VOCABULARY,
        when="untied",
    ),
)

QK_NORM_ROWS = (
    Row(
        ours=_OURS + "self_attention.q_layernorm.weight",
        theirs={_ATTENTION + "q_norm.weight": ("head",)},
        split=Split.WHOLE,
    ),
    Row(
        ours=_OURS + "self_attention.k_layernorm.weight",
        theirs={_ATTENTION + "k_norm.weight": ("head",)},
        split=Split.WHOLE,
    ),
)
