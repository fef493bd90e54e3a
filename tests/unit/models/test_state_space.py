"""The scan of Mamba-2 in chunks against the recurrence token by token, for random packs of sequences and shared prompts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

from nemo_kto.architecture.mixers.gated_delta_net import CHUNK
from nemo_kto.models.layers.delta_rule import causal_convolution
from nemo_kto.models.layers.state_space import state_space_scan
from tests.unit.models.test_delta_rule import random_pack, sequences

GROUPS, HEADS, STATE, SIZE = 2, 3, 5, 4
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def draw_inputs(tokens: int, seed: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Inputs, steps of up to 2, rates of up to 2, and vectors into and out of the state."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    steps, rates = 2 * normal(tokens, GROUPS, HEADS).sigmoid(), 2 * normal(GROUPS, HEADS).sigmoid()
    into, out_of = normal(2, tokens, GROUPS, STATE)
    return normal(tokens, GROUPS, HEADS, SIZE), steps, rates, into, out_of


def recurrence(values: Tensor, step: Tensor, rate: Tensor, into: Tensor, out_of: Tensor) -> Tensor:
    """Outputs [t, groups, heads, size] of one sequence, from the equations of the module's docstring."""
    state, outputs = torch.zeros(GROUPS, HEADS, STATE, SIZE, dtype=values.dtype), []
    for x, d, b, c in zip(values, step, into, out_of, strict=True):
        state = (-rate * d).exp()[..., None, None] * state + torch.einsum("gn,grp->grnp", b, d[..., None] * x)
        outputs.append(torch.einsum("grnp,gn->grp", state, c))
    return torch.stack(outputs)


@pytest.mark.parametrize("seed", range(4))
def test_packs_equal_the_recurrence_of_each_sequence(seed: int) -> None:
    lengths, prompts = random_pack(seed)
    inputs = draw_inputs(sum(lengths), seed)
    leaves = [each.requires_grad_() for each in inputs]
    output = state_space_scan(*inputs, lengths=lengths, prompts=prompts)
    values, step, rate, into, out_of = inputs
    wanted = torch.cat(
        [
            recurrence(sequence[0], sequence[1], rate, sequence[2], sequence[3])[-length:]
            for sequence, length in zip(sequences((values, step, into, out_of), lengths, prompts), lengths, strict=True)
        ]
    )
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-12)
    weights = torch.sin(torch.arange(output.numel(), dtype=output.dtype)).view_as(output)
    found, expected = (torch.autograd.grad((each * weights).sum(), leaves) for each in (output, wanted))
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("tokens", [1, CHUNK, 150])
def test_equals_transformers(tokens: int) -> None:
    """transformers has the heads of all groups side by side, and computes in fp32."""
    values, step, rate, into, out_of = (each.float() for each in draw_inputs(tokens, tokens))
    found = state_space_scan(values, step, rate, into, out_of, lengths=(tokens,))
    wanted = mamba2_chunk_scan(
        values.flatten(1, 2)[None], step.flatten(1)[None], -rate.flatten(), into[None], out_of[None], chunk_size=16
    )
    torch.testing.assert_close(found.flatten(1, 2), wanted[0], rtol=2e-5, atol=2e-5)


def test_bf16_is_computed_in_fp32() -> None:
    inputs = draw_inputs(100, 0, torch.bfloat16)
    output = state_space_scan(*inputs, lengths=(100,))
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, state_space_scan(*(each.float() for each in inputs), lengths=(100,)), rtol=0, atol=0)
    torch.testing.assert_close(output.double(), recurrence(*(each.double() for each in inputs)), rtol=0, atol=2e-5)


def test_strong_decay_does_not_overflow() -> None:
    values, step, rate, into, out_of = draw_inputs(CHUNK, 0)
    inputs = [each.requires_grad_() for each in (values, step, 400 * rate, into, out_of)]
    output = state_space_scan(*inputs, lengths=(CHUNK,))
    torch.testing.assert_close(output, recurrence(*inputs), rtol=0, atol=1e-12)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), inputs))


def test_bias_of_the_convolution_is_rounded_with_it() -> None:
    draw = torch.Generator().manual_seed(0)
    values, weight, bias = (torch.randn(shape, generator=draw).bfloat16() for shape in ((200, 8), (8, 4), (8,)))
    exact = F.conv1d(values.double().t()[None], weight.double()[:, None], bias.double(), padding=3, groups=8)[0, :, :200].t()
    assert torch.equal(causal_convolution(values, weight, bias, lengths=(200,)), exact.float().bfloat16())
