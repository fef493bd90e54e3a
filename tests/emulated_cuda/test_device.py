"""The emulated device detects errors that a GPU would raise or cause, and computes the values of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from nemo_kto.device import device
from nemo_kto.models.engine.reference import SwappedWeights
from tests.emulated_cuda import copies, waits

CLOSE: dict[torch.dtype, dict[str, Any]] = {torch.float32: {}, torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2}}


@pytest.fixture(autouse=True)
def _nothing_in_flight() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


MIXED: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda x: x + torch.ones(5),
    "product": lambda x: x @ torch.ones(5, 2),
    "embedding": lambda x: F.embedding(torch.tensor([1]), x),
    "cat": lambda x: torch.cat([x, torch.ones(4, 5)]),
    "gather": lambda x: torch.gather(x, 0, torch.zeros(1, 5, dtype=torch.long)),
    "where": lambda x: torch.where(torch.ones(4, 5, dtype=torch.bool), x, x),
    "numpy": lambda x: x.numpy(),
    "two devices": lambda x: x.to("cuda:1") + x,
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_devices_are_refused(name: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match="device"):
        MIXED[name](torch.ones(4, 5, device="cuda"))


def test_numbers_and_indices_may_be_on_the_host() -> None:
    x = torch.arange(4.0, device="cuda")
    assert (x + torch.tensor(1.0)).tolist() == [1, 2, 3, 4]
    assert x[torch.tensor([2])].tolist() == [2]


def test_a_layer_and_its_gradients_equal_the_cpu() -> None:
    layer = torch.nn.Linear(5, 3)
    x = torch.randn(4, 5)
    found = []
    for kind in ("cpu", "cuda"):
        copy = torch.nn.Linear(5, 3, device=kind)
        copy.load_state_dict(layer.state_dict())
        inputs = x.to(kind).requires_grad_()
        value = F.rms_norm(F.gelu(copy(inputs)), (3,)).square().sum()
        found.append([value, *torch.autograd.grad(value, [inputs, *copy.parameters()])])
        assert all(tensor.device.type == kind for tensor in found[-1])
    for expected, other in zip(*found, strict=True):
        torch.testing.assert_close(other.cpu(), expected)


def test_random_numbers_follow_the_generator_state() -> None:
    x, state = torch.ones(64, device="cuda"), torch.cuda.get_rng_state()
    first, second = F.dropout(x), F.dropout(x)
    torch.cuda.set_rng_state(state)
    assert torch.equal(F.dropout(x), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kind", ["causal", "mask", "lower right"])
def test_attention_equals_the_cpu(kind: str, dtype: torch.dtype) -> None:
    queries = 7 if kind == "causal" else 5
    made = [torch.randn(2, heads, tokens, 8, dtype=dtype) for heads, tokens in ((4, queries), (2, 7), (2, 7))]
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
    grad = torch.randn(2, 4, queries, 8, dtype=dtype)
    found = []
    for place in ("cpu", "cuda"):
        q, k, v = parts = [part.to(place).requires_grad_() for part in made]
        if kind == "lower right":  # its kernel takes as many heads of keys as of queries
            k, v = (part.repeat_interleave(2, 1) for part in (k, v))
            chosen: Any = causal_lower_right(5, 7) if place == "cuda" else mask
        else:
            chosen = mask.to(place) if kind == "mask" else None
        options: dict[str, Any] = {"attn_mask": chosen, "is_causal": kind == "causal", "enable_gqa": kind != "lower right"}
        out = F.scaled_dot_product_attention(q, k, v, **options)
        found.append([out, *torch.autograd.grad(out, parts, grad.to(place))])
    for expected, other in zip(*found, strict=True):
        torch.testing.assert_close(other.cpu(), expected, **CLOSE[dtype])


def test_packed_attention_equals_attention_of_each_sequence() -> None:
    made = [torch.randn(10, heads, 8, dtype=torch.bfloat16, device="cuda", requires_grad=True) for heads in (4, 2, 2)]
    starts = torch.tensor([0, 3, 10], dtype=torch.int32, device="cuda")
    q, k, v = made
    found: Any = varlen_attn(q, k, v, starts, starts, 7, 7, window_size=(-1, 0), enable_gqa=True)
    parts = [[part[a:b].float().cpu().transpose(0, 1)[None] for part in made] for a, b in ((0, 3), (3, 10))]
    expected = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1) for q, k, v in parts
    ]
    grad = torch.randn(10, 4, 8)
    torch.testing.assert_close(found.float().cpu(), torch.cat(expected), **CLOSE[torch.bfloat16])
    ours = torch.autograd.grad(found, made, grad.bfloat16().cuda())
    theirs = torch.autograd.grad(torch.cat(expected), made, grad)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE[torch.bfloat16])


def test_packed_attention_refuses_options_that_its_kernel_ignores() -> None:
    x = torch.zeros(10, 2, 8, dtype=torch.bfloat16, device="cuda")
    starts = torch.tensor([0, 3, 10], dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match="leave out"):
        varlen_attn(x, x, x, starts, starts, 6, 6, window_size=(-1, 0))
    with pytest.raises(RuntimeError, match="int32"):
        varlen_attn(x, x, x, starts.long(), starts.long(), 7, 7, window_size=(-1, 0))


def test_a_copy_to_the_host_is_visible_after_a_wait() -> None:
    host = torch.zeros(3, pin_memory=True)
    host.copy_(torch.arange(3.0, device="cuda"), non_blocking=True)
    assert host.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [0, 1, 2]


def test_an_event_of_another_stream_does_not_complete_a_copy() -> None:
    host, other = torch.zeros(3, pin_memory=True), torch.cuda.Stream()
    host.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    other.record_event().synchronize()
    assert host.isnan().all()
    other.wait_stream(torch.cuda.current_stream())
    other.record_event().synchronize()
    assert host.tolist() == [1, 1, 1]


def test_memory_changed_during_a_copy_is_detected() -> None:
    host = torch.ones(3, pin_memory=True)
    host.to("cuda", non_blocking=True)
    host.zero_()
    with pytest.raises(RuntimeError, match="changed"):
        torch.cuda.synchronize()


@pytest.mark.parametrize("left_out", ["stream synchronize", "upload before download"])
def test_a_swap_without_synchronization_is_detected(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of swap_'s; with them the swap is exact."""
    parameters = [torch.nn.Parameter(torch.randn(9, device="cuda")) for _ in range(3)]
    before = [parameter.detach().cpu() for parameter in parameters]
    swapped = SwappedWeights(parameters=parameters)
    for parameter in parameters:
        parameter.data.mul_(2)
    with swapped.active():
        assert all(torch.equal(host, 2 * reference) for host, reference in zip(swapped.kept, before, strict=True))
    if left_out == "stream synchronize":
        monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda self: None)
        with swapped.active():
            assert any(host.isnan().any() for host in swapped.kept)
    else:
        down, wait = device._copy_streams(0)[1], torch.cuda.Stream.wait_stream
        monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: self == down or wait(self, other))
        with pytest.raises(RuntimeError, match="changed"), swapped.active():
            torch.cuda.synchronize()
    monkeypatch.undo()
    copies.in_flight.__init__()  # type: ignore[misc]


WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "a tensor of a list": lambda x: torch.tensor([1.0], device="cuda"),
    "pageable upload": lambda x: torch.ones(3).cuda(),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", WAITING)
def test_a_wait_is_counted_and_can_be_refused(name: str) -> None:
    x = torch.ones(4, device="cuda")
    waits.counted.clear()
    WAITING[name](x)
    (wait,) = waits.counted
    assert waits.counted[wait] == 1
    assert "test_device.py" in wait.site
    assert not wait.in_micro_batch
    if name == "synchronize":  # which torch does not report
        return
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        WAITING[name](x)


class AsksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * grad.sum().item()


def test_a_wait_in_the_backward_pass_belongs_to_the_micro_batch() -> None:
    x = torch.ones(4, device="cuda", requires_grad=True)
    waits.counted.clear()
    AsksInBackward.apply(x).sum().backward()
    (wait,) = waits.counted
    assert wait.in_micro_batch
    assert wait.site.endswith("(backward)")


def test_queued_work_is_not_a_wait() -> None:
    x, host = torch.ones(4, device="cuda", requires_grad=True), torch.ones(4).pin_memory()
    optimizer = torch.optim.AdamW([x], fused=True)
    waits.counted.clear()
    (x * host.to("cuda", non_blocking=True)).sum().backward()
    optimizer.step()
    F.softmax(x, 0).masked_fill_(x > 0, 1.0)
    assert not waits.counted
