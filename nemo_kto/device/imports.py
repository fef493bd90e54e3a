"""How megatron-core is imported: without the packages for GPUs where the CPU is used, and without the warnings of every run.

What this rank uses is known for sure only when megatron-core is imported, so that is when it is looked at; until then torch
is not loaded either. A machine with GPUs may be asked for the CPU (``device.force_cpu``): the packages for GPUs that are
installed there are then kept from megatron-core, which would take Transformer Engine's optimizer because it can be imported.
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

# What megatron-core says of every run without a GPU: there it is no news.
_EXPECTED_ON_CPU = (
    ".*Apex (is|are) not installed.*",
    ".*CUDA_DEVICE_MAX_CONNECTIONS.*",
)
# What megatron-core and torch say of every run.
_EXPECTED_WARNINGS = (
    ".*full scope is deprecated.*",
    ".*torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated.*",
    ".*`load_state_dict` is deprecated and will be removed.*",
    ".*we are deprecating ShardedTensor.*",
    ".*The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.*",
)

# Of what megatron-core takes where it can be imported, that which computes on GPUs only. amp_C is a part of apex.
_GPU_PACKAGES = ("transformer_engine", "apex", "amp_C")


class _MegatronFinder(MetaPathFinder):
    """Comes before the finder that finds megatron-core, and finds nothing itself but the module whose import it changes."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if name not in ("megatron.core", "megatron.core.jit"):
            return None
        from nemo_kto.device.device import on_gpu

        if name == "megatron.core":
            _silence_warnings(on_gpu())
            for package in () if on_gpu() else _GPU_PACKAGES:
                sys.modules[package] = None  # type: ignore[assignment]  # Python's own mark of what cannot be imported
            if on_gpu() and missing_for_compiling():
                _disable_compiling()
            return None
        return None if on_gpu() and not missing_for_compiling() else _uncompiled(name, path)


def missing_for_compiling() -> list[str]:
    """What this machine lacks to compile for a GPU, each with its package; empty where it can.

    torch.compile writes kernels for Triton, which builds the code that starts them with a C compiler and Python's headers.
    It looks for them in the first step (triton/runtime/build.py), where their absence would end the run.
    """
    compiler = os.environ.get("CC")
    found = {
        "triton (pip install triton)": importlib.util.find_spec("triton"),
        "a C compiler (gcc)": shutil.which(compiler) if compiler else shutil.which("gcc") or shutil.which("clang"),
        f"Python.h (python{sys.version_info.major}.{sys.version_info.minor}-dev)": _python_header().exists(),
    }
    return [name for name, place in found.items() if not place]


def _python_header() -> Path:
    """Where Triton looks for it: Debian's own scheme has packages of the user's in it, and no headers."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"], "Python.h")


def _disable_compiling() -> None:
    """Have torch.compile give functions back as they are, whosever they are, and leave out Triton.

    torch 2.13 takes kernels in Triton for some of its own operations where it can be imported: outer products in ``bmm``.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    with contextlib.suppress(ImportError):  # older ones have none
        from torch._native import triton_utils

        triton_utils.deregister_op_overrides()


def define_missing_names() -> None:
    """Define what megatron-core 0.16.1 uses without having imported it where Transformer Engine is absent, on any device."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def keep_norm_on_device() -> None:
    """Have megatron-core, up to 0.19.2, find the norm of the gradient on the device where it has no kernel for it.

    Without Transformer Engine and apex it fetches that of each parameter, and the host waits for each.
    """
    from megatron.core.optimizer import clip_grads

    if getattr(clip_grads.l2_norm_impl, "__name__", "") == "local_multi_tensor_l2_norm":
        clip_grads.l2_norm_impl = _l2_norm


def _l2_norm(
    chunk_size: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], of_each: bool
) -> tuple[torch.Tensor, None]:
    """Takes the place of amp_C.multi_tensor_l2norm: the norm of all tensors of all lists together, [1] fp32."""
    norm = torch.nn.utils.get_total_norm(tensor for tensors in lists for tensor in tensors)
    return norm.float().view(1).to(flag.device), None


def prepare_imports() -> None:
    """Have megatron-core imported, where there is no GPU to use, as it is where it has none of the packages for GPUs.

    For before it is imported. Its small fusions, which its import decorates, are not compiled then: on the CPU that would
    cost a C++ compiler, and seconds in every process, for nothing. Nor are they on a GPU where that would fail, see
    :func:`missing_for_compiling`. Expected warnings are kept off the terminal.
    """
    sys.meta_path.insert(0, _MegatronFinder())


def _silence_warnings(gpu: bool) -> None:
    for message in (*_EXPECTED_WARNINGS, *(() if gpu else _EXPECTED_ON_CPU)):
        warnings.filterwarnings("ignore", message=message)
    if not gpu:  # there megatron-core's "GPU generator" is the CPU generator, so that it moves is no accident
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
