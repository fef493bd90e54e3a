"""Jobs of a sweep that a Hydra launcher runs on other machines."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_kto.algorithms.recipes import KTO
from nemo_kto.cli.job import Job
from nemo_kto.config import compose
from tests.helpers.messages import Message
from tests.unit.conftest import composed, source_of


def test_checks_of_the_machine_are_done_by_the_job(good: list[str]) -> None:
    config = composed([*good, "trainer.num_nodes=2", "trainer.devices=2", "model.global_batch_size=3"])
    here = Job(recipe=KTO, source=source_of(KTO), world=None)
    cfg, _ = compose.to_config(config)
    assert cfg is not None
    texts = [
        [str(error) for error in job.checker(sweep=False).rule_errors(cfg)] for job in (here, replace(here, elsewhere=True))
    ]
    of_batch = Message("model.global_batch_size", "number", "4", "3", "use")
    of_nodes = Message("trainer.num_nodes", "1", "2", "torchrun", "srun", "examples/slurm")
    assert texts == [[of_nodes, of_batch], [of_batch]]


def test_ranks_run_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the launcher's script, with which the process of the job was started."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/submitit/core/_submit.py"])
    job = Job(recipe=KTO, source=source_of(KTO), world=None)
    assert job._command(["model.seed=1"])[:5] == ["-u", "-P", "-m", "nemo_kto.cli.main", "kto"]
    job = Job(recipe=KTO, source=source_of(KTO), world=None, script=Path("/examples/train.py"))
    assert job._command(["model.seed=1"])[:2] == ["-u", "/examples/train.py"]
