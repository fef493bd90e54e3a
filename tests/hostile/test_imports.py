"""Archives and checkpoints that are unsafe, damaged or of other formats: one clear error, and nothing is written or run."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_kto.errors import UserError
from nemo_kto.tools.convert.import_command import main
from tests.helpers import hf_models
from tests.helpers import megatron_checkpoints as megatron
from tests.helpers.messages import Message, assert_names


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of a .nemo archive with its weights in one file, and a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("good")
    hf_models.write_model("mistral", folder / "model")
    torch.save(megatron.state_dict(folder / "model"), folder / "model_weights.ckpt")
    megatron.write_nemo(folder / "model", folder / "model_weights.ckpt", folder / "good.nemo")
    return folder


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def refused(file: Path, out: Path, *options: str) -> str:
    """The error of an import, which must leave nothing behind."""
    before = sorted(path.name for path in out.parent.iterdir())
    with pytest.raises(UserError) as caught:
        main([f"{file}", f"{out}", *options])
    assert sorted(path.name for path in out.parent.iterdir()) == before
    return str(caught.value)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    "unsafe",
    [
        member("./a/../../outside"),
        member("/tmp/outside"),
        member("link", tarfile.SYMTYPE, "/etc/passwd"),
        member("pipe", tarfile.FIFOTYPE),
        member("d/" * 1000 + "file"),
        member("d/" * 1000, tarfile.DIRTYPE),
    ],
    ids=lambda info: f"{info.name[:20]}-{info.type!r}",
)
def test_unsafe_members_of_an_archive(unsafe: tarfile.TarInfo, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.nemo", "w") as tar:
        tar.addfile(unsafe, io.BytesIO())
    message = refused(tmp_path / "bad.nemo", tmp_path / "out")
    assert message == Message("FILE", f"{tmp_path}/bad.nemo", unsafe.name[:20], "trust")


@pytest.mark.parametrize(
    "settings", ["a: 1\n" * 800_000, "a: &a [*a]\n", "a: &a {k: 1}\n" + "b: &a {<<: [*a, *a, *a, *a]}\n" * 20]
)
def test_settings_that_are_too_large(settings: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_config.yaml").write_text(settings)
    assert_names(refused(tmp_path / "model", tmp_path / "out"), "model_config.yaml", "settings of the model")


def test_damaged_archives(unpacked: Path, tmp_path: Path) -> None:
    """A text, half an archive and one with a member twice are refused."""
    (tmp_path / "text.nemo").write_text("no archive")
    content = (unpacked / "good.nemo").read_bytes()
    (tmp_path / "cut.nemo").write_bytes(content[: len(content) // 2])
    (tmp_path / "twice.nemo").touch()
    with tarfile.open(tmp_path / "twice.nemo", "w") as tar:
        for _ in range(2):
            tar.addfile(member("model_config.yaml"), io.BytesIO())
    for name in ("text", "cut", "twice"):
        assert refused(tmp_path / f"{name}.nemo", tmp_path / "out") == Message(
            "FILE", f"{tmp_path}/{name}.nemo", "copy it again"
        )


def test_pickles_are_not_run(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    tokenizer = f"--tokenizer={unpacked}/model"
    torch.save({"state_dict": Attack(tmp_path / "ran")}, tmp_path / "model_weights.ckpt")
    megatron.write_nemo(unpacked / "model", tmp_path / "model_weights.ckpt", tmp_path / "bad.nemo")
    assert_names(refused(tmp_path / "bad.nemo", tmp_path / "out", tokenizer), "model_weights.ckpt", "only tensors")
    (tmp_path / "weights" / ".metadata").write_bytes(pickle.dumps(Attack(tmp_path / "ran")))
    assert_names(refused(tmp_path / "weights", tmp_path / "out", tokenizer), ".metadata", "only checkpoint metadata")
    # objects of unknown classes among Megatron-LM's arguments are left out
    arguments = megatron.megatron_lm_arguments(unpacked / "model", hook=Attack(tmp_path / "ran"))
    torch.save({"args": arguments, "tensor": torch.zeros(3)}, tmp_path / "weights" / "common.pt")
    assert_names(refused(tmp_path / "weights", tmp_path / "out", tokenizer), ".metadata", "only checkpoint metadata")
    from nemo_kto.checkpoint.safe_loading import read_arguments

    found = read_arguments(tmp_path / "weights" / "common.pt")
    assert {name: found[name] for name in ("num_layers", "swiglu", "tokenizer_model")} == {
        "num_layers": 4, "swiglu": True, "tokenizer_model": "org/model"
    }  # fmt: skip
    assert not (tmp_path / "ran").exists()


def zarr_of_nemo(folder: Path) -> None:
    (folder / "model_weights" / "model.embedding").mkdir(parents=True)
    (folder / "model_weights" / "model.embedding" / ".zarray").touch()
    (folder / "model_config.yaml").write_text("num_layers: 1\n")


def ranks_of_megatron_lm(folder: Path) -> None:
    (folder / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (folder / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt").touch()
    (folder / "latest_checkpointed_iteration.txt").write_text("10\n")


def layers_of_old_nemo(folder: Path) -> None:
    torch.save({"model.language_model.encoder.final_layernorm.weight": torch.zeros(1)}, folder / "model_weights.ckpt")


def code_in_yaml(folder: Path) -> None:
    (folder / "model_config.yaml").write_text("a: !!python/object/apply:os.mkdir [ran]\n")


@pytest.mark.parametrize(
    ("write", "parts"),
    [
        (zarr_of_nemo, ("zarr", "--ckpt-convert-format torch_dist")),
        (ranks_of_megatron_lm, ("model-parallel rank", "--ckpt-convert-format torch_dist")),
        (layers_of_old_nemo, ("megatron-core", "convert_gpt_nemo_to_mcore.py")),
        (code_in_yaml, ("model_config.yaml", "YAML")),
        (lambda folder: None, ("torch_dist", "correct the path")),
    ],
)
def test_formats_that_must_be_converted_first(
    write: Callable[[Path], None], parts: tuple[str, ...], unpacked: Path, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    write(tmp_path / "source")
    message = refused(tmp_path / "source", tmp_path / "out", f"--tokenizer={unpacked}/model")
    assert message == Message(*parts)


def rewritten(unpacked: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object], **settings: Any) -> Path:
    """An archive with changed weights and settings."""
    tensors = megatron.state_dict(unpacked / "model")
    change(tensors)
    (folder / "parts").mkdir()
    torch.save(tensors, folder / "parts" / "model_weights.ckpt")
    megatron.write_nemo(unpacked / "model", folder / "parts" / "model_weights.ckpt", folder / "bad.nemo", **settings)
    return folder / "bad.nemo"


NORM, FC2 = "model.decoder.final_layernorm.weight", "model.decoder.layers.3.mlp.linear_fc2.weight"


@pytest.mark.parametrize(
    ("change", "settings", "parts"),
    [
        (lambda of: of.pop(FC2), {}, ("missing", "decoder.layers.3.mlp.linear_fc2.weight", "1 differences")),
        (lambda of: of.update({FC2: of[FC2][:-1]}), {}, ("[32, 48]", "[31, 48]")),
        (lambda of: of.update({"model.rm_head.weight": of[NORM]}), {}, ("unexpected", "rm_head.weight", "1 differences")),
        (lambda of: of.update({NORM: of[NORM] * float("nan")}), {}, ("finite", "decoder.final_layernorm.weight")),
        (lambda of: None, {"num_layers": "${oc.env:HOME}"}, ("num_layers", "${oc.env:HOME}")),
        (lambda of: None, {"activation": "gelu"}, ("activation", "gelu", "fast-swiglu")),
        (lambda of: None, {"rotary_percentage": 0.5}, ("rotary_percentage", "0.5")),
    ],
    ids=range(7),
)
def test_weights_and_settings_that_do_not_fit(
    change: Any, settings: dict[str, Any], parts: tuple[str, ...], unpacked: Path, tmp_path: Path
) -> None:
    shutil.copytree(
        unpacked / "model", tmp_path / "tokenizer", ignore=shutil.ignore_patterns("config.json", "*.safetensors*")
    )
    file = rewritten(unpacked, tmp_path, change, **settings)
    message = refused(file, tmp_path / "out", f"--tokenizer={tmp_path}/tokenizer")
    assert message == Message("FILE", f"{file}", *parts)


def test_tokenizers_that_do_not_fit(unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good, out = unpacked / "good.nemo", tmp_path / "out"
    assert refused(good, out) == Message("--tokenizer", "none", "org/model", "--tokenizer hf:org/model")
    assert refused(good, out, "--tokenizer=org/none") == Message("--tokenizer", "org/none", "hf:org/none")
    assert refused(good, out, "--tokenizer=hf:org/none") == Message("--tokenizer", "hf:org/none")
    (tmp_path / "empty").mkdir()
    assert_names(refused(good, out, "--tokenizer=empty"), "tokenizer.json", "empty")
    shutil.copytree(unpacked / "model", tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["rope_parameters"]["rope_theta"], config["rms_norm_eps"] = 1e6, 1e-5
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    assert refused(good, out, "--tokenizer=other") == Message(
        "other/config.json", "rope_theta", "rms_norm_eps", "1e+06", "100000", "1e-05", "1e-06"
    )


def test_an_existing_folder_is_kept(unpacked: Path, tmp_path: Path) -> None:
    """An import replaces a folder that an import wrote, and no other."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert_names(refused(unpacked / "good.nemo", tmp_path / "out", f"--tokenizer={unpacked}/model"), f"{tmp_path}/out")
    assert (tmp_path / "out" / "mine").exists()
    for number in range(2):  # an earlier import is replaced
        main([f"{unpacked}/good.nemo", f"{tmp_path}/new", f"--tokenizer={unpacked}/model"])
        assert (tmp_path / "new" / "config.json").is_file(), number
