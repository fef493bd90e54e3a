"""Command `nemo-kto plan`: estimate memory and speed of a run, here or on other machines; nothing is loaded or started."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial

import click

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli.command import GPU_KIND, MEMORY_OPTION, command, integer_from, is_set, run_words
from nemo_kto.config import compose
from nemo_kto.config.checker import POSITIONS, Checker, InvalidConfig, read_positions
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.rules.layout_rules import OLDEST_ENGINE, Computes, computes_here, model_gpu_rules
from nemo_kto.config.rules.training_rules import run_errors
from nemo_kto.errors import ConfigError, error_of
from nemo_kto.memory.hardware import DEFAULT_GPU, GPUS, GPUS_PER_MACHINE, Machines, gpus_elsewhere, these_machines
from nemo_kto.memory.run_plan import make_plan, overrides, with_precision
from nemo_kto.processes.ranks import World
from nemo_kto.tools.plan.auto import settle
from nemo_kto.tools.plan.layouts import Shortage, best_layouts, find_shortage, values_of
from nemo_kto.tools.plan.plan_text import plan_text, search_text, shortage_text

_MODEL, _DATA = POSITIONS.values()
_LAYOUT = tuple(f"model.{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context", "expert_model"))
_SHOWN = 5
_DESCRIPTION = """\
Estimate the memory of each rank and the speed of a run; only config.json of the model is read.
With --gpus and without a layout (recipe, or model.{tensor_model,pipeline_model,context,expert_model}_parallel_size), list
five layouts that fit, the preferred one first, or how many GPUs are missing. Without --gpus, plan for this machine. Exit
status 1 if the run does not fit.
"""
DOES_NOT_FIT = 1  # exit status


@command("plan", _DESCRIPTION)
@run_words("MODEL [DATA] KEY=VALUE")
@click.option("--gpus", type=integer_from(1), metavar="N", help="number of GPUs, on machines with eight GPUs")
@click.option(
    "--gpu",
    type=GPU_KIND,
    metavar="KIND",
    default=DEFAULT_GPU,
    help=f"their kind, with --gpus: {', '.join(GPUS)} ({DEFAULT_GPU})",
)
@MEMORY_OPTION
def main(
    algorithm: str,
    words: Sequence[str],
    config_name: str | None,
    config_dir: str | None,
    gpus: int | None,
    gpu: str,
    memory: float | None,
) -> int:
    """Run the command and return its exit status; raise UserError with all errors in the command line."""
    recipe, words = RECIPES[algorithm], list(words)
    given, _ = read_positions(words, recipe)
    searches = gpus is not None and not any(is_set(key, given) for key in (*_LAYOUT, "recipe"))
    if not is_set(_DATA, given):
        words.append(f"{_DATA}=rows.jsonl")  # required, but not read
    rules = partial(_errors, ranks=None if searches else gpus)
    source = compose.Source(config_name=config_name or recipe.config_name, config_dir=config_dir)
    title = "the run cannot be planned"
    visible = None if gpus is None else 0  # GPUs of this machine, or of no particular one
    checker = Checker(recipe=recipe, source=source, rules=rules, gpus=visible, title=title, weights=False)
    find_machines = partial(_machines, gpus=gpus, gpu=gpu, memory=memory)
    if any(map(compose.is_auto, given)):
        words, line = settle(words, checker, partial(find_machines, timed=False))
        print(line)
    run = with_precision(checker.resolve(words), on_gpu=gpus is not None)
    machines = find_machines(run)
    computes = computes_here(on_gpu=machines.on_gpu)
    if gpus is not None:  # other machines are assumed to have a sufficient Transformer Engine
        computes = Computes(on_gpu=True, engine=OLDEST_ENGINE, capability=machines.hardware.capability)
    if errors := list(model_gpu_rules(run, computes)):
        raise InvalidConfig(title=title, errors=errors)
    plan = make_plan(run, machines)
    if not searches:
        print(plan_text(plan))
        return 0 if plan.fits else DOES_NOT_FIT
    if found := best_layouts(plan, _SHOWN):
        print(search_text(plan, found))
        return 0
    shortage = find_shortage(plan)
    files = {"--config-dir": config_dir, "--config-name": config_name}
    source_options = [f"{option}={value}" for option, value in files.items() if value is not None]
    command_words = ["nemo-kto", algorithm, *source_options]
    smaller = _smaller_command(command_words, words, shortage, gpus=plan.machines.ranks)
    print(shortage_text(plan, shortage, command=smaller))
    return DOES_NOT_FIT


def _machines(run: ResolvedRun, *, gpus: int | None, gpu: str, memory: float | None, timed: bool = True) -> Machines:
    """Return the machines of the options; ``timed``: with the speed of a CPU, for which the precision must not be auto."""
    machines = these_machines(run, timed=timed) if gpus is None else gpus_elsewhere(gpus, gpu)
    return machines if memory is None else machines.with_memory(memory * 1e9)


def _smaller_command(command_words: Sequence[str], words: Sequence[str], shortage: Shortage, *, gpus: int) -> str:
    """Return the command of the smaller training that fits; ``words`` are those of the run that does not fit."""
    if shortage.smaller is None:
        return ""
    devices = max(count for count in range(1, GPUS_PER_MACHINE + 1) if gpus % count == 0)
    machines = {"trainer.num_nodes": gpus // devices} if gpus > GPUS_PER_MACHINE else {}
    machines["trainer.devices"] = devices
    layout = values_of(shortage.smaller)
    replaced = {*machines, *(f"model.{name}" for name in (*layout, *shortage.changes, "micro_batch_size"))}
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in replaced]
    settings = [f"{key}={value}" for key, value in machines.items()]
    return shlex.join([*command_words, *kept, *settings, *overrides({**shortage.changes, **layout}).split()])


def _errors(run: ResolvedRun, *, ranks: int | None) -> list[ConfigError]:
    """Return errors except those about machine, data, tokenizer and weights: run and files may be on other machines."""
    world = None if ranks is None else World(rank=0, size=ranks, local_rank=0, local_size=None)
    errors = run_errors(run, world=world, elsewhere=True)
    errors = [error for error in errors if not error.key.startswith((_DATA, "exp_manager.", "export."))]
    of_model = [error for error in errors if error.about_files and error.key == _MODEL]
    wrong = [] if error_of(lambda: run.files.config) is None else of_model[:1]  # the folder or its config.json
    return [error for error in errors if not error.about_files or error in wrong]
