"""Options of another trainer, read as numbers, truth values and lists, and what they were translated to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from nemo_kto.config import migration
from nemo_kto.config.checker import override_value
from nemo_kto.errors import printable
from nemo_kto.utils.files import load_yaml

_QUANTISED = "quantization_config"  # option with the arguments of BitsAndBytesConfig
_MAX_DEPTH = 20  # of the lists and mappings in a value
_COUNTS = frozenset(  # which must be above 0
    "per_device_train_batch_size gradient_accumulation_steps global_batch_size micro_batch_size nproc_per_node nnodes "
    "num_train_epochs tensor_parallel_size tensor_model_parallel_size context_parallel_size pipeline_model_parallel_size "
    "eval_steps save_steps logging_steps ref_model_sync_steps lora_r".split()
)
_NUMBERS = _COUNTS | frozenset(
    "learning_rate beta weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm warmup_steps warmup_ratio max_steps "
    "max_length lora_alpha lora_dropout validation_fraction save_total_limit ddp_timeout rpo_alpha min_lr cpo_alpha alpha "
    "ld_alpha f_alpha_divergence_coef label_smoothing ref_model_mixup_alpha router_aux_loss_coef".split()
)


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether a value is a number, below 2^63, so that all its forms can be written."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -(2**63) < value < 2**63


def too_large(value: object, depth: int = 0) -> str | None:
    """Return the constraint that a value, or one of its parts, violates; None for a value of ordinary size."""
    if isinstance(value, int | float) and abs(value) >= 2**63:
        return "numbers below 2^63"
    if depth > _MAX_DEPTH:
        return f"lists and mappings within at most {_MAX_DEPTH} others"
    parts = [*value, *value.values()] if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else []
    return next((wrong for part in parts if (wrong := too_large(part, depth + 1)) is not None), None)


def as_list(value: object) -> list[Any]:
    """Return the entries of a list, or of a text in which spaces or commas separate them."""
    if isinstance(value, str):
        return value.replace(",", " ").split()
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def texts(value: object) -> list[str]:
    """Return the entries of a list, or a single value, as text."""
    return [str(each) for each in (value if isinstance(value, list | tuple) else [] if value is None else [value])]


def table() -> dict[str, Any]:
    """Return the content of translation.yaml."""
    return migration.read_table("translation", __package__)


def read_value(value: object) -> object:
    """Return an option's value with numbers, truth values and lists read from text, as YAML 1.1 does not read 1e-5."""
    if not isinstance(value, str):
        return value
    if value.strip()[:1] in ("[", "{"):
        try:
            found = load_yaml(value)
        except ValueError:
            return value.strip()
        return found if too_large(found) is None else value.strip()
    if (word := value.strip().lower()) in ("true", "yes", "on", "false", "off", "null", ""):
        return {"false": False, "off": False, "null": None, "": None}.get(word, True)
    for number in (int, float) if len(value) < 40 else ():
        try:
            return number(value)
        except ValueError:
            continue
    return value.strip()


def trains_adapters(options: Mapping[str, object]) -> bool:
    return options.get("tuner") == "lora" or options.get("use_peft") is True


