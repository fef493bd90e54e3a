"""The model card of an export: README.md, with the front matter that the Hugging Face hub reads.

Everything in it is read from the checkpoint that is exported and from the run folder that the checkpoint is in. A card names
files and folders without their paths, which may contain names of users.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers
import yaml

from nemo_kto import __version__
from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.config.saved_config import CONFIG_FILE, read_saved
from nemo_kto.data.rows.data_sources import validation_names
from nemo_kto.errors import UserError, plural
from nemo_kto.losses.loss import Loss
from nemo_kto.losses.metrics import metric_prefix
from nemo_kto.model_files.adapter_files import ADAPTER_CONFIG
from nemo_kto.model_files.companion_files import CARD, auto_class
from nemo_kto.model_files.hub import HUB, hub_name
from nemo_kto.model_files.tokenizer_files import has_chat_template
from nemo_kto.records.run_record import read_data, recorded_interval
from nemo_kto.telemetry.loggers import METRICS_FILE
from nemo_kto.utils.files import load_yaml, read_bytes, read_json
from nemo_kto.utils.intervals import has_enough_rows
from nemo_kto.utils.text import markdown_code, markdown_table, markdown_text, mixture_name, value_text

logger = logging.getLogger(__name__)

PICTURE = "card.png"
# In the card until they have names on the hub.
THIS_MODEL, BASE_MODEL = "path/to/this/folder", "path/to/the/base/model"
_CHAT = "nemo-kto chat "
_MAX_CARD_BYTES = 2**22
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_INHERITED = ("license", "license_name", "license_link", "language")  # of the base model's card
_FIGURES = {
    "loss": "loss", "auc": "AUC", "acc": "accuracy", "rewards_margin": "reward margin",
    "rewards_chosen_mean": "reward of the better answers", "rewards_rejected_mean": "reward of the worse answers",
    "rows": "rows",
}  # fmt: skip
_SETTINGS = (
    "model.optim.lr", "model.optim.sched.name", "model.optim.sched.min_lr", "model.optim.weight_decay", "model.optim.betas",
    "model.global_batch_size", "model.data.seq_length", "model.seed", "trainer.precision",
)  # fmt: skip
_EXAMPLE = """\
{imports}

