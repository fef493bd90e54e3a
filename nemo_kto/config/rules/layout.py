"""Rules for the parallel layout: pipeline stages and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nemo_kto.architecture.families import ExpertFields, Family
from nemo_kto.architecture.lora import NEMO_TARGETS, LoRASettings, has_adaptable_experts
from nemo_kto.architecture.stages import PipelineSplit, SplitError
from nemo_kto.config.choices import adapter_settings, pipeline_split
from nemo_kto.config.schema import RunConfig
from nemo_kto.errors import ConfigError

Errors = Iterator[ConfigError]
_STAGES, _MODEL = "model.pipeline_model_parallel_size", "pretrained_checkpoint.restore_from_path"
# Attribute of PipelineSplit -> the key that sets it.
_KEYS = {
    "stages": _STAGES,
    "chunks": "model.virtual_pipeline_model_parallel_size",
    "first": "model.num_layers_in_first_pipeline_stage",
    "last": "model.num_layers_in_last_pipeline_stage",
    "counts_embedding": "model.account_for_embedding_in_pipeline_split",
    "counts_loss": "model.account_for_loss_in_pipeline_split",
}
_RECOMPUTE = "model.activations_checkpoint"


def pipeline_rules(cfg: RunConfig, layers: int | None) -> Errors:
    """Check the pipeline split of a model; ``layers`` is its number of layers, None if not known."""
    split = pipeline_split(cfg.model)
    changed = {name: getattr(split, name) for name in _KEYS if getattr(split, name) != getattr(PipelineSplit(), name)}
    given = {_KEYS[name]: value for name, value in changed.items() if name != "stages"}
    if split.stages == 1 and given:
        for key, value in given.items():
            text = f"needs {_STAGES} above 1, got {_word(value)} and 1; raise it or set {key}={_left_out(value)}"
            yield ConfigError(key, text, (_STAGES,))
    elif changed.keys() & {"first", "last"} and changed.keys() & {"counts_embedding", "counts_loss"}:
        ends = [_KEYS[name] for name in ("first", "last") if name in changed]
        for key in (_KEYS[name] for name in ("counts_embedding", "counts_loss") if name in changed):
            text = (
                f"must be false where {' and '.join(ends)} say how many layers a stage has, got true; give one or the other"
            )
            yield ConfigError(key, text, tuple(ends))
    elif layers is not None:
        yield from _shares(cfg, split, layers)


def _shares(cfg: RunConfig, split: PipelineSplit, layers: int) -> Errors:
    """Check that the layers can be partitioned across pipeline stages."""
    where, keys = cfg.pretrained_checkpoint.restore_from_path, (_MODEL, *_KEYS.values())
    try:
        held = split.layers(layers)
    except SplitError as error:
        key, value = _KEYS[error.name], getattr(split, error.name)
        text = f"{error.constraint} of {where}, got {value}; {_remedy(split, error.name, layers)}"
        yield ConfigError(key, text, tuple(other for other in keys if other != key))
    else:
        yield from _groups(cfg, sorted({len(chunk) for stage in held for chunk in stage} - {0}), keys)


def _groups(cfg: RunConfig, sizes: list[int], reads: tuple[str, ...]) -> Errors:
    """Check the size of the groups of layers that are recomputed together.

    megatron-core forms groups of equal size within a chunk.
    """
    group = cfg.model.activations_checkpoint_num_layers
    if cfg.model.activations_checkpoint_method == "uniform" and group and any(size % group for size in sizes):
        shares = " and ".join(map(str, sizes))
        fitting = max(number for number in range(1, group) if not any(size % number for size in sizes))
        text = f"must divide the layers that stages have in one piece ({shares}), got {group}; use {fitting}"
        yield ConfigError(f"{_RECOMPUTE}_num_layers", text, (f"{_RECOMPUTE}_method", *reads))


def _remedy(split: PipelineSplit, name: str, layers: int) -> str:
    """Return the nearest valid values of the field ``name`` as a remedy.

    For the number of stages, also suggest other ends of the pipeline with which this number is valid.
    """
    value = getattr(split, name)
    fitting = [other for other in range(1, layers + 1) if _with(split, name, other).fits(layers)]
    below, above = [other for other in fitting if other < value][-1:], [other for other in fitting if other > value][:1]
    words = [_left_out(other) if name == "chunks" and other == 1 else str(other) for other in below]
    words += map(str, above if name in ("first", "last") else ())
    if name == "stages":
        words += _other_ends(split, layers)
    return f"use {', or '.join(words)}" if words else "choose another number of stages"


def _other_ends(split: PipelineSplit, layers: int) -> Iterator[str]:
    """Yield settings of the pipeline's ends that make the number of stages valid.

    Either the embedding or the loss no longer counts as a layer, or the last stage gets another number of layers.
    """
    counted = [name for name in ("counts_embedding", "counts_loss") if getattr(split, name)]
    for name in counted:
        if _with(split, name, False).fits(layers):
            yield f"{_KEYS[name]}=false"
    if not counted:
        sizes, average = range(1, layers), layers / split.stages
        fitting = [last for last in sizes if replace(split, last=last).fits(layers)]
        # Sizes below the average first, because the last stage also computes the loss.
        nearest = sorted(fitting, key=lambda last: (last > average, abs(last - average)))
        yield from (f"{_KEYS['last']}={last}" for last in nearest[:1])


def _with(split: PipelineSplit, name: str, value: Any) -> PipelineSplit:
    return replace(split, **{name: value})


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _left_out(value: object) -> str:
    return "false" if isinstance(value, bool) else "null"


_MODEL = "pretrained_checkpoint.restore_from_path"
_PARALLEL, _TENSOR = "model.expert_model_parallel_size", "model.expert_tensor_parallel_size"
_SCHEME, _ADAPTER = "model.peft.peft_scheme", "model.peft.restore_from_path"
_TARGETS, _SELECTION = "model.peft.lora_tuning.target_modules", "model.peft.lora_tuning.layer_selection"


def expert_rules(cfg: RunConfig, config: Mapping[str, Any], family: Family) -> Iterator[ConfigError]:
    """Check the settings for experts against the content of config.json and the family that it names."""
    fields = family.experts
    if fields is None:
        yield from _dense(cfg, family)
        return
    model, where = cfg.model, cfg.pretrained_checkpoint.restore_from_path
    number, parallel = config.get(fields.number), model.expert_model_parallel_size
    if number is not None and number % parallel:
        text = f"must divide the {number} experts of {where}, got {parallel}; use {divisor_below(number, parallel)}"
        yield ConfigError(_PARALLEL, text, (_MODEL,))
    tensor, shards = model.tensor_model_parallel_size, model.expert_tensor_parallel_size
    key, shards = ("model.tensor_model_parallel_size", tensor) if shards is None else (_TENSOR, shards)
    name, width = fields.ffn_hidden_size, config.get(fields.ffn_hidden_size)
    if width is not None and width % shards:
        text = f"must divide {name} = {width} of {where}, got {shards}; use {_TENSOR}={divisor_below(width, shards)}"
        yield ConfigError(key, text, (_MODEL, _TENSOR))
    if tensor > 1 and not model.sequence_parallel:
        text = (
            f"must be true for a mixture of experts with model.tensor_model_parallel_size above 1, got false with {tensor}"
        )
        yield ConfigError("model.sequence_parallel", f"{text}; set it", ("model.tensor_model_parallel_size", _MODEL))
    if model.fp8 is not None:
        text = (
            f"must be null for a mixture of experts, whose experts get any number of tokens, got {model.fp8}; leave it out"
        )
        yield ConfigError("model.fp8", text, (_MODEL,))
    try:
        adapters = adapter_settings(model.peft)
    except ValueError:
        return  # reported by the check of the adapters
    if adapters is None:
        yield from _stages(cfg, config, fields)
        return
    modules = [name for name in adapters.modules if name in NEMO_TARGETS["mlp"]]
    if modules and has_adaptable_experts(family):
        yield from _adapted(cfg, modules, shards)
        yield from _stages(cfg, config, fields, adapters)


def _adapted(cfg: RunConfig, modules: list[str], shards: int) -> Iterator[ConfigError]:
    """Check the requirements of adapters on the given modules of the experts."""
    if shards > 1:
        text = f"must be 1 with adapters on experts ({', '.join(modules)}), which need whole experts, got {shards}; set it"
        reads = (_SCHEME, _TARGETS, _ADAPTER, "model.tensor_model_parallel_size", _MODEL)
        yield ConfigError(_TENSOR, f"{text}, or adapt the attention alone: {_TARGETS}=[attention]", reads)
    if cfg.model.peft.restore_from_path is None and len({"gate_proj", "up_proj"}.intersection(modules)) == 1:
        got = ", ".join(cfg.model.peft.lora_tuning.target_modules)
        text = f"must have gate_proj and up_proj together for a mixture of experts, got {got}: peft has both in one tensor"
        yield ConfigError(_TARGETS, f"{text}; use mlp_fc1 for the two", (_SCHEME, _MODEL))


def _stages(
    cfg: RunConfig, config: Mapping[str, Any], fields: ExpertFields, adapters: LoRASettings | None = None
) -> Iterator[ConfigError]:
    """Check that either all pipeline stages train experts or none does.

    This is required because the gradient norm of the experts is summed over all stages.
    """
    layers, split = config.get("num_hidden_layers"), pipeline_split(cfg.model)
    if layers is None or not split.fits(layers):
        return
    trained = fields.layers(config, layers)
    if adapters is not None and adapters.layers is not None:
        trained &= {number - 1 for number in adapters.layers}
    held = [{layer for chunk in stage for layer in chunk} for stage in split.layers(layers)]
    without = [number for number, layers_of in enumerate(held, start=1) if trained.isdisjoint(layers_of)]
    if without and trained:
        key, what = "model.pipeline_model_parallel_size", "experts" if adapters is None else "adapted experts"
        text = f"must leave layers with {what} to every stage, got {split.stages}, with none on stage {without[0]}"
        yield ConfigError(key, f"{text}; use fewer stages", (_SCHEME, _TARGETS, _ADAPTER, _SELECTION, _MODEL))


def _dense(cfg: RunConfig, family: Family) -> Iterator[ConfigError]:
    without = {_PARALLEL: (1, "1"), _TENSOR: (None, "null"), "model.moe_aux_loss_coeff": (0.0, "0.0")}
    for key, (nothing, text) in without.items():
        if (value := getattr(cfg.model, key.removeprefix("model."))) != nothing:
            where = cfg.pretrained_checkpoint.restore_from_path
            message = f"must be {text} for a model without experts, got {value} with {where} ({family.name}); leave it out"
            yield ConfigError(key, message, (_MODEL,))


def divisor_below(number: int, limit: int) -> int:
    """Return the largest divisor of ``number`` that does not exceed ``limit``."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)
