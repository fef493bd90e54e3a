"""Operations of a forward pass, counted by hand and by torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nemo_kto.models.architecture import read_architecture
from nemo_kto.models.flops import ForwardFlops
from nemo_kto.models.sequences import SequenceBatch
from tests.tiny import make_checkpoint


def sequences(lengths: list[int], responses: list[int]) -> SequenceBatch:
    """Sequences of these lengths, of which the last tokens are responses."""
    width = max(lengths)
    labels = torch.full((len(lengths), width), -100)
    for number, (length, response) in enumerate(zip(lengths, responses, strict=True)):
        labels[number, length - response : length] = 1
    zeros = torch.zeros(len(lengths), width, dtype=torch.int64)
    return SequenceBatch.of(zeros, labels, torch.tensor(lengths), None, None)


def test_by_hand() -> None:
    flops = ForwardFlops(per_token=1000, per_token_mlp=600, per_token_pair=10, per_response_token=7)
    assert flops.of(sequences([3, 5], [1, 2])).item() == 1000 * 8 + 10 * (6 + 15) + 7 * 3


def test_llama4_by_hand(tmp_path: Path) -> None:
    """Of transformers torch counts every expert for every token."""
    flops = ForwardFlops.of_model(read_architecture(make_checkpoint(tmp_path, "llama4_text"), tensor_parallel=1))
    mixture = 64 * 8 + 2 * 3 * 64 * 48  # the router, the chosen expert and the shared one, which has no gate
    assert flops.per_token_mlp == 2 * (3 * mixture + 3 * 64 * 96)
    assert flops.per_token == flops.per_token_mlp + 2 * 4 * 64 * 8 * (2 * 8 + 2 * 4)
    assert flops.per_token_pair == 4 * 4 * 8 * 8


@pytest.mark.parametrize("family", ["gpt_oss", "llama", "qwen2_moe", "qwen3_moe"])
def test_what_torch_counts_of_the_hugging_face_model(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    flops, length = ForwardFlops.of_model(read_architecture(folder, tensor_parallel=2)), 16
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64))
    everything = length * (flops.per_token + flops.per_response_token) + length**2 * flops.per_token_pair
    assert counter.get_total_flops() == everything
