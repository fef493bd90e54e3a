"""`nemo-kto plan` as a command: its exit statuses, and that it loads no megatron-core."""

from __future__ import annotations

from pathlib import Path

from tests import forked
from tests.integration.commands import environment

PLAN = "import sys; from nemo_kto.launch.cli import main\ntry:\n    main(sys.argv[1:])\nfinally:\n    "
LOADED = "print('megatron.core' in sys.modules, file=sys.stderr)"


def test_the_command_and_what_it_loads(tiny_llama: Path, tmp_path: Path) -> None:
    def run(*argv: str) -> tuple[int, list[str], list[str]]:
        done = forked.run(["-c", PLAN + LOADED, *argv], cwd=tmp_path, env=environment(), preload=("nemo_kto.launch.plan",))
        return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()

    model = f"pretrained_checkpoint.restore_from_path={tiny_llama}"
    status, output, errors = run("plan", "kto", model, "--gpus", "2", "--memory", "80")
    assert (status, errors) == (0, ["False"])
    assert output[0] == "nemo-kto plan kto: the fastest layouts that fit on 2 x H100 80GB, 80.0 GB each"
    status, output, errors = run("plan", "dpo", model, "hardware=cpu", "--memory", "0.001")
    assert (status, errors) == (1, ["False"])
    assert output[-1].split(maxsplit=1) == ["verdict", "does not fit: use more ranks, or a smaller model"]
    status, output, errors = run("plan", "dpo", model, "model.optim.lr=-1")
    assert (status, output) == (2, [])
    assert errors[:2] == [
        "nemo-kto plan: nothing can be planned:",
        "  model.optim.lr must be above 0, got -1; e.g. model.optim.lr=1e-5",
    ]
    assert list(tmp_path.iterdir()) == [], "something was written"
