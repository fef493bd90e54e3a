"""The reference policy: what the policy is measured against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch


class SwappedReference:
    """Reference weights in host memory, exchanged in place with those of the policy while the reference is asked.

    The model is built once; no second model is ever on the device. An exchange moves one tensor at a time, so it needs
    room for one tensor, not for one model. Host memory holds one copy of this rank's weights (pinned on a GPU).
    """

    def __init__(self, *, chunks: Sequence[torch.nn.Module]) -> None:
        """Keep the present weights of ``chunks`` as the reference; call before the policy moves."""
        self._policy = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._host = [_host_copy(parameter) for parameter in self._policy]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within the block the model computes with the reference weights; afterwards it is the policy again, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, host in zip(self._policy, self._host, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(host, non_blocking=True)
            host.copy_(kept)  # waits for both copies: the host must not be read before it is whole


def _host_copy(parameter: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=parameter.is_cuda)
    return copy.copy_(parameter.detach())
