"""Models with image input: their text is trained, and all other weights are copied, at layouts spread over the models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from nemo_kto.architecture.families import MULTIMODAL
from nemo_kto.architecture.lora import LoRASettings
from nemo_kto.config.resolved import ModelFiles
from nemo_kto.data.rows.records import KTORecord, RowError
from nemo_kto.data.tokens.chat_template import RecordEncoder, load_tokenizer
from nemo_kto.distributed.state import Layout
from nemo_kto.errors import UserError
from nemo_kto.huggingface.hf_weights import check_weights
from nemo_kto.model_files.adapter_files import beginning_of
from nemo_kto.model_files.companion_files import auto_class
from nemo_kto.run.policy import Policy, export_checkpoint
from nemo_kto.tools.inference.chat_model import ChatModel
from tests.families import IMAGES
from tests.helpers import hf_jobs, hf_models, lora_jobs
from tests.helpers.hf_models import weights
from tests.helpers.messages import assert_names, raises

TP2 = Layout(tensor=2, sequence_parallel=True)
LAYOUTS = {
    "tp2": (TP2, ("mistral3", "qwen2.5-vl", "qwen3-vl-moe", "qwen3.5", "older/gemma3-vision", "internvl3.5", "glm4v")),
    "pp2": (
        Layout(pipeline=2),
        (
            "gemma3-vision",
            "mistral3-ministral",
            "qwen3-vl",
            "older/mistral3",
            "flat/qwen2.5-vl",
            "qwen2-vl",
            "older/internvl3",
            "gemma4-12b-vision",
        ),
    ),
    "ep2": (
        Layout(expert=2),
        (
            "llama4-vision",
            "qwen3.5-moe",
            "older/qwen3-vl-moe",
            "joined/qwen3.5-moe",
            "mistral3-latents",
            "kimi-k2.5",
            "glm4v-moe",
            "internvl3.5-moe",
            "internvl3.5-gpt-oss",
            "gemma4-vision",
            "minimax-m3",
        ),
    ),
}
UNTRAINED = (
    "vision",
    "embed_vision",
    "embed_audio",
    "multi_modal",
    "patch_merge",
    "mm_projector",
    "visual",
)  # of the names that transformers writes, after "model."
FACTOR = 0.5  # exact in any dtype
IMAGE = 256  # a token that stands for a part of an image


def of_text(name: str) -> bool:
    return not name.removeprefix("model.").startswith(UNTRAINED) and ".self_attn.index" not in name


def rewritten(folder: Path, name_of: Callable[[str], str], **turned: Any) -> None:
    """Other names of the tensors, in a single file; ``turned``: ends of the names of matrices to transpose."""
    tensors = {name_of(name): each for name, each in weights(folder).items()}
    tensors = {name: each.mT.contiguous() if name.endswith(tuple(turned)) else each for name, each in tensors.items()}
    store(folder, tensors)


def store(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """In the place of the folder's tensors, in a single file."""
    for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        file.unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of a layer in one tensor, gate above up projection, as Qwen3.5 is published."""
    blocks = {name.partition(".0.gate_proj")[0] for name in tensors if name.endswith(".experts.0.gate_proj.weight")}
    for block in blocks:
        count = sum(name.startswith(block) for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors.pop(f"{block}.{expert}.{part}_proj.weight") for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{block}.gate_up_proj": torch.cat((gate, up), 1), f"{block}.down_proj": down}
    return tensors


def older(name: str) -> str:
    """Names of the other form of files."""
    if name.startswith(("language_model.model.", "language_model.lm_head.")):
        return name.removeprefix("language_model.").replace("model.", "model.language_model.", 1)
    return name if name.startswith(("lm_head.", "model.")) else f"model.{name}"


def with_images(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the vision tower of transformers for two images, and logits of a text with these images."""
    draw, config, tokens = torch.Generator().manual_seed(8), model.config, hf_models.tokens(1) % IMAGE
    config.update({"image_token_id": IMAGE, "image_token_index": IMAGE})
    towers = ("vision_tower", "vision_model", "visual", *["embed_vision"] * (config.model_type == "gemma4_unified"))
    tower = next(module for name, module in model.named_modules() if name.endswith(towers))
    if config.model_type.startswith(
        ("qwen", "kimi", "glm", "minimax")
    ):  # 16 patches, of Qwen and GLM with two frames, give four tokens
        size = config.vision_config.patch_size
        of_patch = (3, size, size) if config.model_type == "kimi_k25" else (6 * size**2,)
        patches = torch.randn(32, *of_patch, generator=draw)
        images: dict[str, Any] = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
        tokens[:, 2:6] = tokens[:, 9:13] = IMAGE
        if "mm_token_type_ids" in signature(model.forward).parameters:
            images["mm_token_type_ids"] = (tokens == IMAGE).long()
    elif config.model_type.startswith("gemma4"):  # 16 patches with their places, or 4 larger ones, give four tokens
        wide, vision = config.model_type == "gemma4_unified", config.vision_config
        side, size = (2, vision.model_patch_size) if wide else (4, vision.patch_size)
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(2, -1, -1)
        images = {"pixel_values": torch.rand(2, side**2, 3 * size**2, generator=draw)}
        tokens[:, 2:6] = tokens[:, 9:13] = IMAGE
        images |= {"image_position_ids": places, "mm_token_type_ids": (tokens == IMAGE).long()}
    else:
        images = {"pixel_values": torch.randn(2, 3, 28, 28, generator=draw)}
        images |= {"image_sizes": torch.tensor([[28, 28]] * 2)} if config.model_type == "mistral3" else {}
        tokens[:, 2 : 2 + 2 * getattr(config, "mm_tokens_per_image", 1)] = IMAGE
    seen: list[torch.Tensor] = []
    hook = tower.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    with torch.no_grad():
        logits = model(tokens, **images).logits
    hook.remove()
    return seen[0], logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> hf_models.LazyFolders:
    root = tmp_path_factory.mktemp("models")

    def write(name: str) -> Path:
        kind, _, plain = name.rpartition("/")
        if not kind:
            hf_models.write_model(plain, root / plain)
            if plain == "kimi-k2.5":
                store(root / plain, weights(root / plain))  # with the published names of the layers
            return root / plain
        folder = root / f"{kind}-{plain}"
        shutil.copytree(of_models[plain], folder)
        if kind == "older":
            rewritten(folder, older, gate_up_proj=True, **{"experts.down_proj": True})
        elif kind == "joined":
            store(folder, joined(weights(folder)))
        else:  # as published
            config = json.loads((folder / "config.json").read_text())
            rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 1e5}
            text = {key: value for key, value in config.pop("text_config").items() if key != "rope_parameters"}
            (folder / "config.json").write_text(json.dumps({**text, **rope, **config}))
        return folder

    of_models = hf_models.LazyFolders(write)
    return of_models


