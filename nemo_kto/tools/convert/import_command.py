"""Command `nemo-kto import`: a checkpoint of NeMo-Aligner, Megatron-LM or Megatron-Bridge in Hugging Face format."""

from __future__ import annotations

import os
from pathlib import Path

import click

from nemo_kto.cli.command import File, command
from nemo_kto.device import device
from nemo_kto.errors import UserError
from nemo_kto.model_files.hub import is_hub_name, local_folder, pin
from nemo_kto.model_files.model_folders import remedy_for_missing
from nemo_kto.telemetry.console import take_over

_DESCRIPTION = """\
Write a checkpoint of NeMo-Aligner, Megatron-LM or Megatron-Bridge as a Hugging Face folder: configuration, tokenizer and
weights. FILE: a .nemo archive, or a torch_dist checkpoint folder. Nothing in the files is executed. docs/guides/models.md
"""
_MAX_SHARD_BYTES = 5 * 10**9
_TOKENIZER = "folder or hub model with the tokenizer; its config.json, if it has one, is that of the model"


@command("import", _DESCRIPTION)
@click.argument("file", type=File(), help="a .nemo archive, or a folder such as iter_0001000")
@click.argument("out", type=File(), help="target folder; created if it does not exist")
@click.option("--tokenizer", metavar="FOLDER|hf:NAME", help=_TOKENIZER)
def main(file: Path, out: Path, *, tokenizer: str | None) -> None:
    """Run the command; raise UserError if the checkpoint cannot be imported."""
    if not os.path.exists(file):
        raise UserError(f"FILE must be a .nemo archive or a checkpoint folder that exists, got {file}; correct it")
    folder = None if tokenizer is None else _tokenizer_folder(tokenizer)
    device.force_cpu()
    from nemo_kto.tools.convert.importing import import_checkpoint

    take_over()
    print(import_checkpoint(file, out, tokenizer=folder, max_shard_bytes=_MAX_SHARD_BYTES))


def _tokenizer_folder(name: str) -> Path:
    try:
        folder = local_folder(pin(name, weights=False) if is_hub_name(name) else name)
    except UserError as error:
        raise UserError(f"--tokenizer {error}") from None
    if not folder.is_dir():
        remedy = remedy_for_missing(folder, "correct the path")
        raise UserError(f"--tokenizer must be a folder with a tokenizer in Hugging Face format, got {folder}; {remedy}")
    return folder
