"""The reference policy: what the policy is measured against. There is never a second model on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.models.engine.engine import LogProbEngine
from nemo_kto.models.engine.sequences import SequenceBatch
from nemo_kto.models.flops import Passes

Phase = Callable[[str], AbstractContextManager[object]]
"""Names a phase of a step to a timer; nullcontext where nothing is measured."""


class ReferencePolicy(Protocol):
    """Gives the log-prob of each response under the reference, part after part: fp32, on the CPU."""

    @property
    def passes(self) -> Passes: ...  # of the model, to evaluate one sequence
    def logprobs(self, *parts: SequenceBatch) -> Tensor: ...


class LiveReference:
    """Evaluates the model itself, in a state in which it is the reference."""

    def __init__(
        self, *, engine: LogProbEngine, active: Callable[[], AbstractContextManager[None]], disables_adapters: bool = False
    ) -> None:
        """Say when the model is the reference.

        Args:
            engine: runs the model.
            active: gives a context in which the model computes as the reference does.
            disables_adapters: which is without its adapters.
        """
        self._engine = engine
        self.active = active
        self.passes = Passes(disabled=1) if disables_adapters else Passes(forward=1)

    def logprobs(self, *parts: SequenceBatch) -> Tensor:
        """See :meth:`ReferencePolicy.logprobs`."""
        with self.active():
            return self._engine.logprobs(*parts)


class SwappedWeights:
    """Reference weights in host memory, swapped in place with those of the policy while the reference is evaluated.

    A swap moves one tensor after the other, so it needs room for two tensors at most, not for a model. Host memory
    (pinned on a GPU) holds one copy of what is swapped: this rank's weights, or only its adapters. A reference that moves
    has fp32 values besides: in bf16, moves smaller than half a step between two numbers would be rounded away.

    Attributes:
        parameters: what the policy and the reference do not share.
        host: the reference as the model computes with it, in the dtype of the parameters; the policy's while it is active.
        values: what ``host`` is the rounding of: fp32 where the reference moves, ``host`` itself otherwise or in fp32.
    """

    def __init__(
        self,
        *,
        parameters: Iterable[torch.nn.Parameter],
        finish_gathers: Callable[[], None] = lambda: None,
        moves: bool = False,
        phase: Phase = contextlib.nullcontext,
    ) -> None:
        """Keep the present values as the reference; call before the policy moves.

        Args:
            parameters: what the policy and the reference do not share.
            finish_gathers: makes them whole on this rank, where that may not be done.
            moves: :meth:`mix` will be called.
            phase: names the swap to a timer.
        """
        self.parameters = list(parameters)
        self.host = device.copied_to_host(self.parameters)
        self.values = [host.float() for host in self.host] if moves else self.host
        self._finish_gathers, self._phase = finish_gathers, phase

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within the block the model computes with the reference weights; afterwards it is the policy again, bit for bit."""
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

        Args:
            mixup_alpha: share of the policy, in (0, 1].
        """
        self._finish_gathers()
        for parameter, value in zip(self.parameters, self.values, strict=True):
            value.lerp_(parameter.detach().to("cpu", torch.float32), mixup_alpha)
        self.round_values()

    @torch.no_grad()
    def round_values(self) -> None:
        """Take over into ``host`` what ``values`` has become."""
        for host, value in zip(self.host, self.values, strict=True):
            host.copy_(value)
