"""End of a run: export the model and print the summary."""

from __future__ import annotations

import logging
from pathlib import Path

from nemo_kto.algorithms.dpo import DPOTrainer
from nemo_kto.artifacts.adapter_files import is_our_adapter
from nemo_kto.artifacts.safetensors_files import is_our_model
from nemo_kto.checkpoint.discovery import best_checkpoint
from nemo_kto.checkpoint.manager import load_weights_only
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.huggingface.folders import check_target
from nemo_kto.huggingface.huggingface import export_bytes
from nemo_kto.run.policy import Policy, export_policy
from nemo_kto.run.summary import print_end

logger = logging.getLogger(__name__)


def check_export(run: ResolvedRun) -> None:
    """Raise UserError before training if an export folder cannot be written or has too little free space; collective."""
    export = run.cfg.export
    if not export.enabled:
        return

    def check() -> None:
        targets = [("export.path", export.path, is_our_model, export_bytes(run.architecture, run.dtype))]
        if run.has_adapters:
            targets.append(("export.adapter_path", export.adapter_path, is_our_adapter, 0))  # adapters are small
        for key, path, is_ours, need in targets:
            try:
                check_target(Path(path), is_ours=is_ours, need=need)
            except UserError as error:
                raise UserError(f"{key} cannot be used: {error}, or set export.enabled=false") from error

    state.on_rank_zero(check, "{}")


def finish(run: ResolvedRun, policy: Policy, trainer: DPOTrainer, *, seconds: float) -> None:
    """Export the configured model and print the summary of the run; collective. ``seconds``: time of training."""
    export, ranking = run.cfg.export, run.cfg.exp_manager.checkpoint_callback_params
    best = best_checkpoint(run.checkpoints, monitor=ranking.monitor, mode=ranking.mode)
    if export.enabled:
        if export.which == "best" and best is not None:
            load_weights_only(best.folder, policy.chunks)
        elif export.which == "best" and state.is_rank_zero():
            text = "no checkpoint has %s, so there is no best one; the model after the last step is exported"
            logger.warning(text, ranking.monitor)
        later = f"the checkpoints are complete: `nemo-kto export {run.folder} OUT` writes the model later"
        out, adapter_out = Path(export.path), Path(export.adapter_path)
        try:
            export_policy(policy, out=out, adapter_out=adapter_out, max_shard_size_gb=export.max_shard_size_gb)
        except UserError as error:
            raise UserError(f"{error}; {later}") from error
        except RuntimeError as error:
            raise RuntimeError(f"{error}; {later}") from error
    print_end(run, policy, trainer, best=best, seconds=seconds)
