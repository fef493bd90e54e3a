"""Architecture of a model: read from the configuration of a Hugging Face folder, with the padding that the layout needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from nemo_kto.architecture.config_file import CONFIG, read_config_file
from nemo_kto.architecture.families import Family
from nemo_kto.architecture.rope import read_rope
from nemo_kto.errors import UserError
from nemo_kto.layers.layer_settings import Experts, Rope
from nemo_kto.mixers import NO_MIXER, SequenceMixer
from nemo_kto.mixers.mixer import ModelSizes, round_up
from nemo_kto.mixers.param_mapping import Layers, ParamMapping

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class Architecture(ModelSizes):
    """A model's shape; :class:`ModelSizes` has the sizes and features that sequence mixers read.

    Sizes that tensor parallelism must divide but does not are padded. A padded vocabulary row is never looked up and is
    left out of the softmax. The padded model computes the same as the unpadded one, and the padding is dropped on export.
    """

    family: Family
    ffn_hidden_size: int  # width of the gate and of the up projection, in layers without experts
    vocab_size: int  # rows of the embedding in the Hugging Face folder
    max_position_embeddings: int
    norm_epsilon: float
    mixers: tuple[SequenceMixer, ...]  # sequence mixer of each layer
    tied: bool  # the output layer shares its weight with the embedding
    qkv_bias: bool = False
    expert_bias: bool = False  # the projections of the experts have biases, and so has the router
    pre_norm: bool = True  # the inputs of attention and MLP are normalised
    post_norm: bool = False  # the outputs of attention and MLP are normalised
    scaled_layers: bool = False  # the output of each layer is multiplied by a number of its own
    layer_norm: bool = False  # norms are layer norms without a bias, which subtract the mean, instead of RMS norms
    parallel: bool = False  # attention and MLP of a layer have the same normalised input; both outputs are added to it
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(hidden size)
    embedding_multiplier: float = 1.0  # embeddings are multiplied by it
    residual_multiplier: float = 1.0  # outputs of attention and MLP are multiplied by it before they are added
    logit_multiplier: float = 1.0  # logits are multiplied by it
    attention_multiplier: float | None = None  # factor on the scores; None for one that follows from the head size
    query_pre_attn_scalar: float | None = None  # scores are divided by its square root; None means the head size
    logit_softcap: float | None = None  # logits become c tanh(logit / c) with this c; None for no cap
    # Limit l of a clamped SwiGLU, gate * sigmoid(swiglu_alpha * gate) * (up + 1), in which the gate is clamped to at most l
    # and the up projection to [-l, l]; None for the unclamped activation in its usual form.
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None  # set only together with the limit
    gate_multiplier: float = 1.0  # gates of the MLP are multiplied by it before their activation
    mlp_multiplier: float = 1.0  # outputs of the MLP are multiplied by it
    experts: Experts | None = None
    expert_tensor_parallel: int = 1
    base_format: str | None = None  # format of frozen linear layers, a name in ``FORMATS``; None: not quantized

    @property
    def unsupported_by_te(self) -> tuple[str, ...]:
        """Features of the model that Transformer Engine's layers lack; with any of them, the torch layers are used."""
        features = {
            "norms after attention and MLP": self.post_norm,
            "layer norms without a bias": self.layer_norm,
            "attention and MLP in parallel": self.parallel,
        }
        for mixer in dict.fromkeys(self.mixers):
            features |= mixer.unsupported_by_te(self)
        features |= {"an activation other than SiLU": self.activation != "silu"}
        features |= {"experts with biases": self.expert_bias, "a clamped activation": self.swiglu_limit is not None}
        features |= {"quantized weights": self.base_format is not None}
        return tuple(feature for feature, has in features.items() if has)

    @property
    def largest_head(self) -> int:
        """Size of the largest heads in softmax attention; 0 without it."""
        return max(mixer.head_dim_of(self) for mixer in self.mixers)

    @property
    def norms(self) -> int:
        """Number of norms of a hidden state in a layer."""
        if self.parallel or self.family.one_part:
            return 1
        return 2 * (self.pre_norm + self.post_norm) + 3 * (self.experts is not None and self.experts.normed)

    @property
    def scaled_mlp(self) -> bool:
        """Whether the MLP has factors of its own."""
        return (self.gate_multiplier, self.mlp_multiplier) != (1.0, 1.0)

    @property
    def activation(self) -> str:
        """Name of the activation of the MLP's gate."""
        return self.family.activation[1]

    @property
    def sparse_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return (False,) * self.num_layers if self.experts is None else self.experts.layers

    @cached_property
    def layers_with(self) -> dict[Layers, tuple[bool, ...]]:
        """Whether each layer is of one of these kinds."""
        mixing = tuple(mixer != NO_MIXER for mixer in self.mixers)
        feed_forward = tuple(not (self.family.one_part and mixes) for mixes in mixing)
        return {
            Layers.ALL: (True,) * self.num_layers,
            Layers.DENSE: tuple(has and not sparse for has, sparse in zip(feed_forward, self.sparse_layers, strict=True)),
            Layers.SPARSE: self.sparse_layers,
            Layers.MIXING: mixing,
            Layers.FEED_FORWARD: feed_forward,
        }

    def instances(
        self, mapping: ParamMapping, layers: Iterable[int], *, experts: int | None = None
    ) -> Iterator[dict[str, int]]:
        """Yield the layer number, and the expert number for experts, of each instance of a parameter of the table.

        Only these layers, counted from 0, are considered, and only the first ``experts`` of a layer; None for all.
        Parameters outside of the layers do not depend on them.
        """
        if mapping.required_flag and not getattr(self, mapping.required_flag):
            return
        if "{layer}" not in mapping.mcore_name:
            yield {}
            return
        number = self.sizes["experts"] if experts is None else experts
        has = self.layers_with[mapping.layers]
        for layer in layers:
            if not has[layer] or mapping.mixer not in ("", *self.mixers[layer].kinds):
                continue
            if mapping.of_expert:
                yield from ({"layer": layer, "expert": expert} for expert in range(number))
            else:
                yield {"layer": layer}

    @property
    def untied(self) -> bool:
        """Whether the output layer has its own weight."""
        return not self.tied

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the padded embedding: the next multiple of the tensor-parallel size.

        The computation requires only equal shards. The common rounding to a multiple of 128 per rank would only enlarge the
        embedding; published vocabularies already have round sizes where these make the matrix product faster.
        """
        return round_up(self.vocab_size, self.tensor_parallel)

    @property
    def softmax_scale(self) -> float | None:
        """Factor on the attention scores; None for 1 / sqrt(head size)."""
        return self.rope.softmax_scale(self.head_dim, self.query_pre_attn_scalar, self.attention_multiplier)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes of weights, by the names that the family tables use."""
        query, key_value = self.num_attention_heads * self.head_dim, self.num_query_groups * self.head_dim
        of_mixers = {name: size for mixer in dict.fromkeys(self.mixers) for name, size in mixer.sizes.items()}
        return of_mixers | {
            "vocabulary": self.vocab_size,
            "hidden": self.hidden_size,
            "query": query,
            "query_and_gate": 2 * query,
            "key_value": key_value,
            "query_key_value": query + 2 * key_value,
            "ffn": self.ffn_hidden_size,
            "gate_and_up": 2 * self.ffn_hidden_size,
            "head": self.head_dim,
            "heads": self.num_attention_heads,
            "key_heads": self.num_query_groups,
            "experts": 0 if self.experts is None else self.experts.number,
            "expert_ffn": 0 if self.experts is None else self.experts.ffn_hidden_size,
            "expert_gate_and_up": 0 if self.experts is None else 2 * self.experts.ffn_hidden_size,
            "shared_ffn": 0 if self.experts is None else self.experts.shared_ffn_hidden_size,
            "shared_gate_and_up": 0 if self.experts is None else 2 * self.experts.shared_ffn_hidden_size,
        }


