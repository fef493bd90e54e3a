"""Files in fp8, int4, NVFP4: the values that ranks read, logits of transformers with the same values, exports in floats."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from nemo_kto.architecture.config_fields import read_quantization
from nemo_kto.config.resolved import ModelFiles
from nemo_kto.distributed.state import Layout
from nemo_kto.huggingface.hf_weights import check_weights
from nemo_kto.huggingface.quantized import separate_experts, stored_weights
from nemo_kto.layers.layer_settings import FORMATS as BASE_FORMATS
from nemo_kto.layers.weight_formats import dequantize
from nemo_kto.layers.weight_formats import quantize as to_format
from nemo_kto.model_files.safetensors_files import read_header
from tests.helpers import hf_jobs, hf_models

BLOCK, GROUP = (20, 12), 16  # which divide neither the shards of two ranks nor all weights
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "actorder": None}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "block_structure": [*BLOCK], "group_size": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [*BLOCK], "fmt": "float8_e4m3fn"},
    "fp8-tensor": {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
    **{
        f"float-{strategy}": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {**FLOAT, "strategy": strategy}, "input_activations": {"num_bits": 8}}},
            "ignore": ["lm_head", "re:.*vision.*"],
        }
        for strategy in ("tensor", "channel", "block")
    },
    # as ModelOpt writes them: in config.json, or only in hf_quant_config.json
    "modelopt-fp8": {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    "modelopt-nvfp4": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "config_groups": {"group_0": {"weights": {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"}}},
    },
    "packed-nvfp4": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {**INT4, "type": "float", "strategy": "tensor_group"}}},
    },
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4, "input_activations": None}},
    },
}
Parts = dict[str, Tensor]


def fp8_block(values: Tensor, draw: torch.Generator) -> tuple[Parts, Tensor]:
    """Values in fp8 with a random scale of each block, and what they stand for; the blocks at the edges may be smaller."""
    rows, columns = (-(-size // block) for size, block in zip(values.shape[-2:], BLOCK, strict=True))
    scale = torch.rand(*values.shape[:-2], rows, columns, generator=draw) + 0.5
    stored = values.to(torch.float8_e4m3fn)
    of_each = scale.repeat_interleave(BLOCK[0], -2).repeat_interleave(BLOCK[1], -1)
    of_each = of_each[..., : values.shape[-2], : values.shape[-1]]
    return {"": stored, "_scale_inv": scale}, stored.float() * of_each


def fp8_tensor(values: Tensor, draw: torch.Generator) -> tuple[Parts, Tensor]:
    """As in Ministral's files, whose scales of activations are not needed."""
    stored, scale = values.to(torch.float8_e4m3fn), torch.rand((), generator=draw).to(torch.bfloat16)
    return {"": stored, "_scale_inv": scale, "activation": torch.ones(())}, stored.float() * scale.float()


def float_tensor(values: Tensor, draw: torch.Generator) -> tuple[Parts, Tensor]:
    """As llm-compressor writes it; the scale is a vector of one value."""
    stored, scale = values.to(torch.float8_e4m3fn), torch.rand(1, generator=draw)
    return {"": stored, "_scale": scale, "input": torch.ones(1)}, stored.float() * scale


def float_channel(values: Tensor, draw: torch.Generator) -> tuple[Parts, Tensor]:
    stored, scale = values.to(torch.float8_e4m3fn), torch.rand(*values.shape[:-1], 1, generator=draw).to(torch.bfloat16)
    return {"": stored, "_scale": scale}, stored.float() * scale.float()


def float_block(values: Tensor, draw: torch.Generator) -> tuple[Parts, Tensor]:
    parts, expected = fp8_block(values, draw)
    return {"": parts[""], "_scale": parts["_scale_inv"]}, expected