model = {model}
tokenizer = AutoTokenizer.from_pretrained("{tokenizer}")
{inputs}
output = model.generate(**inputs, max_new_tokens=256)
print(tokenizer.decode(output[0]))
"""
_TEXT_INPUTS = 'inputs = tokenizer("Once upon a time", return_tensors="pt")'
_CHAT_INPUTS = """\
messages = [{"role": "user", "content": "Hello"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)"""


@dataclass(frozen=True, kw_only=True)
class CardSources:
    """Sources of a model card."""

    info: Mapping[str, Any]  # content of the checkpoint's trainer.json; empty if the run has no checkpoint
    run: Path | None  # the run folder; None if the checkpoint is not in one
    original: Path  # the Hugging Face folder of the original model, or a checkpoint's copy of its small files
    adapters: bool  # whether the export holds only adapters
    refusal: str | None = None  # why peft does not load the adapters of the model; None if it does

    @cached_property
    def config(self) -> dict[str, Any]:
        """Value of each key, empty if the run folder has none."""
        return {} if self.run is None else read_saved(self.run / CONFIG_FILE)

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """Values and content hashes of the run, as its checkpoints record them."""
        found: Mapping[str, Any] = self.info.get("run", {})
        return found

    @property
    def algorithm(self) -> str | None:
        """Name of the algorithm, None if it is unknown."""
        name = self.facts.get("algorithm", self.config.get("algorithm"))
        return name if isinstance(name, str) and name in RECIPES else None

    @cached_property
    def loss(self) -> str | None:
        """Name of the loss, None if it is unknown; it may be the user's, or any text in a checkpoint of someone else."""
        key = f"model.{self.algorithm}.preference_loss"
        mixed, name = (self.facts.get(each, self.config.get(each)) for each in (f"{key}es", key))
        return mixture_name(mixed) if isinstance(mixed, Mapping) else None if name is None else str(name)

    @property
    def built_in_loss(self) -> Loss | None:
        """The loss, if it is built in: nothing that a checkpoint names is imported."""
        return None if self.algorithm is None else RECIPES[self.algorithm].losses.get(str(self.loss))

    @cached_property
    def base(self) -> tuple[str | None, str]:
        """Repository of the base model on the hub and its commit, or None and the name of its folder."""
        key = "pretrained_checkpoint.restore_from_path"
        recorded = self.facts.get(key)
        origin = str(recorded["from"]) if isinstance(recorded, Mapping) else ""
        for name in (str(self.config.get(key, "")), origin, str(self.original)):
            if (found := hub_name(name)) is not None:
                return found
        return None, Path(str(self.config.get(key) or origin)).name


def write_card(folder: Path, sources: CardSources) -> None:
    """Write README.md into an export that is otherwise complete, and a picture of the run's curves.

    There is no picture without metrics, or with export.report=false. A card that cannot be made is left out with a warning:
    it must not prevent the export.
    """
    has_picture = False
    wanted = sources.config.get("export.report", True)
    if wanted and sources.run is not None and (sources.run / METRICS_FILE).is_file():
        try:
            from nemo_kto.records.plots import summary_picture
            from nemo_kto.records.run_record import read_run

            summary_picture(read_run(sources.run), folder / PICTURE)
            has_picture = True
        except Exception as error:  # a card without a picture is better than no export
            (folder / PICTURE).unlink(missing_ok=True)
            logger.warning("the model card has no picture: %s: %s", type(error).__name__, error)
    try:
        text = card_text(sources, has_picture=has_picture)
    except Exception as error:  # such as a damaged config.yaml
        logger.warning("the export has no model card: %s: %s", type(error).__name__, error)
    else:
        (folder / CARD).write_text(text, encoding="utf-8")


def card_text(sources: CardSources, *, has_picture: bool) -> str:
    """Return the model card of an export."""
    front = yaml.safe_dump(_front_matter(sources), sort_keys=False, allow_unicode=True)
    parts = [
        _introduction(sources),
        _figures(sources, has_picture=has_picture),
        _training(sources),
        _use(sources),
        _versions(sources),
    ]
    return "\n\n".join([f"---\n{front}---", *filter(None, parts)]) + "\n"


def read_front_matter(file: Path) -> dict[str, Any]:
    """Return the front matter of a model card; empty if there is no file, or no valid front matter in it."""
    try:
        found = _FRONT_MATTER.match(read_bytes(file, limit=_MAX_CARD_BYTES).decode("utf-8"))
        values = load_yaml(found[1]) if found else {}
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _is_plain(value: object) -> bool:
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(text, str) and text for text in texts)


def _front_matter(sources: CardSources) -> dict[str, object]:
    original = read_front_matter(sources.original / CARD)
    values: dict[str, object] = {key: original[key] for key in _INHERITED if _is_plain(original.get(key))}
    repository, _ = sources.base
    if repository is not None:
        values |= {"base_model": repository, "base_model_relation": "adapter" if sources.adapters else "finetune"}
    values |= {"library_name": "peft" if sources.adapters else "transformers", "pipeline_tag": "text-generation"}
    is_lora = sources.facts.get("model.peft.peft_scheme", "none") != "none"
    built_in = None if sources.built_in_loss is None else sources.loss
    tags = ("nemo-kto", "alignment", sources.algorithm, built_in, "lora" if is_lora else None)
    values["tags"] = list(dict.fromkeys(filter(None, tags)))
    if sets := [name for name in _data_names(sources.config.get("model.data.data_prefix")) if name.startswith(HUB)]:
        values["datasets"] = list(dict.fromkeys(re.split("[@:]", name.removeprefix(HUB))[0] for name in sets))
    return values


def _introduction(sources: CardSources) -> str:
    repository, detail = sources.base
    link = f"[{repository}](https://huggingface.co/{repository}) (commit `{detail}`)"
    base = link if repository else markdown_code(detail)
    title = f"# {markdown_text(detail if repository is None else repository.partition('/')[2])}"
    if sources.algorithm is None:
        return f"{title}, aligned\n\nExported from a checkpoint of nemo-kto that does not record its training."
    recipe = RECIPES[sources.algorithm]
    product = f"LoRA adapters for {base}, trained" if sources.adapters else f"This model is {base}, trained"
    text = f"{product} on human feedback with the loss {markdown_code(str(sources.loss))} of `nemo-kto {recipe.name}`."
    return f"{title}, aligned with {recipe.name.upper()}\n\n{text}"


