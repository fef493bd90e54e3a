""".ci/run with stub stages: the table and the last line for each way in which a stage may end."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.helpers.commands import REPOSITORY

MAKEFILE = """
test:
\t@echo "==== 3 passed, 1 failed in 2.0s ===="; exit 1
test-slow:
\t@echo "==== 2 passed, 4 deselected in 2.0s ===="
audit:
\t@sleep 60
%:
\t@true
"""
SCRIPTS = {
    "slurm": "echo 'slurm: skipped: only root'",
    "browser": "echo 'browser: skipped: no chromium'",
    "emulated": "echo 'emulated: skipped: no C compiler'",
    "image": "echo 'image: works'",
    "newcomer": "exit 3",
    "python312": "echo 'no Python 3.12' >&2; exit 1",
}


def test_each_stage_has_a_line_and_the_last_line_has_the_totals(tmp_path: Path) -> None:
    scripts = tmp_path / ".ci"
    scripts.mkdir()
    (tmp_path / "Makefile").write_text(MAKEFILE)
    for name, body in SCRIPTS.items():
        (scripts / name).write_text(f"#!/bin/bash\n{body}\n")
        (scripts / name).chmod(0o755)
    text = (REPOSITORY / ".ci/run").read_text()
    (scripts / "run").write_text(re.sub(r"stage audit \d+ ", "stage audit 0.01 ", text))
    for command in ("init", "add .", "-c user.name=a -c user.email=a commit --message=a"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True, check=False)
    table = dict(re.findall(r"^(\w+) +\d+ s  (.*)$", done.stdout, re.MULTILINE))
    assert table == {
        "test": "failed: status 2 (3 tests passed)",
        "slow": "passed (2 tests passed)",
        "docs": "passed",
        "slurm": "skipped: only root",
        "browser": "skipped: no chromium",
        "emulated": "skipped: no C compiler",
        "audit": "failed: not done within its limit of 0.01 minutes",
        "image": "passed",
        "py312": "skipped: no Python 3.12",
        "newcomer": "failed: status 3",
        "bare": "failed: status 3",
    }
    assert done.stdout.splitlines()[-1] == "5 passed, 4 failed"
    assert done.returncode == 1
