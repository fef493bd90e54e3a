"""Facts that must not change when a run is resumed: content of data and weights, and some configuration keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.artifacts.content import content_hash, model_files, tokenizer_files
from nemo_kto.artifacts.sources import find_source
from nemo_kto.checkpoint.model_state import adapters_in
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.schema import RunConfig
from nemo_kto.data.rows.sources import UNNAMED
from nemo_kto.run.data import RunData
from nemo_kto.utils.field_errors import Field, echo, names
from nemo_kto.utils.fields import MustStay

ContentHash = Callable[[Path, Sequence[Path]], str]  # (folder, files in it) -> hash of the files
# Name of each fact -> its value, or {"sha256": hash of the content, "from": description of its source}; JSON types only.
Facts = dict[str, Any]
_TOKENIZER, _VALIDATION, _ORDER = "tokenizer", "validation rows", "order of the rows"
_DATA, _MODEL = "model.data.data_prefix", "pretrained_checkpoint.restore_from_path"
_SAME_CONTENT = {
    _MODEL: f"{_MODEL} must hold the same weights and configuration",
    _TOKENIZER: f"{_MODEL} must hold the same tokenizer and chat template",
    "model.reference.restore_from_path": "model.reference.restore_from_path must hold the same weights and configuration",
    "model.peft.restore_from_path": "model.peft.restore_from_path must hold the same adapters",
    _DATA: f"{_DATA} and splits_string must give the same training rows in the same order",
    _VALIDATION: f"{_DATA} and splits_string must give the same validation rows",
    _ORDER: "model.seed must draw the rows in the same order",
}
# Suffix of a key -> facts that determine it. A change of the key is only reported if none of these facts has changed.
# model.seed is among them because a blend of files is sampled at random.
_OF_TOKENS = (_TOKENIZER, "model.data.seq_length", "model.data.truncation_mode", "model.seed")
_FOLLOWS = {
    _DATA: _OF_TOKENS,
    _VALIDATION: _OF_TOKENS,
    _ORDER: (_DATA, "model.seed"),
    "limit_train_batches": (_DATA, "model.global_batch_size"),
}


def facts_of_run(run: ResolvedRun, data: RunData) -> Facts:
    """Return the facts of a run; its precision must not be auto.

    All weights are read, unless their hashes are in the cache.

    Raises:
        OSError: a file cannot be read.
    """
    cfg, name, model = run.cfg, run.cfg.recipe.name, run.cfg.model
    hashed = partial(content_hash, cache_dir=Path(model.data.cache_dir), shared=model.data.cache_shared)
    source, reference = run.files.source, model.reference
    train: Any = data.train  # a torch DataLoader, with more attributes than the Loader protocol
    tokenizer_folder = run.files.hf_folder
    tokenizer = hashed(tokenizer_folder, tokenizer_files(tokenizer_folder))
    facts: Facts = {
        **_verbatim_facts(cfg),
        _MODEL: _model_content(str(source), hashed),
        _TOKENIZER: {"sha256": tokenizer, "from": str(tokenizer_folder)},
        "model.reference.restore_from_path": _model_content(reference.restore_from_path, hashed, default_base=source),
        "model.reference.sync_alpha": reference.sync_alpha if reference.sync_interval else None,
        **_adapter_facts(run.adapters),
        "model.peft.restore_from_path": _adapter_content(model.peft.restore_from_path, hashed),
        **_loss_facts(cfg),
        **{f"model.data.{key}": value for key, value in cfg.data_options().items()},
        _DATA: {"sha256": train.dataset.fingerprint(), "from": f"{len(train.dataset)} rows"},
        _VALIDATION: _validation_content(data.splits.validation),
        _ORDER: {"sha256": train.batch_sampler.order_hash(), "from": f"that of numpy {np.__version__}"},
        f"trainer.{name}.limit_train_batches": run.length.steps_per_epoch(len(train.batch_sampler)),
    }
    return dict(json.loads(json.dumps(facts)))


def _verbatim_facts(cfg: RunConfig) -> Facts:
    """Return the keys whose values must stay the same, as marked in the configuration's type."""
    keys = [key for key, field in names(type(cfg)).items() if field.section is None and _is_verbatim(field)]
    return {key: reduce(getattr, key.split("."), cfg) for key in keys}


def _is_verbatim(field: Field) -> bool:
    return isinstance(field.resume, MustStay) and field.resume.verbatim


