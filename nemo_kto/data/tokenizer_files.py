"""The files of a tokenizer as they are: what they show without the libraries that load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_kto.errors import UserError
from nemo_kto.files import read_json, refuse_code

_REMEDY = "download the tokenizer's files again, or write them with save_pretrained"
_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
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
        told = f"{folder} must hold a tokenizer ({_TOKENIZER} or tokenizer.model), got none"
        raise UserError(f"{told}; copy its files from where the model came from")
    config = _tokenizer_config(folder)
    refuse_code(folder / _CONFIG, config)
    if "eos_token" in config and config["eos_token"] is None:
        raise UserError(f"{folder / _CONFIG}: the tokenizer must have an EOS token, got none; set eos_token there")
    if (folder / _TOKENIZER).is_file():
        token, highest = _highest(folder / _TOKENIZER)
        if vocab_size is not None and highest >= vocab_size:
            told = f"{folder / _TOKENIZER}: tokens must have ids below the model's vocab_size = {vocab_size}, got {highest}"
            remedy = "take the model's own tokenizer, or resize the embedding with resize_token_embeddings"
            raise UserError(f"{told} of {token!r}; {remedy}")


def has_chat_template(folder: Path) -> bool:
    """Whether any file of a folder holds a chat template; raises as :func:`check_tokenizer` does."""
    return chat_template_file(folder).name != _CONFIG or bool(_tokenizer_config(folder).get("chat_template"))


def chat_template_file(folder: Path) -> Path:
    """Where a chat template of the folder stands if it has one."""
    files = (folder / "chat_template.jinja", folder / "chat_template.json")
    return next((file for file in files if file.is_file()), folder / _CONFIG)


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / _CONFIG, remedy=_REMEDY) if (folder / _CONFIG).exists() else {}


def _highest(file: Path) -> tuple[str, int]:
    """The token with the highest id, and the id."""
    content = read_json(file, remedy=_REMEDY)
    try:
        vocabulary, added = content["model"]["vocab"], content.get("added_tokens") or []
        if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score
            ids = {entry[0]: number for number, entry in enumerate(vocabulary)}
        else:
            ids = dict(vocabulary)
        ids |= {token["content"]: token["id"] for token in added}
        return max(((str(token), int(number)) for token, number in ids.items()), key=lambda entry: entry[1])
    except (TypeError, ValueError, LookupError) as error:
        told = f"{file} must have model.vocab, the id of each token, and added_tokens; got something else"
        raise UserError(f"{told}; {_REMEDY}") from error
