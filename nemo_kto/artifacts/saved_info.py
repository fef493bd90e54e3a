"""Validation of the values of a trainer.json: a checkpoint from someone else can contain anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import BaseModel, ConfigDict, Field

from nemo_kto.architecture.families.fields import ABSENT
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.utils.field_errors import file_errors
from nemo_kto.utils.fields import check

Count = Annotated[int, Ge(0), Lt(2**63)]
Positive = Annotated[int, Ge(1), Lt(2**63)]
Numbers = Annotated[dict[str, float], Field(description="an object of floats")]
_STRICT = ConfigDict(strict=True, protected_namespaces=(), defer_build=True)


def _are_totals(values: dict[str, list[Any]]) -> bool:
    return all(
        len(total) == 2 and type(total[0]) in (int, float) and type(total[1]) is int and 0 < total[1] < 2**63
        for total in values.values()
    )


def _are_facts(values: dict[str, Any]) -> bool:
    """Return whether each value is a plain value, or an object with a content hash and its origin (sha256, from)."""
    contents = [value for value in values.values() if isinstance(value, dict)]
    return all(isinstance(content.get(name), str) for content in contents for name in ("sha256", "from"))


def _are_adapters(value: dict[str, Any] | None) -> bool:
    try:
        return value is None or (isinstance(value["base_model"], str) and adapter_settings(value) is not None)
    except (LookupError, TypeError, ValueError, AttributeError):
        return False


class _Unlogged(BaseModel):
    """Sums since the last line of the log."""

    model_config = _STRICT
    steps: Count
    seconds: float
    sums: Numbers
    totals: Annotated[dict[str, list[Any]], check(_are_totals, "be an object of sums with their counts")]
    newest: Numbers


class _EarlyStopping(BaseModel):
    model_config = _STRICT
    monitor: str
    mode: str
    waited: Count
    is_finite: bool
    best: float | None
    best_step: Count | None


class _Trainer(BaseModel):
    model_config = _STRICT
    step: Count
    epoch: Count = 0
    consumed_samples: Count = 0
    steps_per_epoch: Count = 0
    skipped_steps: Count = 0
    skipped_in_a_row: Count = 0
    validation_due: Count = 0
    unlogged: Annotated[_Unlogged, Field(description="an object")] = ABSENT
    objective: Annotated[dict[str, Any], Field(description="an object")] = {}
    early_stopping: Annotated[_EarlyStopping, Field(description="an object")] = ABSENT


class _File(BaseModel):
    model_config = _STRICT
    size: Count
    sha256: str


class Info(BaseModel):
    """Content of a trainer.json; earlier versions lack some of the fields with a default, full models lack adapters."""

    model_config = _STRICT
    trainer: Annotated[_Trainer, Field(description="an object")]
    metrics: Annotated[dict[str, float | None], Field(description="an object of floats")]
    dtype: Literal["bfloat16", "float32"]
    layout: Annotated[dict[str, Positive], Field(description="an object of integers above 0")]
    files: Annotated[dict[str, Count | _File], Field(description="an object of sizes and hashes of files")]
    distributed_optimizer: bool = False
    moving_reference: bool = False
    adapters: Annotated[
        dict[str, Any] | None,
        check(_are_adapters, ""),
        Field(description="the base model and the settings of adapters, or null"),
    ] = None
    run: Annotated[
        dict[str, Any], check(_are_facts, ""), Field(description="an object of values that a resumed run is compared with")
    ] = {}
    versions: Annotated[dict[str, str], Field(description="an object of strings")] = {}


def adapter_settings(adapters: Mapping[str, Any]) -> LoRASettings:
    """Build the settings from the ``adapters`` of a trainer.json; invalid content raises various Python exceptions."""
    kept = adapters["settings"].items()
    settings: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in kept}
    return LoRASettings(**settings)


def find_wrong(info: Mapping[str, Any], *, step: int | None) -> list[str]:
    """Return a message about each value of a trainer.json that this program would not write.

    ``step`` is the one in the name of the checkpoint's folder; None if the folder has another name.
    """
    trainer = info.get("trainer")
    if isinstance(trainer, dict):  # these are empty if there is nothing to record
        empty = [name for name in ("unlogged", "early_stopping") if trainer.get(name) == {}]
        info = {**info, "trainer": {name: value for name, value in trainer.items() if name not in empty}}
    if wrong := file_errors(Info, info):
        return wrong
    taken, consumed = info["trainer"]["step"], info["trainer"].get("consumed_samples")
    if step is not None and taken != step:
        wrong.append(f"trainer.step must be the {step} of the folder's name, got {taken}")
    if consumed is not None and (consumed % taken or not consumed if taken else consumed):
        wrong.append(f"trainer.consumed_samples must be a multiple of trainer.step, {taken}, got {consumed}")
    return wrong
