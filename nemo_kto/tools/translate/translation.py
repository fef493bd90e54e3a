"""Translation of the options of TRL and ms-swift; translation.yaml contains the tables."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nemo_kto.algorithms.recipes import RECIPES, Recipe
from nemo_kto.config import migration
from nemo_kto.config.checker import override_value
from nemo_kto.config.schema import config_type
from nemo_kto.errors import UserError, either, printable
from nemo_kto.tools.translate.loss_options import convert_loss, overrides_of
from nemo_kto.tools.translate.trainer_options import (
    Options,
    as_list,
    is_finite,
    read_value,
    set_texts,
    table,
    texts,
    trains_adapters,
)
from nemo_kto.utils.fields import names
from nemo_kto.utils.files import read_json
from nemo_kto.utils.text import shell_word

_FILE_LOADERS = ("json", "csv", "parquet", "arrow", "text")  # of load_dataset, with data_files
_DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
EPOCHS = 1_000_000  # other trainers repeat the data until max_steps


class Translation(NamedTuple):
    """A command of another trainer in the keys of this program."""

    trainer: str
    recipe: Recipe
    overrides: dict[str, object]  # our key -> value
    without: dict[str, str]  # option as given -> why it has no counterpart
    notes: list[str]

    def words(self) -> list[str]:
        """Return the overrides as Hydra reads them."""
        return [f"{key}={override_value(value)}" for key, value in self.overrides.items()]

    def command(self, further: Sequence[str] = ()) -> str:
        """Return the command line for a shell; ``further`` are overrides that the user has given."""
        words = [_shell(word) for word in (*self.words(), *further)]
        return " \\\n  ".join([f"nemo-kto {self.recipe.name}", *words])

    def remarks(self) -> list[str]:
        """Return the notes, and the options without a counterpart with the reason."""
        without = [f"{option} has no counterpart: {reason}" for option, reason in self.without.items()]
        return [*self.notes, *without]


def _shell(word: str) -> str:
    is_simple = "'" in word and word.isprintable() and re.search(r'["$`\\!]', word) is None
    return f'"{word}"' if is_simple else shell_word(word)


def find_trainer(options: Mapping[str, object]) -> str:
    """Return the trainer of which most signs are among the options; UserError for LLaMA-Factory and axolotl."""
    given, others = {name.replace("-", "_") for name in options}, table()["others"]
    signs = {name: set(entry["signs"]) for name, entry in table()["trainers"].items()}
    signs |= {name: set(theirs) for name, theirs in others.items()}
    found = max(signs, key=lambda name: len(given & signs[name]))
    if found in others:
        text = f"FILE must have options of TRL or ms-swift, got {', '.join(sorted(given & signs[found]))} of {found}"
        raise UserError(f"{text}; docs/start/from-llama-factory.md lists the keys for its options")
    return found


def find_recipe(options: Mapping[str, object], method: str | None) -> tuple[Recipe, str | None]:
    """Return the algorithm for a method, or that the options name, and the loss that it implies; UserError if none."""
    if method is not None:
        if method not in table()["methods"]:
            text = f"must be {either(list(table()['methods']))}, got {method}"
            raise UserError(f"The method {text}; no other method is supported")
        algorithm, *loss = table()["methods"][method]
        return RECIPES[algorithm], next(iter(loss), None)
    losses = as_list(read_value(options.get("loss_type")))
    for recipe in RECIPES.values():
        if recipe.aliases.keys() & options.keys() or any(overrides_of(str(loss), recipe.name) for loss in losses):
            return recipe, None
    raise UserError(f"--algorithm must be {either(list(RECIPES))}, got none, and the options name no algorithm; add it")


def translate(
    given: Mapping[str, object],
    *,
    trainer: str | None = None,
    method: str | None = None,
    recipe: Recipe | None = None,
    with_defaults: bool = True,
) -> Translation:
    """Translate options; with ``with_defaults``, also the trainer's defaults, because ours may depend on other keys.

    ``method`` is the method that the program of the file implies, such as orpo; the option rlhf_type takes precedence.
    """
    given = {name.lstrip("-").replace("-", "_"): value for name, value in given.items()}
    trainer, loss = trainer or find_trainer(given), None
    if (named_method := read_value(given.get("rlhf_type"))) is not None:
        method = str(named_method)
    if recipe is None or method is not None:
        named, loss = find_recipe(given, method)
        recipe = recipe or named
    options = Options.of(given, trainer=trainer, implied_loss=loss)
    options.settled.update(["rlhf_type"] if method is not None else [])
    for convert in (_model, _data, convert_loss, _batch, _length, _schedule, _adapters, _quantised, _precision, _intervals):
        convert(options, recipe)
    _experts(options, method, with_defaults=with_defaults and trainer == "trl")
    _same_values(options, recipe)
    _settle_others(options, recipe)
    chosen = {key: value for key, (value, by) in options.overrides.items() if by or with_defaults}
    return Translation(options.title, recipe, chosen, options.without, list(dict.fromkeys(options.notes)))


def _settle_others(options: Options, recipe: Recipe) -> None:
    """Give the options that are not translated a reason, or name them as agreeing if they are off."""
    reasons, on = _reasons(), table()["trainers"][options.trainer]["enabled"]
    aliases = {name: f"see {text.replace('NAME', recipe.name)}" for name, text in migration.aliases().items()}
    for name, value in options.given.items():
        if value in (None, "", []) or (value is True and name in on) or (value is False and name in reasons.keys() - {*on}):
            options.agree(name)
        elif name not in options.settled:
            theirs = options.original[name].removeprefix("model_init_kwargs.")
            usual = aliases.get(theirs, f"it is no option of {options.title} that this program knows")
            options.reject(name, reasons.get(name) or reasons.get(theirs) or usual)
    if options.agreeing:
        options.notes.append(f"as in this program, or without effect: {', '.join(options.agreeing)}")


def _reasons() -> dict[str, str]:
    """Return options without a counterpart, or whose other values have none, with the reason."""
    return {name: reason for reason, group in table()["without"].items() for name in group} | migration.without()


def _place(options: Options, name: object, *, config: object = None, split: object = None) -> str:
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


def _model(options: Options, recipe: Recipe) -> None:
    """Set the model and the reference."""
    if options.has("model_name_or_path"):
        revision, model = options.get("model_revision"), _place(options, options.get("model_name_or_path"))
        if revision not in (None, "main") and model.startswith("hf:"):
            model = f"{model}@{revision}"
            options.settled.add("model_revision")
        options.set("pretrained_checkpoint.restore_from_path", model, "model_name_or_path")
    if options.has("ref_model"):
        options.set("model.reference.restore_from_path", _place(options, options.get("ref_model")), "ref_model")


def _data(options: Options, recipe: Recipe) -> None:
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
            rows += [_place(options, name, config=config, split=part) for part in _splits(options, split)]
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
        return [_place(options, path, config=entry.get("name"), split=split) for split in splits] if "path" in entry else []
    if isinstance(files, Mapping):
        usual = "train" if "train" in files else next(iter(files), "")
        files = [each for split in splits for each in texts(files.get(split or usual))]
    return [str((Path(path) if path not in _FILE_LOADERS else Path()) / file) for file in texts(files)]


def _batch(options: Options, recipe: Recipe) -> None:
    """The global batch: examples per device x accumulation x data-parallel ranks."""
    devices, nodes = (options.get(name) for name in ("nproc_per_node", "nnodes"))
    ranks = (devices or 1) * (nodes or 1)
    key, names = "model.global_batch_size", ("per_device_train_batch_size", "gradient_accumulation_steps")
    micro, accumulation = options.get(names[0], 1), options.get(names[1])
    if options.trainer == "megatron-swift":
        options.set(key, options.get("global_batch_size"), "global_batch_size")
        return
    layout = ("tensor_parallel_size", "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    data_parallel = max(1, int(ranks / math.prod(options.get(name, 1) for name in layout)))
    if accumulation is None:  # ms-swift completes a batch of 16
        accumulation = max(1, math.ceil(16 / micro / data_parallel))
    options.set(key, micro * accumulation * data_parallel, *names)
    if options.has(names[0]):
        options.set("model.micro_batch_size", micro, names[0])
    parts = f"{micro} per device x {accumulation} accumulated x {data_parallel} data-parallel ranks"
    remedy = "" if devices is not None or ranks > 1 else "; for more GPUs, give --ranks N to nemo-kto translate"
    if options.has(*names):
        options.notes.append(f"{key}: {parts}{remedy}")


def _length(options: Options, recipe: Recipe) -> None:
    section, steps, epochs = f"trainer.{recipe.name}", options.get("max_steps"), options.get("num_train_epochs", 1)
    if steps is not None and steps > 0:
        options.set(f"{section}.max_steps", steps, "max_steps")
        options.set(f"{section}.max_epochs", EPOCHS, "max_steps")
        options.reject("num_train_epochs", "max_steps is given and determines the length of the run")
        return
    options.agree("max_steps")
    if epochs < 1:
        options.set(f"{section}.limit_train_batches", float(epochs), "num_train_epochs")
    else:
        options.set(f"{section}.max_epochs", math.ceil(epochs), "num_train_epochs")
        if epochs != int(epochs):
            options.notes.append(f"{section}.max_epochs: {epochs} epochs, rounded up; or set {section}.max_steps")


def _schedule(options: Options, recipe: Recipe) -> None:
    prefix, schedule = "model.optim.sched", "lr_scheduler_type"
    name = str(options.get(schedule)).lower()
    extra = options.get("lr_scheduler_kwargs")
    further = dict(extra) if isinstance(extra, Mapping) else {"": extra} if extra else {}
    lowest = read_value(further.pop("min_lr", options.get("min_lr")))
    share = read_value(further.pop("min_lr_rate", None))
    if name == "cosine_with_restarts":
        options.set(f"{prefix}.num_cycles", further.pop("num_cycles", 1), "lr_scheduler_kwargs", because=schedule)
    if further or (extra and name.startswith("constant")):
        options.reject("lr_scheduler_kwargs", "of these settings only min_lr, min_lr_rate and num_cycles are translated")
    if not is_finite(lowest):
        lowest = float(f"{(options.get('learning_rate') or 0.0) * share:.12g}") if is_finite(share) else 0.0
    if not name.startswith("constant"):
        options.set(f"{prefix}.min_lr", lowest, "min_lr", "lr_scheduler_kwargs", because=schedule)
    steps, ratio = options.get("warmup_steps", 0), options.get("warmup_ratio")
    names = ("warmup_steps", "warmup_ratio")
    if steps > 0 and ratio:
        options.reject(names[1], "warmup_steps is used")
    if steps >= 1 or not (steps or ratio):
        options.set(f"{prefix}.warmup_steps", int(steps), *names)
    else:
        options.set(f"{prefix}.warmup_steps", 0, *names)
        options.set(f"{prefix}.warmup_ratio", steps or ratio, *names)
    names = ("adam_beta1", "adam_beta2")
    options.set("model.optim.betas", [options.get(names[0]), options.get(names[1])], *names)


def _adapters(options: Options, recipe: Recipe) -> None:
    tuning, names = "model.peft.lora_tuning", ("tuner", "use_peft")
    keys = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "layers_to_transform", "use_rslora", "use_dora")
    if not trains_adapters(options.defaults | options.given):
        options.agree(names[1])
        for name in (*keys, "adapter_name_or_path"):
            if options.given.get(name) is not False:
                options.reject(name, "all weights are trained, because no option selects LoRA")
        return
    options.set("model.peft.peft_scheme", "lora", *names, *keys[:5])
    for number, folder in enumerate(texts(options.get("adapter_name_or_path"))):
        if number:
            options.reject("adapter_name_or_path", "a run starts from one folder of adapters; the first is used")
        else:
            options.set("model.peft.restore_from_path", _place(options, folder), "adapter_name_or_path")
    rank, targets = options.get("lora_r", 8), as_list(options.get("lora_target_modules"))
    options.set(f"{tuning}.adapter_dim", rank, "lora_r")
    options.set(f"{tuning}.alpha", float(options.get("lora_alpha")), "lora_alpha")
    options.set(f"{tuning}.adapter_dropout", float(options.get("lora_dropout", 0.0)), "lora_dropout")
    if not targets:  # PEFT's for most families
        targets = ["q_proj", "v_proj"] if options.trainer == "trl" else ["all-linear"]
    options.set(f"{tuning}.target_modules", targets, "lora_target_modules")
    layers = as_list(options.get("layers_to_transform"))
    if not all(re.fullmatch(r"\d{1,9}", str(layer)) for layer in layers):
        options.reject("layers_to_transform", "its entries must be numbers")
    elif layers:
        options.set(f"{tuning}.layer_selection", [int(layer) + 1 for layer in layers], "layers_to_transform")


def _quantised(options: Options, recipe: Recipe) -> None:
    """Set the form of the frozen weights: NF4 for the four bits of bitsandbytes, whatever their type."""
    key, names = "model.quantize", ("load_in_4bit", "quant_bits", "quant_method")
    kind, nested = "bnb_4bit_quant_type", "use_bnb_nested_quant"
    if options.get("load_in_4bit") is not True and (options.get("quant_bits"), options.get("quant_method")) != (4, "bnb"):
        return
    if not trains_adapters(options.defaults | options.given):
        for name in names:
            options.reject(name, "all weights are trained, because no option selects LoRA")
        return
    options.set(key, "nf4", *names)
    if options.get(kind) == "fp4":
        options.notes.append(f"{key}: FP4 in {options.title}; NF4 has as many bits, and smaller errors")
        options.settled.add(kind)
    if options.get(nested) is True:
        options.notes.append(f"{key}: {options.title} also quantises the scales, here fp32 (0.4 bits a value more)")
        options.settled.add(nested)


def _precision(options: Options, recipe: Recipe) -> None:
    names = ("bf16", "fp16", "dtype")
    bf16, fp16, dtype = (options.get(name) for name in names)
    if bf16 is None and options.trainer == "trl" and options.has(*names) and fp16 is not True:
        bf16 = True  # its default
    if fp16 is True or dtype in ("float16", "fp16"):
        options.notes.append("trainer.precision: fp16 is not supported; bf16 is used, which needs no loss scaling")
        bf16 = True
    if bf16 is not None or dtype in ("bfloat16", "bf16", "float32"):
        is_bf16 = bf16 is True or dtype in ("bfloat16", "bf16")
        options.set("trainer.precision", "bf16" if is_bf16 else "32", *names)


def _intervals(options: Options, recipe: Recipe) -> None:
    section, epochs = f"trainer.{recipe.name}", max(1, math.ceil(options.get("num_train_epochs") or 1))
    for kind, key in (("eval", f"{section}.val_check_interval"), ("save", f"{section}.save_interval")):
        names = (f"{kind}_strategy", f"{kind}_steps")
        strategy, steps = (options.get(name) for name in names)
        if kind == "eval" and strategy == "steps" and steps is None and options.trainer == "trl":
            steps = options.get("logging_steps", 10)
        if strategy in ("epoch", "no", False):
            options.set(key, 1.0 if strategy == "epoch" else 0, names[0])
            options.reject(names[1], f"{names[0]} is {'epoch' if strategy == 'epoch' else 'no'}")
        elif kind == "eval" and strategy is None and options.trainer == "trl":
            options.reject(names[1], "TRL does not validate, because eval_strategy is no, its default")
        elif strategy not in (None, "steps"):
            options.reject(names[0], "it must be steps, epoch or no")
        elif steps is not None:
            total = options.get("max_steps") or 0
            share = math.ceil(steps * total) if total > 0 else min(1.0, steps * epochs)
            options.set(key, share if steps < 1 else int(steps), *names)
    if 0 < options.get("logging_steps", 0) < 1:
        options.reject("logging_steps", f"it is a share of all steps; set {section}.log_every_n_steps")
    elif options.has("logging_steps"):
        options.set(f"{section}.log_every_n_steps", int(options.get("logging_steps")), "logging_steps")
    if options.has("save_total_limit"):
        kept = max(0, options.get("save_total_limit") - 1)
        options.set("exp_manager.checkpoint_callback_params.save_top_k", kept, "save_total_limit")
    if options.has("metric_for_best_model"):
        named = str(options.get("metric_for_best_model")).removeprefix("eval_")
        ours = table()["metrics"].get(named, named)
        options.set("exp_manager.checkpoint_callback_params.monitor", f"val_{ours}", "metric_for_best_model")
        mode = "max" if options.get("greater_is_better", named != "loss") else "min"
        options.set("exp_manager.checkpoint_callback_params.mode", mode, "metric_for_best_model", "greater_is_better")
    if options.has("ddp_timeout"):
        minutes = min(525_600, max(1, math.ceil(options.get("ddp_timeout") / 60)))
        options.set("trainer.timeout_minutes", minutes, "ddp_timeout")
    if options.has("max_shard_size"):
        size = str(options.get("max_shard_size")).upper().removesuffix("GB")
        options.set("export.max_shard_size_gb", read_value(size), "max_shard_size")


def _experts(options: Options, method: str | None, *, with_defaults: bool) -> None:
    """Set the weight of the load-balancing loss from TRL's, by default that of config.json.

    With equal use of all experts, TRL's loss is the number of experts per token; ours is 1 for each layer.
    """
    key, name = "model.moe_aux_loss_coeff", "router_aux_loss_coef"
    file, weight = Path(str(options.get("model_name_or_path"))) / "config.json", options.get(name)
    if weight == 0 or (weight is None and not with_defaults):
        return
    values = read_json(file) if os.path.isfile(file) else {}  # no file also for a name that is too long
    values = values.get("text_config") or values if isinstance(values, dict) else {}
    k, layers = values.get("num_experts_per_tok"), values.get("num_hidden_layers")
    is_on = method not in ("cpo", "orpo") or True in (
        values.get("output_router_logits"),
        options.get("output_router_logits"),
    )
    remedy = f"set it to {name} x experts per token / layers (docs/scale/experts.md)"
    if weight is None and not values and is_on:
        options.notes.append(f"{key}: if the model has experts, TRL adds {name} of its config.json; {remedy}")
    elif is_finite(weight := values.get(name) if weight is None else weight) and is_on:
        if is_finite(k) and is_finite(layers) and layers > 0:
            options.set(key, float(f"{weight * k / layers:.3g}"), name)
            options.notes.append(f"{key}: near {name}={weight:g} of TRL's loss, x {k} experts per token / {layers} layers")
        else:
            options.reject(name, "it is for another loss")
            options.notes.append(f"{key}: {name}={weight:g} is for another loss; {remedy}")
    if name not in options.settled:
        options.reject(name, "TRL has no such loss with this method")


def _same_values(options: Options, recipe: Recipe) -> None:
    """Translate the options that need no other: those with the same value, and those with a table of values."""
    ours = names(config_type(recipe))
    for name, key in table()["keys"].items():
        target, value = key.replace("NAME", recipe.name), options.get(name)
        if value is None or name in options.settled:
            continue
        if target not in ours:
            options.reject(name, f"`nemo-kto {recipe.name}` has no such option")
        else:
            options.set(target, value, name)
    for name, values in table()["values"].items():
        value = options.get(name) if name not in options.settled else None
        given = value if isinstance(value, list) else [] if value is None else [value]
        known = [each for each in given if isinstance(each, str | bool) and each in values]
        if len(known) < len(given):
            options.reject(name, _reasons().get(name, "this value is not supported"))
        if known:
            set_texts(options, list(dict.fromkeys(text for each in known for text in values[each])), name)
    if options.get("truncation_mode") == "delete":
        options.notes.append(f"model.data.seq_length: longer rows, which {options.title} does not use, are truncated")
    if options.get("max_length") is None:
        limit = "no limit" if options.trainer == "trl" else "the limit of the model"
        options.notes.append(f"model.data.seq_length: {limit} in {options.title}, here at most 2048 tokens")
