"""Checks of a tokenizer's files that need none of the libraries that load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_kto.errors import UserError, show
from nemo_kto.utils.files import irregular, open_file, other_format, read_json, refuse_code

_REMEDY = "download the tokenizer's files again, or write them with save_pretrained"
_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_STOPS = ("generation_config.json", "config.json")  # transformers reads eos_token_id in the first that exists
_IMAGES = ("image_token_id", "image_token_index", "video_token_id")
_FORMAT_BYTES = 64  # enough to recognise a file of another format
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_VOCABULARIES = (_TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


def check_tokenizer(folder: Path, *, vocab_size: int | None = None) -> None:
    """Check that a folder holds a tokenizer that fits its model.

    Raises UserError if there is none, a file is damaged, it brings its own code, it has no EOS token, or a token that
    training needs has no row in the embedding (:func:`check_ids`).
    """
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
    refuse_code(folder / _CONFIG, config)
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
    """Return the tokens that stand for an image or a part of a video according to config.json, if it exists."""
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
