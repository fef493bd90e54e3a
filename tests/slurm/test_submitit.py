"""A sweep by Hydra's submitit launcher, each job on four ranks of two nodes."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.slurm.cluster import Cluster
from tests.slurm.conftest import LAYOUT, SECONDS, SMALL, metrics

pytestmark = [pytest.mark.slurm, pytest.mark.full]


def test_submitit(cluster: Cluster, work: Path) -> None:
    if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        pytest.skip("no hydra-submitit-launcher: pip install nemo-kto[slurm]")
    command = [
        *["nemo-kto", "kto", "--multirun", "hydra/launcher=submitit_slurm"],
        *["hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=2", "hydra.launcher.cpus_per_task=1"],
        *["pretrained_checkpoint.restore_from_path=model", "model.data.data_prefix=kto.jsonl", *SMALL, *LAYOUT],
        *["trainer.num_nodes=2", "trainer.devices=2", "trainer.kto.max_steps=2", "model.kto.ref_policy_kl_penalty=0.1,0.2"],
    ]
    done = subprocess.run(
        command, env=cluster.env, cwd=work, capture_output=True, text=True, timeout=2 * SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    folders = [work / "results/gpt_kto" / job for job in "01"]
    assert [OmegaConf.load(folder / "config.yaml").model.kto.ref_policy_kl_penalty for folder in folders] == [0.1, 0.2]
    steps = [metrics(folder) for folder in folders]
    assert [[step["step"] for step in of_job] for of_job in steps] == [[1, 2], [1, 2]]
    assert steps[0][1]["train/loss"] != steps[1][1]["train/loss"]
    output = "".join(file.read_text() for file in (work / "results/gpt_kto/.submitit").glob("*/*_0_log.out"))
    assert output.count("4 ranks = 1 data x 2 tensor x 2 pipeline parallel") == 2
