"""Data structures for the table of a model family."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nemo_kto.architecture.config_fields import ModelFields
from nemo_kto.architecture.rope import longest_sequence, rope_settings, settings_of_type
from nemo_kto.layers.layer_settings import Experts, Temperature
from nemo_kto.mixers import SOFTMAX_ATTENTION, SequenceMixer
from nemo_kto.mixers.mixer import Windows
from nemo_kto.mixers.param_mapping import ParamMapping

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Values of ``Family.window``.
SLIDING = ("sliding_window", "")
SLIDING_LAYERS = ("sliding_window", "sliding_attention")
LINEAR_LAYERS = ("", "linear_attention")  # these have no window
CHUNKED_LAYERS = ("attention_chunk_size", "chunked_attention")
_ROPES = ("rope_scaling", "rope_parameters")
# Fields that are read in every family.
_COMMON = (
    "architectures", "model_type", "hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads",
    "num_key_value_heads", "tie_word_embeddings", "use_bidirectional_attention", "quantization_config",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExpertFields:
    """Fields of a configuration that describe its mixture of experts; those with an empty name do not exist."""

    number: str = "num_local_experts"
    chosen: str = "num_experts_per_tok"  # number of experts for each token, in some families one for each layer
    ffn_hidden_size: str = "intermediate_size"
    shared_ffn_hidden_size: str = ""
    shared_experts: str = ""  # number of shared experts, which are as wide as the others, in the place of a width
    normalized: str | bool = True  # also a constant
    groups: str = ""
    chosen_groups: str = ""
    scale: str = ""
    least_sum: str = ""
    sparse_layers: str = ""  # numbers of the layers with experts, from 0; if absent, these follow from the next two
    layer_kinds: str = ""  # of each layer, ``sparse`` or ``moe`` if it has experts; if absent, this follows from the others
    sparse_step: str = ""  # s if every s-th layer has experts
    dense_layers: str = ""  # numbers of layers without experts, from 0
    first_layer: str = ""  # number of the first layer with experts, from 0, and of the last one; -1: no limit
    last_layer: str = ""
    # These are as in ``Experts``; ``correction`` has -1 in the place of the number of experts.
    sigmoid: bool = False
    correction: tuple[int, ...] = ()
    router_in_fp32: bool = True
    shared_gate: bool = True
    added_sum: float = 0.0
    weighs_input: bool = False
    normed: bool = False
    best_of_group: int = 2

    def read(self, config: PretrainedConfig) -> Experts:
        """Return the mixture of experts in a configuration."""
        normalized, layers = self.normalized, self.layers(config.to_dict(), config.num_hidden_layers)
        number, width = getattr(config, self.number), getattr(config, self.ffn_hidden_size)
        shared_width = width * (getattr(config, self.shared_experts) or 0) if self.shared_experts else 0
        return Experts(
            number=number,
            per_token=self.per_token(config.to_dict()),
            ffn_hidden_size=width,
            normalized=bool(getattr(config, normalized)) if isinstance(normalized, str) else normalized,
            layers=tuple(layer in layers for layer in range(config.num_hidden_layers)),
            shared_ffn_hidden_size=getattr(config, self.shared_ffn_hidden_size, shared_width),
            shared_gate=self.shared_gate,
            sigmoid=self.sigmoid,
            correction=tuple(number if size == -1 else size for size in self.correction),
            groups=getattr(config, self.groups, 1) or 1,
            chosen_groups=getattr(config, self.chosen_groups, 1) or 1,
            scale=getattr(config, self.scale, 1.0),
            least_sum=getattr(config, self.least_sum, 1e-20),
            added_sum=self.added_sum,
            router_in_fp32=self.router_in_fp32,
            weighs_input=self.weighs_input,
            normed=self.normed,
            best_of_group=self.best_of_group,
        )

    @property
    def names(self) -> set[str]:
        """Names of the fields that describe the experts of a layer."""
        widths = (self.ffn_hidden_size, self.shared_ffn_hidden_size, self.shared_experts)
        names = (self.chosen, *widths, self.groups, self.chosen_groups, self.scale, self.least_sum)
        return {name for name in (*names, self.normalized) if name and isinstance(name, str)}

    def per_token(self, config: Mapping[str, Any]) -> Any:
        """Return the number of experts for each token, None if it is absent; ValueError if it differs between layers."""
        given = config.get(self.chosen)
        if not isinstance(given, list):
            return given
        if len(set(given)) != 1:
            raise ValueError(f"{self.chosen} must be the same in all layers, got {given}; choose another model")
        return given[0]

    def everywhere(self, config: Mapping[str, Any], num_layers: int | None) -> bool:
        """Return whether all layers have experts; False if this depends on a default of transformers."""
        decides = [name for name in (self.sparse_layers, self.layer_kinds, self.first_layer) if name]
        is_known = not decides or any(config.get(name) is not None for name in decides)
        return num_layers is not None and is_known and len(self.layers(config, num_layers)) == num_layers

    def layers(self, config: Mapping[str, Any], num_layers: int) -> set[int]:
        """Return the numbers, from 0, of the layers with experts, from the fields of a configuration."""
        if config.get(self.number) == 0:
            return set()
        if (listed := config.get(self.sparse_layers)) is not None:
            return {layer for layer in listed if layer < num_layers}
        if (kinds := config.get(self.layer_kinds)) is not None:
            return {layer for layer, kind in enumerate(kinds[:num_layers]) if kind in ("sparse", "moe")}
        step, dense = config.get(self.sparse_step, 1), {*(config.get(self.dense_layers) or ())}
        first, last = config.get(self.first_layer) or 0, config.get(self.last_layer, -1)
        layers = range(first, num_layers if last == -1 else min(last + 1, num_layers))
        return {layer for layer in layers if layer not in dense and (layer + 1) % step == 0}


def check_constants(config: PretrainedConfig, constants: Mapping[str, object]) -> None:
    """Raise a ValueError if a setting of a configuration has another value than the only one that is supported."""
    for name, value in constants.items():
        if (got := getattr(config, name)) != value:
            shown = [json.dumps(each) for each in (value, got)]
            raise ValueError(f"{name} must be {shown[0]} for {config.model_type}, got {shown[1]}; choose another model")


def with_required(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the fields of a model whose defaults are in its own code; ValueError if one of them is absent."""
    given = {key for part in (config.get(name) for name in _ROPES) if isinstance(part, Mapping) for key in part}
    if missing := [name for name in names if name not in given and config.get(name) is None]:
        raise ValueError(f"{', '.join(missing)} must be given for this model, which transformers does not have; add them")
    return dict(config)


