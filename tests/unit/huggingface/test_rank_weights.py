"""Mapping between Hugging Face weights and parameters: at any tensor-parallel size each value is in exactly one shard."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from nemo_kto.architecture.architecture import Architecture
from nemo_kto.architecture.families import FAMILIES
from nemo_kto.architecture.segments import Segment, cut, place_in_file, segments, split_dimension
from nemo_kto.huggingface.rank_weights import wanted_weights
from nemo_kto.layers.layer_settings import Experts
from nemo_kto.mixers.param_mapping import ParamMapping
from tests.helpers.tiny_models import tiny_architecture


def architecture(
    family: str = "Qwen3ForCausalLM", *, tensor_parallel: int = 1, heads: int = 6, groups: int = 3
) -> Architecture:
    biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "qk_norm"), True)
    sizes = {"tensor_parallel": tensor_parallel, "num_attention_heads": heads, "num_query_groups": groups}
    return tiny_architecture(family, **sizes, **biases)


DIVIDED = [
    mapping
    for family in ("Qwen3ForCausalLM", "Phi3ForCausalLM")  # the second has fused tensors
    for mapping in FAMILIES[family].mappings
    if split_dimension(mapping) is not None
]


def assert_every_value_has_one_place(mapping: ParamMapping, *, tensor_parallel: int, heads: int, groups: int) -> None:
    case = f"{mapping.mcore_name}: {heads} heads in {groups} groups on {tensor_parallel} ranks"
    model = architecture(tensor_parallel=tensor_parallel, heads=heads, groups=groups)
    dimension = split_dimension(mapping)
    assert dimension is not None
    parts = segments(mapping, model)
    total = sum(part.length for part in parts)
    assert total % tensor_parallel == 0, case
    counts = [torch.zeros(model.sizes[str(sizes[dimension])]) for sizes in mapping.hf_names.values()]
    length = total // tensor_parallel
    for rank in range(tensor_parallel):
        covered = 0
        for offset, part in cut(parts, start=rank * length, length=length):
            assert offset == covered, case
            covered += part.length
            if part.source is not None:
                counts[part.source][part.start : part.start + part.length] += 1
        assert covered == length, case
    assert all((count == 1).all() for count in counts), case


def test_every_value_is_in_one_shard() -> None:
    """Two and four heads to a group, one group for all and one for each, whether the ranks divide them or not."""
    shapes = [(6, 3), (8, 2), (5, 1), (9, 9), (7, 7), (24, 12)]
    for mapping, tensor_parallel, (heads, groups) in product(DIVIDED, (1, 2, 3, 4, 8), shapes):
        assert_every_value_has_one_place(mapping, tensor_parallel=tensor_parallel, heads=heads, groups=groups)


def test_query_heads_are_grouped_with_their_key_and_value() -> None:
    mapping = next(each for each in FAMILIES["LlamaForCausalLM"].mappings if each.mcore_name.endswith("linear_qkv.weight"))
    found = segments(mapping, architecture("LlamaForCausalLM", tensor_parallel=2))
    # three groups of two query heads of two channels, and a fourth of zeros
    expected = [
        Segment(source=s, start=a, length=n) for g in range(3) for s, a, n in ((0, 4 * g, 4), (1, 2 * g, 2), (2, 2 * g, 2))
    ]
    assert found == [*expected, Segment(source=None, start=0, length=8)]


def test_fused_tensors_are_concatenated() -> None:
    mappings = {mapping.mcore_name.split(".", 4)[-1]: mapping for mapping in FAMILIES["Phi3ForCausalLM"].mappings}
    model = architecture("Phi3ForCausalLM", tensor_parallel=2)
    # of the queries' twelve rows, the keys' six from the twelfth on, and the values' six from the eighteenth on
    expected = [
        Segment(source=0, start=a, length=n) for g in range(3) for a, n in ((4 * g, 4), (12 + 2 * g, 2), (18 + 2 * g, 2))
    ]
    assert segments(mappings["linear_qkv.weight"], model) == [*expected, Segment(source=None, start=0, length=8)]
    assert segments(mappings["linear_fc1.weight"], model) == [Segment(source=0, start=a, length=12) for a in (0, 24, 12, 36)]


def test_a_slice_may_start_and_end_within_segments() -> None:
    parts = [Segment(source=0, start=5, length=4), Segment(source=1, start=0, length=4)]
    assert list(cut(parts, start=2, length=4)) == [
        (0, Segment(source=0, start=7, length=2)),
        (2, Segment(source=1, start=0, length=2)),
    ]


def test_required_weights_follow_the_flags() -> None:
    full = wanted_weights(architecture())
    assert full["model.layers.1.self_attn.q_norm.weight"] == (2,)
    assert full["model.layers.0.self_attn.k_proj.bias"] == (6,)
    assert full["model.layers.1.self_attn.o_proj.weight"] == (8, 12)
    assert full["lm_head.weight"] == (11, 8)
    plain = replace(architecture("LlamaForCausalLM"), tied=True, qkv_bias=False, output_bias=False, mlp_bias=False)
    assert set(wanted_weights(plain)) == {"model.embed_tokens.weight", "model.norm.weight"} | {
        f"model.layers.{layer}.{name}.weight"
        for layer in (0, 1)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            *(f"self_attn.{kind}_proj" for kind in "qkvo"),
            *(f"mlp.{kind}_proj" for kind in ("gate", "up", "down")),
        )
    }


def test_experts_of_a_layer_in_one_tensor() -> None:
    """Input by output in the file: of each expert the channels of the gate, then those of the up projection."""
    experts = Experts(number=6, per_token=1, ffn_hidden_size=4, normalized=False, layers=(False, True))
    model = replace(architecture("Llama4ForCausalLM"), experts=experts, expert_tensor_parallel=2)
    wanted = {name: shape for name, shape in wanted_weights(model).items() if ".experts." in name}
    block = "model.layers.1.feed_forward.experts."
    assert wanted == {block + "gate_up_proj": (6, 8, 8), block + "down_proj": (6, 4, 8)}
    mappings = {mapping.mcore_name.split(".")[-2]: mapping for mapping in model.family.mappings if mapping.of_expert}
    gate_and_up, down = mappings["linear_fc1"], mappings["linear_fc2"]
    assert segments(gate_and_up, model) == [Segment(source=0, start=start, length=2) for start in (0, 4, 2, 6)]
    rows, place = slice(4, 6), {"layer": 1, "expert": 5}
    assert place_in_file(gate_and_up, place, (rows,)) == (5, slice(None), rows)
    assert place_in_file(down, place, (slice(None), rows)) == (5, rows, slice(None))
