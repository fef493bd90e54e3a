"""Shared prompts in a plan: measured on rows, and their effect on FLOPs, micro-batches, memory and communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from nemo_kto.algorithms.recipes import DPO, KTO, Recipe
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.losses.sequence import IGNORED
from nemo_kto.memory.hardware import gpus_elsewhere
from nemo_kto.memory.micro_batches import SharedPrompts, measure
from nemo_kto.memory.run_plan import Plan, make_plan, with_shared_prompts
from nemo_kto.models.engine.sequences import MicroBatchLimits
from nemo_kto.models.flops import ModelFlops, Passes
from nemo_kto.tools.plan.plan_text import plan_text
from nemo_kto.tools.plan.speed import speed_of, step_traffic
from tests.unit.conftest import Load

LIMITS = MicroBatchLimits(prompts=None, tokens=512, multiple=1, share_prompts=True)
SWAP = "model.reference.mode=swap"
Answers = Sequence[tuple[int, int, int]]  # number of the prompt, its length, length of the answer


@pytest.fixture
def resolve(load: Load, tiny_llama: Path) -> Callable[..., ResolvedRun]:
    def run(*keys: str, recipe: Recipe = KTO) -> ResolvedRun:
        model = f"pretrained_checkpoint.restore_from_path={tiny_llama}"
        return ResolvedRun.of(load(model, "trainer.precision=32", "model.data.seq_length=64", *keys, recipe=recipe))

    return run


def part(answers: Answers, name: str, labels: str, lengths: str) -> dict[str, torch.Tensor]:
    tokens_BS = torch.zeros(len(answers), 16, dtype=torch.long)
    labels_BS = torch.full_like(tokens_BS, IGNORED)
    for number, (prompt, start, size) in enumerate(answers):
        tokens_BS[number, :start] = prompt
        tokens_BS[number, start : start + size] = labels_BS[number, start : start + size] = 100 + number
    return {name: tokens_BS, labels: labels_BS, lengths: torch.tensor([start + size for _, start, size in answers])}


def measured(run: ResolvedRun, limits: MicroBatchLimits = LIMITS, **parts: Answers) -> SharedPrompts:
    batch: dict[str, torch.Tensor] = {}
    for name, answers in parts.items():
        of_kto = name.replace("samples", "sample")
        batch |= part(answers, name, f"{of_kto}_labels", f"{of_kto}_lengths")
    return measure(run, [batch], limits)


def test_a_prompt_of_a_pair_is_computed_once(resolve: Callable[..., ResolvedRun]) -> None:
    """There remain 12 of 4 + 5 and 4 + 3 tokens, and 10 of 2 + 1 and 2 + 7."""
    run = resolve(SWAP, recipe=DPO)
    found = measured(run, chosen=[(1, 4, 5), (2, 2, 1)], rejected=[(1, 4, 3), (2, 2, 7)])
    flops = ModelFlops.of_model(run.architecture).of_passes(Passes(forward=2, backward=1))
    whole = sum(flops.of_tokens(*each) for each in ((9, 5), (7, 3), (3, 1), (9, 7)))
    assert (found.tokens, found.trained, found.largest) == pytest.approx((22 / 28, 22 / 28, 22 / 28))
    assert found.flops == pytest.approx(1 - (flops.of_tokens(4) + flops.of_tokens(2)) / whole)
    assert found.examples == 2
    one = MicroBatchLimits(prompts=1, tokens=None, multiple=1, share_prompts=True)
    found = measured(run, one, chosen=[(1, 4, 5), (2, 2, 1)], rejected=[(1, 4, 3), (2, 2, 7)])
    assert (found.trained, found.largest) == pytest.approx((22 / 28, 10 / 12)), "the second micro-batch shares less"


@pytest.mark.parametrize(
    ("keys", "prompts", "tokens", "trained"),
    [
        # 8 tokens in each of four sequences: trained forward and backward, KL examples, and the reference of all four
        ([SWAP], (1, 2), (32 + 16 + 20) / 80, 1),  # the reference computes two prompts of 6 tokens once
        ([SWAP], (1, 1), (20 + 10 + 14) / 80, 10 / 16),
        ([SWAP, "trainer.precision=bf16"], (1, 1), (20 + 10 + 20) / 80, 10 / 16),
        (["model.reference.mode=cached", "model.kto.preference_loss=bco"], (1, 1), 10 / 16, 10 / 16),
    ],
)
def test_passes_of_kto(
    keys: list[str], prompts: tuple[int, int], tokens: float, trained: float, resolve: Callable[..., ResolvedRun]
) -> None:
    answers = [(prompt, 6, 2) for prompt in prompts]
    parts = {"samples": answers} | ({} if "bco" in str(keys) else {"kl_samples": answers})
    found = measured(resolve(*keys), LIMITS, **parts)
    assert (found.tokens, found.trained) == pytest.approx((tokens, trained))
    assert (found.flops < 1) is (tokens < 1)


def test_nothing_is_saved_without_equal_prompts(resolve: Callable[..., ResolvedRun]) -> None:
    found = measured(resolve("model.kto.preference_loss=apo_zero_unpaired"), samples=[(1, 6, 2), (2, 6, 2)])
    assert found == SharedPrompts(examples=2)
    assert str(found) == "none in 2 examples"


SHARED = SharedPrompts(tokens=0.75, flops=0.8, trained=0.625, largest=0.7, examples=64)


def plans(run: ResolvedRun) -> tuple[Plan, Plan]:
    """The plan without rows, and with shared prompts."""
    plan = make_plan(run, gpus_elsewhere(4, "h100"))
    return plan, with_shared_prompts(plan, SHARED)


def test_flops_and_traffic_follow(resolve: Callable[..., ResolvedRun]) -> None:
    layout = ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"]
    before, after = plans(resolve("model.data.share_prompts=true", *layout, recipe=DPO))
    assert speed_of(after).flops == pytest.approx(0.8 * speed_of(before).flops)
    assert speed_of(after).seconds < 0.85 * speed_of(before).seconds
    sent = [step_traffic(plan.training, plan.step, stage=0) for plan in (before, after)]
    assert sent[1].pipeline == pytest.approx(0.75 * sent[0].pipeline)
    assert sent[1].tensor == pytest.approx(0.75 * sent[0].tensor)
    assert sent[1].data == sent[0].data
    assert before.step.tokens == after.step.tokens, "the tokens of the rows"
    assert "nemo-kto check" in plan_text(before)
    assert "save 25.0% of the tokens and 20.0% of the FLOPs of 64 examples" in plan_text(after)


@pytest.mark.parametrize(
    ("keys", "tokens", "count"),
    [
        # a rank has 16 pairs of 2 x 64 tokens; four fit into 512 tokens, or six of 0.625 times as many
        (["model.micro_batch_tokens=512"], (512, 512), (4, 3)),
        (["model.micro_batch_size=4"], (512, 359), (4, 4)),
        (["model.micro_batch_tokens=8192"], (2048, 1434), (1, 1)),  # the whole share of a rank
        (["model.micro_batch_tokens=64"], (128, 90), (16, 16)),  # one pair
    ],
)
def test_micro_batches_follow(
    keys: list[str], tokens: tuple[int, int], count: tuple[int, int], resolve: Callable[..., ResolvedRun]
) -> None:
    before, after = plans(resolve("model.data.share_prompts=true", *keys, recipe=DPO))
    assert (before.training.micro_batch_tokens, after.training.micro_batch_tokens) == tokens
    assert (before.training.micro_batches, after.training.micro_batches) == count
    assert (after.largest.activations < before.largest.activations) is (tokens[1] < tokens[0])
