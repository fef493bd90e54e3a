"""LoRA at every layout against peft and autograd: gradients, their norm, adapters after AdamW steps, and adapted experts."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.distributed.state import Layout
from nemo_kto.mixers import LatentAttention
from tests.helpers import hf_models, lora_jobs
from tests.helpers.hf_models import peft_model
from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool

# Nine heads in three groups (padded where two ranks share them), biases, and stages of the pipeline without an adapter; and
# with magnitudes, of all parts and of some.
SETTINGS = {
    "llama-odd-heads": LoRASettings(rank=4, alpha=8, target_modules=("all",)),
    "qwen2": LoRASettings(
        rank=3, alpha=4, target_modules=("q_proj", "v_proj", "up_proj", "mlp_fc2"), layers=(2, 3), rslora=True
    ),
    "llama-one-kv-head": LoRASettings(rank=2, alpha=1, target_modules=("attention",), layers=(4,)),
    "llama-all-biases-linear-rope": LoRASettings(rank=2, alpha=2, target_modules=("mlp", "k_proj"), layers=(1,)),
    # projections to latents, which every rank has as a whole
    "deepseek-v3-dense": LoRASettings(rank=2, alpha=4, target_modules=(*LatentAttention.lora_inputs, "o_proj"), layers=(2,)),
    # stages without attention, and an output projection that peft refuses
    "nemotron-h": LoRASettings(rank=2, alpha=1, target_modules=("in_proj", "out_proj", "q_proj", "up_proj", "down_proj")),
    # gate and up projection with one A
    "granite-hybrid": LoRASettings(rank=2, alpha=1, target_modules=("in_proj", "q_proj", "gate_up_proj", "down_proj")),
    "mistral": LoRASettings(rank=3, alpha=5, target_modules=("embed_tokens", "o_proj")),
    "llama-odd-heads, dora": LoRASettings(rank=4, alpha=8, target_modules=("all",), dora=True),
    "llama-all-biases-linear-rope, dora": LoRASettings(
        rank=2, alpha=2, target_modules=("q_proj", "o_proj", "up_proj", "down_proj"), layers=(1, 4), dora=True
    ),
}
CASES: dict[str, tuple[int, Layout, dict[str, Any]]] = {
    "one_rank": (1, Layout(), {}),
    "recompute": (1, Layout(), {"recompute": True}),
    "tp2": (2, Layout(tensor=2), {}),
    "tp4": (4, Layout(tensor=4), {}),
    "pp2": (2, Layout(pipeline=2), {}),
    "pp2_vp2": (2, Layout(pipeline=2, virtual=2), {}),
    "pp2_replicated_optimizer": (2, Layout(pipeline=2), {"distributed": False}),
    "dp2": (2, Layout(), {}),
    "tp2_pp2": (4, Layout(tensor=2, pipeline=2), {}),
    "tp2_dp2": (4, Layout(tensor=2), {}),
    "tp2_sequence_parallel": (2, Layout(tensor=2, sequence_parallel=True), {}),
    "in_place": (1, Layout(), {"in_place": True}),
    "tp2_sequence_parallel_in_place": (2, Layout(tensor=2, sequence_parallel=True), {"in_place": True, "recompute": True}),
    "tp2_pp2_sequence_parallel_recompute": (4, Layout(tensor=2, pipeline=2, sequence_parallel=True), {"recompute": True}),
}

Tensors = dict[str, torch.Tensor]


def adapter_tensors(model: Any, what: Any) -> Tensors:
    """``what`` of each adapter parameter, under the names of peft's files."""
    named = (
        (name.replace("vector.default.weight", "vector").replace(".default", ""), parameter)
        for name, parameter in model.named_parameters()
    )
    return {name: what(parameter) for name, parameter in named if parameter.requires_grad}


