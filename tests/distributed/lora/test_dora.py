"""DoRA: dropout against peft, the number of norm computations, padding, and bf16; and adapters on a layer with a fused norm.

Adapters on a linear layer with a fused norm, as in Transformer Engine, equal those with a separate norm.

Transformer Engine 2.9 says of LayerNormLinear (transformer_engine/pytorch/module/layernorm_linear.py): with
``return_layernorm_output`` the forward pass gives the normed input of this rank besides, and the backward pass adds its
gradient to that of the product, after the latter was reduced over the ranks. megatron-core's TELayerNormColumnParallelLinear
passes on (output, bias, normed), or ((output, normed), None) where the bias is not left to the caller.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.distributed import state
from nemo_kto.distributed.state import Layout
from nemo_kto.models.lora.lora_layers import ADAPTED_CLASSES, Adapter, LoRAColumnParallelLinear, adapt_linear
from tests.distributed.lora.test_lora import check_steps, steps_of_peft
from tests.helpers import hf_models, lora_jobs
from tests.helpers.hf_models import peft_model
from tests.helpers.rank_pool import RankPool

NAME = "llama-all-biases-linear-rope"
SETTINGS = LoRASettings(rank=2, alpha=2, dropout=0.25, target_modules=("q_proj", "o_proj", "mlp"), layers=(1, 3), dora=True)
LAYOUTS = {"one_rank": Layout(), "tp2": Layout(tensor=2), "tp2_sequence_parallel": Layout(tensor=2, sequence_parallel=True)}


def drop_negative(values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """In the place of torch's dropout: the values decide, so that it is the same at every layout and in peft."""
    return values.relu() / (1 - p) if training and p else values


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and an adapter in peft's own hand."""
    root = tmp_path_factory.mktemp("dora")
    hf_models.write_model(NAME, root / "model")
    peft_model(root / "model", SETTINGS).save_pretrained(root / "adapter")
    return root / "model", root / "adapter"


def steps(layout: Layout, folder: Path, adapter: Path, out: Path) -> list[float]:
    with mock.patch("torch.nn.functional.dropout", drop_negative):
        return lora_jobs.gradients_and_steps(layout, {"dropped": (folder, adapter, SETTINGS)}, out, {})["dropped"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name != "tp2_sequence_parallel")) for name in LAYOUTS]
)
def test_dropout_applies_to_the_same_values_as_in_peft(
    name: str, ranks: RankPool, model: tuple[Path, Path], tmp_path: Path
) -> None:
    layout, (folder, adapter) = LAYOUTS[name], model
    results = ranks.run(layout.tensor, steps, layout, folder, adapter, tmp_path)
    with mock.patch("torch.nn.functional.dropout", drop_negative):
        expected = steps_of_peft(peft_model(folder, SETTINGS).train())
    check_steps(results, tmp_path / "dropped", folder, expected)


def norms_taken(folder: Path) -> list[int]:
    """How often norms are taken: by two steps of four micro-batches each, and outside of a step."""
    from nemo_kto.models.lora import lora_layers

    state.init_distributed(layout=Layout(), seed=3)
    chunks, _ = lora_jobs.build(folder, Layout(), SETTINGS)
    optimizer, found = lora_jobs.optimizer_of(chunks), []
    with mock.patch.object(lora_layers, "row_norms", wraps=lora_layers.row_norms) as taken:
        for _ in range(2):
            lora_jobs.backward(chunks)
            optimizer.step()
            found.append(taken.call_count)
        with torch.no_grad():
            for _ in range(2):
                chunks[0](lora_jobs.tokens(0), torch.arange(lora_jobs.SEQUENCE)[None], None)
                found.append(taken.call_count)
    return found


def test_norms_are_computed_once_for_all_micro_batches(ranks: RankPool, model: tuple[Path, Path]) -> None:
    layers = 2 * 4
    assert ranks.run(1, norms_taken, model[0]) == [[layers, 2 * layers, 3 * layers, 4 * layers]]


def in_half_precision(layout: Layout, folder: Path) -> tuple[bool, list[bool]]:
    """Whether new adapters in bf16 leave the model unchanged, and whether a small step changes all magnitudes."""
    from megatron.core.utils import unwrap_model

    from nemo_kto.models.lora.adapters import disable_adapters

    state.init_distributed(layout=layout, seed=3)
    settings = LoRASettings(rank=2, alpha=2, target_modules=("all",), dora=True)
    chunks, _ = lora_jobs.build(folder, layout, settings, dtype=torch.bfloat16)
    inputs: Any = (lora_jobs.tokens(0), torch.arange(lora_jobs.SEQUENCE)[None], None)
    with torch.no_grad():
        new = chunks[0](*inputs)
        with disable_adapters(chunks):
            is_base = torch.equal(new, chunks[0](*inputs))
    optimizer = lora_jobs.optimizer_of(chunks, dtype=torch.bfloat16)
    for group in optimizer.param_groups:
        group["lr"] = 1e-5  # next to a norm above 1, less than a hundredth of what bf16 can tell apart
    lora_jobs.backward(chunks)
    optimizer.step()
    named = unwrap_model(chunks[0]).named_parameters()
    moved = [(values != 0).float().mean().item() > 0.9 for name, values in named if name.endswith("lora_magnitude")]
    return is_base, moved


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name != "tp2")) for name in LAYOUTS])
def test_half_precision(name: str, ranks: RankPool, model: tuple[Path, Path]) -> None:
    layout = LAYOUTS[name]
    assert ranks.run(layout.tensor, in_half_precision, layout, model[0]) == [(True, [True] * 16)] * layout.tensor


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
