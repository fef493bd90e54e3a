"""Import hooks for megatron-core: hide GPU packages on the CPU, disable compilation if it would fail, silence warnings.

The device of this rank is checked only when megatron-core is imported, because only then it is certain; torch is not loaded
before that either. A machine with GPUs may be set to use the CPU (``device.force_cpu``). The installed GPU packages are then
hidden from megatron-core, which would otherwise use Transformer Engine's optimizer because it can be imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import sys
import sysconfig
import types
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_kto.utils.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

# Warnings of megatron-core in every run without a GPU, where they are expected.
_EXPECTED_ON_CPU = (
    ".*Apex (is|are) not installed.*",
    ".*CUDA_DEVICE_MAX_CONNECTIONS.*",
)
# Warnings of megatron-core and torch in every run.
_EXPECTED_WARNINGS = (
    ".*full scope is deprecated.*",
    ".*torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated.*",
    ".*`load_state_dict` is deprecated and will be removed.*",
    ".*we are deprecating ShardedTensor.*",
    ".*The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.*",
)

# Packages that megatron-core uses if they can be imported, and that compute only on GPUs. amp_C is a part of apex.
_GPU_PACKAGES = ("transformer_engine", "apex", "amp_C")


class _MegatronFinder(MetaPathFinder):
    """Import hook that runs before megatron-core is imported; it only finds ``megatron.core.jit``, to change its import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if name not in ("megatron.core", "megatron.core.jit"):
            return None
        from nemo_kto.device.device import on_gpu

        if name == "megatron.core":
            _silence_warnings(on_gpu())
            for package in () if on_gpu() else _GPU_PACKAGES:
                sys.modules[package] = None  # type: ignore[assignment]  # makes Python raise ImportError for the package
            if on_gpu() and missing_for_compiling():
                _disable_compiling()
            return None
        return None if on_gpu() and not missing_for_compiling() else _uncompiled(name, path)


def missing_for_compiling() -> list[str]:
    """Return the missing requirements for compiling for a GPU, each with its package; empty if none is missing.

    torch.compile generates Triton kernels, and Triton builds their launchers with a C compiler and Python's headers. It
    looks for these in the first step (triton/runtime/build.py), where their absence would end the run.
    """
    compiler = os.environ.get("CC")
    found = {
        "triton (pip install triton)": importlib.util.find_spec("triton"),
        "a C compiler (gcc)": shutil.which(compiler) if compiler else shutil.which("gcc") or shutil.which("clang"),
        f"Python.h (python{sys.version_info.major}.{sys.version_info.minor}-dev)": _python_header().exists(),
    }
    return [name for name, place in found.items() if not place]


def _python_header() -> Path:
    """Return the path of Python.h where Triton looks for it.

    Debian's default scheme "posix_local" is for packages that the user installs and has no headers.
    """
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"], "Python.h")


def _disable_compiling() -> None:
    """Make torch.compile return all functions unchanged, and stop torch from using Triton kernels itself.

    torch 2.13 uses Triton kernels for some of its own operations if Triton can be imported: outer products in ``bmm``.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    with contextlib.suppress(ImportError):  # older versions have no such kernels
        from torch._native import triton_utils

        triton_utils.deregister_op_overrides()


def define_missing_names() -> None:
    """Define the name that megatron-core 0.16.1 uses without importing it if Transformer Engine is absent, on any device."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def keep_norm_on_device() -> None:
    """Make megatron-core, up to 0.19.2, compute the norm of the gradient on the device if it has no kernel for it.

    Without Transformer Engine and apex it copies the norm of each parameter to the host, which waits for each of them.
    """
    from megatron.core.optimizer import clip_grads

    if getattr(clip_grads.l2_norm_impl, "__name__", "") == "local_multi_tensor_l2_norm":
        clip_grads.l2_norm_impl = _l2_norm


def _l2_norm(
    chunk_size: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], per_item: bool
) -> tuple[torch.Tensor, None]:
    """Return the norm of all tensors of all lists together, [1] fp32; replaces amp_C.multi_tensor_l2norm."""
    norm = torch.nn.utils.get_total_norm(tensor for tensors in lists for tensor in tensors)
    return norm.float().view(1).to(flag.device), None


def prepare_imports() -> None:
    """Install the import hook that adapts megatron-core to the device; call before megatron-core is imported.

    On the CPU, megatron-core is imported as if no GPU packages were installed, and its small fused functions are not
    compiled: that would need a C++ compiler and take seconds in every process without a benefit. They are not compiled on a
    GPU either if that would fail, see :func:`missing_for_compiling`. Expected warnings are suppressed.
    """
    sys.meta_path.insert(0, _MegatronFinder())


def _silence_warnings(gpu: bool) -> None:
    for message in (*_EXPECTED_WARNINGS, *(() if gpu else _EXPECTED_ON_CPU)):
        warnings.filterwarnings("ignore", message=message)
    if not gpu:  # megatron-core's "GPU generator" is then the CPU generator, so its warning of a change does not apply
        random = logging.getLogger("megatron.core.tensor_parallel.random")
        random.addFilter(lambda record: "CPU RNG" not in record.getMessage())
    for name in ("megatron.core.rerun_state_machine", "megatron.core.optimizer_param_scheduler"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _uncompiled(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    spec = PathFinder.find_spec(name, path)
    if spec is None or spec.loader is None:
        return None
    execute = spec.loader.exec_module

    def execute_and_switch(module: types.ModuleType) -> None:
        execute(module)
        module.disable_jit_fuser()  # megatron-core's own switch

    spec.loader.exec_module = execute_and_switch  # type: ignore[method-assign]
    return spec
