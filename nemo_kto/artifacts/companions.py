"""What transformers reads beside a model's weights: its configuration, tokenizer and templates, for checkpoints and exports.

A save must not depend on files of others: during a run a model folder may change, go away, or become unreadable. So a run
reads them once, at its start.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from nemo_kto.architecture.config_file import CONFIG
from nemo_kto.artifacts.content import tokenizer_files
from nemo_kto.utils.files import file_inside, read_bytes

logger = logging.getLogger(__name__)

_MAX_BYTES = 2**28  # the largest tokenizers have a tenth of that
# Named where they cannot be copied; other files of a tokenizer are copied where they are files.
_EXPECTED = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def read_companions(folder: Path, *, into: str) -> dict[str, bytes]:
    """Path below ``folder`` -> content of the configuration, the tokenizer's files and the chat templates.

    What has such a name and cannot be copied (no regular file, not readable, larger than 256 MiB, a link to nothing) is left
    out, with a warning that names it: transformers, which has read the tokenizer, did not need it.

    Args:
        folder: of a Hugging Face model.
        into: where the files will go, for the warning: "the checkpoints".

    Raises:
        UserError: a file is a link that leads out of the folder.
    """
    contents = {}
    for name in _names(folder):
        path = file_inside(folder, name)
        try:
            contents[name] = read_bytes(path, limit=_MAX_BYTES)
        except OSError as error:
            logger.warning("%s is not copied into %s: %s", path, into, error.strerror)
    return contents


def copy_companions(source: Path, target: Path) -> None:
    """Copy them all but the configuration into an export, with plain permissions; as :func:`read_companions` does.

    Raises:
        OSError: ``target`` cannot be written.
    """
    for name, content in read_companions(source, into="the export").items():
        if name != CONFIG:
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(content)


def _names(folder: Path) -> list[str]:
    """What transformers may read beside the weights, as names below the folder, sorted."""
    names = {*_EXPECTED, *(file.relative_to(folder).as_posix() for file in tokenizer_files(folder))}
    return sorted(name for name in names if os.path.lexists(folder / name) and not os.path.isdir(folder / name))
