"""The commands of the documentation run, on a tiny model and under the names that the pages use."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.commands import environment
from tests.helpers.documented import REPOSITORY, modules, runnable
from tests.helpers.tiny_models import make_pairs, make_rows, write_rows

pytestmark = pytest.mark.slow

# Models that the pages only plan for: nothing but their config.json is read.
CONFIGS = {
    "Llama-3.1-8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Llama-3.1-70B-Instruct": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
PAGES = [page for page in sorted((REPOSITORY / "docs").rglob("*.md")) if runnable(page)]


def write_config(folder: Path, **sizes: int) -> None:
    """Write the config.json of a Llama 3.1 model."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        **sizes,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def shell(code: str, folder: Path) -> str:
    """Output of bash commands in a folder; the test fails if one of them fails."""
    env = environment() | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_OFFLINE": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env["PYTHONPATH"] = f"{folder}{os.pathsep}{env['PYTHONPATH']}"
    ended = subprocess.run(["bash", "-euo", "pipefail", "-c", code], cwd=folder, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, f"{code}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return ended.stdout


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]) -> Path:
    """A folder with MODEL, OTHER, rows.jsonl, pairs.jsonl, and RUN and RUN2, folders of a run that trained adapters."""
    folder = tmp_path_factory.mktemp("files")
    shutil.copytree(tiny_checkpoint("llama"), folder / "MODEL")
    shutil.copytree(tiny_checkpoint("llama", seed=1), folder / "OTHER")
    write_rows(folder / "rows.jsonl", make_rows(300))
    shutil.copyfile(REPOSITORY / "examples/quickstart/thumbs.csv", folder / "thumbs.csv")
    for name, sizes in CONFIGS.items():
        write_config(folder / name, **sizes)
    pairs = make_pairs(300)
    write_rows(folder / "pairs.jsonl", [{"chosen_reward": 3.5, "rejected_reward": 1.0, **pair} for pair in pairs])
    shell("nemo-kto kto MODEL rows.jsonl model.peft.peft_scheme=lora exp_manager.explicit_log_dir=RUN", folder)
    shutil.copytree(folder / "RUN", folder / "RUN2")
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY / "docs").as_posix())
def test_commands_of_a_page(page: Path, files: Path, tmp_path: Path) -> None:
    def begin(number: int) -> Path:
        folder = shutil.copytree(files, tmp_path / str(number))
        for name, code in modules(page).items():
            (folder / name).write_text(code, encoding="utf-8")
        return folder

    folder = begin(0)
    for number, block in enumerate(runnable(page), start=1):
        if "continue" not in block.marks and number > 1:
            folder = begin(number)
        shell(block.code, folder)


def test_commands_of_the_readme(files: Path, tmp_path: Path) -> None:
    """Those of nemo-kto without placeholders, each block in a folder of its own; `make` is run by .ci/newcomer."""
    count = 0
    for number, block in enumerate(runnable(REPOSITORY / "README.md")):
        folder = shutil.copytree(files, tmp_path / str(number))
        header, *rows = (folder / "thumbs.csv").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "thumbs.csv").write_text("".join([header, *rows * 3]), encoding="utf-8")  # enough for a batch
        complete = [line for line in block.code.replace("\\\n", " ").splitlines() if not re.search(r"\bFILE\b", line)]
        shell("\n".join(complete), folder)
        count += len(complete)
    assert count == 9


def test_logged_metrics_are_documented(files: Path) -> None:
    page = (REPOSITORY / "docs/reference/metrics.md").read_text(encoding="utf-8")
    logged = {name for line in (files / "RUN/metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    names = {re.sub(r"_max(_rank)?$", "", name.partition("/")[2]) for name in logged - {"step", "time"}}
    assert len(names) > 20
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_a_command_that_fails_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="restore_from_path"):
        shell("nemo-kto kto nowhere rows.jsonl", tmp_path)
