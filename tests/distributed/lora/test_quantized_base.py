"""A quantized base under adapters: equal to the last bit to the same model with dequantized weights, at every layout."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig

from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.distributed.state import Layout
from nemo_kto.layers.layer_settings import FORMATS
from nemo_kto.layers.weight_formats import quantize
from nemo_kto.run.policy import export_checkpoint
from nemo_kto.tools.inference.opening import open_model
from nemo_kto.tools.inference.quantized_base import QuantizedLinear
from tests.families import MODELS as FAMILY_MODELS
from tests.helpers import hf_models, quantized_jobs
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint
from tests.helpers.training_jobs import assert_same, train, trajectory

ALL = LoRASettings(rank=2, alpha=4, target_modules=("all",))
DORA = replace(ALL, dora=True)
_WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
_DELTA = {
    "hidden_size": 128, "head_dim": 32, "num_hidden_layers": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip
_MAMBA = {
    "hidden_size": 128, "head_dim": 32, "mamba_head_dim": 64, "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
}  # fmt: skip
_LATENT = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "q_lora_rank": 64, "kv_lora_rank": 64,
    "v_head_dim": 64, "moe_intermediate_size": 64,
}  # fmt: skip
# Name -> family, fields of config.json, and adapters.
MODELS: dict[str, tuple[str, dict[str, Any], LoRASettings]] = {
    "llama": ("llama", _WIDE, ALL),
    "latent attention, experts": ("deepseek_v3", _LATENT, replace(ALL, target_modules=("q_b_proj", "o_proj", "mlp"))),
    "gated delta nets": ("qwen3_next", _DELTA, replace(ALL, target_modules=("in_proj_qkvz", "out_proj", "o_proj"))),
    "mamba": ("nemotron_h", _MAMBA, replace(ALL, target_modules=("in_proj", "out_proj", "o_proj"))),
    "global attention": (
        "gemma4_text",
        {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "global_head_dim": 32, "num_attention_heads": 4},
        ALL,
    ),
    "short convolutions": (
        "lfm2",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "block_auto_adjust_ff_dim": False,
            "num_hidden_layers": 2,
            "layer_types": ["conv", "full_attention"],
        },
        replace(ALL, target_modules=("in_proj", "out_proj", "o_proj")),
    ),
    "separate experts": (
        "qwen3_moe",
        {"hidden_size": 128, "head_dim": 64, "moe_intermediate_size": 128, "num_hidden_layers": 1, "intermediate_size": 128},
        ALL,
    ),
    "experts of other matrices": (
        "llama4_text",
        {"hidden_size": 128, "head_dim": 32, "intermediate_size": 64, "intermediate_size_mlp": 64},
        ALL,
    ),
    "joined experts": ("gpt_oss", {"num_hidden_layers": 2}, replace(ALL, target_modules=("attention",), experts=False)),
}
CASES = [
    ("llama", "nf4"),
    ("llama", "fp8"),
    ("llama", "mxfp4"),
    ("latent attention, experts", "nf4"),
    ("gated delta nets", "nf4"),
    ("mamba", "nf4"),
    ("global attention", "nf4"),
    ("short convolutions", "nf4"),
    ("joined experts", "mxfp4"),
]
LAYOUTS: dict[str, tuple[str, str, int, Layout]] = {
    "tp2": ("llama", "nf4", 2, Layout(tensor=2, sequence_parallel=True)),
    "tp2 fp8": ("llama", "fp8", 2, Layout(tensor=2)),
    "tp4": ("llama", "nf4", 4, Layout(tensor=4)),
    "pp2": ("llama", "nf4", 2, Layout(pipeline=2)),
    "ep2": ("latent attention, experts", "nf4", 2, Layout(expert=2)),
    "tp2 of experts": ("joined experts", "mxfp4", 2, Layout(tensor=2, sequence_parallel=True)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> hf_models.LazyFolders:
    base = tmp_path_factory.mktemp("quantized")
    return hf_models.LazyFolders(
        lambda name: make_checkpoint(base / name.replace(",", ""), MODELS[name][0], **MODELS[name][1])
    )


def _same(ours: Path, theirs: Path) -> None:
    found, expected = load_file(ours), load_file(theirs)
    assert found.keys() == expected.keys()
    assert [name for name, values in found.items() if not torch.equal(values, expected[name])] == []


@pytest.mark.parametrize(("name", "form"), CASES)
def test_it_equals_the_dequantized_model(
    name: str, form: str, folders: hf_models.LazyFolders, ranks: RankPool, tmp_path: Path
) -> None:
    """Weights, logits and gradients of adapters are equal bit for bit, so that all that holds for the latter holds."""
    settings = MODELS[name][2]
    quantized_jobs.write_dequantized(folders[name], tmp_path / "base", form)
    run = quantized_jobs.adapted
    ours = ranks.run(1, run, Layout(), folders[name], form, settings, None, tmp_path / "ours")[0]
    theirs = ranks.run(1, run, Layout(), tmp_path / "base", None, settings, None, tmp_path / "theirs")[0]
    assert ours["quantized"] > 0 == theirs["quantized"]
    for kind in ("logits", "off"):
        assert (ours[kind] == theirs[kind]).all()
    _same(tmp_path / "ours/dense.safetensors", tmp_path / "theirs/dense.safetensors")
    _same(tmp_path / "ours/gradients/adapter_model.safetensors", tmp_path / "theirs/gradients/adapter_model.safetensors")
    gradients = load_file(tmp_path / "ours/gradients/adapter_model.safetensors")
    assert all(
        values.any() for each, values in gradients.items() if each.endswith("lora_B.weight") and ".experts." not in each
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_do_not_depend_on_the_layout(
    layout: str, folders: hf_models.LazyFolders, ranks: RankPool, tmp_path: Path
) -> None:
    name, form, world_size, of_ranks = LAYOUTS[layout]
    quantized_jobs.write_dequantized(folders[name], tmp_path / "base", form)
    arguments = (of_ranks, folders[name], form, MODELS[name][2], None, tmp_path / "ours", True)
    found = ranks.run(world_size, quantized_jobs.adapted, *arguments)
    assert all(each["quantized"] for each in found)
    dense, expected = load_file(tmp_path / "ours/dense.safetensors"), hf_models.weights(tmp_path / "base")
    assert dense.keys() == expected.keys()
    assert [each for each, values in dense.items() if not torch.equal(values, expected[each])] == []


def _logits_and_gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of a model of peft, and the gradients of its adapters by their names in files."""
    logits = model(hf_models.tokens()).logits
    (logits * hf_models.cotangent()).sum().backward()
    gradients = {
        name.replace(".default", "").replace("vector.weight", "vector"): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return logits.detach(), gradients


def _in_four_bits(folder: Path, adapter: Path) -> Any:
    """The model in fp32 with adapters on linear layers of bitsandbytes."""
    form = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=form)
    return PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()


