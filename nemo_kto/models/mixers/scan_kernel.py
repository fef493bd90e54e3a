"""Choice of the fastest form of Mamba-2's scan: mamba_ssm's kernel, or torch's operations.

Shape suffixes are those of layers/state_space.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_kto.device import device
from nemo_kto.device.kernel_check import Form, agreeing, draw_inputs
from nemo_kto.device.kernels import scan_kernel
from nemo_kto.layers.packing import Prompts
from nemo_kto.layers.state_space import state_space_scan

_CHUNK = 128  # tokens of a chunk in the kernel, as in the configurations of Nemotron


@functools.cache
def fastest_scan(dtype: torch.dtype, *, heads: int, head_dim: int, state_dim: int) -> Form:
    """Return mamba_ssm's kernel if it is installed and agrees with :func:`state_space_scan` on this device, else that.

    The outputs of the kernel are in the dtype of the inputs, except those of answers to a shared prompt.

    Args:
        heads: number of heads of a group.
    """
    if (kernel := scan_kernel(dtype)) is None:
        return state_space_scan
    values, step, into, out_of = draw_inputs((heads, head_dim), (heads,), (state_dim,), (state_dim,))
    # the last state of a sequence contains most of its tokens
    inputs = [values.to(dtype), F.softplus(step - 4), step[0].exp(), into.to(dtype), out_of.to(dtype)]
    return agreeing(functools.partial(scan_with, kernel), state_space_scan, name="mamba_ssm's kernel", inputs=inputs)


def scan_with(
    kernel: Callable[..., Any],
    input_tgrP: Tensor,
    step_tgr: Tensor,
    rate_gr: Tensor,
    into_tgN: Tensor,
    out_of_tgN: Tensor,
    *,
    lengths: Sequence[int],
    prompts: Prompts = None,
) -> Tensor:
    """Return the outputs of all tokens, [t, g, r, P], by a kernel with the signature of mamba_ssm's scan.

    The kernel returns no gradients of the states at the ends of packed sequences, so it starts all segments from zero. As
    outputs are linear in the state, those that an answer gets from the last state of its prompt are added to the kernel's.
    """
    output_tgrP = kernel(
        input_tgrP.flatten(1, 2).unsqueeze(0),
        step_tgr.float().flatten(1).unsqueeze(0),
        -rate_gr.float().flatten(),
        into_tgN.unsqueeze(0),
        out_of_tgN.unsqueeze(0),
        chunk_size=_CHUNK,
        seq_idx=_sequence_1t(tuple(lengths)),
    )[0].unflatten(1, input_tgrP.shape[1:3])
    if prompts is None:
        return output_tgrP
    decay_tgr = step_tgr.float() * -rate_gr.float()
    added_tgrP = input_tgrP.float() * step_tgr.float().unsqueeze(-1)
    values = (output_tgrP, out_of_tgN, decay_tgr, added_tgrP, into_tgN)
    segments = [*zip(*(each.split([*lengths]) for each in values), strict=True)]
    states = {prompt: _last_state(*segments[prompt][2:]) for prompt in {*prompts} if prompt is not None}
    outputs = list[Tensor]()
    for (output, out_of, decay, *_), prompt in zip(segments, prompts, strict=True):
        if prompt is not None:
            from_prompt_gtX = out_of.float().transpose(0, 1) @ states[prompt]
            from_prompt_tgrP = from_prompt_gtX.transpose(0, 1).unflatten(-1, output.shape[2:])
            output = output.float() + from_prompt_tgrP * decay.cumsum(0).exp().unsqueeze(-1)
        outputs.append(output)
    return torch.cat(outputs)


@functools.lru_cache(maxsize=32)  # the layers of a model use the same
def _sequence_1t(lengths: tuple[int, ...]) -> Tensor:
    """Return the number of the segment of each token, [1, t], on the device."""
    sequence_t = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    (uploaded,) = device.upload([sequence_t.unsqueeze(0)])
    return uploaded  # type: ignore[no-any-return]


def _last_state(decay_tgr: Tensor, added_tgrP: Tensor, into_tgN: Tensor) -> Tensor:
    """Return the state after a segment that starts from zero, [g, N, r * P]."""
    later_tgr = decay_tgr.flip(0).cumsum(0).flip(0) - decay_tgr  # decay between a token and the end
    weighted_tgX = (added_tgrP * later_tgr.exp().unsqueeze(-1)).flatten(2)
    return into_tgN.float().permute(1, 2, 0) @ weighted_tgX.transpose(0, 1)
