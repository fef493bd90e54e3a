"""A run folder as it is read, also of a run that is in progress, was killed, or is none at all; curves of its log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from nemo_kto.errors import UserError
from nemo_kto.records.curves import Curve, read_curves
from nemo_kto.records.run_record import (
    FAILED,
    FINISHED,
    KILLED,
    RUNNING,
    begin_run,
    end_run,
    first_date,
    read_run,
    record_failure,
)
from nemo_kto.tools.report.facts import headline, state_text
from nemo_kto.utils.locks import this_process
from nemo_kto.utils.text import MINUS, number_text
from tests.helpers.messages import assert_names
from tests.helpers.run_folders import healthy, write_extras, write_run


def test_the_facts_of_a_run(tmp_path: Path) -> None:
    run = read_run(write_extras(write_run(tmp_path / "run", healthy(), model__optim__lr=1e-5)))
    assert (run.name, run.algorithm, run.loss, run.beta, run.step, run.total_steps) == ("run", "kto", "kto", 0.2, 200, 100)
    assert run.settings["model.optim.lr"] == 1e-5
    assert run.config["model.optim.sched.min_lr"] == 1e-6
    assert run.validations == {"validation": "val/"}
    assert run.classes == ("desirable", "undesirable")
    assert run.seconds == 200
    assert len(run.samples) == 8
    assert [*run.rewards[""]] == [0, 200]


def test_tokens_per_second_are_all_tokens_divided_by_their_time(tmp_path: Path) -> None:
    lines = [{"step": 5, "timing/step_time": 3.0, "perf/tokens_per_sec": 100.0}]
    lines.append({"step": 10, "timing/step_time": 1.0, "perf/tokens_per_sec": 900.0})
    run = read_run(write_run(tmp_path, lines))
    assert run.tokens_per_second == (5 * 3 * 100 + 5 * 1 * 900) / 20
    assert "300 tokens/s" in [figure.detail for figure in headline(run)]
    for line in lines:
        del line["timing/step_time"]
    assert read_run(write_run(tmp_path, lines)).tokens_per_second is None


def test_named_validation_sets(tmp_path: Path) -> None:
    line = {
        "step": 1,
        "val/a_loss": 0.5,
        "val/a_rows": 4,
        "val/b_c_loss": 0.4,
        "val/b_c_rows": 4,
        "val/b_c_preference_loss": 1,
    }
    assert read_run(write_run(tmp_path, [line])).validations == {"validation a": "val/a_", "validation b_c": "val/b_c_"}


@pytest.mark.parametrize("present", ["nothing", "a file", "another folder"])
def test_a_folder_that_is_no_run(present: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    if present == "a file":
        folder.touch()
    elif present == "another folder":
        write_run(folder / "inner", [])
    with pytest.raises(UserError) as raised:
        read_run(folder)
    named = [str(folder), *(["metrics.jsonl", "run.json", "config.yaml", "inner"] if present == "another folder" else [])]
    assert [word for word in named if word not in str(raised.value)] == []


def test_the_state_of_a_run(tmp_path: Path) -> None:
    settings = {
        "pretrained_checkpoint.restore_from_path": "models/a b",
        "model.data.data_prefix": ["x.jsonl", "y.jsonl"],
        "model.optim.lr": 1e-6,
    }
    recorded = {"state": "running", "total_steps": 20, "algorithm": "kto", "settings": settings}
    folder = write_run(tmp_path, healthy(10), run=recorded)
    owner, this = folder / ".lock.owner", vars(this_process())

    def state_with(**changes: object) -> tuple[str, str]:
        owner.write_text(json.dumps(this | changes))
        found = read_run(folder)
        return found.state.word, state_text(found)

    word, text = state_with()
    assert (word, "after step 10 of 20" in text) == (RUNNING, True)
    lock = "import fcntl, sys; f = open('.lock', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", lock], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    assert state_with(pid=1)[0] == RUNNING, "the number of the process may be that of another container"
    holder.communicate()
    word, text = state_with(pid=holder.pid)
    assert word == KILLED
    command = "nemo-kto kto 'models/a b' '[x.jsonl,y.jsonl]' model.optim.lr=1e-06"
    assert_names(text, f"process {holder.pid} on {this['host']}", "was killed", f"{command} resumes it")
    assert state_with(machine="another", pid=1)[0] == RUNNING, "it had a heartbeat"
    os.utime(owner, (time.time() - 100, time.time() - 100))
    assert read_run(folder).state.word == KILLED
    end_run(folder, FINISHED)
    assert state_text(read_run(folder)) == ""


def test_a_resumed_run_has_the_date_of_its_first_start(tmp_path: Path) -> None:
    assert first_date(tmp_path).date() == datetime.now().date()
    begin_run(tmp_path, run={"date": "2026-03-09"}, data={})
    end_run(tmp_path, FAILED)
    assert first_date(tmp_path) == datetime(2026, 3, 9)


def test_the_error_of_the_rank_that_failed_first_is_recorded(tmp_path: Path) -> None:
    write_run(tmp_path, healthy(10))
    (tmp_path / "run.json").unlink()
    began = time.time()
    record_failure(tmp_path, "nothing began", since=began)
    assert not (tmp_path / "run.json").exists()
    begin_run(tmp_path, run={"total_steps": 20}, data={"unit": "rows"})
    end_run(tmp_path, FAILED, "RuntimeError: connection closed by peer")
    record_failure(tmp_path, "rank 1 of 2 failed: out of memory", since=began)
    run = read_run(tmp_path)
    assert (run.state.word, run.state.text) == (FAILED, "rank 1 of 2 failed: out of memory")
    assert json.loads((tmp_path / "data.json").read_text()) == {"unit": "rows"}
    record_failure(tmp_path, "of a later start, which never began", since=time.time() + 1)
    end_run(tmp_path, FINISHED)
    record_failure(tmp_path, "after its end", since=began)
    assert read_run(tmp_path).state.word == FINISHED


def curve(values: list[float] | np.ndarray) -> Curve:
    return Curve(steps=np.arange(1, len(values) + 1), values=np.asarray(values, dtype=np.float64))


def test_curves_of_a_log() -> None:
    lines: list[dict[str, float | None]] = [
        {"step": 1, "train/loss": 0.5},
        {"step": 1, "val/loss": 0.6},
        {"step": 2, "train/loss": None},
        {"step": 3, "train/loss": 0.4},
        {"step": 2, "train/loss": 0.45},  # repeated by a resumed run
        {"step": 3, "train/loss": 0.3},
    ]
    curves = read_curves(lines)
    assert set(curves) == {"train/loss", "val/loss"}
    assert curves["train/loss"].steps.tolist() == [1, 2, 3]
    assert curves["train/loss"].values.tolist() == [0.5, 0.45, 0.3]
    assert curves["val/loss"].last == 0.6


def test_smoothing_is_the_mean_of_a_centred_window() -> None:
    values = np.random.default_rng(0).normal(size=200)
    smooth = curve(values)
    assert smooth.window == 11
    expected = [values[max(0, place - 5) : place + 6] for place in range(200)]
    assert smooth.smoothed.values == pytest.approx([window.mean() for window in expected])
    assert smooth.spread == pytest.approx([window.std() for window in expected])


@pytest.mark.parametrize("place", [0, 99_999])
def test_peaks_survive_downsampling(place: int) -> None:
    values = np.random.default_rng(place).normal(size=100_000)
    values[place] = 50.0
    values[(place + 500) % 100_000] = -60.0
    drawn = curve(values).peaks(250)
    assert len(drawn) <= 500
    assert drawn.values.max() == 50.0
    assert drawn.values.min() == -60.0
    assert drawn.steps[drawn.values.argmax()] == place + 1
    assert (np.diff(drawn.steps) > 0).all()


def test_numbers_as_text() -> None:
    values = (-0.0, 0.25, 0.001, 0.00025, -1e-6, 1.05e-10, 1899.3, 9999.6, -12_345, 2.5e6)
    texts = ["0", "0.25", "0.001", "2.5e-4", f"{MINUS}1e-6", "1.05e-10", "1899", "10000", f"{MINUS}12.35k", "2.5M"]
    assert [number_text(value) for value in values] == texts
    assert [number_text(value, digits=3) for value in (1899.3, 12_345, 0.000123456)] == ["1899", "12.3k", "1.23e-4"]
