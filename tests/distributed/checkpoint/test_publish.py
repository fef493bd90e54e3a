"""A run's exports: their model cards, their upload to a hub, and chat with a run that has none yet."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from tests.helpers.commands import environment
from tests.helpers.hub_server import COMMIT, TOKEN, HubServer
from tests.helpers.messages import Message
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import make_checkpoint
from tests.helpers.training_jobs import train

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LICENSE = "Permission is granted."
BASE_CARD = "---\nlicense: other\nlicense_name: tiny\nlanguage: [en]\ndatasets: [a/b]\n---\n# The base model\n"
HASH = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(scope="module")
def run(ranks: RankPool, kto_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with adapters on a model of the hub's cache, with exports of model and adapters."""
    root = tmp_path_factory.mktemp("publish")
    base = root / "hub" / "models--org--tiny" / "snapshots" / HASH
    make_checkpoint(base, "llama", **SMALL)
    (base / "README.md").write_text(BASE_CARD)
    (base / "LICENSE.txt").write_text(LICENSE)
    overrides = ["model.peft.peft_scheme=lora", "trainer.kto.max_steps=2", "trainer.kto.val_check_interval=1"]
    overrides += ["trainer.kto.limit_val_batches=2"]  # 32 rows: of fewer than 20 no card reports a validation
    folders = [f"export.path={root / 'run' / 'hf'}", f"export.adapter_path={root / 'run' / 'adapter'}"]
    overrides += ["export.enabled=true", *folders]
    ranks.run(1, train, base, kto_rows, root / "run", 1, overrides)
    return root / "run"


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """Front matter and body of an export's card, as huggingface_hub reads them."""
    loaded = ModelCard.load(folder / "README.md")
    return loaded.data.to_dict(), loaded.text


def test_the_card_of_an_export(run: Path) -> None:
    front, body = card(run / "hf")
    assert front == {
        "license": "other",
        "license_name": "tiny",
        "language": ["en"],
        "base_model": "org/tiny",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["nemo-kto", "alignment", "kto", "lora"],
    }
    info = json.loads((run / "checkpoints" / "step_000002" / "trainer.json").read_text())
    facts = info["run"]
    for part in (
        HASH,
        "arxiv.org/abs/2402.01306",
        "desirable:    w_D (1 - sigmoid(beta (r - z0)))",
        f"| loss | {info['metrics']['val_loss']:.4f} |",
        "2 steps",
        f"| `model.kto.ref_policy_kl_penalty` | `{facts['model.kto.ref_policy_kl_penalty']}` |",
        "| `model.optim.lr` | `0.0005` |",
        f"`{facts['model.data.data_prefix']['sha256']}`",
        f"`{facts['validation rows']['sha256']}`",
        "96 rows",
        "apply_chat_template",
        "nemo-kto chat",
        f"torch {info['versions']['torch']}",
    ):
        assert part in body, part
    assert (run / "hf" / "LICENSE.txt").read_text() == LICENSE
    assert str(run.parent) not in (run / "hf" / "README.md").read_text()
    assert "The base model" not in body


def test_the_card_of_adapters(run: Path) -> None:
    front, body = card(run / "adapter")
    assert (front["library_name"], front["base_model_relation"]) == ("peft", "adapter")
    assert "AutoPeftModelForCausalLM" in body
    assert 'AutoTokenizer.from_pretrained("org/tiny")' in body
    assert str(run.parent) not in (run / "adapter" / "README.md").read_text()


def command(*words: object, **settings: str) -> subprocess.CompletedProcess[str]:
    """A finished nemo-kto with these words, in an environment with these settings."""
    env = {**environment(), "NEMO_KTO_FORCE_CPU": "1", "HF_HUB_DISABLE_XET": "1", **settings}
    words = (sys.executable, "-m", "nemo_kto.cli.main", *words)
    return subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def online(hub: HubServer, folder: Path, **settings: str) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "home"), **settings}


