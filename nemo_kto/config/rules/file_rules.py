"""Rules for the files that a configuration names: model, tokenizer, adapters, data, folders.

The checks load nothing and import neither transformers nor megatron-core.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_kto.architecture.config_file import CONFIG
from nemo_kto.architecture.families import Family
from nemo_kto.architecture.lora import (
    ALL_LINEAR,
    EMBEDDING,
    NEMO_TARGETS,
    TARGET_MODULES,
    adaptable,
    embedding_problem,
    hf_module,
    linear_modules,
    modules_of,
)
from nemo_kto.config.resolved import ModelFiles, ResolvedRun
from nemo_kto.config.rules.layout_rules import divisor_below, expert_rules, pipeline_rules
from nemo_kto.data.rows.data_sources import WHOLE, check_validation_names, is_remote, read_data_prefix
from nemo_kto.data.rows.labels import Labels
from nemo_kto.data.rows.normalise import check_json_columns
from nemo_kto.data.rows.reader import Fields
from nemo_kto.data.rows.records import DataError
from nemo_kto.data.rows.row_files import read_rows
from nemo_kto.errors import ConfigError, UserError, error_of
from nemo_kto.model_files.adapter_files import ADAPTER_CONFIG, is_our_adapter, read_adapter_settings
from nemo_kto.model_files.checkpoint_files import INFO, check_checkpoint
from nemo_kto.model_files.companion_files import is_quantized
from nemo_kto.model_files.model_folders import (
    check_same_shape,
    find_source,
    irregular_files,
    is_peft_folder,
    is_whole_model,
    remedy_for_missing,
)
from nemo_kto.model_files.safetensors_files import find_weights, is_our_model
from nemo_kto.model_files.tokenizer_files import check_tokenizer, has_chat_template

Errors = Iterator[ConfigError]
_MODEL, _DATA = "pretrained_checkpoint.restore_from_path", "model.data.data_prefix"
_REFERENCE, _ADAPTER = "model.reference.restore_from_path", "model.peft.restore_from_path"
_TARGETS, _DORA = "model.peft.lora_tuning.target_modules", "model.peft.lora_tuning.dora"
_SELECTION, _SCHEME = "model.peft.lora_tuning.layer_selection", "model.peft.peft_scheme"


def file_rules(run: ResolvedRun) -> Errors:
    """Find all errors in the named files and folders."""
    files, reference = run.files, run.reference_folder
    yield from _missing_files(run)
    wrong = [*_source_rules(_MODEL, files)]
    if reference is not None and reference != files.source:
        wrong += _source_rules(_REFERENCE, ModelFiles(source=reference))
    yield from wrong or _use_of_sources(run)
    try:
        config, family = files.config
    except UserError:  # reported above, or the folder does not exist
        config, family = {}, None
    yield from _model_rules(run, config, family)
    if family is not None:
        yield from expert_rules(run, config, family)
    yield from _adapter_layers(run, config.get("num_hidden_layers"))
    if family is not None and run.has_adapters and files.adapter_folder is None:
        yield from _target_rules(run, config, family)
    if os.path.isfile(files.hf_folder / CONFIG):
        yield from _raised(_MODEL, lambda: check_tokenizer(files.hf_folder, vocab_size=config.get("vocab_size")))
        yield from _template_rules(run)
        yield from _first_rows(run)
    yield from _folder_rules(run)


def _missing_files(run: ResolvedRun) -> Errors:
    """Find paths that do not exist or are of another kind."""
    source, adapter = run.files.source, run.files.adapter_folder
    if is_peft_folder(source):
        remedy = f"set {_ADAPTER} to this folder, and {_MODEL} to the base model of the adapters"
        yield ConfigError(_MODEL, f"must be a model, got {source}, which holds adapters in PEFT format; {remedy}")
    elif not any(os.path.isfile(source / file) for file in (CONFIG, INFO)):
        form = f"must be a Hugging Face folder (with {CONFIG}) or one of our checkpoints (with {INFO})"
        got = f"{source}{irregular_files(source)}"
        remedy = remedy_for_missing(source, "download it or correct the path")
        yield ConfigError(_MODEL, f"{form}, got {got}; {remedy}", about_files=True)
    if adapter is not None and not os.path.isfile(adapter / ADAPTER_CONFIG):
        remedy = remedy_for_missing(adapter, "correct the path")
        text = f"must be a folder in PEFT format (with {ADAPTER_CONFIG}), got {adapter}; {remedy}"
        yield ConfigError(_ADAPTER, text, about_files=True)
    prefix = run.cfg.model.data.data_prefix
    missing = [path for path in _paths_in(prefix) if not is_remote(path) and not os.path.exists(path)]
    for path in missing:
        yield ConfigError(_DATA, f"must name files and folders that exist, got {path}; correct the path", about_files=True)
    if wrong_form := error_of(lambda: check_validation_names(prefix) if missing else read_data_prefix(prefix)):
        text = f"cannot be read: {wrong_form.removeprefix('data_prefix ')}"
        yield ConfigError(_DATA, text, about_files=any(map(is_remote, _paths_in(prefix))))
    if wrong_names := error_of(lambda: Fields(columns=run.cfg.model.data.fields or {})):
        yield ConfigError("model.data.fields", wrong_names)
    if wrong_columns := error_of(lambda: check_json_columns(run.cfg.model.data.json_columns)):
        yield ConfigError("model.data.json_columns", wrong_columns)
    if wrong_labels := error_of(lambda: Labels.of(run.cfg.model.data.labels)):
        yield ConfigError("model.data.labels", wrong_labels)


def _paths_in(value: object) -> list[str]:
    """Return the paths in a string, a list or a mapping of splits; the weights of a blend are skipped."""
    if isinstance(value, Mapping):
        return _paths_in([*value.values()])
    if isinstance(value, list | tuple):
        return [path for part in value for path in _paths_in(part)]
    is_path = isinstance(value, str | Path) and error_of(lambda: float(str(value))) is not None
    return [str(value)] if is_path else []


def _raised(key: str, action: Callable[[], object]) -> Errors:
    """Convert a UserError raised by ``action`` to an error for ``key``."""
    try:
        action()
    except UserError as error:
        yield ConfigError(key, f"cannot be used: {error}", about_files=True)


def _source_rules(key: str, files: ModelFiles) -> Errors:
    """Check a model's configuration and the headers of its weight files."""
    source = files.source
    if files.is_checkpoint:
        try:
            base = check_checkpoint(source)
        except UserError as error:
            yield ConfigError(key, f"cannot be used: {error}", about_files=True)
        else:
            if base is not None and is_whole_model(base):
                yield from _source_rules(key, ModelFiles(source=base))
        yield from _raised(key, lambda: files.config)
    elif os.path.isfile(source / CONFIG):
        yield from _raised(key, lambda: files.config)
        if files.has_weights:
            yield from _raised(key, lambda: find_weights(source, quantized=is_quantized(source)))
    elif is_peft_folder(source):
        yield from _raised(key, lambda: read_adapter_settings(source))


