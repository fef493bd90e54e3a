"""Commands that need no model import neither torch nor, without a configuration, Hydra."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from nemo_kto.utils.locks import locked
from tests.conftest import REPOSITORY
from tests.helpers import fork_server
from tests.helpers.messages import Message

# One interpreter for all, since its start costs more than most of them. The last ones import Hydra.
COMMANDS = [
    ["--version"],
    ["--help"],
    ["trian"],
    ["data", "check", "rows.jsonl"],
    ["import", "missing.nemo", "out"],
    ["checkpoint", "ls", "run"],
    ["label", "answers.jsonl", "--out", "thumbs.jsonl", "--score", "os.path.samefile"],
    ["check", "--help"],
    ["translate", "swift.yaml"],
    ["data", "tokenise", "--help"],
    ["check", "kto", "model.optim.lr=fast", "--nodes", "2", "--gpus-per-node", "8"],
    ["chat", "nowhere"],
    ["kto", "model.optim.lr=fast", "trainer.kto.max_stepps=3"],
    ["kto", "MODEL", "rows.jsonl", "exp_manager.explicit_log_dir=run"],  # whose run folder is in use
    ["kto", "MODEL", "rows.jsonl", "exp_manager.explicit_log_dir=run", "trainer.devices=2"],
]
PROGRAM = """
import contextlib, io, json, sys
from nemo_kto.cli.main import main

HEAVY = {"torch", "megatron", "transformers", "lightning_fabric", "pytorch_lightning", "datasets", "pyarrow", "scipy"}
report = []
for command in json.loads(sys.argv[1]):
    sys.argv = ["nemo-kto", *command]
    said, status = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            status = end.code
    loaded = {name.split(".")[0] for name in sys.modules}
    report.append([status, said.getvalue(), sorted(loaded & HEAVY), "hydra" in loaded, len(sys.modules)])
print(json.dumps(report))
"""
MAX_MODULES = 800  # 388 before anything is composed and 620 after it; with torch there are 1,800


def test_commands_without_a_model_import_no_torch(tmp_path: Path, tiny_llama: Path) -> None:
    rows = [{"prompt": f"p{number}", "response": "r", "preference": "chosen"} for number in range(3)]
    (tmp_path / "swift.yaml").write_text("rlhf_type: kto\ndataset: rows.jsonl\nmodel: m\n")
    (tmp_path / "answers.jsonl").write_text('{"prompt": "p", "answer": "a", "model": "m", "line": 1, "index": 0}')
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {**os.environ, "PYTHONPATH": fork_server.search_path(REPOSITORY), "NEMO_KTO_FORCE_CPU": "1"}
    run = [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS).replace("MODEL", str(tiny_llama))]
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run/.lock", when_held=lambda who: None):
        done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True)
    report = json.loads(done.stdout)
    assert [status or 0 for status, *_ in report] == [0, 0, 2, 0, 2, 2, 2, 0, 0, 0, 2, 2, 2, 2, 2]
    said = [text for _, text, *_ in report]
    expected = [
        "nemo-kto 0.",
        "Write a checkpoint in Hugging Face format",
        "got trian",
        "3 desirable",
        "got missing.nemo",
        "got none in run/checkpoints",
        "FileNotFoundError",
        "--nodes N",
        "model.data.data_prefix=rows.jsonl",
        "KEY=VALUE",
        "model.optim.lr",
        "got nowhere",
        "max_stepps",
    ]
    assert [part in text for part, text in zip(expected, said, strict=False)] == [True] * len(expected), said
    in_use = Message("nemo-kto", "run must", "one run at a time", str(os.getpid()), "wait", "exp_manager.name")
    assert [text.strip() for text in said[len(expected) :]] == [in_use, in_use]
    assert [heavy for _, _, heavy, *_ in report] == [[]] * len(COMMANDS)
    assert [hydra for *_, hydra, _ in report] == [False] * 7 + [True] * 8
    assert max(count for *_, count in report) < MAX_MODULES
