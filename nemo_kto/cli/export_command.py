"""Commands `nemo-kto export` and `nemo-kto import`: checkpoints of ours, and of other programs, in Hugging Face format."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from nemo_kto.device import device
from nemo_kto.errors import UserError
from nemo_kto.model_files.adapter_files import is_our_adapter
from nemo_kto.model_files.checkpoint_files import is_checkpoint
from nemo_kto.model_files.hub import HUB, Repository, Upload, is_hub_name, local_folder, pin
from nemo_kto.model_files.model_folders import remedy_for_missing
from nemo_kto.model_files.safetensors_files import is_our_model
from nemo_kto.processes import ranks
from nemo_kto.telemetry.console import set_up_logging, take_over
from nemo_kto.utils.text import terminal_line

_EXPORT = "Write a checkpoint in Hugging Face format: configuration, tokenizer, and weights with adapters merged."
_IMPORT = """\
Write a checkpoint of NeMo-Aligner, Megatron-LM or Megatron-Bridge as a Hugging Face folder: configuration, tokenizer and
weights. FILE: a .nemo archive, or a torch_dist checkpoint folder. Nothing in the files is executed. docs/guides/models.md
"""
_MAX_SHARD_BYTES = 5 * 10**9


def export(argv: Sequence[str]) -> None:
    """Run the command; exit with status 2 and a message if the checkpoint cannot be exported or uploaded."""
    parser = _export_parser()
    flags = parser.parse_args(argv)
    if not os.path.isdir(flags.checkpoint):
        parser.error(f"CHECKPOINT must be a folder that exists, got {terminal_line(str(flags.checkpoint))}")
    if flags.push is None and (flags.out is None or flags.private or flags.token or flags.base_model):
        parser.error("OUT must be given without --push; --private, --token and --base-model belong to --push")
    set_up_logging(rank=0)
    device.force_cpu()  # export computes nothing, and a model may exceed the memory of a GPU
    try:
        upload = None
        if flags.push is not None:
            upload = Upload(target=_target(flags.push), private=flags.private, token_variable=flags.token)
        out = flags.out or _default_folder(flags.checkpoint, adapter=flags.adapter)
        if flags.out is not None or not (is_our_adapter if flags.adapter else is_our_model)(out):
            from nemo_kto.run.policy import export_checkpoint

            take_over()
            export_checkpoint(flags.checkpoint, out, adapter=flags.adapter)
        if upload is not None:
            _send(upload, out, base_model=flags.base_model)
    except UserError as error:
        ranks.fail(error, world=None)


def _export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nemo-kto export", description=_EXPORT)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run folder for its newest complete checkpoint")
    parser.add_argument("out", type=Path, nargs="?", help="target folder; created if it does not exist")
    parser.add_argument("--adapter", action="store_true", help="write only the adapters, in PEFT format")
    push = "upload the folder to this model repository, which is created if it does not exist; without OUT, that of the run"
    parser.add_argument("--push", metavar=f"{HUB}USER/NAME[@BRANCH]", help=push)
    parser.add_argument("--private", action="store_true", help="a new repository is private")
    token = "environment variable that holds the token, instead of HF_TOKEN or that of `hf auth login`"  # nosec B105
    parser.add_argument("--token", metavar="VARIABLE", help=token)
    base = "name of the base model on the hub, if the run started from a folder"
    parser.add_argument("--base-model", metavar="ORGANISATION/NAME", help=base)
    return parser


def _target(text: str) -> Repository:
    try:
        return Repository.of(text)
    except UserError as error:
        raise UserError(f"--push {error}") from None


def _default_folder(checkpoint: Path, *, adapter: bool) -> Path:
    """Return the folder of a run's own export; that of a single checkpoint is beside it, named after its step."""
    kind = "adapter" if adapter else "hf"
    if is_checkpoint(checkpoint):
        return checkpoint.absolute().parent.parent / f"{kind}_{checkpoint.name}"
    return checkpoint / kind


def _send(upload: Upload, folder: Path, *, base_model: str | None) -> None:
    from nemo_kto.run.card import published_files

    instead = published_files(folder, repository=upload.target.name, base_model=base_model)
    print(f"uploading {folder} to {HUB}{upload.target.name}", flush=True)
    print(f"uploaded: {upload.send(folder, message='Upload with nemo-kto', instead=instead)}")


def import_model(argv: Sequence[str]) -> None:
    """Run the command; raise UserError if the checkpoint cannot be imported."""
    arguments = _import_parser().parse_args(list(argv))
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
    from nemo_kto.tools.convert.importing import import_checkpoint

    take_over()
    print(import_checkpoint(arguments.file, arguments.out, tokenizer=tokenizer, max_shard_bytes=_MAX_SHARD_BYTES))


def _import_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nemo-kto import", description=_IMPORT)
    parser.add_argument("file", metavar="FILE", type=Path, help="a .nemo archive, or a folder such as iter_0001000")
    parser.add_argument("out", metavar="OUT", type=Path, help="target folder; created if it does not exist")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER|hf:NAME",
        help="folder or hub model with the tokenizer; its config.json, if it has one, is that of the model",
    )
    return parser