def test_there_is_a_model_of_each_kind() -> None:
    configs = [model.config() for model in IMAGES.values()]
    found = {(config.model_type, config.text_config.model_type) for config in configs}
    assert found == {(family.name, family.text_type) for family in MULTIMODAL}


@pytest.mark.parametrize("case", LAYOUTS)
def test_text_is_trained_and_the_rest_copied(case: str, ranks: Any, folders: Any, tmp_path: Path) -> None:
    layout, names = LAYOUTS[case]
    results = ranks.run(2, hf_jobs.check_models, layout, folders.of(names), tmp_path, FACTOR)
    for name, folder in folders.of(names).items():
        source = hf_models.load(folder).eval()
        expected = source(hf_models.tokens()).logits.detach()
        hf_models.assert_logits([result[name] for result in results], expected, name=name)
        before, after = weights(folder), weights(tmp_path / name)
        assert before.keys() == after.keys()
        for weight, tensor in before.items():
            wanted = tensor * FACTOR if of_text(weight) else tensor
            assert torch.equal(after[weight], wanted), f"{name} {weight}"
        config = json.loads((folder / "config.json").read_text())
        if "text_config" in config and not config["tie_word_embeddings"]:
            config["text_config"] |= {key: False for key in config["text_config"] if key == "tie_word_embeddings"}
        assert json.loads((tmp_path / name / "config.json").read_text()) == config
        model = hf_models.load_complete(tmp_path / name)
        found = model.state_dict()
        for weight, tensor in source.state_dict().items():
            assert torch.equal(found[weight], tensor * FACTOR if of_text(weight) else tensor), f"{name} {weight}"
        (seen, logits), (expected_seen, expected) = with_images(model.eval()), with_images(source)
        assert torch.equal(seen, expected_seen), f"{name}: the vision tower"
        assert not torch.equal(logits, expected), name


def test_images_give_the_same_logits_until_the_text_is_trained(ranks: Any, folders: Any, tmp_path: Path) -> None:
    names = [*IMAGES]
    ranks.run(1, hf_jobs.check_models, Layout(), folders.of(names), tmp_path)
    for name in names:
        models = [hf_models.load(folder) for folder in (folders[name], tmp_path / name)]
        for parameter in chain(*(model.parameters() for model in models)):
            parameter.data = parameter.data.clone()  # products of matrices that are aligned otherwise round otherwise
        assert torch.equal(*(with_images(model)[1] for model in models)), name


