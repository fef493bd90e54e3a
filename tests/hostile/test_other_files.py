"""Damaged models with image input or experts, and damaged files in fp8, int4 and MXFP4: each gives one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.huggingface.rank_weights import wanted_weights
from tests.helpers.messages import Message
from tests.hostile.folders import (
    CONFIG,
    GONE,
    Break,
    assert_harmless,
    both,
    config,
    cut,
    fields,
    indexed,
    launcher_says,
    ranks_say,
    shapes,
    write,
)

WEIGHTS = "model.safetensors"
TEXT = {name: value for name, value in CONFIG.items() if name != "architectures"} | {"model_type": "mistral", "head_dim": 4}
IMAGES: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "tie_word_embeddings": True,
    "text_config": TEXT,
    "vision_config": {"model_type": "pixtral", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
}
OF_ROWS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
FLOAT: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": OF_ROWS}},
}
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [8, 4], "fmt": "e4m3"}
OF_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8, "actorder": None}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": (GROUP := {"targets": ["Linear"], "weights": OF_WEIGHTS, "input_activations": None})},
}
SIZES = {**CONFIG, "moe_intermediate_size": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
ROUTED: dict[str, Any] = {**SIZES, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "head_dim": 4}
MXFP4: dict[str, Any] = {
    **CONFIG, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 32, "intermediate_size": 32,
    "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 2, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"  # [2, 32, 64]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"  # [4]
GROUP_OF_4 = {**GROUP, "weights": {**OF_WEIGHTS, "group_size": 4}}
UP, SCALE = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight_scale"  # [12, 8]
VISION, PROJECTOR = "vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight"
REFUSED = Message("quantization_config", "mxfp4", "fp8", "compressed-tensors", "pack-quantized", "unquantized")


def tensors(**changes: Tensor | None) -> Break:
    """Other tensors, with two underscores in the place of a dot; None removes one."""

    def apply(folder: Path) -> None:
        named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
        kept = {**load_file(folder / WEIGHTS), **named}
        save_file({name: each for name, each in kept.items() if each is not None}, folder / WEIGHTS)

    return apply


def named(**changes: Tensor | None) -> Break:
    """The same for tensors of the matrix that is quantized: the ends of their names."""
    return tensors(**{UP.replace(".", "__") + end: tensor for end, tensor in changes.items()})


def blocks(**changes: Tensor | None) -> Break:
    """The same for tensors of the experts in MXFP4."""
    return tensors(**{EXPERTS.replace(".", "__") + end: tensor for end, tensor in changes.items()})


def number(kind: torch.dtype, *shape: int) -> Tensor:
    return torch.ones(shape, dtype=kind)


def int4(**changes: object) -> Break:
    """Another scheme of compressed-tensors; GONE removes an entry."""
    weights = {**OF_WEIGHTS, **changes}
    group = {"targets": ["Linear"], "weights": {name: value for name, value in weights.items() if value is not GONE}}
    return config(quantization_config={**INT4, "config_groups": {"group_0": group}})


def text(**changes: object) -> Break:
    return config(text_config={**TEXT, **changes})


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


WHOLE = {"images": IMAGES, "experts": ROUTED, "mxfp4": MXFP4}  # other configurations; the others are of a llama
CASES: dict[str, dict[str, tuple[Break, Message]]] = {
    "images": {
        "no text_config": (config(text_config=GONE), Message("text_config", "mistral3", "none", "choose another model")),
        "text_config is a list": (config(text_config=[1]), Message("text_config", "object", "[1]", "choose another model")),
        "another text model": (
            text(model_type="mixtral"),
            Message("model_type", "text_config", "ministral3", "mistral4", "'mixtral'"),
        ),
        "a text model without size": (text(hidden_size=0), Message("hidden_size", "1", "0", "choose another model")),
        "heads of the text model": (text(num_key_value_heads=3), Message("num_attention_heads", "2", "3")),
        "model_type of a text model": (config(model_type="mistral"), Message("model_type", "'mistral3'", "'mistral'")),
        "ties are a string": (config(tie_word_embeddings="yes"), Message("tie_word_embeddings", "yes")),
        "no vision tower": (tensors(**{VISION.replace(".", "__"): None}), Message("missing", "vision tower")),
        "no projector": (tensors(**{PROJECTOR.replace(".", "__"): None}), Message("missing", "projector")),
        "a vision tensor that only the index names": (
            indexed({"weight_map": {VISION: WEIGHTS, "vision_tower.patch_conv.weight": WEIGHTS}}),
            Message("index.json", "vision_tower.patch_conv.weight", WEIGHTS),
        ),
        "an index with a file of vision weights that is not there": (
            indexed({"weight_map": {VISION: "vision.safetensors", PROJECTOR: WEIGHTS}}),
            Message("vision.safetensors is missing", "save_pretrained"),
        ),
        "a weight under both prefixes": (
            tensors(model__language_model__norm__weight=ones(8)),
            Message("1 differences", "unexpected: model.language_model.norm.weight", "download"),
        ),
        "a vision tensor in fp8 without a scale": (
            both(
                tensors(**{VISION.replace(".", "__"): number(torch.float8_e4m3fn, 8, 8)}),
                config(quantization_config=FP8),
            ),
            Message("1 differences", f"missing: {VISION}_scale_inv", "download"),
        ),
        "weights are cut": (cut(WEIGHTS, 0.9), Message(WEIGHTS, "cut short", "download")),
        "sounds": (tensors(audio_tower__x=ones(2)), Message("1 differences", "unexpected: audio_tower.x")),
        "integers": (shapes({}, "I32"), Message("I32", "F64, F32, F16 or BF16", "unquantized")),
    },
    "fp8": {
        "no scale": (named(_scale_inv=None), Message("1 differences", f"missing: {UP}_scale_inv")),
        "a scale of another shape": (named(_scale_inv=ones(3, 2)), Message(f"{UP}_scale_inv", "[2, 2]", "[3, 2]")),
        "one scale in the place of those of blocks": (named(_scale_inv=ones()), Message(f"{UP}_scale_inv", "[2, 2]", "[]")),
        "scales are integers": (
            named(_scale_inv=number(torch.int32, 2, 2)),
            Message("1 differences", f"{UP}_scale_inv: expected floats, got I32", "download"),
        ),
        "a scale of nothing": (named(_scale_inv_scale_inv=ones()), Message(f"unexpected: {UP}_scale_inv_scale_inv")),
        "scales of scores": (
            tensors(model__layers__0__self_attn__qk_scale=ones()),
            Message("unexpected: model.layers.0.self_attn.qk_scale"),
        ),
        "blocks without a size": (config(quantization_config={**FP8, "weight_block_size": [0, 8]}), REFUSED),
        "a single value": (
            named(**{"": number(torch.float8_e4m3fn)}),
            Message("2 differences", f"{UP}_scale_inv: expected shape [1, 1], got [2, 2]", "[12, 8]", "[]"),
        ),
        "another format of fp8": (config(quantization_config={**FP8, "fmt": "e5m2"}), Message("fp8", "e5m2", "unquantized")),
        "no quantization_config": (config(quantization_config=GONE), Message("F8_E4M3", "F64", "unquantized")),
        "weights of another size": (
            named(**{"": torch.zeros(13, 8).to(torch.float8_e4m3fn)}),
            Message(UP, "[12, 8]", "[13, 8]"),
        ),
    },
    "float": {
        "no scale": (named(_scale=None), Message("1 differences", f"missing: {UP}_scale_inv or {SCALE}", "download")),
        "a scale of another shape": (
            named(_scale=ones(11, 1)),
            Message("1 differences", f"{SCALE}: expected shape [12, 1], got [11, 1]", "download"),
        ),
        "one scale in the place of those of rows": (named(_scale=ones(1)), Message(SCALE, "[12, 1]", "[1]")),
        "a weight without values": (
            named(**{"": number(torch.float8_e4m3fn, 0, 8)}),
            Message("2 differences", f"{SCALE}: expected shape [0, 1], got [12, 1]", "[12, 8]", "[0, 8]"),
        ),
        "integers of eight bits": (
            config(quantization_config={**FLOAT, "format": "int-quantized"}),
            Message("'int-quantized'", "float-quantized", "unquantized"),
        ),
        "blocks without a size": (
            config(quantization_config={**FLOAT, "config_groups": {"a": {"weights": {**OF_ROWS, "strategy": "block"}}}}),
            Message("'strategy': 'block'", "unquantized"),
        ),
    },
    "int4": {
        "no scale": (named(_scale=None), Message("1 differences", f"missing: {SCALE}")),
        "a scale of another shape": (named(_scale=ones(12, 2)), Message(SCALE, "[12, 1]", "[12, 2]")),
        "groups without a size": (int4(group_size=GONE), Message("'strategy': 'group'", "unquantized")),
        "groups of no size": (int4(group_size=-1), Message("compressed-tensors", "'group_size': -1", "unquantized")),
        "groups of two sizes": (
            config(quantization_config={**INT4, "config_groups": {"a": GROUP, "b": GROUP_OF_4}}),
            Message("'group_size': 8", "'group_size': 4", "unquantized"),
        ),
        "scales are integers": (
            named(_scale=number(torch.int32, 12, 1)),
            Message("1 differences", f"{SCALE}: expected floats, got I32", "download"),
        ),
        "zero points": (named(_zero_point=torch.zeros(2, 1, dtype=torch.int32)), Message(f"unexpected: {UP}_zero_point")),
        "rotated weights": (
            config(quantization_config={**INT4, "transform_config": {"config_groups": {"R3": {}}}}),
            Message("compressed-tensors", "transform_config", "R3", "unquantized"),
        ),
        "sparse weights": (
            config(quantization_config={**INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}),
            Message("sparsity_config", "sparse-24-bitmask", "unquantized"),
        ),
        "eight bits": (int4(num_bits=8), Message("pack-quantized", "'num_bits': 8", "unquantized")),
        "an asymmetric scheme": (int4(symmetric=False), Message("compressed-tensors", "'symmetric': False")),
        "no strategy": (int4(strategy=GONE), Message("compressed-tensors", "unquantized")),
        "reordered columns": (int4(actorder="group"), Message("'actorder': 'group'")),
        "another format": (
            config(quantization_config={**INT4, "format": "nvfp4-pack-quantized"}),
            Message("'nvfp4-pack-quantized'", "unquantized"),
        ),
        "another method": (config(quantization_config={"quant_method": "awq"}), Message("quant_method 'awq'")),
        "groups are a list": (config(quantization_config={**INT4, "config_groups": [1]}), REFUSED),
        "integers without a scale": (
            named(_packed=None, **{"": torch.zeros(12, 8, dtype=torch.int32)}),
            Message(f"{UP}: expected floats, got I32"),
        ),
    },
    "mxfp4": {
        "no scales": (blocks(_scales=None), Message("1 differences", f"missing: {EXPERTS}_scales", "download")),
        "scales of another shape": (
            blocks(_scales=number(torch.uint8, 2, 63, 1)),
            Message("1 differences", f"{EXPERTS}_scales: expected shape [2, 64, 1], got [2, 63, 1]", "download"),
        ),
        "blocks of another size": (
            blocks(_blocks=number(torch.uint8, 2, 64, 1, 15)),
            Message("1 differences", f"{EXPERTS}_blocks: expected shape [2, 64, 1, 16], got [2, 64, 1, 15]"),
        ),
        "blocks are floats": (
            blocks(_blocks=ones(2, 64, 1, 16)),
            Message("1 differences", f"{EXPERTS}_blocks: expected U8, got F32", "download"),
        ),
        "fewer experts": (
            blocks(_blocks=number(torch.uint8, 1, 64, 1, 16), _scales=number(torch.uint8, 1, 64, 1)),
            Message("1 differences", EXPERTS, "[2, 32, 64]", "[1, 32, 64]", "download"),
        ),
    },
    "experts": {
        "a correction bias of another length": (
            tensors(**{BIAS.replace(".", "__"): ones(3)}),
            Message("1 differences", BIAS, "[4]", "[3]", "download"),
        ),
        "no correction bias": (
            tensors(**{BIAS.replace(".", "__"): None}),
            Message("1 differences", f"missing: {BIAS}", "download"),
        ),
        "one more expert": (
            tensors(model__layers__1__mlp__experts__4__up_proj__weight=ones(4, 8)),
            Message("1 differences", "unexpected: model.layers.1.mlp.experts.4.up_proj.weight", "download"),
        ),
        "experts in a dense layer": (
            tensors(model__layers__0__mlp__gate__weight=ones(4, 8)),
            Message("1 differences", "unexpected: model.layers.0.mlp.gate.weight", "download"),
        ),
    },
}  # fmt: skip


@pytest.fixture
def model(here: Path, request: pytest.FixtureRequest) -> Path:
    """A valid folder of the kind of the case."""
    kind, folder = request.param, here / "model"
    if kind in WHOLE:
        write(folder / "config.json", WHOLE[kind])
    weights = {
        name: torch.zeros(shape) for name, shape in wanted_weights(read_architecture(folder, tensor_parallel=1)).items()
    }
    if kind == "images":
        weights = {f"language_model.{name}": each for name, each in weights.items()} | {VISION: ones(8), PROJECTOR: ones(8)}
    elif kind == "float":
        weights |= {UP: weights[UP].to(torch.float8_e4m3fn), SCALE: ones(12, 1)}
        fields("config.json", quantization_config=FLOAT)(folder)
    elif kind == "fp8":
        weights |= {UP: weights[UP].to(torch.float8_e4m3fn), f"{UP}_scale_inv": ones(2, 2)}
        fields("config.json", quantization_config=FP8)(folder)
    elif kind == "mxfp4":
        for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
            _, columns, rows = weights.pop(name).shape
            weights[f"{name}_blocks"] = number(torch.uint8, 2, rows, columns // 32, 16)
            weights[f"{name}_scales"] = number(torch.uint8, 2, rows, columns // 32)
    elif kind == "int4":
        packed = torch.zeros(weights.pop(UP).shape[0], 1, dtype=torch.int32)
        weights |= {f"{UP}_packed": packed, SCALE: ones(12, 1), f"{UP}_shape": torch.tensor([12, 8])}
        fields("config.json", quantization_config=INT4)(folder)
    save_file(weights, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("model", CASES, indirect=True)
def test_valid_folders_give_no_error(model: Path, here: Path) -> None:
    assert launcher_says(model, here / "rows.jsonl") == []
    assert ranks_say(model) is None


@pytest.mark.parametrize(
    ("model", "case"), [(kind, case) for kind, cases in CASES.items() for case in cases], indirect=["model"]
)
def test_damage_ends_with_one_error(model: Path, here: Path, case: str, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["model"]
    breaks, expected = CASES[kind][case]
    breaks(model)
    found = ranks_say(model)
    assert found is not None
    assert found == expected
    assert ";" in found or "\n  download" in found, "a remedy is missing"
    assert_harmless(found)
    for line in launcher_says(model, here / "rows.jsonl"):
        assert line.startswith("pretrained_checkpoint.restore_from_path ")
        assert line == expected
