"""Resume checks: facts that must not change when a run is resumed, and early stopping, whose state it continues.

The facts are the content of data and weights, and some configuration keys; each checkpoint stores them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from nemo_kto.algorithms.duration import EarlyStopping
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.checkpoint.manager import newest_checkpoint
from nemo_kto.checkpoint.safe_loading import read_errors
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.saved_config import changed_keys
from nemo_kto.config.schema import RunConfig
from nemo_kto.data.rows.data_sources import UNNAMED
from nemo_kto.distributed import state
from nemo_kto.errors import UserError, plural
from nemo_kto.model_files.checkpoint_files import INFO, Checkpoint, named_checkpoints
from nemo_kto.model_files.model_folders import content_hash, find_source, model_files, tokenizer_files
from nemo_kto.run.data import RunData
from nemo_kto.utils.fields import MustStay, echo, names
from nemo_kto.utils.text import terminal_line

logger = logging.getLogger(__name__)

_ANOTHER = "start a new run in another folder with exp_manager.name or exp_manager.explicit_log_dir"
_EARLY_STOPPING = "exp_manager.create_early_stopping_callback"
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
    loss |= {key: option.default for key, option in cfg.loss.definition.options.items()} | cfg.loss.loss_options()
    loss = {f"model.{name}.{key}": value for key, value in loss.items()}
    facts: Facts = {
        **{key: reduce(getattr, key.split("."), cfg) for key in verbatim if fields[key].section is None},
        _MODEL: _model_content(source, hashed),
        _TOKENIZER: {"sha256": hashed(tokenizer, tokenizer_files(tokenizer)), "from": str(tokenizer)},
        "model.reference.restore_from_path": _model_content(run.reference_folder, hashed, default_base=source),
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


def _model_content(folder: Path | None, hashed: ContentHash, *, default_base: Path | None = None) -> dict[str, str] | None:
    """Hash a model; for adapters, also their base model, which is ``default_base`` if they name none."""
    if folder is None:
        return None
    source = find_source(folder, default_base=default_base)
    parts = [hashed(part, model_files(part)) for part in (source.adapters, source.base) if part is not None]
    return {"sha256": " on ".join(parts), "from": str(folder)}


def differences(before: Facts, now: Facts) -> list[str]:
    """Describe each changed fact in one sentence; facts that only one side has are not compared."""

    def compared(value: object) -> object:
        return value.get("sha256", value) if isinstance(value, Mapping) else value

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


def build_early_stopping(cfg: RunConfig, *, agree: Callable[[int], int] | None = None) -> EarlyStopping | None:
    """Build early stopping from the configuration; None if it is disabled.

    ``agree`` returns the maximum of an integer over all ranks; None for one rank.
    """
    if not cfg.exp_manager.create_early_stopping_callback:
        return None
    settings = cfg.exp_manager.early_stopping_callback_params
    return EarlyStopping(
        monitor=settings.monitor,
        mode=settings.mode,
        min_delta=settings.min_delta,
        patience=settings.patience,
        reduce_max=agree,
    )


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """Result of the resume checks on the run folder."""

    facts: Facts  # saved in the checkpoints; they must not change when the run is resumed
    checkpoint: Checkpoint | None = None  # to resume from, the same on all ranks; None for a new run
    finished: str | None = None  # message that nothing is left to do; None if the run is not finished

    @property
    def resumed_step(self) -> int | None:
        """Number of steps already done; None for a new run."""
        return None if self.checkpoint is None else self.checkpoint.step


def look_for_run(run: ResolvedRun, data: RunData) -> Resumption:
    """Check the run folder and choose the checkpoint to resume from; collective, with the same result on all ranks.

    Nothing is written. Raises UserError if the folder contains another run, facts have changed (the message lists all of
    them), or all checkpoints are damaged.
    """
    doing = "comparing the run with its folder"
    if not run.cfg.exp_manager.resume_if_exists:
        steps = state.from_rank_zero(lambda: [*named_checkpoints(run.checkpoints).values()], doing=doing)
        if steps:
            raise UserError(
                f"a new run must have a folder without checkpoints, but {run.checkpoints} has {len(steps)}, "
                f"the last of step {steps[-1]}; resume it with exp_manager.resume_if_exists=true, or {_ANOTHER}"
            )
    newest = newest_checkpoint(run.checkpoints)
    return state.from_rank_zero(lambda: _compare(run, data, newest), doing=doing)


def _compare(run: ResolvedRun, data: RunData, newest: Checkpoint | None) -> Resumption:
    facts = facts_of_run(run, data)
    if newest is None:
        return Resumption(facts=facts)
    with read_errors(newest.folder / INFO):
        changed = differences(newest.info["run"], facts)
    if changed:
        count = plural(len(changed), "change")
        lines = [f"the run in {run.folder} cannot be resumed with {count}, nothing was written", *changed]
        raise UserError("\n  ".join([*lines, f"change {'it' if len(changed) == 1 else 'them'} back, or {_ANOTHER}"]))
    finished = _finished(run, newest, len(data.train.batch_sampler))
    return Resumption(facts=facts, checkpoint=newest, finished=finished)


def _finished(run: ResolvedRun, newest: Checkpoint, batches: int) -> str | None:
    """Return the message that nothing is left to do; None if the run is not finished."""
    trainer, total = newest.info["trainer"], run.length.total_steps(batches)
    step, stopping = trainer["step"], build_early_stopping(run.cfg)
    stopped = None
    if step < total and stopping is not None:
        stopping.load_state_dict(trainer.get("early_stopping", {}))
        stopped = stopping.reason
    if (step < total and stopped is None) or trainer.get("validation_due") or _lacks_export(run, newest):
        return None
    reason, settings = run.length.what_ends(batches)
    remedy = f"raise {' and '.join(f'trainer.{run.cfg.recipe.name}.{setting}' for setting in settings)}"
    if stopped is not None:
        reason, remedy = f"early stopping: {stopped}", f"set {_EARLY_STOPPING}=false"
    text = f"already finished at step {step} of {total} ({reason}), nothing was done in {run.folder}"
    changed = changed_keys(run.cfg)
    if changed:
        lines = [f"{key} was changed from {echo(old)} to {echo(new)}" for key, (old, new) in changed.items()]
        text += f" although {', '.join(lines)}"
    if "export.which" in changed:
        remedy = f"export another checkpoint with nemo-kto export {run.folder} FOLDER --best (or --step N), {remedy}"
    return terminal_line(f"{text}; {remedy} to train longer, or {_ANOTHER}")


def _lacks_export(run: ResolvedRun, newest: Checkpoint) -> bool:
    """Return whether a run that reached its last step still lacks an export.

    Exports are written atomically, so an existing one is complete. An export older than the newest checkpoint belongs to an
    earlier step.
    """
    export = run.cfg.export
    paths = [export.path, *([export.adapter_path] if run.has_adapters else [])] if export.enabled else []
    written = (newest.folder / INFO).stat().st_mtime_ns
    return not all(os.path.isdir(path) and os.listdir(path) and os.stat(path).st_mtime_ns >= written for path in paths)
