"""Nemotron-H, Nano 2, Nemotron 3 Nano: each layer is Mamba-2, attention without RoPE, an MLP without a gate, or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from nemo_kto.architecture.config_fields import ABSENT, Count, ModelFields, OrZero, PartCount, Positive, Steps, Switch
from nemo_kto.architecture.family import ExpertFields, Family, check_constants
from nemo_kto.architecture.mappings import DENSE, MTP_LAYERS, correction_bias, sparse
from nemo_kto.mixers import NO_MIXER, SOFTMAX_ATTENTION, Mamba2, SequenceMixer
from nemo_kto.mixers.mamba2 import mamba2_weights
from nemo_kto.mixers.param_mapping import Layers, ParamMapping, Shape, Split, replicated
from nemo_kto.mixers.softmax_attention import WEIGHTS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
# Settings that no published model has otherwise.
_CONSTANT = {
    "use_conv_bias": True,
    "use_bias": False,
    "mlp_bias": False,
    "attention_bias": False,
    "mamba_hidden_act": "silu",
}


class NemotronFields(ModelFields):
    """Fields of config.json; older files name the layers by the letters of ``hybrid_override_pattern``."""

    mlp_hidden_act: str = ABSENT
    layer_norm_epsilon: Positive = ABSENT
    hybrid_override_pattern: str | None = None
    layers_block_type: list[Literal["mamba", "linear_attention", "attention", "full_attention", "mlp", "moe"]] | None = None
    mamba_num_heads: Count = ABSENT
    mamba_head_dim: Count = ABSENT
    ssm_state_size: Count = ABSENT
    n_groups: Count = ABSENT
    conv_kernel: Annotated[Count, Ge(2)] = ABSENT
    time_step_limit: Steps = ABSENT
    n_routed_experts: PartCount = ABSENT
    n_group: OrZero = ABSENT
    topk_group: OrZero = ABSENT
    moe_intermediate_size: Count = ABSENT
    moe_shared_expert_intermediate_size: Count = ABSENT
    norm_topk_prob: Switch = ABSENT
    routed_scaling_factor: Positive = ABSENT


def _renewed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the kinds and the number of layers."""
    name, kinds, layers = "layers_block_type", config.get("layers_block_type"), config.get("num_hidden_layers")
    if kinds is None and (pattern := config.get("hybrid_override_pattern")) is not None:
        name, kinds = "hybrid_override_pattern", [_LETTERS.get(letter) for letter in pattern]
        if None in kinds:
            letters = ", ".join(_LETTERS)
            raise ValueError(f"{name} must consist of {letters}, got {pattern[kinds.index(None)]!r}; choose another model")
    if kinds is None:
        raise ValueError(f"hybrid_override_pattern or {name} must name the kind of each layer, got neither; add it")
    if layers is not None and len(kinds) != layers:
        raise ValueError(f"{name} must describe the {layers} layers of num_hidden_layers, got {len(kinds)}; correct one")
    return {**config, "layers_block_type": [_OLD_KINDS.get(kind, kind) for kind in kinds], "num_hidden_layers": len(kinds)}


def _mixers(config: PretrainedConfig) -> tuple[SequenceMixer, ...]:
    check_constants(config, _CONSTANT)
    if (size := config.moe_latent_size) is not None:
        text = f"moe_latent_size must be null, got {size}: experts that process a projection of the hidden state"
        raise ValueError(f"{text} are not supported; choose another model")
    mamba = Mamba2(
        heads=config.mamba_num_heads,
        groups=config.n_groups,
        head_dim=config.mamba_head_dim,
        state_dim=config.ssm_state_size,
        kernel=config.conv_kernel,
        step_limits=tuple(config.time_step_limit),
    )
    mixers = {"linear_attention": mamba, "full_attention": SOFTMAX_ATTENTION}
    return tuple(mixers.get(kind, NO_MIXER) for kind in config.layers_block_type)


def _mlp(name: str, block: str, width: str) -> tuple[ParamMapping, ParamMapping]:
    """Return the mappings of both projections of an MLP, by its name in our layers and in those of the file."""
    up: dict[str, Shape] = {f"{block}.up_proj.weight": (width, "hidden")}
    down: dict[str, Shape] = {f"{block}.down_proj.weight": ("hidden", width)}
    return (
        sparse(f"{name}.linear_fc1.weight", up, Split.COLUMN_PARALLEL),
        sparse(f"{name}.linear_fc2.weight", down, Split.ROW_PARALLEL),
    )


_RENAMED: dict[str, dict[str, Shape]] = {
    "embedding.word_embeddings.weight": {"model.embeddings.weight": ("vocabulary", "hidden")},
    "decoder.final_layernorm.weight": {"model.norm_f.weight": ("hidden",)},
}
_OUTSIDE = [each for each in DENSE if "{layer}" not in each.mcore_name]
NEMOTRON_H = Family(
    name="nemotron_h",
    hf_architecture="NemotronHForCausalLM",
    published="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano; not Nemotron 3 Super and Ultra",
    mappings=(
        *(replace(each, hf_names=_RENAMED.get(each.mcore_name, each.hf_names)) for each in _OUTSIDE),
        replace(replicated("input_layernorm.weight", "norm.weight", "hidden"), layers=Layers.MIXING),
        replace(replicated("pre_mlp_layernorm.weight", "norm.weight", "hidden"), layers=Layers.FEED_FORWARD),
        *mamba2_weights("mixer"),
        *(
            replace(each, hf_names={name.replace("self_attn", "mixer"): shape for name, shape in each.hf_names.items()})
            for each in WEIGHTS
        ),
        *(replace(each, layers=Layers.DENSE) for each in _mlp("mlp", "mixer", "ffn")),
        sparse("mlp.router.weight", {"mixer.gate.weight": ("experts", "hidden")}, Split.REPLICATED),
        correction_bias("mixer.gate.e_score_correction_bias", "experts"),
        *_mlp("mlp.experts.local_experts.{expert}", "mixer.experts.{expert}", "expert_ffn"),
        *_mlp("mlp.shared_experts", "mixer.shared_experts", "shared_ffn"),
    ),
    fields=NemotronFields,
    norm_epsilon="layer_norm_epsilon",
    activation=("mlp_hidden_act", "relu2"),
    module_names={"embeddings": "embed_tokens"},
    refused_by_peft=Mamba2.lora_outputs,  # whose weight fused kernels read
    one_part=True,
    gated_mlp=False,
    no_rope=lambda config: True,
    layer_kinds=("layers_block_type", "hybrid_override_pattern"),
    # older files may have names of Mamba-2's fields that transformers renews
    own=(*_CONSTANT, "moe_latent_size", "mamba_dt_limit", "mamba_n_groups", "mamba_d_conv", "mamba_conv_bias"),
    recurrent=("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "time_step_limit"),
    own_head_dim=True,
    prefixes={"model.": ("backbone.", "model.")},
    untrained=MTP_LAYERS,
    renewed=_renewed,
    mixers=_mixers,
    experts=ExpertFields(
        number="n_routed_experts",
        ffn_hidden_size="moe_intermediate_size",
        shared_ffn_hidden_size="moe_shared_expert_intermediate_size",
        shared_gate=False,
        normalized="norm_topk_prob",
        groups="n_group",
        chosen_groups="topk_group",
        scale="routed_scaling_factor",
        layer_kinds="layers_block_type",
        sigmoid=True,
        correction=(-1,),
    ),
)
