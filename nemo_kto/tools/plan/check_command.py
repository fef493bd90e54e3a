"""Command `nemo-kto check`: all that a run checks before its first step, for the machines that it will run on.

The rows are tokenised into the cache, and weights are hashed into it, so that the ranks of the run need not wait for that.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli.command import GPU_KIND, MEMORY_OPTION, command, integer_from, is_set, run_words
from nemo_kto.cli.tokenise_command import with_all_cores
from nemo_kto.config import compose
from nemo_kto.config.checker import Checker, InvalidConfig
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.rules.layout_rules import (
    OLDEST_ENGINE,
    Computes,
    computes_here,
    model_gpu_rules,
    transformer_engine_version,
)
from nemo_kto.config.rules.training_rules import run_errors
from nemo_kto.device import device
from nemo_kto.errors import ConfigError, UserError
from nemo_kto.processes.ranks import World

if TYPE_CHECKING:
    from nemo_kto.memory.hardware import Machines
    from nemo_kto.memory.run_plan import Plan

_DESCRIPTION = """\
Check a run before it is started: every key, file and row, its folder, and its memory; no rank is started, no GPU is needed.
MODEL, DATA and KEY=VALUE: as in training. The rows are tokenised into model.data.cache_dir, where the training finds them.
Without --gpus-per-node, the machines of the run are like this one. Exit status 1 if the run does not fit, 2 for mistakes.
"""
_TITLE = "the run cannot be started"
DOES_NOT_FIT = 1  # exit status


@command("check", _DESCRIPTION)
@run_words()
@click.option("--nodes", type=integer_from(1), metavar="N", help="number of machines: trainer.num_nodes")
@click.option("--gpus-per-node", type=integer_from(1), metavar="N", help="GPUs, and ranks, of each machine: trainer.devices")
@click.option("--gpu", type=GPU_KIND, metavar="KIND", help="their kind, as for `nemo-kto plan`")
@MEMORY_OPTION
def main(
    algorithm: str,
    words: Sequence[str],
    config_name: str | None,
    config_dir: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    gpu: str | None,
    memory: float | None,
) -> int:
    """Run the command and return its exit status; raise UserError with all mistakes."""
    if gpu is not None and gpus_per_node is None:
        raise UserError(f"--gpu must be given with --gpus-per-node, got --gpu {gpu}; add --gpus-per-node 8")
    recipe, gpus = RECIPES[algorithm], gpus_per_node
    launched = {"trainer.num_nodes": nodes, "trainer.devices": gpus}
    set_twice = [key for key, value in launched.items() if value is not None and is_set(key, words)]
    overrides = [*words, *(f"{key}={value}" for key, value in launched.items() if value is not None)]
    if gpus is not None:
        device.force_cpu()  # a login node may have other GPUs
    source = compose.Source(config_name=config_name or recipe.config_name, config_dir=config_dir)
    rules = partial(_errors, elsewhere=gpus is not None, set_twice=set_twice)
    checker = Checker(recipe=recipe, source=source, rules=rules, gpus=gpus, title=_TITLE)
    find_machines = partial(_machines, gpus=gpus, gpu=gpu, memory=memory)
    if any(map(compose.is_auto, overrides)):
        from nemo_kto.tools.plan.auto import settle

        overrides, line = settle(overrides, checker, partial(find_machines, timed=False))
        print(line)
    run = checker.resolve(overrides)
    from nemo_kto.memory.run_plan import with_precision
    from nemo_kto.tools.plan.plan_text import plan_text

    run = with_all_cores(with_precision(run, on_gpu=run.gpus > 0))
    machines = find_machines(run)
    if gpus is None:
        computes = computes_here(on_gpu=run.gpus > 0)
    else:
        engine = transformer_engine_version() or OLDEST_ENGINE  # a container on those machines may have it
        computes = Computes(on_gpu=True, engine=engine, capability=machines.hardware.capability)
    if errors := list(model_gpu_rules(run, computes)):
        raise InvalidConfig(title=_TITLE, errors=errors)
    plan, lines = _prepare(run, machines)
    print(plan_text(plan, checked=lines))
    return 0 if plan.fits else DOES_NOT_FIT


def _machines(run: ResolvedRun, *, gpus: int | None, gpu: str | None, memory: float | None, timed: bool = True) -> Machines:
    """Return the machines of the options; ``timed``: with the speed of a CPU, for which the precision must not be auto."""
    from nemo_kto.memory.hardware import DEFAULT_GPU, gpus_elsewhere, these_machines

    if gpus is None:
        machines = these_machines(run, timed=timed)
    else:
        machines = gpus_elsewhere(run.world_size(), gpu or DEFAULT_GPU)
    return machines if memory is None else machines.with_memory(memory * 1e9)


def _errors(run: ResolvedRun, *, elsewhere: bool, set_twice: Sequence[str]) -> list[ConfigError]:
    """Return the errors as for ranks that a launcher has started; with ``elsewhere``, not on this machine.

    ``set_twice``: keys that both a flag and an override set.
    """
    sees_same = "SLURM_JOB_ID" not in os.environ  # with srun --gpus-per-task=1, a process sees one GPU of its machine
    world = World(rank=0, size=run.world_size(), local_rank=0, local_size=run.local_ranks, sees_same=sees_same)
    errors = run_errors(run, world=world, elsewhere=elsewhere)
    if elsewhere and run.cfg.trainer.accelerator == "cpu":
        text = "must be gpu or auto with --gpus-per-node, got cpu; leave one out, trainer.devices is the number of ranks"
        errors.append(ConfigError("trainer.accelerator", text))
    remedy = "--nodes sets trainer.num_nodes, and --gpus-per-node trainer.devices; leave one out"
    return [*errors, *(ConfigError(key, f"must not be given twice, got a flag too; {remedy}") for key in set_twice)]


def _prepare(run: ResolvedRun, machines: Machines) -> tuple[Plan, dict[str, str]]:
    """Prepare the run as its ranks do before they load the model.

    Return its plan, with the lengths of its rows and the prompts that they share, and lines about its data and its folder.
    """
    from nemo_kto.memory.micro_batches import measure
    from nemo_kto.memory.run_plan import degrees, make_plan, with_shared_prompts
    from nemo_kto.run.data import check_validation_rows, split_text
    from nemo_kto.run.disk import find_disk_need
    from nemo_kto.run.lifecycle import check_export
    from nemo_kto.run.prepare import prepare
    from nemo_kto.run.samples import samples_text
    from nemo_kto.telemetry.display import epochs

    run = run.with_model(data=run.cfg.model.data.model_copy(update={"num_workers": 0}))
    start = prepare(run, data_parallel=(0, machines.ranks // math.prod(degrees(run.cfg.model))))
    check_export(run)
    need = find_disk_need(run, start)
    check_validation_rows(run.cfg, start.data)
    batches, resumption = len(start.data.train.batch_sampler), start.resumption
    steps, splits = run.length.total_steps(batches), start.data.splits.in_use
    folder = "a new run" if resumption.resumed_step is None else f"resumes after step {resumption.resumed_step}"
    counts = splits["train"].counts
    plan = make_plan(run.with_row_tokens(counts.tokens / counts.rows), machines)
    if plan.limits.share_prompts:
        plan = with_shared_prompts(plan, measure(run, start.data.train, plan.limits))
    return replace(plan, steps=steps), {
        **{name: split_text(run.cfg.recipe.unit, examples.counts) for name, examples in splits.items()},
        "steps": f"{steps:,} ({epochs(steps, run.length.steps_per_epoch(batches))})",
        **({} if start.samples is None else {"samples": samples_text(run, start.samples, start.data.splits)}),
        "run folder": f"{run.folder} ({resumption.finished or folder})",
        "disk": need.text(),
    }