Model = tuple[Path, Path, LoRASettings]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Name of a model -> its folder, an adapter written by peft, and its settings."""

    @functools.cache
    def get(name: str) -> Model:
        root, settings = tmp_path_factory.mktemp("lora"), SETTINGS[name]
        hf_models.write_model(name.removesuffix(", dora"), root / "model")
        peft_model(root / "model", settings).save_pretrained(root / "adapter", save_embedding_layers=False)
        return root / "model", root / "adapter", settings

    return get


Expected = tuple[Tensors, Tensors, list[float]]


def steps_of_peft(model: Any) -> Expected:
    """First gradients, adapters after three steps, and norms: peft, autograd and torch's AdamW, in fp64."""
    model = model.double()  # in fp32 its own rounding is more than half of what is allowed
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": lora_jobs.WEIGHT_DECAY},
        {"params": [each for each in trained if each.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lora_jobs.LR, betas=lora_jobs.BETAS, eps=lora_jobs.EPS)
    gradients: Tensors = {}
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        for row in range(lora_jobs.ROWS):
            ((model(lora_jobs.tokens(row)).logits * lora_jobs.cotangent(row)).sum() / lora_jobs.ROWS).backward()
        gradients = gradients or adapter_tensors(model, lambda parameter: parameter.grad.clone())
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, lora_jobs.CLIP)))
        optimizer.step()
    return gradients, adapter_tensors(model, lambda parameter: parameter.detach().clone()), norms


@pytest.fixture(scope="module")
def expected(models: Callable[[str], Model]) -> Callable[[str], Expected]:
    """Name of a model -> the steps of peft."""
    return functools.cache(lambda name: steps_of_peft(peft_model(models(name)[0], models(name)[2])))


def check_steps(results: list[list[float]], written: Path, model: Path, expected: Expected) -> None:
    """Compare the results and files of the ranks for one model with peft."""
    gradients, trained, norms = expected
    ours = load_file(written / "gradients" / "adapter_model.safetensors")
    weights = hf_models.weights(model)
    for tensor in (tensor for tensor in ours if tensor.endswith("lora_magnitude_vector")):
        # written in the place of what magnitudes are more than the norms of their rows
        weight = tensor.removeprefix("base_model.model.").replace("lora_magnitude_vector", "weight")
        ours[tensor] = ours[tensor].double() - weights[weight].double().norm(dim=1)
    scale = max(gradient.abs().max() for gradient in gradients.values())
    assert ours.keys() == gradients.keys()
    for tensor, gradient in gradients.items():
        assert gradient.abs().max() > 1e-4 * scale, "every parameter must have a gradient"
        assert (ours[tensor] - gradient).abs().max() < 1e-5 * scale, tensor
    for *our_norms, largest_padding in results:
        # As numerics.md has it for later steps: AdamW's first updates are gradients over their own size, so that what
        # rounds a small one differently grows with each step.
        assert our_norms[0] == pytest.approx(norms[0], rel=2e-5)
        assert our_norms == pytest.approx(norms, rel=1e-4)
        assert largest_padding == 0.0
    assert norms[0] > lora_jobs.CLIP, "the gradient norm must exceed the limit"
    after = load_file(written / "trained" / "adapter_model.safetensors")
    for tensor, values in trained.items():
        assert (after[tensor] - values).abs().max() < 1e-4 * values.abs().max(), tensor
    assert os.listdir(written / "trained") == os.listdir(written / "gradients")


QUICK = {
    ("tp2", "llama-odd-heads"),
    ("tp2", "llama-odd-heads, dora"),
    ("tp2", "mistral"),
    ("pp2", "llama-one-kv-head"),
    ("tp2_sequence_parallel", "deepseek-v3-dense"),
    ("tp2_sequence_parallel_in_place", "llama-odd-heads"),
}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, marks=[pytest.mark.full] * ((case, name) not in QUICK))
        for case in CASES
        for name in SETTINGS
    ],
)
def test_gradients_and_steps_equal_peft(
    case: str, name: str, ranks: RankPool, models: Any, expected: Any, tmp_path: Path
) -> None:
    world_size, layout, options = CASES[case]
    results = ranks.run(world_size, lora_jobs.gradients_and_steps, layout, {name: models(name)}, tmp_path, options)
    check_steps([result[name] for result in results], tmp_path / name, models(name)[0], expected(name))


def test_kernels_of_adapters_on_a_gpu(ranks: RankPool, tiny_checkpoint: Callable[..., Path]) -> None:
    """In a micro-batch A x, and B A x added in place; B for the stacked A of fused layers is built once a pass."""
    rows, everything = (LoRASettings(rank=2, alpha=2, target_modules=names) for names in (("o_proj", "mlp_fc2"), ("all",)))
    ((base, of_rows, of_all),) = ranks.run(1, lora_jobs.launches, tiny_checkpoint("llama"), [None, rows, everything])
    layers = 4
    assert of_rows == (base[0] + layers * 2 * 2, base[1])
    assert of_all[0] == base[0] + layers * 4 * 2
    assert base[1] < of_all[1] <= base[1] + layers * 2 * 8


