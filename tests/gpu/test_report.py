"""`make gpu` on emulated devices, with tiny models, killed between and within measurements."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_lines import END, HEADER
from tests.conftest import REPOSITORY
from tests.gpu.jobs import IS_EMULATED

STEPS = ("machine", "llama-1b", "tests")
KILLS = (2, 6, 9)  # numbers of lines after which the run is killed


@pytest.mark.full
@pytest.mark.skipif(not IS_EMULATED, reason="needs emulated devices: make test-emulated")
def test_a_killed_run_continues_where_it_was(tmp_path: Path) -> None:
    """Each measurement is made once, except the one in which the run was killed, which has no line."""
    command = [sys.executable, "benchmarks/gpu_report.py", "--toy", "--folder", str(tmp_path)]
    command += [word for step in STEPS for word in ("--step", step)]
    file = tmp_path / "emulated-gpu.jsonl"

    def measurements() -> list[dict[str, Any]]:
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [found for line in lines if line.endswith("\n") and (found := json.loads(line))["name"] not in (END, HEADER)]

    for count in KILLS:
        started = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL, start_new_session=True)
        while len(measurements()) < count and started.poll() is None:
            time.sleep(0.05)
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(started.pid)], capture_output=True, text=True, check=False
        )
        os.killpg(started.pid, signal.SIGKILL)
        for child in children.stdout.split():
            os.killpg(int(child), signal.SIGKILL)
        started.wait()
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    names = Counter((line["step"], line["name"]) for line in measurements())
    assert set(names.values()) == {1}
    assert Counter(step for step, _ in names) == {"machine": 5, "llama-1b": 8, "tests": 2}
    text = file.with_suffix(".md").read_text()
    assert text.count("Ended with status 0") == len(STEPS)
    assert "| swap from the host | " in text