@pytest.mark.parametrize("case", LAYOUTS)
def test_gradients_of_the_text_equal_transformers(case: str, ranks: Any, folders: Any, tmp_path: Path) -> None:
    """Those of the whole class for a text without images; other weights are exported as they are."""
    layout, names = LAYOUTS[case]
    plain = folders.of(name for name in names if "/" not in name)
    ranks.run(2, hf_jobs.check_gradients, layout, plain, tmp_path)
    for name, folder in plain.items():
        before, found = weights(folder), weights(tmp_path / name)
        expected = hf_models.gradients(folder, tmp_path / f"{name}-all")
        assert before.keys() == found.keys() == expected.keys()
        for weight, gradient in expected.items():
            wanted, atol = (gradient, 2e-5 * gradient.abs().max().item()) if of_text(weight) else (before[weight], 0)
            np.testing.assert_allclose(found[weight].numpy(), wanted.numpy(), rtol=0, atol=atol, err_msg=f"{name} {weight}")


def test_an_output_weight_with_other_values_is_found_by_its_prefix(folders: Any, tmp_path: Path) -> None:
    """Published files of Mistral Small do not say that they are not tied, as transformers assumes."""
    shutil.copytree(folders["mistral3"], model := tmp_path / "model")
    hf_models.edit_config(model, tie_word_embeddings=None)
    files = ModelFiles(source=model)
    assert files.architecture.untied
    assert list(files.output_line) == ["output layer"]
    check_weights(files.architecture, model)


