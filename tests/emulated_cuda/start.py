"""Starts the emulation before anything else is imported, by a .pth file of its environment."""

from __future__ import annotations

import os
import sys

from tests.emulated_cuda import libraries


def start() -> None:
    """Import torch with emulated devices.

    torch is imported at once: nemo_kto looks for a driver's files, which a machine without a GPU lacks, before it imports
    torch to look for GPUs.
    """
    if "torch" in sys.modules:  # a virtual environment may run its .pth files twice
        return
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = (
        "expandable_segments:False"  # the substitute for the driver has no virtual memory
    )
    libraries.load()
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)  # most functions of NVIDIA's libraries are missing
    import torch

    sys.setdlopenflags(flags)
    if torch.version.cuda is None:
        raise RuntimeError("the emulated device needs a torch that was built for CUDA")
    torch._C._cuda_getDeviceCount = libraries.device_count
    from tests.emulated_cuda import collectives, copies, kernels

    kernels.install()
    copies.install()
    collectives.install()