def test_push_uploads_the_export_of_the_run(run: Path, hub: HubServer, tmp_path: Path) -> None:
    done = command("export", run, "--push", "hf:me/aligned", "--private", **online(hub, tmp_path, HF_TOKEN=TOKEN))
    assert done.returncode == 0, done.stderr
    assert f"/me/aligned/commit/{COMMIT}" in done.stdout
    sent = hub.files("me/aligned")
    local = {file.name: file.read_bytes() for file in (run / "hf").iterdir()}
    text = sent.pop("README.md").decode()
    card_text = local.pop("README.md").decode().replace("nemo-kto chat path/to", "nemo-kto chat hf:path/to")
    assert card_text.replace("path/to/this/folder", "me/aligned") == text
    assert 'from_pretrained("me/aligned")' in text
    assert "nemo-kto chat hf:me/aligned\n" in text
    assert sent == local
    assert hub.repositories["me/aligned"]["private"]
    assert any("/storage/" in path for _, path in hub.requests)  # the weights, by their hash
    assert len(hub.commits) == 1


def test_push_of_adapters_to_a_branch(run: Path, hub: HubServer, tmp_path: Path) -> None:
    settings = online(hub, tmp_path, MY_TOKEN=TOKEN)
    words = ["export", run, "--adapter", "--push", "hf:me/adapters@trial", "--token", "MY_TOKEN"]
    done = command(*words, "--base-model", "org/renamed", **settings)
    assert done.returncode == 0, done.stderr
    assert hub.files("me/adapters") == {}
    sent = hub.files("me/adapters", "trial")
    config = json.loads(sent["adapter_config.json"])
    assert config["base_model_name_or_path"] == "org/renamed"
    front = yaml.safe_load(sent["README.md"].decode().split("---\n")[1])
    assert front["base_model"] == "org/renamed"
    assert sent["adapter_model.safetensors"] == (run / "adapter" / "adapter_model.safetensors").read_bytes()
    assert sent["tokenizer.json"] == (run / "hf" / "tokenizer.json").read_bytes()
    assert sent.keys() >= {"tokenizer_config.json", "chat_template.jinja"}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, ("--push", "token", "HF_TOKEN", "hf auth login")),
        pytest.param({"HF_TOKEN": "hf_other"}, ("hf:me/x", "401", "write access"), marks=pytest.mark.full),
        pytest.param(
            {"HF_TOKEN": TOKEN, "HF_ENDPOINT": "http://127.0.0.1:9"}, ("hf:me/x", "network"), marks=pytest.mark.full
        ),
    ],
)
def test_mistakes_of_push(
    settings: dict[str, str], parts: tuple[str, ...], run: Path, hub: HubServer, tmp_path: Path
) -> None:
    done = command("export", run, "--push", "hf:me/x", **online(hub, tmp_path) | settings)
    assert done.returncode == 2
    assert done.stderr == Message("nemo-kto", *parts)


@pytest.mark.slow
def test_chat_with_a_run_without_an_export_exports_it_first(run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "run"
    shutil.copytree(run, moved)
    shutil.rmtree(moved / "hf")
    config = (run / "config.yaml").read_text().replace(str(run), str(moved))
    (moved / "config.yaml").write_text(config.replace("report: false", "report: true"))
    base = run.parent / "hub" / "models--org--tiny" / "snapshots" / HASH
    words = ["chat", moved, "--against", "-p", "Hello", "--json", "--max-new-tokens", "5"]
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert "is exported" in done.stderr
    assert str(moved / "hf") in done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["model"] for line in lines] == [str(moved), str(base)]
    files = [next(folder.glob("*.safetensors")) for folder in (moved / "hf", run / "hf")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert (moved / "hf" / "card.png").read_bytes().startswith(b"\x89PNG")
    assert "](card.png)" in (moved / "hf" / "README.md").read_text()
