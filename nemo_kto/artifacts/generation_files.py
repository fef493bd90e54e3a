"""Generation settings of a model's folder: those that a chat uses, and the names of those that it ignores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict

from nemo_kto.errors import UserError
from nemo_kto.utils.fields import file_errors
from nemo_kto.utils.files import file_inside, read_json

_FILES = ("generation_config.json", "config.json")  # transformers reads the first that exists
_MIN_TEMPERATURE = 1e-5  # the quotients of logits are not finite below it
_Share = Annotated[float, Ge(0), Le(1)]
_Count = Annotated[int, Ge(0)]
# Others that change answers, unless their value is one of _OFF.
_IGNORED = (
    "bad_words_ids", "constraints", "diversity_penalty", "dola_layers", "encoder_repetition_penalty", "force_words_ids",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "guidance_scale", "max_time", "min_length", "num_beams", "penalty_alpha", "sequence_bias", "stop_strings",
    "watermarking_config",
)  # fmt: skip
_OFF: tuple[object, ...] = (None, False, 0, 1, "", [], {})


class _Settings(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, defer_build=True)

    do_sample: bool | None = None
    temperature: Annotated[float, Ge(0)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, Ge(-1)] | None = None  # 0 and -1: from all tokens
    min_p: _Share | None = None
    typical_p: Annotated[float, Gt(0), Le(1)] | None = None
    epsilon_cutoff: _Share | None = None
    eta_cutoff: _Share | None = None
    repetition_penalty: Annotated[float, Gt(0)] | None = None
    no_repeat_ngram_size: _Count | None = None
    min_new_tokens: _Count | None = None
    max_new_tokens: Annotated[int, Ge(1)] | None = None
    suppress_tokens: list[_Count] | None = None
    begin_suppress_tokens: list[_Count] | None = None


def read_generation_settings(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the generation settings of a folder that a chat uses, by their names, and the names of others that are set.

    Raises UserError that lists all settings with a wrong value.
    """
    file = next((file for name in _FILES if (file := folder / name).exists()), folder / _FILES[0])
    content = read_json(file_inside(folder, file.name)) if file.exists() else {}
    if wrong := file_errors(_Settings, content):
        raise UserError(f"{file}: {'; '.join(wrong.values())}; correct it, or download the file again")
    used = {name: content[name] for name in _Settings.model_fields if content.get(name) is not None}
    if used.get("temperature", 1) < _MIN_TEMPERATURE:
        used |= {"do_sample": False, "temperature": 1.0}
    return used, [name for name in _IGNORED if content.get(name) not in _OFF]
