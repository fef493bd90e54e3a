"""Generation settings of a model's folder: those that a chat uses, and the names of those that it ignores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict

from nemo_kto.errors import UserError
from nemo_kto.utils.field_errors import file_errors
from nemo_kto.utils.files import file_inside, read_json

FILES = ("generation_config.json", "config.json")  # transformers reads the first that exists
_MIN_TEMPERATURE = 1e-5
_REMEDY = "correct it, or download the file again"
_Share = Annotated[float, Ge(0), Le(1)]
_Tokens = list[Annotated[int, Ge(0)]]
# Others that change answers; a value of _OFF has no effect.
_IGNORED = (
    "assistant_early_exit", "bad_words_ids", "constraints", "diversity_penalty", "dola_layers", "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id",
    "forced_eos_token_id", "guidance_scale", "max_time", "min_length", "num_beams", "num_beam_groups", "penalty_alpha",
    "prompt_lookup_num_tokens", "sequence_bias", "stop_strings", "watermarking_config",
)  # fmt: skip
_OFF: tuple[object, ...] = (None, False, 0, 1, "", [], {})


class _Settings(BaseModel):
    """Settings that a chat uses."""

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
    no_repeat_ngram_size: Annotated[int, Ge(0)] | None = None
    min_new_tokens: Annotated[int, Ge(0)] | None = None
    max_new_tokens: Annotated[int, Ge(1)] | None = None
    suppress_tokens: _Tokens | None = None
    begin_suppress_tokens: _Tokens | None = None


class GenerationSettings(NamedTuple):
    """Generation settings of a model.

    Attributes:
        used: by their names in transformers.
        ignored: names of others that are set.
    """

    used: dict[str, Any]
    ignored: list[str]


def read_generation_settings(folder: Path) -> GenerationSettings:
    """Return the generation settings of a Hugging Face folder; UserError that lists all that have a wrong value."""
    name = next((name for name in FILES if (folder / name).exists()), None)
    content = {} if name is None else read_json(file_inside(folder, name))
    if wrong := file_errors(_Settings, content):
        raise UserError(f"{folder / str(name)}: {'; '.join(wrong)}; {_REMEDY}")
    used = {name: content[name] for name in _Settings.model_fields if content.get(name) is not None}
    if used.get("temperature", 1) < _MIN_TEMPERATURE:  # the quotients of logits would not be finite
        del used["temperature"]
        used["do_sample"] = False
    return GenerationSettings(used, [name for name in _IGNORED if content.get(name) not in _OFF])
