"""End of a run: export the model and print the summary."""

from __future__ import annotations

import logging
from pathlib import Path

from nemo_kto.algorithms.dpo import DPOTrainer
from nemo_kto.algorithms.duration import TrainerConfig
from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.artifacts.adapter_files import is_our_adapter
from nemo_kto.artifacts.checkpoint_files import CHECKPOINTS, Checkpoint, config_folder
from nemo_kto.artifacts.safetensors_files import is_our_model
from nemo_kto.checkpoint.discovery import best_checkpoint
from nemo_kto.checkpoint.manager import load_weights_only
from nemo_kto.config.schema import RunConfig
from nemo_kto.device.dtypes import DTYPES
from nemo_kto.distributed import state
from nemo_kto.errors import UserError
from nemo_kto.huggingface.folders import check_target
from nemo_kto.huggingface.huggingface import export_bytes
from nemo_kto.run.data import RunData
from nemo_kto.run.policy import Policy, export_policy
from nemo_kto.run.summary import print_end

logger = logging.getLogger(__name__)


def check_export(cfg: RunConfig, data: RunData) -> None:
    """Check before training that the model can be exported; collective.

    The target folders must be writable, and export.which=best needs validation rows.

    Raises:
        UserError: there are no validation rows, or a folder cannot be written or has too little free space.
    """
    if cfg.export.enabled:
        state.on_rank_zero(lambda: _check_targets(cfg), "{}")
    if cfg.export.enabled and cfg.export.which == "best" and not data.validation:
        text = f"must leave rows for validation with export.which=best, got none from {cfg.model.data.splits_string}"
        raise UserError(f'model.data.splits_string {text}; e.g. "90,10", or set export.which=last')


def _check_targets(cfg: RunConfig) -> None:
    source = config_folder(Path(cfg.pretrained_checkpoint.restore_from_path))
    architecture = read_architecture(source, tensor_parallel=1)
    targets = [("export.path", cfg.export.path, is_our_model, export_bytes(architecture, DTYPES[cfg.trainer.precision]))]
    if cfg.model.peft.peft_scheme != "none":
        targets.append(("export.adapter_path", cfg.export.adapter_path, is_our_adapter, 0))  # adapters are small
    for key, path, is_ours, need in targets:
        try:
            check_target(Path(path), is_ours=is_ours, need=need)
        except UserError as error:
            raise UserError(f"{key} cannot be used: {error}, or set export.enabled=false") from error


def finish(cfg: RunConfig, policy: Policy, trainer: DPOTrainer, length: TrainerConfig, *, seconds: float) -> None:
    """Export the configured model and print the summary of the run; collective.

    Args:
        cfg: configuration of the run.
        policy: the trained policy.
        trainer: the trainer after its last step.
        length: configured run length.
        seconds: wall-clock time of training.
    """
    ranking = cfg.exp_manager.checkpoint_callback_params
    folder = Path(cfg.exp_manager.explicit_log_dir) / CHECKPOINTS
    best = best_checkpoint(folder, monitor=ranking.monitor, mode=ranking.mode)
    if cfg.export.enabled:
        _export(cfg, policy, best)
    print_end(cfg, policy, trainer, length, best=best, seconds=seconds)


def _export(cfg: RunConfig, policy: Policy, best: Checkpoint | None) -> None:
    """Export the policy; export.which=best first replaces its weights by those of the best checkpoint, if there is one."""
    if cfg.export.which == "best" and best is not None:
        load_weights_only(best.folder, policy.chunks)
    elif cfg.export.which == "best" and state.is_rank_zero():
        monitor = cfg.exp_manager.checkpoint_callback_params.monitor
        logger.warning(f"no checkpoint has {monitor}, so that none is the best; the model after the last step is exported")
    out, adapter_out = Path(cfg.export.path), Path(cfg.export.adapter_path)
    later = f"the checkpoints are complete: `nemo-kto export {cfg.exp_manager.explicit_log_dir} OUT` writes the model later"
    try:
        export_policy(policy, out=out, adapter_out=adapter_out, max_shard_size_gb=cfg.export.max_shard_size_gb)
    except UserError as error:
        raise UserError(f"{error}; {later}") from error
    except RuntimeError as error:
        raise RuntimeError(f"{error}; {later}") from error