def _use_of_sources(run: ResolvedRun) -> Errors:
    """Check that existing folders of policy and reference fit their use, so that all named folders are used."""
    source, base, reference = run.files.source, run.files.source, run.reference_folder
    if run.files.is_checkpoint or is_whole_model(source):
        try:
            policy = run.files.own
        except UserError as error:
            yield ConfigError(_MODEL, str(error), about_files=True)
        else:
            base = policy.base
            if policy.adapters is not None and not run.has_adapters:
                remedy = f"set {_SCHEME}=lora, or merge them first: nemo-kto export {source} FOLDER"
                text = f"must be a whole model without adapters, got {source}, which holds only adapters"
                yield ConfigError(_MODEL, f"{text}; {remedy}")
            if policy.adapters is not None and run.files.adapter_folder is not None:
                text = f"must be null if {_MODEL} contains adapters, got {run.files.adapter_folder}; set one of the two"
                yield ConfigError(_ADAPTER, text, (_MODEL,))
    if reference is not None:
        wrong = error_of(lambda: check_same_shape(base, find_source(reference, default_base=base).base))
        if wrong is not None:
            yield ConfigError(_REFERENCE, wrong, (_MODEL,), about_files=True)


def _model_rules(run: ResolvedRun, config: dict[str, Any], family: Family | None) -> Errors:
    """Check layout and sequence length against config.json; fields absent from config.json are not checked."""
    model, source = run.cfg.model, run.files.source
    yield from pipeline_rules(run, config.get("num_hidden_layers"))
    width, shards = config.get("intermediate_size"), model.tensor_model_parallel_size
    # In a model with experts, intermediate_size may be the width of the experts, or of no layer.
    is_dense = family is None or family.experts_of(config) is None
    if is_dense and width is not None and width % shards:
        text = f"must divide intermediate_size = {width} of {source}, got {shards}; use {divisor_below(width, shards)}"
        yield ConfigError("model.tensor_model_parallel_size", text, (_MODEL,))
    if family is not None:
        name, positions = run.files.longest_sequence
        if positions is not None and (length := run.cfg.seq_length) > positions:
            why = ", as an indexer chooses the keys of longer sequences," if name == family.chosen_keys else ","
            text = f"must be at most {name} = {positions} of {source}{why} got {length}; use {positions} or fewer"
            yield ConfigError("model.data.seq_length", text, (_MODEL,))