def _first_given(config: Mapping[str, Any], *alternatives: tuple[str, ...]) -> set[str]:
    """Return the names of fields up to the first alternative with a value, which makes the next ones superfluous."""
    names = set[str]()
    for alternative in alternatives:
        names |= {*alternative}
        if any(name and config.get(name) is not None for name in alternative):
            break
    return names


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything the project knows about a model family."""

    name: str  # ``model_type`` in the configuration file
    hf_architecture: str  # entry of ``architectures`` in the configuration file
    published: str  # names of published models
    # other values of ``model_type``, or of that of the text model, for the same models, unknown to transformers
    aliases: tuple[str, ...] = ()
    # ``model_type`` of the configuration of transformers that has the same meaning, for a model whose own class is code in
    # its folder, which is copied to exports and never run.
    config_type: str = ""
    mappings: tuple[ParamMapping, ...]
    fields: type[ModelFields] = ModelFields  # fields of the configuration file with their types and constraints
    # Flag of ``Architecture`` (qkv_bias, qk_norm, post_norm, ...) -> field of the configuration that sets it, or a constant.
    flags: Mapping[str, str | bool] = field(default_factory=dict)
    # numeric attribute of ``Architecture`` -> field of the configuration, or a function of it
    numbers: Mapping[str, str | Callable[[PretrainedConfig], float]] = field(default_factory=dict)
    norm_epsilon: str = "rms_norm_eps"  # field of the configuration
    # Linear layers that have other names than in Llama's files, if necessary with the name of the module around them, and
    # the usual name for each, which LoRA's settings use.
    module_names: Mapping[str, str] = field(default_factory=dict)
    refused_by_peft: tuple[str, ...] = ()  # linear layers for which peft loads no adapters; "all" leaves them out
    # beginnings of parameters of a layer without adapters, because the class of transformers joins weights of the files
    unadapted: tuple[str, ...] = ()
    # linear layers of a layer of that class with other names than in the files -> number of matrices that each joins
    joined_linear: Mapping[str, int] = field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")  # field that names the MLP's activation, and the required name
    # Field with the number of tokens that a layer attends to, with the current one, and the type in ``layer_types`` of the
    # layers to which it applies, empty for all layers.
    window: tuple[str, str] = ("", "")
    window_switch: str = ""  # field without which, or with false, no layer has a window
    # Fields with the kind of each layer, of which the first one that is given counts; without one, the kinds follow from
    # ``layer_pattern``.
    layer_kinds: tuple[str, ...] = ("layer_types",)
    layer_pattern: str = ""
    recurrent: tuple[str, ...] = ()  # fields that describe a mixer with a state, of models that have such layers
    own: tuple[str, ...] = ()  # further fields that functions of this table or transformers read
    rope_own: tuple[str, ...] = ()  # settings of RoPE that functions of this table read
    one_part: bool = False  # a layer has either a sequence mixer or an MLP (or experts), with one norm
    gated_mlp: bool = True  # MLPs are down(activation(gate) * up), else down(activation(up))
    # whether no layer has RoPE
    no_rope: Callable[[Mapping[str, Any]], bool] = lambda config: False
    no_rope_layers: bool = False  # the configuration names layers without RoPE
    rope_in_windows: bool = False  # if some layers have a window, the others have no RoPE
    interleaved_rotary: bool = False  # neighbouring channels of a head are rotated together, not channels half a head apart
    # Attention temperature scaling; None for no scaling.
    temperature: Callable[[PretrainedConfig], Temperature | None] = lambda config: None
    partial_rotary: bool = False  # ``partial_rotary_factor`` may limit the rotation to the first channels of each head
    local_rope: bool = False  # sliding-window layers have a separate RoPE
    own_head_dim: bool = False  # the default head size is not the hidden size divided by the number of heads
    # Field with the number of keys that an indexer chooses for each token. Sequences of at most that many tokens attend to
    # all keys; longer ones are refused, so that no result depends on the indexer, whose weights are copied.
    chosen_keys: str = ""
    mxfp4: bool = False  # files may have the matrices of experts in MXFP4, which are dequantized when they are read
    dense_width: str = "intermediate_size"  # field with the MLP width of layers without experts
    # ``model_type`` of the text model in the configuration of a model with image input, of which only this is trained.
    text_type: str = ""
    flat_config: bool = False  # older files have the fields of the text model outside of ``text_config``
    ties_in_text: bool = False  # the text model, not the whole one, determines whether embeddings are tied
    ties_in_either: bool = False  # embeddings are tied if one of the two says so
    # Beginning of names in the tables -> what files have in its place; the first is the usual one.
    prefixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    module_prefix: str = "model."  # the same for ``model.`` in the names of transformers' modules, which PEFT uses
    # Kind of weights that are not trained, but copied to exports -> pattern of the beginning of their names, in which
    # ``{model}`` stands for the beginning of the text model's names, and ``{layers}`` for its number of layers.
    untrained: Mapping[str, str] = field(default_factory=dict)
    # End of the names of such weights with one value -> the only value that is supported.
    constants: Mapping[str, float] = field(default_factory=dict)
    # mappings of experts for files that have those of a layer in one tensor, instead of the mappings of the same parameters
    joined: tuple[ParamMapping, ...] = ()
    either_order: bool = False  # files may have the matrices of joined experts transposed
    experts: ExpertFields | None = None  # None for a dense family
    # Fields of config.json with their current names, also for older files; ValueError if they contradict each other.
    renewed: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    # Sequence mixer of each layer.
    mixers: Callable[[PretrainedConfig], tuple[SequenceMixer, ...]] = lambda config: (
        (SOFTMAX_ATTENTION,) * config.num_hidden_layers
    )

    @property
    def needs_original(self) -> bool:
        """Whether exports depend on files of the original model: weights that are not trained, dtypes, forms of experts."""
        return bool(self.untrained or self.joined) or any(mapping.frozen for mapping in self.mappings)

    @property
    def chunked(self) -> bool:
        """Whether a window does not slide, but is the chunk of the sequence that contains the token."""
        return self.window == CHUNKED_LAYERS

    def experts_of(self, config: Mapping[str, Any]) -> ExpertFields | None:
        """Return the fields of experts for the fields of a config.json; None if no layer has experts."""
        fields, layers = self.experts, config.get("num_hidden_layers")
        return fields if fields is None or layers is None or fields.layers(config, layers) else None

    def deciding(self, config: Mapping[str, Any]) -> set[str]:
        """Return the names of the fields that determine which other fields of a configuration are read."""
        names, experts = {"num_hidden_layers", self.window_switch if self.window[0] else ""}, self.experts
        if self.window[1] or self.recurrent:
            names |= _first_given(config, *((kinds,) for kinds in self.layer_kinds), (self.layer_pattern,))
        if self.no_rope_layers:
            names |= _first_given(config, ("no_rope_layers",), ("no_rope_layer_interval",))
        if experts is not None:
            others = (experts.sparse_step, experts.dense_layers, experts.first_layer, experts.last_layer)
            names |= {experts.number, *_first_given(config, (experts.sparse_layers,), (experts.layer_kinds,), others)}
        return names - {""}

    def reads(self, config: Mapping[str, Any]) -> set[str]:
        """Return the names of the fields that a configuration is read by, whose :meth:`deciding` fields are valid.

        The settings of its RoPE are named rope_parameters.NAME. All other fields may hold anything.
        """
        sources = (*self.flags.values(), *self.numbers.values())
        names = {*_COMMON, *self.deciding(config), self.activation[0], self.norm_epsilon, self.chosen_keys, *self.own}
        names |= {source for source in sources if isinstance(source, str)}
        given = [config[name] for name in self.layer_kinds if name in names and config.get(name) is not None]
        kinds, (size, layer_type) = given[0] if given else None, self.window
        names |= {"head_dim"} - self.numbers.keys()
        if kinds is None or not layer_type or layer_type in kinds:
            names |= {size} if config.get(self.window_switch, not self.window_switch) else set()
        if kinds is None or not {"linear_attention", "mamba"}.isdisjoint(kinds):
            names |= {*self.recurrent}
        if (experts := self.experts_of(config)) is not None:
            names |= experts.names
        has_dense = experts is None or not experts.everywhere(config, config.get("num_hidden_layers"))
        if (kinds is None or "mlp" in kinds) if self.one_part else has_dense:
            names.add(self.dense_width)
        return (names | (set() if self.no_rope(config) else self._rope_names(config))) - {""}

    def _rope_names(self, config: Mapping[str, Any]) -> set[str]:
        """Return the names of the fields and settings that a configuration's RoPE is read by."""
        names = {"rope_theta", "partial_rotary_factor", *_ROPES, "rope_local_base_freq" if self.local_rope else ""}
        parts = {name: config[name] for name in _ROPES if isinstance(config.get(name), Mapping)}
        both = {key: value for part in parts.values() for key, value in part.items()}
        nested = {f"rope_parameters.{kind}": both.get(kind) for kind in ("full_attention", "sliding_attention")}
        of_layers = {name: part for name, part in nested.items() if isinstance(part, Mapping)}
        for name, settings in (dict.fromkeys(parts, both) | of_layers).items():
            used = settings_of_type(settings.get("rope_type", settings.get("type", "default"))) | {*self.rope_own}
            names |= {name, *used, *(f"{name}.{setting}" for setting in used)}
        return names

    def windows(self, config: PretrainedConfig) -> Windows:
        """Return the number of tokens that each layer attends to, with the current one; None for all previous tokens.

        Raises ValueError if the window has no tokens, or a layer is of another type.
        """
        field_name, layer_type = self.window
        size = getattr(config, field_name) if field_name else None
        if not layer_type:
            return (size,) * config.num_hidden_layers
        if layer_type in config.layer_types and size == 0:
            raise ValueError(f"{field_name} must be at least 1 where layer_types has {layer_type}, got 0; correct one")
        if layer_type in config.layer_types and size is None and self.chunked:
            raise ValueError(f"{field_name} must be given where layer_types has {layer_type}, got null; add it")
        sizes = {"full_attention": None, layer_type: size}
        if unknown := sorted(set(config.layer_types) - set(sizes)):
            raise ValueError(f"layer_types must be of {', '.join(sizes)}, got {', '.join(unknown)}; choose another model")
        return tuple(sizes[kind] for kind in config.layer_types)

    def rotates(self, config: PretrainedConfig) -> tuple[bool, ...]:
        """Return whether each layer has RoPE; despite its name, ``no_rope_layers`` has a 1 for each that has it."""
        if self.rope_in_windows and any(windows := self.windows(config)):
            return tuple(window is not None for window in windows)
        if self.no_rope(config.to_dict()):
            return (False,) * config.num_hidden_layers
        marks = config.no_rope_layers if self.no_rope_layers else [1] * config.num_hidden_layers
        return tuple(map(bool, marks[: config.num_hidden_layers]))

    def rope(self, config: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
        """Return a configuration whose RoPE is that of one layer type (full_attention, sliding_attention) in all layers.

        Older configurations have ``rope_local_base_freq`` instead of one entry per layer type in ``rope_parameters``.
        """
        settings, parameters = rope_settings(config), config.get("rope_parameters") or {}
        if self.text_type and settings.get("rope_type", settings.get("type")) == "mrope":
            # the positions of a text token are the same in time, height and width
            return {**config, "rope_scaling": None, "rope_parameters": {**settings, "rope_type": "default"}}
        if self.local_rope and layer_type in parameters:
            return {**config, "rope_scaling": None, "rope_parameters": parameters[layer_type]}
        if self.local_rope and layer_type == "sliding_attention":
            theta = config.get("rope_local_base_freq", config.get("rope_theta"))
            return {**config, "rope_scaling": None, "rope_parameters": None, "rope_theta": theta}
        return config

    def longest_sequence(self, config: Mapping[str, Any]) -> tuple[str, int | None]:
        """Return the field that limits the sequence length, and its value in tokens; None if it is not set."""
        limit = longest_sequence(self.rope(config, "full_attention"))
        if not self.chosen_keys or (limit[1] or math.inf) < config[self.chosen_keys]:
            return limit
        return self.chosen_keys, config[self.chosen_keys]


def prefixes_of(names: Collection[str], options: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the beginning that replaces each one of the tables in a file with these names, from ``Family.prefixes``."""
    return {
        ours: next((start for start in starts if any(name.startswith(start) for name in names)), starts[0])
        for ours, starts in options.items()
    }


def name_in_file(name: str, prefixes: Mapping[str, str]) -> str:
    """Return the name in the file of a weight of the tables."""
    return next((theirs + name.removeprefix(ours) for ours, theirs in prefixes.items() if name.startswith(ours)), name)
