"""Translation of the options of TRL, ms-swift, LLaMA-Factory and axolotl; translation.yaml contains the tables."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nemo_kto.algorithms.recipes import RECIPES, Recipe
from nemo_kto.config import migration
from nemo_kto.config.check import override_value
from nemo_kto.config.schema import config_type
from nemo_kto.config.trainer_options import Options, as_list, is_finite, read_value, set_texts, table, trains_adapters
from nemo_kto.errors import UserError, either
from nemo_kto.utils.field_errors import names
from nemo_kto.utils.files import read_json
from nemo_kto.utils.text import shell_word

EPOCHS = 1_000_000  # other trainers repeat the data until max_steps
_DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")


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
    """Return the trainer of the options: its option for the method is given, or most of its own names are."""
    given, trainers = {name.replace("-", "_") for name in options}, table()["trainers"]
    return max(trainers, key=lambda name: (trainers[name]["method"] in given, len(given & set(trainers[name]["signs"]))))


def find_recipe(options: Mapping[str, object], trainer: str) -> tuple[Recipe, str | None]:
    """Return the algorithm that the options name, and the loss if the method implies one; raise UserError if they do not."""
    method = table()["trainers"][trainer]["method"]
    if method in options:
        if (named := str(options[method])) not in table()["methods"]:
            raise UserError(
                f"{method} must be {either(list(table()['methods']))}, got {named}; no other method is supported"
            )
        algorithm, *loss = table()["methods"][named]
        return RECIPES[algorithm], next(iter(loss), None)
    known = table()["values"]["loss_type"]
    overrides = [text for loss in as_list(read_value(options.get("loss_type"))) for text in known.get(str(loss), [])]
    for recipe in RECIPES.values():
        own = {f"model.{recipe.name}."} if any(recipe.aliases.keys() & options.keys()) else set()
        if own or any(text.startswith(f"model.{recipe.name}.") for text in overrides):
            return recipe, None
    raise UserError(f"--algorithm must be {either(list(RECIPES))}, got none, and the options name no algorithm; add it")


def translate(
    given: Mapping[str, object],
    *,
    trainer: str | None = None,
    recipe: Recipe | None = None,
    ranks: int | None = None,
    folder: Path = Path(),
    with_defaults: bool = True,
) -> Translation:
    """Translate options; with ``with_defaults``, also the trainer's defaults, because ours may depend on other keys.

    ``folder`` contains the file with the options. ``ranks`` is the number of ranks, if the options do not say it.
    """
    given = {name.lstrip("-").replace("-", "_"): value for name, value in given.items()}
    trainer = trainer or find_trainer(given)
    options, loss = Options.of(given, trainer=trainer, folder=folder), None
    if recipe is None or table()["trainers"][trainer]["method"] in given:
        named, loss = find_recipe(given, trainer)
        recipe = recipe or named
    if loss == "cpo" and options.has("loss_type"):  # CPOTrainer gives the names of DPOTrainer to losses without a reference
        kind = str(options.given["loss_type"])
        if kind in ("hinge", "ipo"):
            options.set("model.dpo.reference_free", True, "loss_type")
            if weight := options.get("cpo_alpha"):
                _sft_term(options, "model.dpo", weight, token_mean=True, name="cpo_alpha")
            options.given.pop("cpo_alpha", None)
        options.given["loss_type"] = "cpo" if kind == "sigmoid" else kind
    elif loss is not None:
        options.given.setdefault("loss_type", loss)
    if loss == "simpo" and trainer == "ms-swift":
        options.defaults["beta"] = 2.0
    options.used.add(table()["trainers"][trainer]["method"])
    for convert in (_model_and_data, _loss, _batch, _length, _schedule, _adapters, _precision, _intervals, _logging):
        convert(options, recipe, ranks or 1)
    _same_values(options, recipe)
    reasons = table()["without"] | migration.without()
    for name, value in options.given.items():
        is_off = value is False and name in reasons  # it has no effect then
        if name not in options.used and value not in (None, "", []) and not is_off:
            options.reject(name, reasons.get(name) or f"it is no option of {options.title} that this program knows")
    chosen = {key: value for key, (value, by) in options.overrides.items() if by or with_defaults}
    return Translation(options.title, recipe, chosen, options.without, list(dict.fromkeys(options.notes)))


def _place(options: Options, name: object, *, config: object = None, split: object = None) -> str:
    """Return a folder or file as it is, and a name on the hub as hf:NAME[:CONFIG][:SPLIT]."""
    hub, _, text = str(name).rpartition("::")  # of ms-swift
    is_path = text.startswith((".", "/", "~", "hf:")) or text.endswith(_DATA_FILES) or text.count("/") != 1
    if is_path or os.path.exists(text):
        return text
    if options.title.startswith("ms-swift") and hub.upper() != "HF" and not options.get("use_hf"):
        remedy = f"check that hf:{text} has the same content, or download it and give the folder"
        options.notes.append(f"{text}: ms-swift reads this name from ModelScope; {remedy}")
    parts = [text, *(str(part) for part in (config, split) if part not in (None, "", "train", "default"))]
    return f"hf:{':'.join(parts)}"


def _model_and_data(options: Options, recipe: Recipe, ranks: int) -> None:
    if options.has("model_name_or_path"):
        revision = options.get("model_revision")
        model = _place(options, options.get("model_name_or_path"))
        pinned = f"{model}@{revision}" if model.startswith("hf:") and revision not in (None, "main") else model
        options.set("pretrained_checkpoint.restore_from_path", pinned, "model_name_or_path")
    for name in ("ref_model", "ref_model_name_or_path"):
        if options.has(name):
            options.set("model.reference.restore_from_path", _place(options, options.get(name)), name)
    key = "model.data.data_prefix"
    train, test = _rows(options, "datasets", "dataset_name"), _rows(options, "test_datasets", "eval_dataset")
    if options.has("dataset_test_split") and options.has("dataset_name") and not options.has("datasets"):
        test = test or _rows(options, "dataset_name", split=options.get("dataset_test_split"))
    if train:
        named: object = train[0] if len(train) == 1 else train
        if test:
            named = {"train": named, "validation": test[0] if len(test) == 1 else test}
        options.set(key, named, "datasets", "dataset_name")
        options.notes.append(f"{key}: {recipe.data}; other columns are named in model.data.fields")
    fraction = options.get("validation_fraction")
    if fraction and (test or fraction >= 1):
        reason = "a number of rows is not a share; set model.data.splits_string"
        options.reject("validation_fraction", "the validation data is used" if test else reason)
    elif fraction:
        options.set("model.data.splits_string", f"{100 - fraction * 100:g},{fraction * 100:g}", "validation_fraction")
    elif not test:
        options.set("model.data.splits_string", None)  # all rows are used for training


def _rows(options: Options, *names: str, split: object = None) -> list[str]:
    """Return the files and hub names of the first of the options that is given."""
    name, *ignored = [each for each in names if options.has(each)] or [""]
    for each in (*ignored, *(("dataset_config", "dataset_train_split", "dataset_test_split") if name == "datasets" else ())):
        options.reject(each, f"{name} is used")
    value = options.get(name) if name else None
    texts = isinstance(value, str) and not options.title.startswith("ms-swift")
    entries = str(value).split(",") if texts else as_list(value)
    config, folder = options.get("dataset_config"), options.folder / str(options.get("dataset_dir", "data"))
    info = read_json(file) if (file := folder / "dataset_info.json").is_file() else {}
    rows: list[str] = []
    for entry in entries:
        if isinstance(entry, Mapping):
            rows += _entry_rows(options, name, entry, folder=None)
            continue
        text, _, count = str(entry).strip().partition("#")
        if count:
            options.notes.append(f"{text}: all rows are used, not {count} of them")
        if isinstance(info.get(text), Mapping):
            rows += _entry_rows(options, text, info[text], folder=folder)
            continue
        if options.title == "LLaMA-Factory":
            options.notes.append(f"{text}: an entry of dataset_info.json that was not found; name its file")
        hub, separator, rest = text.rpartition("::")
        path, _, subsets = rest.partition(":") if options.title.startswith("ms-swift") else (rest, "", "")
        for subset in subsets.split("/"):
            part = options.get("dataset_train_split") if split is None else split
            rows.append(_place(options, f"{hub}{separator}{path}", config=subset or config, split=part))
    return rows


def _entry_rows(options: Options, name: str, entry: Mapping[Any, Any], *, folder: Path | None) -> list[str]:
    """Return the files or the hub name of a mapping, of axolotl and TRL, or in LLaMA-Factory's dataset_info.json."""
    columns = table()["row_types"].get(str(entry.get("type")).rpartition(".")[2])
    if columns is not None:
        options.set("model.data.fields", columns or None, "datasets")
        options.set("model.data.apply_chat_template", True, "datasets")
        options.notes.append(f"type={entry['type']}: the chat template of the tokenizer is used, and no column `system`")
    location = ["file_name", "hf_hub_url", "path", "name", "subset", "split", "data_files", "ds_type"]
    for key, value in entry.items():
        if key not in location and value not in (None, False, "") and (key != "type" or columns is None):
            reason = "columns are named in model.data.fields, and model.data.apply_chat_template=true is for rows of text"
            options.without[f"{name}.{key}={override_value(value)}"] = f"settings of data sets are not translated; {reason}"
    path, files = entry.get("hf_hub_url", entry.get("path")), entry.get("data_files")
    if folder is not None and "file_name" in entry:
        return [str(folder / str(entry["file_name"]))]
    place = _place(options, path, config=entry.get("name", entry.get("subset")), split=entry.get("split"))
    if files is None or place.startswith("hf:"):
        if files is not None:
            why = f"{place} is read as a whole, or the split that it names"
            options.without[f"{name}.data_files={override_value(files)}"] = why
        return [place]
    within = Path(place) if os.path.isdir(place) else Path()
    return [str(within / str(file)) for file in (files if isinstance(files, list) else [files])]


