"""Contents of a model folder, their hashes, and the location of its base model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from nemo_kto.errors import UserError
from nemo_kto.model_files.model_folders import (
    ModelSource,
    content_hash,
    find_source,
    model_files,
    named_base,
    remedy_for_missing,
    tokenizer_files,
)
from nemo_kto.utils import hashes
from tests.helpers.messages import Message, raises


def folder(path: Path, **files: object) -> Path:
    """A folder with these JSON files, their names without suffix."""
    path.mkdir()
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def peft(path: Path, base: str | None) -> Path:
    return folder(path, adapter_config={"base_model_name_or_path": base})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return folder(tmp_path / "base", config={})


def test_complete_models(base: Path, tmp_path: Path) -> None:
    assert find_source(base) == ModelSource(base=base)
    checkpoint = folder(tmp_path / "step", trainer={"trainer": {}})
    assert find_source(checkpoint) == ModelSource(base=checkpoint)
    assert str(find_source(checkpoint)) == str(checkpoint)


def test_a_checkpoint_of_adapters_names_its_base_model(base: Path, tmp_path: Path) -> None:
    checkpoint = folder(tmp_path / "step", trainer={"adapters": {"base_model": str(base), "settings": {}}})
    assert find_source(checkpoint) == ModelSource(base=base, adapters=checkpoint)
    assert str(find_source(checkpoint)) == f"the adapters {checkpoint} on {base}"


@pytest.mark.parametrize("name", [None, "", "organisation/model"])
def test_adapters_whose_base_model_is_only_named(name: str | None, base: Path, tmp_path: Path) -> None:
    adapters = peft(tmp_path / "adapters", name)
    assert named_base(adapters) is None
    assert find_source(adapters, default_base=base) == ModelSource(base=base, adapters=adapters)
    with raises(UserError, "adapters"):
        find_source(adapters)


def test_adapters_of_another_base_model(base: Path, tmp_path: Path) -> None:
    other = folder(tmp_path / "other", config={})
    adapters = peft(tmp_path / "adapters", str(other))
    assert named_base(adapters) == other
    assert find_source(adapters, default_base=base) == ModelSource(base=other, adapters=adapters)


def test_a_path_without_a_model_is_refused(base: Path, tmp_path: Path) -> None:
    lost = folder(tmp_path / "adapters", trainer={"adapters": {"base_model": str(base), "settings": {}}})
    adapters = peft(tmp_path / "on_nothing", str(lost))
    with raises(UserError, "adapter_config.json", f"{adapters}", f"{lost}", "correct"):
        find_source(adapters, default_base=base)


def test_a_folder_with_two_models_is_refused(tmp_path: Path) -> None:
    both = folder(tmp_path / "both", config={}, adapter_config={})
    (both / "model.safetensors").touch()
    with raises(UserError, f"{both}", "adapter_config.json", "folder"):
        find_source(both, default_base=tmp_path)


def test_how_to_get_a_model_that_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert remedy_for_missing(Path("Qwen/Qwen3-0.6B"), "usual") == Message(
        "hf:Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B", "correct the path"
    )
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "iter_0000010" / ".metadata").touch()
    for name in ("model.nemo", "iter_0000010"):
        assert remedy_for_missing(Path(name), "usual") == Message(f"nemo-kto import {name} OUT")
    (tmp_path / "Qwen").mkdir()  # a mistyped folder
    for name in ("Qwen/Qwen3-0.6B", "model", "/a/b", "~/b", "../b", "a/b/c"):
        assert remedy_for_missing(Path(name), "usual") == "usual"


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        file = folder / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(
        tmp_path / "model",
        config_dot_json="{}",
        model_dot_safetensors="weights",
        tokenizer_dot_json="words",
        chat_template_dot_jinja="{{ }}",
        additional_chat_templates__tools_dot_jinja="{{ }}",
        README_dot_md="read me",
        optimizer_dot_bin="moments",
    )


def hashed(folder: Path) -> str:
    return content_hash(folder, model_files(folder), cache_dir=folder.parent / "cache")


def test_files_of_a_model(model: Path) -> None:
    assert [file.name for file in model_files(model)] == ["config.json", "model.safetensors"]
    names = [str(file.relative_to(model)) for file in tokenizer_files(model)]
    assert names == ["additional_chat_templates/tools.jinja", "chat_template.jinja", "tokenizer.json"]


def test_only_the_shards_of_the_index(model: Path) -> None:
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write(model, **{"model-1_dot_safetensors": "1", "model-2_dot_safetensors": "2", "consolidated_dot_safetensors": "all"})
    names = ["config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"]
    assert [file.name for file in model_files(model)] == names


def test_files_of_a_checkpoint_and_of_adapters(tmp_path: Path) -> None:
    files = ("trainer_dot_json", "state__common_dot_pt", "state__0_dot_distcp", "hf__config_dot_json", "rng__0_dot_pt")
    ours = write(tmp_path / "step_000002", **dict.fromkeys(files, "{}"))
    names = [str(file.relative_to(ours)) for file in model_files(ours)]
    assert names == ["hf/config.json", "state/0.distcp", "state/common.pt", "trainer.json"]
    adapters = write(tmp_path / "adapter", adapter_config_dot_json="{}", adapter_model_dot_safetensors="a", README_dot_md="")
    assert [file.name for file in model_files(adapters)] == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_hash_depends_on_values_and_names_but_not_on_the_path(model: Path) -> None:
    before = hashed(model)
    assert hashed(Path(shutil.copytree(model, model.parent / "moved"))) == before
    state = (model / "model.safetensors").stat()
    (model / "model.safetensors").write_text("weighty")
    os.utime(model / "model.safetensors", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (model / "model.safetensors").stat().st_size == state.st_size
    assert hashed(model) != before
    swapped = hashed(model)
    write(model, config_dot_json="weighty", model_dot_safetensors="{}")  # the same content under other names
    assert hashed(model) not in (before, swapped)


def test_a_large_file_is_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "MIN_KEPT_BYTES", 7)
    before, kept = hashed(model), list((model.parent / "cache" / "hashes").iterdir())
    assert len(kept) == 1, "config.json is small"
    kept[0].write_text("0" * 64)
    assert hashed(model) != before, "the cached hash is used"
    (model / "model.safetensors").write_text("weights")  # the same again, at another time
    assert hashed(model) == before
    assert len(list((model.parent / "cache" / "hashes").iterdir())) == 2


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o600), (True, 0o644)])
def test_cached_hashes_are_private_unless_shared(
    shared: bool, mode: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the user can read hashes in a private cache."""
    monkeypatch.setattr(hashes, "MIN_KEPT_BYTES", 0)
    before = os.umask(0o022)
    try:
        content_hash(model, model_files(model), cache_dir=tmp_path / "cache", shared=shared)
    finally:
        os.umask(before)
    assert [file.stat().st_mode & 0o777 for file in (tmp_path / "cache" / "hashes").iterdir()] == [mode, mode]


def test_a_replaced_file_of_equal_name_size_and_time_is_detected(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached hash is of the replaced file, and is not used."""
    monkeypatch.setattr(hashes, "MIN_KEPT_BYTES", 7)
    before, weights = hashed(model), model / "model.safetensors"
    state = weights.stat()
    other = write(model.parent / "elsewhere", model_dot_safetensors="weighty") / "model.safetensors"
    os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
    other.replace(weights)
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (state.st_size, state.st_mtime_ns)
    assert hashed(model) != before


@pytest.mark.parametrize("damage", [b"", b"\xff\0", b"0" * 63, b"[]"])
def test_a_damaged_cached_hash_is_recomputed(
    damage: bytes, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hashes, "MIN_KEPT_BYTES", 7)
    before = hashed(model)
    (kept,) = (model.parent / "cache" / "hashes").iterdir()
    text = kept.read_bytes()
    kept.write_bytes(damage)
    for warnings in ([Message(f"{kept}", "damaged")], []):
        caplog.clear()
        assert hashed(model) == before
        assert caplog.messages == warnings
    assert kept.read_bytes() == text
