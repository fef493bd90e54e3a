"""One KTO step against autograd over transformers: loss, z0 and the gradient of every parameter, at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import GRADIENTS
from tests.helpers import lora_jobs
from tests.helpers.engines import engine, kto_model, split_of
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint

BETA, W_DESIRABLE, W_UNDESIRABLE, W_PREFERENCE, W_SFT = 0.3, 1.0, 1.5, 0.8, 0.1
ROWS, WIDTH, PROMPT = 8, 24, 4  # a width that tensor- and context-parallel ranks can share out


def make_batch() -> dict[str, torch.Tensor]:
    """Random rows of varied length and weight; row 5 has no response, so it counts nowhere."""
    draw = torch.Generator().manual_seed(7)
    batch = {"preference": torch.tensor([1, 0, 1, 1, 0, 1, 0, 0])}
    batch["weights"] = torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0, 7.0, 0.25, 1.0])
    for name in ("sample", "kl_sample"):
        tokens = torch.randint(0, 256, (ROWS, WIDTH), generator=draw)  # no padding token: transformers gives it no gradient
        lengths = torch.randint(PROMPT + 1, WIDTH + 1, (ROWS,), generator=draw)
        labels = tokens.clone()
        labels[:, :PROMPT] = -100
        labels[torch.arange(WIDTH) >= lengths[:, None]] = -100
        labels[5] = -100
        batch |= {f"{name}s": tokens, f"{name}_labels": labels, f"{name}_lengths": lengths}
    return batch


def kto_step(
    policy: Path, reference: Path, out: Path, layout: dict[str, Any], micro_batch_size: int
) -> tuple[float, dict[str, float]]:
    """On a rank: one step without the optimizer; the gradients are exported as if they were weights."""
    from megatron.core import parallel_state

    from nemo_kto.distributed import state
    from nemo_kto.huggingface.hf_weights import export, load_weights
    from nemo_kto.models.engine.reference import SwappedWeights

    layout = dict(layout)
    recompute, last, packed = (layout.pop(name, None) for name in ("recompute_granularity", "last", "packed"))
    there = state.Layout(**layout)
    chunks, architecture = lora_jobs.build(
        reference, there, recompute=recompute, distributed=False, split=split_of(there, last=last)
    )
    swapped = SwappedWeights(parameters=[each for chunk in chunks for each in chunk.parameters()])
    load_weights(chunks, architecture, policy)
    runs = engine(chunks, architecture, micro_batch_size=micro_batch_size, logprob_chunk_size=7, packed=bool(packed))
    model = kto_model(
        runs,
        swapped.active,
        beta=BETA,
        weights=(W_DESIRABLE, W_UNDESIRABLE),
        preference_loss_weight=W_PREFERENCE,
        sft_loss_weight=W_SFT,
        sft_average_log_probs=True,
    )
    mine = slice(parallel_state.get_data_parallel_rank(), None, parallel_state.get_data_parallel_world_size())
    batch = {name: values[mine] for name, values in make_batch().items()}
    samples, kl_samples = model.get_ref_policy_logprobs(batch).chunk(2)
    batch |= {"ref_policy_log_probs_samples": samples, "ref_policy_log_probs_kl_samples": kl_samples}
    model.zero_grad()
    loss, metrics = model.get_loss_and_metrics(batch, forward_only=False)
    for parameter in (each for chunk in chunks for each in chunk.parameters() if each.requires_grad):
        parameter.data.copy_(parameter.main_grad)
    export(chunks, architecture, source=policy, out=out, max_shard_bytes=10**9)
    return loss, dict(metrics)


@pytest.fixture(scope="module")
def oracle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, dict[str, float], Any]:
    """Policy, reference, and the step between them by transformers and autograd."""
    from transformers import AutoModelForCausalLM

    base = tmp_path_factory.mktemp("gradients")
    step = GRADIENTS[request.param]
    policy = make_checkpoint(base / "policy", step.family, **step.changes)
    reference = make_checkpoint(base / "reference", step.family, seed=1, **step.changes)
    batch = make_batch()

    def row_logps(model: Any, name: str) -> torch.Tensor:
        labels = batch[f"{name}_labels"][:, 1:]
        logps = model(batch[f"{name}s"]).logits[:, :-1].log_softmax(-1)
        chosen = logps.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return torch.where(labels != -100, chosen, 0).sum(1)

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    frozen = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    valid = (batch["sample_labels"] != -100).any(1)
    with torch.no_grad():
        kl_ratios = (row_logps(model, "kl_sample") - row_logps(frozen, "kl_sample"))[valid]
        if kl_ratios.mean() < 0:  # z0 must not be clamped away: let the two change places
            policy, reference, model, frozen, kl_ratios = reference, policy, frozen, model, -kl_ratios
        reference_logps = row_logps(frozen, "sample")
    z0 = kl_ratios.mean().clamp(min=0)
    ratios = (row_logps(model, "sample") - reference_logps)[valid]
    desirable = batch["preference"][valid].bool()
    losses = torch.where(
        desirable,
        W_DESIRABLE * (1 - torch.sigmoid(BETA * (ratios - z0))),
        W_UNDESIRABLE * (1 - torch.sigmoid(BETA * (z0 - ratios))),
    )
    counts = (batch["sample_labels"][:, 1:] != -100).sum(1)[valid]
    sft = -(row_logps(model, "sample")[valid] / counts)[desirable]
    weights = batch["weights"][valid]
    loss = W_PREFERENCE * (weights * losses).mean() + W_SFT * (weights[desirable] * sft).mean()
    loss.backward()
    expected = {
        "loss": loss.item(),
        "sft_loss": sft.mean().item(),
        "preference_loss": losses.mean().item(),
        "kl": z0.item(),
        "chosen": BETA * ratios[desirable].mean().item(),
    }
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if ".indexer." not in name}
    return policy, reference, expected, gradients


CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    "one_rank": (1, {}, 1),
    "micro_batch_4": (1, {}, 4),
    "packed": (1, {"packed": True}, 3),
    "recompute": (1, {"recompute_granularity": "full"}, 2),
    "tp2": (2, {"tensor": 2}, 2),
    "pp2": (2, {"pipeline": 2}, 1),
    "pp2_vp2": (2, {"pipeline": 2, "virtual": 2}, 3),  # three micro-batches, and an empty one
    "pp2_uneven": (2, {"pipeline": 2, "last": 1}, 2),
    "dp2": (2, {}, 2),
    "cp2": (2, {"context": 2}, 2),
    "packed_cp2": (2, {"context": 2, "packed": True}, 3),
    "cp2_dp2": (4, {"context": 2}, 1),
    "cp2_tp2_sequence_parallel": (4, {"context": 2, "tensor": 2, "sequence_parallel": True}, 2),
    "tp2_pp2_sequence_parallel": (4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, 2),
}


@pytest.mark.parametrize(
    ("oracle", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case}", marks=[pytest.mark.full] * (case not in step.quick))
        for name, step in GRADIENTS.items()
        for case in step.layouts or CASES
    ],
    indirect=["oracle"],
    scope="module",
)
def test_every_gradient_equals_autograd(
    case: str, oracle: tuple[Path, Path, dict[str, float], Any], ranks: RankPool, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    policy, reference, expected, gradients = oracle
    world_size, layout, micro_batch_size = CASES[case]
    results = ranks.run(world_size, kto_step, policy, reference, tmp_path / "gradients", layout, micro_batch_size)
    assert expected["kl"] != 0, "unit tests cover both sides of the clamp; here z0 must be positive"
    for loss, metrics in results:
        assert loss == pytest.approx(expected["loss"], rel=1e-5)
        assert metrics["sft_loss"] == pytest.approx(expected["sft_loss"], rel=1e-5)
        assert metrics["preference_loss"] == pytest.approx(expected["preference_loss"], rel=1e-5)
        assert metrics["kl"] == pytest.approx(expected["kl"], rel=1e-5, abs=2e-5)  # a small mean of large log-ratios
        assert metrics["rewards_chosen_mean"] == pytest.approx(expected["chosen"], rel=1e-5, abs=BETA * 2e-5)
        assert metrics["rows"] == ROWS - 1
        assert metrics["invalid_rows"] == 1
    ours: dict[str, torch.Tensor] = {}
    for shard in (tmp_path / "gradients").glob("*.safetensors"):
        ours |= {name.replace("backbone.", "model."): gradient for name, gradient in load_file(shard).items()}
    ours = {
        name: gradient for name, gradient in ours.items() if not name.endswith(("layer_scalar", "act_fn.beta", "act_fn.eps"))
    }  # never trained
    scale = max(gradient.abs().max() for gradient in gradients.values())
    assert {name for name in ours if ".indexer." not in name} == gradients.keys()
    for name, gradient in gradients.items():
        assert (ours[name] - gradient).abs().max() < 1e-5 * scale, name
