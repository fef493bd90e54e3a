"""Choice of the fastest form of the gated delta rule: fla's kernel, or torch's operations.

Shape suffixes are those of layers/chunked_scan.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.device.kernel_check import Form, agreeing, draw_inputs
from nemo_kto.device.kernels import delta_rule_kernel
from nemo_kto.layers.chunked_scan import gated_delta_rule
from nemo_kto.layers.packing import Prompts


@functools.cache
def fastest_delta_rule(dtype: torch.dtype, *, key_dim: int, value_dim: int, values_per_key: int) -> Form:
    """Return fla's kernel if it is installed and agrees with :func:`gated_delta_rule` on this device, else that function.

    The outputs of the kernel are in the dtype of the values.
    """
    if (kernel := delta_rule_kernel(dtype)) is None:
        return gated_delta_rule
    shapes = [(key_dim,), (key_dim,), (values_per_key, value_dim), (values_per_key,), (values_per_key,)]
    query, key, value, decay, strength = draw_inputs(*shapes)
    inputs = [each.to(dtype) for each in (query, key, value, -0.1 * decay.square(), strength.sigmoid())]
    return agreeing(functools.partial(delta_rule_with, kernel), gated_delta_rule, name="fla's kernel", inputs=inputs)


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
        outputs, finals = kernel(
            *inputs,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            **_boundaries(kernel, tuple(lengths[number] for number in members)),
        )
        return outputs[0], finals

    outputs, finals = compute(roots, None)
    found = dict(zip(roots, outputs.split([lengths[number] for number in roots]), strict=True))
    if others:
        members = [number for number, _ in others]
        outputs, _ = compute(members, finals.index_select(0, _on_device(tuple(roots.index(prompt) for _, prompt in others))))
        found |= zip(members, outputs.split([lengths[number] for number in members]), strict=True)
    return torch.cat([found[number] for number in range(len(lengths))]).unflatten(1, value_tgrV.shape[1:3])


@functools.lru_cache(maxsize=32)
def _boundaries(kernel: Callable[..., Any], lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the arguments of ``kernel`` that say where sequences begin and end, the same tensors for all layers.

    fla finds the chunks of the sequences again for each new tensor (fla/ops/utils/index.py): on the host if it gets a copy
    there, for which older releases have no argument, otherwise the host waits for the device.
    """
    boundaries = 0, *accumulate(lengths)
    arguments = {"cu_seqlens": _on_device(boundaries)}
    if "cu_seqlens_cpu" in inspect.signature(kernel).parameters:
        arguments["cu_seqlens_cpu"] = torch.tensor(boundaries)
    return arguments


@functools.lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...]) -> Tensor:
    """Return ``numbers`` as a tensor on the device, the same for all layers."""
    (uploaded,) = device.upload([torch.tensor(numbers)])
    return uploaded  # type: ignore[no-any-return]