def _adapter_layers(run: ResolvedRun, layers: int | None) -> Errors:
    """Check that the model has the layers that are adapted, and that existing adapters can be read."""
    adapter, selected, key = run.files.adapter_folder, run.cfg.model.peft.lora_tuning.layer_selection, _SELECTION
    if adapter is not None:
        if not os.path.isfile(adapter / ADAPTER_CONFIG):
            return  # reported as missing
        try:
            selected, key = list(read_adapter_settings(adapter).layers or ()), _ADAPTER
        except UserError as error:
            yield ConfigError(_ADAPTER, f"cannot be used: {error}", about_files=True)
            return
    if run.has_adapters and layers is not None and (last := max(selected or [0])) > layers:
        text = f"must name layers from 1 to {layers} of {run.files.source}, got layer {last}; correct it"
        yield ConfigError(key, text, tuple({_SCHEME, _ADAPTER, _MODEL} - {key}))


def _target_rules(run: ResolvedRun, config: Mapping[str, Any], family: Family) -> Errors:
    """Check that the target modules are linear layers that the model has as separate modules, and that DoRA fits them."""
    tuning, layers = run.cfg.model.peft.lora_tuning, config.get("num_hidden_layers")
    has_dense_layers = family.experts is None or layers is None or len(family.experts.layers(config, layers)) < layers
    # latent attention projects queries from latents, or with q_lora_rank null from hidden states
    absent = {"q_proj"} if config.get("q_lora_rank", 1) else {"q_a_proj", "q_b_proj"}
    modules = linear_modules(family, has_dense_layers=has_dense_layers)
    separate = [each for each in modules if "kv_b_proj" not in modules or each not in absent]
    targets = [target for target in tuning.target_modules if target in TARGET_MODULES]
    named = [target for target in targets if target not in ALL_LINEAR]
    if wrong := [target for target in named if not modules_of(target, family).issubset([*separate, EMBEDDING])]:
        text = f"must be separate layers of {family.name}, got {', '.join(wrong)}, some of which it fuses"
        remedy = f"use of {', '.join(separate)}, or {_SCHEME}=none"
        yield ConfigError(_TARGETS, f"{text}; {remedy}", (_MODEL, _SCHEME))
    of_experts = {hf_module(name) for mapping in adaptable(family) if mapping.of_expert for name in mapping.hf_names}
    chosen = {module for target in targets for module in NEMO_TARGETS.get(target, (target,))}
    if tuning.dora and chosen & of_experts:
        text = "must be false with adapters on MLPs of a model with experts, for which peft has no DoRA, got true"
        yield ConfigError(_DORA, f"{text}; adapt only the attention", (_MODEL, _SCHEME, _TARGETS))
    has_embedding = EMBEDDING in tuning.target_modules
    # whether embeddings are tied by default is known only once the model is loaded
    tied = has_embedding and bool(config.get("tie_word_embeddings")) and not run.files.has_own_output
    if has_embedding and run.adapters is not None and (problem := embedding_problem(run.adapters, tied=tied)):
        got = f"{problem}, got {', '.join(tuning.target_modules)}"
        yield ConfigError(_TARGETS, got, (_MODEL, _SCHEME, _SELECTION, _DORA))


