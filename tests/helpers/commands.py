"""Run the package's commands in separate processes, optionally with a stub in place of the training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_kto.algorithms.recipes import RECIPES
from tests.helpers import fork_server
from tests.helpers.tiny_models import write_stub_model

REPOSITORY = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "nemo_kto.cli.main"]

# Python runs sitecustomize at its start, in the ranks too.
_STUB_TRAINING = """
import sys, types

def train(run, **options):
    import os
    cfg = run.cfg
    from nemo_kto.config.saved_config import save_config
    if os.environ.get("RANK", "0") == "0":  # as the job does, when it knows its precision
        save_config(cfg)
    import job
    job.run(cfg)

def export_checkpoint(checkpoint, out, *, adapter):
    print(f"export {checkpoint} {out}" + " as adapters" * adapter)

for name in ("train", "policy"):
    module = types.ModuleType(f"nemo_kto.run.{name}")
    module.train, module.export_checkpoint = train, export_checkpoint
    sys.modules[module.__name__] = module
"""


def stub_training(folder: Path, body: str) -> dict[str, str]:
    """An environment in which the training is ``body``, the inside of a function of ``cfg``; its cwd is ``folder``."""
    modules = folder / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(_STUB_TRAINING)
    indented = "\n".join("    " + line for line in body.strip().splitlines())
    (modules / "job.py").write_text(
        f"import os, sys, time\n\ndef run(cfg):\n    rank = os.environ.get('RANK')\n{indented}\n"
    )
    write_stub_model(folder / "model")
    (folder / "rows.jsonl").write_text('{"prompt": "p", "response": "r", "preference": "chosen"}\n')
    return environment(modules)


def environment(*before: Path) -> dict[str, str]:
    """That of this process without anything that a launcher might have set."""
    foreign = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "SLURM_",
        "TORCHELASTIC_",
        "NEMO_KTO_",
        "OMP_NUM_THREADS",
        "HYDRA_",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "PYTHONPATH": fork_server.search_path(*before, REPOSITORY)}


GOOD = ["pretrained_checkpoint.restore_from_path=model", "model.data.data_prefix=rows.jsonl", "trainer.accelerator=cpu"]


# What every command imports. Not what ``stub_training`` replaces, nor the command itself, which runs as __main__.
_IMPORTED = (
    "hydra",
    "nemo_kto.config.rules.training_rules",
    "nemo_kto.config.compose",
    "nemo_kto.processes.ranks",
    "torch.distributed.elastic.multiprocessing.errors",
    "psutil",
    "tests.helpers.composed",
    "transformers.models.llama.configuration_llama",  # imports most of transformers
)
# What training imports besides.
TRAINING = (
    "nemo_kto.run.reference_setup",
    "nemo_kto.algorithms.kto",
    "nemo_kto.models.nlp.gpt.megatron_gpt_kto_model",
    "nemo_kto.telemetry.watch",
    "nemo_kto.telemetry.display",
    "pytorch_lightning.loggers",
)


def of_every_algorithm(quick: str) -> pytest.MarkDecorator:
    """The argument ``name``: of one algorithm by default, and of all with ``--matrix=full``."""
    names = [name if name == quick else pytest.param(name, marks=pytest.mark.full) for name in RECIPES]
    return pytest.mark.parametrize("name", names)


def start(
    command: list[str],
    *,
    cwd: Path,
    env: dict[str, str],
    output: int,
    errors: int,
    fork_ranks: bool = True,
    preload: tuple[str, ...] = (),
) -> fork_server.Process:
    """Start one of these commands; its output goes to the files of these numbers."""
    assert command[0] == sys.executable
    preload = (*_IMPORTED, *preload)
    return fork_server.Process(
        command[1:], cwd=cwd, env=env, preload=preload, ranks=fork_ranks, stdout=output, stderr=errors
    )


def run(
    command: list[str],
    *,
    cwd: Path,
    env: dict[str, str],
    fork_ranks: bool = True,
    preload: tuple[str, ...] = (),
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """The finished process with its output; waits until every process that holds the output has ended.

    A Python command is forked from a process with the needed imports; so are its ranks, unless ``fork_ranks`` is false.
    """
    if command[0] != sys.executable:
        return run_interpreter(command, cwd=cwd, env=env, timeout=timeout)
    preload = (*_IMPORTED, *preload)
    return fork_server.run(command[1:], cwd=cwd, env=env, preload=preload, ranks=fork_ranks, timeout=timeout)


def run_here(*words: object) -> int:
    """The exit status of a command that runs in this process."""
    from nemo_kto.cli.main import main

    try:
        main([str(word) for word in words])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def run_interpreter(
    command: list[str], *, cwd: Path, env: dict[str, str], timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """The same with an interpreter that begins with nothing, which takes seconds."""
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
