"""A job: check its whole configuration, then train in this process or in ranks started for it."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from nemo_kto.algorithms.recipes import Recipe
from nemo_kto.cli.command import tool
from nemo_kto.config import compose
from nemo_kto.config.checker import Checker, InvalidConfig, does_not_compose
from nemo_kto.config.resolved import MODEL_KEYS, ResolvedRun, value_of
from nemo_kto.config.rules.layout_rules import check_transformer_engine
from nemo_kto.config.rules.training_rules import run_errors, unused_keys
from nemo_kto.device import device, environment
from nemo_kto.errors import ConfigError, UserError, plural
from nemo_kto.model_files.hub import is_hub_name
from nemo_kto.processes import ranks, signals
from nemo_kto.records.notification import notifying
from nemo_kto.redaction import redacted
from nemo_kto.telemetry.console import set_up_logging, take_over
from nemo_kto.utils.files import redact_file
from nemo_kto.utils.text import print_error

if TYPE_CHECKING:
    from nemo_kto.memory.run_plan import Machines
    from nemo_kto.records.run_record import RunRecord


class _Stop(SystemExit):
    """Exit after a stop signal, which ends a sweep too."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job of a command line, which runs once, or several times in a sweep."""

    recipe: Recipe
    source: compose.Source
    world: ranks.World | None  # the ranks that this process belongs to; None if none were started
    objects: Mapping[str, object] = field(default_factory=dict)  # losses and callbacks of the calling process, by name
    elsewhere: bool = False  # a Hydra launcher runs each job of a sweep in another process, on another machine

    def checker(self, *, sweep: bool) -> Checker:
        """Return the check of a command line; with ``sweep``, of all its jobs."""
        rules = partial(run_errors, world=self.world, sweep=sweep, elsewhere=self.elsewhere)
        leads = self.world is None or self.world.local_rank == 0
        return Checker(recipe=self.recipe, source=self.source, rules=rules, sweep=sweep, leads=leads)

    def settled(self, overrides: Sequence[str], *, sweep: bool = False) -> list[str]:
        """Return the overrides with a layout in the place of recipe=auto, and print it; raise InvalidConfig for mistakes."""
        if not any(map(compose.is_auto, overrides)):
            return list(overrides)
        settled, line = tool("plan.auto").settle(overrides, self.checker(sweep=sweep), self._machines)
        self._note([line])
        return list(settled)

    def _machines(self, run: ResolvedRun) -> Machines:
        """Return the machines for which recipe=auto chooses a layout, the same on all ranks."""
        from nemo_kto.memory.hardware import known_gpu, these_machines

        machines = these_machines(run, ranks=run.world_size(self.world), timed=False)
        memory = machines.hardware.memory  # drivers may report slightly different sizes to the ranks
        known = known_gpu(machines.hardware.name)
        return machines.with_memory((memory if known is None else min(known.memory, memory)) // 1e9 * 1e9)

    def refuse(self, overrides: Sequence[str], error: BaseException, *, sweep: bool) -> NoReturn:
        """Print why a command line does not compose, and exit."""
        refuse_mistakes(self.checker(sweep=sweep).errors(overrides) or [does_not_compose(error)], self.world)

    def run_in_hydra(self, config: DictConfig) -> int:
        """Run one job with the configuration from Hydra; each job of a sweep has a separate run folder.

        The next job of a sweep runs even if this one fails, unless it runs in this process, as a rank of a launcher: the
        other ranks may not have failed. Return the exit status of this one.
        """
        settings = HydraConfig.get()
        sweep = settings.mode == RunMode.MULTIRUN
        if sweep:
            redact_file(Path(settings.sweep.dir) / "multirun.yaml")  # Hydra wrote the file before the first job
            config.exp_manager.explicit_log_dir = settings.runtime.output_dir
            ranks.begin_now()
        job = self
        if self.elsewhere:
            try:
                job = replace(self, world=ranks.detect_world(), elsewhere=False)
            except UserError as error:
                ranks.fail(error, world=None)
        try:
            job.run(config, list(settings.overrides.task), sweep=sweep)
        except SystemExit as end:
            if isinstance(end, _Stop) or not sweep or job.world is not None or self.elsewhere:
                raise
            print_error(f"nemo-kto: job {settings.job.num} of the sweep failed with status {end.code}, see above")
            return int(end.code or 0)
        return 0

    def run(self, config: DictConfig, overrides: Sequence[str], *, sweep: bool = False) -> None:
        """Check ``config``, composed with ``overrides``, then train in this process or in ranks started for it."""
        try:
            config, overrides = self._with_layout(config, overrides, sweep=sweep)
            run = self.checker(sweep=sweep).resolve(overrides, config)
        except InvalidConfig as error:
            refuse_mistakes(error.errors, self.world)
        gc.enable()
        unused = list(unused_keys(run)) if sweep else []
        self._note(f"unused in this job: {mistake}" for mistake in unused)
        if run.cfg.trainer.accelerator == "cpu":
            device.force_cpu()
        if self.world is None:
            from nemo_kto.records.run_record import check_not_in_use

            try:
                check_not_in_use(run.folder)  # before the seconds that the imports of the ranks take
            except UserError as error:
                ranks.fail(error, world=None)
        leads = self.world is None or (self.world.rank == 0 and not ranks.has_launcher())
        with notifying(run.cfg.exp_manager.notify if leads else None, run.folder):
            if self.world is None and (run.local_ranks > 1 or sweep):
                own_folder = [f"exp_manager.explicit_log_dir='{run.folder}'"] if sweep else []
                self._train_in_ranks(run, [*overrides, *own_folder, *(f"{mistake.key}=null" for mistake in unused)])
            else:
                self._note(compose.notes(config))
                self._train(run)

    def _with_layout(self, config: DictConfig, overrides: Sequence[str], *, sweep: bool) -> tuple[DictConfig, Sequence[str]]:
        """Return the configuration and its overrides with a layout in the place of recipe=auto."""
        if not any(map(compose.is_auto, overrides)):
            return config, overrides
        overrides, folder = self.settled(overrides, sweep=sweep), config.exp_manager.explicit_log_dir
        config = compose.load(overrides, source=self.source)
        if sweep:  # else it may be an expression of keys that were set
            config.exp_manager.explicit_log_dir = folder
        return config, overrides

    def _note(self, texts: Iterable[str]) -> None:
        """Print notes for the user, on the first rank."""
        for text in texts if self.world is None or self.world.rank == 0 else ():
            print_error(f"nemo-kto: {text}")

    def _train_in_ranks(self, run: ResolvedRun, overrides: Sequence[str]) -> None:
        """Train in ranks that are started for it; if they fail, record it, and exit with their status."""
        from nemo_kto.processes.launcher import RanksEnded
        from nemo_kto.records.run_record import record_failure

        try:
            self.start_ranks(run, overrides)
        except UserError as error:
            ranks.fail(error, world=None)
        except RanksEnded as end:
            if end.message:
                print_error(f"nemo-kto: {end.message}")
            if end.status != signals.ENDED_EARLY:
                with contextlib.suppress(OSError):
                    record_failure(run.folder, redacted(end.message), since=ranks.started_at())
            was_stopped = end.received or end.status == signals.ENDED_EARLY
            raise (_Stop if was_stopped else SystemExit)(end.status) from None

    def start_ranks(
        self, run: ResolvedRun, overrides: Sequence[str], *, output: Callable[[str], object] | None = None
    ) -> None:
        """Start the ranks of a run of this job and wait for them; see ``launcher.spawn_ranks``.

        Each runs the command `nemo-kto NAME`, not the program of this process, which may be a script or a notebook. With -P,
        modules of the working directory, which may be the folder of an untrusted model, hide no others. An environment
        variable instead of -P would also affect programs started by a user's callbacks.
        """
        from nemo_kto.processes import launcher

        # other users see arguments, and a URL of Slack is a secret
        overrides = [word for word in overrides if not word.startswith("exp_manager.notify=")]
        models = [f"{key}='{name}'" for key in MODEL_KEYS if is_hub_name(name := str(value_of(run.cfg, key)))]
        program = ["-u", "-P", "-m", "nemo_kto.cli.main", self.recipe.name, *self.source.flags()]
        launcher.spawn_ranks(
            run.local_ranks,
            [*program, *overrides, *models],
            stop_signals=run.cfg.trainer.stop_signals,
            payload=ranks.pack_objects(self.objects),
            output=output,
        )

    def _train(self, run: ResolvedRun) -> None:
        """Train as a rank, and end it."""
        ranks.raise_open_files()
        model, trainer = run.cfg.model, run.cfg.trainer
        variables = environment.of_run(
            ranks=run.world_size(self.world),
            tensor_parallel=model.tensor_model_parallel_size,
            context_parallel=model.context_parallel_size,
            deterministic=trainer.deterministic,
        )
        environment.set_defaults(variables)  # before Transformer Engine is imported and CUDA starts
        try:
            signals.listen(trainer.stop_signals, has_launcher=ranks.has_launcher())
            train = _import_training()
            # Repeated, because each job of a sweep prints its own warnings.
            set_up_logging(rank=0 if self.world is None else self.world.rank)
            take_over()
            train(run, write_report=write_report)
        except BaseException as error:
            self._end_rank(error, requeues=trainer.requeue)
        ranks.confirm_end()

    def _end_rank(self, error: BaseException, *, requeues: bool) -> NoReturn:
        """End this rank after an error or a stop signal.

        In a rank that a launcher started, only a callback or a loss raises KeyboardInterrupt or SystemExit.
        """
        if isinstance(error, KeyboardInterrupt) and not ranks.has_launcher():
            ranks.exit_rank(ranks.INTERRUPTED, world=self.world)
        # the code that a signal interrupts may fail with another error
        stop = error if isinstance(error, signals.Stopped) else signals.raised()
        if stop is not None:
            if str(stop) and requeues and os.environ.get("RANK", "0") == "0":
                ranks.requeue(os.environ)  # with an empty message, the job was requeued when the checkpoint was saved
            ranks.end_early(str(stop), world=self.world)
        from nemo_kto.processes import watchdog

        explained = ranks.explain_open_files(error)
        with contextlib.suppress(signals.Stopped):  # sent by the launcher, because another rank has failed
            watchdog.explain(explained)
        ranks.fail(explained, world=self.world)


def _import_training() -> Callable[..., None]:
    """Import the training job, which imports torch and megatron-core.

    Imported objects are never freed. Collecting garbage during the imports would scan millions of them: 0.6 s.
    """
    gc.disable()
    check_transformer_engine()
    from nemo_kto.run.train import train

    gc.freeze()
    gc.enable()
    return train


def write_report(run: RunRecord, out: Path | None) -> Sequence[str]:
    """Write the page about a run, unless ``out`` is None, and return its findings; see ``nemo_kto.tools.report``."""
    if out is not None:
        tool("report.report_page").write_report([run], out)
    return list(tool("report.advice").finding_lines(run))


def refuse_mistakes(mistakes: Sequence[ConfigError], world: ranks.World | None, *, remedy: str = "") -> NoReturn:
    """Print the errors, once, with a remedy for all of them, and exit.

    All ranks find the same errors, and rank 0 prints them, except for files that are missing only on another machine.
    """
    lines = list(dict.fromkeys(map(str, mistakes)))
    text = "\n".join(
        [
            f"nemo-kto: {plural(len(lines), 'mistake')} in the configuration, nothing was started",
            *(f"  {line}" for line in lines),
            *([remedy] if remedy else []),
        ]
    )
    if world is None or world.rank == 0:
        print_error(text)
    elif world.local_rank == 0 and all(mistake.about_files for mistake in mistakes):
        print_error(f"on {socket.gethostname()}: {text}")
    else:
        time.sleep(ranks.PRINT_SECONDS)  # torchrun stops rank 0 when this rank exits, perhaps before it printed
    sys.exit(ranks.USAGE_ERROR)
