"""Environment variables of the libraries for GPUs: which a run sets, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from nemo_kto.device import environment

ORDERED = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
MARGINS = {"NVTE_FWD_LAYERNORM_SM_MARGIN": "16", "NVTE_BWD_LAYERNORM_SM_MARGIN": "16"}
DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "^NVLS",
}


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({}, {}),
        ({"ranks": 8}, MARGINS),
        ({"ranks": 8, "tensor_parallel": 2}, {**MARGINS, **ORDERED}),
        ({"ranks": 8, "context_parallel": 2}, {**MARGINS, **ORDERED}),
        ({"deterministic": True}, DETERMINISTIC),
        ({"ranks": 2, "tensor_parallel": 2, "deterministic": True}, {**MARGINS, **ORDERED, **DETERMINISTIC}),
    ],
)
def test_the_variables_of_a_run(run: dict[str, Any], expected: dict[str, str]) -> None:
    settings = {"ranks": 1, "tensor_parallel": 1, "context_parallel": 1, "deterministic": False, **run}
    assert environment.of_run(**settings) == expected


def test_values_of_the_user_are_kept() -> None:
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "OTHER": "1"}
    environment.set_defaults({**environment.ALWAYS, "OTHER": "2"}, given)
    assert given == {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "OTHER": "1"}
    of_torch_2_9 = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}  # the newer name, which torch reads first
    environment.set_defaults(environment.ALWAYS, of_torch_2_9)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in of_torch_2_9


def test_what_every_process_sets_is_set_before_torch_is_loaded() -> None:
    code = "import os, sys, nemo_kto.device; print(*map(os.environ.get, %r), 'torch' in sys.modules)"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTORCH", "CUDA"))}
    done = subprocess.run(
        [sys.executable, "-c", code % [*environment.ALWAYS, *ORDERED]], env=kept, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [*environment.ALWAYS.values(), "None", "False"]
