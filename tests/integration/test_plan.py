"""`nemo-kto plan` and `nemo-kto data preview` as commands: exit statuses, and megatron-core is not imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import fork_server
from tests.helpers.commands import environment, run_interpreter
from tests.helpers.messages import Message, assert_names
from tests.helpers.tiny_models import write_rows

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
    assert errors[:2] == [Message("plan", "cannot", "planned"), Message("model.optim.lr", "0", "-1", "model.optim.lr=1e-5")]
    assert list(tmp_path.iterdir()) == [], "something was written"


PREVIEW = "import sys; from nemo_kto.cli.main import main; main(sys.argv[1:])"
AND_LOADED = "; print('megatron.core' in sys.modules, file=sys.stderr)"


def test_the_command_and_its_imports(tiny_llama: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "p", "response": "r", "preference": "chosen"}])

    def run(*argv: str) -> tuple[int, list[str], list[str]]:
        preload = ("nemo_kto.tools.inspect.preview_command", "nemo_kto.tools.inspect.preview_command")
        done = fork_server.run(["-c", PREVIEW, *argv], cwd=tmp_path, env=environment(), preload=preload)
        return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()

    named = ["data", "preview", "rows.jsonl", "--model", str(tiny_llama), "model.data.seq_length=64"]
    shown = run_interpreter([sys.executable, "-c", PREVIEW + AND_LOADED, *named], cwd=tmp_path, env=environment())
    assert (shown.returncode, shown.stderr.splitlines()[-1]) == (0, "False")
    output = shown.stdout.splitlines()
    assert output[-2:] == [Message("1", "desirable", "2", "3", "64"), "  | p[[r<|im_end|>]]"]
    status, output, errors = run("data", "preview", "rows.jsonl")
    assert (status, output) == (2, [])
    assert_names(errors[0], "preview", "--model", "folder")
    status, output, _ = run("data", "check", "rows.jsonl")
    assert (status, output[0]) == (0, "rows.jsonl: 1 row")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    status, output, errors = run("data", "check", "rows.jsonl")
    assert (status, output, errors[0]) == (2, ["rows.jsonl: 1 row"], Message("check", "1", "row"))
    status, output, errors = run("data", "show", "rows.jsonl")
    assert (status, output) == (2, [])
    assert errors[0] == Message("nemo-kto", "preview", "check", "tokenise", "show", "nemo-kto data --help")
