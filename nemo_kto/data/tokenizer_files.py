"""The files of a tokenizer as they are: what they show without the libraries that load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_kto.errors import UserError, show
from nemo_kto.files import irregular, open_file, other_format, read_json, refuse_code

_REMEDY = "download the tokenizer's files again, or write them with save_pretrained"
_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_FORMAT_BYTES = 64  # which show a file of another format
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_VOCABULARIES = (_TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


def check_tokenizer(folder: Path, *, vocab_size: int | None = None) -> None:
    """Look whether a folder holds a tokenizer that fits its model.

    Args:
        vocab_size: rows of the model's embedding; None where not known.

    Raises:
        UserError: it has none, a file is damaged, it brings code of its own, it has no EOS token, or a token has no row in
            the embedding.
    """
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        others = (f"{name}, which is {kind}" for name in _VOCABULARIES if (kind := irregular(folder / name)))
        told = f"{folder} must hold a tokenizer ({_TOKENIZER} or tokenizer.model), got {next(others, 'none')}"
        raise UserError(f"{told}; copy its files from where the model came from")
    for name in (*_VOCABULARIES, *_TEMPLATES):
        _check_format(folder / name, needed=name in _TEMPLATES)
    config = _tokenizer_config(folder)
    refuse_code(folder / _CONFIG, config)
    if "eos_token" in config and config["eos_token"] is None:
        raise UserError(f"{folder / _CONFIG}: the tokenizer must have an EOS token, got none; set eos_token there")
    if (folder / _TOKENIZER).is_file():
        ids = _ids(folder / _TOKENIZER)
        check_ids(ids, vocab_size=vocab_size, file=folder / _TOKENIZER)
        absent = [token for token in _named_tokens(config) if token not in ids]
        first = max(ids.values()) + 1  # transformers gives them the next ids
        new = {token: first + number for number, token in enumerate(absent)}
        check_ids(new, vocab_size=vocab_size, file=folder / _CONFIG)


def _check_format(file: Path, *, needed: bool) -> None:
    """Refuse a file of another format; if it is ``needed``, anything else too that transformers would skip."""
    if needed and (kind := irregular(file)) is not None:
        raise UserError(f"{file} must be a regular file, got {kind}; {_REMEDY}")
    if not file.is_file():
        return
    try:
        with open_file(file) as handle:
            told = other_format(handle.read(_FORMAT_BYTES))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; {_REMEDY}") from error
    if told is not None:
        raise UserError(f"{file} must be a file of the tokenizer, but it is {told}")


def check_ids(ids: Mapping[str, int], *, vocab_size: int | None, file: Path) -> None:
    """Look whether tokens have rows in the model's embedding.

    Args:
        ids: token -> its id.
        vocab_size: rows of the embedding; None where not known.
        file: where the tokens are from.

    Raises:
        UserError: a token has none.
    """
    token, highest = max(ids.items(), key=lambda entry: entry[1], default=("", -1))
    if vocab_size is not None and highest >= vocab_size:
        told = f"{file}: tokens must have ids below the model's vocab_size = {vocab_size}, got {highest} of {show(token)}"
        remedy = "take the model's own tokenizer, or resize the embedding with resize_token_embeddings"
        raise UserError(f"{told}; {remedy}")


def has_chat_template(folder: Path) -> bool:
    """Whether any file of a folder holds a chat template; raises as :func:`check_tokenizer` does."""
    return chat_template_file(folder).name != _CONFIG or bool(_tokenizer_config(folder).get("chat_template"))


def chat_template_file(folder: Path) -> Path:
    """Where a chat template of the folder stands if it has one."""
    return next((folder / name for name in _TEMPLATES if (folder / name).is_file()), folder / _CONFIG)


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / _CONFIG, remedy=_REMEDY) if (folder / _CONFIG).exists() else {}


def _named_tokens(config: Mapping[str, Any]) -> list[str]:
    """The tokens that a tokenizer_config.json names, which transformers adds to the vocabulary where it lacks them."""
    values = [value for key, value in config.items() if key.endswith("_token")]
    special = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    for group in (special, config.get("added_tokens_decoder")):
        values += group.values() if isinstance(group, dict) else group if isinstance(group, list) else ()
    texts = (value.get("content") if isinstance(value, dict) else value for value in values)
    return list(dict.fromkeys(text for text in texts if isinstance(text, str)))


def _ids(file: Path) -> dict[str, int]:
    """Token -> id, of a tokenizer.json."""
    content = read_json(file, remedy=_REMEDY)
    try:
        vocabulary, added = content["model"]["vocab"], content.get("added_tokens") or []
        if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score
            ids = {entry[0]: number for number, entry in enumerate(vocabulary)}
        else:
            ids = dict(vocabulary)
        ids |= {token["content"]: token["id"] for token in added}
        found = {str(token): int(number) for token, number in ids.items()}
        if not found:
            raise LookupError("no tokens")
        return found
    except (TypeError, ValueError, LookupError) as error:
        told = f"{file} must have model.vocab, the id of each token, and added_tokens; got something else"
        raise UserError(f"{told}; {_REMEDY}") from error