def _loss(options: Options, recipe: Recipe, ranks: int) -> None:
    section, losses = f"model.{recipe.name}", [str(loss) for loss in as_list(options.get("loss_type"))]
    weights = [read_value(weight) for weight in as_list(options.get("loss_weights"))] or [1.0] * len(losses)
    terms = [(loss, weight) for loss, weight in zip(losses, weights, strict=False) if loss != "sft"]
    if losses and (wrong := _wrong_losses(section, losses, weights)) is not None:
        name, reason = wrong
        options.set(f"{section}.preference_loss", "???", "loss_type")  # the command has no loss until the user names one
        options.reject(name, reason)
    elif losses:
        named = [_overrides_of(loss, section) for loss, _ in terms]
        set_texts(options, list(dict.fromkeys(text for texts in named for text in texts[1:])), "loss_type")
        names_of = [texts[0].partition("=")[2] for texts in named]
        if len(terms) > 1:
            mixed = {name: weight for name, (_, weight) in zip(names_of, terms, strict=True)}
            options.set(f"{section}.preference_losses", mixed, "loss_type")
        else:
            options.set(f"{section}.preference_loss", names_of[0], "loss_type")
            if terms[0][1] != 1:
                options.set(f"{section}.preference_loss_weight", terms[0][1], "loss_weights")
    for loss, weight in zip(losses, weights, strict=False):
        if loss == "sft":
            _sft_term(options, section, weight, token_mean=True, name="loss_type")
    for name in ("rpo_alpha", "sft_weight"):
        if options.get(name):
            _sft_term(options, section, options.get(name), token_mean=name == "rpo_alpha", name=name)
    _own_terms(options, losses)
    if section == "model.dpo":
        _divergence(options, losses)
    if options.get("sync_ref_model"):
        options.set("model.reference.sync_interval", options.get("ref_model_sync_steps", 512), "sync_ref_model")
        options.set("model.reference.sync_alpha", options.get("ref_model_mixup_alpha", 0.6), "sync_ref_model")


