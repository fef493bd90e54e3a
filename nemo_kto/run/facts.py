"""Facts that must not change when a run is resumed: content of data and weights, and some configuration keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.artifacts.content import content_hash, model_files, tokenizer_files
from nemo_kto.artifacts.sources import find_source
from nemo_kto.checkpoint.model_state import adapters_in
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.data.rows.sources import UNNAMED
from nemo_kto.run.data import RunData
from nemo_kto.utils.field_errors import echo, names
from nemo_kto.utils.fields import MustStay

ContentHash = Callable[[Path, Sequence[Path]], str]  # (folder, files in it) -> hash of the files
# Name of each fact -> its value, or {"sha256": hash of the content, "from": description of its source}; JSON types only.
Facts = dict[str, Any]
_TOKENIZER, _VALIDATION, _ORDER = "tokenizer", "validation rows", "order of the rows"
_DATA, _MODEL = "model.data.data_prefix", "pretrained_checkpoint.restore_from_path"
_SAME_CONTENT = {
    _MODEL: f"{_MODEL} must contain the same weights and configuration",
    _TOKENIZER: f"{_MODEL} must contain the same tokenizer and chat template",
    "model.reference.restore_from_path": "model.reference.restore_from_path must contain the same weights and configuration",
    "model.peft.restore_from_path": "model.peft.restore_from_path must contain the same adapters",
    _DATA: f"{_DATA} and splits_string must give the same training rows in the same order",
    _VALIDATION: f"{_DATA} and splits_string must give the same validation rows",
    _ORDER: "model.seed must give the rows in the same order",
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
    """Return the facts of a run, whose precision must not be auto; raise OSError if a file cannot be read.

    All weights are read, unless their hashes are in the cache.
    """
    cfg, name, model = run.cfg, run.cfg.recipe.name, run.cfg.model
    hashed = partial(content_hash, cache_dir=Path(model.data.cache_dir), shared=model.data.cache_shared)
    source, reference, tokenizer, adapter = run.files.source, model.reference, run.files.hf_folder, run.files.adapter_folder
    train: Any = data.train  # a torch DataLoader, with more attributes than the Loader protocol
    fields = names(type(cfg))
    verbatim = [key for key, field in fields.items() if isinstance(field.resume, MustStay) and field.resume.verbatim]
    # Loss options that are not set have the default of the loss.
    loss: dict[str, object] = {key: getattr(cfg.loss, key) for key in cfg.recipe.loss_section.model_fields}
    loss |= {key: option.default for key, option in cfg.loss.record.options.items()} | cfg.loss.loss_options()
    loss = {f"model.{name}.{key}": value for key, value in loss.items()}
    facts: Facts = {
        **{key: reduce(getattr, key.split("."), cfg) for key in verbatim if fields[key].section is None},
        _MODEL: _model_content(str(source), hashed),
        _TOKENIZER: {"sha256": hashed(tokenizer, tokenizer_files(tokenizer)), "from": str(tokenizer)},
        "model.reference.restore_from_path": _model_content(reference.restore_from_path, hashed, default_base=source),
        "model.reference.sync_alpha": reference.sync_alpha if reference.sync_interval else None,
        **_adapter_facts(run.adapters),
        "model.peft.restore_from_path": (
            None if adapter is None else {"sha256": hashed(adapter, model_files(adapter)), "from": str(adapter)}
        ),
        **{key: value for key, value in loss.items() if isinstance(fields[key].resume, MustStay)},
        **{f"model.data.{key}": value for key, value in cfg.data_options().items()},
        _DATA: {"sha256": train.dataset.fingerprint(), "from": f"{len(train.dataset)} rows"},
        _VALIDATION: _validation_content(data.splits.validation),
        _ORDER: {"sha256": train.batch_sampler.order_hash(), "from": f"that of numpy {np.__version__}"},
        f"trainer.{name}.limit_train_batches": run.length.steps_per_epoch(len(train.batch_sampler)),
    }
    return dict(json.loads(json.dumps(facts)))


def _validation_content(sets: Mapping[str, Any]) -> dict[str, str] | None:
    """Hash the examples of the validation sets; named sets are hashed with their names, independently of their order."""
    if not sets:
        return None
    if list(sets) == [UNNAMED]:
        return {"sha256": sets[UNNAMED].fingerprint(), "from": f"{len(sets[UNNAMED])} rows"}
    hashes = json.dumps({name: examples.fingerprint() for name, examples in sets.items()}, sort_keys=True)
    rows = ", ".join(f"{len(examples)} rows in {name}" for name, examples in sorted(sets.items()))
    return {"sha256": hashlib.sha256(hashes.encode()).hexdigest(), "from": rows}


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
    """Hash a model; for adapters, also their base model, which is ``default_base`` if they name none."""
    if folder is None:
        return None
    source = find_source(Path(folder), default_base=default_base)
    parts = [hashed(part, model_files(part)) for part in (source.adapters, source.base) if part is not None]
    return {"sha256": " on ".join(parts), "from": folder}


def facts_of_earlier(info: Mapping[str, Any], now: Facts) -> Facts:
    """Derive facts from a checkpoint of an earlier version, whose trainer.json (``info``) contains none.

    ``now`` are the facts of the run to be resumed.
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

    def compared(value: object) -> object:
        return value["sha256"] if isinstance(value, Mapping) else value

    changed = {key for key in now if key in before and compared(before[key]) != compared(now[key])}
    lines = []
    for key in (key for key in now if key in changed):
        if any(key.endswith(end) and changed.intersection(causes) for end, causes in _FOLLOWS.items()):
            continue
        old, new = before[key], now[key]
        if key in _SAME_CONTENT:
            places = ["none" if content is None else content["from"] for content in (new, old)]
            earlier = f"; then {places[1]}" if places[0] != places[1] else ""
            lines.append(f"{_SAME_CONTENT[key]} in a resumed run, got others ({places[0]}{earlier})")
        elif key.endswith(".limit_train_batches"):
            lines.append(f"{key} must give epochs of {old} steps in a resumed run, got {new}")
        else:
            lines.append(f"{key} must stay {echo(old)} in a resumed run, got {echo(new)}")
    return lines
