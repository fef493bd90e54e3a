"""Choice between a library's GPU kernel and torch's operations: a kernel is used where both agree on this device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nemo_kto.device import device

logger = logging.getLogger(__name__)
_CLOSE = 0.03  # relative to the norm of the values or of a gradient; bf16 has 8 bits
# the pack: a sequence over several chunks, an answer to it, and a sequence that begins within a chunk
_LENGTHS, _PROMPTS = (150, 20, 170), (None, 0, None)
_GROUPS = 2

Form = Callable[..., Tensor]
"""A function of a pack's inputs, ``lengths`` and ``prompts`` (see ``models/layers/packing.py``) that returns its outputs."""


def draw_inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Return standard normal values of the pack for :func:`agreeing`, on the host, [t, g, *shape] for each shape."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(sum(_LENGTHS), _GROUPS, *shape, generator=draw) for shape in shapes]


def agreeing(kernel: Form, own: Form, *, name: str, inputs: Sequence[Tensor]) -> Form:
    """Return ``kernel`` if its values and gradients agree with those of ``own``, else ``own``, with a warning that says why.

    Args:
        name: of the kernel, for the warning.
        inputs: values from :func:`draw_inputs`, in the dtypes that the model passes.
    """
    try:
        difference = _difference(kernel, own, inputs)
        if difference < _CLOSE:
            return kernel
        got = f"results that differ by {difference:.2g} of their norm"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton and the C compiler raise errors of different types
        got = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    logger.warning("%s must agree with torch's operations, got %s; torch's are used, which are slower", name, got)
    return own


def _difference(kernel: Form, own: Form, inputs: Sequence[Tensor]) -> float:
    """Return how much outputs and gradients of the pack differ, at most, relative to their norms."""
    inputs = device.upload(inputs)

    def results(form: Form) -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in inputs]
        output = form(*leaves, lengths=_LENGTHS, prompts=_PROMPTS).float()
        (weight,) = device.upload([torch.randn(output.shape, generator=torch.Generator().manual_seed(1))])
        return [each.float() for each in (output, *torch.autograd.grad((output * weight).sum(), leaves))]

    with torch.enable_grad():
        pairs = zip(results(kernel), results(own), strict=True)
    # a maximum of tensors, because that of floats overlooks NaN
    return float(torch.stack([(found - expected).norm() / expected.norm() for found, expected in pairs]).max())
