"""Shared prompts: the same log-probs and gradients as with a prompt for each answer, for every layer and layout."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import lora_jobs
from tests.helpers.engines import engine
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint

WIDTH = 40
PROMPTS = {9: 3, 1: 2, 17: 4, 6: 1, 14: 2}  # length of each prompt -> its examples, each of which has one or two answers


def make_sequences(answers: int, share: slice) -> Any:
    """Examples in random order, of which one has an answer without tokens; those of a data-parallel rank."""
    from nemo_kto.models.engine.sequences import SequenceBatch

    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 256, (length,), generator=draw) for length, count in PROMPTS.items() for _ in range(count)]
    by_length: dict[int, torch.Tensor] = {}
    prompts = [by_length.setdefault(len(prompt), prompt) for prompt in prompts]
    chosen = torch.randperm(len(prompts), generator=draw)[share].tolist()
    tokens = torch.zeros(answers * len(chosen), WIDTH, dtype=torch.long)
    labels, lengths = torch.full_like(tokens, -100), torch.zeros(len(tokens), dtype=torch.long)
    for k in range(len(tokens)):
        prompt = prompts[chosen[k % len(chosen)]]
        count = 0 if k == 4 else int(torch.randint(1, 20, (), generator=draw))
        answer = torch.randint(0, 256, (count,), generator=draw)
        lengths[k] = len(prompt) + count
        tokens[k, : lengths[k]] = torch.cat([prompt, answer])
        labels[k, len(prompt) : lengths[k]] = answer
    return SequenceBatch(tokens_BS=tokens, labels_BS=labels, lengths_B=lengths, answers=answers)


def both_ways(
    policy: Path, layout: dict[str, Any], answers: int, limits: dict[str, Any], with_prompts: bool, lora: bool
) -> dict[str, float]:
    """On a rank: the largest difference of log-probs, gradients and balance, and the fraction of tokens that is saved."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.architecture.lora import LoRASettings
    from nemo_kto.distributed import state
    from nemo_kto.models.engine.engine import LogProbs, MicroBatchLoss
    from tests.helpers.engine_layers import engine_layers

    layout = dict(layout)
    recompute, of_engine = layout.pop("recompute", None), layout.pop("engine", False)
    there = state.Layout(**layout)
    settings = LoRASettings(rank=2, alpha=4) if lora else None
    modules = ("core_attn",) if recompute == "selective" else ()
    with engine_layers(read_architecture(policy, tensor_parallel=there.tensor)) if of_engine else contextlib.nullcontext():
        chunks, architecture = lora_jobs.build(
            policy, there, settings, recompute=recompute, distributed=False, recompute_modules=modules, share_prompts=True
        )
    for name, parameter in (named for chunk in chunks for named in chunk.named_parameters()):
        if name.endswith("lora_b"):  # it is zero, and so would be the gradient of A
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    runs = engine(chunks, architecture, logprob_chunk_size=7)
    runs.moe_aux_loss_coeff = 0.3
    mine = slice(parallel_state.get_data_parallel_rank(), None, parallel_state.get_data_parallel_world_size())
    plain = sequences = make_sequences(answers, mine)
    if with_prompts:
        sequences = plain.with_prompts(torch.arange(len(plain)) % 3 > 0)
    limits = {"prompts": 3, "tokens": None, **limits}

    def pass_over(share: bool) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, float]]:
        runs.limits = replace(runs.limits, **limits, share_prompts=share)
        found = torch.zeros(2 * len(sequences))

        def loss(sequence_index_b: torch.Tensor, logprobs: LogProbs) -> MicroBatchLoss:
            logps = torch.cat([logprobs.response_b, logprobs.prompt_b])
            place = torch.cat([sequence_index_b, sequence_index_b + len(sequences)])[: len(logps)]
            found[place] = logps.detach()
            weights = torch.sin(1.0 + place) * sequences.valid_B.repeat(2)[place]
            return MicroBatchLoss.of({"loss_sum": (weights * logps).sum(), "rows": torch.tensor(len(sequence_index_b))})

        runs.zero_grad()
        runs.forward_backward(sequences, loss, forward_only=False)
        gradients = [
            each.main_grad.clone() for chunk in chunks for each in unwrap_model(chunk).parameters() if each.requires_grad
        ]
        return torch.cat([found, runs.logprobs(plain)]), gradients, runs.balance_sums()

    (logps, gradients, balance), (expected_logps, expected, expected_balance) = pass_over(True), pass_over(False)
    scale = max(gradient.abs().max() for gradient in expected)
    assert balance.keys() == expected_balance.keys()
    assert expected_logps.abs().max() > (1.0 if parallel_state.is_pipeline_last_stage() else 0.0)
    shared = replace(runs.limits, share_prompts=True)
    return {
        "logps": float((logps - expected_logps).abs().max()),
        "gradients": float(max((a - b).abs().max() for a, b in zip(gradients, expected, strict=True)) / scale),
        "balance": max((abs(balance[name] - value) / value for name, value in expected_balance.items()), default=0.0),
        "saved": sum(sequences.shared_prompts(shared)) / int(sequences.lengths_B.sum()),
    }