def _figures(sources: CardSources, *, has_picture: bool) -> str:
    metrics: Mapping[str, float | None] = sources.info.get("metrics", {})
    sets = validation_names(sources.config.get("model.data.data_prefix"))
    columns = {markdown_text(name) or "validation": f"val_{metric_prefix(name)}" for name in sets}
    columns = {
        title: start
        for title, start in columns.items()
        if f"{start}loss" in metrics and has_enough_rows(metrics.get(f"{start}rows"))
    }
    columns = columns or ({"training": "train_"} if "train_loss" in metrics else {})
    data = {} if sources.run is None else read_data(sources.run)

    def cell(start: str, metric: str) -> str:
        value, name = metrics.get(f"{start}{metric}"), start.removeprefix("val_").removesuffix("_")
        text = _number(value, is_count=metric == "rows")
        interval = recorded_interval(data, name, auc=value, rows=metrics.get(f"{start}rows")) if metric == "auc" else None
        return text if interval is None else f"{text} (95 %: {interval[0]:.2f} to {interval[1]:.2f})"

    rows = [
        [label, *(cell(start, metric) for start in columns.values())]
        for metric, label in _FIGURES.items()
        if any(metrics.get(f"{start}{metric}") is not None for start in columns.values())
    ]
    text = "## Results\n\n" + markdown_table(["", *columns], rows) if rows else ""
    if rows:
        kind = "the last batch of training" if list(columns) == ["training"] else "rows that were not trained on"
        text += f"\n\nMeasured on {kind}, at step {sources.info['trainer']['step']:,}."
    return "\n\n".join(filter(None, [text, f"![Curves of the run]({PICTURE})" if has_picture else ""]))


def _training(sources: CardSources) -> str:
    if sources.algorithm is None or sources.loss is None:
        return ""
    trainer = sources.info.get("trainer", {})
    values = {**{key: sources.config.get(key) for key in _SETTINGS}, **sources.facts}
    own = [f"model.{sources.algorithm}.", "model.peft."]
    shown = [key for key in values if key in _SETTINGS or key.startswith(tuple(own))]
    rows = [
        [markdown_code(key), markdown_code(value_text(values[key]))]
        for key in shown
        if isinstance(values[key], str | int | float | list)
    ]
    steps = ""
    if trainer.get("step"):
        epochs = trainer["step"] / trainer["steps_per_epoch"] if trainer.get("steps_per_epoch") else None
        count = "" if epochs is None else f" ({epochs:.3g} {'epoch' if epochs == 1 else 'epochs'})"
        steps = f"{plural(trainer['step'], 'step')}{count}, {trainer.get('consumed_samples', 0):,} examples."
    settings = markdown_table(["setting", "value"], rows) if rows else ""
    parts = ["## Training", steps, _loss_text(sources), settings, _data(sources)]
    return "\n\n".join(filter(None, parts))


