"""The report of a sweep: its jobs before the first one, their results after the last one, and keys that are not swept."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from nemo_kto.tools.report import report_command as report
from tests.helpers.commands import CLI, GOOD, TRAINING, environment, run, stub_training
from tests.helpers.messages import assert_names
from tests.helpers.tiny_models import make_rows, write_rows

# In the place of a training: a log with three validations, of which the first, before training, does not count.
LOGS = """
import json
folder = cfg.exp_manager.explicit_log_dir
os.makedirs(folder, exist_ok=True)
with open(f"{folder}/metrics.jsonl", "w") as log:
    for step, loss in ((0, 0.01), (1, cfg.model.seed / 16), (2, cfg.model.seed / 8)):
        print(json.dumps({"step": step, "val/loss": loss, "val/acc": 0.25, "val/sft_loss": 7.0}), file=log)
        print(json.dumps({"step": step, "train/loss": 9.0}), file=log)
print("trained", cfg.model.seed, cfg.model.optim.lr)
"""


def test_the_jobs_before_and_the_results_after(tmp_path: Path) -> None:
    swept = ["--multirun", "model.seed=3,1", "lr=1e-6,2e-5", "exp_manager.name=mine"]
    done = run([*CLI, "kto", *GOOD, *swept], cwd=tmp_path, env=stub_training(tmp_path, LOGS))
    assert (done.returncode, done.stderr) == (0, "")
    lines = [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines() if line]
    jobs = [["3", "1e-06"], ["3", "2e-05"], ["1", "1e-06"], ["1", "2e-05"]]
    before, after = lines[:6], lines[10:]
    assert before[0] == ["nemo-kto kto: a sweep of 4 jobs"]
    assert before[1] == ["job", "model.seed", "model.optim.lr"]
    assert before[2:] == [[str(number), *values] for number, values in enumerate(jobs)]
    assert [line[0].split() for line in lines[6:10]] == [["trained", *values] for values in jobs]
    header = [*before[1], "state", "val_loss", "best val_loss", "val_acc", "run folder"]
    assert after[:2] == [["nemo-kto kto: results of 4 jobs"], header]
    losses = {"1": ["0.1250", "0.0625"], "3": ["0.3750", "0.1875"]}
    assert after[2:6] == [
        [
            f"{number} *" if number == 2 else str(number),
            *values,
            "ended",
            *losses[values[0]],
            "0.2500",
            f"results/mine/{number}",
        ]
        for number, values in enumerate(jobs)
    ]
    folders = " ".join(f"results/mine/{number}" for number in range(4))
    assert after[6:] == [["* the best val_loss"], [f"compare them: nemo-kto report {folders}"]]


def test_a_failed_job_does_not_end_the_sweep(tmp_path: Path) -> None:
    body = "if cfg.model.seed == 1: raise RuntimeError('no luck')" + LOGS
    done = run([*CLI, "kto", *GOOD, "--multirun", "model.seed=1,3"], cwd=tmp_path, env=stub_training(tmp_path, body))
    assert done.returncode == 1
    assert_names(done.stderr, "RuntimeError: no luck", "job 0 of the sweep failed with status 1")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["trained", "3", "1e-06"] in lines
    assert ["0", "1", "failed", "-", "-", "-", "results/gpt_kto/0"] in lines
    assert ["1", "*", "3", "ended", "0.3750", "0.1875", "0.2500", "results/gpt_kto/1"] in lines


def test_two_real_jobs(tmp_path: Path, tiny_llama: Path) -> None:
    """The figures are those that the jobs logged, and the command that is shown compares them."""
    write_rows(tmp_path / "rows.jsonl", make_rows(24))
    given = [str(tiny_llama), "rows.jsonl", 'model.data.splits_string="80,20"', "model.data.seq_length=64", "recipe=auto"]
    given += ["batch=4", "steps=2", "beta=0.1,0.3", "lr=1e-3", "exp_manager.explicit_log_dir=runs", "export.report=false"]
    command = [*CLI, "kto", *given, "trainer.kto.val_check_interval=1", "--multirun"]
    done = run(command, cwd=tmp_path, env=environment(), preload=TRAINING, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nemo-kto: recipe=auto: hardware=cpu (no GPU)") == 2
    rows = [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines()]
    columns = next(row for row in rows if row[0] == "job" and "run folder" in row)
    best = {}
    for beta in ("0.1", "0.3"):
        shown = dict(zip(columns, next(row for row in rows if row[1:3] == [beta, "finished"]), strict=True))
        logged = [json.loads(line) for line in (tmp_path / shown["run folder"] / "metrics.jsonl").read_text().splitlines()]
        losses = [line["val/loss"] for line in logged if line["step"] and "val/loss" in line]
        assert (len(losses), shown["val_loss"], shown["best val_loss"]) == (2, f"{losses[-1]:.4f}", f"{min(losses):.4f}")
        best[shown["job"]] = min(losses)
    assert min(best, key=lambda job: best[job]).endswith(" *")
    program, command_name, *folders = shlex.split(rows[-1][0].removeprefix("compare them: "))
    assert (program, command_name, folders) == ("nemo-kto", "report", ["runs/0", "runs/1"])
    report.main([*(str(tmp_path / folder) for folder in folders), "--out", str(tmp_path / "both.html")])
    assert "<h1>Comparison of 2 runs</h1>" in (tmp_path / "both.html").read_text()


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
