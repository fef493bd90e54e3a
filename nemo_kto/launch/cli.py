"""The commands: `nemo-kto kto`, `nemo-kto dpo`, `nemo-kto export`, and what examples/ calls.

A command line is checked as a whole before anything starts. Then it either joins the ranks it finds (torchrun, srun), or
starts its own, or runs here as the one rank there is.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from nemo_kto import __version__
from nemo_kto.data.records import DataError
from nemo_kto.launch import compose, ranks
from nemo_kto.launch.schema import ALGORITHMS, DPO, KTO, Algorithm, MachineConfig, RunConfig
from nemo_kto.launch.validate import Problem, find_problems
from nemo_kto.parallel import device

_SECONDS_TO_SPEAK = 5  # in which rank 0 says what is wrong with a command line

_USAGE = """\
nemo-kto: aligns large language models on feedback, on one processor or many GPUs

{commands}
  nemo-kto export CHECKPOINT OUT
      Write a checkpoint, or the newest one of a run folder, in Hugging Face format.

  nemo-kto --version
  nemo-kto {names} --help        all keys, with their defaults and meaning
  nemo-kto export --help
"""

_COMMAND_USAGE = """\
  nemo-kto {name} pretrained_checkpoint.restore_from_path=MODEL model.data.data_prefix=DATA [KEY=VALUE ...]
      {title}. MODEL: a Hugging Face folder.
      DATA: {rows}.
      The aligned model is in results/{config_name}/hf afterwards, in Hugging Face format.
"""

_TRAINING_USAGE = """\
{title}

  {program} pretrained_checkpoint.restore_from_path=MODEL model.data.data_prefix=DATA [KEY=VALUE ...]

  Four ranks on this machine:       trainer.devices=4
  Ranks that are there already:     torchrun --nproc-per-node 4 -m nemo_kto.launch.cli {name} ..., or srun
  No GPU:                           hardware=cpu
  See what would be run:            --cfg job
  Several runs, one for each value: --multirun model.optim.lr=1e-6,3e-6
  A file of your own:               --config-dir FOLDER --config-name FILE

Keys and their defaults:

{keys}
"""


def main(argv: Sequence[str] | None = None) -> None:
    """The command `nemo-kto`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ALGORITHMS:
        train(ALGORITHMS[command], arguments[1:])
    elif command == "export":
        _export(arguments[1:])
    elif command == "--version":
        print(f"nemo-kto {__version__}")
    elif command in ("--help", "-h", "help"):
        print(_usage(), end="")
    else:
        known = f"{', '.join(ALGORITHMS)} or export"
        print(f"nemo-kto: the command must be {known}, got {command}\n\n{_usage()}", end="", file=sys.stderr)
        sys.exit(ranks.USAGE_ERROR)


def main_kto() -> None:
    """What examples/nlp/gpt/train_gpt_kto.py runs."""
    train(KTO, sys.argv[1:])


def main_dpo() -> None:
    """What examples/nlp/gpt/train_gpt_dpo.py runs."""
    train(DPO, sys.argv[1:])


def _usage() -> str:
    commands = [
        _COMMAND_USAGE.format(
            name=algorithm.name, title=algorithm.title, rows=algorithm.rows, config_name=algorithm.config_name
        )
        for algorithm in ALGORITHMS.values()
    ]
    return _USAGE.format(commands="\n".join(commands), names="|".join(ALGORITHMS))


def _export(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="nemo-kto export",
        description="Write a checkpoint in Hugging Face format: configuration, tokenizer, and weights with adapters merged.",
    )
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run folder, whose newest complete one is taken")
    parser.add_argument("out", type=Path, help="folder to write to; made if absent")
    parser.add_argument("--adapter", action="store_true", help="write the adapters alone, in PEFT format")
    arguments = parser.parse_args(argv)
    if not arguments.checkpoint.is_dir():
        parser.error(f"CHECKPOINT must be a folder that exists, got {arguments.checkpoint}")
    from nemo_kto.launch.build_policy import export_checkpoint

    try:
        export_checkpoint(arguments.checkpoint, arguments.out, adapter=arguments.adapter)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))


def train(algorithm: Algorithm, argv: Sequence[str]) -> None:
    """Training from overrides: what `nemo-kto ALGORITHM` runs.

    Args:
        algorithm: which one.
        argv: overrides and Hydra's flags.
    """
    ranks.end_with_launcher()
    world = ranks.find()
    flags = get_args_parser().parse_intermixed_args(list(argv))  # flags may stand among the overrides
    if flags.help:
        from nemo_kto.launch.keys import as_text

        program = f"python {sys.argv[0]}" if _own_script() else f"nemo-kto {algorithm.name}"
        usage = {"title": algorithm.title, "name": algorithm.name, "program": program}
        print(_TRAINING_USAGE.format(**usage, keys=as_text(algorithm)), end="")
        return
    source = compose.Source(flags.config_name or algorithm.config_name, flags.config_path, flags.config_dir)
    if not (flags.hydra_help or flags.info or flags.shell_completion):
        _check(flags, algorithm, source, world)
    compose.register()
    # Hydra reads the command line itself, and only understands flags before overrides.
    sys.argv = [sys.argv[0], *[part for part in argv if part not in flags.overrides], *flags.overrides]
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    job = hydra.main(version_base="1.3", config_path=compose.config_path(), config_name=algorithm.config_name)
    job(lambda config: _run(config, source=source, world=world))()


