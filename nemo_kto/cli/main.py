"""The command `nemo-kto`; entry point of examples/.

A command line is checked as a whole before anything starts. A training command then joins existing ranks (torchrun, srun),
starts its own ranks, or runs in this process as the only rank.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_kto import __version__
from nemo_kto.algorithms.recipes import RECIPES, Recipe
from nemo_kto.errors import UserError, either
from nemo_kto.processes import ranks, signals
from nemo_kto.telemetry import console
from nemo_kto.telemetry.console import set_up_logging
from nemo_kto.utils.text import print_error, terminal_line

# Only commands that compose a configuration import Hydra and the modules that need it.
if TYPE_CHECKING:
    from omegaconf import DictConfig

    from nemo_kto.cli.job import Job

# Flags that only hydra.main handles. hydra.main composes twice, so command lines without these flags bypass it.
_SWITCHES = ("--help -h", "--hydra-help", "--resolve", "--run -r", "--multirun -m", "--shell-completion -sc")
_VALUED = ("--cfg -c", "--package -p", "--experimental-rerun")
_SOURCE = ("--config-path -cp", "--config-name -cn", "--config-dir -cd")
_HYDRA_MODES = ("hydra_help", "resolve", "multirun", "shell_completion", "experimental_rerun", "cfg", "info")

_SWEEP_REPORT = "+hydra.callbacks.nemo_kto._target_=nemo_kto.cli.sweep.SweepReport"

# Command that only prints -> its module, and its function if it is not main.
_PRINTING = {
    "chat": "tools.chat.chat_command",
    "import": "cli.export_command:import_model",
    "plan": "tools.plan.plan_command",
    "translate": "tools.translate.translate_command",
    "check": "tools.plan.check_command",
    "checkpoint": "cli.checkpoint_command",
    "report": "tools.report.report_command",
    "data preview": "tools.inspect.preview_command",
    "data check": "tools.inspect.check_data_command",
    "data tokenise": "tools.inspect.preview_command:tokenise",
    "sample": "tools.rounds.sample_command",
    "label": "tools.rounds.label_command",
    "compare": "tools.rounds.compare_command",
}

_USAGE = """\
nemo-kto: alignment training of large language models on human feedback, on one CPU or many GPUs

{commands}
  nemo-kto export CHECKPOINT OUT
      Write a checkpoint, or the newest one of a run folder, in Hugging Face format.

  nemo-kto export CHECKPOINT [OUT] --push hf:USER/NAME
      Publish it on the Hugging Face hub, with its model card.

  nemo-kto chat RUN|MODEL [--against BASE] [-p PROMPT ...] [--collect FILE]
      Talk with a trained model, and compare it with the one that the run started from.

  nemo-kto sample RUN|MODEL PROMPTS --out ANSWERS [-n N] [--endpoint URL]
      Write answers of a model to the prompts of a file.

  nemo-kto label ANSWERS --out ROWS [--pairs] [--page | --score MODULE.FUNCTION | --judge URL --rubric FILE]
      Label answers, by hand, by a function or by a model; the labels are rows for training.

  nemo-kto compare MODEL BASE PROMPTS --out FILE (--score MODULE.FUNCTION | --judge URL --rubric FILE | --reward-model MODEL)
      Win rate of a model against another one, with its interval, and at equal lengths of their answers.

  nemo-kto import FILE OUT [--tokenizer FOLDER|hf:NAME]
      Write a .nemo archive, or a torch_dist checkpoint of Megatron-LM or Megatron-Bridge, in Hugging Face format.

  nemo-kto plan {names} MODEL [DATA] [KEY=VALUE ...] [--gpus N] [--memory GB]
      Estimate the memory and speed of a run, and find the layouts that fit; nothing is loaded.

  nemo-kto check {names} MODEL DATA [KEY=VALUE ...] [--nodes N --gpus-per-node N [--gpu KIND]]
      Check every key, file and row of a run, and plan it, on a machine without its GPUs; the rows are tokenised.

  nemo-kto translate FILE
      Print the command for a configuration of TRL or ms-swift.

  nemo-kto data preview FILE --model MODEL
      Show the first rows of a data file as the model sees them.

  nemo-kto report RUN [RUN ...] [--out FILE]
      Write a page about a run, or a comparison of several: figures, curves, answers, data, and advice with its reasons.

  nemo-kto checkpoint ls RUN
  nemo-kto checkpoint verify RUN|CHECKPOINT
      List the checkpoints of a run; compare every file with its hash.

  nemo-kto data check FILE ... [--model MODEL] [--seq-length N]
      Report statistics of data files: balance, lengths, duplicates, contradictions, invalid rows.

  nemo-kto data tokenise {names} MODEL DATA [KEY=VALUE ...]
      Tokenise the rows of a run in advance, with all cores of this machine.

  nemo-kto --version
  nemo-kto {names} --help        all keys, with their defaults and descriptions
  nemo-kto export --help
