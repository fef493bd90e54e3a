"""Checkpoints and Hugging Face folders are the same with megatron-core's and Transformer Engine's layers.

The names are those of the state_dict of megatron-core 0.16.1's GPTModel with get_gpt_layer_with_transformer_engine_spec on
Transformer Engine 2.9: TELayerNormColumnParallelLinear, TERowParallelLinear and TENorm (megatron/core/extensions/
transformer_engine.py) are LayerNormLinear, Linear and RMSNorm (transformer_engine/pytorch/module), each of which registers
its parameters and has an extra state (get_extra_state in module/base.py and ops/op.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.checkpoint.sharded_state import load_weights, sharded_weights
from nemo_kto.distributed import state
from nemo_kto.huggingface.rank_weights import rank_weights
from nemo_kto.models.gpt import build_gpt
from tests.helpers.rank_pool import RankPool

_OUTSIDE = {"embedding.word_embeddings": ["weight"], "decoder.final_layernorm": ["weight"]}
_IN_LAYER = {
    "self_attention.linear_qkv": ["layer_norm_weight", "weight"],
    "self_attention.linear_proj": ["weight"],
    "mlp.linear_fc1": ["layer_norm_weight", "weight"],
    "mlp.linear_fc2": ["weight"],
}
_QK_NORM = {"self_attention.q_layernorm": ["weight"], "self_attention.k_layernorm": ["weight"]}
# Additional parameters of a family; neither the embedding nor the output is a layer of Transformer Engine.
FAMILIES: dict[str, tuple[dict[str, list[str]], dict[str, list[str]]]] = {
    "llama": ({"output_layer": ["weight"]}, {}),
    "qwen2": ({}, {"self_attention.linear_qkv": ["bias"]}),
    "qwen3": ({}, _QK_NORM),
}


class Engine(nn.Module):
    """A layer with the names of one of Transformer Engine's, whose extra state without fp8 is an empty tensor."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        raise AssertionError("nothing of fp8 is kept")


def names(family: str, layer: str) -> list[str]:
    """Of all parameters, with ``layer`` in the place of the layer's number."""
    outside, inside = FAMILIES[family]
    parts = {"": (_OUTSIDE, outside), f"decoder.layers{layer}.": (_IN_LAYER, inside)}
    modules = [(prefix + module, of) for prefix, both in parts.items() for part in both for module, of in part.items()]
    return [f"{module}.{name}" for module, of in modules for name in of]


class Decoder(nn.Module):
    layers: nn.ModuleList


class Chunk(nn.Module):
    """Parameters of these names and the shapes of a real model's, in the places of a GPTModel's."""

    adapters = None

    def __init__(self, shapes: dict[str, torch.Size], num_layers: int) -> None:
        super().__init__()
        self.decoder = Decoder()
        self.decoder.layers = nn.ModuleList([Engine() for _ in range(num_layers)])
        for number, layer in enumerate(self.decoder.layers):
            setattr(layer, "layer_number", number + 1)  # noqa: B010
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, Engine())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(torch.zeros(shape)))


def engine_and_ours(folder: Path, family: str) -> dict[str, Any]:
    """Names in a checkpoint and a Hugging Face folder for layers of each kind."""
    state.init_distributed(layout=state.Layout(), seed=3)
    architecture = read_architecture(folder, tensor_parallel=1)
    ours = build_gpt(architecture, params_dtype=torch.float32)
    sharded = sharded_weights([ours], adapters=False)["model0"]
    shapes = {}
    for name, parameter in ours.named_parameters():
        key = sharded[name].key  # that of all layers together
        if name.startswith("decoder.layers."):
            key = key.replace(".layers.", f".layers.{name.split('.')[2]}.")
        shapes[key] = parameter.shape
    engine = Chunk(shapes, architecture.num_layers)
    load_weights([engine], {"model0": {name: torch.ones(shape) for name, shape in shapes.items()}}, adapters=False)
    assert all(bool((parameter == 1).all()) for parameter in engine.parameters())

    def placed(chunk: nn.Module) -> set[tuple[str, int | None, torch.Size]]:
        weights = rank_weights([chunk], architecture)
        return {(weight.mapping.mcore_name, weight.place.get("layer"), weight.parameter.shape) for weight in weights}

    return {
        "keys": sorted({entry.key for entry in sharded.values()}),
        "engine": sorted(name for name, _ in engine.named_parameters()),
        "same places": placed(engine) == placed(ours),
        "layers": architecture.num_layers,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_both_kinds_of_layers_have_the_same_names(
    family: str, ranks: RankPool, tiny_checkpoint: Callable[..., Path]
) -> None:
    (found,) = ranks.run(1, engine_and_ours, tiny_checkpoint(family), family)
    assert found["keys"] == sorted(names(family, "")), "weights, under Transformer Engine's names, and nothing else"
    of_layers = {name for number in range(found["layers"]) for name in names(family, f".{number}")}
    assert found["engine"] == sorted(of_layers)
    assert found["same places"]
