"""Counts what a rank sends: bytes and messages of each collective and each message, by the group that they are for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# What a rank sends of the bytes of an operation among k ranks (a ring: Chan et al. 2007, doi 10.1002/cpe.1206), and which
# argument has these bytes.
_SENT = {
    "allreduce_coalesced_": (0, lambda k: 2 * (k - 1) / k),
    "allgather_into_tensor_coalesced_": (0, lambda k: (k - 1) / k),
    "reduce_scatter_tensor_coalesced_": (1, lambda k: (k - 1) / k),
    "allreduce_": (0, lambda k: 2 * (k - 1) / k),
    "_allgather_base_": (0, lambda k: (k - 1) / k),
    "_reduce_scatter_base_": (1, lambda k: (k - 1) / k),
    "send": (0, lambda k: 1.0),
}


class Traffic(TorchDispatchMode):
    """Within the block, what this rank sends.

    Attributes:
        sent: (axis, operation) -> bytes.
        messages: (axis, operation) -> their number.
        other: operations among several ranks that no rule is known for.
    """

    def __init__(self, groups: dict[str, Any]) -> None:
        """Args: groups: name of an axis -> its process group; a message between two ranks is of the axis ``pipeline``."""
        super().__init__()
        self._axes = {group.group_name: axis for axis, group in groups.items() if group.size() > 1}
        self.sent: Counter[tuple[str, str]] = Counter()
        self.messages: Counter[tuple[str, str]] = Counter()
        self.other: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._note(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        group = next(dist.ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject))
        axis = "pipeline" if name == "send" else self._axes.get(group.group_name)
        if group.size() == 1 or axis is None or name.startswith("recv"):
            return
        if name not in _SENT:
            self.other[name] += 1
            return
        place, share = _SENT[name]
        tensors = [args[place]] if isinstance(args[place], torch.Tensor) else args[place]
        self.sent[axis, name] += share(group.size()) * sum(each.numel() * each.element_size() for each in tensors)
        self.messages[axis, name] += 1

    def of(self, axis: str) -> float:
        """Bytes of an axis."""
        return sum(count for (of, _), count in self.sent.items() if of == axis)
