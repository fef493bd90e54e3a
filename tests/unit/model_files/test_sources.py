"""Contents of a model folder, and the location of its base model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_kto.errors import UserError
from nemo_kto.model_files.model_folders import ModelSource, find_source, named_base, remedy_for_missing
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
