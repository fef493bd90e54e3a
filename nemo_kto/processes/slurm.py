"""Requeue the SLURM job."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Mapping

logger = logging.getLogger(__name__)

_SCONTROL_SECONDS = 60


def requeue(environ: Mapping[str, str]) -> str | None:
    """Requeue the SLURM job of this process.

    Returns:
        The job id, for an array job with its task id; None if requeueing failed, which is logged as a warning.
    """
    job = environ.get("SLURM_JOB_ID")
    if array := environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{environ.get('SLURM_ARRAY_TASK_ID')}"
    if job is None:
        logger.warning("trainer.requeue needs a SLURM job, got none (SLURM_JOB_ID is not set); nothing was requeued")
        return None
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=False)
        problem = (done.stderr.strip() or f"status {done.returncode}") if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem is not None:
        logger.warning(f"`{' '.join(command)}` failed, nothing was requeued: {problem}")
        return None
    return job
