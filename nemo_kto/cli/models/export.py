"""Command `nemo-kto export`: write a checkpoint in Hugging Face format."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from nemo_kto.device import device
from nemo_kto.errors import UserError
from nemo_kto.processes import ranks
from nemo_kto.telemetry.console import set_up_logging, take_over


def main(argv: Sequence[str]) -> None:
    """Run the command; exit with status 2 and a message if the checkpoint cannot be exported."""
    description = "Write a checkpoint in Hugging Face format: configuration, tokenizer, and weights with adapters merged."
    parser = argparse.ArgumentParser(prog="nemo-kto export", description=description)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run folder for its newest complete checkpoint")
    parser.add_argument("out", type=Path, help="target folder; created if it does not exist")
    parser.add_argument("--adapter", action="store_true", help="write only the adapters, in PEFT format")
    arguments = parser.parse_args(argv)
    if not os.path.isdir(arguments.checkpoint):
        parser.error(f"CHECKPOINT must be a folder that exists, got {arguments.checkpoint}")
    set_up_logging(rank=0)
    device.force_cpu()  # export computes nothing, and a model may exceed the memory of a GPU
    try:
        from nemo_kto.run.policy import export_checkpoint

        take_over()
        export_checkpoint(arguments.checkpoint, arguments.out, adapter=arguments.adapter)
    except UserError as error:
        ranks.fail(error, world=None)
