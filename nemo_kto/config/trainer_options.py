"""Options of another trainer, read as numbers, truth values and lists, and what they were translated to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from nemo_kto.config import migration
from nemo_kto.config.check import override_value
from nemo_kto.utils.files import load_yaml

_NUMBERS = frozenset(
    "learning_rate beta weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm warmup_steps warmup_ratio max_steps "
    "num_train_epochs per_device_train_batch_size gradient_accumulation_steps global_batch_size micro_batch_size max_length "
    "lora_r lora_alpha lora_dropout validation_fraction eval_steps save_steps evals_per_epoch saves_per_epoch logging_steps "
    "save_total_limit early_stopping_patience ddp_timeout nproc_per_node nnodes rpo_alpha sft_weight cosine_min_lr_ratio "
    "min_lr cpo_alpha alpha ld_alpha f_alpha_divergence_coef label_smoothing "
    "tensor_parallel_size tensor_model_parallel_size context_parallel_size pipeline_model_parallel_size".split()
)


def is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def as_list(value: object) -> list[Any]:
    """Return the entries of a list, or of a text in which spaces or commas separate them."""
    if isinstance(value, str):
        return value.replace(",", " ").split()
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def table() -> dict[str, Any]:
    """Return the content of translation.yaml."""
    return migration.read_table("translation")


def read_value(value: object) -> object:
    """Return an option's value with numbers, truth values and lists read from text, as YAML 1.1 does not read 1e-5."""
    if not isinstance(value, str):
        return value
    if value.strip()[:1] in ("[", "{"):
        try:
            return load_yaml(value)
        except ValueError:
            return value.strip()
    if (word := value.strip().lower()) in ("true", "yes", "on", "false", "off", "null", ""):
        return {"false": False, "off": False, "null": None, "": None}.get(word, True)
    for number in (int, float):
        try:
            return number(value)
        except ValueError:
            continue
    return value.strip()


def trains_adapters(options: Mapping[str, object]) -> bool:
    return options.get("tuner") in ("lora", "qlora") or options.get("use_peft") is True


@dataclass(kw_only=True)
class Options:
    """Options of a trainer in TRL's names, and what they were translated to."""

    title: str
    given: dict[str, object]
    defaults: dict[str, object]
    original: dict[str, str]  # TRL's name -> the trainer's name
    folder: Path
    used: set[str] = field(default_factory=set)
    overrides: dict[str, tuple[object, str]] = field(default_factory=dict)  # key -> value, and the option that set it
    without: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, given: Mapping[str, object], *, trainer: str, folder: Path) -> Options:
        entry = table()["trainers"][trainer]
        found = cls(title=entry["title"], given={}, defaults={}, original={}, folder=folder)
        values, original = found.given, found.original
        for theirs, value in given.items():
            name = entry["names"].get(theirs, theirs)
            if value is not None and values.get(name) is not None:
                found.without[f"{theirs}={override_value(value)}"] = (
                    f"{original[name]} is the same option and is used instead"
                )
            else:
                values[name], original[name] = read_value(value), theirs
        kind = "lora" if trains_adapters(entry["defaults"] | values) else "full"
        found.defaults |= entry["defaults"] | entry.get(kind, {})
        for name, value in list(values.items()):
            if name in _NUMBERS and value is not None and not is_finite(value):
                found.reject(name, "it must be a number")
                del values[name]
        return found

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an option or its default, and note that it was used."""
        self.used.add(name)
        value = self.given.get(name)
        return self.defaults.get(name, default) if value is None else value

    def has(self, *names: str) -> bool:
        return any(self.given.get(name) is not None for name in names)

    def set(self, key: str, value: object, *names: str) -> None:
        """Set one of our keys to a value that follows from the options ``names``, or from a default if none is given."""
        by = next((name for name in names if self.has(name)), "")
        earlier, earlier_by = self.overrides.get(key, (value, ""))
        if earlier_by and by and earlier != value:
            self.reject(earlier_by, f"{key} has one value, and {self.shown(by)} is used")
        if by or not earlier_by:
            self.overrides[key] = value, by

    def shown(self, name: str) -> str:
        return f"{self.original.get(name, name)}={override_value(self.given[name])}"

    def reject(self, name: str, reason: str) -> None:
        if self.has(name):
            self.without.setdefault(self.shown(name), reason)


def set_texts(options: Options, overrides: Sequence[str], name: str) -> None:
    for text in overrides:
        key, _, value = text.partition("=")
        options.set(key, value if key == "hardware" else read_value(value), name)
