"""The report of a sweep: its jobs before the first one, their results after the last one, and keys that are not swept."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.commands import CLI, GOOD, run, stub_training
from tests.helpers.messages import assert_names

# In the place of a training: a log with two validations.
LOGS = """
import json
folder = cfg.exp_manager.explicit_log_dir
os.makedirs(folder, exist_ok=True)
with open(f"{folder}/metrics.jsonl", "w") as log:
    for step, loss in ((1, 0.5), (2, cfg.model.seed / 8)):
        print(json.dumps({"step": step, "val/loss": loss, "val/acc": 0.25, "val/sft_loss": 7.0}), file=log)
        print(json.dumps({"step": step, "train/loss": 9.0}), file=log)
print("trained", cfg.model.seed, cfg.model.optim.lr)
"""


def test_the_jobs_before_and_the_results_after(tmp_path: Path) -> None:
    swept = ["--multirun", "model.seed=1,3", "model.optim.lr=1e-6,2e-5", "exp_manager.name=mine"]
    done = run([*CLI, "kto", *GOOD, *swept], cwd=tmp_path, env=stub_training(tmp_path, LOGS))
    assert (done.returncode, done.stderr) == (0, "")
    lines = [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines() if line]
    jobs = [["1", "1e-06"], ["1", "2e-05"], ["3", "1e-06"], ["3", "2e-05"]]
    before, after = lines[:6], lines[10:]
    assert before[0] == ["nemo-kto kto: a sweep of 4 jobs"]
    assert before[1] == ["job", "model.seed", "model.optim.lr"]
    assert before[2:] == [[str(number), *values] for number, values in enumerate(jobs)]
    assert [line[0].split() for line in lines[6:10]] == [["trained", *values] for values in jobs]
    assert after[:2] == [["nemo-kto kto: results of 4 jobs"], [*before[1], "val_loss", "val_acc", "run folder"]]
    losses = {"1": "0.1250", "3": "0.3750"}
    assert after[2:] == [
        [str(number), *values, losses[values[0]], "0.2500", f"results/mine/{number}"] for number, values in enumerate(jobs)
    ]


def test_shares_of_the_rows_are_not_swept(tmp_path: Path) -> None:
    """The shell removes the quotes of splits_string="90,10", so that Hydra would start a job for each share."""
    env = stub_training(tmp_path, "print('trained', cfg.model.seed, cfg.model.data.splits_string)")
    swept = ["--multirun", "model.seed=1,2"]
    done = run([*CLI, "kto", *GOOD, *swept, "model.data.splits_string=90,10"], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert_names(done.stderr, "model.data.splits_string", "90,10", "quotes", "'model.data.splits_string=\"90,10\"'")
    assert not (tmp_path / "results").exists()
    done = run([*CLI, "kto", *GOOD, *swept, 'model.data.splits_string="90,10"'], cwd=tmp_path, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if "trained" in line] == ["trained 1 90,10", "trained 2 90,10"]