@dataclass(kw_only=True)
class Options:
    """Options of a trainer in TRL's names, and what they were translated to.

    ``given`` and ``defaults`` are read once; conversions add to the other attributes. Each option that is given ends in an
    override, in ``without`` or in a note, or agrees with this program (``agreeing``).
    """

    trainer: str
    title: str
    implied_loss: str | None  # by the method, such as orpo
    given: dict[str, object] = field(default_factory=dict)
    defaults: dict[str, object] = field(default_factory=dict)
    original: dict[str, str] = field(default_factory=dict)  # TRL's name -> the trainer's name
    settled: set[str] = field(default_factory=set)
    overrides: dict[str, tuple[object, str]] = field(default_factory=dict)  # key -> value, and the option that set it
    without: dict[str, str] = field(default_factory=dict)
    agreeing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, given: dict[str, object], *, trainer: str, implied_loss: str | None) -> Options:
        entry = table()["trainers"][trainer]
        found = cls(trainer=trainer, title=entry["title"], implied_loss=implied_loss)
        values, original, on = found.given, found.original, entry["enabled"]
        for section in ("model_init_kwargs", f"model_init_kwargs.{_QUANTISED}", _QUANTISED):
            if isinstance(parts := read_value(given.get(section)), Mapping):
                given = {name: value for name, value in given.items() if name != section}
                given |= {f"{section}.{part}": value for part, value in parts.items()}
        for theirs, value in given.items():
            inner = theirs.removeprefix("model_init_kwargs.").removeprefix(f"{_QUANTISED}.")
            is_negated = theirs.startswith("no_") and theirs[3:] in on  # as HfArgumentParser names them
            name = theirs[3:] if is_negated else entry["names"].get(inner, inner)
            value = not read_value(value) if is_negated else read_value(value)
            if value is not None and values.get(name) is not None:
                found.without[f"{theirs}={override_value(value)}"] = f"{original[name]} is the same option, which is used"
            else:
                values[name], original[name] = value, name if is_negated else theirs
        kind = "lora" if trains_adapters(entry["defaults"] | values) else "full"
        found.defaults |= entry["defaults"] | entry.get(kind, {})
        if any(f"{_QUANTISED}." in theirs for theirs in original.values()):
            found.defaults["bnb_4bit_quant_type"] = "fp4"  # of BitsAndBytesConfig
        for name, value in list(values.items()):
            is_count = name in _COUNTS and is_finite(value) and value <= 0
            if name in _NUMBERS and value is not None and (is_count or not is_finite(value)):
                found.reject(name, "it must be above 0" if is_count else "it must be a number")
                del values[name]
            elif value is None and name == "max_length":  # no limit
                found.defaults[name] = None
        found._read_implied_loss()
        return found

    def _read_implied_loss(self) -> None:
        """Take the loss that the method implies, and its defaults; CPO has TRL's names of pair losses for its own."""
        if self.implied_loss == "simpo" and self.trainer == "ms-swift":
            self.defaults["beta"] = 2.0
        if self.implied_loss is not None and not self.has("loss_type"):
            self.agree("loss_type")
            self.original.setdefault("loss_type", "loss_type")
            self.given["loss_type"] = self.implied_loss
        elif self.implied_loss == "cpo":
            kind = str(self.given["loss_type"])
            self.given["loss_type"] = "cpo" if kind == "sigmoid" else kind

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an option or its default."""
        value = self.given.get(name)
        return self.defaults.get(name, default) if value is None else value

    def has(self, *names: str) -> bool:
        return any(self.given.get(name) is not None for name in names)

    def set(self, key: str, value: object, *names: str, because: str = "") -> None:
        """Set one of our keys to a value that follows from the options ``names``, or from a default if none is given.

        It may also follow from the option ``because``, which is translated to another key.
        """
        by = next((name for name in (*names, because) if self.has(name)), "")
        earlier, earlier_by = self.overrides.get(key, (value, ""))
        if earlier_by and by and earlier != value:
            self.reject(earlier_by, f"{key} has one value, and {self.shown(by)} is used")
        if by or not earlier_by:
            self.overrides[key] = value, by
        self.settled.update(filter(self.has, names))

    def shown(self, name: str) -> str:
        return printable(f"{self.original.get(name, name)}={override_value(self.given[name])}")

    def reject(self, name: str, reason: str) -> None:
        if self.has(name):
            self.without.setdefault(self.shown(name), reason)
            self.settled.add(name)

    def agree(self, *names: str) -> None:
        """Settle options whose values need no key, because this program does the same."""
        for name in names:
            if name in self.given and name not in self.settled:
                self.agreeing.append(self.shown(name))
                self.settled.add(name)


def set_texts(options: Options, overrides: Sequence[str], name: str) -> None:
    """Set overrides that translation.yaml has for the value of an option; without any, the value agrees."""
    for text in overrides:
        key, _, value = text.partition("=")
        options.set(key, value if key == "hardware" else read_value(value), name)
    if not overrides:
        options.agree(name)
