"""Reference weights that are swapped with the policy's, and reference sync."""

from __future__ import annotations

import pytest
import torch

from nemo_kto.models.engine.reference import SwappedWeights


def test_twenty_small_updates_in_bf16_equal_the_closed_form() -> None:
    """Steps of 2e-5 show only now and then in bf16; the reference must not lose any."""
    draw = torch.Generator().manual_seed(0)
    start = (torch.randn(1000, generator=draw) * 0.05).bfloat16().float()
    policy, alpha = torch.nn.Parameter(start.bfloat16()), 0.1
    swapped = SwappedWeights(parameters=[policy], moves=True)
    expected = start.double()
    for step in range(1, 21):
        main = start + 2e-5 * step
        policy.data.copy_(main)
        swapped.mix(alpha)
        expected = alpha * policy.detach().double() + (1 - alpha) * expected
    assert (swapped.values[0].double() - expected).abs().max() < 1e-8
    assert torch.equal(swapped.kept[0], swapped.values[0].bfloat16())
    # in the mean over the weights the policy's own rounding cancels: alpha * sum of 0.9^(20 - k) * 2e-5 k
    of_exact_policy = alpha * sum(0.9 ** (20 - k) * 2e-5 * k for k in range(1, 21))
    assert (swapped.values[0] - start).mean().item() == pytest.approx(of_exact_policy, rel=0.05)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_rounded_reference_is_swapped_in_and_out(dtype: torch.dtype, on_device: bool) -> None:
    policy = torch.nn.Parameter(torch.linspace(-1, 1, 7).to(dtype))
    swapped, memory = SwappedWeights(parameters=[policy], moves=True, on_device=on_device), policy.data_ptr()
    policy.data.add_(0.3)
    before = policy.detach().clone()
    for _ in range(3):
        swapped.mix(0.01)
        moved = swapped.values[0].clone()
        with swapped.active():
            assert torch.equal(policy, moved.to(dtype))
            assert policy.data_ptr() != memory, "no value moves: on the CPU host memory is the memory of the device"
        assert torch.equal(policy, before)
        assert policy.data_ptr() == memory, "the parameter's place in the buffer of weights"
        assert torch.equal(swapped.values[0], moved)
        assert swapped.values[0].dtype == torch.float32
    pointers = [tensors[0].data_ptr() for tensors in (swapped.values, swapped.kept)]
    assert (len(set(pointers)) == 1) == (dtype == torch.float32), "fp32 is not kept twice"


def test_a_fixed_reference_is_stored_once() -> None:
    swapped = SwappedWeights(parameters=[torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    assert swapped.values is swapped.kept
