"""The gated delta rule against the recurrence token by token, for random packs of sequences and shared prompts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_kto.device.kernels import Form
from nemo_kto.layers.chunked_scan import CHUNK, causal_convolution
from nemo_kto.layers.packing import Prompts
from nemo_kto.mixers.gated_delta_net import delta_rule_with, fastest_delta_rule, gated_delta_rule
from tests.helpers.messages import Message

GROUPS, HEADS, KEY, VALUE = 2, 3, 5, 4
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def draw_inputs(tokens: int, seed: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Queries, keys, values, decays of up to exp(-2) and strengths; some keys repeat, so that their values are corrected."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(tokens, GROUPS, *shape, generator=draw, dtype=torch.float64).to(dtype)

    key = normal(KEY)
    key[1::3] = key[: len(key[1::3])]
    return normal(KEY), key, normal(HEADS, VALUE), -2 * normal(HEADS).sigmoid(), normal(HEADS).sigmoid()


def recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs [t, groups, heads, value] of one sequence and its last state, from the equations of the module's docstring."""
    query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
    state = torch.zeros(*value.shape[1:3], key.size(-1), value.size(-1), dtype=value.dtype) if before is None else before
    outputs = []
    for q, k, v, g, b in zip(query, key, value, decay, strength, strict=True):
        state = g.exp()[..., None, None] * state
        correction = b[..., None] * (v - torch.einsum("grkv,gk->grv", state, k))
        state = state + torch.einsum("gk,grv->grkv", k, correction)
        outputs.append(torch.einsum("grkv,gk->grv", state, q) / key.size(-1) ** 0.5)
    return torch.stack(outputs), state


def kernel(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, *, initial_state: Tensor | None, **more: Any
) -> tuple[Tensor, Tensor]:
    """The recurrence with signature and limits of fla's kernel, in which heads of values stand side by side."""
    assert query.shape[-1] <= 256, "current kernel does not support head dimension larger than 256."
    if query.shape != key.shape or value.shape[2] % query.shape[2] or query.shape[0] != 1:
        raise ValueError(f"{query.shape}, {key.shape} and {value.shape}")
    if initial_state is not None and len(initial_state) != len(more["cu_seqlens"]) - 1:
        raise ValueError(f"{len(initial_state)} states of {len(more['cu_seqlens']) - 1} sequences")
    assert query.dtype == key.dtype == value.dtype
    assert (more["use_qk_l2norm_in_kernel"], more["output_final_state"], decay.dtype) == (True, True, torch.float32)
    lengths = more["cu_seqlens"].diff().tolist()
    of_groups = (each[0].unflatten(1, (GROUPS, -1)) for each in (value, decay.to(value.dtype), strength))
    parts = zip(*(each.split(lengths) for each in (query[0], key[0], *of_groups)), strict=True)
    states = [None] * len(lengths) if initial_state is None else initial_state.unflatten(1, (GROUPS, -1))
    found = [recurrence(q, k, v, g, b, before) for (q, k, v, g, b), before in zip(parts, states, strict=True)]
    outputs, finals = zip(*found, strict=True)
    return torch.cat(outputs).flatten(1, 2).unsqueeze(0), torch.stack(finals).flatten(1, 2)


FORMS: dict[str, Form] = {"chunks": gated_delta_rule, "kernel": functools.partial(delta_rule_with, kernel)}


def random_pack(seed: int) -> tuple[tuple[int, ...], Prompts]:
    """Segments around the size of a chunk, of which some continue an earlier one that begins a sequence."""
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 7, (), generator=draw))
    lengths = torch.tensor([1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 150])[
        torch.randint(0, 7, (count,), generator=draw)
    ]
    prompts: list[int | None] = []
    for _ in range(count):
        roots = [number for number, prompt in enumerate(prompts) if prompt is None]
        choice = int(torch.randint(0, 2 * len(roots) + 1, (), generator=draw))
        prompts.append(roots[choice] if choice < len(roots) else None)
    return tuple(lengths.tolist()), None if set(prompts) == {None} else tuple(prompts)


def sequences(inputs: tuple[Tensor, ...], lengths: tuple[int, ...], prompts: Prompts) -> list[tuple[Tensor, ...]]:
    """The inputs of each segment, after those of its prompt."""
    parts = [*zip(*(each.split(lengths) for each in inputs), strict=True)]
    before = [None] * len(lengths) if prompts is None else prompts
    return [
        part if prompt is None else tuple(map(torch.cat, zip(parts[prompt], part, strict=True)))
        for part, prompt in zip(parts, before, strict=True)
    ]


def assert_same(output: Tensor, wanted: Tensor, inputs: Sequence[Tensor], *, atol: float) -> None:
    """Equal values, and equal gradients of the inputs."""
    torch.testing.assert_close(output, wanted, rtol=0, atol=atol)
    weights = torch.sin(torch.arange(output.numel(), dtype=output.dtype)).view_as(output)
    found, expected = (torch.autograd.grad((each * weights).sum(), inputs) for each in (output, wanted))
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=10 * atol)


PACKS = pytest.mark.parametrize(("form", "seed"), [*(("chunks", seed) for seed in range(4)), ("kernel", 3), ("kernel", 4)])


