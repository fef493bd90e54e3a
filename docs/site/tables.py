"""Tables of the documentation: keys, names of other trainers, defaults, models and recipes."""

from __future__ import annotations

import itertools
import re

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.architecture.config_fields import QUANTIZED
from nemo_kto.architecture.config_file import LACKING
from nemo_kto.architecture.families import FAMILIES, MULTIMODAL
from nemo_kto.architecture.lora import NEMO_TARGETS, has_adaptable_experts, linear_modules
from nemo_kto.config import migration
from nemo_kto.config.compose import config_folder
from nemo_kto.config.keys import Key, all_keys
from nemo_kto.config.learning_rates import DEFAULT_LR
from nemo_kto.config.schema import config_type
from nemo_kto.tools.translate import translation
from nemo_kto.utils.fields import MayChange, MustStay, echo, names
from nemo_kto.utils.files import load_yaml
from nemo_kto.utils.text import markdown_table


def key_tables() -> str:
    """Return the tables of reference/configuration.md: the keys common to all algorithms, then those specific to each."""
    keys = {recipe.name: all_keys(recipe) for recipe in RECIPES.values()}
    first, *others = ([_general(key, name) for key in own] for name, own in keys.items())
    shared = [key for key in first if all(key in other for other in others)]
    sections = list(dict.fromkeys(key.name.split(".")[0] for key in shared))
    groups = [(name, [key for key in shared if key.name.split(".")[0] == name]) for name in sections]
    groups += [
        (f"Only `nemo-kto {name}`", [key for key in own if _general(key, name) not in shared]) for name, own in keys.items()
    ]
    tables = []
    for title, group in groups:
        rows = ((f"`{key.name}`", f"{_sentence(key.comment)}<br>{_default(key)}") for key in group)
        tables.append(f"## {title}\n\n{markdown_table(('key', 'meaning'), rows)}")
    return "\n\n".join(tables)


def _general(key: Key, algorithm: str) -> Key:
    """Return a key with NAME for the section of its algorithm, so that equal keys of two algorithms are equal."""
    return key._replace(name=re.sub(rf"^(trainer|model)\.{algorithm}\.", r"\1.NAME.", key.name))


# Kinds of values that the default and the comment of a key show, and words of a constraint that add nothing to them.
_PLAIN = ("true or false", "an integer", "a float", "a string", "a mapping", "a list of strings")
_FILLERS = {"a", "or", "not", "empty", "null"}


def _default(key: Key) -> str:
    """Return the default of a key, with its type and constraint unless the comment has all their words."""
    kind, _, constraint = key.type.partition(", ")
    text = constraint if kind.removesuffix(" or null") in _PLAIN else key.type
    words, known = (set(re.findall(r"[\w-]+", each)) for each in (text, key.comment))
    return f"Default `{key.default}`" + (f"; {text}" if words - known - _FILLERS else "")


def _sentence(comment: str) -> str:
    text = comment.replace("|", r"\|")
    return text if text.endswith(".") else f"{text}."


def resume_tables() -> str:
    """Return the tables of guides/checkpoints.md: keys that must stay in a resumed run, and keys that may change."""
    groups: dict[type, dict[str, list[str]]] = {MustStay: {}, MayChange: {}}  # meaning -> names of keys and sections
    for recipe in RECIPES.values():
        for key, field in names(config_type(recipe)).items():
            if field.resume is not None and field.resume in field.metadata:
                name = re.sub(rf"^(trainer|model)\.{recipe.name}\b", r"\1.NAME", key)
                name += "" if field.section is None else ".*"
                group = groups[type(field.resume)].setdefault(field.resume.meaning, [])
                group += [] if f"`{name}`" in group else [f"`{name}`"]
    must, may = ([(", ".join(group), meaning) for meaning, group in each.items()] for each in groups.values())
    stays, changes = (("must stay", "what is compared"), must), (("may change", "in a resumed run"), may)
    return "\n\n".join(markdown_table(*each) for each in (stays, changes))


def alias_table() -> str:
    """Return the table of docs/start/from-trl.md with the names that other trainers use."""
    aliases = itertools.chain(migration.aliases().items(), *(recipe.aliases.items() for recipe in RECIPES.values()))
    names: dict[str, list[str]] = {}  # our key with its hint, or the reason for none -> names of others
    for alias, target in aliases:
        key, _, hint = target.partition(" ")
        names.setdefault(f"`{key}` {hint}".rstrip(), []).append(f"`{alias}`")
    for name, why in migration.without().items():
        names.setdefault(f"none: {why}", []).append(f"`{name}`")
    rows = [(", ".join(others), ours) for ours, others in names.items()]
    return markdown_table(("name", "our key"), rows)


def aligner_table() -> str:
    """Return the table of docs/start/from-nemo-aligner.md with the keys that only NeMo-Aligner has."""
    rows = []
    for entry in migration.aligner_keys().values():
        silent = [f"`{echo(value)}`" for value in entry.agrees] + ([f"that of `{entry.same_as}`"] if entry.same_as else [])
        rows.append((f"`{entry.key}`", ", ".join(silent) or "none", "one line" if entry.ignored else "error", entry.why))
    return markdown_table(("key", "silently accepted", "other values", "why"), rows)


