"""The scan of Mamba-2 in chunks against the recurrence token by token, for random packs of sequences and shared prompts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

from nemo_kto.device.kernels import Form
from nemo_kto.layers.chunked_scan import CHUNK, causal_convolution
from nemo_kto.mixers.mamba2 import fastest_scan, scan_with, state_space_scan
from tests.helpers.messages import Message
from tests.unit.mixers.test_gated_delta_net import PACKS, assert_same, random_pack, sequences

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


def kernel(
    values: Tensor, step: Tensor, rate: Tensor, into: Tensor, out_of: Tensor, *, chunk_size: int, seq_idx: Tensor
) -> Tensor:
    """The recurrence with the signature of mamba_ssm's kernel, in which the heads of all groups stand side by side.

    The shapes are those that the kernel asserts; sizes of a head and of a state it takes as they are.
    """
    batch, tokens, heads, _ = values.shape
    assert (heads % into.shape[2], step.shape, rate.shape) == (0, (batch, tokens, heads), (heads,))
    assert into.shape == out_of.shape == (batch, tokens, *into.shape[2:])
    assert seq_idx.shape == (batch, tokens)
    assert (step.dtype, rate.dtype, seq_idx.dtype, chunk_size) == (torch.float32, torch.float32, torch.int32, 128)
    lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
    of_groups = (each[0].unflatten(1, (GROUPS, -1)) for each in (values, step.to(values.dtype)))
    parts = zip(*(each.split(lengths) for each in (*of_groups, into[0], out_of[0])), strict=True)
    rate_gr = -rate.view(GROUPS, -1).to(values.dtype)
    return torch.cat([recurrence(x, d, rate_gr, b, c) for x, d, b, c in parts]).flatten(1, 2).unsqueeze(0)


FORMS: dict[str, Form] = {"chunks": state_space_scan, "kernel": functools.partial(scan_with, kernel)}


@PACKS
def test_packs_equal_the_recurrence_of_each_sequence(form: str, seed: int) -> None:
    lengths, prompts = random_pack(seed)
    inputs = draw_inputs(sum(lengths), seed)
    atol = 1e-12 if form == "chunks" else 1e-5  # steps and rates are passed to the kernel in fp32
    leaves = [each.requires_grad_() for each in inputs]
    output = FORMS[form](*inputs, lengths=lengths, prompts=prompts)
    values, step, rate, into, out_of = inputs
    wanted = torch.cat(
        [
            recurrence(sequence[0], sequence[1], rate, sequence[2], sequence[3])[-length:]
            for sequence, length in zip(sequences((values, step, into, out_of), lengths, prompts), lengths, strict=True)
        ]
    )
    assert_same(output.double(), wanted, leaves, atol=atol)


def test_a_kernel_that_does_not_agree_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def without_boundaries(*inputs: Any, seq_idx: Tensor, **more: Any) -> Tensor:
        return kernel(*inputs, seq_idx=torch.zeros_like(seq_idx), **more)

    sizes = {"heads": HEADS, "head_dim": SIZE, "state_dim": STATE}
    for each, names in {kernel: (), without_boundaries: ("mamba_ssm", "differ", "torch")}.items():
        caplog.clear()
        fastest_scan.cache_clear()
        monkeypatch.setattr("nemo_kto.device.kernels.scan_kernel", lambda dtype, each=each: each)
        assert (fastest_scan(torch.float32, **sizes) is state_space_scan) is bool(names)
        assert [record.getMessage() for record in caplog.records] == [Message(*names)] * bool(names)
    fastest_scan.cache_clear()
    monkeypatch.undo()
    assert fastest_scan(torch.bfloat16, **sizes) is state_space_scan  # on the CPU


def test_all_layers_pass_the_same_numbers_of_sequences() -> None:
    found: list[Tensor] = []

    def recorded(*inputs: Any, seq_idx: Tensor, **more: Any) -> Tensor:
        found.append(seq_idx)
        return kernel(*inputs, seq_idx=seq_idx, **more)

    for seed in range(2):
        scan_with(recorded, *draw_inputs(5, seed), lengths=(3, 2))
    assert found[0].tolist() == [[0, 0, 0, 1, 1]]
    assert found[1] is found[0]


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
