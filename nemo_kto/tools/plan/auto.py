"""recipe=auto: the preferred layout for a model on the machines of its run, as overrides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from nemo_kto.config.checker import Checker, InvalidConfig, given_keys, read_positions
from nemo_kto.config.compose import is_auto
from nemo_kto.config.resolved import LAYOUT_SETTINGS, ResolvedRun
from nemo_kto.errors import ConfigError
from nemo_kto.memory.hardware import Machines
from nemo_kto.memory.run_plan import ROOM, Plan, make_plan, overrides, size, with_precision
from nemo_kto.tools.plan.layouts import best_layouts, find_shortage, layouts, values_of
from nemo_kto.utils.fields import echo

# Model settings that have a meaning only together: if the user has set one, all are kept.
_TOGETHER = (
    tuple(f"activations_checkpoint_{name}" for name in ("granularity", "method", "num_layers")),
    ("micro_batch_size", "micro_batch_tokens"),
)
_LR = "model.optim.lr"


def settle(words: Sequence[str], checker: Checker, machines_of: Callable[[ResolvedRun], Machines]) -> tuple[list[str], str]:
    """Return the overrides of a command line with a layout in the place of recipe=auto, and a line that shows it.

    Keys that the user has set are kept. The result depends only on the command line, its files and the machines, so that
    ranks of a launcher with the same GPUs find the same. Raises InvalidConfig for any mistake, and if no layout fits.
    """
    run = checker.resolve(words)
    given, _ = read_positions(words, checker.recipe)
    others, machines = [text for text in given if not is_auto(text)], machines_of(run)
    if not machines.on_gpu:
        hardware = [] if any(text.startswith("hardware=") for text in others) else ["hardware=cpu"]
        return [*hardware, *others], f"recipe=auto: {' '.join(hardware) or 'nothing to set'} (no GPU)"
    keys = given_keys(run.cfg, given)
    kept = {name for name in LAYOUT_SETTINGS if f"model.{name}" in keys}
    kept = kept.union(*(names for names in _TOGETHER if kept.intersection(names)))
    fixed = {name: getattr(run.cfg.model, name) for name in LAYOUT_SETTINGS if name in kept}
    start = make_plan(with_precision(run.with_model(**LAYOUT_SETTINGS), on_gpu=True), machines)
    start = replace(start, fixed=fixed)
    found = _best(start)
    if found is None:
        is_refused = not any(layouts(start)) and checker.errors(others)
        raise InvalidConfig(title=checker.title, errors=is_refused or [_nothing_fits(start)])
    layout = {name: value for name, value in values_of(found).items() if name not in fixed}
    chosen = overrides(layout).split() + ([] if _LR in keys else [f"{_LR}={echo(run.cfg.model.optim.lr)}"])
    need = f"{size(found.largest.device)} of {size(machines.hardware.memory)}"
    estimate = f"an estimated {need} on each of {machines.ranks} x {machines.hardware.name}"
    return [*chosen, *others], f"recipe=auto: {' '.join(chosen)} ({estimate})"


def _best(plan: Plan) -> Plan | None:
    """Return the preferred layout of those that leave a reserve of memory, else of all that fit; None if none does."""
    memory = plan.machines.hardware.memory
    for part in (ROOM, 1.0):
        found = best_layouts(replace(plan, machines=plan.machines.with_memory(part * memory)), 1)
        if found:
            return found[0]
    return None


def _nothing_fits(plan: Plan) -> ConfigError:
    machines, shortage, kept = plan.machines, find_shortage(plan), overrides(plan.fixed)
    got = f"{machines.ranks} x {machines.hardware.name}, {size(machines.hardware.memory)} each"
    remedies = [] if shortage.gpus is None else [f"use {shortage.gpus} of these GPUs"]
    remedies += [] if shortage.smaller is None else [f"use {overrides(shortage.changes)}"]
    remedies += [f"leave out {kept}"] if kept else []
    remedy = ", or ".join(remedies) or "use larger GPUs, or a smaller model"
    text = f"must have a layout that fits and that `nemo-kto plan` considers, but auto found none for {got}"
    return ConfigError("recipe", f"{text}; {remedy}")