def _overrides_of(loss: str, section: str) -> list[str]:
    return [text for text in table()["values"]["loss_type"].get(loss, []) if text.startswith(section)]


def _wrong_losses(section: str, losses: Sequence[str], weights: Sequence[object]) -> tuple[str, str] | None:
    """Return the option that names losses that a run cannot have, and the reason; None if it can have them."""
    named = [loss for loss in losses if loss != "sft"]
    means = [any("average_log_probs" in text for text in _overrides_of(loss, section)) for loss in named]
    if len(weights) != len(losses):
        return "loss_weights", "it must have a number for each loss"
    if not named:
        return "loss_type", f"a run has a preference loss besides the SFT loss; set {section}.preference_loss"
    if not all(_overrides_of(loss, section) for loss in named):
        return "loss_type", f"`nemo-kto {section.removeprefix('model.')}` has no such loss"
    if len(named) > 1 and (section != "model.dpo" or len({*means}) > 1 or len({*named}) < len(named)):
        return (
            "loss_type",
            "these losses cannot be mixed: they are not for pairs, occur twice, or take sums and means of tokens",
        )
    return None


def _divergence(options: Options, losses: Sequence[str]) -> None:
    """Translate the options of f-DPO, LD-DPO and WPO where they mean something else in the other trainer."""
    swift = options.title.startswith("ms-swift")
    divergence, alpha = options.get("f_divergence_type"), options.get("f_alpha_divergence_coef")
    if divergence not in (None, "reverse_kl") and {"ipo", "sigmoid_norm"} & {*losses}:
        options.reject(
            "f_divergence_type", "it divides the score of the sum by the number of tokens; here it is that of the mean"
        )
        options.given.pop("f_divergence_type", None)
    if alpha is not None and divergence == "alpha_divergence":
        value = 1 - alpha if swift else alpha  # ms-swift has the alpha of the paper
        options.set("model.dpo.f_alpha_divergence_coef", value, "f_alpha_divergence_coef")
    elif alpha is not None:
        options.reject("f_alpha_divergence_coef", "only f_divergence_type=alpha_divergence uses it")
    if swift and options.has("ld_alpha"):
        options.notes.append("model.dpo.ld_alpha: the reference is weighted as well, and not in ms-swift")
    if options.get("use_weighting") and "sft" in losses:
        options.notes.append("model.dpo.use_weighting: the SFT loss is not weighted, and is in TRL")