def read_architecture(
    folder: str | Path, *, tensor_parallel: int, expert_tensor_parallel: int | None = None
) -> Architecture:
    """Read the architecture from config.json in a Hugging Face folder.

    The parallel sizes determine the padding; that of experts is by default the tensor-parallel size. Raises UserError if
    there is no config.json, or it does not describe a supported model; names the problem.
    """
    folder = Path(folder)
    fields, family = read_config_file(folder)  # before transformers, whose error would not list the supported models
    from transformers import CONFIG_MAPPING, AutoConfig

    types = CONFIG_MAPPING[family.text_type or family.name].__dataclass_fields__
    given = {name: fields[name] for name in fields.keys() - {"architectures", "model_type", "quantization_config"}}
    given = {name: _as_type(value, types[name].type) if name in types else value for name, value in given.items()}
    if family.text_type:
        text = {**given, "model_type": family.text_type}
        given = {"text_config": text, **{name: text[name] for name in text.keys() & {"tie_word_embeddings"}}}
    try:
        config = AutoConfig.for_model(family.name, **given)
    except Exception as error:  # for an invalid field transformers may raise any exception
        message = f"{folder / CONFIG} is refused by transformers: {error}"
        raise UserError(f"{message}; correct it or choose another model") from error
    text = config.get_text_config()
    try:
        return _architecture(
            text,
            family,
            tied=bool((text if family.ties_in_text else config).tie_word_embeddings),
            tensor_parallel=tensor_parallel,
            expert_tensor_parallel=tensor_parallel if expert_tensor_parallel is None else expert_tensor_parallel,
        )
    except ValueError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error


