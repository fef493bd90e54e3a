"""Command `nemo-kto export`: a checkpoint of a run in Hugging Face format, in a folder or on the hub."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import click

from nemo_kto.cli.command import File, Reader, command, integer_from
from nemo_kto.config.saved_config import CONFIG_FILE, read_saved
from nemo_kto.device import device
from nemo_kto.errors import UserError
from nemo_kto.model_files.adapter_files import is_our_adapter
from nemo_kto.model_files.checkpoint_files import CHECKPOINTS, best_of, find_checkpoints, is_checkpoint
from nemo_kto.model_files.hub import HUB, Repository, Upload
from nemo_kto.model_files.safetensors_files import is_our_model
from nemo_kto.telemetry.console import take_over
from nemo_kto.utils.text import terminal_line

_DESCRIPTION = "Write a checkpoint in Hugging Face format: configuration, tokenizer, and weights with adapters merged."
_PUSH = "upload the folder to this model repository, which is created if it does not exist; without OUT, that of the run"
_TOKEN = "environment variable that holds the token, instead of HF_TOKEN or that of `hf auth login`"  # nosec B105
_BASE = "name of the base model on the hub, if the run started from a folder"


@command("export", _DESCRIPTION)
@click.argument("checkpoint", type=File(), help="a checkpoint, or a run folder for its newest complete checkpoint")
@click.argument("out", type=File(), required=False, help="target folder; created if it does not exist")
@click.option("--best", is_flag=True, help="of a run folder, the kept checkpoint with the best validation")
@click.option("--step", type=integer_from(1), metavar="N", help="of a run folder, the checkpoint after step N")
@click.option("--adapter", is_flag=True, help="write only the adapters, in PEFT format")
@click.option("--push", type=Reader(read=Repository.of), metavar=f"{HUB}USER/NAME[@BRANCH]", help=_PUSH)
@click.option("--private", is_flag=True, help="a new repository is private")
@click.option("--token", metavar="VARIABLE", help=_TOKEN)
@click.option("--base-model", metavar="ORGANISATION/NAME", help=_BASE)
def main(
    checkpoint: Path,
    out: Path | None,
    *,
    best: bool,
    step: int | None,
    adapter: bool,
    push: Repository | None,
    private: bool,
    token: str | None,
    base_model: str | None,
) -> None:
    """Run the command; UserError if the checkpoint cannot be exported or uploaded."""
    if not os.path.isdir(checkpoint):
        raise UserError(f"CHECKPOINT must be a folder that exists, got {terminal_line(str(checkpoint))}; correct the path")
    if best or step is not None:
        checkpoint = _chosen(checkpoint, best=best, step=step)
    if push is None and (out is None or private or token or base_model):
        raise UserError("OUT must be given without --push; --private, --token and --base-model belong to --push")
    gc.enable()
    device.force_cpu()  # export computes nothing, and a model may exceed the memory of a GPU
    upload = None if push is None else Upload(target=push, private=private, token_variable=token)
    folder = out or _default_folder(checkpoint, adapter=adapter)
    if out is not None or not (is_our_adapter if adapter else is_our_model)(folder):
        from nemo_kto.run.policy import export_checkpoint

        take_over()
        export_checkpoint(checkpoint, folder, adapter=adapter)
    if upload is not None:
        _send(upload, folder, base_model=base_model)


def _chosen(folder: Path, *, best: bool, step: int | None) -> Path:
    """Return the best checkpoint of a run by its configured metric, or that of a step; UserError if there is none."""
    kept = {each.step: each for each in find_checkpoints(folder / CHECKPOINTS)}
    steps = f"got {folder}, whose checkpoints are of steps {', '.join(map(str, kept)) or 'none'}"
    if best and step is not None:
        raise UserError(f"--best and --step must not be given together, got --step {step}; leave one out")
    if step is not None:
        if step not in kept:
            raise UserError(
                f"--step {step} must be a step of a complete checkpoint in a run folder, {steps}; use one of these"
            )
        return kept[step].folder
    section = "exp_manager.checkpoint_callback_params"
    saved = read_saved(folder / CONFIG_FILE)
    monitor = str(saved.get(f"{section}.monitor"))
    found = best_of([*kept.values()], monitor=monitor, mode=str(saved.get(f"{section}.mode")))
    if found is None:
        raise UserError(f"--best needs a run folder with a checkpoint that has {monitor}, {steps}; use --step N")
    return found.folder


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