def _own_terms(options: Options, losses: Sequence[str]) -> None:
    """Set the options that belong to single losses, and the SFT terms that TRL has in CPO, SimPO and ORPO."""
    if {"cpo", "simpo"} & {*losses} and options.get("cpo_alpha"):
        _sft_term(options, "model.dpo", options.get("cpo_alpha"), token_mean=True, name="cpo_alpha")
    if "cpo" in losses:  # its own SFT term is a sum over tokens
        options.set("model.dpo.cpo_alpha", 0, "loss_type")
    for name, users, title in (
        ("simpo_gamma", {"simpo", "alphapo"}, "SimPO has"),
        ("cpo_alpha", {"cpo", "simpo"}, "CPO and SimPO have"),
        ("alpha", {"alphapo"}, "AlphaPO has"),
    ):
        if not users & {*losses}:
            options.reject(name, f"only {title} it")
            options.defaults.pop(name, None)
            options.given.pop(name, None)
    unsmoothed = options.title in ("TRL", "axolotl") and (not losses or {"sigmoid", "sigmoid_norm"} & {*losses})
    if unsmoothed and options.get("label_smoothing", 0):
        options.reject("label_smoothing", "TRL ignores it with this loss; set model.dpo.label_smoothing to smooth it")
        options.given.pop("label_smoothing", None)
    if "orpo" in losses and options.title != "LLaMA-Factory":  # TRL's first term covers the prompt and is a mean over tokens
        _sft_term(options, "model.dpo", 1.0, token_mean=True, name="loss_type")
        options.set("model.dpo.orpo_sft_weight", 0, "loss_type")
        options.set("model.dpo.sft_completion_only", False, "loss_type")
    if "exo_pair" in losses or not options.get("label_smoothing", 0):
        smoothing = options.given.pop("label_smoothing", None)
        if smoothing:
            options.given["exo_label_smoothing"] = smoothing
            options.original["exo_label_smoothing"] = options.original["label_smoothing"]