@pytest.mark.parametrize("settings", [ALL, DORA], ids=["lora", "dora"])
def test_adapters_equal_those_of_peft(
    settings: LoRASettings, folders: hf_models.LazyFolders, ranks: RankPool, tmp_path: Path
) -> None:
    """Logits and gradients are those of peft in fp64 on the dequantized model, and on bitsandbytes' layers if installed.

    Adapters are merged into the unquantized model. In fp32 peft differs from fp64 as much as we do.
    """
    quantized_jobs.write_dequantized(folders["llama"], tmp_path / "base", "nf4")
    model = hf_models.peft_model(tmp_path / "base", settings).eval()
    model.save_pretrained(tmp_path / "adapter")
    oracles = [_logits_and_gradients(model.double())]
    if importlib.util.find_spec("bitsandbytes") is not None:
        oracles.append(_logits_and_gradients(_in_four_bits(folders["llama"], tmp_path / "adapter")))
    norms = {
        name: values.double().norm(dim=1)
        for name, values in hf_models.weights(tmp_path / "base").items()
        if values.dim() == 2
    }
    arguments = (folders["llama"], "nf4", settings, tmp_path / "adapter", tmp_path / "ours")
    for number, (world_size, layout) in enumerate([(1, Layout()), (2, Layout(tensor=2))]):
        out = tmp_path / f"ours{number}"
        found = ranks.run(world_size, quantized_jobs.adapted, layout, *arguments[:-1], out)
        ours = load_file(out / "gradients/adapter_model.safetensors")
        for tensor in (tensor for tensor in ours if tensor.endswith("lora_magnitude_vector")):  # written with these norms
            weight = tensor.removeprefix("base_model.model.").replace("lora_magnitude_vector", "weight")
            ours[tensor] = ours[tensor].double() - norms[weight]
        for logits, gradients in oracles:
            assert (torch.from_numpy(found[0]["logits"]) - logits).abs().max() < 1e-5 * logits.abs().max()
            assert ours.keys() == gradients.keys()
            scale = max(gradient.abs().max() for gradient in gradients.values())
            worst = {name: float((ours[name] - gradient).abs().max() / scale) for name, gradient in gradients.items()}
            assert {name: error for name, error in worst.items() if error >= 1e-5} == {}
        unquantized = hf_models.load_peft(folders["llama"], tmp_path / "adapter").merge_and_unload().state_dict()
        merged = hf_models.weights(out / "merged")
        for name, values in merged.items():
            assert torch.allclose(values, unquantized[name], atol=1e-5), name
        assert any(not torch.equal(values, hf_models.weights(folders["llama"])[name]) for name, values in merged.items())
        again = hf_models.weights(out / "adapter")
        for name, values in hf_models.weights(tmp_path / "adapter").items():
            assert torch.allclose(again[name], values, atol=1e-5), name


