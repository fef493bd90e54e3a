"""Reference policies that need no second model on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.models.engine.engine import LogProbEngine
from nemo_kto.models.engine.sequences import SequenceBatch
from nemo_kto.models.flops import Passes

Phase = Callable[[str], AbstractContextManager[object]]
"""Context that a timer records under the name of a phase of a step; nullcontext if nothing is measured."""


class ReferencePolicy(Protocol):
    """Interface that returns the log-prob of each response under the reference, part after part: fp32, on the CPU."""

    @property
    def passes(self) -> Passes: ...  # passes through the model for the reference log-prob of one sequence
    def logprobs(self, *parts: SequenceBatch) -> Tensor: ...


@dataclass(kw_only=True, eq=False)
class LiveReference:
    """Reference that runs the model itself inside a context, ``active()``, that turns it into the reference."""

    engine: LogProbEngine
    active: Callable[[], AbstractContextManager[None]]
    passes: Passes

    def logprobs(self, *parts: SequenceBatch) -> Tensor:
        with self.active():
            return self.engine.logprobs(*parts)


class SwappedWeights:
    """Reference weights in host memory, swapped in place with the policy weights while the reference is evaluated.

    A swap moves one tensor after the other, so it needs extra device memory for two tensors at most, not for a model. A
    reference that is updated has fp32 values as well: in bf16, updates smaller than half the distance to the next
    representable number would be rounded away.
    """

    def __init__(
        self,
        *,
        parameters: Iterable[torch.nn.Parameter],  # those that differ between the policy and the reference
        finish_gathers: Callable[[], None] = lambda: None,  # completes pending all-gathers of the parameters
        moves: bool = False,  # the reference will be updated by :meth:`mix`
        phase: Phase = contextlib.nullcontext,  # records the swap in a timer
    ) -> None:
        """Copy the current values as the reference; call before the first update of the policy."""
        self.parameters = list(parameters)
        # reference values in the dtype of the parameters; the policy values while the reference is active
        self.host = device.copied_to_host(self.parameters)
        # unrounded values of ``host``: fp32 if the reference is updated
        self.values = [host.float() for host in self.host] if moves else self.host
        self._finish_gathers, self._phase = finish_gathers, phase

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Compute with the reference weights inside the block; the policy weights are restored bit for bit afterwards."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        with self._phase("reference_swap"), torch.no_grad():
            self._finish_gathers()
            device.swap_(self.parameters, self.host)

    @torch.no_grad()
    def mix(self, mixup_alpha: float) -> None:
        """Mix the policy into the reference: reference = alpha * policy + (1 - alpha) * reference, in fp32.

        TR-DPO (Gorbatovski et al. 2024, arXiv 2404.09656, equations 5 and 6): an alpha of 1 replaces the reference.
        """
        self._finish_gathers()
        for parameter, value in zip(self.parameters, self.values, strict=True):
            value.lerp_(parameter.detach().to("cpu", torch.float32), mixup_alpha)
        self.round_values()

    @torch.no_grad()
    def round_values(self) -> None:
        """Copy ``values`` into ``host``, rounded to the dtype of the parameters."""
        for host, value in zip(self.host, self.values, strict=True):
            host.copy_(value)
