"""LoRA and DoRA: adapted layers, their names, refused settings, row norms and magnitudes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_kto.architecture.families import FAMILIES, MULTIMODAL
from nemo_kto.architecture.lora import (
    GATE_UP,
    HUGGING_FACE_TARGETS,
    OTHER_MIXERS,
    TARGET_MODULES,
    LoRASettings,
    adapted_mappings,
    adapter_mappings,
    adapts_experts,
    embedding_problem,
    few_adapted,
    linear_modules,
    modules_of,
    names_experts,
    refused_by_peft,
    with_other_layers,
    without_experts,
)
from nemo_kto.architecture.segments import Segment, held, pieces, segments, source_shapes
from nemo_kto.layers.layer_settings import Experts
from nemo_kto.mixers import SOFTMAX_ATTENTION
from nemo_kto.mixers.param_mapping import Layers, Split
from nemo_kto.models.lora import lora_layers
from nemo_kto.models.lora.adapters import is_adapter
from nemo_kto.models.lora.lora_layers import Change, RowNorms, adapt_linear, row_norms
from tests.helpers.messages import Message, assert_names
from tests.helpers.tiny_models import tiny_architecture

# Three key-value heads that two ranks share as four; head size 2.
ARCHITECTURE = tiny_architecture("LlamaForCausalLM", tensor_parallel=2, tied=True)
INNER = "base_model.model.model.layers.{layer}."


def settings(*target_modules: str) -> LoRASettings:
    return LoRASettings(rank=3, alpha=6, target_modules=target_modules)


LLAMA_TARGETS = tuple(name for name in HUGGING_FACE_TARGETS if name not in (GATE_UP, *OTHER_MIXERS))


def test_names_of_modules() -> None:
    assert settings("attention_qkv").modules == ("q_proj", "k_proj", "v_proj")
    assert settings("mlp", "attention").modules == settings("all").modules == LLAMA_TARGETS
    assert settings("v_proj", "mlp_fc2", "q_proj").modules == ("q_proj", "v_proj", "down_proj")
    assert settings("attention_dense", "mlp_fc1").modules == ("o_proj", "gate_proj", "up_proj")


def test_scales() -> None:
    plain = settings("all")
    stable = replace(plain, rank=4, rslora=True)
    assert (plain.scale, plain.scale_text) == (2.0, "alpha 6")
    assert (stable.scale, stable.scale_text) == (3.0, "alpha 6 / sqrt(rank)")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, Message("rank", "1", "0")),
        ({"alpha": 0.0}, Message("alpha", "0", "1000000", "0.0")),
        ({"alpha": 1e300}, Message("alpha", "0", "1000000", "1e+300")),
        ({"alpha": float("nan")}, Message("alpha", "0", "1000000", "nan")),
        ({"dropout": 1.0}, Message("dropout", "0", "1", "1.0")),
        ({"dropout": -0.1}, Message("dropout", "0", "1", "-0.1")),
        (
            {"target_modules": ("q_proj", "lm_head", "qkv")},
            Message("target_modules", f"{', '.join(TARGET_MODULES)}", "lm_head"),
        ),
        ({"target_modules": ()}, Message("target_modules", f"{', '.join(TARGET_MODULES)}", "none")),
        ({"layers": (0, 1)}, Message("layers", "1", "0")),
        ({"layers": ()}, Message("layers", "1", "[]")),
    ],
)
def test_impossible_settings(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        replace(settings("all"), **changes)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_phi3_has_a_fused_gate_and_up_projection() -> None:
    phi3 = FAMILIES["Phi3ForCausalLM"]
    assert with_other_layers(["mlp"], phi3) == ("mlp", "gate_up_proj")
    assert (modules_of("mlp_fc1", phi3), modules_of("mlp", phi3)) == (set(), {"down_proj"})
    adapted = settings(*with_other_layers(["all"], phi3))
    mappings = adapted_mappings(replace(ARCHITECTURE, family=phi3), adapted)
    assert [mapping.mcore_name.split(".")[-2] for mapping in mappings] == ["linear_proj", "linear_fc1", "linear_fc2"]
    a, b = adapter_mappings(mappings[1], adapted)
    assert [*a.hf_names, *b.hf_names] == [f"{INNER}mlp.gate_up_proj.lora_{name}.weight" for name in "AB"]
    assert with_other_layers(["all"], FAMILIES["LlamaForCausalLM"]) == ("all",)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("MixtralForCausalLM", ["block_sparse_moe.experts.{expert}." + name for name in ("w1", "w3", "w2")]),
        ("Qwen3MoeForCausalLM", ["mlp.experts.{expert}." + name for name in ("gate_proj", "up_proj", "down_proj")]),
    ],
)
def test_experts_are_adapted_and_routers_are_not(family: str, names: list[str]) -> None:
    mixture = replace(ARCHITECTURE, family=FAMILIES[family])
    mappings = adapted_mappings(mixture, settings("mlp"))
    assert [mapping.mcore_name.removeprefix("decoder.layers.{layer}.") for mapping in mappings] == [
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
    ]
    pairs = [adapter_mappings(mapping, settings("all")) for mapping in mappings[2:]]
    assert [name for mapping_a, _ in pairs for name in mapping_a.hf_names] == [
        f"{INNER}{name}.lora_A.weight" for name in names
    ]
    assert {mapping.layers for pair in pairs for mapping in pair} == {Layers.SPARSE}
    assert adapted_mappings(mixture, settings("down_proj")) == mappings[1::2]


def test_which_settings_adapt_experts() -> None:
    experts = Experts(number=4, per_token=2, ffn_hidden_size=8, normalized=True, layers=(False, True, True))
    mixture = replace(ARCHITECTURE, family=FAMILIES["Qwen3MoeForCausalLM"], num_layers=3, experts=experts)
    assert adapts_experts(mixture, settings("mlp"))
    assert adapts_experts(mixture, replace(settings("down_proj"), layers=(1, 2)))
    assert not adapts_experts(mixture, replace(settings("mlp"), layers=(1,))), "a layer with one MLP"
    assert not adapts_experts(mixture, settings("attention"))
    assert not adapts_experts(mixture, None)
    assert not adapts_experts(ARCHITECTURE, settings("all"))
    left_out = replace(settings("all"), experts=False)
    assert not adapts_experts(mixture, left_out)
    assert not any(mapping.of_expert for mapping in adapted_mappings(mixture, left_out))
    assert len(adapted_mappings(mixture, left_out)) == len(adapted_mappings(mixture, settings("all"))) - 2
    assert_names(without_experts(mixture, left_out), "experts", "model.peft.lora_tuning.target_modules=[all-linear,mlp]")
    for architecture, chosen in ((mixture, settings("all")), (ARCHITECTURE, left_out)):
        assert without_experts(architecture, chosen) == ""
    assert without_experts(mixture, replace(settings("attention"), experts=False)) == ""


def test_target_modules_that_name_experts() -> None:
    assert not names_experts(["all-linear"])
    assert not names_experts(["all", "attention", "embed_tokens"])
    assert all(names_experts(["all-linear", name]) for name in ("mlp", "mlp_fc1", "mlp_fc2", "gate_proj", "down_proj"))


FUSED = ("Glm4ForCausalLM", "Phi3ForCausalLM")  # with gate and up projection in one tensor


LIKE_LLAMA = [
    name
    for name, family in FAMILIES.items()
    if name not in FUSED and family.experts is None and not any(".linear_qk." in each.mcore_name for each in family.mappings)
]


@pytest.mark.parametrize("family", LIKE_LLAMA)
def test_every_other_family_has_every_module(family: str) -> None:
    mappings = adapted_mappings(replace(ARCHITECTURE, family=FAMILIES[family]), settings("all"))
    assert sorted(mapping.mcore_name.removeprefix("decoder.layers.{layer}.") for mapping in mappings) == [
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.weight",
    ]
    (mapping,) = adapted_mappings(replace(ARCHITECTURE, family=FAMILIES[family]), settings("k_proj"))
    assert mapping.mcore_name.endswith("linear_qkv.weight"), "and not its bias"


def test_output_rows_of_a_fused_layer() -> None:
    (mapping,) = adapted_mappings(ARCHITECTURE, settings("q_proj"))
    mapping_a, mapping_b = adapter_mappings(mapping, settings("all"))
    assert (mapping_a.mcore_name, mapping_b.mcore_name) == tuple(
        f"decoder.layers.{{layer}}.self_attention.linear_qkv.lora_{which}" for which in "ab"
    )
    assert all(is_adapter(each.mcore_name) for each in (mapping_a, mapping_b))
    assert not is_adapter(mapping.mcore_name)
    assert list(mapping_a.hf_names) == [f"{INNER}self_attn.{part}_proj.lora_A.weight" for part in "qkv"]
    assert list(mapping_b.hf_names) == [f"{INNER}self_attn.{part}_proj.lora_B.weight" for part in "qkv"]
    assert source_shapes(mapping_a, ARCHITECTURE) == [(3, 8)] * 3
    assert source_shapes(mapping_b, ARCHITECTURE) == [(12, 3), (6, 3), (6, 3)]
    assert (mapping_a.split, mapping_b.split) == (Split.STACKED, mapping.split)
    assert segments(mapping_a, ARCHITECTURE) == [Segment(source=source, start=0, length=3) for source in range(3)]
    assert segments(mapping_b, ARCHITECTURE) == segments(mapping, ARCHITECTURE)
    for rank in (0, 1):  # every rank holds all of A
        assert [offset for offset, _ in held(mapping_a, ARCHITECTURE, rank=rank, length=9)] == [0, 3, 6]


def test_rows_of_a_row_parallel_layer() -> None:
    (mapping,) = adapted_mappings(ARCHITECTURE, settings("o_proj"))
    mapping_a, mapping_b = adapter_mappings(mapping, settings("all"))
    assert source_shapes(mapping_a, ARCHITECTURE) == [(3, 12)]
    assert source_shapes(mapping_b, ARCHITECTURE) == [(8, 3)]
    assert (mapping_a.split, mapping_b.split) == (Split.HEADS, Split.REPLICATED)
    values = torch.ones(3, 8)  # of the second rank: columns 8 to 11 are real, 12 to 15 belong to heads that are padding
    (piece,) = pieces(values, mapping_a, ARCHITECTURE, rank=1)
    assert piece.where == (slice(None), slice(8, 12))
    assert piece.place.data_ptr() == values.data_ptr()
    assert torch.equal(values, torch.tensor([[1.0] * 4 + [0.0] * 4] * 3))


def test_an_embedding_is_transposed_for_peft() -> None:
    embedding = LoRASettings(rank=3, alpha=6, target_modules=("embed_tokens", "o_proj"))
    assert embedding.modules == ("o_proj", "embed_tokens")
    mapping_a, mapping_b = adapter_mappings(adapted_mappings(ARCHITECTURE, embedding)[0], embedding)
    prefix = "base_model.model.model.embed_tokens."
    assert [*mapping_a.hf_names] == [prefix + "lora_embedding_B"]
    assert [*mapping_b.hf_names] == [prefix + "lora_embedding_A"]
    assert source_shapes(mapping_a, ARCHITECTURE) == [(3, ARCHITECTURE.hidden_size)]
    assert source_shapes(mapping_b, ARCHITECTURE) == [(ARCHITECTURE.vocab_size, 3)]
    assert (mapping_a.split, mapping_b.split) == (Split.STACKED, Split.VOCABULARY)
    assert mapping_a.transposed
    assert mapping_b.transposed


EXPERTS = Experts(number=4, per_token=2, ffn_hidden_size=6, normalized=True, layers=(True, True), shared_ffn_hidden_size=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_that_can_be_adapted_is_enough(family: str) -> None:
    is_mixture = FAMILIES[family].experts is not None
    architecture = tiny_architecture(family, experts=EXPERTS if is_mixture else None)
    for target in ("all-linear", "attention")[: 1 + ("q_proj" in linear_modules(FAMILIES[family]))]:
        assert few_adapted(architecture, settings(*with_other_layers([target], FAMILIES[family]))) is None


def test_all_leaves_out_what_peft_refuses() -> None:
    mamba, delta_net = FAMILIES["NemotronHForCausalLM"], FAMILIES["Qwen3NextForCausalLM"]
    assert with_other_layers(["all"], mamba) == ("all", "in_proj")
    assert with_other_layers(["all"], delta_net) == ("all", "in_proj_qkvz", "in_proj_ba", "out_proj")
    assert refused_by_peft(mamba, settings("all", "in_proj")) is None
    assert refused_by_peft(mamba, settings("all", "out_proj")) == Message("peft", "out_proj", "nemotron_h")
    assert refused_by_peft(delta_net, settings("out_proj")) is None


@pytest.mark.parametrize(
    ("family", "changes", "targets", "layers", "expected"),
    [
        ("LlamaForCausalLM", {}, ("q_proj", "v_proj"), None, None),
        ("LlamaForCausalLM", {}, ("o_proj",), None, ("2 of 14", "11.11%", "q_proj, k_proj, v_proj, gate_proj")),
        ("LlamaForCausalLM", {}, ("all",), (1,), None),
        ("LlamaForCausalLM", {}, ("o_proj",), (1,), ("1 of 7", "11.11%")),
        ("LlamaForCausalLM", {}, ("embed_tokens",), None, ("0 of 14", "0.00%")),
        # experts count as one: 96 of 288 + 3 * 8 * 48 values of attention and experts
        ("Qwen3MoeForCausalLM", {"number": 8}, ("o_proj",), None, ("2 of 14", "6.67%", "gate_proj")),
        # only the MLP of the first layer, whose experts are joined in the other two
        ("Qwen3VLMoeForConditionalGeneration", {"layers": (False, True, True)}, ("mlp",), None, ("3 of 19", "q_proj")),
    ],
)  # fmt: skip
def test_adapters_on_few_linear_layers(
    family: str, changes: dict[str, Any], targets: tuple[str, ...], layers: tuple[int, ...] | None, expected: Any
) -> None:
    found = {each.hf_architecture: each for each in (*FAMILIES.values(), *MULTIMODAL)}[family]
    mixture = replace(EXPERTS, **changes, shared_ffn_hidden_size=0) if changes else None
    layers_of_model = len(mixture.layers) if mixture else 2
    mixers = (SOFTMAX_ATTENTION,) * layers_of_model
    architecture = replace(ARCHITECTURE, family=found, experts=mixture, num_layers=layers_of_model, mixers=mixers)
    warning = few_adapted(architecture, replace(settings(*targets), layers=layers))
    if expected is None:
        assert warning is None
    else:
        assert_names(str(warning), *expected, "model.peft.lora_tuning.target_modules=[all-linear]")


@pytest.mark.parametrize(
    ("changes", "tied", "problem"),
    [
        ({}, False, None),
        ({"target_modules": ("all",)}, True, None),
        ({}, True, Message("embed_tokens", "peft")),
        ({"layers": (1,)}, False, Message("embed_tokens", "adapted", "layers")),
        ({"dora": True}, False, Message("embed_tokens", "DoRA")),
    ],
)
def test_an_embedding_that_cannot_be_adapted(changes: dict[str, Any], tied: bool, problem: str | None) -> None:
    values = {"rank": 1, "alpha": 1, "target_modules": ("embed_tokens",), **changes}
    assert embedding_problem(LoRASettings(**values), tied=tied) == problem


def test_only_megatron_layers_are_adapted() -> None:
    with pytest.raises(TypeError) as error:
        adapt_linear(torch.nn.Linear(2, 2), rank=1, scale=1.0)
    assert str(error.value) == Message("ColumnParallelLinear", "RowParallelLinear", "SparseGradEmbedding", "Linear")


OUT, IN, RANK, SCALE = 7, 24, 3, 1.5


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("left", [1.0, 1e-2], ids=["usual", "the adapter nearly cancels the weight"])
@pytest.mark.parametrize("rows", [256, 3], ids=["at once", "some rows at a time"])
def test_norms_equal_those_of_the_sum(rows: int, left: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_layers, "_ROWS", rows)
    full_b, lora_a = draw(OUT, RANK, seed=1), draw(RANK, IN, seed=2)
    weight = left * draw(OUT, IN, seed=3) - (1 - left) * SCALE * full_b @ lora_a
    expected = (weight.double() + SCALE * full_b.double() @ lora_a.double()).norm(dim=1)
    norms = row_norms(weight, full_b, lora_a, SCALE)
    torch.testing.assert_close(norms.base.double(), weight.double().norm(dim=1), rtol=1e-6, atol=0)
    # a sum that is left over has the rounding of what was summed
    torch.testing.assert_close(norms.adapted.double(), expected, rtol=1e-6 / left, atol=0)


def test_norms_are_computed_in_fp32() -> None:
    weight, full_b, lora_a = (draw(*shape, seed=4).bfloat16() for shape in ((OUT, IN), (OUT, RANK), (RANK, IN)))
    expected = (weight.float() + SCALE * full_b.float() @ lora_a.float()).norm(dim=1)
    torch.testing.assert_close(row_norms(weight, full_b, lora_a, SCALE).adapted, expected, rtol=1e-6, atol=0)


def test_the_effect_of_a_magnitude() -> None:
    """m / ||W + s B A|| - 1; nothing of rows without a magnitude, and of rows of zeros, whose gradient is zero too."""
    norms = RowNorms(torch.tensor([4.0, 4.0, 4.0, 0.0]), torch.tensor([5.0, 4.0, 5.0, 0.0]))
    moved = torch.tensor([2.0, 0.0, 2.0, 1.0], requires_grad=True)
    change = Change.of(norms, torch.tensor([True, True, False, True])).at(moved)
    torch.testing.assert_close(change.detach(), torch.tensor([(4 + 2) / 5 - 1, 0.0, 0.0, 0.0]))
    change.sum().backward()
    assert moved.grad is not None
    torch.testing.assert_close(moved.grad, torch.tensor([1 / 5, 1 / 4, 0.0, 0.0]))


def test_bf16_keeps_small_updates() -> None:
    """Changes below 0.4 % of a magnitude in bf16 would be rounded away."""
    norms = RowNorms(torch.tensor([3.0]), torch.tensor([3.0]))
    change = Change.of(norms, torch.tensor([True])).at(torch.tensor([3e-4], dtype=torch.bfloat16))
    torch.testing.assert_close(change, torch.tensor([1e-4]), rtol=2**-8, atol=0)
    assert torch.tensor([3.0]).bfloat16() + torch.tensor([3e-4]).bfloat16() == 3.0
