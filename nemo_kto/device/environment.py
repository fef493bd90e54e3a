"""Environment variables of CUDA, torch, Transformer Engine and NCCL, set before these read them; the user's are kept.

All that this program sets for GPUs is here, except the variables of torch's flight recorder
(``device.record_collectives``). TORCH_NCCL_AVOID_RECORD_STREAMS is not: torch does so anyway, and warns where it is set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_NEWER_NAMES = {"PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}

# For every process, set when ``nemo_kto.device`` is imported.
ALWAYS = {
    # torch counts GPUs with NVML, so that CUDA starts, and reads its variables, only after the configuration has been read
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # a block of memory grows instead of being freed for a larger one: micro-batches have different sizes
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}

# Values with which results are bitwise reproducible; the first is set, and others of the user's are refused.
DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),  # Transformer Engine reads it when a layer is built
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),  # cuBLAS reads it when CUDA starts
}

# Multiprocessors that Transformer Engine's norms leave to NCCL, which sums gradients and gathers weights at the same time.
_MARGIN = "16"


def of_run(*, ranks: int, tensor_parallel: int, context_parallel: int, deterministic: bool) -> dict[str, str]:
    """Return the variables of a run with these settings."""
    variables: dict[str, str] = {}
    if ranks > 1:
        variables |= {f"NVTE_{way}_LAYERNORM_SM_MARGIN": _MARGIN for way in ("FWD", "BWD")}
    if tensor_parallel > 1 or context_parallel > 1:
        # kernels run in the order in which they were started: communication begins before the product that it overlaps with
        variables[MAX_CONNECTIONS] = "1"
    if deterministic:
        variables |= {name: values[0] for name, values in DETERMINISTIC.items()}
        variables["NCCL_ALGO"] = "^NVLS"  # switches sum in any order
    return variables


def set_defaults(variables: Mapping[str, str], environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that are not set yet, neither under this name nor under a newer one."""
    for name, value in variables.items():
        if _NEWER_NAMES.get(name, name) not in environment:
            environment.setdefault(name, value)
