"""Files that accompany weights: configuration, tokenizer, license, model card, generation settings."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict

from nemo_kto.architecture.config_fields import QUANTIZATION_FIELDS, quantization_settings
from nemo_kto.architecture.config_file import CONFIG, read_config
from nemo_kto.architecture.families import ALIASES, WITH_CODE
from nemo_kto.errors import UserError
from nemo_kto.model_files.adapter_files import ADAPTER_CONFIG
from nemo_kto.model_files.model_folders import tokenizer_files
from nemo_kto.utils.fields import file_errors
from nemo_kto.utils.files import file_inside, read_bytes, read_json

logger = logging.getLogger(__name__)

_CLASS = "tokenizer_config.json"  # may name the class of a tokenizer
CARD = "README.md"  # the model card
_LICENSES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
_MAX_BYTES = 2**28  # the largest tokenizers have a tenth of this size
# A warning names these if they cannot be copied; other files of a tokenizer are copied if they are files.
_EXPECTED = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
# Forms of a tokenizer that other programs read, such as vLLM and llama.cpp; params.json says which version of it.
_OTHER_TOKENIZERS = ("tekken.json", "params.json", "*.tiktoken", "*.model")
_GENERATION_FILES = ("generation_config.json", "config.json")  # transformers reads the first that exists
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


def read_companions(folder: Path, *, into: str) -> dict[str, bytes]:
    """Read the small files of a model: path below ``folder`` -> content.

    They are the configuration, the tokenizer's files, the chat templates, the license and the model card; for a model that
    transformers does not have, its code too.

    A file that cannot be copied (not regular, not readable, larger than 256 MiB, or a broken link) is left out, with a
    warning that names it and the destination, ``into``: transformers, which has read the tokenizer, did not need it.
    Raises UserError if a file other than the license, the model card and code is a link that leads out of the folder; these
    are left out as well.
    """
    contents = {}
    # all that transformers may read beside the weights
    about = {CARD, *(file.name for pattern in _LICENSES for file in folder.glob(pattern))}
    with contextlib.suppress(UserError):  # whatever config.json is, it is copied
        if str(read_json(folder / CONFIG).get("model_type")) in WITH_CODE:
            about |= {file.name for file in folder.glob("*.py")}
    names = {*_EXPECTED, *about, *_tokenizer_names(folder)}
    for name in sorted(name for name in names if os.path.lexists(folder / name) and not os.path.isdir(folder / name)):
        try:
            path = file_inside(folder, name)
        except UserError as error:
            if name not in about:
                raise
            logger.warning("%s is not copied into %s: %s", folder / name, into, error)
            continue
        try:
            contents[name] = read_bytes(path, limit=_MAX_BYTES)
        except OSError as error:
            logger.warning("%s is not copied into %s: %s", path, into, error.strerror)
    return contents


def _tokenizer_names(folder: Path) -> set[str]:
    """Return the paths of a tokenizer's files below a folder, with the chat templates."""
    files = [*tokenizer_files(folder), *(file for pattern in _OTHER_TOKENIZERS for file in folder.glob(pattern))]
    return {file.relative_to(folder).as_posix() for file in files if file.is_file()}


def model_config(source: Path, *, tied: bool) -> dict[str, Any]:
    """Return the content of config.json, without names of code if transformers has the class itself: it is not copied.

    ``tied``: the output layer has the weight of the embedding, as the weights show.
    """
    config = read_json(file_inside(source, CONFIG))
    if str(config.get("model_type")) not in WITH_CODE:
        config.pop("auto_map", None)
    if not tied and isinstance(text := config.get("text_config"), dict) and text.get("tie_word_embeddings"):
        config["text_config"] = {**text, "tie_word_embeddings": False}  # which transformers obeys in some models
    if not tied:
        config |= dict.fromkeys(("tie_word_embeddings", *config.keys() & {"tie_embedding"}), False)  # the latter in LFM2
    return config


def transformers_fields(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the fields of config.json, if it exists, and whether an alias had to be replaced in its ``model_type``."""
    fields = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    known = ALIASES.get(str(fields.get("model_type")))
    return fields | ({} if known is None else {"model_type": known}), known is not None


def without_class(folder: Path) -> dict[str, Any] | None:
    """Return tokenizer_config.json without code or a class of mistral-common, None if no tokenizer.json replaces them."""
    config = read_json(folder / _CLASS) if all((folder / name).is_file() for name in (_CLASS, "tokenizer.json")) else {}
    if not config.get("auto_map") and not str(config.get("tokenizer_class")).startswith("MistralCommon"):
        return None
    return {name: config[name] for name in config if name != "auto_map"} | {"tokenizer_class": "PreTrainedTokenizerFast"}


def is_quantized(folder: Path) -> bool:
    """Return whether the configuration of a folder says that its weights are quantized; False if it cannot be read."""
    with contextlib.suppress(UserError):
        return quantization_settings(read_config(folder)) is not None
    return False


def auto_class(folder: Path) -> str:
    """Return the class of transformers that loads the model in a folder, or the base model of the adapters in it."""
    with contextlib.suppress(UserError):
        if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file():
            folder = Path(str(read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")))
        if "vision_config" in read_json(folder / CONFIG):
            return "AutoModelForImageTextToText"
    return "AutoModelForCausalLM"


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the configuration for unquantized weights of this dtype, which keeps its name for the dtype."""
    kept = {name: value for name, value in config.items() if name not in QUANTIZATION_FIELDS}
    if isinstance(text := kept.get("text_config"), dict):
        kept["text_config"] = {name: value for name, value in text.items() if name not in QUANTIZATION_FIELDS}
    names = [name for name in ("dtype", "torch_dtype") if name in config]
    return kept | dict.fromkeys(names or ["torch_dtype"], dtype)  # all versions of transformers read the older name


def copy_companions(source: Path, target: Path, *, only_tokenizer: bool = False) -> None:
    """Copy all companions but the configuration and the model card into an export, with default permissions.

    Both are written for the exported model, and tokenizer_config.json without code, which is not copied. Adapters need
    ``only_tokenizer``. Like :func:`read_companions` otherwise.

    Raises OSError if ``target`` cannot be written.
    """
    companions, plain = read_companions(source, into="the export"), without_class(source)
    if plain is not None:
        companions[_CLASS] = (json.dumps(plain, indent=2, ensure_ascii=False) + "\n").encode()
    names = companions.keys() & _tokenizer_names(source) if only_tokenizer else companions.keys() - {CONFIG, CARD}
    for name, content in companions.items():
        if name in names:
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(content)


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
    file = next((file for name in _GENERATION_FILES if (file := folder / name).exists()), folder / _GENERATION_FILES[0])
    content = read_json(file_inside(folder, file.name)) if file.exists() else {}
    if wrong := file_errors(_Settings, content):
        raise UserError(f"{file}: {'; '.join(wrong.values())}; correct it, or download the file again")
    used = {name: content[name] for name in _Settings.model_fields if content.get(name) is not None}
    if used.get("temperature", 1) < _MIN_TEMPERATURE:
        used |= {"do_sample": False, "temperature": 1.0}
    return used, [name for name in _IGNORED if content.get(name) not in _OFF]
