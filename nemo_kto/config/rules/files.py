"""Rules for the files that a configuration names: model, tokenizer, adapters, first rows, folders.

The checks run before anything is loaded and import neither transformers nor megatron-core. Errors that only a loaded model
can show are reported when it is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from nemo_kto.architecture.config_file import CONFIG, read_config_file
from nemo_kto.architecture.families import Family
from nemo_kto.architecture.lora import (
    EMBEDDING,
    HUGGING_FACE_TARGETS,
    NEMO_TARGETS,
    TARGET_MODULES,
    adaptable,
    embedding_problem,
    hf_module,
)
from nemo_kto.architecture.rope import longest_sequence
from nemo_kto.artifacts.adapter_files import ADAPTER_CONFIG, is_our_adapter, read_adapter_settings
from nemo_kto.artifacts.checkpoint_files import CHECKPOINTS, check_checkpoint, config_folder, is_checkpoint
from nemo_kto.artifacts.safetensors_files import find_weights, is_our_model
from nemo_kto.artifacts.sources import check_same_shape, find_source, is_peft_folder, is_whole_model
from nemo_kto.artifacts.tokenizer_files import check_tokenizer, has_chat_template
from nemo_kto.config.choices import adapter_settings
from nemo_kto.config.rules.layout import divisor_below, expert_rules, pipeline_rules
from nemo_kto.config.schema import RunConfig
from nemo_kto.data.rows.sources import WHOLE, read_data_prefix
from nemo_kto.errors import ConfigError, UserError, error_of
from nemo_kto.utils.files import open_file, other_format

Errors = Iterator[ConfigError]
_MODEL, _DATA = "pretrained_checkpoint.restore_from_path", "model.data.data_prefix"
_REFERENCE, _ADAPTER = "model.reference.restore_from_path", "model.peft.restore_from_path"
_MAX_ROW_BYTES = 2**20  # limit for a first row; a file without newlines may be as large as the disk
_TARGETS, _DORA = "model.peft.lora_tuning.target_modules", "model.peft.lora_tuning.dora"
_SELECTION, _SCHEME = "model.peft.lora_tuning.layer_selection", "model.peft.peft_scheme"


def broken_files(cfg: RunConfig) -> Errors:
    """Find all errors in the named files and folders, except paths that do not exist, which other rules report."""
    source, reference = Path(cfg.pretrained_checkpoint.restore_from_path), cfg.model.reference.restore_from_path
    wrong = [*_source(_MODEL, source)]
    if reference is not None and Path(reference) != source:
        wrong += _source(_REFERENCE, Path(reference))
    yield from wrong or _use_of_sources(cfg, source)
    folder = config_folder(source)
    try:
        config, family = read_config_file(folder)
    except UserError:  # reported above, or the folder does not exist
        config, family = {}, None
    yield from _layout(cfg, config, family)
    if family is not None:
        yield from expert_rules(cfg, config, family)
    yield from _adapter(cfg, config)
    if family is not None and cfg.model.peft.peft_scheme != "none" and cfg.model.peft.restore_from_path is None:
        yield from _targets(cfg, family)
        yield from _embedding(cfg, config)
    if os.path.isfile(folder / CONFIG):
        yield from _raised(_MODEL, lambda: check_tokenizer(folder, vocab_size=config.get("vocab_size")))
        yield from _rows(cfg, folder)
    yield from _folders(cfg)


def _raised(key: str, action: Callable[[], object]) -> Errors:
    """Convert a UserError raised by ``action`` to an error for ``key``."""
    try:
        action()
    except UserError as error:
        yield ConfigError(key, f"cannot be used: {error}", about_files=True)


def _source(key: str, source: Path) -> Errors:
    """Find errors in a model: in its configuration and the headers of its weight files."""
    if is_checkpoint(source):
        try:
            base = check_checkpoint(source)
        except UserError as error:
            yield ConfigError(key, f"cannot be used: {error}", about_files=True)
        else:
            if base is not None and is_whole_model(base):
                yield from _source(key, base)
        yield from _raised(key, lambda: read_config_file(source / "hf"))
    elif os.path.isfile(source / CONFIG):
        yield from _raised(key, lambda: read_config_file(source))
        yield from _raised(key, lambda: find_weights(source))
    elif is_peft_folder(source):
        yield from _raised(key, lambda: read_adapter_settings(source))


def _use_of_sources(cfg: RunConfig, source: Path) -> Errors:
    """Check that existing folders of policy and reference fit their use, so that all named folders are used."""
    reference, peft, base = cfg.model.reference.restore_from_path, cfg.model.peft, source
    if is_whole_model(source) or is_checkpoint(source):
        try:
            policy = find_source(source)
        except UserError as error:
            yield ConfigError(_MODEL, str(error), about_files=True)
        else:
            base = policy.base
            if policy.adapters is not None and peft.peft_scheme == "none":
                remedy = f"set {_SCHEME}=lora, or merge them first: nemo-kto export {source} FOLDER"
                text = f"must be a whole model without adapters, got {source}, which holds only adapters"
                yield ConfigError(_MODEL, f"{text}; {remedy}")
            if policy.adapters is not None and peft.restore_from_path is not None:
                text = (
                    f"must be null where {_MODEL} brings adapters of its own, got {peft.restore_from_path}; give one of them"
                )
                yield ConfigError(_ADAPTER, text, (_MODEL,))
    if reference is not None:
        wrong = error_of(lambda: check_same_shape(base, find_source(Path(reference), default_base=base).base))
        if wrong is not None:
            yield ConfigError(_REFERENCE, wrong, (_MODEL,), about_files=True)


def _layout(cfg: RunConfig, config: dict[str, int], family: Family | None) -> Errors:
    """Check the layout against the model that config.json describes; fields absent from config.json are not checked."""
    model, where = cfg.model, cfg.pretrained_checkpoint.restore_from_path
    yield from pipeline_rules(cfg, config.get("num_hidden_layers"))
    width, shards = config.get("intermediate_size"), model.tensor_model_parallel_size
    # In a model with experts, intermediate_size may be the width of the experts, or of no layer.
    of_all = family is None or family.experts is None
    if of_all and width is not None and width % shards:
        text = f"must divide intermediate_size = {width} of {where}, got {shards}; use {divisor_below(width, shards)}"
        yield ConfigError("model.tensor_model_parallel_size", text, (_MODEL,))
    limits = longest_sequence(config if family is None else family.rope(config, "full_attention"))
    (name, positions), length = limits, model.data.seq_length
    if positions is not None and length > positions:
        text = f"must be at most {name} = {positions} of {where}, got {length}; use {positions} or fewer"
        yield ConfigError("model.data.seq_length", text, (_MODEL,))


def _adapter(cfg: RunConfig, config: dict[str, int]) -> Errors:
    folder, layers = cfg.model.peft.restore_from_path, config.get("num_hidden_layers")
    selected, key, reads = cfg.model.peft.lora_tuning.layer_selection, _SELECTION, [_SCHEME, _ADAPTER, _MODEL]
    if folder is not None:
        if not os.path.isfile(Path(folder) / ADAPTER_CONFIG):
            return
        try:
            settings = read_adapter_settings(folder)
        except UserError as error:
            yield ConfigError(_ADAPTER, f"cannot be used: {error}", about_files=True)
            return
        selected, key, reads = list(settings.layers or ()), _ADAPTER, [_SCHEME, _MODEL]
    if cfg.model.peft.peft_scheme != "none" and layers is not None and max(selected or [0]) > layers:
        where = cfg.pretrained_checkpoint.restore_from_path
        text = f"must adapt layers from 1 to {layers}, which {where} has, got layer {max(selected or [0])}; correct it"
        yield ConfigError(key, text, tuple(reads))


def _targets(cfg: RunConfig, family: Family) -> Errors:
    """Check that the target modules are linear layers that the model has as separate modules.

    With DoRA, experts cannot be targets.
    """
    held = {hf_module(name) for mapping in adaptable(family) for name in mapping.hf_names}
    targets = [target for target in cfg.model.peft.lora_tuning.target_modules if target in TARGET_MODULES]
    if wrong := [target for target in targets if not held.issuperset(NEMO_TARGETS.get(target, (target,)))]:
        text = f"must be layers that {family.name} has by themselves, got {', '.join(wrong)}, of which it fuses some; "
        remedy = f"use of {', '.join(name for name in HUGGING_FACE_TARGETS if name in held)}, or {_SCHEME}=none"
        yield ConfigError(_TARGETS, text + remedy, (_MODEL, _SCHEME))
    of_experts = {hf_module(name) for mapping in adaptable(family) if mapping.of_expert for name in mapping.hf_names}
    chosen = {module for target in targets for module in NEMO_TARGETS.get(target, (target,))}
    if cfg.model.peft.lora_tuning.dora and chosen & of_experts:
        text = "must be false with adapters on experts, which have none in peft either, got true"
        yield ConfigError(_DORA, f"{text}; adapt the attention only", (_MODEL, _SCHEME, _TARGETS))


def _embedding(cfg: RunConfig, config: Mapping[str, object]) -> Errors:
    """Check that the embedding can be adapted; whether it is tied by default is known only once the model is loaded."""
    targets = cfg.model.peft.lora_tuning.target_modules
    if EMBEDDING not in targets:
        return
    settings, tied = adapter_settings(cfg.model.peft), bool(config.get("tie_word_embeddings"))
    if settings is not None and (problem := embedding_problem(settings, tied=tied)):
        got = f"{problem}, got {', '.join(targets)}"
        yield ConfigError(_TARGETS, got, (_MODEL, _SCHEME, _SELECTION, _DORA))


def _rows(cfg: RunConfig, folder: Path) -> Errors:
    """Check that data files can be read, and that the tokenizer has a chat template if rows have messages.

    Only the first row of each file is read.
    """
    try:
        sources = read_data_prefix(cfg.model.data.data_prefix)
    except (UserError, OSError):
        return  # reported by other rules
    if sources.keys().isdisjoint((WHOLE, "train")):
        text = f"must give training rows, got {cfg.model.data.data_prefix}; name their files under train"
        yield ConfigError(_DATA, text)
    for file in dict.fromkeys(file for group in sources.values() for source in group for file in source.files):
        try:
            with open_file(file) as handle:
                first = handle.readline(_MAX_ROW_BYTES)
            if (message := other_format(first)) is not None:
                text = f"must name JSON files, one object per line, but {file} is {message}"
                yield ConfigError(_DATA, text, about_files=True)
                continue
            row = json.loads(first)
        except OSError as error:
            yield ConfigError(_DATA, f"cannot be read: {file}: {error.strerror}; correct the path", about_files=True)
            continue
        except (ValueError, RecursionError):
            continue  # reported with file and line when the rows are read
        if isinstance(row, dict) and any(map(_is_message_list, row.values())) and not _has_template(folder):
            text = f"must hold plain strings where the tokenizer has no chat template, got messages in {file}"
            remedy = f"add chat_template.jinja to {folder}, or write prompts and answers as strings"
            yield ConfigError(_DATA, f"{text}; {remedy}", (_MODEL,), about_files=True)
            return


def _is_message_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def _has_template(folder: Path) -> bool:
    try:
        return has_chat_template(folder)
    except UserError:
        return True  # reported by the check of the tokenizer


def _folders(cfg: RunConfig) -> Errors:
    """Check that folders can be created and written, and that runs and exports do not overwrite other files."""
    written = {
        "exp_manager.explicit_log_dir": cfg.exp_manager.explicit_log_dir,
        "model.data.cache_dir": cfg.model.data.cache_dir,
    }
    exports = {"export.path": (cfg.export.path, is_our_model)}
    if cfg.model.peft.peft_scheme != "none":
        exports["export.adapter_path"] = (cfg.export.adapter_path, is_our_adapter)
    if cfg.export.enabled:
        written |= {key: path for key, (path, _) in exports.items() if path}
    for key, path in written.items():
        yield from _unwritable(key, Path(path))
    checkpoints = Path(cfg.exp_manager.explicit_log_dir) / CHECKPOINTS
    if not cfg.exp_manager.resume_if_exists and (earlier := sorted(checkpoints.glob("step_*"))):
        text = f"must be true in a folder with checkpoints, got false and {earlier[-1]}; or choose another exp_manager.name"
        yield ConfigError("exp_manager.resume_if_exists", text, ("exp_manager.explicit_log_dir",))
    for key, (path, is_ours) in exports.items() if cfg.export.enabled else ():
        target = Path(path)
        if path and os.path.isdir(target) and any(target.iterdir()) and not is_ours(target):
            text = f"must be a new folder or an earlier export, got {path}, which holds something else"
            yield ConfigError(key, f"{text}; remove it or choose another folder", about_files=True)


def _takes_a_folder(folder: Path) -> bool:
    """Return whether a subfolder can be created in ``folder``.

    A file system may refuse operations that the mode bits allow, especially for root.
    """
    try:
        os.rmdir(tempfile.mkdtemp(dir=folder))
    except OSError:
        return False
    return True


def _unwritable(key: str, path: Path) -> Errors:
    """Check that ``path``, or its nearest existing parent, is a writable folder."""
    nearest, reason = path, ""
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)
        nearest = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))
        if not nearest.is_dir():
            reason = "no folder"
        elif not os.access(nearest, os.W_OK | os.X_OK) or (nearest != path.absolute() and not _takes_a_folder(nearest)):
            reason = "not writable"
    except (OSError, ValueError) as error:  # a name too long, a link to itself, an invalid character
        reason = f"no name for one ({error.strerror if isinstance(error, OSError) else error})"
    if reason:
        where = f"{nearest} is {reason}" if nearest != path else f"it is {reason}"
        yield ConfigError(
            key, f"must be a folder that can be written, got {path}; {where}; choose another", about_files=True
        )
