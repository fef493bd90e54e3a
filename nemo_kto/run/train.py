"""The training job of a rank, phase by phase."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from pathlib import Path

from nemo_kto.config.resolved import LAYOUT_SETTINGS, ResolvedRun
from nemo_kto.config.schema import RunConfig
from nemo_kto.device import device
from nemo_kto.distributed import state
from nemo_kto.processes import signals, watchdog
from nemo_kto.run.build_trainer import build_trainer, check_logs
from nemo_kto.run.data import check_validation_rows
from nemo_kto.run.disk import check_shared_folder, find_disk_need
from nemo_kto.run.lifecycle import (
    ReportWriter,
    check_export,
    end_finished_run,
    export_model,
    finish,
    hold_run_folder,
    record_start,
    recording_failure,
    stop_early,
)
from nemo_kto.run.policy import build_policy, warn_of_adapters
from nemo_kto.run.prepare import agree_between_ranks, check_machines, fit_to_memory, prepare
from nemo_kto.run.summary import print_start_table
from nemo_kto.telemetry.loggers import collect_warnings


def train(run: ResolvedRun, *, write_report: ReportWriter | None = None) -> None:
    """Run the whole job on this rank: train the policy and export it.

    ``run`` must already be checked (see ``cli``). ``write_report`` writes the page about the run at its end; None for no
    page.
    """
    init_ranks(run.cfg, folder=run.folder)
    with hold_run_folder(run.folder), collect_warnings() as warnings:
        run = agree_between_ranks(run)  # final: facts that are found later have values of their own
        machines = check_machines(run)
        check_shared_folder(run.folder)

        with watchdog.phase("opening the logs"):
            check_logs(run)

        with watchdog.phase("preparing data"):
            start = prepare(run)
        if start.resumption.finished is not None:
            end_finished_run(run, start.resumption.finished, write_report=write_report)
            state.destroy()
            return
        check_export(run)
        need = find_disk_need(run, start)
        check_validation_rows(run.cfg, start.data)

        placement = fit_to_memory(run, start.data, machines)

        warn_of_adapters(run)
        with watchdog.phase("loading the model"):
            policy = build_policy(run)
        summary = print_start_table(run, policy, start, placement, disk=need.text())

        with watchdog.phase("building the trainer"):
            trainer = build_trainer(run, policy, start, placement)
        watchdog.count_steps(lambda: trainer.step)

        # Defer stop signals before the ranks synchronise: otherwise one rank could exit without saving while another is in
        # its first step.
        with signals.deferred():
            # Only after the resume checks: a configuration with which the run cannot be resumed must not replace the saved
            # one.
            begin = partial(record_start, run, start, summary=summary, trainer=trainer, warnings=warnings)
            state.on_rank_zero(begin, "the configuration could not be written: {}")
            began = time.monotonic()
            with recording_failure(run.folder, trainer):
                trainer.fit()
                if trainer.ended_early:
                    stop_early(run, trainer)
                seconds = time.monotonic() - began
                with watchdog.phase("export"):
                    best = export_model(run, policy)
                    finish(run, policy, trainer, best=best, seconds=seconds, write_report=write_report)
        state.destroy()


def init_ranks(cfg: RunConfig, *, folder: Path) -> None:
    """Initialise the device and the process groups of this rank; collective."""
    model = cfg.model
    if cfg.trainer.deterministic:
        device.use_deterministic_kernels()
    device.record_collectives(str(folder / "nccl_trace_rank_"))
    state.init_distributed(
        layout=state.Layout(
            tensor=model.tensor_model_parallel_size,
            pipeline=model.pipeline_model_parallel_size,
            context=model.context_parallel_size,
            virtual=model.virtual_pipeline_model_parallel_size,
            sequence_parallel=model.sequence_parallel,
            expert=model.expert_model_parallel_size,
            expert_tensor=model.expert_tensor_parallel_size,
            optimizer_instances=model.optim.num_distributed_optimizer_instances,
        ),
        seed=model.seed,
        timeout=timedelta(minutes=cfg.trainer.timeout_minutes),
        settings={f"model.{name}": getattr(model, name) for name in LAYOUT_SETTINGS},
    )
