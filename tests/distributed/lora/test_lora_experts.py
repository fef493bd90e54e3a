"""Adapters on experts: merged into the weights of grouped experts, and refused on sharded ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool


def merge_into_grouped(folder: Path) -> list[bool]:
    """On a rank: whether adapters change weights of experts under the names of Transformer Engine's layer as under ours."""
    from nemo_kto.architecture.architecture import read_architecture
    from nemo_kto.architecture.lora import LoRASettings
    from nemo_kto.distributed import state
    from nemo_kto.models.gpt import build_gpt
    from nemo_kto.models.lora import adapters
    from nemo_kto.models.lora.adapters import add_adapters, merge_adapters, share_weights

    state.init_distributed(layout=state.Layout(), seed=3)
    architecture = read_architecture(folder, tensor_parallel=1)
    carrier, model = (build_gpt(architecture, params_dtype=torch.float32, empty=empty) for empty in (True, False))
    add_adapters(carrier, LoRASettings(rank=2, alpha=4, target_modules=("mlp",)), architecture=architecture, seed=1)
    for name, parameter in carrier.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.constant_(parameter, int(name.split(".experts.local_experts.")[1][0]) + 1)
    grouped = torch.nn.Module()
    names = {
        name: re.sub(r"local_experts\.(\d)\.(linear_fc\d)\.weight", r"\2.weight\1", name)
        for name, _ in model.named_parameters()
    }
    for name, parameter in model.named_parameters():
        *path, last = names[name].split(".")
        module = grouped
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, torch.nn.Parameter(parameter.detach().clone()))
    before = {name: weight.clone() for name, weight in grouped.named_parameters()}
    share_weights(carrier, model)
    merge_adapters([carrier])
    share_weights(carrier, grouped)
    for adapter in adapters._adapters([carrier]):
        adapter.adapter_is_merged = False
    merge_adapters([carrier])
    after = dict(grouped.named_parameters())
    same = all(torch.equal(weight, after[names[name]]) for name, weight in model.named_parameters())
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    return [same, changed == {name for name in before if ".experts." in name}]


def test_adapters_are_merged_into_grouped_experts(ranks: RankPool, tiny_checkpoint: Callable[..., Path]) -> None:
    assert ranks.run(1, merge_into_grouped, tiny_checkpoint("mixtral")) == [[True, True]]


def adapt_shared_out_expert() -> str:
    from types import SimpleNamespace

    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo_kto.distributed import state
    from nemo_kto.models.lora.lora_layers import adapt_linear

    state.init_distributed(layout=state.Layout(), seed=3)
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    linear = ColumnParallelLinear(4, 4, config=config, init_method=torch.nn.init.zeros_, is_expert=True)
    linear.tp_group = SimpleNamespace(size=lambda: 2)
    try:
        adapt_linear(linear, rank=1, scale=1.0)
    except ValueError as error:
        return str(error)
    return ""


def test_sharded_experts_are_refused(ranks: RankPool) -> None:
    assert ranks.run(1, adapt_shared_out_expert) == [
        Message("adapters", "expert_tensor_parallel_size", "1", "2", "matrices")
    ]