def _check(flags: argparse.Namespace, algorithm: Algorithm, source: compose.Source, world: ranks.World | None) -> None:
    """List every mistake of the command line and exit; in a sweep, each job is checked for itself beyond the overrides."""
    try:
        config, mistakes = compose.check_overrides(flags.overrides, source=source, sweep=flags.multirun)
        found = compose.algorithm_of(config)
    except (HydraException, OmegaConfBaseException) as error:
        _refuse([Problem(f"{source.config_name}.yaml", f"does not compose: {compose.reason(error)}")], world)
    if found is not algorithm:
        text = f"must be a configuration for {algorithm.name}, got one for {found.name}; run `nemo-kto {found.name}`"
        _refuse([Problem(f"{source.config_name}.yaml", text)], world)
    if not (flags.multirun or flags.cfg):
        wrong = {mistake.key for mistake in mistakes}
        further = _problems(config, world)[1]
        mistakes += [problem for problem in further if wrong.isdisjoint({problem.key, *problem.reads})]
    if mistakes:
        _refuse(mistakes, world)


def _problems(config: DictConfig, world: ranks.World | None) -> tuple[RunConfig | None, list[Problem]]:
    """The typed configuration and what is wrong with it."""
    typed, mistakes = compose.to_config(config)
    if typed is None:
        return None, mistakes
    if typed.trainer.accelerator == "cpu":
        os.environ["NEMO_KTO_FORCE_CPU"] = "1"
    return typed, [
        *_world_problems(typed.trainer, world),
        *find_problems(typed, world_size=_world_size(typed.trainer, world)),
    ]


def _local_ranks(trainer: MachineConfig) -> int:
    """Ranks on a machine that the configuration asks for."""
    return trainer.devices if isinstance(trainer.devices, int) else device.device_count() or 1


def _world_size(trainer: MachineConfig, world: ranks.World | None) -> int:
    return world.size if world is not None else max(1, trainer.num_nodes) * max(1, _local_ranks(trainer))


def _world_problems(trainer: MachineConfig, world: ranks.World | None) -> list[Problem]:
    nodes = trainer.num_nodes
    if world is None and nodes > 1:
        remedy = "start the ranks with torchrun or srun, see examples/slurm"
        return [Problem("trainer.num_nodes", f"must be 1 where no ranks were started for it, got {nodes}; {remedy}")]
    if world is not None and trainer.devices == "auto" and world.local_size and nodes * world.local_size != world.size:
        found = world.size // world.local_size
        return [Problem("trainer.num_nodes", f"must be the number of machines that were started, {found}, got {nodes}")]
    return []


def _refuse(mistakes: Sequence[Problem], world: ranks.World | None) -> NoReturn:
    """Say what is wrong, once, and exit.

    Every rank comes to the same verdict and rank 0 speaks, except about files that only another machine lacks.
    """
    lines = list(dict.fromkeys(str(mistake) for mistake in mistakes))
    count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
    text = "\n".join([f"nemo-kto: {count} in the configuration, nothing was started", *(f"  {line}" for line in lines)])
    if world is None or world.rank == 0:
        print(text, file=sys.stderr)
    elif world.local_rank == 0 and all(mistake.about_files for mistake in mistakes):
        print(f"on {socket.gethostname()}: {text}", file=sys.stderr)
    else:
        time.sleep(_SECONDS_TO_SPEAK)  # torchrun ends rank 0 when this one is gone, and it may not have spoken yet
    sys.exit(ranks.USAGE_ERROR)


def _run(config: DictConfig, *, source: compose.Source, world: ranks.World | None) -> None:
    """One job, as Hydra hands it over."""
    hydra_config = HydraConfig.get()
    sweep = hydra_config.mode == RunMode.MULTIRUN
    if sweep:
        config.exp_manager.explicit_log_dir = hydra_config.runtime.output_dir
    typed, mistakes = _problems(config, world)
    if typed is None or mistakes:
        _refuse(mistakes, world)
    count = _local_ranks(typed.trainer)
    if world is None and count > 1:
        overrides = list(hydra_config.overrides.task)
        if sweep:
            overrides.append(f"exp_manager.explicit_log_dir='{typed.exp_manager.explicit_log_dir}'")
        ranks.start(count, [*_own_command(typed.algorithm), *_source_flags(source), *overrides])
        return
    # All that is imported stays. Collections meanwhile would look through millions of objects and find none to free: 0.6 s.
    gc.disable()
    from nemo_kto.launch import build

    gc.freeze()
    gc.enable()
    try:
        build.train(typed)
    except KeyboardInterrupt:
        ranks.end(ranks.INTERRUPTED, world=world)
    except DataError as error:  # says which rows; where in the program they were read helps nobody
        print(f"nemo-kto: {error}", file=sys.stderr)
        ranks.end(ranks.USAGE_ERROR, world=world)
    except Exception as error:
        ranks.fail(error, world=world)


def _own_command(algorithm: Algorithm) -> list[str]:
    """What the interpreter must be given to come here again: the script that was called, or this module."""
    script = _own_script()
    return ["-u", str(script)] if script else ["-u", "-m", "nemo_kto.launch.cli", algorithm.name]


def _own_script() -> Path | None:
    """The script that was called, such as one of examples/, which stands for its algorithm; None for a command."""
    script = Path(sys.argv[0]).resolve()
    return script if script.suffix == ".py" and script != Path(__file__).resolve() else None


def _source_flags(source: compose.Source) -> list[str]:
    return [
        part
        for name, value in source._asdict().items()
        if value is not None
        for part in (f"--{name.replace('_', '-')}", value)
    ]


if __name__ == "__main__":
    main()
