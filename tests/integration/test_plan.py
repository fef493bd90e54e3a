"""`nemo-kto plan` as a command: exit statuses, and megatron-core is not imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import fork_server
from tests.helpers.commands import environment
from tests.helpers.messages import Message

PLAN = "import sys; from nemo_kto.cli.main import main; main(sys.argv[1:])"
# In a new interpreter: the modules of the fork server depend on earlier tests.
LOADED = """
import sys
from nemo_kto.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("megatron.core" in sys.modules)
"""


@pytest.mark.full
def test_megatron_core_is_not_loaded(tiny_llama: Path, tmp_path: Path) -> None:
    words = ["plan", "kto", f"pretrained_checkpoint.restore_from_path={tiny_llama}", "--gpus", "2", "--memory", "80"]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_the_command(tiny_llama: Path, tmp_path: Path) -> None:
    def run(*argv: str) -> tuple[int, list[str], list[str]]:
        done = fork_server.run(
            ["-c", PLAN, *argv], cwd=tmp_path, env=environment(), preload=("nemo_kto.tools.plan.plan_command",)
        )
        return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()

    model = f"pretrained_checkpoint.restore_from_path={tiny_llama}"
    status, output, errors = run("plan", "kto", model, "--gpus", "2", "--memory", "80")
    assert (status, errors) == (0, [])
    assert output[0] == Message("kto", "2", "H100", "80GB", "80.0", "GB")
    status, output, errors = run("plan", "dpo", model, "hardware=cpu", "--memory", "0.001")
    assert (status, errors) == (1, [])
    assert output[-1].split(maxsplit=1) == ["verdict", Message("fit", "smaller")]
    status, output, errors = run("plan", "dpo", model, "model.optim.lr=-1")
    assert (status, output) == (2, [])
    assert errors[:2] == [
        Message("plan", "cannot", "planned"),
        Message("model.optim.lr", "0", "-1", "model.optim.lr=1e-5"),
    ]
    assert list(tmp_path.iterdir()) == [], "something was written"