# Defaults compared in docs/start/from-trl.md -> TRL's names, our keys.
_COMPARED = {
    "learning rate": ("learning_rate", "model.optim.lr"),
    "beta": ("beta", "model.kto.ref_policy_kl_penalty"),
    "weight decay": ("weight_decay", "model.optim.weight_decay"),
    "betas": ("adam_beta1 adam_beta2", "model.optim.betas"),
    "epsilon": ("adam_epsilon", "model.optim.eps"),
    "maximum gradient norm": ("max_grad_norm", "trainer.kto.gradient_clip_val"),
    "schedule": ("lr_scheduler_type", "model.optim.sched.name"),
    "warm-up": ("warmup_steps warmup_ratio", "model.optim.sched.warmup_steps"),
    "epochs": ("num_train_epochs", "trainer.kto.max_epochs"),
    "batch": ("per_device_train_batch_size global_batch_size", "model.global_batch_size"),
    "length": ("max_length", "model.data.seq_length"),
    "adapters": ("tuner", "model.peft.peft_scheme"),
    "rank": ("lora_r", "model.peft.lora_tuning.adapter_dim"),
    "alpha": ("lora_alpha", "model.peft.lora_tuning.alpha"),
    "dropout": ("lora_dropout", "model.peft.lora_tuning.adapter_dropout"),
}


def default_table() -> str:
    """Return the table of docs/start/from-trl.md with the defaults of other trainers."""
    ours, trainers = {key.name: key for key in all_keys(RECIPES["kto"])}, translation.table()["trainers"].values()
    rows = []
    for title, (options, key) in _COMPARED.items():
        default = "{none:g}, adapters {lora:g}".format(**DEFAULT_LR) if title == "learning rate" else ours[key].default
        row = [title, f"`{default}`"]
        for trainer in trainers:
            both = [trainer.get(kind, {}).get(options) for kind in ("full", "lora")]
            found = [trainer["defaults"][name] for name in options.split() if trainer["defaults"].get(name) is not None]
            row.append(f"{both[0]:g}, adapters {both[1]:g}" if both[0] else ", ".join(map(str, found)) or "none")
        rows.append(row)
    return markdown_table(("", "ours", *(trainer["title"] for trainer in trainers)), rows)


def family_table() -> str:
    """Return the table of docs/reference/supported.md with the model families, by the names of published models."""
    rows = []
    for family in (*FAMILIES.values(), *MULTIMODAL):
        notes, modules = ["experts"] if family.experts is not None else [], linear_modules(family)
        notes += [f"trained: text model `{family.text_type}`"] if family.text_type else []
        notes += [f"copied: {', '.join(family.untrained)}"] if family.untrained else []
        notes += ["code in its folder: copied, never run"] if family.config_type else []
        usual = NEMO_TARGETS["all"]
        if not set(usual).issubset(modules):
            notes.append(f"adapters: {', '.join(f'`{module}`' for module in modules)}")
        elif others := [f"`{module}`" for module in modules if module not in usual]:
            notes.append(f"adapters also on {', '.join(others)}")
        elif family.experts is not None and not has_adaptable_experts(family):
            notes.append("no adapters on experts")
        kind = f"`{family.name}`, `{family.hf_architecture}`"
        rows.append((family.published, kind, "; ".join(notes)))
    return markdown_table(("models", "`model_type`, class", ""), sorted(rows, key=lambda row: row[0].casefold()))


def quantized_table() -> str:
    """Return the table of docs/reference/supported.md with the formats of quantized weights."""
    return markdown_table(("`quant_method`", "read"), [(f"`{name}`", formats) for name, formats in QUANTIZED.items()])


def lacking_table() -> str:
    """Return the table of docs/reference/supported.md with the parts of models that this program lacks."""
    fields = {why: [field for field in LACKING if LACKING[field] == why] for why in LACKING.values()}
    shown = ((why, ", ".join(f"`{field}{'*' * field.endswith('_')}`" for field in names)) for why, names in fields.items())
    return markdown_table(("a model with", "by fields of `config.json`"), shown)


def metric_table() -> str:
    """Return the table of docs/start/from-trl.md with the names of metrics."""
    metrics = translation.table()["metrics"].items()
    return markdown_table(("TRL and trainers that use it", "ours"), [(f"`{name}`", f"`{ours}`") for name, ours in metrics])


def recipe_table() -> str:
    """Return the table of docs/scale/recipes.md with the files of conf/recipe that name a model."""
    rows, end = [], "_model_parallel_size"
    for file in sorted((config_folder() / "recipe").iterdir(), key=lambda file: file.name):
        if file.name == "auto.yaml":
            continue
        text = file.read_text(encoding="utf-8")
        model, title = load_yaml(text)["model"], text.splitlines()[1].removeprefix("# ")
        sizes = [f"{size} {key.removesuffix(end).replace('_', ' ')}" for key, size in model.items() if key.endswith(end)]
        batch, rate = model["global_batch_size"], model["optim"]["lr"]
        name, layout = file.name.removesuffix(".yaml"), ", ".join(sizes) or "one rank"
        rows.append((f"`{name}`", title, layout, str(batch), str(rate)))
    return markdown_table(("recipe", "for", "layout", "batch", "learning rate"), rows)


TABLES = {
    "keys": key_tables,
    "resumed runs": resume_tables,
    "NeMo-Aligner": aligner_table,
    "other names": alias_table,
    "defaults": default_table,
    "metrics": metric_table,
    "families": family_table,
    "quantized": quantized_table,
    "lacking": lacking_table,
    "recipes": recipe_table,
}
_TABLE = re.compile(r"(<!-- generated: ([\w -]+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return a page of docs/ with its generated tables as the files and types are now."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}", page)
