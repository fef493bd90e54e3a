"""FLOPs per forward pass against manual values and the count of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.models.engine.sequences import SequenceBatch
from nemo_kto.models.flops import AttentionWindow, Flops, ModelFlops, Passes
from tests.helpers.tiny_models import make_checkpoint

LENGTH = 16


def sequences(lengths: list[int], responses: list[int]) -> SequenceBatch:
    """Sequences of these lengths, of which the last tokens are responses."""
    width = max(lengths)
    labels = torch.full((len(lengths), width), -100)
    for number, (length, response) in enumerate(zip(lengths, responses, strict=True)):
        labels[number, length - response : length] = 1
    zeros = torch.zeros(len(lengths), width, dtype=torch.int64)
    return SequenceBatch.of(zeros, labels, torch.tensor(lengths))


WINDOWED: dict[str, dict[str, Any]] = {
    **{name: {"sliding_window": 5} for name in ("gemma2", "gemma3_text", "gpt_oss", "mistral", "phi3")},
    "llama4_text": {"attention_chunk_size": 5},
}


@pytest.mark.parametrize("family", WINDOWED)
def test_attention_counts_the_tokens_that_a_token_sees(tmp_path: Path, family: str) -> None:
    """Windows and chunks of five tokens, and sequences that end before, at and after the end of one."""
    from transformers import AutoConfig

    folder, lengths = make_checkpoint(tmp_path, family, **WINDOWED[family]), [1, 4, 5, 6, 10, 13]
    architecture, config = read_architecture(folder, tensor_parallel=1), AutoConfig.from_pretrained(folder)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    sees = {
        "full_attention": lambda query, key: key <= query,
        "sliding_attention": lambda query, key: query - 5 < key <= query,
        "chunked_attention": lambda query, key: query // 5 * 5 <= key <= query,
    }
    pairs = sum(sees[kind](q, k) for kind in kinds for n in lengths for q in range(n) for k in range(n))
    flops = ModelFlops.of_model(architecture)
    heads = 4 * architecture.num_attention_heads * architecture.head_dim
    for operations, products in ((flops.forward, 1), (flops.disabled, 1), (flops.backward, 2)):
        attention = operations.of(sequences(lengths, [0] * len(lengths))).item() - operations.per_token * sum(lengths)
        assert attention == products * heads * pairs
        assert sum(map(operations.of_tokens, lengths)) == attention + operations.per_token * sum(lengths)
        assert operations.of_sequences(3, 13) == 3 * operations.of_tokens(13, 12)


def everything(flops: Flops) -> int:
    """Where every token is an answer, and sees every other."""
    return LENGTH * (flops.per_token + flops.per_response_token) + LENGTH**2 * sum(flops.per_token_pair.values())


def counted(model: Any, *, trained: bool = True) -> tuple[int, int]:
    """By torch, of a pass forward, and back."""
    with FlopCounterMode(display=False) as forward:
        logits = model(input_ids=torch.zeros(1, LENGTH, dtype=torch.int64)).logits
    with FlopCounterMode(display=False) as backward:
        if trained:
            logits.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_flops_against_manual_values() -> None:
    flops = Flops(per_token=1000, per_token_mlp=600, per_token_pair={AttentionWindow(None): 10}, per_response_token=7)
    assert flops.of(sequences([3, 5], [1, 2])).item() == 1000 * 8 + 10 * (6 + 15) + 7 * 3


def test_flops_of_llama4_against_manual_values(tmp_path: Path) -> None:
    """Values are by hand because torch counts every expert of transformers for every token."""
    flops = ModelFlops.of_model(read_architecture(make_checkpoint(tmp_path, "llama4_text"), tensor_parallel=1)).forward
    mixture = 64 * 8 + 2 * 3 * 64 * 48  # the router, the chosen expert and the shared one, which has no gate
    assert flops.per_token_mlp == 2 * (3 * mixture + 3 * 64 * 96)
    assert flops.per_token == flops.per_token_mlp + 2 * 4 * 64 * 8 * (2 * 8 + 2 * 4)
    assert flops.per_token_pair == {AttentionWindow(12, chunked=True): 3 * 4 * 8 * 8, AttentionWindow(None): 4 * 8 * 8}


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "llama", "qwen2_moe", "qwen3_moe"])
def test_flops_equal_the_count_of_torch(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    flops = ModelFlops.of_model(read_architecture(folder, tensor_parallel=2))
    forward, backward = counted(model)
    assert forward == everything(flops.forward) == everything(flops.disabled)
    assert backward == everything(flops.backward) == 2 * forward


ATTENTION = ("q_proj", "k_proj", "v_proj")
SHAPES: dict[str, Any] = {"rank": 4, "alpha": 4}
ADAPTERS = {
    "attention": LoRASettings(**SHAPES, target_modules=ATTENTION),
    "projections": LoRASettings(**SHAPES, target_modules=("o_proj",)),
    "mlps": LoRASettings(**SHAPES, target_modules=("mlp",)),
    "down": LoRASettings(**SHAPES, target_modules=("down_proj",)),
    "all": LoRASettings(**SHAPES, target_modules=("all",)),
    "embedding": LoRASettings(**SHAPES, target_modules=("all", "embed_tokens")),
    "two_layers": LoRASettings(**SHAPES, target_modules=("all",), layers=(2, 4)),
}


@pytest.mark.parametrize(("module", "rows"), [("q_proj", "query"), ("in_proj", "mamba_in")])
def test_adapters_on_both_mixers_of_a_layer_count(module: str, rows: str, tmp_path: Path) -> None:
    architecture = read_architecture(make_checkpoint(tmp_path, "falcon_h1"), tensor_parallel=1)
    settings = LoRASettings(rank=4, alpha=8, target_modules=(module,))
    flops, sizes = ModelFlops.of_model(architecture, adapters=settings), architecture.sizes
    added = architecture.num_layers * 2 * settings.rank * (sizes["hidden"] + sizes[rows])
    assert flops.forward.per_token - flops.disabled.per_token == added


@pytest.mark.parametrize("name", ADAPTERS)
def test_flops_with_adapters_equal_the_count_of_torch(tiny_llama: Path, name: str) -> None:
    """Frozen weights have no gradient, nor has what lies before the first adapter; adapters have all of theirs."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = ADAPTERS[name]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation="eager")
    layers = None if settings.layers is None else [layer - 1 for layer in settings.layers]
    config = LoraConfig(r=4, lora_alpha=4, target_modules=list(settings.modules), layers_to_transform=layers)
    adapted = get_peft_model(model, config)
    flops = ModelFlops.of_model(read_architecture(tiny_llama, tensor_parallel=1), adapters=settings)
    forward, backward = counted(adapted)
    assert forward == everything(flops.forward)
    assert backward == everything(flops.backward)
    with adapted.disable_adapter():
        assert counted(adapted, trained=False)[0] == everything(flops.disabled)
    total = flops.of_passes(Passes(forward=2, disabled=1, backward=1))
    assert everything(total) == 2 * forward + everything(flops.disabled) + backward
