"""Available memory, uploads and clocks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from nemo_kto.device import device


def test_the_lowest_limit_of_all_control_groups_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = {"none": "max\n", "own": "3000000\n", "above": "2000000\n", "more": f"{whole + 1}\n"}
    for name, text in limits.items():
        (tmp_path / name).write_text(text)

    def least(*names: str) -> int:
        monkeypatch.setattr(device, "_memory_limit_files", lambda: iter([tmp_path / name for name in names]))
        return device.host_memory_bytes()

    assert least("none", "own", "above", "more", "missing") == 2_000_000
    assert least("none", "more") == whole
    assert least() == whole


@pytest.mark.parametrize("on_gpu", [False, True])
def test_deterministic_kernels_are_those_of_gpus(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU all are: the setting would only choose slower ones."""
    chosen: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", chosen.append)
    monkeypatch.setattr(device, "on_gpu", lambda: on_gpu)
    device.use_deterministic_kernels()
    assert chosen == [True] * on_gpu


def test_fp32_products_do_not_use_tf32() -> None:
    """NVIDIA's images allow them by an environment variable."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device.select()
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, False)


def test_nothing_is_uploaded_to_the_cpu() -> None:
    tensors = [torch.arange(3), None, torch.ones(2, 2)]
    assert all(there is here for there, here in zip(device.upload(tensors), tensors, strict=True))


def test_a_stopwatch_sums_blocks_and_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "moment", iter([1.0, 3.0, 10.0, 15.0]).__next__)
    watch = device.Stopwatch()
    for _ in range(2):
        with watch.running():
            pass
    assert [watch.read_and_reset(), watch.read_and_reset()] == [2 + 5, 0]
