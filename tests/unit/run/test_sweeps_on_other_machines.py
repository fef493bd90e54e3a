"""Jobs of a sweep that a Hydra launcher runs on other machines."""

from __future__ import annotations

from dataclasses import replace

from nemo_kto.algorithms.recipes import KTO
from nemo_kto.cli.job import Job
from nemo_kto.config import compose
from tests.helpers.messages import Message
from tests.unit.conftest import composed


def test_checks_of_the_machine_are_done_by_the_job(good: list[str]) -> None:
    config = composed([*good, "trainer.num_nodes=2", "trainer.devices=2", "model.global_batch_size=3"])
    here = Job(recipe=KTO, source=compose.our_source(KTO), world=None)
    cfg, _ = compose.to_config(config)
    assert cfg is not None
    texts = [
        [str(error) for error in job.checker(sweep=False).rule_errors(cfg)] for job in (here, replace(here, elsewhere=True))
    ]
    of_batch = Message("model.global_batch_size", "number", "4", "3", "use")
    of_nodes = Message("trainer.num_nodes", "1", "2", "torchrun", "srun", "examples/slurm")
    assert texts == [[of_nodes, of_batch], [of_batch]]