def test_processor_files_are_exported(ranks: Any, folders: Any, tmp_path: Path) -> None:
    shutil.copytree(folders["mistral3"], tmp_path / "model")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / "model" / name).write_text('{"image_size": 28}')
    assert ranks.run(1, hf_jobs.export_only, Layout(), tmp_path / "model", tmp_path / "out") == [""]
    for name in ("preprocessor_config.json", "processor_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_a_checkpoint_is_exported_with_the_weights_of_its_original_model(ranks: Any, folders: Any, tmp_path: Path) -> None:
    shutil.copytree(folders["qwen3-vl"], tmp_path / "model")
    ranks.run(1, lora_jobs.train_and_save, Layout(), tmp_path / "model", None, tmp_path / "run", 1)
    (checkpoint,) = (tmp_path / "run").iterdir()
    ranks.run(1, export_checkpoint, checkpoint, tmp_path / "out")
    before, after = weights(tmp_path / "model"), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert torch.equal(after[name], values) is not of_text(name), name
    assert auto_class(tmp_path / "out") == "AutoModelForImageTextToText"
    policy = Policy(files=ModelFiles(source=checkpoint), chunks=[], adapters=None)
    assert policy.weights_line == {"weights": "24 trained, 27 copied (27 vision tower)"}
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    with raises(UserError, f"{checkpoint}", "original", f"{tmp_path / 'model'}", "copy it", "trainer.json"):
        export_checkpoint(checkpoint, tmp_path / "again")


def test_rows_with_tokens_of_images_are_refused(folders: Any) -> None:
    encoder = RecordEncoder(tokenizer=load_tokenizer(folders["gemma3-vision"]))
    row = KTORecord(prompt="a <pad> b", response="c", desirable=True, line=1)
    (refused,) = encoder.encode([row])
    assert isinstance(refused, RowError)
    assert_names(str(refused), "'<pad>'", "image", "leave")


ADAPTED = {
    "mistral3": LoRASettings(rank=2, alpha=4, target_modules=("all",)),
    "llama4-vision": LoRASettings(rank=2, alpha=4, target_modules=("attention",), layers=(2,)),
    "glm4v": LoRASettings(rank=2, alpha=4, target_modules=("all",)),
}


def test_adapters_fit_the_whole_model_in_peft(ranks: Any, folders: Any, tmp_path: Path) -> None:
    """They have names of modules of the text model; layers of the vision tower with the same names are left alone."""
    names = [*ADAPTED]
    ranks.run(1, hf_jobs.new_adapters, folders.of(names), ADAPTED, tmp_path / "new")
    for name in names:
        file = tmp_path / "new" / name / "adapter_model.safetensors"
        draw = torch.Generator().manual_seed(3)
        tensors = {key: torch.randn(each.shape, generator=draw) * 0.2 for key, each in weights(file.parent).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    adapters = {name: tmp_path / "new" / name for name in names}
    results = ranks.run(2, hf_jobs.check_adapters, TP2, folders.of(names), adapters, ADAPTED, tmp_path / "out")
    for name in names:
        base = hf_models.load(folders[name])
        with torch.no_grad():
            plain = base.eval()(hf_models.tokens()).logits.numpy()
            model = PeftModel.from_pretrained(base, str(tmp_path / "out" / name / "again")).eval()
            expected = model(hf_models.tokens()).logits.numpy()
        adapted = {key.split(".lora_")[0] for key in model.state_dict() if ".lora_" in key}
        assert len(adapted) == {"mistral3": 14, "llama4-vision": 4, "glm4v": 10}[name]
        assert not any("vision" in key for key in adapted)
        atol = 1e-5 * np.abs(expected).max()
        hf_models.assert_adapted_logits([result[name] for result in results], expected, plain, rtol=0, atol=atol)
        merged = hf_models.load(tmp_path / "out" / name / "merged").eval()
        np.testing.assert_allclose(merged(hf_models.tokens()).logits.detach().numpy(), expected, rtol=0, atol=atol)


# How the names of a text model's tensors begin in files of PEFT: with transformers 5 and 4, of the text model, and with the
# class without output layer; vLLM reads names without the prefix too.
BEGINNINGS = {
    "transformers_5": "base_model.model.model.language_model.",
    "transformers_4.4x": "base_model.model.language_model.model.",
    "text_only": "base_model.model.model.",
    "without_output_layer": "base_model.model.language_model.",
    "without_prefix": "language_model.model.",
}


@pytest.mark.parametrize(
    "kinds", [pytest.param(["transformers_4.4x"], id="quick"), pytest.param([*BEGINNINGS], id="all", marks=pytest.mark.full)]
)
def test_adapters_under_other_names(kinds: list[str], ranks: Any, folders: Any, tmp_path: Path) -> None:
    """They are read bit for bit, and exported and given to PEFT, as in chat, under the names of its modules.

    One model has adapters with every beginning, the others with these.
    """
    names = [*ADAPTED, "qwen2.5-vl"]
    settings = {**ADAPTED, "qwen2.5-vl": LoRASettings(rank=2, alpha=4, target_modules=("q_proj", "embed_tokens"))}
    ranks.run(1, hf_jobs.new_adapters, folders.of(names), settings, tmp_path / "new")
    own, adapters, models = {}, {}, {}
    merged = dict[str, dict[str, torch.Tensor]]()
    for name in names:
        draw = torch.Generator().manual_seed(3)
        kept = weights(tmp_path / "new" / name)
        own[name] = {key: torch.randn(kept[key].shape, generator=draw) * 0.2 for key in sorted(kept)}
        usual = beginning_of(kept) or ""
        for kind in kinds if name in ADAPTED else BEGINNINGS:
            shutil.copytree(tmp_path / "new" / name, folder := tmp_path / kind / name)
            tensors = {key.replace(usual, BEGINNINGS[kind]): each for key, each in own[name].items()}
            save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            adapters[f"{kind}/{name}"], models[f"{kind}/{name}"] = folder, folders[name]
    chosen = {case: settings[case.partition("/")[2]] for case in models}
    ranks.run(2, hf_jobs.check_adapters, TP2, models, adapters, chosen, tmp_path / "out")
    for case, base in models.items():
        kind, _, name = case.partition("/")
        again = weights(tmp_path / "out" / case / "again")
        assert again.keys() == own[name].keys()
        assert all(torch.equal(again[key], each) for key, each in own[name].items()), case
        if kind == "without_prefix":
            with raises(UserError, f"{adapters[case]}", "base_model.model.", "language_model.model.", "rename"):
                ChatModel(label="", folder=adapters[case], base=base, dtype=torch.float32)
            continue
        chat = ChatModel(label="", folder=adapters[case], base=base, dtype=torch.float32)
        plain = hf_models.load(base).state_dict()
        changed = {key: each for key, each in chat._model.state_dict().items() if not torch.equal(each, plain[key])}
        assert len(changed) == len(own[name]) / 2
        expected = merged.setdefault(name, changed)
        assert all(torch.equal(each, expected[key]) for key, each in changed.items())


def test_every_weight_is_trained_copied_or_refused(folders: Any, tmp_path: Path) -> None:
    shutil.copytree(folders["gemma3-vision"], model := tmp_path / "model")
    architecture = ModelFiles(source=model).architecture
    assert check_weights(architecture, model).describe() == "28 trained, 34 copied (32 vision tower, 2 projector)"
    tensors = weights(model)
    rewritten(model, lambda name: "audio_tower.x" if name.startswith("multi_modal_projector.mm_soft") else name)
    with raises(UserError, f"{model}", "Gemma3ForConditionalGeneration", "1 differences", "unexpected: audio_tower.x"):
        check_weights(architecture, model)
    rewritten(model, lambda name: name.replace("audio_tower.x", "language_model.model.layers.0.x"))
    with raises(UserError, f"{model}", "1 differences", "unexpected: language_model.model.layers.0.x"):
        check_weights(architecture, model)
    text = {name: each for name, each in tensors.items() if of_text(name)}
    save_file(text, model / "model.safetensors", metadata={"format": "pt"})
    with raises(UserError, f"{model}", "1 differences", "missing: every weight of the vision tower"):
        check_weights(architecture, model)
