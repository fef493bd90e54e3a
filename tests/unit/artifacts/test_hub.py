"""Models named by their repository on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from nemo_kto.artifacts.hub import local_folder, pin
from nemo_kto.errors import UserError
from tests.helpers.hub_cache import add_model
from tests.helpers.messages import raises
from tests.helpers.tiny_models import write_stub_model

FIRST, SECOND = "1" * 40, "2" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two commits of org/model: tag v1 is the first, main the second."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = write_stub_model(tmp_path / "original")
    add_model(tmp_path / "hub", "org/model", model, commit=FIRST, revision="v1")
    add_model(tmp_path / "hub", "org/model", model, commit=SECOND)
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("name", "earlier", "commit"),
    [
        ("hf:org/model", None, SECOND),
        ("hf:org/model@main", None, SECOND),
        ("hf:org/model@v1", None, FIRST),
        (f"hf:org/model@{FIRST}", None, FIRST),
        ("hf:org/model", f"hf:org/model@{FIRST}", FIRST),  # a resumed run takes the commit of its first start
        ("hf:org/model@main", f"hf:org/model@{FIRST}", SECOND),
        ("hf:org/model", f"hf:org/model-2@{FIRST}", SECOND),  # the record is that of another model
        ("hf:org/model", "/a/folder", SECOND),
    ],
)
def test_a_name_is_pinned_to_a_commit(name: str, earlier: str | None, commit: str, cache: Path) -> None:
    for leads in (True, False):
        pinned = pin(name, earlier=earlier, leads=leads)
        assert pinned == f"hf:org/model@{commit}"
    folder = local_folder(pinned)
    assert folder == cache / "models--org--model" / "snapshots" / commit
    assert (folder / "config.json").is_file()


@pytest.mark.parametrize("name", ["model", "/a/model", "./hf:org/model", "hf:org/model", "hf:org/model@main", "hf:x"])
def test_other_names_are_folders(name: str) -> None:
    assert local_folder(name) == Path(name)


@pytest.mark.parametrize(
    "name",
    ["hf:", "hf:model", "hf:a/b/c", "hf:a/b@", "hf:../b", "hf:a/b@../c"],
)
def test_a_name_of_another_form_is_refused(name: str, cache: Path) -> None:
    with raises(UserError, "hf:ORGANISATION/NAME"):
        pin(name)


def test_a_model_that_the_cache_lacks_offline(cache: Path) -> None:
    for name in ("hf:org/other", "hf:org/model@v9"):
        with raises(UserError, name, "HF_HUB_OFFLINE=1", f"HF_HUB_CACHE={cache}", "hf download org/"):
            pin(name)


def response(status: int) -> Any:
    """An answer of the hub, as far as its errors use it."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (
            GatedRepoError("", response=response(403)),
            ("gated", "https://huggingface.co/org/model", "HF_TOKEN", "hf auth login"),
        ),
        (RepositoryNotFoundError("", response=response(404)), ("is private", "HF_TOKEN", "hf auth login")),
        (RevisionNotFoundError("", response=response(404)), ("branch, tag or commit", "org/model")),
        (HfHubHTTPError("", response=response(401)), ("token", "HF_TOKEN", "hf auth login")),
        (HfHubHTTPError("down", response=response(400)), ("hf:org/model", "down", "hf download org/model")),
        (ConnectionError("refused"), ("Hugging Face hub", "hf download org/model", "HF_HUB_CACHE")),
    ],
)
def test_a_model_that_cannot_be_downloaded(
    error: Exception, parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with raises(UserError, *parts):
        pin("hf:org/model")
