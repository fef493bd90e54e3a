"""Validation of the values of a trainer.json: a checkpoint from someone else can contain anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nemo_kto.architecture.lora import LoRASettings

DTYPES = ("bfloat16", "float32")
_SHOWN = 60  # characters of a wrong value shown in a message


class _Kind(NamedTuple):
    """A requirement on a value: a test, and its description for messages."""

    holds: Callable[[Any], bool]
    text: str


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def _is_dict_of(*kinds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(any(kind(each) for kind in kinds) for each in value.values())


def _is_none(value: object) -> bool:
    return value is None


def _is_total(value: object) -> bool:
    """Return whether a value is a pair of a sum and the number of its terms, which is above 0."""
    return isinstance(value, list) and len(value) == 2 and _is_number(value[0]) and _is_count(value[1]) and value[1] > 0


def _is_fact(value: object) -> bool:
    """Return whether a value is a plain value, or an object with a content hash and its origin (sha256, from)."""
    content = isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("sha256", "from"))
    return content or not isinstance(value, dict)


def _is_adapters(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("base_model"), str):
        return False
    try:
        adapter_settings(value)
    except (LookupError, TypeError, ValueError, AttributeError):
        return False
    return True


_COUNT = _Kind(_is_count, "an integer of at least 0")
_NUMBER = _Kind(_is_number, "a number")
_NUMBERS = _Kind(_is_dict_of(_is_number), "an object of numbers")
_TEXT = _Kind(lambda value: isinstance(value, str), "a string")
_OBJECT = _Kind(lambda value: isinstance(value, dict), "an object")
_BOOL = _Kind(lambda value: isinstance(value, bool), "true or false")
_INFO = {
    "trainer": _OBJECT,
    "metrics": _Kind(_is_dict_of(_is_number, _is_none), "an object of numbers"),
    "dtype": _Kind(lambda value: value in DTYPES, " or ".join(DTYPES)),
    "layout": _Kind(_is_dict_of(lambda value: _is_count(value) and value > 0), "an object of integers above 0"),
    "distributed_optimizer": _BOOL,
    "moving_reference": _BOOL,
    "adapters": _Kind(lambda value: value is None or _is_adapters(value), "the settings of adapters and their base model"),
    "run": _Kind(_is_dict_of(_is_fact), "what a resumed run is compared with"),
    "versions": _Kind(_is_dict_of(lambda value: isinstance(value, str)), "an object of strings"),
}
_COUNTS = (*("step", "epoch", "consumed_samples", "steps_per_epoch", "skipped_steps", "skipped_in_a_row", "validation_due"),)
_TRAINER = {**dict.fromkeys(_COUNTS, _COUNT), "unlogged": _OBJECT, "objective": _OBJECT, "early_stopping": _OBJECT}
_TOTALS = _Kind(_is_dict_of(_is_total), "an object of sums with their counts")
_UNLOGGED = {"steps": _COUNT, "seconds": _NUMBER, "sums": _NUMBERS, "totals": _TOTALS, "newest": _NUMBERS}
_STOPPING = {
    "monitor": _TEXT,
    "mode": _TEXT,
    "waited": _COUNT,
    "is_finite": _BOOL,
    "best": _Kind(lambda value: value is None or _is_number(value), "a number or null"),
    "best_step": _Kind(lambda value: value is None or _is_count(value), "an integer of at least 0, or null"),
}


def adapter_settings(adapters: Mapping[str, Any]) -> LoRASettings:
    """Build the settings from the ``adapters`` of a trainer.json; invalid content raises various Python exceptions."""
    kept = adapters["settings"].items()
    settings: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in kept}
    return LoRASettings(**settings)


def find_wrong(info: Mapping[str, Any], *, step: int | None) -> str | None:
    """Return a message about the first value of a trainer.json that this program would not write; None if all are valid.

    Args:
        step: the step in the name of the checkpoint's folder; None if the folder has another name.
    """
    if (wrong := _first_wrong(info, _INFO, required=("trainer", "metrics", "dtype", "layout"))) is not None:
        return wrong
    trainer = info["trainer"]
    if (wrong := _first_wrong(trainer, _TRAINER, required=("step",), prefix="trainer.")) is not None:
        return wrong
    for part, kinds in (("unlogged", _UNLOGGED), ("early_stopping", _STOPPING)):
        saved = trainer.get(part)  # empty or absent if there is nothing to record
        wrong = _first_wrong(saved, kinds, required=tuple(kinds), prefix=f"trainer.{part}.") if saved else None
        if wrong is not None:
            return wrong
    return _first_contradiction(trainer, step)


def _first_wrong(
    values: Mapping[str, Any], kinds: Mapping[str, _Kind], *, required: tuple[str, ...], prefix: str = ""
) -> str | None:
    for name, kind in kinds.items():
        if name not in values and name in required:
            return f"{prefix}{name} must be {kind.text}, and is missing"
        if name in values and not kind.holds(values[name]):
            return f"{prefix}{name} must be {kind.text}, got {_shown(values[name])}"
    return None


def _first_contradiction(trainer: Mapping[str, Any], step: int | None) -> str | None:
    taken, consumed = trainer["step"], trainer.get("consumed_samples")
    if step is not None and taken != step:
        return f"trainer.step must be that of the folder's name, {step}, got {taken}"
    if consumed is not None and (consumed % taken or not consumed if taken else consumed):
        return f"trainer.consumed_samples must be a multiple of trainer.step, {taken}, got {consumed}"
    return None


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "something nested without end"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