def _validation_content(sets: Mapping[str, Any]) -> dict[str, str] | None:
    """Hash the examples of the validation sets; named sets are hashed with their names, independently of their order."""
    if not sets:
        return None
    if list(sets) == [UNNAMED]:
        return {"sha256": sets[UNNAMED].fingerprint(), "from": f"{len(sets[UNNAMED])} rows"}
    hashes = json.dumps({name: examples.fingerprint() for name, examples in sets.items()}, sort_keys=True)
    rows = ", ".join(f"{len(examples)} rows in {name}" for name, examples in sorted(sets.items()))
    return {"sha256": hashlib.sha256(hashes.encode()).hexdigest(), "from": rows}


def _loss_facts(cfg: RunConfig) -> dict[str, object]:
    """Return the keys of the loss section that must not change; unset options have the default of the loss."""
    prefix = f"model.{cfg.recipe.name}"
    values: dict[str, object] = {key: getattr(cfg.loss, key) for key in cfg.recipe.loss_section.model_fields}
    values |= {key: option.default for key, option in cfg.loss.record.options.items()} | cfg.loss.loss_options()
    fields = names(type(cfg))
    return {f"{prefix}.{key}": values[key] for key in values if isinstance(fields[f"{prefix}.{key}"].resume, MustStay)}


def _adapter_facts(settings: LoRASettings | None) -> Facts:
    if settings is None:
        return {}
    values = {
        "adapter_dim": settings.rank,
        "alpha": float(settings.alpha),
        "target_modules": settings.modules,
        "rslora": settings.rslora,
        "dora": settings.dora,
        "layer_selection": settings.layers,
    }
    return {f"model.peft.lora_tuning.{key}": value for key, value in values.items()}


def _model_content(folder: str | None, hashed: ContentHash, *, default_base: Path | None = None) -> dict[str, str] | None:
    """Hash the content of a model.

    For adapters, the base model is hashed as well; this is ``default_base`` if the adapters name none.
    """
    if folder is None:
        return None
    source = find_source(Path(folder), default_base=default_base)
    parts = [hashed(part, model_files(part)) for part in (source.adapters, source.base) if part is not None]
    return {"sha256": " on ".join(parts), "from": folder}


def _adapter_content(folder: str | None, hashed: ContentHash) -> dict[str, str] | None:
    return None if folder is None else {"sha256": hashed(Path(folder), model_files(Path(folder))), "from": folder}


def facts_of_earlier(info: Mapping[str, Any], now: Facts) -> Facts:
    """Derive facts from a checkpoint of an earlier version, whose trainer.json contains none.

    Args:
        info: content of trainer.json.
        now: facts of the run to be resumed.
    """
    trainer, saved = info["trainer"], adapters_in(info)
    known: Facts = {
        "trainer.precision": {"bfloat16": "bf16", "float32": "32"}[info["dtype"]],
        "model.optim.use_distributed_optimizer": info["distributed_optimizer"],
        "model.peft.peft_scheme": "none" if saved is None else "lora",
        **_adapter_facts(None if saved is None else saved.settings),
        "model.global_batch_size": trainer["consumed_samples"] // max(trainer["step"], 1),
    }
    if "steps_per_epoch" in trainer:
        key = next(key for key in now if key.endswith("limit_train_batches"))
        known[key] = trainer["steps_per_epoch"]
    interval = now["model.reference.sync_interval"]
    known["model.reference.sync_interval"] = (interval or "above 0") if info.get("moving_reference") else 0
    return dict(json.loads(json.dumps(known)))


def differences(before: Facts, now: Facts) -> list[str]:
    """Describe each changed fact in one sentence; facts that only one side has are not compared."""
    return list(_differences(before, now))


def _differences(before: Facts, now: Facts) -> Iterator[str]:
    changed = {key for key in now if key in before and not _same(before[key], now[key])}
    for key in (key for key in now if key in changed):
        if any(key.endswith(end) and changed.intersection(causes) for end, causes in _FOLLOWS.items()):
            continue
        old, new = before[key], now[key]
        if key in _SAME_CONTENT:
            yield f"{_SAME_CONTENT[key]} in a resumed run, got {_others(old, new)}"
        elif key.endswith(".limit_train_batches"):
            yield f"{key} must give epochs of {old} steps in a resumed run, got {new}"
        else:
            yield f"{key} must stay {echo(old)} in a resumed run, got {echo(new)}"


def _same(before: object, now: object) -> bool:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return bool(before["sha256"] == now["sha256"])
    return before == now


def _others(before: Mapping[str, str] | None, now: Mapping[str, str] | None) -> str:
    places = [None if content is None else content["from"] for content in (before, now)]
    old, new = ("none" if place is None else place for place in places)
    return f"others ({new}; then {old})" if old != new else f"others ({new})"
