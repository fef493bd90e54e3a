"""The rules of a pipeline: its stages and model chunks, and the layers of the model that they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nemo_kto.architecture.stages import PipelineSplit, SplitError
from nemo_kto.config.choices import pipeline_split
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
    """What cannot be, of a model with so many layers; None where that is not known."""
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
    """Layers that cannot be shared out like this."""
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
    """Groups of layers that are recomputed together, which megatron-core forms within a chunk, all of one size."""
    group = cfg.model.activations_checkpoint_num_layers
    if cfg.model.activations_checkpoint_method == "uniform" and group and any(size % group for size in sizes):
        shares = " and ".join(map(str, sizes))
        fitting = max(number for number in range(1, group) if not any(size % number for size in sizes))
        text = f"must divide the layers that stages have in one piece ({shares}), got {group}; use {fitting}"
        yield ConfigError(f"{_RECOMPUTE}_num_layers", text, (f"{_RECOMPUTE}_method", *reads))


def _remedy(split: PipelineSplit, name: str, layers: int) -> str:
    """The nearest values that fit; for the number of stages, also the last stage that would make them fit."""
    value = getattr(split, name)
    fitting = [other for other in range(1, layers + 1) if _with(split, name, other).fits(layers)]
    below, above = [other for other in fitting if other < value][-1:], [other for other in fitting if other > value][:1]
    words = [_left_out(other) if name == "chunks" and other == 1 else str(other) for other in below]
    words += map(str, above if name in ("first", "last") else ())
    if name == "stages":
        words += _other_ends(split, layers)
    return f"use {', or '.join(words)}" if words else "choose another number of stages"


def _other_ends(split: PipelineSplit, layers: int) -> Iterator[str]:
    """What lets as many stages share the layers: nothing that counts as one, or a last stage of another size."""
    counted = [name for name in ("counts_embedding", "counts_loss") if getattr(split, name)]
    for name in counted:
        if _with(split, name, False).fits(layers):
            yield f"{_KEYS[name]}=false"
    if not counted:
        sizes, average = range(1, layers), layers / split.stages
        fitting = [last for last in sizes if replace(split, last=last).fits(layers)]
        nearest = sorted(fitting, key=lambda last: (last > average, abs(last - average)))  # the loss is there as well
        yield from (f"{_KEYS['last']}={last}" for last in nearest[:1])


def _with(split: PipelineSplit, name: str, value: Any) -> PipelineSplit:
    return replace(split, **{name: value})


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _left_out(value: object) -> str:
    return "false" if isinstance(value, bool) else "null"
