"""Kernels that torch.compile fuses on a GPU, each with an eager form for the CPU and for machines without a compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

from nemo_kto.device import kernels

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class FusedKernel(Generic[Arguments, Result]):
    """Elementwise operations and reductions that torch.compile fuses; two forms with the same result up to rounding.

    The compiled form runs where ``kernels.compiles()`` is true. It is compiled when it is first called, for all sizes. If
    this fails, a warning names the error, and this process uses the eager form from then on.
    """

    def __init__(self, *, compiled: Callable[Arguments, Result], eager: Callable[Arguments, Result]) -> None:
        """Pair two forms.

        Args:
            compiled: writes to none of its arguments; in eager mode each of its operations would write a tensor of its own.
            eager: may overwrite its arguments in order to save memory, so the caller must not use them afterwards.
        """
        self.eager = eager
        self.fusable = compiled
        self._compiled: Callable[Arguments, Result] | None = None
        self._failed = False

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if self._failed or not kernels.compiles():
            return self.eager(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self.fusable, dynamic=True, fullgraph=True)
        try:
            return self._compiled(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # dynamo, inductor, Triton and the C compiler raise errors of different types
            self._failed = True
            reason = next(iter(str(error).strip().splitlines()), "")
            logger.warning(
                "torch.compile failed for %s (%s: %s); it runs without fused kernels, which is slower",
                getattr(self.fusable, "__name__", "a kernel"),
                type(error).__name__,
                reason,
            )
            return self.eager(*args, **kwargs)