def _template_rules(run: ResolvedRun) -> Errors:
    """Check that there is a chat template if rows of plain text shall use it."""
    if run.cfg.model.data.apply_chat_template and not _has_template(run.files.hf_folder):
        remedy = f"add chat_template.jinja to {run.files.hf_folder}, or train an instruct model"
        text = f"must be false for a tokenizer without a chat template, got true; {remedy}"
        yield ConfigError("model.data.apply_chat_template", text, (_MODEL,), about_files=True)


def _first_rows(run: ResolvedRun) -> Errors:
    """Check that the first row of each file can be read, and that the tokenizer has a chat template if it has messages."""
    prefix, folder = run.cfg.model.data.data_prefix, run.files.hf_folder
    try:
        sources = read_data_prefix(prefix)
    except (UserError, OSError):
        return  # reported by other rules
    if sources.keys().isdisjoint((WHOLE, "train")):
        yield ConfigError(_DATA, f"must give training rows, got {prefix}; name their files under train")
    for file in dict.fromkeys(file for group in sources.values() for source in group for file in source.files):
        try:
            _, row = next(read_rows(file), (0, {}))
        except DataError as error:
            yield ConfigError(_DATA, f"cannot be used: {error}", about_files=True)
            continue
        if isinstance(row, Mapping) and any(map(_is_message_list, row.values())) and not _has_template(folder):
            text = f"must contain plain strings for a tokenizer without a chat template, got messages in {file}"
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


def _folder_rules(run: ResolvedRun) -> Errors:
    """Check that folders can be created and written, and that runs and exports do not overwrite other files."""
    cfg, export = run.cfg, run.cfg.export
    exports = {"export.path": (export.path, is_our_model)} if export.enabled and export.path else {}
    if export.enabled and export.adapter_path and run.has_adapters:
        exports["export.adapter_path"] = (export.adapter_path, is_our_adapter)
    written = {"exp_manager.explicit_log_dir": str(run.folder), "model.data.cache_dir": cfg.model.data.cache_dir}
    for key, path in (written | {key: path for key, (path, _) in exports.items()}).items():
        if (reason := _why_unwritable(Path(path))) is not None:
            text = f"must be a folder that can be written, got {path}; {reason}; choose another"
            yield ConfigError(key, text, about_files=True)
    if not cfg.exp_manager.resume_if_exists and (earlier := sorted(run.checkpoints.glob("step_*"))):
        text = f"must be true in a folder with checkpoints, got false and {earlier[-1]}; or choose another exp_manager.name"
        yield ConfigError("exp_manager.resume_if_exists", text, ("exp_manager.explicit_log_dir",))
    for key, (path, is_ours) in exports.items():
        target = Path(path)
        if os.path.isdir(target) and any(target.iterdir()) and not is_ours(target):
            text = f"must be a new folder or an earlier export, got {path}, which contains other files"
            yield ConfigError(key, f"{text}; remove it or choose another folder", about_files=True)


def _why_unwritable(path: Path) -> str | None:
    """Return why ``path``, or its nearest existing parent, is not a writable folder; None if it is one."""
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)
        nearest = next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.lexists(folder))
        subject = "it" if nearest == path else str(nearest)
        if not nearest.is_dir():
            return f"{subject} is not a folder"
        if not os.access(nearest, os.W_OK | os.X_OK):
            return f"{subject} is not writable"
    except (OSError, ValueError) as error:  # a name too long, a link to itself, an invalid character
        return f"it is not a valid name ({error.strerror if isinstance(error, OSError) else error})"
    try:
        # A file system may refuse operations that the mode bits allow, especially for root.
        if nearest != path.absolute():
            os.rmdir(tempfile.mkdtemp(dir=nearest))
    except OSError:
        return f"{subject} is not writable"
    return None
