"""`nemo-kto data preview` as a command: exit statuses, and megatron-core is not imported."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.helpers import fork_server
from tests.helpers.commands import environment, run_interpreter
from tests.helpers.messages import Message, assert_names
from tests.helpers.tiny_models import write_rows

PREVIEW = "import sys; from nemo_kto.cli.main import main; main(sys.argv[1:])"
LOADED = "; print('megatron.core' in sys.modules, file=sys.stderr)"


def test_the_command_and_its_imports(tiny_llama: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "p", "response": "r", "preference": "chosen"}])

    def run(*argv: str) -> tuple[int, list[str], list[str]]:
        preload = ("nemo_kto.tools.inspect.preview_command", "nemo_kto.data.batches.collate")
        done = fork_server.run(["-c", PREVIEW, *argv], cwd=tmp_path, env=environment(), preload=preload)
        return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()

    named = ["data", "preview", "rows.jsonl", "--model", str(tiny_llama), "model.data.seq_length=64"]
    shown = run_interpreter([sys.executable, "-c", PREVIEW + LOADED, *named], cwd=tmp_path, env=environment())
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
