"""A job on the CPU uses neither the GPU of the machine nor its packages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.commands import CLI, environment, run_interpreter

# Python runs sitecustomize at its start, in the ranks too. Torch says that there is a GPU until it is told otherwise, and
# notes who uses it; this torch, built without CUDA, then raises as well.
_GPU = """
import os, traceback
import torch

def use(*arguments, **options):
    with open(os.environ["USED_BY"], "a") as file:
        file.writelines(traceback.format_stack())
    raise RuntimeError("the GPU was asked for something")

torch.cuda.is_available, torch.cuda.device_count, torch.cuda._lazy_init = lambda: True, lambda: 1, use
"""
# Packages for GPUs exist, and importing them is recorded.
_PACKAGE = "import sitecustomize\nsitecustomize.use()\n"


def machine_with_gpu(folder: Path) -> dict[str, str]:
    """The environment of a process with a fake GPU, whose use is recorded in ``folder``/used."""
    modules = folder / "modules"
    for package in ("transformer_engine", "apex", "amp_C"):
        (modules / package).mkdir(parents=True)
        (modules / package / "__init__.py").write_text(_PACKAGE)
    (modules / "sitecustomize.py").write_text(_GPU)
    kept = {name: value for name, value in environment(modules).items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**kept, "USED_BY": str(folder / "used")}


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_neither_training_nor_export_uses_the_gpu(ranks: int, tiny_llama: Path, kto_rows: Path, tmp_path: Path) -> None:
    env = machine_with_gpu(tmp_path)
    job = [
        f"pretrained_checkpoint.restore_from_path={tiny_llama}",
        f"model.data.data_prefix={kto_rows}",
        "exp_manager.explicit_log_dir=run",
        "trainer.accelerator=cpu",
        f"trainer.devices={ranks}",
        "trainer.kto.max_steps=1",
        "model.global_batch_size=4",
        "model.data.seq_length=64",
        "export.path=whole",
        "export.report=false",
    ]
    done = run_interpreter([*CLI, "kto", *job], cwd=tmp_path, env=env, timeout=300)
    used = tmp_path / "used"
    assert not used.exists(), used.read_text()
    assert done.returncode == 0, done.stderr
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert json.loads((checkpoint / "trainer.json").read_text())["trainer"]["step"] == 1
    exported = run_interpreter([*CLI, "export", "run", "again"], cwd=tmp_path, env=env, timeout=300)
    assert not used.exists(), used.read_text()
    assert exported.returncode == 0, exported.stderr
    for file in sorted((tmp_path / "whole").iterdir()):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
