"""Counts the bytes that a rank sends in one step, in torch's collectives."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_kto.algorithms.callbacks import Callback, Event
from nemo_kto.distributed import state

# Bytes that each of k ranks sends for a byte, by rings: of the input of a reduction, of the output of a gather.
_SENT = {
    "allreduce_": lambda k: 2 * (k - 1) / k,
    "allgather_": lambda k: (k - 1) / k,
    "_allgather_base_": lambda k: (k - 1) / k,
    "reduce_scatter_": lambda k: (k - 1) / k,
    "_reduce_scatter_base_": lambda k: (k - 1) / k,
    "reduce_scatter_tensor_coalesced_": lambda k: (k - 1) / k,
    "allgather_into_tensor_coalesced_": lambda k: (k - 1) / k,
    "allreduce_coalesced_": lambda k: 2 * (k - 1) / k,
    "alltoall_base_": lambda k: (k - 1) / k,
    "alltoall_": lambda k: (k - 1) / k,
    "broadcast_": lambda k: (k - 1) / k,
    "send": lambda k: 1.0,
    "recv_": lambda k: 0.0,
}


def axes() -> dict[str, str]:
    """Name of a process group -> the axis it belongs to."""
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "embedding": parallel_state.get_embedding_group(check_initialized=False),
        "context": parallel_state.get_context_parallel_group(),
        "data without context": parallel_state.get_data_parallel_group(),
        "data": parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
        "instances": parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False),
        "expert": parallel_state.get_expert_model_parallel_group(check_initialized=False),
        "expert tensor": parallel_state.get_expert_tensor_parallel_group(check_initialized=False),
        "expert and tensor": parallel_state.get_expert_tensor_and_model_parallel_group(check_initialized=False),
        "expert data": parallel_state.get_expert_data_parallel_group(
            check_initialized=False, partial_expert_data_parallel=True
        ),
    }
    groups = {axis: group for axis, group in groups.items() if group not in (None, dist.GroupMember.NON_GROUP_MEMBER)}
    return {group.group_name: axis for axis, group in groups.items() if dist.get_world_size(group) > 1}


class Counter(TorchDispatchMode):
    """Axis -> collective -> bytes that this rank sends for it."""

    def __init__(self) -> None:
        super().__init__()
        self.axis_of = axes()
        self.found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        group = next(each for each in map(_unboxed, args) if each is not None)
        if name == "barrier" or group.size() == 1:
            return
        payload = max(_bytes(each) for each in args)
        self.found[self.axis_of.get(group.group_name, "others")][name] += payload * _SENT[name](group.size())


def _unboxed(value: Any) -> Any:
    return (
        dist.ProcessGroup.unbox(value)
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())
        else None
    )


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


class CountStep(Callback):
    """Writes FOLDER/RANK.json: what this rank sends between the ends of the first and the second step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_step_end(self, trainer: Any, event: Event) -> None:
        if event.step == 1:
            self.counter = Counter()
            self.counter.__enter__()
        elif event.step == 2:
            self.counter.__exit__(None, None, None)
            found = {"stage": state.pipeline_stage(), "sent": self.counter.found}
            (self.folder / f"{state.rank()}.json").write_text(json.dumps(found))
