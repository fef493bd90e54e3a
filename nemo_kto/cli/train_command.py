"""The training commands: `nemo-kto NAME`, and the scripts in examples/.

A command line is checked as a whole before anything starts. A training command then joins existing ranks (torchrun, srun),
starts its own ranks, or runs in this process as the only rank.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nemo_kto.cli.command import SETTINGS, CheckedCommand, invoke, tool
from nemo_kto.errors import UserError
from nemo_kto.processes import ranks, signals
from nemo_kto.telemetry import console

# Modules that compose a configuration import Hydra, which the help of the other commands does not need.
if TYPE_CHECKING:
    from omegaconf import DictConfig

    from nemo_kto.algorithms.recipes import Recipe
    from nemo_kto.cli.job import Job
    from nemo_kto.config.compose import Source

# Hydra's flags. hydra.main composes twice, so command lines without the modes of Hydra bypass it.
_SOURCE = ("--config-path -cp", "--config-name -cn", "--config-dir -cd")
_SWITCHES = ("--hydra-help", "--resolve", "--run -r", "--multirun -m", "--shell-completion -sc")
_VALUED = ("--cfg -c", "--package -p", "--experimental-rerun")
_NO_MODES = ("run", "package")

_SWEEP_REPORT = "+hydra.callbacks.nemo_kto._target_=nemo_kto.cli.sweep.SweepReport"

_USAGE = """\
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

{keys}"""

_EXAMPLE = """\
MODEL and DATA must be given, got none; an example, in a clone of the repository:
  nemo-kto data check {recipe.example}
  nemo-kto {recipe.name} hf:HuggingFaceTB/SmolLM2-135M-Instruct {recipe.example} template=true batch=8 steps=12 lr=2e-5
  nemo-kto chat results/{recipe.config_name} --against"""


class TrainingCommand(CheckedCommand):
    """The command of one algorithm: Hydra's flags, mixed with MODEL, DATA and overrides."""

    def __init__(self, *, recipe: Recipe) -> None:
        self._recipe = recipe
        parameters: list[click.Parameter] = [click.Option(names.split()) for names in (*_SOURCE, *_VALUED)]
        parameters += [click.Option(names.split(), is_flag=True) for names in _SWITCHES]
        parameters.append(click.Option(["--info", "-i"], is_flag=False, flag_value="all"))
        parameters.append(click.Argument(["words"], nargs=-1, metavar="MODEL DATA KEY=VALUE"))
        super().__init__(recipe.name, callback=partial(_train, recipe), params=parameters, context_settings=SETTINGS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse Hydra's flags and the words; options of other trainers are set aside as ``others``."""
        known = {name for parameter in self.get_params(ctx) for name in parameter.opts if name.startswith("--")}
        words, others = _other_options(args, known)
        rest = super().parse_args(ctx, words)
        ctx.params["others"] = others
        return rest

    def get_help(self, ctx: click.Context) -> str:
        """Return the usage and all keys with their defaults."""
        from nemo_kto.config.checker import SHORT
        from nemo_kto.config.keys import as_text

        short = ", ".join(f"{word}=" for word in SHORT)
        keys = as_text(self._recipe).rstrip("\n")
        return _USAGE.format(recipe=self._recipe, program=ctx.command_path, short=short, keys=keys)


def train(recipe: Recipe, argv: Sequence[str] | None = None) -> None:
    """Train in a script, such as those in examples/; ``argv`` contains positions, overrides and Hydra's flags."""
    console.protect()
    program = f"python {sys.argv[0]}" if Path(sys.argv[0]).suffix == ".py" else f"nemo-kto {recipe.name}"
    try:
        invoke(TrainingCommand(recipe=recipe), sys.argv[1:] if argv is None else argv, program=program)
    except UserError as error:
        ranks.fail(error, world=None)


def _train(
    recipe: Recipe,
    *,
    words: Sequence[str],
    others: Sequence[str],
    config_path: str | None,
    config_name: str | None,
    config_dir: str | None,
    **modes: Any,
) -> None:
    from nemo_kto.cli.job import Job, refuse_mistakes
    from nemo_kto.config import compose
    from nemo_kto.config.checker import read_positions

    world = _join_ranks()
    if world is None and not (words or others or config_path or config_name or config_dir or any(modes.values())):
        raise UserError(_EXAMPLE.format(recipe=recipe))
    source = compose.Source(config_name=config_name or recipe.config_name, config_path=config_path, config_dir=config_dir)
    if source == (ours := compose.our_source(recipe)):
        source = ours  # which the process may have composed already
    given, misplaced = read_positions(words, recipe)
    elsewhere = any(text.startswith("hydra/launcher=") for text in given)
    job, sweep = Job(recipe=recipe, source=source, world=world, elsewhere=elsewhere), modes["multirun"]
    if others:
        tool("translate.translate_command").refuse_options(job, others, words)
    if misplaced:
        refuse_mistakes(job.checker(sweep=sweep).errors(words), world)
    try:
        own_file = source.own_file
        own_text = "" if own_file is None else own_file.read_text(encoding="utf-8", errors="replace")
        config = None if _needs_hydra(own_text, given, modes) else compose.load(given, source=source)
    except (*compose.WRONG, ValueError) as error:  # ValueError: raised where Hydra splits an override before parsing it
        job.refuse(given, error, sweep=sweep)
    if config is not None:
        job.run(config, given)
        return
    # A file without defaults lacks our logging settings for Hydra, so that Hydra would write logs before any check.
    without_defaults = own_file is not None and "defaults:" not in own_text
    if (sweep or without_defaults) and (mistakes := job.checker(sweep=True).errors(given)):
        refuse_mistakes(mistakes, world)
    _set_hydra_arguments(source, given, modes)
    _run_hydra(job, given, sweep=sweep)


def _join_ranks() -> ranks.World | None:
    """Return the ranks that this process belongs to, None without a launcher, and show the logs of its rank."""
    try:
        ranks.end_with_launcher()
        world = ranks.detect_world()
        ranks.unpack_objects()
    except UserError as error:
        ranks.fail(error, world=None)
    console.set_up_logging(rank=0 if world is None else world.rank)
    return world


def _needs_hydra(own_text: str, given: Sequence[str], modes: Mapping[str, Any]) -> bool:
    """Return whether flags, overrides or the user's file are about Hydra: hydra.mode=MULTIRUN, ${hydra:job.num}."""
    return "hydra" in " ".join([own_text, *given]) or any(modes[name] for name in modes if name not in _NO_MODES)


def _set_hydra_arguments(source: Source, given: Sequence[str], modes: Mapping[str, Any]) -> None:
    """Write sys.argv as hydra.main parses it, which accepts flags only before overrides."""
    from nemo_kto.config.migration import forced

    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in modes.items() if value
    ]
    report = [_SWEEP_REPORT] if modes["multirun"] else []
    sys.argv = [sys.argv[0], *flags, *source.adopted.flags(), *map(forced, given), *report]


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


def _other_options(argv: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Separate the ``known`` options and words from options of other trainers, which are returned as --NAME=VALUE."""
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
