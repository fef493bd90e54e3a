"""Options that name the model and the rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_kto.algorithms.recipes import Recipe
from nemo_kto.config.checker import override_value
from nemo_kto.errors import printable
from nemo_kto.tools.translate.trainer_options import Options, as_list, texts

_FILE_LOADERS = ("json", "csv", "parquet", "arrow", "text")  # of load_dataset, with data_files
_DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")


def place(options: Options, name: object, *, config: object = None, split: object = None) -> str:
    """Return a folder or file as it is, and a name on the hub as hf:NAME[:CONFIG][:SPLIT]."""
    hub, _, text = str(name).rpartition("::")  # of ms-swift
    is_path = text.startswith((".", "/", "~", "hf:")) or text.endswith(_DATA_FILES) or text.count("/") != 1
    if is_path or os.path.exists(text):
        if split not in (None, "", "train"):
            options.notes.append(f"{text}: all rows are used, not the split {split}; name its files")
        return text
    if options.trainer != "trl" and hub.upper() != "HF" and not options.get("use_hf"):
        remedy = f"check that hf:{text} has the same content, or download it and give the folder"
        options.notes.append(f"{text}: ms-swift reads this name from ModelScope; {remedy}")
    parts = [text, *(str(part) for part in (config, split) if part not in (None, "", "train", "default"))]
    return f"hf:{':'.join(parts)}"


def convert_model(options: Options, recipe: Recipe) -> None:
    """Set the model and the reference."""
    if options.has("model_name_or_path"):
        revision, model = options.get("model_revision"), place(options, options.get("model_name_or_path"))
        if revision not in (None, "main") and model.startswith("hf:"):
            model = f"{model}@{revision}"
            options.settled.add("model_revision")
        options.set("pretrained_checkpoint.restore_from_path", model, "model_name_or_path")
    if options.has("ref_model"):
        options.set("model.reference.restore_from_path", place(options, options.get("ref_model")), "ref_model")


def convert_data(options: Options, recipe: Recipe) -> None:
    """Set the rows for training and validation."""
    key, others = "model.data.data_prefix", ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split")
    name = "datasets" if options.has("datasets") else others[0]
    train, test = _rows(options, name, options.get(others[2])), _rows(options, "test_datasets")
    validates = options.trainer != "trl" or options.get("eval_strategy") not in (None, "no", False)
    if name == others[0] and options.trainer == "trl" and any(each.startswith("hf:") for each in train):
        if not test and (validates or options.has(others[3])):
            test = _rows(options, name, options.get(others[3], "test"))
        options.settled.update(others[1:])
    for other in others[name == others[0] :]:
        if other not in options.settled:
            options.reject(other, f"{name} is used, and all of its rows; name other files in {key}")
    files = [entry.get("data_files") for entry in as_list(options.get("datasets")) if isinstance(entry, Mapping)]
    for split, each in [item for mapping in files if isinstance(mapping, Mapping) for item in mapping.items()]:
        if not {*texts(each)} & {*train, *test}:
            options.without[printable(f"data_files.{split}={override_value(each)}")] = "no run uses this split of its rows"
    if train:
        both = [places[0] if len(places) == 1 else places for places in (train, test) if places]
        options.set(key, {"train": both[0], "validation": both[1]} if test else both[0], "datasets", others[0])
        options.notes.append(f"{key}: {recipe.data}; other columns are named in model.data.fields")
        options.settled.add("test_datasets")
    if test and not validates:
        options.set(f"trainer.{recipe.name}.val_check_interval", 0, "test_datasets", others[3])
    fraction, splits = options.get("validation_fraction") or 0, "model.data.splits_string"
    options.reject("validation_fraction", "the validation data is used") if test else None
    if 0 < fraction < 1 and not test:
        options.set(splits, f"{100 - fraction * 100:g},{fraction * 100:g}", "validation_fraction")
    elif not test:
        options.reject("validation_fraction", f"it must be a share between 0 and 1; set {splits}") if fraction else None
        options.set(splits, None)  # all rows are used for training
    options.agree("validation_fraction")


def _rows(options: Options, name: str, split: object = None) -> list[str]:
    """Return the files and hub names of an option; ``split`` is that of names without one."""
    value, rows = options.given.get(name), list[str]()
    for entry in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(entry, Mapping):
            rows += _entry_rows(options, name, entry)
            continue
        text, _, count = str(entry).strip().partition("#")
        if count:
            options.notes.append(f"{text}: all rows are used, not {count} of them")
        hub, separator, rest = text.rpartition("::")
        path, _, subsets = rest.partition(":") if options.trainer != "trl" else (rest, "", "")
        for subset in subsets.split("/"):
            config, name = subset or options.get("dataset_config"), f"{hub}{separator}{path}"
            rows += [place(options, name, config=config, split=part) for part in _splits(options, split)]
    return list(dict.fromkeys(rows))


def _splits(options: Options, split: object) -> list[str | None]:
    """Return the names in a split such as train[:1000]+test; of each, all rows are used."""
    if split is None:
        return [None]
    parts = [part.strip() for part in str(split).split("+")]
    for part in parts:
        if "[" in part:
            options.notes.append(f"split={split}: all rows are used; write the rows of {part} to a file")
    return list(dict.fromkeys(part.partition("[")[0] for part in parts))


def _entry_rows(options: Options, name: str, entry: Mapping[Any, Any]) -> list[str]:
    """Return the files or the hub names of a mapping with the arguments of load_dataset."""
    path, files = str(entry.get("path")), entry.get("data_files")
    is_file = path in _FILE_LOADERS or os.path.isdir(path)
    read = ("path", "name", "split", *(("data_files",) if is_file else ()))
    for key, value in entry.items():
        if key not in read and value not in (None, False, ""):
            reason = "settings of data sets are not translated; columns are named in model.data.fields"
            options.without[printable(f"{name}.{key}={override_value(value)}")] = reason
    splits = _splits(options, entry.get("split"))
    if files is None or not is_file:
        return [place(options, path, config=entry.get("name"), split=split) for split in splits] if "path" in entry else []
    if isinstance(files, Mapping):
        usual = "train" if "train" in files else next(iter(files), "")
        files = [each for split in splits for each in texts(files.get(split or usual))]
    return [str((Path(path) if path not in _FILE_LOADERS else Path()) / file) for file in texts(files)]
