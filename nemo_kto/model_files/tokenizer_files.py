"""Checks of a tokenizer's files that need none of the libraries that load it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemo_kto.errors import UserError, show
from nemo_kto.utils.files import irregular, open_file, other_format, read_json, refuse_code

_REMEDY = "download the tokenizer's files again, or write them with save_pretrained"
_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_STOPS = ("generation_config.json", "config.json")  # transformers reads eos_token_id in the first that exists
_IMAGES = ("image_token_id", "image_token_index", "video_token_id", "media_placeholder_token_id", "audio_token_id")
_CONVERSION = f"write {_TOKENIZER} with the lines of docs/guides/models.md, section Tokenizers"
_FORMAT_BYTES = 64  # enough to recognise a file of another format
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_SENTENCEPIECE, _TEKKEN = "tokenizer.model", "tekken.json"
_RANKS = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s")  # first line of a file of tiktoken
_VOCABULARIES = (_TOKENIZER, _SENTENCEPIECE, "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


def check_tokenizer(folder: Path, *, vocab_size: int | None = None) -> None:
    """Check that a folder holds a tokenizer that fits its model.

    Raises UserError if there is none, a file is damaged, only code or another package can read it, it has no EOS token, or a
    token that training needs has no row in the embedding (:func:`check_ids`).
    """
    _refuse_other_forms(folder)
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        others = (f"{name}, which is {kind}" for name in _VOCABULARIES if (kind := irregular(folder / name)))
        message = f"{folder} must hold a tokenizer ({_TOKENIZER} or tokenizer.model), got {next(others, 'none')}"
        raise UserError(f"{message}; copy its files from the original model")
    for name in (*_VOCABULARIES, *_TEMPLATES):
        file = folder / name
        if name in _TEMPLATES and (kind := irregular(file)) is not None:  # transformers would skip it
            raise UserError(f"{file} must be a regular file, got {kind}; {_REMEDY}")
        if not file.is_file():
            continue
        try:
            with open_file(file) as handle:
                other = other_format(handle.read(_FORMAT_BYTES))
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}; {_REMEDY}") from error
        if other is not None:
            raise UserError(f"{file} must be a file of the tokenizer, but it is {other}")
    config = _tokenizer_config(folder)
    if "eos_token" in config and config["eos_token"] is None:
        raise UserError(f"{folder / _CONFIG}: the tokenizer must have an EOS token, got none; set eos_token there")
    if (folder / _TOKENIZER).is_file():
        ids, added = _ids(folder / _TOKENIZER)
        # tokens that every data row gets, independent of its text
        special = (config.get("bos_token"), config.get("eos_token"))
        texts = (token.get("content") if isinstance(token, dict) else token for token in special)
        every_row = [text for text in texts if isinstance(text, str)]
        ids |= {token: added[token] for token in every_row if token in added}
        check_ids(ids, vocab_size=vocab_size, file=folder / _TOKENIZER)
        following = max([*ids.values(), *added.values()]) + 1  # the id that transformers gives to a token without one
        new = {token: following for token in every_row if token not in ids}
        check_ids(new, vocab_size=vocab_size, file=folder / _CONFIG)


def _refuse_other_forms(folder: Path) -> None:
    """Raise a UserError if the tokenizer has no tokenizer.json, and needs code or a package that is not installed.

    transformers would take the first vocabulary that it finds, and read one of tiktoken with the splitting rule of Llama 3.
    """
    if (folder / _TOKENIZER).exists():
        return
    if (folder / _TEKKEN).exists():
        command = f"from transformers.integrations.mistral import *; convert_tekken_tokenizer({str(folder / _TEKKEN)!r})"
        remedy = f'pip install mistral-common, and write it: python -c "{command}.save_pretrained({str(folder)!r})"'
        raise UserError(f"{folder} must hold {_TOKENIZER}, got {_TEKKEN}, the form of mistral-common; {remedy}")
    for file in (*sorted(folder.glob("*.tiktoken")), folder / "tiktoken.model", folder / _SENTENCEPIECE):
        with contextlib.suppress(OSError), open_file(file) as handle:
            if _RANKS.match(handle.read(_FORMAT_BYTES)) is not None:
                reason = "a form of tiktoken: how it splits text is only in code of the model, which is not run"
                raise UserError(f"{folder} must hold {_TOKENIZER}, got {file.name}, {reason}; {_CONVERSION}")
    refuse_code(folder / _CONFIG, _tokenizer_config(folder))
    for file in (folder / name for name in _VOCABULARIES if name.endswith(".model")):
        if file.is_file() and find_spec("sentencepiece") is None:
            text = f"{file}: the package sentencepiece must be installed to read it, got none"
            raise UserError(f"{text}; pip install sentencepiece")


def check_ids(ids: Mapping[str, int], *, vocab_size: int | None, file: Path) -> None:
    """Raise a UserError that names the ``file`` with the tokens if one has no row in the model's embedding.

    Tokens that were added for other purposes, such as Gemma 3's image tokens beside a text model, are not checked: a row of
    the data that contains one is rejected when it is tokenised.
    """
    token, highest = max(ids.items(), key=lambda entry: entry[1], default=("", -1))
    if vocab_size is not None and highest >= vocab_size:
        message = f"{file}: tokens must have ids below the model's vocab_size = {vocab_size}, got {highest} of {show(token)}"
        remedy = "use the model's own tokenizer, or resize the embedding with resize_token_embeddings"
        raise UserError(f"{message}; {remedy}")


def declared_stop_ids(folder: Path) -> set[int]:
    """Return the tokens that end an answer according to generation_config.json or, if it is absent, to config.json."""
    file = next((folder / name for name in _STOPS if (folder / name).is_file()), None)
    value = None if file is None else read_json(file).get("eos_token_id")
    return {number for number in (value if isinstance(value, list) else [value]) if type(number) is int and number < 2**31}


def image_ids(folder: Path) -> set[int]:
    """Return the tokens that stand for images, parts of videos or sounds according to config.json, if it exists."""
    config = read_json(folder / _STOPS[1]) if (folder / _STOPS[1]).is_file() else {}
    return {number for name in _IMAGES if type(number := config.get(name)) is int}


def has_chat_template(folder: Path) -> bool:
    """Return whether any file of a folder holds a chat template; raises like :func:`check_tokenizer`."""
    return chat_template_file(folder).name != _CONFIG or bool(_tokenizer_config(folder).get("chat_template"))


def chat_template_file(folder: Path) -> Path:
    """Return the file that holds the folder's chat template, if it has one."""
    return next((folder / name for name in _TEMPLATES if (folder / name).is_file()), folder / _CONFIG)


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / _CONFIG, remedy=_REMEDY) if (folder / _CONFIG).exists() else {}


def _ids(file: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return token -> id from a tokenizer.json: the tokens of its model, and the added tokens."""
    content = read_json(file, remedy=_REMEDY)
    try:
        vocabulary, added = content["model"]["vocab"], content.get("added_tokens") or []
        if isinstance(vocabulary, list):  # Unigram models list pairs of a token and its score
            vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
        ids = {str(token): int(number) for token, number in dict(vocabulary).items()}
        new = {str(token["content"]): int(token["id"]) for token in added}
        if not (ids or new):
            raise LookupError("no tokens")
        return ids, new
    except (TypeError, ValueError, LookupError) as error:
        message = f"{file} must have model.vocab, the id of each token, and added_tokens, got other content"
        raise UserError(f"{message}; {_REMEDY}") from error