def int4(values: Tensor, draw: torch.Generator) -> tuple[Parts, Tensor]:
    """Eight values in an int32, those of the first columns in the lowest bits, each above its value by 8."""
    *first, columns = values.shape
    numbers = torch.randint(-8, 8, values.shape, generator=draw)
    scale = (torch.rand(*first, -(-columns // GROUP), generator=draw) * 0.1).to(torch.bfloat16)
    words = (numbers + 8).view(*first, columns // 8, 8) * 16 ** torch.arange(8)
    packed = words.sum(-1).to(torch.uint32).view(torch.int32)
    of_each = scale.float().repeat_interleave(GROUP, -1)[..., :columns]
    return {"_packed": packed, "_scale": scale, "_shape": torch.tensor(values.shape)}, numbers * of_each


def modelopt_fp8(values: Tensor, draw: torch.Generator) -> tuple[Parts, Tensor]:
    stored, scale = values.to(torch.float8_e4m3fn), torch.rand((), generator=draw)
    return {"": stored, "_scale": scale, "input": torch.ones(())}, stored.float() * scale


def nvfp4(values: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed values, scales of groups of 16, one of the weight, and the products of the first two.

    A number has, from the highest bit, a sign s, an exponent e of two bits, and a mantissa m of one: (-1)^s m / 2 for e = 0,
    else (-1)^s 2^(e - 1) (1 + m / 2). The first of two numbers has the lower bits of their byte, as in NVFP4QTensor.
    """
    codes = torch.randint(0, 16, values.shape, generator=draw)
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
    size = torch.where(exponent == 0, mantissa / 2, 2.0 ** (exponent - 1) * (1 + mantissa / 2))
    scale = (torch.rand(*values.shape[:-1], -(-values.size(-1) // GROUP), generator=draw) * 20).to(torch.float8_e4m3fn)
    packed = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    of_each = scale.float().repeat_interleave(GROUP, -1)[..., : values.size(-1)]
    return packed, scale, torch.rand((), generator=draw) * 0.02 + 0.001, of_each.double() * (1 - 2 * sign) * size


def modelopt_nvfp4(values: Tensor, draw: torch.Generator) -> tuple[Parts, Tensor]:
    packed, scale, factor, scaled = nvfp4(values, draw)
    return {"": packed, "_scale": scale, "_scale_2": factor, "input": torch.ones(())}, scaled * factor.double()


def packed_nvfp4(values: Tensor, draw: torch.Generator) -> tuple[Parts, Tensor]:
    """As llm-compressor writes it: scales of groups are divided by that of the weight."""
    packed, scale, factor, scaled = nvfp4(values, draw)
    parts = {"_packed": packed, "_scale": scale, "_global_scale": 1 / factor.view(1), "input_global": torch.ones(1)}
    return parts, scaled / parts["_global_scale"].double()


FORMS: dict[str, Callable[[Tensor, torch.Generator], tuple[Parts, Tensor]]] = {
    "fp8-block": fp8_block,
    "fp8-tensor": fp8_tensor,
    "float-tensor": float_tensor,
    "float-channel": float_channel,
    "float-block": float_block,
    "int4": int4,
    "modelopt-fp8": modelopt_fp8,
    "modelopt-nvfp4": modelopt_nvfp4,
    "packed-nvfp4": packed_nvfp4,
}
# of names; other parts have names of their own
ENDS = ("", "_packed", "_scale", "_scale_inv", "_scale_2", "_global_scale", "_shape")
# of NVFP4, whose two scales are multiplied in fp32
ROUNDING = {form: 2e-7 if form.endswith("nvfp4") else 0.0 for form in FORMS}
WHERE = [
    (slice(None), slice(None)),
    (slice(7, 31), slice(None)),
    (slice(None), slice(9, 22)),
    (slice(3, 40, 2), slice(5, 40, 3)),
]


def test_values_of_fp8_equal_transformers() -> None:
    draw = torch.Generator().manual_seed(2)
    parts, expected = fp8_block(torch.randn(3, 41, 40, generator=draw), draw)
    assert torch.equal(_dequantize_fp8_weight(parts[""], parts["_scale_inv"], [*BLOCK], torch.float32), expected)
    parts, expected = fp8_tensor(torch.randn(41, 40, generator=draw), draw)
    assert torch.equal(_dequantize_fp8_weight(parts[""], parts["_scale_inv"], None, torch.float32), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("experts", [(), (3,)])
def test_slices_have_the_scales_of_their_values(form: str, experts: tuple[int, ...], tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(2)
    parts, expected = FORMS[form](torch.randn(*experts, 41, 40, generator=draw), draw)
    save_file({f"x.weight{end}": part for end, part in parts.items() if end in ENDS}, tmp_path / "x.safetensors")
    quantization = read_quantization({"quantization_config": CONFIGS[form].get("quantization", CONFIGS[form])})
    weights, problems = stored_weights(read_header(tmp_path / "x.safetensors", quantized=True)[0], quantization)
    assert (set(weights), problems) == ({"x.weight"}, [])
    assert weights["x.weight"].shape == expected.shape
    with safe_open(tmp_path / "x.safetensors", framework="pt") as opened:
        for where in WHERE:
            of_expert: tuple[slice | int, ...] = (*(2 for _ in experts), *where)
            found = weights["x.weight"].read(lambda _: opened, of_expert)
            torch.testing.assert_close(found, expected[of_expert].float(), rtol=ROUNDING[form], atol=0)
        torch.testing.assert_close(weights["x.weight"].read(lambda _: opened), expected.float(), rtol=ROUNDING[form], atol=0)


def test_codes_of_experts_that_are_stored_one_by_one(tmp_path: Path) -> None:
    """A quantized base keeps them: their scales, one for each row, are not those of its own blocks."""
    draw, names = torch.Generator().manual_seed(2), ("gate_proj", "up_proj")
    stored = {
        f"x.experts.{expert}.{name}.weight{end}": part
        for expert in range(2)
        for name in names
        for end, part in FORMS["float-channel"](torch.randn(24, 256, generator=draw), draw)[0].items()
    }
    save_file(stored, tmp_path / "x.safetensors")
    quantization = read_quantization({"quantization_config": CONFIGS["float-channel"]})
    weights, _ = stored_weights(read_header(tmp_path / "x.safetensors", quantized=True)[0], quantization)
    joined = separate_experts(weights, {"x.experts.gate_up_proj": (2, 256, 48)}, transposed=True)["x.experts.gate_up_proj"]
    with safe_open(tmp_path / "x.safetensors", framework="pt") as opened:
        for where in ((slice(128, 256), slice(10, 41)), (slice(None), slice(30, 48))):
            codes = joined.read_codes(lambda _: opened, (1, *where), BASE_FORMATS["fp8"], transposed=True)
            assert codes is not None
            found = dequantize(codes, BASE_FORMATS["fp8"])
            assert torch.equal(found, joined.read(lambda _: opened, (1, *where)).T)
        assert joined.read_codes(lambda _: opened, (1,), BASE_FORMATS["nf4"], transposed=True) is None


@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_codes_of_joined_experts_that_are_stored_transposed(form: str, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(2)
    values = torch.randn(2, 48, 256, generator=draw)
    if form == "fp8":
        stored = {f"x.weight{end}": part for end, part in FORMS["float-channel"](values, draw)[0].items()}
        config, wanted = CONFIGS["float-channel"], (2, 256, 48)
    else:
        parts = [to_format(matrix, BASE_FORMATS[form]) for matrix in values]
        blocks = torch.stack([part.codes.unflatten(1, (-1, 16)) for part in parts])
        stored = {"x.weight_blocks": blocks, "x.weight_scales": torch.stack([part.scales for part in parts])}
        config, wanted = {"quant_method": "mxfp4"}, (2, 48, 256)
    save_file(stored, tmp_path / "x.safetensors")
    quantization = read_quantization({"quantization_config": config})
    found = stored_weights(read_header(tmp_path / "x.safetensors", quantized=True)[0], quantization)[0]["x.weight"]
    assert found.shape == (2, wanted[2], wanted[1])
    weight, transposed = replace(found, shape=wanted, swapped=True), form == "fp8"
    with safe_open(tmp_path / "x.safetensors", framework="pt") as opened:
        for rows, columns in ((slice(10, 41), slice(128, 256)), (slice(30, 48), slice(None))):
            where = (1, columns, rows) if transposed else (1, rows, columns)
            codes = weight.read_codes(lambda _: opened, where, BASE_FORMATS[form], transposed=transposed)
            assert codes is not None
            expected = weight.read(lambda _: opened, where)
            assert torch.equal(dequantize(codes, BASE_FORMATS[form]), expected.T if transposed else expected)


# A model in each form, the tensors that are quantized, and how the start of a run describes it.
MODELS = {
    "fp8-block": ("qwen3", ("_proj.weight",), "dequantized from fp8 in blocks of 20 x 12"),
    "fp8-tensor": ("gemma3-vision", ("_proj.weight", "fc1.weight"), "left out (unused scales), dequantized from fp8"),
    # only the MLPs of the text model; attention and vision tower stay in bf16
    "float-tensor": (
        "mistral3",
        (".mlp.gate_proj.weight", ".mlp.down_proj.weight"),
        "4 left out (unused scales), dequantized from fp8",
    ),
    "float-channel": ("glm4-moe", ("_proj.weight",), "dequantized from fp8 by rows"),
    # as llm-compressor writes experts that transformers joins: one by one
    "float-block": (
        "llama4-vision",
        ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
        "dequantized from fp8 in blocks of 20 x 12",
    ),
    "int4": ("mixtral", ("w1.weight", "w2.weight", "w3.weight"), "dequantized from int4 in groups of 16"),
    "modelopt-fp8": ("qwen2", ("_proj.weight",), "36 left out (unused scales), dequantized from fp8"),
    "modelopt-nvfp4": (
        "qwen3-moe",
        ("gate_proj.weight", "down_proj.weight"),
        "64 left out (unused scales), dequantized from nvfp4 in groups of 16",
    ),
    "packed-nvfp4": (
        "qwen3-tied-bias",
        ("_proj.weight",),
        "28 left out (unused scales), dequantized from nvfp4 in groups of 16",
    ),
}


def separate(name: str, tensor: Tensor) -> Parts:
    """The matrices [out, in] of each of Llama 4's experts, which one tensor [experts, in, out] joins."""
    block, _, module = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(module)
    if parts is None:
        return {name: tensor}
    matrices = [zip(parts, expert.mT.chunk(len(parts)), strict=True) for expert in tensor]
    return {f"{block}.{number}.{part}.weight": matrix for number, pairs in enumerate(matrices) for part, matrix in pairs}


def quantize(form: str, folder: Path, plain: Path) -> None:
    """Quantize the model in ``folder``, with scales in another file than the values, and write its values to ``plain``."""
    name, ends, _ = MODELS[form]
    hf_models.write_model(name, folder, dtype=torch.bfloat16, max_shard_size="1GB")
    hf_models.write_model(name, plain, max_shard_size="1GB")
    draw, files, values = torch.Generator().manual_seed(4), (dict[str, Tensor](), dict[str, Tensor]()), dict[str, Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        read = dict[str, Tensor]()
        for weight, matrix in separate(name, tensor).items():
            read[weight] = matrix.float()
            if not weight.endswith(ends):
                files[0][weight] = matrix
                continue
            parts, exact = FORMS[form](matrix.float(), draw)
            read[weight] = exact.float()
            if form == "modelopt-fp8" and (cache := weight.rpartition("_proj.")[0][-1:]) in ("k", "v"):
                files[0][f"{weight.removesuffix('weight')}{cache}_scale"] = torch.ones(())
            for end, part in parts.items():
                stored = weight + end if end in ENDS else f"{weight.removesuffix('weight')}{end}_scale"
                files[end not in ("", "_packed")][stored] = part.contiguous()
        joined = torch.cat([*read.values()])
        values[name] = joined if name in read else joined.view(len(tensor), -1, tensor.size(1)).mT.contiguous()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (folder / "model.safetensors").unlink()
    for file, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {weight: file for file, tensors in zip(names, files, strict=True) for weight in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if "quantization" in CONFIGS[form]:
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, **CONFIGS[form]}))
    else:
        hf_models.edit_config(folder, quantization_config=CONFIGS[form])
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quantized")
    for form in MODELS:
        quantize(form, root / form, root / f"{form}-plain")
    return root


def test_logits_and_exports_are_those_of_the_dequantized_model(ranks: Any, folders: Path, tmp_path: Path) -> None:
    layout = Layout(tensor=2, sequence_parallel=True)
    results = ranks.run(2, hf_jobs.check_models, layout, {form: folders / form for form in MODELS}, tmp_path)
    for form in MODELS:
        expected = hf_models.transformers_logits(folders / f"{form}-plain")
        assert all(result[form] is not None for result in results)
        hf_models.assert_logits([result[form] for result in results], expected, name=form)
        wanted, found = hf_models.weights(folders / f"{form}-plain"), hf_models.weights(tmp_path / form)
        assert wanted.keys() == found.keys()
        for weight, values in wanted.items():
            torch.testing.assert_close(found[weight].float(), values, rtol=ROUNDING[form], atol=0, msg=f"{form} {weight}")
        assert not (tmp_path / form / "hf_quant_config.json").exists()
        assert "quantization_config" not in json.loads((tmp_path / form / "config.json").read_text())
        hf_models.load_complete(tmp_path / form)


@pytest.mark.parametrize("form", MODELS)
def test_the_start_says_how_weights_are_read(form: str, folders: Path) -> None:
    architecture = ModelFiles(source=folders / form).architecture
    assert check_weights(architecture, folders / form).describe().endswith(f" {MODELS[form][2]}")
