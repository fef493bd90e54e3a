"""Models named by their repository on the Hugging Face hub."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from nemo_kto.errors import UserError
from nemo_kto.model_files.hub import local_folder, pin
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
    ["hf:", "hf:model", "hf:a/b/c", "hf:a/b@", "hf:../b", "hf:a/..", "hf:a/b@../c", "hf:a b/c", "hf:-/b\n", "hf:/a/b"],
)
def test_a_name_of_another_form_is_refused(name: str, cache: Path) -> None:
    with raises(UserError, "hf:ORGANISATION/NAME"):
        pin(name)


def test_a_model_that_the_cache_lacks_offline(cache: Path) -> None:
    for name in ("hf:org/other", "hf:org/model@v9"):
        with raises(UserError, name, "HF_HUB_OFFLINE=1", f"HF_HUB_CACHE={cache}", "hf download org/"):
            pin(name)


def test_weights_are_downloaded_in_one_format_and_code_with_them(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports of models with code of their own contain it."""
    model = ["config.json", "model.safetensors", "modeling_mimo.py", "tokenizer.json", "README.md"]
    asked: list[list[str]] = []

    def snapshot(_: str, *, allow_patterns: list[str], ignore_patterns: list[str], **__: object) -> str:
        names = [*model, "model.gguf", "original/model.safetensors", "consolidated.safetensors"]
        asked.append([*filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)])
        return FIRST

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    pin("hf:org/with-code")
    assert asked == [model]


ANSWERS = {  # repository -> status and error code of the hub's answer
    "org/gated": (403, "GatedRepo"),
    "org/missing": (404, "RepoNotFound"),
    "org/token": (401, ""),
    "org/tagless": (404, "RevisionNotFound"),
    "org/down": (400, ""),
}


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, code = next(answer for name, answer in ANSWERS.items() if name in self.path)
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a hub on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("org/gated", ("gated", "https://huggingface.co/org/gated", "HF_TOKEN", "hf auth login")),
        ("org/missing", ("is private", "HF_TOKEN", "hf auth login")),
        ("org/token", ("token", "HF_TOKEN", "hf auth login")),
        ("org/tagless", ("branch, tag or commit", "org/tagless")),
        ("org/down", ("hf:org/down", "hf download org/down")),
        ("org/unreachable", ("Hugging Face hub", "hf download org/unreachable", "HF_HUB_CACHE")),
    ],
)
def test_a_model_that_cannot_be_downloaded(
    name: str, parts: tuple[str, ...], port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error is the one that huggingface_hub makes of an answer over HTTP, or of a refused connection."""
    changes = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": False}
    changes |= {"ENDPOINT": f"http://127.0.0.1:{port if name in ANSWERS else 9}"}
    for constant, value in changes.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{constant}", value)
    with raises(UserError, *parts):
        pin(f"hf:{name}")
