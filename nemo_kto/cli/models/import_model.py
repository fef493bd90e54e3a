"""Command `nemo-kto import`: write a checkpoint of another Megatron program as a Hugging Face folder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from nemo_kto.artifacts.hub import is_hub_name, local_folder, pin
from nemo_kto.artifacts.sources import remedy_for_missing
from nemo_kto.device import device
from nemo_kto.errors import UserError
from nemo_kto.telemetry.console import set_up_logging, take_over

_DESCRIPTION = """\
Write a checkpoint of NeMo-Aligner, Megatron-LM or Megatron-Bridge as a Hugging Face folder: configuration, tokenizer and
weights. FILE: a .nemo archive, or a torch_dist checkpoint folder. Nothing in the files is executed. docs/guides/models.md
"""
_MAX_SHARD_BYTES = 5 * 10**9


def main(argv: Sequence[str]) -> None:
    """Run the command; raise UserError if the checkpoint cannot be imported."""
    arguments = _parser().parse_args(list(argv))
    if not os.path.exists(arguments.file):
        raise UserError(f"FILE must be a .nemo archive or a checkpoint folder that exists, got {arguments.file}; correct it")
    tokenizer = None
    if (named := arguments.tokenizer) is not None:
        try:
            tokenizer = local_folder(pin(named, weights=False) if is_hub_name(named) else named)
        except UserError as error:
            raise UserError(f"--tokenizer {error}") from None
        if not tokenizer.is_dir():
            remedy = remedy_for_missing(tokenizer, "correct the path")
            raise UserError(
                f"--tokenizer must be a folder with a tokenizer in Hugging Face format, got {tokenizer}; {remedy}"
            )
    set_up_logging(rank=0)
    device.force_cpu()
    from nemo_kto.huggingface.importing import import_checkpoint

    take_over()
    print(import_checkpoint(arguments.file, arguments.out, tokenizer=tokenizer, max_shard_bytes=_MAX_SHARD_BYTES))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nemo-kto import", description=_DESCRIPTION)
    parser.add_argument("file", metavar="FILE", type=Path, help="a .nemo archive, or a folder such as iter_0001000")
    parser.add_argument("out", metavar="OUT", type=Path, help="target folder; created if it does not exist")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER|hf:NAME",
        help="folder or hub model with the tokenizer; its config.json, if it has one, is that of the model",
    )
    return parser
