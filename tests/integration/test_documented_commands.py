"""The commands of the documentation run, on a tiny model and under the names that the pages use."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import load_script
from tests.helpers.commands import environment
from tests.helpers.documented import REPOSITORY, commands, modules, runnable, transcript
from tests.helpers.tiny_models import make_pairs, make_rows, write_rows

pytestmark = pytest.mark.slow

# Models that the pages only plan for: nothing but their config.json is read.
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
CONFIGS = {
    "Llama-3.1-8B": (4096, 14336, 32, 32),
    "Llama-3.1-70B": (8192, 28672, 80, 64),
    "Llama-3.1-70B-Instruct": (8192, 28672, 80, 64),
}
TRL = """\
trl kto --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/kto-mix-14k --learning_rate 5e-7 \\
  --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --num_train_epochs 1 --output_dir aligned
"""
PAGES = [page for page in sorted((REPOSITORY / "docs").rglob("*.md")) if runnable(page)]
TRANSCRIPTS = [page for page in sorted((REPOSITORY / "docs").rglob("*.md")) if runnable(page, "console")]


def write_config(folder: Path, sizes: tuple[int, ...]) -> None:
    """Write the config.json of a Llama 3.1 model."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        **dict(zip(SIZES, sizes, strict=True)),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def name_of(page: Path) -> str:
    return page.relative_to(REPOSITORY / "docs").as_posix()


