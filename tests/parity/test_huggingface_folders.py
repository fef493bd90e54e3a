"""Invalid folders, failing disks, dtypes, and padded layouts in a distributed checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_kto.architecture.architecture import read_architecture
from nemo_kto.architecture.families import ALIASES
from nemo_kto.config.resolved import ModelFiles
from nemo_kto.distributed.state import Layout
from nemo_kto.errors import UserError
from nemo_kto.huggingface.hf_weights import check_weights
from nemo_kto.model_files.safetensors_files import INDEX
from nemo_kto.run.policy import export_checkpoint
from nemo_kto.tools.inference.chat_model import ChatModel
from nemo_kto.tools.inference.reward_model import RewardModel
from tests.families import MODELS
from tests.helpers import hf_jobs, hf_models, lora_jobs
from tests.helpers.hf_models import weights
from tests.helpers.messages import Message, assert_names, raises

TP2, PP2 = Layout(tensor=2), Layout(pipeline=2)


@pytest.fixture(scope="module")
def sharded_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied llama with heads that two ranks cannot share out, in several files."""
    folder = tmp_path_factory.mktemp("model")
    hf_models.write_model("llama-odd-heads", folder)
    return folder


@pytest.fixture
def model(sharded_model: Path, tmp_path: Path) -> Path:
    """A copy to break, in a single file."""
    shutil.copytree(sharded_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    save_file(weights(sharded_model), tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model"


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_all_differences_are_in_one_error_on_every_rank(ranks: Any, model: Path) -> None:
    rewrite(
        model,
        **{
            "model.layers.0.mlp.up_proj.weight": None,
            "model.norm.weight": None,
            "model.layers.9.mlp.up_proj.weight": torch.zeros(2),
            "model.layers.3.self_attn.k_proj.weight": torch.zeros(4, 36),
        },
    )
    for message in ranks.run(2, hf_jobs.load_only, PP2, model):
        assert_names(message, "UserError", f"{model}", "config.json", "LlamaForCausalLM")
        assert_names(message, "4")
        for line in (
            "missing: model.layers.0.mlp.up_proj.weight",
            "missing: model.norm.weight",
            "unexpected: model.layers.9.mlp.up_proj.weight",
        ):
            assert f"\n  {line}" in message
        assert_names(message, "model.layers.3.self_attn.k_proj.weight", "[12, 36]", "[4, 36]")


def test_extra_tensors_of_old_files_are_ignored(ranks: Any, model: Path) -> None:
    copy = weights(model)["model.embed_tokens.weight"].clone()
    rewrite(model, **{"lm_head.weight": copy, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)})
    assert ModelFiles(source=model).architecture.tied
    assert ranks.run(1, hf_jobs.load_only, Layout(), model) == [""]


def test_a_model_without_its_indexers_is_refused(tmp_path: Path) -> None:
    """transformers draws those of its export at random, which choose keys once sequences are longer than in training."""
    name = next(name for name, model in MODELS.items() if "index_topk" in model.fields)
    hf_models.write_model(name, tmp_path, max_shard_size="1GB")
    rewrite(tmp_path, **dict.fromkeys(name for name in weights(tmp_path) if ".indexer." in name))
    with raises(UserError, f"{tmp_path}", "1 differences", "missing: every weight of the indexers", "download"):
        check_weights(ModelFiles(source=tmp_path).architecture, tmp_path)


def test_layers_for_further_tokens_are_copied_and_others_refused(ranks: Any, tmp_path: Path) -> None:
    for name, layers in {name: model.mtp_layers for name, model in MODELS.items() if model.mtp_layers}.items():
        hf_models.write_model(name, folder := tmp_path / name, max_shard_size="1GB")
        extra = {layer: torch.randn(5, dtype=torch.float64) for layer in layers}
        rewrite(folder, **extra)
        architecture = ModelFiles(source=folder).architecture
        assert re.search(
            r" trained, \d+ copied \(2 MTP layers(, 10 indexers)?\)$", check_weights(architecture, folder).describe()
        )
        assert ranks.run(1, hf_jobs.export_only, Layout(), folder, tmp_path / f"{name}-out") == [""]
        found = weights(tmp_path / f"{name}-out")
        assert all(torch.equal(found[layer], values) for layer, values in extra.items())
        rewrite(folder, **{"model.layers.5.eh_proj.weight": torch.zeros(1)})
        with raises(UserError, str(folder), "1 differences", "unexpected: model.layers.5.eh_proj.weight"):
            check_weights(architecture, folder)


DTYPES = torch.bfloat16, torch.float32
CORRECTED = {name: model.correction_bias_in for name, model in MODELS.items() if model.correction_bias_in}


def test_a_correction_bias_is_exported_as_it_is_stored(ranks: Any, tmp_path: Path) -> None:
    """In the dtype of its file, whatever that of the model: by two ranks, and from a checkpoint."""
    expected, layout = {}, Layout(tensor=2, sequence_parallel=True, expert=2, expert_tensor=1)
    for name, block in CORRECTED.items():
        hf_models.write_model(name, folder := tmp_path / name, max_shard_size="1GB")
        known = {name.rpartition(".")[2]: name for name in weights(folder) if name.startswith(f"model.layers.1.{block}.")}
        (end,) = known.keys() & {"e_score_correction_bias", "expert_bias"}
        biases = [f"model.layers.{layer}.{block}.{end}" for layer in (1, 2)]
        stored = {bias: weights(folder)[bias].to(dtype) for bias, dtype in zip(biases, DTYPES, strict=True)}
        rewrite(folder, **stored)
        expected[name] = {bias: values.view(torch.uint8) for bias, values in stored.items()}
        ranks.run(2, hf_jobs.convert_type, layout, folder, tmp_path / f"{name}-out")
    one = next(iter(CORRECTED))
    ranks.run(1, lora_jobs.train_and_save, Layout(), tmp_path / one, None, tmp_path / "run", 1)
    (checkpoint,) = (tmp_path / "run").iterdir()
    ranks.run(1, export_checkpoint, checkpoint, tmp_path / "again")
    for name, out in [*((name, f"{name}-out") for name in CORRECTED), (one, "again")]:
        found = weights(tmp_path / out)
        for bias, dtype in zip(expected[name], DTYPES, strict=True):
            assert found[bias].dtype == dtype, f"{out} {bias}"
            assert torch.equal(found[bias].view(torch.uint8), expected[name][bias]), f"{out} {bias}"


def test_a_tied_model_does_not_ignore_an_output_weight_with_other_values(model: Path) -> None:
    rewrite(model, **{"lm_head.weight": torch.zeros(259, 36)})
    with raises(UserError, str(model), "1", "unexpected", "lm_head.weight"):
        check_weights(read_architecture(model, tensor_parallel=1), model)
    found = ModelFiles(source=model)
    assert found.architecture.untied
    assert found.output_line == {"output layer": Message("lm_head.weight", "not tied", "tie_word_embeddings=true")}


def test_an_untied_model_must_have_its_output_weight(ranks: Any, model: Path) -> None:
    hf_models.edit_config(model, tie_word_embeddings=False)
    (message,) = ranks.run(1, hf_jobs.load_only, Layout(), model)
    assert_names(message, "1", "differences", "missing", "lm_head.weight", "save_pretrained")


def test_a_rank_reads_only_its_slices_and_each_once(ranks: Any, sharded_model: Path) -> None:
    whole = sum(tensor.numel() * 4 for tensor in weights(sharded_model).values())
    results = ranks.run(2, hf_jobs.bytes_read, TP2, sharded_model)
    for read, most, own_bytes in results:
        assert read <= own_bytes
        assert most <= 130 * 36 * 4  # half of the embedding, the largest weight
    replicated = (4 * 2 + 1) * 36 * 4  # the norms, which both ranks hold
    assert sum(read for read, _, _ in results) == whole + replicated


def test_dtypes_are_converted_on_import_and_kept_on_export(ranks: Any, sharded_model: Path, tmp_path: Path) -> None:
    assert ranks.run(2, hf_jobs.convert_type, TP2, sharded_model, tmp_path / "out") == ["torch.bfloat16"] * 2
    before, after = weights(sharded_model), weights(tmp_path / "out")
    assert all(torch.equal(after[name], tensor.to(torch.bfloat16)) for name, tensor in before.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], "torch_dtype" in config) == ("bfloat16", False), "under the name that the source has"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_export_replaces_an_earlier_and_an_interrupted_export(ranks: Any, model: Path, tmp_path: Path) -> None:
    interrupted = tmp_path / f".out.export-{'0' * 32}"
    interrupted.mkdir()
    (interrupted / "part-0").write_text("half")
    assert ranks.run(1, hf_jobs.export_only, Layout(), model, tmp_path / "out") == [""]
    (tmp_path / "out" / "old").write_text("of the first export")
    rewrite(model, **{"model.norm.weight": torch.full((36,), 7.0)})
    assert ranks.run(2, hf_jobs.export_only, TP2, model, tmp_path / "out") == ["", ""]
    assert torch.equal(weights(tmp_path / "out")["model.norm.weight"], torch.full((36,), 7.0))
    assert not (tmp_path / "out" / "old").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