def _store(folder: Path, out: Path, form: str) -> None:
    """Write a model with MXFP4 experts, or with fp8 matrices whose scales are not those of the largest values."""
    shutil.copytree(folder, out)
    (file,), stored = out.glob("*.safetensors"), {}
    for name, values in load_file(file).items():
        if form == "mxfp4" and name.endswith("_proj") and values.dim() == 3:
            parts = [quantize(matrix.mT, FORMATS[form]) for matrix in values]
            stored[f"{name}_blocks"] = torch.stack([part.codes.unflatten(1, (-1, 16)) for part in parts])
            stored[f"{name}_scales"] = torch.stack([part.scales for part in parts])
        elif form == "fp8" and name.endswith("_proj.weight"):
            scales = 1e-3 * (1 + torch.rand(-(-len(values) // 128), values.size(1) // 128))
            each = scales.repeat_interleave(128, 0)[: len(values)].repeat_interleave(128, 1)
            stored |= {name: (values / each).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
        else:
            stored[name] = values
    save_file(stored, file, {"format": "pt"})
    blocks = {"weight_block_size": [128, 128]} if form == "fp8" else {}
    hf_models.edit_config(out, quantization_config={"quant_method": form, **blocks})


@pytest.mark.parametrize(
    ("name", "form", "world_size", "layout"),
    [
        ("joined experts", "mxfp4", 1, Layout()),
        ("joined experts", "mxfp4", 2, Layout(tensor=2, sequence_parallel=True)),
        ("llama", "fp8", 1, Layout()),
        ("llama", "fp8", 2, Layout(tensor=2)),
    ],
)
def test_stored_codes_and_scales_are_kept(
    name: str, form: str, world_size: int, layout: Layout, folders: hf_models.LazyFolders, ranks: RankPool, tmp_path: Path
) -> None:
    """The model equals the one that is dequantized as it is loaded, without a second rounding."""
    _store(folders[name], tmp_path / "base", form)
    settings, run = MODELS[name][2], quantized_jobs.adapted
    ours = ranks.run(world_size, run, layout, tmp_path / "base", form, settings, None, tmp_path / "ours")
    theirs = ranks.run(world_size, run, layout, tmp_path / "base", None, settings, None, tmp_path / "theirs")
    assert all(each["quantized"] for each in ours)
    assert (ours[0]["logits"] == theirs[0]["logits"]).all()
    _same(tmp_path / "ours/dense.safetensors", tmp_path / "theirs/dense.safetensors")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("latent attention, experts", "nf4"),
        ("gated delta nets", "nf4"),
        ("joined experts", "mxfp4"),
        ("separate experts", "fp8"),
        ("experts of other matrices", "nf4"),
    ],
)
def test_inference_has_the_weights_of_the_training(
    name: str, form: str, folders: hf_models.LazyFolders, tmp_path: Path
) -> None:
    """Those of the files, each quantized and dequantized, also where transformers joins or transposes them."""
    _assert_weights_of_inference(folders[name], form, tmp_path, "AutoModelForCausalLM")


def test_inference_with_linear_layers_that_are_named_otherwise(tmp_path: Path) -> None:
    """MiniMax M3's class joins two matrices of an MLP."""
    model = FAMILY_MODELS["minimax-m3"]
    widths = ("hidden_size", "intermediate_size", "shared_intermediate_size", "dense_intermediate_size")
    text = {**model.fields["text_config"], **dict.fromkeys(widths, 64), "head_dim": 16, "num_key_value_heads": 4}
    config = replace(model, fields={**model.fields, "text_config": text}).config()
    hf_models.save_model(AutoModelForImageTextToText.from_config(config), tmp_path / "model")
    _assert_weights_of_inference(tmp_path / "model", "nf4", tmp_path, "AutoModelForImageTextToText")


def _assert_weights_of_inference(folder: Path, form: str, place: Path, class_name: str) -> None:
    quantized_jobs.write_dequantized(folder, place / "base", form)
    adapted = LoraConfig(r=2, target_modules=r"(?!.*vision).*\.o_proj")
    get_peft_model(hf_models.load(folder), adapted).save_pretrained(str(place / "adapter"))
    how: dict[str, Any] = {"class_name": class_name, "dtype": torch.float32, "remedy": ""}
    model = open_model(folder, adapters=place / "adapter", base_format=form, **how)
    found = dict(model.named_parameters())
    modules = {each: module for each, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    found |= {f"{each}.weight": module.weight for each, module in modules.items()}
    found = {each.replace(".base_layer", ""): values for each, values in found.items()}
    expected = dict(hf_models.load(place / "base").named_parameters())
    assert [each for each, values in expected.items() if not torch.equal(found[each], values)] == []


def test_a_base_that_is_gone_is_an_error_of_all_ranks(
    folders: hf_models.LazyFolders, ranks: RankPool, tmp_path: Path
) -> None:
    """Rank 0 finds it before the ranks exchange weights."""
    base = shutil.copytree(folders["llama"], tmp_path / "base")
    (base / "model.safetensors").unlink()
    with pytest.raises(RuntimeError, match=rf"UserError: export.* failed: {base}.*model\.safetensors is missing"):
        ranks.run(2, quantized_jobs.export_to, Layout(tensor=2), folders["llama"], "nf4", base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_loading_holds_one_dense_weight_at_a_time(ranks: RankPool, tmp_path: Path) -> None:
    """While it is built and loaded, dense values take less memory than the embeddings and four of its matrices."""
    wide: dict[str, Any] = {**_WIDE, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}
    folder = make_checkpoint(tmp_path / "wide", "llama", **wide)
    largest, outside, most, dense = ranks.run(1, quantized_jobs.loading_peak, folder, "nf4")[0]
    assert most - outside < 4 * largest < (dense - outside) / 5


RUN = [
    "model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[all]", "model.peft.lora_tuning.dora=true",
    "model.optim.lr=5e-3", "trainer.kto.max_steps=3", "trainer.kto.limit_val_batches=0", "trainer.kto.save_interval=2",
    "exp_manager.checkpoint_callback_params.save_top_k=-1",
]  # fmt: skip
OF_LAYOUTS = {
    "tp2": (2, ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]),
    "pp2": (2, ["model.pipeline_model_parallel_size=2"]),
    "dp2 packed": (2, ["model.data.packing=true", "model.micro_batch_size=null", "model.micro_batch_tokens=180"]),
    "recomputed and cached": (1, ["model.activations_checkpoint_granularity=full", "model.reference.mode=cached"]),
}
_FURTHER = {
    "tp4": ("llama", 4, ["model.tensor_model_parallel_size=4"]),
    "dp2, prompts computed for each answer": ("llama", 2, ["model.data.share_prompts=false"]),
    "ep2": ("latent attention, experts", 2, ["model.expert_model_parallel_size=2"]),
}


def _assert_same_losses(found: Path, expected: list[dict[str, float]]) -> None:
    """Losses agree to 1e-6. Rewards are differences of log-probs of about 150, whose last place in fp32 is 1.5e-5."""
    assert_same(trajectory(found), expected, steps=3, first=5e-5)
    for ours, theirs in zip(trajectory(found), expected, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-6, abs=0)


@pytest.mark.full
@pytest.mark.parametrize("layout", _FURTHER)
def test_losses_at_further_layouts(
    layout: str, folders: hf_models.LazyFolders, kto_rows: Path, ranks: RankPool, tmp_path: Path
) -> None:
    name, world_size, overrides = _FURTHER[layout]
    quantized = [*RUN, "model.quantize=nf4"]
    ranks.run(1, train, folders[name], kto_rows, tmp_path / "one", 1, quantized)
    ranks.run(world_size, train, folders[name], kto_rows, tmp_path / "ours", world_size, [*quantized, *overrides])
    _assert_same_losses(tmp_path / "ours", trajectory(tmp_path / "one"))
    shared = ["perf/shared_fraction" in (tmp_path / run / "metrics.jsonl").read_text() for run in ("one", "ours")]
    assert shared == [True, "model.data.share_prompts=false" not in overrides]


def test_a_run_is_the_same_at_every_layout_and_resumed(
    folders: hf_models.LazyFolders, kto_rows: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Losses agree; a run with another format is refused; exports are merged into the unquantized base, later too."""
    model, run = folders["llama"], tmp_path / "run"
    quantized = [*RUN, "model.quantize=nf4"]
    ranks.run(1, train, model, kto_rows, run, 1, [*quantized, "export.enabled=true"])
    expected = trajectory(run)
    for name, (world_size, overrides) in OF_LAYOUTS.items():
        ranks.run(world_size, train, model, kto_rows, tmp_path / name, world_size, [*quantized, *overrides])
        _assert_same_losses(tmp_path / name, expected)
    ranks.run(1, train, model, kto_rows, tmp_path / "plain", 1, RUN)
    assert trajectory(tmp_path / "plain")[-1]["train/loss"] != pytest.approx(expected[-1]["train/loss"], rel=1e-4)
    resumed = tmp_path / "resumed"
    shutil.copytree(run / "checkpoints/step_000002", resumed / "checkpoints/step_000002")
    shutil.copy(run / "metrics.jsonl", resumed)
    with pytest.raises(RuntimeError, match=r"model\.quantize must stay nf4 in a resumed run, got fp8"):
        ranks.run(1, train, model, kto_rows, resumed, 1, [*RUN, "model.quantize=fp8"])
    ranks.run(1, train, model, kto_rows, resumed, 1, quantized)
    assert trajectory(resumed) == expected
    merged = hf_models.weights(run / "hf")
    for name, values in hf_models.load_peft(model, run / "adapter").merge_and_unload().state_dict().items():
        assert torch.allclose(merged.get(name, values), values, atol=1e-5), name
    ranks.run(1, export_checkpoint, run, tmp_path / "later")
    later = hf_models.weights(tmp_path / "later")
    assert all(torch.equal(values, later[name]) for name, values in merged.items())