def run_shell(code: str, folder: Path, *, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Bash commands in a folder; with another home folder, nothing is taken from caches of this user."""
    env = environment() | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_OFFLINE": "1"}
    if home is not None:
        env = {name: value for name, value in env.items() if not name.startswith(("HF_", "XDG_"))} | {"HOME": str(home)}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env["PYTHONPATH"] = f"{folder}{os.pathsep}{env['PYTHONPATH']}"
    return subprocess.run(["bash", "-euo", "pipefail", "-c", code], cwd=folder, env=env, capture_output=True, text=True)


def shell(code: str, folder: Path, *, home: Path | None = None) -> str:
    """Output of bash commands in a folder; the test fails if one of them fails."""
    ended = run_shell(code, folder, home=home)
    assert ended.returncode == 0, f"{code}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return ended.stdout


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]) -> Path:
    """A folder with MODEL, OTHER, rows.jsonl, pairs.jsonl, and RUN and RUN2, folders of a run that trained adapters."""
    folder = tmp_path_factory.mktemp("files")
    shutil.copytree(tiny_checkpoint("llama"), folder / "MODEL")
    shutil.copytree(tiny_checkpoint("llama", seed=1), folder / "OTHER")
    write_rows(folder / "rows.jsonl", make_rows(300))
    (folder / "examples/quickstart").mkdir(parents=True)
    shutil.copy(REPOSITORY / "examples/quickstart/thumbs.csv", folder / "examples/quickstart")
    (folder / "trl.sh").write_text(TRL, encoding="utf-8")
    for name, sizes in CONFIGS.items():
        write_config(folder / name, sizes)
    pairs = make_pairs(300)
    write_rows(folder / "pairs.jsonl", [{"chosen_reward": 3.5, "rejected_reward": 1.0, **pair} for pair in pairs])
    shell("nemo-kto kto MODEL rows.jsonl model.peft.peft_scheme=lora exp_manager.explicit_log_dir=RUN", folder)
    shutil.copytree(folder / "RUN", folder / "RUN2")
    return folder


def begin(files: Path, page: Path, folder: Path) -> Path:
    """A new folder with the files, and with the modules that the page shows."""
    shutil.copytree(files, folder)
    for name, code in modules(page).items():
        (folder / name).write_text(code, encoding="utf-8")
    return folder


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_a_page(page: Path, files: Path, tmp_path: Path) -> None:
    for number, block in enumerate(runnable(page)):
        if "continue" not in block.marks or number == 0:
            folder = begin(files, page, tmp_path / str(number))
        shell(block.code, folder)


def absent(shown: str, printed: str) -> list[str]:
    """The parts of an output shown on a page, between "...", that are not in the printed one; any spaces are equal."""
    printed = " ".join(printed.split())
    return [part for part in map(str.strip, " ".join(shown.split()).split("...")) if part not in printed]


@pytest.mark.parametrize("page", TRANSCRIPTS, ids=name_of)
def test_outputs_of_a_page(page: Path, files: Path, tmp_path: Path) -> None:
    for number, block in enumerate(runnable(page, "console")):
        folder = begin(files, page, tmp_path / str(number))
        for command, shown in transcript(block):
            ended = run_shell(command, folder)
            assert shown.strip() or ended.returncode == 0, f"{command}\n{ended.stderr[-3000:]}"
            assert not absent(shown, ended.stdout + ended.stderr), ended.stdout[-3000:] + ended.stderr[-3000:]


def test_another_output_is_noticed() -> None:
    shown = "GB are 10^9 bytes\n  total   59.1 GB\n...\n  verdict  fits\n"
    assert absent(shown, "GB are 10^9 bytes\n  total  59.1 GB\n  expected 7.1 s\n  verdict   fits") == []
    assert absent(shown, "GB are 10^9 bytes\n  total  59.2 GB\n  verdict   fits") == ["GB are 10^9 bytes total 59.1 GB"]


def test_commands_of_the_readme(files: Path, tmp_path: Path) -> None:
    """Those of nemo-kto without placeholders, each block in a folder of its own; `make` is run by .ci/newcomer."""
    count = 0
    for number, block in enumerate(runnable(REPOSITORY / "README.md")):
        folder = shutil.copytree(files, tmp_path / str(number))
        code = re.sub(r"^MODEL=.*", "MODEL=MODEL", block.code.replace("\\\n", " "), flags=re.MULTILINE)
        complete = [line for line in code.splitlines() if not re.search(r"\bFILE\b", line)]
        shell("\n".join(complete), folder)
        count += len(complete)
    assert count == 11


def test_the_journey_from_a_csv_file(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's example, a report and an export, in an empty home folder; transformers finds the rewards of the run."""
    readme, home, folder = REPOSITORY / "README.md", tmp_path / "home", tmp_path / "work"
    rows = folder / "examples/quickstart/thumbs.csv"
    home.mkdir()
    rows.parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / "examples/quickstart/thumbs.csv", rows)
    shutil.copytree(tiny_llama, folder / "MODEL")
    (folder / "MODEL/generation_config.json").write_text('{"max_new_tokens": 8}')
    _, check, train, chat = runnable(readme)[0].code.replace("\\\n", "").splitlines()
    report, export = "nemo-kto report RUN", "nemo-kto export RUN OUT"
    assert report in commands(REPOSITORY / "docs/results/output.md")
    assert export in commands(readme)

    def run(command: str) -> str:
        return shell(f"MODEL=MODEL; {command.replace('RUN', 'results/gpt_kto')}", folder, home=home)

    assert "200: 100 desirable, 100 undesirable" in run(check)
    ends = dict(re.findall(r"^  (\w+ \w+) +(\S.*)$", run(train), re.MULTILINE))
    assert ends["train loss"].startswith("0.5000 -> ")
    assert ends["exported model"].startswith("results/gpt_kto/hf ")
    answers = run(chat).splitlines()
    assert answers[0] == "results/gpt_kto:"
    assert "MODEL:" in answers[2:]
    assert run(report).strip() == str(folder / "results/gpt_kto/report.html")
    run(export)
    exported = [
        {file.name: file.read_bytes() for file in (folder / name).iterdir()} for name in ("OUT", "results/gpt_kto/hf")
    ]
    assert exported[0] == exported[1]
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples/quickstart"))
    score = load_script("examples/quickstart/score.py")
    with rows.open(encoding="utf-8") as opened:
        held_out = [*csv.DictReader(opened)][-20:]
    turns = [[("user", row["question"]), ("assistant", row["answer"])] for row in held_out]
    conversations = [[{"role": role, "content": text} for role, text in turn] for turn in turns]
    models = [score.load(folder / name, dtype=torch.float32) for name in ("MODEL", "OUT")]
    logps = [score.answer_logps(model, conversations) for model in models]
    figures = score.measure(logps, [row["thumb"] == "up" for row in held_out], pairs=False)
    margin = float(ends["validation margin"].split()[2])
    assert figures["margin_after"] / score.BETA * 0.2 == pytest.approx(margin, abs=1e-3)  # the default beta
    assert margin > 1


def test_logged_metrics_are_documented(files: Path) -> None:
    page = (REPOSITORY / "docs/reference/metrics.md").read_text(encoding="utf-8")
    logged = {name for line in (files / "RUN/metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    names = {re.sub(r"_max(_rank)?$", "", name.partition("/")[2]) for name in logged - {"step", "time"}}
    assert len(names) > 20
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_a_command_that_fails_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="restore_from_path"):
        shell("nemo-kto kto nowhere rows.jsonl", tmp_path)
