"""Command `nemo-kto chat`: answers of a trained model, alone or beside those of the model that it was trained from."""

from __future__ import annotations

import contextlib
import gc
import io
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from nemo_kto.architecture.config_file import CONFIG
from nemo_kto.artifacts.adapter_files import ADAPTER_CONFIG
from nemo_kto.artifacts.checkpoint_files import CHECKPOINTS, best_of, find_checkpoints, is_checkpoint
from nemo_kto.artifacts.hub import HUB, is_hub_name, local_folder, pin
from nemo_kto.artifacts.model_folders import is_peft_folder, is_whole_model, remedy_for_missing
from nemo_kto.artifacts.safetensors_files import is_our_model
from nemo_kto.cli.command import command
from nemo_kto.config.saved_config import CONFIG_FILE, read_saved
from nemo_kto.data.tokens.template_trial import renderer
from nemo_kto.device import device
from nemo_kto.errors import UserError
from nemo_kto.processes import ranks
from nemo_kto.telemetry.console import take_over
from nemo_kto.tools.inference.opening import trial
from nemo_kto.tools.inference.row_output import open_rows
from nemo_kto.tools.inference.sampling_options import sampling_options
from nemo_kto.tools.rounds.terminal import Collector, require_terminal
from nemo_kto.utils.files import read_json
from nemo_kto.utils.text import print_error, terminal_line, terminal_text

if TYPE_CHECKING:
    from nemo_kto.tools.inference.session import ChatModel

_BASE = "base"
_STDIN = "-"
_DESCRIPTION = """\
Talk with a model: type a prompt, or give prompts with -p. The chat template and the generation settings are those of the
model's folder. Commands: /reset, /system TEXT, /help, /quit; Ctrl-C stops an answer, Ctrl-D ends.
"""
_MODEL = "a run folder, a checkpoint, a model or adapters in Hugging Face format, or hf:ORGANISATION/NAME"
_AGAINST = "also answer with this model; without BASE, with the model that the run started from"
_PROMPT = "answer this prompt and end; - reads it from stdin; each -p is a conversation of its own"
_COLLECT = "ask for a thumb after each answer, and append it to this file, as a row for training"
_LENGTH = "maximum length of an answer; by default that of the model's generation_config.json, or 512"


@command("chat", _DESCRIPTION)
@click.argument("model", metavar="RUN|MODEL", help=_MODEL)
@click.option("--against", is_flag=False, flag_value=_BASE, metavar="BASE", help=_AGAINST)
@click.option("-p", "--prompt", multiple=True, metavar="PROMPT", help=_PROMPT)
@click.option("--json", is_flag=True, help="print a line of JSON for each answer")
@click.option("--system", metavar="TEXT", help="the system message")
@click.option("--collect", metavar="FILE", help=_COLLECT)
@sampling_options(length=_LENGTH, temperature="0 takes the most probable token", seed="draw every answer with this seed")
def main(**options: Any) -> int:
    """Run the command and return its exit status; raise UserError if a model cannot be used or a prompt be answered."""
    flags = SimpleNamespace(**options)
    check_sampling(flags)
    if flags.collect is not None:
        require_terminal("--collect", remedy="leave it out, or use nemo-kto sample and nemo-kto label")
        if flags.json:
            raise UserError(
                "--collect must be used without --json, whose answers are for a program, got both; leave one out"
            )
    named = {flags.model: find_model("MODEL", flags.model)}
    if flags.against is not None:
        against = _starting_model(named[flags.model]) if flags.against == _BASE else flags.against
        if against in named:
            raise UserError(f"--against must be another model than MODEL, got {against} for both; correct one")
        named[against] = find_model("--against", against)
    if isinstance(sys.stdin, io.TextIOWrapper):  # broken text is refused with its place, as in files of rows
        sys.stdin.reconfigure(encoding=None if sys.stdin.isatty() else "utf-8-sig", errors="surrogateescape")
    prompts = [sys.stdin.read().strip() if prompt == _STDIN else prompt for prompt in flags.prompt]

    with contextlib.ExitStack() as opened:
        collect = None
        if flags.collect is not None:
            collect = Collector(file=opened.enter_context(open_rows(Path(flags.collect), option="--collect")))
        return _talk(flags, load_models(named), prompts, collect)


def _talk(flags: SimpleNamespace, models: Sequence[ChatModel], prompts: Sequence[str], collect: Collector | None) -> int:
    from nemo_kto.tools.inference.session import Sampling, Session

    sampling = Sampling(
        max_new_tokens=flags.max_new_tokens,
        temperature=flags.temperature,
        top_p=flags.top_p,
        top_k=flags.top_k,
        seed=flags.seed,
    )
    session = Session(models=models, sampling=sampling, system=flags.system, as_json=flags.json, collect=collect)
    for prompt in prompts:
        if len(prompts) > 1 and not flags.json:
            print(f"> {terminal_text(prompt)}", flush=True)
        session.reset()
        if not session.say(prompt):
            return ranks.INTERRUPTED
    if not prompts:
        if sys.stdin.isatty() and sys.stdout.isatty():
            for model in models:
                print(terminal_line(f"{model.label}: {model.describe()}"))
            print("/help lists the commands, Ctrl-D ends.")
        session.talk()
    return 0


def check_sampling(flags: SimpleNamespace) -> None:
    """Select the device of the options; UserError if they contradict each other or the machine."""
    for option, value, everything in (("--top-p", flags.top_p, 1), ("--top-k", flags.top_k, 0)):
        if flags.temperature == 0 and value not in (None, everything):
            raise UserError(f"{option} must be used with a temperature above 0, got --temperature 0; leave one out")
    if flags.device == "cpu":
        device.force_cpu()
    elif flags.device == "gpu" and not device.device_count():
        raise UserError("--device must be cpu or auto on a machine without a GPU, got gpu; leave it out")


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
        from nemo_kto.tools.inference.session import ChatModel, faster_dtype

        take_over()
        dtype = faster_dtype()
        return [ChatModel(label=label, folder=folder, base=bases[label], dtype=dtype) for label, folder in named.items()]


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
        kinds = f"a run folder with a checkpoint or an export, or a model folder (with {CONFIG} or {ADAPTER_CONFIG})"
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


def _starting_model(folder: Path) -> str:
    """Return the name of the model that a run started from, or of the base model of adapters."""
    for run in (folder, *folder.absolute().parents[:2]):
        if base := read_saved(run / CONFIG_FILE).get("pretrained_checkpoint.restore_from_path"):
            return str(base)
    if (base := base_of_adapters(folder)) is not None:
        return str(base)
    text = "must name a model if the folder of MODEL belongs to no run, whose configuration names it"
    raise UserError(f"--against {text}, got {_BASE}; e.g. --against {HUB}ORGANISATION/NAME")


def base_of_adapters(folder: Path) -> Path | None:
    """Return the folder of the base model of adapters in PEFT format; None for a whole model."""
    if not is_peft_folder(folder):
        return None
    name = str(read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path"))
    return find_model("the base model of the adapters", name if Path(name).is_dir() else f"{HUB}{name}")
