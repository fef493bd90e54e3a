"""Models that a command names: found in a folder, a run or the hub, exported from a checkpoint if necessary, and loaded."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_kto.config.saved_config import CONFIG_FILE, read_saved
from nemo_kto.data.tokens.rendering import renderer
from nemo_kto.errors import UserError
from nemo_kto.layers.layer_settings import FORMATS
from nemo_kto.model_files.adapter_files import ADAPTER_CONFIG
from nemo_kto.model_files.checkpoint_files import CHECKPOINTS, best_of, find_checkpoints, is_checkpoint
from nemo_kto.model_files.hub import HUB, is_hub_name, local_folder, pin
from nemo_kto.model_files.model_folders import is_peft_folder, is_whole_model, remedy_for_missing
from nemo_kto.model_files.safetensors_files import is_our_model
from nemo_kto.telemetry.console import take_over
from nemo_kto.tools.inference.opening import trial
from nemo_kto.utils.files import read_json
from nemo_kto.utils.text import print_error

if TYPE_CHECKING:
    from nemo_kto.tools.inference.chat_model import ChatModel
    from nemo_kto.tools.inference.reward_model import RewardModel

START = "base"  # the name of the model that a run started from


def find_model(argument: str, name: str) -> Path:
    """Return the Hugging Face or PEFT folder of a model; a checkpoint, or a run without an export, is exported first."""
    if is_hub_name(name):
        try:
            return local_folder(pin(name))
        except UserError as error:
            raise UserError(f"{argument} {error}") from None
    folder = Path(name).expanduser()
    if is_checkpoint(folder):
        return _export(folder, folder.absolute().parent.parent / f"hf_{folder.name}")
    if is_whole_model(folder) or is_peft_folder(folder):
        return folder
    config = read_saved(folder / CONFIG_FILE)
    exports, recorded = [folder / "hf"], str(config.get("exp_manager.explicit_log_dir", ""))
    if Path(recorded).resolve() == folder.resolve():  # otherwise this is a copy, and export.path is the original's
        exports.append(Path(str(config.get("export.path", ""))))
    for exported in exports:
        if is_our_model(exported):
            return exported
    if not (checkpoints := find_checkpoints(folder / CHECKPOINTS)):
        kinds = f"a run folder with a checkpoint or an export, or a model folder (with config.json or {ADAPTER_CONFIG})"
        remedy = remedy_for_missing(folder, f"correct the path, or write {HUB}ORGANISATION/NAME for a model of the hub")
        if config:
            remedy = "this run has neither yet; start its command again, until it has saved a checkpoint"
        raise UserError(f"{argument} must be {kinds}, got {name}; {remedy}")
    best = None
    if config.get("export.which") == "best":
        monitor, mode = (str(config.get(f"exp_manager.checkpoint_callback_params.{key}")) for key in ("monitor", "mode"))
        best = best_of(checkpoints, monitor=monitor, mode=mode)
    return _export((best or checkpoints[-1]).folder, folder / "hf")


def _export(checkpoint: Path, out: Path) -> Path:
    """Export a checkpoint, in a process of its own, because an export uses the CPU."""
    if is_our_model(out):
        return out
    print_error(f"nemo-kto: {checkpoint} is exported to {out} first")
    command = [sys.executable, "-P", "-m", "nemo_kto.cli.main", "export", str(checkpoint), str(out)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        raise UserError(f"{checkpoint} cannot be exported:\n{done.stderr.strip()}")
    return out


def starting_model(folder: Path) -> str:
    """Return the name of the model that a run started from, or of the base model of adapters."""
    for run in (folder, *folder.absolute().parents[:2]):
        if base := read_saved(run / CONFIG_FILE).get("pretrained_checkpoint.restore_from_path"):
            return str(base)
    if (base := base_of_adapters(folder)) is not None:
        return str(base)
    text = "must name a model if the folder of MODEL belongs to no run, whose configuration names it"
    raise UserError(f"--against {text}, got {START}; e.g. --against {HUB}ORGANISATION/NAME")


def base_of_adapters(folder: Path) -> Path | None:
    """Return the folder of the base model of adapters in PEFT format; None for a whole model."""
    if not is_peft_folder(folder):
        return None
    name = str(read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path"))
    return find_model("the base model of the adapters", name if Path(name).is_dir() else f"{HUB}{name}")


def base_format_of(folder: Path) -> str | None:
    """Return the format of the base model in the run that trained the adapters in ``folder``; None if it has none."""
    if not is_peft_folder(folder):
        return None
    value = read_saved(folder.absolute().parent / CONFIG_FILE).get("model.quantize")
    return value if value in FORMATS else None


@contextlib.contextmanager
def trials() -> Iterator[None]:
    """Start the processes that try models and render templates while this one imports libraries; end that of models."""
    with contextlib.closing(trial):
        trial.start()
        renderer.start()
        yield


def load_models(named: Mapping[str, Path]) -> list[ChatModel]:
    """Load the models in the folders that :func:`find_model` has found, by their names in the output."""
    bases = {label: base_of_adapters(folder) for label, folder in named.items()}
    gc.enable()  # `nemo-kto` disables it for commands that end soon
    with trials():
        from nemo_kto.tools.inference.chat_model import ChatModel, faster_dtype

        take_over()
        how: Any = {"dtype": faster_dtype()}
        return [
            ChatModel(label=label, folder=folder, base=bases[label], base_format=base_format_of(folder), **how)
            for label, folder in named.items()
        ]


def load_reward_model(option: str, name: str) -> RewardModel:
    """Find and load the reward model that an option names."""
    folder = find_model(option, name)
    gc.enable()
    with trials():
        from nemo_kto.tools.inference.reward_model import RewardModel

        take_over()
        try:
            return RewardModel(folder=folder)
        except UserError as error:
            raise UserError(f"{option} {error}") from None
