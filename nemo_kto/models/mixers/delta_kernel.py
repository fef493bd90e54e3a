"""Choice of the fastest form of the gated delta rule: fla's kernel, or torch's operations.

Shape suffixes are those of models/layers/delta_rule.py.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.device.kernels import delta_rule_kernel
from nemo_kto.models.layers.delta_rule import gated_delta_rule
from nemo_kto.models.layers.packing import Prompts

logger = logging.getLogger(__name__)
_CLOSE = 0.03  # relative to the norm of the values or of a gradient; bf16 has 8 bits


DeltaRule = Callable[..., Tensor]
"""A form of :func:`gated_delta_rule` with the same arguments, whose outputs may be in the dtype of the values."""


@functools.cache
def fastest_delta_rule(dtype: torch.dtype, *, key_dim: int, value_dim: int, values_per_key: int) -> DeltaRule:
    """Return fla's kernel if it is installed and agrees with :func:`gated_delta_rule` on this device, else that function.

    Values and gradients of a small pack are compared; a warning says why an installed kernel is not used.
    """
    if (kernel := delta_rule_kernel(dtype)) is None:
        return gated_delta_rule
    rule = functools.partial(delta_rule_with, kernel)
    try:
        difference = _difference(rule, dtype, key_dim, value_dim, values_per_key)
        if difference < _CLOSE:
            return rule
        got = f"results that differ by {difference:.2g} of their norm"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton and the C compiler raise errors of different types
        got = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    logger.warning("fla's kernel must agree with torch's gated delta rule, got %s; torch's is used, which is slower", got)
    return gated_delta_rule


def delta_rule_with(
    kernel: Callable[..., Any],
    query_tgK: Tensor,
    key_tgK: Tensor,
    value_tgrV: Tensor,
    decay_tgr: Tensor,
    strength_tgr: Tensor,
    *,
    lengths: Sequence[int],
    prompts: Prompts = None,
) -> Tensor:
    """Return the outputs of all tokens, [t, g, r, V], by a kernel with the signature of fla's ``chunk_gated_delta_rule``.

    Sequences are computed first, then the segments that continue one of them, from its last state.
    """
    heads = [query_tgK, key_tgK, value_tgrV.flatten(1, 2), decay_tgr.float().flatten(1), strength_tgr.flatten(1)]
    parts = [each.split([*lengths]) for each in heads]
    before = [None] * len(lengths) if prompts is None else [*prompts]
    roots = [number for number, prompt in enumerate(before) if prompt is None]
    others = [(number, prompt) for number, prompt in enumerate(before) if prompt is not None]

    def compute(members: Sequence[int], states: Tensor | None) -> tuple[Tensor, Tensor]:
        inputs = (torch.cat([segments[number] for number in members]).unsqueeze(0) for segments in parts)
        offsets = torch.tensor([0, *accumulate(lengths[number] for number in members)])
        outputs, finals = kernel(
            *inputs,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=device.upload([offsets])[0],
        )
        return outputs[0], finals

    outputs, finals = compute(roots, None)
    found = dict(zip(roots, outputs.split([lengths[number] for number in roots]), strict=True))
    if others:
        members = [number for number, _ in others]
        (place_n,) = device.upload([torch.tensor([roots.index(prompt) for _, prompt in others])])
        outputs, _ = compute(members, finals.index_select(0, place_n))
        found |= zip(members, outputs.split([lengths[number] for number in members]), strict=True)
    return torch.cat([found[number] for number in range(len(lengths))]).unflatten(1, value_tgrV.shape[1:3])


def _difference(rule: DeltaRule, dtype: torch.dtype, key_dim: int, value_dim: int, values_per_key: int) -> float:
    """Return how much outputs and gradients of a pack differ from torch's, at most, relative to their norms."""
    lengths, prompts, draw = (150, 20, 70), (None, 0, None), torch.Generator().manual_seed(0)
    tokens, groups = sum(lengths), 2
    shapes = [(key_dim,), (key_dim,), (values_per_key, value_dim), (values_per_key,), (values_per_key,)]
    query, key, value, decay, strength = (torch.randn(tokens, groups, *shape, generator=draw) for shape in shapes)
    inputs = [query, key, value, -0.1 * decay.square(), strength.sigmoid()]
    weight = torch.randn(value.shape, generator=draw)
    *inputs, weight = device.upload([*(each.to(dtype) for each in inputs), weight])

    def results(form: DeltaRule) -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in inputs]
        output = form(*leaves, lengths=lengths, prompts=prompts).float()
        return [each.float() for each in (output, *torch.autograd.grad((output * weight).sum(), leaves))]

    with torch.enable_grad():
        pairs = zip(results(rule), results(gated_delta_rule), strict=True)
    # a maximum of tensors, because that of floats overlooks NaN
    return float(torch.stack([(found - expected).norm() / expected.norm() for found, expected in pairs]).max())