def _sft_term(options: Options, section: str, weight: object, *, token_mean: bool, name: str) -> None:
    options.set(f"{section}.sft_loss_weight", weight, name)
    if token_mean and section == "model.dpo":
        options.set(f"{section}.sft_token_mean", True, name)
    else:
        options.set(f"{section}.sft_average_log_probs", True, name)


def _batch(options: Options, recipe: Recipe, ranks: int) -> None:
    """The global batch: examples per device x accumulation x data-parallel ranks."""
    devices, nodes = (options.get(name) for name in ("nproc_per_node", "nnodes"))
    if devices is not None:
        options.set("trainer.devices", devices, "nproc_per_node")
        ranks = devices * (nodes or 1)
    if nodes is not None:
        options.set("trainer.num_nodes", nodes, "nnodes")
    key, names = "model.global_batch_size", ("per_device_train_batch_size", "gradient_accumulation_steps")
    micro, accumulation = max(1, options.get(names[0], 1)), options.get(names[1])
    if "global_batch_size" in options.defaults or options.has("global_batch_size"):
        options.set(key, options.get("global_batch_size"), "global_batch_size")
        if options.has("micro_batch_size"):
            options.set("model.micro_batch_size", options.get("micro_batch_size"), "micro_batch_size")
        return
    layout = ("tensor_parallel_size", "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    data_parallel = max(1, ranks // math.prod(max(1, options.get(name, 1)) for name in layout))
    if accumulation is None:  # ms-swift completes a batch of 16
        accumulation = max(1, math.ceil(16 / micro / data_parallel))
    options.set(key, micro * accumulation * data_parallel, *names)
    if options.has(names[0]):
        options.set("model.micro_batch_size", micro, names[0])
    parts = f"{micro} per device x {accumulation} accumulated x {data_parallel} data-parallel ranks"
    remedy = "" if devices is not None or ranks > 1 else "; for more GPUs, give --ranks N to nemo-kto translate"
    if options.has(*names):
        options.notes.append(f"{key}: {parts}{remedy}")


def _length(options: Options, recipe: Recipe, ranks: int) -> None:
    section, steps, epochs = f"trainer.{recipe.name}", options.get("max_steps"), options.get("num_train_epochs", 1)
    if steps is not None and steps > 0:
        options.set(f"{section}.max_steps", steps, "max_steps")
        options.set(f"{section}.max_epochs", EPOCHS, "max_steps")
    elif epochs < 1:
        options.set(f"{section}.limit_train_batches", float(epochs), "num_train_epochs")
    else:
        options.set(f"{section}.max_epochs", math.ceil(epochs), "num_train_epochs")
        if epochs != int(epochs):
            options.notes.append(f"{section}.max_epochs: {epochs} epochs, rounded up; or set {section}.max_steps")


def _schedule(options: Options, recipe: Recipe, ranks: int) -> None:
    prefix, name = "model.optim.sched", options.get("lr_scheduler_type")
    _by_table(options, "lr_scheduler_type", str(name).lower())
    extra = options.get("lr_scheduler_kwargs")
    further = dict(extra) if isinstance(extra, Mapping) else {"": extra} if extra else {}
    lowest = read_value(further.pop("min_lr", options.get("min_lr")))
    share = read_value(further.pop("min_lr_rate", options.get("cosine_min_lr_ratio")))
    if further:
        options.reject("lr_scheduler_kwargs", "of these settings only min_lr and min_lr_rate are translated")
    if not is_finite(lowest):
        lowest = float(f"{(options.get('learning_rate') or 0.0) * share:.12g}") if is_finite(share) else 0.0
    if not str(name).startswith("constant"):
        by = ("min_lr", "lr_scheduler_kwargs", "cosine_min_lr_ratio", "lr_scheduler_type")
        options.set(f"{prefix}.min_lr", lowest, *by)
    steps, ratio = options.get("warmup_steps", 0), options.get("warmup_ratio")
    if not ratio and 0 < steps < 1:
        ratio = steps
    names = ("warmup_steps", "warmup_ratio")
    if ratio and not (options.has("warmup_steps") and steps >= 1):
        options.set(f"{prefix}.warmup_steps", 0, *names)
        options.set(f"{prefix}.warmup_ratio", ratio, *names)
    else:
        options.set(f"{prefix}.warmup_steps", int(steps), *names)
    names = ("adam_beta1", "adam_beta2")
    options.set("model.optim.betas", [options.get(names[0]), options.get(names[1])], *names)
    if options.has("optim"):
        _by_table(options, "optim", str(options.get("optim")), "AdamW with fp32 state is used")


def _adapters(options: Options, recipe: Recipe, ranks: int) -> None:
    tuning, names = "model.peft.lora_tuning", ("tuner", "use_peft")
    settings = options.defaults | options.given
    options.used.update(names)
    if options.get("tuner") not in (None, "lora", "qlora", "full"):
        options.reject("tuner", "only LoRA adapters or all weights are trained")
    if options.get("tuner") == "qlora":
        options.notes.append("qlora: weights are not quantised; LoRA on weights in bf16 is used")
    keys = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear", "layers_to_transform")
    if not trains_adapters(settings):
        for name in keys:
            options.reject(name, "all weights are trained, because no option selects LoRA")
        options.used.update(keys)
        return
    options.set("model.peft.peft_scheme", "lora", *names, *keys)
    rank = options.get("lora_r", 8)
    options.set(f"{tuning}.adapter_dim", rank, "lora_r")
    alpha = options.get("lora_alpha")
    options.set(f"{tuning}.alpha", float(2 * rank if alpha is None else alpha), "lora_alpha", "lora_r")
    options.set(f"{tuning}.adapter_dropout", float(options.get("lora_dropout", 0.0)), "lora_dropout")
    targets = as_list(options.get("lora_target_modules"))
    if options.get("lora_target_linear") or "all" in targets:
        targets = ["all-linear"]
    elif not targets:  # PEFT's for most families
        targets = ["q_proj", "v_proj"] if options.title in ("TRL", "axolotl") else ["all-linear"]
    options.set(f"{tuning}.target_modules", targets, "lora_target_linear", "lora_target_modules")
    layers = as_list(options.get("layers_to_transform"))
    if not all(str(layer).isdecimal() for layer in layers):
        options.reject("layers_to_transform", "its entries must be numbers")
    elif layers:
        options.set(f"{tuning}.layer_selection", [int(layer) + 1 for layer in layers], "layers_to_transform")
    if options.has("adapter_name_or_path"):
        options.set("model.peft.restore_from_path", options.get("adapter_name_or_path"), "adapter_name_or_path")


def _precision(options: Options, recipe: Recipe, ranks: int) -> None:
    names = ("bf16", "fp16", "dtype", "pure_bf16")
    bf16, fp16, dtype, pure = (options.get(name) for name in names)
    if bf16 is None and options.title == "TRL" and options.has(*names) and fp16 is not True:
        bf16 = True  # its default
    if fp16 is True or dtype in ("float16", "fp16"):
        options.notes.append("trainer.precision: fp16 is not supported; bf16 is used, which needs no loss scaling")
        options.set("trainer.precision", "bf16", *names)
    elif bf16 is True or pure is True or dtype in ("bfloat16", "bf16"):
        options.set("trainer.precision", "bf16", *names)
    elif bf16 is False or dtype == "float32":
        options.set("trainer.precision", "32", *names)


def _intervals(options: Options, recipe: Recipe, ranks: int) -> None:
    section, epochs = f"trainer.{recipe.name}", max(1, math.ceil(options.get("num_train_epochs", 1)))
    for kind, key in (("eval", f"{section}.val_check_interval"), ("save", f"{section}.save_interval")):
        names = (f"{kind}_strategy", f"{kind}_steps", f"{kind}s_per_epoch")
        strategy, steps, per_epoch = (options.get(name) for name in names)
        if kind == "eval" and steps is not None and not options.has("eval_strategy"):
            strategy = "steps"
        if per_epoch:
            options.set(key, 1.0 / per_epoch, *names)
        elif strategy == "epoch":
            options.set(key, 1.0, *names)
        elif strategy in ("no", False):
            options.set(key, 0, *names)
        elif steps is not None:
            options.set(key, min(1.0, steps * epochs) if isinstance(steps, float) and steps < 1 else int(steps), *names)
    if options.has("logging_steps"):
        options.set(f"{section}.log_every_n_steps", max(1, int(options.get("logging_steps"))), "logging_steps")
    if options.has("save_total_limit"):
        kept = max(0, options.get("save_total_limit") - 1)
        options.set("exp_manager.checkpoint_callback_params.save_top_k", kept, "save_total_limit")
    if options.has("early_stopping_patience"):
        options.set("exp_manager.create_early_stopping_callback", True, "early_stopping_patience")
        key = "exp_manager.early_stopping_callback_params.patience"
        options.set(key, options.get("early_stopping_patience"), "early_stopping_patience")
    if options.has("metric_for_best_model"):
        named = str(options.get("metric_for_best_model")).removeprefix("eval_")
        ours = table()["metrics"].get(named, named)
        options.set("exp_manager.checkpoint_callback_params.monitor", f"val_{ours}", "metric_for_best_model")
        mode = "max" if options.get("greater_is_better", named != "loss") else "min"
        options.set("exp_manager.checkpoint_callback_params.mode", mode, "metric_for_best_model")


def _logging(options: Options, recipe: Recipe, ranks: int) -> None:
    named = options.get("report_to")
    for logger in as_list(named):
        _by_table(options, "report_to", str(logger), "TensorBoard, Weights & Biases and MLflow are available")
    if options.has("wandb_project", "wandb_entity") and options.title == "axolotl":
        options.set("exp_manager.create_wandb_logger", True, "wandb_project", "wandb_entity")
    if options.has("ddp_timeout"):
        minutes = min(525_600, max(1, math.ceil(options.get("ddp_timeout") / 60)))
        options.set("trainer.timeout_minutes", minutes, "ddp_timeout")
    if options.has("max_shard_size"):
        size = str(options.get("max_shard_size")).upper().removesuffix("GB")
        options.set("export.max_shard_size_gb", read_value(size), "max_shard_size")


def _by_table(options: Options, name: str, value: str, reason: str = "this value is not supported") -> None:
    """Set the keys that translation.yaml has for a value."""
    if (overrides := table()["values"][name].get(value)) is not None:
        set_texts(options, overrides, name)
    else:
        options.reject(name, reason)


def _same_values(options: Options, recipe: Recipe) -> None:
    """Translate the options that need no other: those with the same value, and those with a table of values."""
    ours = names(config_type(recipe))
    for name, key in table()["keys"].items():
        target, value = key.replace("NAME", recipe.name), options.get(name)
        if value is None:
            continue
        if target not in ours:
            options.reject(name, f"`nemo-kto {recipe.name}` has no such option")
        else:
            options.set(target, value, name)
    for name, values in table()["values"].items():
        if name in ("lr_scheduler_type", "loss_type", "report_to", "optim"):
            continue
        value = options.get(name)
        if isinstance(value, str | bool) and (overrides := values.get(value)) is not None:
            set_texts(options, overrides, name)
        else:
            options.reject(name, "this value is not supported")
    if options.get("truncation_mode") in ("delete", "drop", "raise"):
        options.notes.append(f"model.data.seq_length: longer rows, which {options.title} does not use, are truncated")
    if options.get("max_length") is None:
        options.notes.append(f"model.data.seq_length: the limit of the model in {options.title}, here at most 2048 tokens")
