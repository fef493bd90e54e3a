"""The script of examples/rounds: killed in a phase and started again, it continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.commands import environment

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "rounds" / "run.py"
SAMPLE = "-n 4 --max-new-tokens 8 --temperature 1"
TRAINING = ["hardware=cpu", "trainer.kto.max_steps=2", "model.global_batch_size=8", "export.report=false"]


def rows(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_rounds_continue_where_they_were_killed(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("".join(f"question {number}\n" for number in range(6)))
    (tmp_path / "mine.py").write_text("def even(prompt, answer):\n    return len(answer) % 2 == 0\n")
    given = [str(tiny_llama), "prompts.txt", "--score", "mine.even", "--rounds", "2", "--reference", "first"]
    command = [sys.executable, str(SCRIPT), *given, "--sample", SAMPLE, *TRAINING]
    env = environment(tmp_path)
    folders = [tmp_path / "runs" / "rounds" / str(number) for number in (1, 2, 3)]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, start_new_session=True) as started:
        while not (folders[0] / "run" / "metrics.jsonl").is_file():
            assert started.poll() is None
            time.sleep(0.05)
        os.killpg(started.pid, signal.SIGKILL)
    labelled = (folders[0] / "thumbs.jsonl").read_bytes()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert (folders[0] / "thumbs.jsonl").read_bytes() == labelled
    for folder in folders:
        sampled, thumbs = rows(folder / "answers.jsonl"), rows(folder / "thumbs.jsonl")
        keys = {(row["line"], row["index"]) for row in sampled}
        assert len(sampled) == len(thumbs) == len(keys) == 24
        assert {row["label"] for row in thumbs} == {True, False}
    for folder in folders[:2]:
        assert len(rows(folder / "run" / "metrics.jsonl")) >= 2
        assert (folder / "run" / "hf" / "config.json").is_file()
        (comparison,) = rows(folder / "run" / "comparisons.jsonl")
        assert comparison["base"] == str(tiny_llama)
    assert {row["model"] for row in rows(folders[1] / "answers.jsonl")} == {"runs/rounds/1/run/hf"}
    shares = [sum(row["label"] is True for row in rows(folder / "thumbs.jsonl")) / 24 for folder in folders]
    for number, share in enumerate(shares):
        assert f"{number:11}  {share:.1%}" in done.stdout
    config = (folders[1] / "run" / "config.yaml").read_text(encoding="utf-8")
    assert f"restore_from_path: {tiny_llama}" in config, "the reference of the second round"
    again = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert "step 2/2  loss" not in again.stdout, "a finished round changes nothing"
