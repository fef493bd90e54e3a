"""The folder of one of our own checkpoints as it is: what it shows without megatron-core, which loads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nemo_kto.errors import UserError
from nemo_kto.files import read_json
from nemo_kto.models.lora_settings import LoRASettings

CHECKPOINTS = "checkpoints"  # their folder in that of a run
INFO = "trainer.json"
_REMEDY = "take another checkpoint of the run"
_DTYPES = ("bfloat16", "float32")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one of our own checkpoints."""
    return os.path.isfile(folder / INFO)


def config_folder(source: Path) -> Path:
    """Where the configuration and the tokenizer of a model lie: in ``source``, or in ``hf`` of a checkpoint."""
    return source / "hf" if is_checkpoint(source) else source


def check_checkpoint(folder: Path) -> Path | None:
    """Look whether a checkpoint is as it was written.

    Returns:
        The base model of a checkpoint that holds only adapters; None for one that holds all weights.

    Raises:
        UserError: its trainer.json is not what this program writes, or a file is missing or cut short; names it.
    """
    file = folder / INFO
    info = read_json(file, remedy=_REMEDY)
    sizes, dtype, adapters = info.get("files"), info.get("dtype"), info.get("adapters")
    if not isinstance(sizes, dict) or dtype not in _DTYPES or not isinstance(adapters, dict | None):
        told = f"{file} must have files, dtype and adapters as this program writes them"
        raise UserError(f"{told}, got something else; {_REMEDY}")
    for name, size in sizes.items():
        part = folder / name
        found = part.stat().st_size if part.is_file() else None
        if found != size:
            is_what = "is not there" if found is None else f"has {found} bytes"
            raise UserError(f"{folder} must be as it was written, but {name} {is_what} instead of {size}; {_REMEDY}")
    if adapters is None:
        return None
    try:
        kept = adapters["settings"].items()
        settings: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in kept}
        LoRASettings(**settings)
        return Path(adapters["base_model"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        told = f"{file} must name the base model and the settings of its adapters, got something else ({error})"
        raise UserError(f"{told}; {_REMEDY}") from error