def _loss_text(sources: CardSources) -> str:
    """Return the description of a built-in loss, its formula and its paper, from the docstring of its function."""
    if (loss := sources.built_in_loss) is None:
        return f"The loss is {markdown_code(str(sources.loss))}."
    paragraphs = (inspect.getdoc(loss.function) or "").split("Examples:")[0].strip().split("\n\n")
    formula = next((number for number, text in enumerate(paragraphs) if text.startswith("    ")), 1)
    text = "\n\n".join(paragraphs[: formula + 1])
    text = re.sub(r"^Return the ", "The loss is the ", text)
    text = re.sub(r"\barXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    module = (sys.modules[loss.function.__module__].__doc__ or "").split("\n\n")
    notation = next((part for part in module if part.startswith("Notation. ")), "")
    return "\n\n".join(filter(None, [text, notation.removeprefix("Notation. ")]))


def _data(sources: CardSources) -> str:
    prefix = sources.config.get("model.data.data_prefix")
    if isinstance(prefix, Mapping):
        named = {str(split): ", ".join(map(markdown_code, _data_names(part))) for split, part in prefix.items()}
    else:
        named = {"train": ", ".join(map(markdown_code, _data_names(prefix)))}
    facts = {"train": "model.data.data_prefix", "validation": "validation rows"}
    rows = []
    for split, key in facts.items():
        content = sources.facts.get(key)
        if isinstance(content, Mapping):
            texts = markdown_text(content["from"]), markdown_code(content["sha256"])
            rows.append([split, named.get(split, named.get("train", "")), *texts])
    if not rows:
        return ""
    return "\n\n".join(["### Data", markdown_table(["", "source", "examples", "SHA-256 of tokens, labels and order"], rows)])


def _data_names(prefix: object) -> Iterator[str]:
    """Yield the names of files and data sets in a data_prefix: names on the hub as they are, others without their path."""
    if isinstance(prefix, str):
        path = prefix.partition("?")[0].partition("#")[0]
        yield path if path.startswith(HUB) else Path(path.rstrip("/")).name
    elif isinstance(prefix, Mapping):
        for part in prefix.values():
            yield from _data_names(part)
    elif isinstance(prefix, Sequence):
        for part in prefix:
            yield from _data_names(part)


def _use(sources: CardSources) -> str:
    kind, tokenizer = auto_class(sources.original), THIS_MODEL
    imports, model = f"from transformers import {kind}, AutoTokenizer", f'{kind}.from_pretrained("{THIS_MODEL}")'
    if sources.adapters and sources.refusal:
        return f"## Use\n\n{sources.refusal}: load the merged model."
    if sources.adapters:
        tokenizer = sources.base[0] or BASE_MODEL
        if kind == "AutoModelForCausalLM":
            imports = "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer"
            model = f'AutoPeftModelForCausalLM.from_pretrained("{THIS_MODEL}")'
        else:  # which has no class of peft's own
            imports = f"from peft import PeftModel\n{imports}"
            model = f'PeftModel.from_pretrained({kind}.from_pretrained("{tokenizer}"), "{THIS_MODEL}")'
    inputs, note = _TEXT_INPUTS, "The tokenizer has no chat template: prompts are completed as they are."
    if has_chat_template(sources.original):
        inputs = _CHAT_INPUTS
        note = "Prompts must be rendered with the tokenizer's chat template, as the conversations were in training."
    code = _EXAMPLE.format(imports=imports, model=model, tokenizer=tokenizer, inputs=inputs)
    return f"## Use\n\n```python\n{code}```\n\n```sh\n{_CHAT}{THIS_MODEL}\n```\n\n{note}"


def _versions(sources: CardSources) -> str:
    versions = {"nemo-kto": __version__, "transformers": transformers.__version__, **sources.info.get("versions", {})}
    text = ", ".join(markdown_text(f"{name} {version}") for name, version in versions.items())
    layout = sources.info.get("layout", {})
    ranks = f" Trained on {plural(layout['world'], 'rank')}." if layout.get("world") else ""
    return f"## Versions\n\n{text}.{ranks}"


def _number(value: float | None, *, is_count: bool) -> str:
    return "" if value is None else f"{value:,.0f}" if is_count else f"{value:.4f}"


def published_files(folder: Path, *, repository: str, base_model: str | None) -> dict[str, bytes]:
    """Return the files of an export that differ on the hub: name -> content.

    The model card names the ``repository``, and the configuration of adapters the repository of their base model, which is
    ``base_model`` if the adapters were trained on a folder. Raises UserError if the name of the base model is needed.
    """
    text = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""
    if not text:
        remedy = f"write it again with nemo-kto export RUN {folder}"
        raise UserError(f"{folder} must have a model card ({CARD}), got none; {remedy}")
    front = read_front_matter(folder / CARD)
    base = base_model or front.get("base_model")
    if base_model is not None:
        is_adapter = (folder / ADAPTER_CONFIG).is_file()
        front |= {"base_model": base_model, "base_model_relation": "adapter" if is_adapter else "finetune"}
        body = _FRONT_MATTER.sub("", text, count=1)
        text = f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n{body}"
    text = text.replace(_CHAT + THIS_MODEL, f"{_CHAT}{HUB}{repository}")
    files = {CARD: text.replace(THIS_MODEL, repository).replace(BASE_MODEL, str(base or BASE_MODEL)).encode()}
    if (folder / ADAPTER_CONFIG).is_file():
        if not isinstance(base, str):
            missing = "--base-model must name the base model of adapters that were trained on a folder, got none"
            raise UserError(f"{missing}; e.g. --base-model ORGANISATION/NAME")
        config = {**read_json(folder / ADAPTER_CONFIG), "base_model_name_or_path": base}
        files[ADAPTER_CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    return files
