"""Shared prompts: the same log-probs and gradients as with a prompt for each answer, for every layer and layout.

With Transformer Engine's layers, which helpers/engine_layers.py replaces, also the chosen attention and RoPE's positions.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import SHARED_PROMPTS
from tests.families.family import BY_TOKENS, PACKED, TP2, SharedPrompts
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


def both_ways(policy: Path, case: SharedPrompts) -> dict[str, float]:
    """On a rank: the largest difference of log-probs, gradients and balance, and the fraction of tokens that is saved."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.architecture.lora import LoRASettings
    from nemo_kto.distributed import state
    from nemo_kto.models.engine.engine import LogProbs, MicroBatchLoss
    from tests.helpers.engine_layers import engine_layers

    layout = dict(case.layout)
    recompute, of_engine = layout.pop("recompute", None), layout.pop("engine", False)
    there = state.Layout(**layout)
    settings = LoRASettings(rank=2, alpha=4) if case.lora else None
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
    plain = sequences = make_sequences(case.answers, mine)
    if case.with_prompts:
        sequences = plain.with_prompts(torch.arange(len(plain)) % 3 > 0)
    limits = {"prompts": 3, "tokens": None, **case.limits}

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


ENGINE = {"engine": True}  # layers called as Transformer Engine's
CASES = {
    "one_rank": SharedPrompts("llama"),
    "pairs_and_prompts": SharedPrompts("llama", answers=2, with_prompts=True, quick=True),
    "packed": SharedPrompts("llama", answers=2, limits=PACKED),
    "tp2_sequence_parallel_pp2": SharedPrompts(
        "llama", world_size=4, layout={"pipeline": 2, **TP2}, answers=2, with_prompts=True, quick=True
    ),
    "tp2": SharedPrompts("llama", world_size=2, layout={"tensor": 2}),
    "pp2_vp2": SharedPrompts("llama", world_size=2, layout={"pipeline": 2, "virtual": 2}, limits={"prompts": 4}),
    "dp2": SharedPrompts("llama", world_size=2, answers=2),
    "recompute": SharedPrompts("llama", layout={"recompute": "selective"}, answers=2, quick=True),
    "recompute_full": SharedPrompts("llama", layout={"recompute": "full"}, answers=2),
    "lora": SharedPrompts("llama", answers=2, lora=True, quick=True),
    "lora_tp2_pp2": SharedPrompts("llama", world_size=4, layout={"pipeline": 2, **TP2}, lora=True),
    "engine_pairs": SharedPrompts("llama", layout=ENGINE, answers=2, with_prompts=True, quick=True),
    "engine_tp2_sequence_parallel_pp2": SharedPrompts("llama", world_size=4, layout={"pipeline": 2, **TP2, **ENGINE}),
    "engine_recompute_lora": SharedPrompts(
        "llama", layout={"recompute": "selective", **ENGINE}, answers=2, limits=BY_TOKENS, lora=True
    ),
    "engine_recompute_full": SharedPrompts("llama", layout={"recompute": "full", **ENGINE}),
    **SHARED_PROMPTS,
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.full] * (not case.quick)) for name, case in CASES.items()]
)
def test_same_log_probs_and_gradients(case: str, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The load-balancing loss of experts is part of the objective: a shared token counts for each of its sequences."""
    chosen = CASES[case]
    policy = tmp_path_factory.getbasetemp() / f"shared-prompts-{chosen.family}"
    if not policy.exists():
        make_checkpoint(policy, chosen.family)
    found = ranks.run(chosen.world_size, both_ways, policy, chosen)
    for of_rank in found:
        assert of_rank["saved"] > 0.1
        assert of_rank["logps"] < 2e-5
        assert of_rank["gradients"] < 1e-5
        assert of_rank["balance"] < 1e-6


# Two prompts, the first with three answers; one sequence of its own, one answer that is a token.
LENGTHS, PROMPT_OF = (9, 4, 1, 6, 7, 5, 3, 2), (None, 0, 0, 0, None, None, 5, 5)


def build(folder: Path, **settings: Any) -> Any:
    """A model with the weights of the folder."""
    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.huggingface.hf_weights import load_weights
    from nemo_kto.models.gpt import build_gpt

    architecture = read_architecture(folder, tensor_parallel=1)
    model = build_gpt(architecture, params_dtype=torch.float32, **settings)
    load_weights([model], architecture, folder)
    return model


def of_a_pack(folder: Path) -> dict[str, Any]:
    """Hidden states and gradients of a pack, from models with the layers of Transformer Engine and without."""
    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.checkpoint.sharded_state import sharded_weights
    from nemo_kto.distributed import state
    from nemo_kto.layers.attention import PackedSequences
    from nemo_kto.layers.packing import token_positions
    from tests.helpers.engine_layers import engine_layers

    state.init_distributed(layout=state.Layout(), seed=1)
    ours = build(folder)
    with engine_layers(read_architecture(folder, tensor_parallel=1)):
        sharing, plain = build(folder, share_prompts=True), build(folder)
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 200, (1, sum(LENGTHS)), generator=draw)
    weights = torch.randn(sum(LENGTHS), 1, generator=draw)

    def passes(model: Any, prompts: tuple[int | None, ...] | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        packed = PackedSequences.of([LENGTHS], [prompts])[0]
        hidden = model(tokens, token_positions(LENGTHS, prompts=prompts)[None], None, packed_seq_params=packed)[0]
        parameters = [each for name, each in model.named_parameters() if not name.startswith("output_layer")]
        return hidden, [*torch.autograd.grad((weights * hidden).sum(), parameters)]

    def difference(model: Any, prompts: tuple[int | None, ...] | None) -> dict[str, float]:
        (hidden, gradients), (expected, expected_gradients) = passes(model, prompts), passes(ours, prompts)
        scale = max(float(each.abs().max()) for each in expected_gradients)
        pairs = zip(gradients, expected_gradients, strict=True)
        return {
            "hidden": float((hidden - expected).abs().max() / expected.abs().max()),
            "gradients": max(float((a - b).abs().max()) for a, b in pairs) / scale,
        }

    def core(model: Any) -> list[str]:
        return [type(layer.self_attention.core_attention).__name__ for layer in model.decoder.layers]

    with pytest.raises(ValueError, match="share_prompts must be True") as error:
        passes(plain, PROMPT_OF)
    return {
        "classes": [core(model) for model in (ours, plain, sharing)],
        "positions matter": float((passes(ours, PROMPT_OF)[0] - passes(ours, None)[0]).detach().abs().max()),
        "shared": difference(sharing, PROMPT_OF),
        "separate": difference(sharing, None),
        "refused": str(error.value),
        "names": [sorted(sharded_weights([model], adapters=False)["model0"]) for model in (plain, sharing)],
    }


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 6}), ("llama", {"rope_theta": 500.0})],
    ids=["llama", "qwen3", "window", "rope"],
)
def test_packs_equal_those_of_layers_without_the_engine(
    family: str, changes: dict[str, Any], ranks: RankPool, tmp_path: Path
) -> None:
    """Values agree to 1e-6, forward and backward; without shared prompts Transformer Engine's own attention computes."""
    (found,) = ranks.run(1, of_a_pack, make_checkpoint(tmp_path / "model", family, **changes))
    assert found["classes"] == [[name] * 4 for name in ("TorchAttention", "EngineAttention", "SharedPromptAttention")]
    assert found["positions matter"] > 0.1
    assert max(*found["shared"].values(), *found["separate"].values()) < 1e-6
    assert found["names"][0] == found["names"][1], "a checkpoint does not depend on it"