@PACKS
def test_packs_equal_the_recurrence_of_each_sequence(form: str, seed: int) -> None:
    lengths, prompts = random_pack(seed)
    inputs = draw_inputs(sum(lengths), seed)
    atol = 1e-12 if form == "chunks" else 1e-6  # decays are passed to the kernel in fp32
    leaves = [each.requires_grad_() for each in inputs]
    output = FORMS[form](*inputs, lengths=lengths, prompts=prompts)
    wanted = torch.cat(
        [
            recurrence(*sequence)[0][-length:]  # type: ignore[arg-type]
            for sequence, length in zip(sequences(inputs, lengths, prompts), lengths, strict=True)
        ]
    )
    assert_same(output, wanted, leaves, atol=atol)


def test_a_kernel_that_does_not_agree_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def half_as_strong(query: Any, key: Any, value: Any, decay: Any, strength: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return kernel(query, key, value, decay, strength / 2, **more)

    def from_zero(*inputs: Any, initial_state: Tensor | None, **more: Any) -> tuple[Tensor, Tensor]:
        return kernel(*inputs, initial_state=None if initial_state is None else 0 * initial_state, **more)

    def fails(*inputs: Any, **more: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no PTX for this device\nmore")

    sizes = {"key_dim": KEY, "value_dim": VALUE, "values_per_key": HEADS}

    def without_gradient(query: Any, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return kernel(query + (0 * query).abs().sqrt(), *others, **more)  # the gradient of sqrt at 0 is not a number

    cases = {
        kernel: (),
        without_gradient: ("nan", "differ", "torch"),
        from_zero: ("differ", "torch"),
        half_as_strong: ("differ", "torch"),
        fails: ("RuntimeError: no PTX for this device", "torch"),
    }
    for each, names in cases.items():
        caplog.clear()
        fastest_delta_rule.cache_clear()
        monkeypatch.setattr("nemo_kto.device.kernels.delta_rule_kernel", lambda dtype, each=each: each)
        with torch.device("meta"):  # a model that is built without values
            rule = fastest_delta_rule(torch.float32, **sizes)
        assert (rule is gated_delta_rule) is bool(names)
        assert [record.getMessage() for record in caplog.records] == [Message("fla", *names)] * bool(names)
    caplog.clear()
    monkeypatch.setattr("nemo_kto.device.kernels.delta_rule_kernel", lambda dtype: kernel)
    assert fastest_delta_rule(torch.float32, **sizes | {"key_dim": 264}) is gated_delta_rule
    assert caplog.messages == [Message("fla", "AssertionError", "larger than 256", "torch")]
    fastest_delta_rule.cache_clear()
    monkeypatch.undo()
    assert fastest_delta_rule(torch.bfloat16, **sizes) is gated_delta_rule  # on the CPU


def test_all_layers_pass_the_same_boundaries() -> None:
    """fla keeps what it derives from a tensor of boundaries, and waits for the device if it has no copy on the host."""
    found: list[tuple[Tensor, Tensor]] = []

    def recorded(*inputs: Any, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        found.append((cu_seqlens, cu_seqlens_cpu))
        return kernel(*inputs, cu_seqlens=cu_seqlens, **more)

    lengths, prompts = (3, 2, 4), (None, 0, None)
    for seed in range(2):
        delta_rule_with(recorded, *draw_inputs(sum(lengths), seed), lengths=lengths, prompts=prompts)
    assert [[tensor.tolist() for tensor in pair] for pair in found] == [[[0, 3, 7]] * 2, [[0, 2]] * 2] * 2
    ids = [[id(tensor) for tensor in pair] for pair in found]
    assert ids[:2] == ids[2:]


def test_bf16_is_computed_in_fp32() -> None:
    inputs = draw_inputs(100, 0, torch.bfloat16)
    output = gated_delta_rule(*inputs, lengths=(100,))
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, gated_delta_rule(*(each.float() for each in inputs), lengths=(100,)), rtol=0, atol=0)
    torch.testing.assert_close(output.double(), recurrence(*(each.double() for each in inputs))[0], rtol=0, atol=1e-5)


def test_strong_decay_does_not_overflow() -> None:
    query, key, value, decay, strength = draw_inputs(CHUNK, 0)
    inputs = [each.requires_grad_() for each in (query, key, value, 200 * decay, strength)]
    output = gated_delta_rule(*inputs, lengths=(CHUNK,))
    torch.testing.assert_close(output, recurrence(*inputs)[0], rtol=0, atol=1e-12)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), inputs))


def test_convolution_in_bf16_is_rounded_once() -> None:
    draw = torch.Generator().manual_seed(0)
    values, weight = (torch.randn(shape, generator=draw).bfloat16() for shape in ((200, 8), (8, 4)))
    exact = causal_convolution(values.double(), weight.double(), lengths=(120, 80))
    assert torch.equal(causal_convolution(values, weight, lengths=(120, 80)), exact.float().bfloat16())


@pytest.mark.parametrize("seed", range(8))
def test_convolution_of_packs(seed: int) -> None:
    lengths, prompts = random_pack(seed)
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), 3, generator=draw, dtype=torch.float64)
    weight = torch.randn(3, 4, generator=draw, dtype=torch.float64)
    wanted = [
        F.conv1d(sequence.t()[None], weight[:, None], padding=3, groups=3)[0, :, : len(sequence)].t()[-length:]
        for (sequence,), length in zip(sequences((values,), lengths, prompts), lengths, strict=True)
    ]
    found = causal_convolution(values, weight, lengths=lengths, prompts=prompts)
    torch.testing.assert_close(found, torch.cat(wanted), rtol=0, atol=1e-12)
