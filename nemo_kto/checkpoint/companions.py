"""What transformers, and the engines that serve its models, read beside the weights and config.json."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from nemo_kto.errors import UserError
from nemo_kto.files import file_inside

logger = logging.getLogger(__name__)

_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_FOLDERS = ("additional_chat_templates",)


def copy_companions(source: Path, target: Path) -> None:
    """Copy the tokenizer's files and the generation settings of a Hugging Face folder, with plain permissions.

    What is no file of that folder (a link that leads elsewhere, a pipe), or cannot be read, is left out with a warning.

    Raises:
        OSError: ``target`` cannot be written.
    """
    for name in (*_FILES, *_names_in_folders(source)):
        content = _content(source, name)
        if content is not None:
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(content)


def _names_in_folders(source: Path) -> Iterator[str]:
    for folder in _FOLDERS:
        if (source / folder).is_dir():
            yield from (f"{folder}/{name}" for name in sorted(os.listdir(source / folder)))


def _content(source: Path, name: str) -> bytes | None:
    if not os.path.lexists(source / name):
        return None
    try:
        path = file_inside(source, name)
        if stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            return path.read_bytes()
        why = "it is no file"
    except UserError as error:
        why = str(error)
    except OSError as error:
        why = str(error.strerror)
    logger.warning("%s is left out of the export: %s", source / name, why)
    return None