def _as_type(value: Any, annotation: object) -> object:
    """Return a number as an integer or float, as transformers requires; published files may have the other type."""
    kinds = get_args(annotation) or (annotation,)
    if type(value) not in (int, float) or type(value) in kinds or not abs(value) < 2**53:
        return value
    return next((kind(value) for kind in (float, int) if kind in kinds and kind(value) == value), value)


def _architecture(
    config: PretrainedConfig, family: Family, *, tied: bool, tensor_parallel: int, expert_tensor_parallel: int
) -> Architecture:
    heads, experts = config.num_attention_heads, None if family.experts is None else family.experts.read(config)
    if experts is not None and not any(experts.layers):
        experts = None
    flags: dict[str, Any] = {
        name: bool(getattr(config, field, False)) if isinstance(field, str) else field
        for name, field in family.flags.items()
    }
    for bias in ("qkv_bias", "output_bias"):
        if flags.get("mlp_bias") and not flags[bias]:
            raise ValueError(
                f"mlp_bias=true with {family.flags[bias]}=false is not supported: megatron-core adds the biases of the MLP "
                "only together with those of attention; choose another model"
            )
    # layers without a window may have other heads than those with one
    kinds = ("sliding_attention", "full_attention")
    windowed, full = [config.per_layer_config[kind] for kind in kinds] if config.is_heterogeneous else (config, config)
    numbers: dict[str, Any] = {"head_dim": getattr(windowed, "head_dim", None) or config.hidden_size // heads}
    numbers |= {
        name: getattr(config, source) if isinstance(source, str) else source(config)
        for name, source in family.numbers.items()
    }
    rotates, values = family.rotates(config), config.to_dict()
    ropes = [Rope(frequencies=())]
    if any(rotates):
        ropes = [read_rope(family.rope(full.to_dict(), "full_attention"), partial=family.partial_rotary)]
    if family.local_rope:
        ropes.append(read_rope(family.rope(values, "sliding_attention")))
    # An attention factor can be part of the softmax scale only if all layers are alike, because the scale is the same in
    # all layers; otherwise it is applied to cosines and sines. A norm after the rotation would cancel it in the scale.
    if family.local_rope or not all(rotates) or flags.get("rotated_norm") or flags.get("qk_norm_after_rope"):
        ropes = [replace(rope, factor_in_table=rope.attention_factor != 1.0) for rope in ropes]
    architecture = Architecture(
        family=family,
        tensor_parallel=tensor_parallel,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=heads,
        num_query_groups=getattr(windowed, "num_key_value_heads", None) or heads,
        ffn_hidden_size=getattr(config, family.dense_width),
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        norm_epsilon=getattr(config, family.norm_epsilon),
        rope=ropes[0],
        local_rope=ropes[1] if family.local_rope else None,
        windows=family.windows(config),
        rotates=rotates,
        mixers=family.mixers(config),
        temperature=family.temperature(config),
        tied=tied,
        experts=experts,
        expert_tensor_parallel=expert_tensor_parallel,
        **flags,
        **numbers,
    )
    _check_widths(architecture)
    return architecture


def _check_widths(architecture: Architecture) -> None:
    experts, ranks = architecture.experts, architecture.tensor_parallel
    widths: list[tuple[str, int, str, int]] = []
    if any(architecture.layers_with[Layers.DENSE]):
        widths.append((architecture.family.dense_width, architecture.ffn_hidden_size, "tensor-parallel", ranks))
    if experts is not None:
        of_experts = architecture.expert_tensor_parallel
        widths.append(("the width of an expert", experts.ffn_hidden_size, "expert-tensor-parallel", of_experts))
        widths.append(("the width of the shared expert", experts.shared_ffn_hidden_size, "tensor-parallel", ranks))
    for name, width, kind, size in widths:
        if width % size:
            text = f"{name} must be divisible by the {kind} size, got {width} and {size}"
            raise ValueError(f"{text}; choose a smaller {kind} size")