TP2: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
BY_TOKENS = {"prompts": None, "tokens": 90}
ENGINE = {"engine": True}  # layers called as Transformer Engine's
# model, ranks, layout, answers of an example, limits of a micro-batch, log-probs of prompts too, LoRA
CASES: dict[str, tuple[str, int, dict[str, Any], int, dict[str, Any], bool, bool]] = {
    "one_rank": ("llama", 1, {}, 1, {}, False, False),
    "pairs_and_prompts": ("llama", 1, {}, 2, {}, True, False),
    "packed": ("llama", 1, {}, 2, {"prompts": None, "tokens": 90, "packed": True}, False, False),
    "tp2_sequence_parallel_pp2": ("llama", 4, {"pipeline": 2, **TP2}, 2, {}, True, False),
    "tp2": ("llama", 2, {"tensor": 2}, 1, {}, False, False),
    "pp2_vp2": ("llama", 2, {"pipeline": 2, "virtual": 2}, 1, {"prompts": 4}, False, False),
    "dp2": ("llama", 2, {}, 2, {}, False, False),
    "recompute": ("llama", 1, {"recompute": "selective"}, 2, {}, False, False),
    "recompute_full": ("llama", 1, {"recompute": "full"}, 2, {}, False, False),
    "lora": ("llama", 1, {}, 2, {}, False, True),
    "lora_tp2_pp2": ("llama", 4, {"pipeline": 2, **TP2}, 1, {}, False, True),
    "experts": ("mixtral", 1, {}, 2, {}, False, False),
    "experts_tp2_ep2": ("mixtral", 2, {**TP2, "expert": 2, "expert_tensor": 1}, 2, {}, False, False),
    "experts_pp2_ep2": ("mixtral", 4, {"pipeline": 2, "expert": 2}, 1, {}, False, False),
    "experts_ep2": ("mixtral", 2, {"expert": 2}, 1, {}, False, False),
    "windows_and_soft_caps": ("gemma2", 1, {}, 1, {}, False, False),
    "windows_and_sinks": ("gpt_oss", 1, {}, 1, {}, False, False),
    "windows": ("gemma3_text", 1, {}, 1, {}, False, False),
    "chunks_and_temperature": ("llama4_text", 1, {}, 1, {}, False, False),
    "norms_after_rope": ("hunyuan_v1_dense", 1, {}, 1, {}, False, False),
    "rope_and_temperature": ("ministral3", 1, {}, 1, {}, False, False),
    "parallel": ("cohere2", 1, {}, 1, {"prompts": None, "tokens": 90, "packed": True}, False, False),
    "latents_tp2": ("deepseek_v3", 2, {**TP2, "recompute": "selective"}, 2, {}, True, False),
    "latents_packed": ("deepseek_v3", 1, {}, 1, BY_TOKENS, False, False),
    "states": ("qwen3_5_text", 1, {}, 2, {}, True, False),
    "states_packed": ("qwen3_5_text", 1, {}, 2, {"prompts": None, "tokens": 90, "packed": True}, False, False),
    "states_tp2_pp2": ("qwen3_5_text", 4, {"pipeline": 2, **TP2}, 1, {}, False, False),
    "states_recompute_lora": ("qwen3_5_text", 1, {"recompute": "full"}, 2, {}, False, True),
    "states_and_experts": ("qwen3_next", 2, {**TP2, "expert": 2, "expert_tensor": 1}, 2, {}, False, False),
    "mamba": ("nemotron_h", 1, {}, 2, {}, True, False),
    "mamba_packed": ("nemotron_h", 1, {}, 2, {"prompts": None, "tokens": 90, "packed": True}, False, False),
    "mamba_tp2_ep2": ("nemotron_h", 2, {**TP2, "expert": 2, "expert_tensor": 1}, 2, {}, False, False),
    "mamba_pp2": ("nemotron_h", 2, {"pipeline": 2}, 2, {}, False, False),
    "mamba_recompute_lora": ("nemotron_h", 1, {"recompute": "full"}, 2, {}, False, True),
    "mamba_in_layers_with_experts_ep2": ("granitemoehybrid", 2, {"expert": 2}, 2, {}, True, False),
    "norms_after_attention": ("exaone4", 1, {}, 1, {"prompts": None, "tokens": 90, "packed": True}, False, False),
    "part_of_each_head": ("glm4", 1, {}, 1, {}, False, False),
    "neighbouring_channels": ("ernie4_5", 1, {}, 1, {}, False, False),
    "bias_of_the_output": ("seed_oss", 1, {}, 1, {}, False, False),
    "engine_pairs": ("llama", 1, ENGINE, 2, {}, True, False),
    "engine_tp2_sequence_parallel_pp2": ("llama", 4, {"pipeline": 2, **TP2, **ENGINE}, 1, {}, False, False),
    "engine_recompute_lora": ("llama", 1, {"recompute": "selective", **ENGINE}, 2, BY_TOKENS, False, True),
    "engine_recompute_full": ("llama", 1, {"recompute": "full", **ENGINE}, 1, {}, False, False),
}
QUICK = (
    "pairs_and_prompts tp2_sequence_parallel_pp2 recompute lora experts_ep2 windows_and_sinks chunks_and_temperature "
    "norms_after_rope rope_and_temperature parallel norms_after_attention part_of_each_head states states_and_experts mamba "
    "latents_tp2 engine_pairs"
).split()


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.full] * (case not in QUICK)) for case in CASES])
def test_same_log_probs_and_gradients(case: str, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The load-balancing loss of experts is part of the objective: a shared token counts for each of its sequences."""
    family, world_size, *arguments = CASES[case]
    policy = tmp_path_factory.getbasetemp() / f"shared-prompts-{family}"
    if not policy.exists():
        make_checkpoint(policy, family)
    found = ranks.run(world_size, both_ways, policy, *arguments)
    for of_rank in found:
        assert of_rank["saved"] > 0.1
        assert of_rank["logps"] < 2e-5
        assert of_rank["gradients"] < 1e-5
        assert of_rank["balance"] < 1e-6