def test_experts_without_adapters_run_no_more_kernels(ranks: RankPool, tiny_checkpoint: Callable[..., Path]) -> None:
    """The default leaves experts out, whose adapters take four kernels each in every micro-batch."""
    everything = LoRASettings(rank=2, alpha=2, target_modules=("all",))
    settings = [None, replace(everything, experts=False), everything]
    ((base, default, with_experts),) = ranks.run(1, lora_jobs.launches, tiny_checkpoint("mixtral"), settings)
    layers, experts = 4, 4
    assert default[0] == base[0] + layers * 2 * 2
    assert with_experts[0] == default[0] + layers * experts * 2 * 2


DROPOUT = LoRASettings(rank=4, alpha=8, dropout=0.3, target_modules=("all",))
SHARED: dict[str, Layout] = {"tp2": Layout(tensor=2), "tp2_sequence_parallel": Layout(tensor=2, sequence_parallel=True)}


@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.full), "tp2_sequence_parallel"])
def test_replicated_parameters_stay_equal_under_dropout(layout: str, ranks: RankPool, models: Any) -> None:
    folder, _, _ = models("llama-odd-heads")
    first, second = ranks.run(2, lora_jobs.replicated_after_dropout, SHARED[layout], folder, DROPOUT)
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    assert len(first[1]) == 4 * 4, "four layers, four linear layers, A or B of each"
    for name, values in first[1].items():
        assert (values == second[1][name]).all(), name
    assert first[2] == second[2]
    without = ranks.run(2, lora_jobs.replicated_after_dropout, SHARED[layout], folder, SETTINGS["llama-odd-heads"])
    assert abs(without[0][0][0] - first[0][0]) > 1e-3, "dropout must change the result"


def test_dropout_masks_are_equal_on_ranks_with_the_same_activations(ranks: RankPool, models: Any) -> None:
    folder, _, _ = models("qwen2")
    scale = DROPOUT.scale
    for layout, same in {
        "tp2": {"column": True, "row": False},
        "tp2_sequence_parallel": {"column": False, "row": False},
    }.items():
        first, second = ranks.run(2, lora_jobs.dropped, SHARED[layout], folder, DROPOUT)
        for name, expected in same.items():
            assert (first[name] == second[name]).all() == expected, (layout, name)
            kept = first[name] / scale * (1 - DROPOUT.dropout)  # inputs that were not dropped, each of them 1 / (1 - p)
            assert abs(kept - kept.round()).max() < 1e-4
            assert 0.5 < kept.mean() / first[f"{name}, width"] < 0.9
            assert first[f"{name}, evaluation"] == [scale * first[f"{name}, width"]]


@pytest.mark.parametrize(
    ("layout", "name", "distributed"),
    [
        ("pp2", "llama-one-kv-head", True),
        *(
            pytest.param(layout, name, distributed, marks=pytest.mark.full)
            for layout in ("one_rank", "tp2_sequence_parallel", "dp2", "pp2")
            for name in ("qwen2", "llama-one-kv-head")
            for distributed in (True, False)
            if (layout, name, distributed) != ("pp2", "llama-one-kv-head", True)
        ),
    ],
)
def test_half_precision(layout: str, name: str, distributed: bool, ranks: RankPool, models: Any, expected: Any) -> None:
    """A stage of the pipeline may have nothing to train."""
    (folder, adapter, settings), (world_size, where, _) = models(name), CASES[layout]
    for norms, dtypes in ranks.run(world_size, lora_jobs.half_precision, where, folder, adapter, settings, distributed):
        assert norms == pytest.approx(expected(name)[2], rel=0.05)
        assert dtypes == {"torch.bfloat16"}


def test_adapters_created_in_the_wrong_order(ranks: RankPool, models: Any) -> None:
    (messages,) = ranks.run(1, lora_jobs.misuse, models("llama-odd-heads")[0])
    assert messages == [
        "",
        Message("RuntimeError", "adapters"),
        Message("RuntimeError", "adapters"),
        Message("TypeError", "ColumnParallelLinear", "RowParallelLinear", "SparseGradEmbedding", "LoRAColumnParallelLinear"),
        Message("UserError", "1", "4", "number", "5"),
    ]


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
    for adapter in adapters.adapted_layers([carrier]):
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
