"""Choice between two forms of a computation on a GPU: the faster one is used where both agree on this device."""

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
_ON_HOST = torch.device("cpu")  # where tensors are created by default, unless a model is built without values ("meta")

Form = Callable[..., Tensor]
"""A function of a pack's inputs, ``lengths`` and ``prompts`` (see ``layers/packing.py``) that returns its outputs."""


def draw_inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Return standard normal values of the pack for :func:`agreeing`, on the host, [t, g, *shape] for each shape."""
    draw = torch.Generator().manual_seed(0)
    with _ON_HOST:
        return [torch.randn(sum(_LENGTHS), _GROUPS, *shape, generator=draw) for shape in shapes]


def agreeing(kernel: Form, own: Form, *, name: str, inputs: Sequence[Tensor], own_name: str = "torch's operations") -> Form:
    """Return ``kernel`` if its values and gradients agree with those of ``own``, else ``own``, with a warning that says why.

    Args:
        name, own_name: of the forms, for the warning; the second is a plural.
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
    logger.warning("%s must agree with %s, got %s; %s are used, which are slower", name, own_name, got, own_name)
    return own


def _difference(kernel: Form, own: Form, inputs: Sequence[Tensor]) -> float:
    """Return how much outputs and gradients of the pack differ, at most, relative to their norms."""

    def results(form: Form) -> list[Tensor]:
        leaves = [each.requires_grad_() for each in device.upload([each.detach() for each in inputs])]
        output = form(*leaves, lengths=_LENGTHS, prompts=_PROMPTS).float()
        (weight,) = device.upload([torch.randn(output.shape, generator=torch.Generator().manual_seed(1))])
        return [each.detach().float() for each in (output, *torch.autograd.grad((output * weight).sum(), leaves))]

    with torch.enable_grad(), _ON_HOST:
        pairs = zip(results(kernel), results(own), strict=True)
    # a maximum of tensors, because that of floats overlooks NaN
    return float(torch.stack([(found - expected).norm() / expected.norm() for found, expected in pairs]).max())
