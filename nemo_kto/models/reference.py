"""The reference policy: what the policy is measured against. There is never a second model on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from nemo_kto.models.rows import Rows
from nemo_kto.parallel import device

Forward = Callable[[Rows], torch.Tensor]
Active = Callable[[], AbstractContextManager[None]]


class ReferencePolicy(Protocol):
    """Says what the reference thinks of rows."""

    def logprobs(self, parts: Sequence[Rows], forward: Forward) -> torch.Tensor:
        """Log-prob of each row's response under the reference.

        Args:
            parts: rows, in as many groups as are to be asked one after the other.
            forward: rows -> their log-probs [B] under the weights that the model has at this moment, fp32, on the CPU.

        Returns:
            [rows of all parts], fp32, on the CPU.
        """


class LiveReference:
    """Asks the model itself, in a state in which it is the reference."""

    def __init__(self, *, active: Active) -> None:
        """Args: active: gives a context in which the model computes as the reference does."""
        self._active = active

    def logprobs(self, parts: Sequence[Rows], forward: Forward) -> torch.Tensor:
        """See :meth:`ReferencePolicy.logprobs`."""
        with self._active():
            return torch.cat([forward(rows) for rows in parts])


class SwappedWeights:
    """Reference weights in host memory, exchanged in place with those of the policy while the reference is asked.

    An exchange moves one tensor after the other, so it needs room for two tensors at most, not for a model. Host memory
    (pinned on a GPU) holds one copy of what is exchanged: this rank's weights, or its adapters alone.
    """

    def __init__(
        self,
        *,
        parameters: Iterable[torch.nn.Parameter],
        phase: Callable[[str], AbstractContextManager[None]] = lambda name: contextlib.nullcontext(),
    ) -> None:
        """Keep the present values as the reference; call before the policy moves.

        Args:
            parameters: what the policy and the reference do not share.
            phase: names the exchange to a timer.
        """
        self.parameters = list(parameters)
        self.host = [_host_copy(parameter) for parameter in self.parameters]
        self._phase = phase

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within the block the model computes with the reference weights; afterwards it is the policy again, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        with self._phase("reference_swap"), torch.no_grad():
            device.swap_(self.parameters, self.host)

    @torch.no_grad()
    def move(self, share: float) -> None:
        """Mix the policy into the reference: reference = share * policy + (1 - share) * reference.

        TR-DPO (Gorbatovski et al. 2024, arXiv 2404.09656, equations 5 and 6): a share of 1 replaces the reference.

        Args:
            share: of the policy, in (0, 1].
        """
        for parameter, host in zip(self.parameters, self.host, strict=True):
            host.copy_(torch.lerp(host.float(), parameter.detach().to("cpu", torch.float32), share))


class MovingReference:
    """Moves the reference towards the policy every few steps."""

    def __init__(self, *, weights: SwappedWeights, interval: int, share: float) -> None:
        """Args: weights: the reference's; interval: optimizer steps between moves; share: see ``SwappedWeights.move``."""
        self.weights = weights
        self._interval = interval
        self._share = share

    def after_step(self, step: int) -> None:
        """Move where it is time, after optimizer step ``step`` (from 1)."""
        if step % self._interval == 0:
            self.weights.move(self._share)


def _host_copy(parameter: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=parameter.is_cuda)
    return copy.copy_(parameter.detach())
