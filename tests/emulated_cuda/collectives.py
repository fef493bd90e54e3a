"""NCCL is emulated by gloo, which the backend "nccl" uses for device tensors only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class _GlooAsNCCL(dist.ProcessGroupGloo):
    """Constructed as ProcessGroupNCCL is."""

    Options: Any = distributed_c10d.ProcessGroupNCCL.Options  # type: ignore[assignment]

    def __init__(self, store: Any, rank: int, size: int, options: Any = None, *_: Any) -> None:
        timeout = distributed_c10d.default_pg_timeout if options is None else options._timeout
        super().__init__(store, rank, size, timeout=timeout)

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    _shutdown = abort = shutdown = eager_connect_single_device = _verify_work_timeout = _nothing


def _allreduce_coalesced(self: Any, tensors: list[torch.Tensor], options: Any) -> Any:
    """One after the other: gloo's own takes no tensors of a device."""
    works = [dist.all_reduce(tensor, options.reduceOp, group=self, async_op=True) for tensor in tensors]
    for work in works[:-1]:
        work.wait()
    return works[-1]


def install() -> None:
    """Let torch.distributed construct gloo's groups in place of NCCL's."""
    setattr(distributed_c10d, "ProcessGroupNCCL", _GlooAsNCCL)  # noqa: B010
    setattr(dist.ProcessGroup, "allreduce_coalesced", _allreduce_coalesced)  # noqa: B010