"""

_COMMAND_USAGE = """\
  nemo-kto {recipe.name} MODEL DATA [KEY=VALUE ...]
      {recipe.title}. MODEL: a Hugging Face folder.
      DATA: {recipe.data}.
      The aligned model is written to results/{recipe.config_name}/hf, in Hugging Face format.
"""

_TRAINING_USAGE = """\
{recipe.title} ({recipe.page})

  {program} MODEL DATA [KEY=VALUE ...]

  MODEL: pretrained_checkpoint.restore_from_path; DATA: model.data.data_prefix, a file, FILE,FILE or a folder

  Short keys:                       {short}
  Four ranks on this machine:       trainer.devices=4
  Several machines:                 torchrun --nproc-per-node 4 --no-python nemo-kto {recipe.name} ..., or srun
  No GPU:                           hardware=cpu
  The layout for model and GPUs:    recipe=auto; for well-known models with batch and learning rate: recipe=llama3_8b, ...
  Print the configuration:          --cfg job
  Several runs, one for each value: --multirun lr=1e-6,3e-6
  Your own configuration file:      --config-dir FOLDER --config-name FILE

Keys and their defaults:

{keys}
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command `nemo-kto`."""
    console.protect()
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    try:
        if command == "export":
            from nemo_kto.cli.export_command import export

            export(arguments[1:])
            return
        gc.disable()  # imports dominate the time of short commands, and imported objects are never freed
        if command in RECIPES:
            train(RECIPES[command], arguments[1:])
        else:
            with console.exit_if_output_lost():
                _print(" ".join(arguments[:2]) if command == "data" else command, arguments)
    except KeyboardInterrupt:
        ranks.exit_rank(ranks.INTERRUPTED, world=None)
    finally:
        gc.enable()


def _print(command: str, arguments: Sequence[str]) -> None:
    commands = "\n".join(_COMMAND_USAGE.format(recipe=recipe) for recipe in RECIPES.values())
    usage = _USAGE.format(commands=commands, names="|".join(RECIPES))
    if command in _PRINTING:
        if command in ("plan", "check", "data tokenise", "chat", "sample", "label", "compare"):
            set_up_logging(rank=0)
        try:
            module, _, function = _PRINTING[command].partition(":")
            run = getattr(importlib.import_module(f"nemo_kto.{module}"), function or "main")
            if (status := run(arguments[len(command.split()) :])) is not None:
                sys.exit(status)
        except UserError as error:
            print_error(f"nemo-kto {command}: {error}")
            sys.exit(ranks.USAGE_ERROR)
    elif command == "--version":
        print(f"nemo-kto {__version__}")
    elif command in ("--help", "-h", "help"):
        print(usage, end="")
    elif command in ("data --help", "data -h"):
        print("\n\n".join(part for part in usage.split("\n\n") if part.startswith("  nemo-kto data")))
    else:
        known = either([*RECIPES, "export", *_PRINTING])
        print_error(f"nemo-kto: the command must be {known}, got {terminal_line(command)}\n\n{usage.rstrip()}")
        sys.exit(ranks.USAGE_ERROR)


def train(recipe: Recipe, argv: Sequence[str] | None = None) -> None:
    """Train: `nemo-kto NAME` and the scripts in examples/; ``argv`` contains positions, overrides and Hydra's flags."""
    from nemo_kto.cli.job import Job, refuse_mistakes
    from nemo_kto.config import compose
    from nemo_kto.config.checker import SHORT, read_positions
    from nemo_kto.config.keys import as_text
    from nemo_kto.config.migration import forced

    console.protect()
    argv, others = _other_options(sys.argv[1:] if argv is None else argv)
    try:
        ranks.end_with_launcher()
        world = ranks.detect_world()
        ranks.unpack_objects()
    except UserError as error:
        ranks.fail(error, world=None)
    set_up_logging(rank=0 if world is None else world.rank)
    flags = _flags(argv)
    if flags.help:
        script = Path(sys.argv[0])  # perhaps one of examples/, which implies its algorithm
        is_script = script.suffix == ".py" and script.resolve() != Path(__file__).resolve()
        program = f"python {script}" if is_script else f"nemo-kto {recipe.name}"
        with console.exit_if_output_lost():
            short = ", ".join(f"{word}=" for word in SHORT)
            print(_TRAINING_USAGE.format(recipe=recipe, program=program, short=short, keys=as_text(recipe)), end="")
        return
    source = compose.Source(
        config_name=flags.config_name or recipe.config_name, config_path=flags.config_path, config_dir=flags.config_dir
    )
    if source == (ours := compose.our_source(recipe)):
        source = ours  # which the process may have composed already
    given, misplaced = read_positions(flags.words, recipe)
    elsewhere = any(text.startswith("hydra/launcher=") for text in given)
    job = Job(recipe=recipe, source=source, world=world, elsewhere=elsewhere)
    if others:
        from nemo_kto.tools.translate.translate_command import refuse_options

        refuse_options(job, others, flags.words)
    if misplaced:
        refuse_mistakes(job.checker(sweep=flags.multirun).errors(flags.words), world)
    try:
        own_file = source.own_file
        own_text = None if own_file is None else own_file.read_text(encoding="utf-8", errors="replace")
        # such as hydra.mode=MULTIRUN or ${hydra:job.num}
        about_hydra = "hydra" in " ".join([own_text or "", *given])
        plain = not about_hydra and not any(getattr(flags, mode) for mode in _HYDRA_MODES)
        config = compose.load(given, source=source) if plain else None
    except (*compose.WRONG, ValueError) as error:  # ValueError: raised where Hydra splits an override before parsing it
        job.refuse(given, error, sweep=flags.multirun)
    if config is not None:
        job.run(config, given)
        return
    # A file without defaults lacks our logging settings for Hydra, so that Hydra would write logs before any check.
    without_defaults = own_text is not None and "defaults:" not in own_text
    if (flags.multirun or without_defaults) and (mistakes := job.checker(sweep=True).errors(given)):
        refuse_mistakes(mistakes, world)
    # Hydra parses the command line itself and accepts flags only before overrides.
    modes = _source_parser().parse_known_args([part for part in argv if part not in flags.words])[1]
    report = [_SWEEP_REPORT] if flags.multirun else []
    sys.argv = [sys.argv[0], *modes, *source.adopted.flags(), *map(forced, given), *report]
    _run_hydra(job, given, sweep=flags.multirun)


