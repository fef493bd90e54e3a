"""Choices that follow from the memory of GPUs reach the engine, the reference and the table at the start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.device import device
from nemo_kto.run import prepare, summary
from nemo_kto.run.prepare import fit_to_memory
from tests.unit.run.test_build_rows import resolved

COUNTS = SimpleNamespace(longest=900, tokens=4000, rows=10)
DATA: Any = SimpleNamespace(splits=SimpleNamespace(in_use={"train": SimpleNamespace(counts=COUNTS)}))
MACHINES: Any = SimpleNamespace()


@pytest.mark.parametrize(
    ("on_gpu", "mode", "memory", "tokens", "reference_on_gpu", "lines"),
    [
        (True, "swap", "gpu", 4096, True, ["4,096 tokens (enough), not packed (fp32)", "GPU memory (room)"]),
        (True, "swap", "cpu", 4096, False, ["4,096 tokens (enough), not packed (fp32)", "host memory (room)"]),
        (True, "cached", "", 4096, False, ["4,096 tokens (enough), not packed (fp32)"]),
        (False, "swap", "cpu", 512, False, []),
    ],
)
def test_sizes_and_memory_are_chosen_once(
    on_gpu: bool,
    mode: str,
    memory: str,
    tokens: int,
    reference_on_gpu: bool,
    lines: list[str],
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def size(run: ResolvedRun, _: object) -> tuple[int, str]:
        assert run.row_tokens == 400
        return 4096, "enough"

    def place(run: ResolvedRun, _: object, *, longest: int) -> tuple[str, str]:
        assert (run.micro_batch_tokens, longest) == (4096 if on_gpu else None, 900)
        return memory, "room"

    def check(run: ResolvedRun, _: object, *, longest: int) -> str:
        return f"{run.micro_batch_tokens} {run.reference_memory} {longest}"

    monkeypatch.setattr(device, "on_gpu", lambda: on_gpu)
    monkeypatch.setattr(prepare, "size_micro_batches", size)
    monkeypatch.setattr(prepare, "place_reference", place)
    monkeypatch.setattr(prepare, "check_memory", check)
    given = [f"pretrained_checkpoint.restore_from_path={tiny_llama}", "model.data.seq_length=1024"]
    run = resolved(*given, "trainer.precision=32", f"model.reference.mode={mode}")
    placement = fit_to_memory(run, DATA, MACHINES)
    assert (placement.limits.tokens, placement.reference_on_gpu) == (tokens, reference_on_gpu)
    assert caplog.messages == [f"{4096 if on_gpu else None} {memory} 900"], "of the longest row, with both choices"
    shown = summary._micro_batches(run, placement) | summary._reference_memory(placement)
    assert [*shown.values()] == lines
    assert (run.micro_batch_tokens, run.reference_memory) == (None, ""), "the run stays as it was"
