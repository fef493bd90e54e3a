"""The load-balancing loss of mixture-of-experts models: its gradient against autograd over transformers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.distributed.models.test_gradients import ROWS, make_batch
from tests.helpers import lora_jobs
from tests.helpers.engines import engine
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint

COEFFICIENT = 0.3


def make_sequences(answers: int, share: slice = slice(None)) -> Any:
    """The rows of a batch, or their halves as answers to the same prompts; a share of them. Row 5 has no response."""
    from nemo_kto.models.engine.sequences import SequenceBatch

    batch, prompts = make_batch(), torch.arange(ROWS // answers)[share]
    index = torch.cat([prompts + ROWS // answers * answer for answer in range(answers)])
    tokens, labels, lengths = (batch[name][index] for name in ("samples", "sample_labels", "sample_lengths"))
    return SequenceBatch(tokens_BS=tokens, labels_BS=labels, lengths_B=lengths, answers=answers)


def balance_step(
    policy: Path, out: Path, answers: int, layout: dict[str, Any], micro_batch_size: int, recompute: str | None, packed: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """On a rank: passes with only the load-balancing loss; the gradients are exported in the place of weights.

    Returns:
        The recorded sums of passes with and without gradients.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    from nemo_kto.distributed import state
    from nemo_kto.huggingface.hf_weights import export
    from nemo_kto.models.engine.engine import LogProbs, MicroBatchLoss

    chunks, architecture = lora_jobs.build(policy, state.Layout(**layout), recompute=recompute, distributed=False)
    runs = engine(chunks, architecture, micro_batch_size=micro_batch_size, packed=packed)
    runs.moe_aux_loss_coeff = COEFFICIENT
    mine = slice(parallel_state.get_data_parallel_rank(), None, parallel_state.get_data_parallel_world_size())
    sequences = make_sequences(answers, mine)
    counts = sequences.counted_B > 0

    def nothing_else(sequence_index_b: torch.Tensor, logprobs: LogProbs) -> MicroBatchLoss:
        examples = counts[sequence_index_b].sum() // answers
        return MicroBatchLoss.of({"loss_sum": (0 * logprobs.response_b).sum(), "rows": examples})

    for chunk in chunks:
        chunk.zero_grad_buffer()
    runs.forward_backward(sequences, nothing_else, forward_only=False)
    recorded = runs.balance_sums()
    runs.logprobs(sequences)
    assert runs.balance_sums() == recorded, "the reference and KL examples do not count"
    for parameter in unwrap_model(chunks[0]).parameters():
        parameter.data.copy_(parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter))
    export(chunks, architecture, source=policy, out=out, max_shard_bytes=10**9)
    runs.forward_backward(sequences, nothing_else, forward_only=True)
    return recorded, runs.balance_sums()


class Oracle(NamedTuple):
    """The formula over the router logits of transformers."""

    policy: Path
    answers: int  # to a prompt
    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]  # by the names in a file; zero for weights that are not trained


# Family -> the probabilities of the experts from their logits.
PROBABILITIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mixtral": lambda logits: logits.softmax(-1),
    "glm4_moe": lambda logits: logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True),
}


@pytest.fixture(scope="module")
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    from transformers import AutoModelForCausalLM

    from tests.helpers.hf_models import weights

    family, answers = request.param
    policy = make_checkpoint(tmp_path_factory.mktemp("balance") / "policy", family)
    sequences = make_sequences(answers)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    experts, chosen = model.config.num_local_experts, model.config.num_experts_per_tok
    layers: list[tuple[torch.Tensor, ...]] = []  # of those with experts: logits, weights and numbers of the chosen ones
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda module, given, outputs: layers.append(outputs))
    model(sequences.tokens_BS)
    losses, choices = [], torch.zeros(len(layers), experts)
    valid_P = (sequences.labels_BS != -100).any(1).view(answers, -1).all(0)
    for row in valid_P.repeat(answers).nonzero().flatten().tolist():
        length = int(sequences.lengths_B[row])
        for layer, (logits, _, indices) in enumerate(layers):
            of_row = [values.view(*sequences.tokens_BS.shape, -1)[row, :length] for values in (logits, indices)]
            probs, counts = PROBABILITIES[family](of_row[0]), torch.bincount(of_row[1].flatten(), minlength=experts)
            losses.append(experts * (counts / (length * chosen) * probs.mean(0)).sum())
            choices[layer] += counts
    mean = torch.stack(losses).mean()
    (COEFFICIENT * len(layers) * mean).backward()
    for values in (*model.parameters(), *model.buffers()):
        values.data = torch.zeros_like(values) if values.grad is None else values.grad
    model.save_pretrained(out := tmp_path_factory.mktemp("expected"))
    shares = choices / choices.sum(1, keepdim=True)
    metrics = {"moe_aux_loss": mean.item(), "largest": shares.max().item(), "smallest": shares.min().item()}
    return Oracle(policy, answers, metrics, weights(out))


# Ranks, layout, prompts per micro-batch, recomputation, packing.
CASES: dict[str, tuple[int, dict[str, Any], int, str | None, bool]] = {
    "one_rank": (1, {}, 2, None, False),
    "micro_batches_of_1": (1, {}, 1, None, False),
    "recompute": (1, {}, 4, "selective", False),
    "tp2_ep2": (2, {"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1}, 2, None, False),
    "pp2_ep2": (4, {"pipeline": 2, "expert": 2}, 2, None, False),
    "cp2": (2, {"context": 2}, 2, None, False),
    "tp2_pp2": (4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, 2, None, False),
    "packed": (1, {}, 3, None, True),
    "packed_recompute": (1, {}, 2, "selective", True),
    "packed_cp2": (2, {"context": 2}, 3, None, True),
    "packed_tp2_pp2": (4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, 2, None, True),
}
QUICK = (
    *((("mixtral", 1), "tp2_pp2"), (("mixtral", 2), "tp2_ep2"), (("mixtral", 2), "packed_cp2")),
    (("glm4_moe", 1), "packed_tp2_pp2"),
)


@pytest.mark.parametrize(
    ("oracle", "case"),
    [
        pytest.param(
            model, case, id="{}-{}-{}".format(*model, case), marks=[pytest.mark.full] * ((model, case) not in QUICK)
        )
        for model in itertools.product(PROBABILITIES, (1, 2))
        for case in CASES
    ],
    indirect=["oracle"],
    scope="module",
)
def test_the_gradient_equals_autograd_of_the_formula(case: str, oracle: Oracle, ranks: RankPool, tmp_path: Path) -> None:
    from nemo_kto.losses.metrics import balance_metrics
    from tests.helpers.hf_models import weights

    _, _, expected, gradients = oracle
    world_size, *rest = CASES[case]
    arguments = (oracle.policy, tmp_path, oracle.answers, *rest)
    for recorded, without_gradient in ranks.run(world_size, balance_step, *arguments):
        assert without_gradient == {}
        metrics = balance_metrics(recorded)
        assert metrics["moe_aux_loss"] == pytest.approx(expected["moe_aux_loss"], rel=1e-5)
        assert metrics["moe_largest_share"] == pytest.approx(expected["largest"], rel=1e-6)
        assert metrics["moe_smallest_share"] == pytest.approx(expected["smallest"], rel=1e-6)
    found = weights(tmp_path)
    scale = max(gradient.abs().max() for gradient in gradients.values())
    assert found.keys() == gradients.keys()
    assert max(gradients[name].abs().max() for name in gradients if name.endswith("gate.weight")) > 0.1 * scale
    for name, gradient in gradients.items():
        assert (found[name] - gradient).abs().max() < 1e-5 * scale, name
