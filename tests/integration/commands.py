"""Run the commands of the package in new processes, with a job that needs no model in place of the training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "nemo_kto.launch.cli"]

# Python runs sitecustomize at its start, in the ranks too.
_PRETEND = """
import sys, types

def train(cfg):
    import job
    job.run(cfg)

def export_checkpoint(checkpoint, out, *, adapter):
    print(f"export {checkpoint} {out}" + " as adapters" * adapter)

for name in ("build", "build_policy"):
    module = types.ModuleType(f"nemo_kto.launch.{name}")
    module.train, module.export_checkpoint = train, export_checkpoint
    sys.modules[module.__name__] = module
"""


def pretend(folder: Path, body: str) -> dict[str, str]:
    """An environment in which the training is ``body``, the inside of a function of ``cfg``; its cwd is ``folder``."""
    modules = folder / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(_PRETEND)
    indented = "\n".join("    " + line for line in body.strip().splitlines())
    (modules / "job.py").write_text(
        f"import os, sys, time\n\ndef run(cfg):\n    rank = os.environ.get('RANK')\n{indented}\n"
    )
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
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
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, [*before, REPOSITORY]))}


GOOD = ["pretrained_checkpoint.restore_from_path=model", "model.data.data_prefix=rows.jsonl", "trainer.accelerator=cpu"]


def run(command: list[str], *, cwd: Path, env: dict[str, str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The finished process with its output; waits until every process that holds the output has ended."""
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)