def _run_hydra(job: Job, given: Sequence[str], *, sweep: bool) -> None:
    """Let Hydra parse sys.argv and run the job, once or, in a sweep, several times; ``given`` are the overrides in it."""
    import hydra

    from nemo_kto.config import compose

    began = False
    failures = list[int]()

    def run(config: DictConfig) -> int:
        nonlocal began
        began = True
        if status := job.run_in_hydra(config):
            failures.append(status)
        return status

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them
    try:
        hydra.main(version_base="1.3", config_path=compose.config_path(), config_name=job.recipe.config_name)(run)()
    except signals.Stopped:  # stopped between two jobs of a sweep
        ranks.end_early("", world=job.world)
    except (*compose.WRONG, ValueError) as error:
        if began:
            raise
        # Hydra raises a ValueError for invalid flags, an OSError for its folders
        job.refuse(given, error, sweep=sweep)
    if failures:
        ranks.exit_rank(failures[0], world=job.world)


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    """Parse Hydra's flags, which may be mixed with the words of the command line: positions and overrides."""
    parser = argparse.ArgumentParser(prog="nemo-kto", add_help=False, allow_abbrev=False, parents=[_source_parser()])
    for names in _SWITCHES:
        parser.add_argument(*names.split(), action="store_true")
    for names in _VALUED:
        parser.add_argument(*names.split())
    parser.add_argument("--info", "-i", nargs="?", const="all")
    parser.add_argument("words", nargs="*")
    return parser.parse_intermixed_args(list(argv))


def _source_parser() -> argparse.ArgumentParser:
    """Return a parser for Hydra's flags that set the location of the configuration."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in _SOURCE:
        parser.add_argument(*names.split())
    return parser


def _other_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the arguments for Hydra from options in the style of other trainers, returned as --NAME=VALUE."""
    known = {"--info", *(names.split()[0] for names in (*_SOURCE, *_SWITCHES, *_VALUED))}
    words, others = [], list[str]()
    rest = deque(argv)
    while rest:
        word = rest.popleft()
        if not word.startswith("--") or word.split("=")[0] in known:
            words.append(word)
            continue
        values = []
        while rest and "=" not in word and not rest[0].startswith("-") and "=" not in rest[0]:
            values.append(rest.popleft())
        others.append(word if "=" in word else f"{word}={' '.join(values) or 'true'}")
    return words, others


if __name__ == "__main__":
    main()