def test_source_of_an_export_must_be_a_model(ranks: Any, model: Path, tmp_path: Path) -> None:
    for message in ranks.run(2, hf_jobs.export_only, PP2, model, tmp_path / "out", tmp_path / "nothing"):
        assert f"but {tmp_path / 'nothing'} has no config.json" in message


@pytest.mark.parametrize(
    "layout", [TP2, *(pytest.param(layout, marks=pytest.mark.full) for layout in (PP2, Layout(tensor=2, pipeline=2)))]
)
def test_a_disk_error_is_raised_on_every_rank_and_leaves_no_folder(
    ranks: Any, sharded_model: Path, tmp_path: Path, layout: Layout
) -> None:
    job = hf_jobs.export_to_broken_disk
    for message in ranks.run(layout.model_ranks, job, layout, sharded_model, tmp_path / "out"):
        assert message == Message("RuntimeError", "failed", "OSError", "nothing", f"{tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


ODD, NORMS, SINKS = "llama-odd-heads", "olmo2-tied-odd-heads-bias", "gpt-oss-odd-heads-no-attention-bias"
TP2_SEQUENCE, EP2 = Layout(tensor=2, sequence_parallel=True), Layout(expert=2)
MOVES = [(ODD, TP2, Layout()), (NORMS, TP2, Layout()), (SINKS, TP2_SEQUENCE, EP2)]
OTHER_MOVES = [
    (ODD, Layout(), TP2),
    (ODD, TP2, Layout(tensor=4)),
    (ODD, Layout(tensor=2, pipeline=2), PP2),
    (NORMS, PP2, Layout(tensor=4)),
    (SINKS, EP2, Layout(tensor=4, sequence_parallel=True)),
]


@pytest.mark.parametrize(
    ("name", "saved", "loaded"), [*MOVES, *(pytest.param(*move, marks=pytest.mark.full) for move in OTHER_MOVES)]
)
def test_padded_layouts_in_a_distributed_checkpoint(
    ranks: Any, tmp_path: Path, name: str, saved: Layout, loaded: Layout
) -> None:
    """Heads, norms and sinks of all heads, and a vocabulary that layouts pad differently."""
    model, checkpoint = tmp_path / "model", tmp_path / "checkpoint"
    hf_models.write_model(name, model)
    checkpoint.mkdir()
    saving, loading = (max(layout.model_ranks, layout.expert) for layout in (saved, loaded))
    ranks.run(saving, hf_jobs.save_sharded, saved, model, checkpoint)
    assert set(ranks.run(loading, hf_jobs.load_sharded, loaded, model, checkpoint, tmp_path / "out")) == {0.0}
    before, after = weights(model), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_code_beside_a_model_is_not_used(ranks: Any, tmp_path: Path) -> None:
    """Kimi K2 is published as a model type with code of its own, and computes as DeepSeek V3, as which it is exported."""
    hf_models.write_model("deepseek-v3-dense", folder := tmp_path / "model")
    expected = hf_models.transformers_logits(folder)
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.Model"}
    hf_models.edit_config(folder, model_type="kimi_k2", auto_map=code)
    chat = ChatModel(label="kimi", folder=folder, dtype=torch.float32)
    assert torch.equal(chat._model(hf_models.tokens()).logits, expected)
    with raises(UserError, "a reward model", f"{folder}", "DeepseekV3ForCausalLM"):
        RewardModel(folder=folder)
    (result,) = ranks.run(1, hf_jobs.check_models, Layout(), {"kimi": folder}, tmp_path / "out")
    torch.testing.assert_close(torch.from_numpy(result["kimi"]), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    exported = json.loads((tmp_path / "out" / "kimi" / "config.json").read_text())
    assert (exported["model_type"], exported["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])
    assert "auto_map" not in exported
    assert torch.equal(hf_models.transformers_logits(tmp_path / "out" / "kimi"), expected)


def test_code_of_models_that_transformers_lacks_is_copied_and_not_used(ranks: Any, tmp_path: Path) -> None:
    """With the names of config.json, so that servers find the class; an import would leave a file."""
    names = [name for name, model in MODELS.items() if model.own_code is not None]
    for name in names:
        hf_models.write_model(name, folder := tmp_path / name)
        (folder / "modeling.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
        (folder / "outside.py").symlink_to(tmp_path / "elsewhere.py")
        code = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
        hf_models.edit_config(folder, auto_map=code, tokenizer_class=["Qwen2Tokenizer"])  # a list, as MiMo is published
        (tmp_path / "elsewhere.py").touch()
        out = tmp_path / f"{name}-out"
        assert ranks.run(1, hf_jobs.export_only, Layout(), folder, out) == [""]
        before, after = (json.loads((path / "config.json").read_text()) for path in (folder, out))
        assert {**before, "torch_dtype": "float32"} == {**after, "torch_dtype": "float32"}
        assert (out / "modeling.py").read_bytes() == (folder / "modeling.py").read_bytes()
        assert not (out / "outside.py").exists()
    (loadable,) = (name for name in names if MODELS[name].model_type in ALIASES)  # with the weights of another family
    expected = hf_models.transformers_logits(tmp_path / loadable)
    chat = ChatModel(label="out", folder=tmp_path / f"{loadable}-out", dtype=torch.float32)
    assert torch.equal(chat._model(hf_models.tokens()).logits, expected)
    assert not (tmp_path / "imported").exists()
