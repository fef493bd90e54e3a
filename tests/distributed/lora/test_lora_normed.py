"""Adapters on a linear layer with a fused norm, as in Transformer Engine, equal those with a separate norm.

Transformer Engine 2.9 says of LayerNormLinear (transformer_engine/pytorch/module/layernorm_linear.py): with
``return_layernorm_output`` the forward pass gives the normed input of this rank besides, and the backward pass adds its
gradient to that of the product, after the latter was reduced over the ranks. megatron-core's TELayerNormColumnParallelLinear
passes on (output, bias, normed), or ((output, normed), None) where the bias is not left to the caller.
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from nemo_kto.distributed import state
from nemo_kto.models.lora.lora_layers import ADAPTED_CLASSES, Adapter, LoRAColumnParallelLinear, adapt_linear
from tests.helpers.rank_pool import RankPool

SEQUENCE, BATCH, IN, OUT, RANK, PARTS = 8, 2, 12, 16, 3, 2


class NormedLinear(ColumnParallelLinear):
    """megatron-core's layer, with a norm in it and that interface."""

    return_layernorm_output = False

    def add_norm(self, weight: torch.Tensor) -> None:
        self.layer_norm_weight = torch.nn.Parameter(weight)

    def forward(self, input_: torch.Tensor) -> Any:  # type: ignore[override]
        normed = F.rms_norm(input_, (IN,), self.layer_norm_weight)
        output, bias = super().forward(normed)
        if not self.return_layernorm_output:
            return output, bias
        return (output, bias, normed) if bias is not None else ((output, normed), None)


class AdaptedNormedLinear(Adapter, NormedLinear):
    """As ``models.lora.lora_layers`` makes one of Transformer Engine's."""

    is_column = True

    def forward(self, input_: torch.Tensor) -> Any:  # type: ignore[override]
        return self.add_to_normed_columns(super().forward, input_)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mine(whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return whole.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()].clone()


def adapted(kind: type, sequence_parallel: bool, skip_bias_add: bool, dora: bool) -> Any:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=IN,
        num_attention_heads=2,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
    )
    options: dict[str, Any] = {"gather_output": False, "bias": skip_bias_add, "skip_bias_add": skip_bias_add}
    linear: Any = kind(IN, OUT, config=config, init_method=torch.nn.init.zeros_, **options)
    if kind is NormedLinear:
        linear.add_norm(draw(IN, seed=1))
    part_of_row = mine(torch.arange(OUT) % PARTS)
    adapt_linear(linear, rank=RANK, scale=0.5, parts=PARTS, part_of_row=part_of_row, magnitudes=(dora, False))
    for name, values in {
        "weight": mine(draw(OUT, IN, seed=2)),
        "lora_a": draw(PARTS * RANK, IN, seed=3),
        "lora_b": mine(draw(OUT, RANK, seed=4)),
        **({"lora_magnitude": mine(draw(OUT, seed=7))} if dora else {}),
    }.items():
        getattr(linear, name).data.copy_(values)
    linear.weight.requires_grad_(False)
    return linear


def difference(sequence_parallel: bool, skip_bias_add: bool, dora: bool) -> dict[str, Any]:
    """Between a layer with a norm inside and one with a norm before it: outputs, gradients, names in a checkpoint."""
    whole = draw(SEQUENCE, BATCH, IN, seed=5)
    found: dict[type, list[Any]] = {}
    layers = {kind: adapted(kind, sequence_parallel, skip_bias_add, dora) for kind in (NormedLinear, ColumnParallelLinear)}
    for kind, linear in layers.items():
        input_ = (mine(whole) if sequence_parallel else whole.clone()).requires_grad_()
        normed = input_ if kind is NormedLinear else F.rms_norm(input_, (IN,), draw(IN, seed=1))
        output, bias = linear(normed)
        (output * mine(draw(OUT, seed=6))).sum().backward()
        assert (bias is not None) == skip_bias_add
        linear.adapter_is_on = False
        off, _ = linear(normed)
        names = ["lora_a", "lora_b", *(["lora_magnitude"] if dora else [])]
        found[kind] = [output.detach(), off.detach(), input_.grad, *(getattr(linear, name).grad for name in names)]
    ours, theirs = found.values()
    metadata = ensure_metadata_has_dp_cp_group(None)
    entries = [linear.sharded_state_dict(metadata=metadata) for linear in layers.values()]
    kept = [{name: of[name] for name in ("weight", *names)} for of in entries]
    forms = [{name: (entry.key, entry.local_shape, entry.global_shape) for name, entry in of.items()} for of in kept]
    return {
        "classes": [type(linear).__name__ for linear in layers.values()],
        "differences": [float((mine - other).abs().max()) for mine, other in zip(ours, theirs, strict=True)],
        "sizes": [float(other.abs().max()) for other in theirs],
        "same in a checkpoint": forms[0] == forms[1],
        "adds": float((ours[0] - ours[1]).abs().max()),
    }


def layers_with_norms(layout: state.Layout) -> list[dict[str, Any]]:
    state.init_distributed(layout=layout, seed=3)
    # before the class that it is made from, of which it is one too
    with mock.patch.dict(ADAPTED_CLASSES, {NormedLinear: AdaptedNormedLinear, **ADAPTED_CLASSES}, clear=True):
        cases = itertools.product((False, True), repeat=2)
        return [difference(layout.sequence_parallel, skip_bias_add, dora) for skip_bias_add, dora in cases]


@pytest.mark.parametrize(
    "layout",
    [state.Layout(), state.Layout(tensor=2), state.Layout(tensor=2, sequence_parallel=True)],
    ids=["one_rank", "tp2", "tp2_sequence_parallel"],
)
def test_a_fused_norm_gives_the_same_result(layout: state.Layout, ranks: RankPool) -> None:
    for of_rank in ranks.run(layout.tensor, layers_with_norms, layout):
        for found in of_rank:
            assert found["classes"] == ["AdaptedNormedLinear", LoRAColumnParallelLinear.__name__]
            assert max(found["differences"]) < 1e-5
            assert min(found["sizes"]) > 1
            assert found["adds"] > 1
            assert found["same in a checkpoint"]
