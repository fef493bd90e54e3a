"""Metrics of several global batches are means over their examples, for any division into batches."""

from __future__ import annotations

import functools
import operator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import lora_jobs
from tests.helpers.engines import engine, kto_model
from tests.helpers.rank_pool import RankPool

W_PREFERENCE, W_SFT = 0.8, 0.1
ROWS, WIDTH, PROMPT = 8, 16, 4


def model_of(folder: Path, loss: str) -> Any:
    """On a rank: a KTO model of one loss."""
    from nemo_kto.distributed import state

    chunks, architecture = lora_jobs.build(folder, state.Layout(), distributed=False)
    weights = {"preference_loss_weight": W_PREFERENCE, "sft_loss_weight": W_SFT}
    return kto_model(engine(chunks, architecture), nullcontext, loss=loss, beta=0.3, weights=(1.0, 1.5), **weights)


def make_batch(*kinds: str) -> dict[str, torch.Tensor]:
    """Random examples, ``kl_sample`` two tokens longer than ``sample``, with the log-probs of some reference."""
    draw = torch.Generator().manual_seed(7)
    batch = {"preference": torch.tensor([1, 1, 1, 0, 1, 0, 0, 0])}
    for kind, width in zip(kinds, (WIDTH, WIDTH + 2), strict=False):
        tokens = torch.randint(0, 256, (ROWS, width), generator=draw)
        labels = tokens.clone()
        labels[:, :PROMPT] = -100
        batch |= {f"{kind}s": tokens, f"{kind}_labels": labels, f"{kind}_lengths": torch.full((ROWS,), width)}
        batch[f"ref_policy_log_probs_{kind}s"] = -60 + 9 * torch.randn(ROWS, generator=draw)
    return batch


def evaluated_in_batches_of(folder: Path, sizes: tuple[int, ...]) -> dict[int, list[dict[str, float]]]:
    """On a rank, of one model and eight examples: the metrics of a validation and of a line of the log, by batch size."""
    from nemo_kto.algorithms.callbacks import Event, StepLog

    model, batch = model_of(folder, "apo_zero_unpaired"), make_batch("sample")  # no z0, which is that of a global batch
    found = {}
    for size in sizes:
        parts, log = [], StepLog()
        for start in range(0, ROWS, size):
            one = {name: values[start : start + size] for name, values in batch.items()}
            loss, metrics = model.get_loss_and_metrics(one, forward_only=True)
            assert loss == metrics["loss"]
            parts.append(metrics)
            log.add(Event(step=len(parts), metrics=metrics, seconds=1.0, report={}))
        line = log.take()
        assert line is not None
        found[size] = [dict(functools.reduce(operator.add, parts)), dict(line.metrics)]
    return found


def work_of_a_batch(folder: Path) -> dict[str, float]:
    """On a rank: the counts of a batch with KL examples."""
    _, metrics = model_of(folder, "kto").get_loss_and_metrics(make_batch("sample", "kl_sample"), forward_only=True)
    return {name: metrics.sums[name] for name in ("tokens", "kl_tokens", "padded_tokens")}


def test_the_loss_with_an_sft_term_does_not_depend_on_the_global_batch(ranks: RankPool, tiny_llama: Path) -> None:
    (found,) = ranks.run(1, evaluated_in_batches_of, tiny_llama, (8, 4, 1))
    expected = found[8][0]
    assert expected["sft_loss"] > 10, "a much smaller term proves nothing"
    for size, both in found.items():
        for metrics in both:
            terms = W_PREFERENCE * metrics["preference_loss"] + W_SFT * metrics["sft_loss"]
            assert metrics["loss"] == pytest.approx(terms, rel=1e-6), size
            means = {name: value for name, value in metrics.items() if name != "auc"}  # it is no mean, and of validations
            assert means == pytest.approx({name: expected[name] for name in expected if name != "auc"}, rel=1e-6), size


def test_tokens_of_kl_examples_are_not_counted_as_trained(ranks: RankPool, tiny_llama: Path) -> None:
    samples, kl_samples = ROWS * WIDTH, ROWS * (WIDTH + 2)
    (found,) = ranks.run(1, work_of_a_batch, tiny_llama)
    assert found == {"tokens": samples, "kl_tokens": kl_samples, "padded_tokens": samples + kl_samples}
