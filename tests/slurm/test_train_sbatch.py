"""examples/slurm/train.sbatch on a SLURM of two nodes: signals, requeues, lost nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, Submitted
from tests.slurm.conftest import SECONDS, STEPS, TWO_BY_TWO, after_step, folder_of, kto, kto_on_four_ranks, metrics

pytestmark = pytest.mark.slurm
Metrics = list[dict[str, float]]


def ended_early(job: Submitted, work: Path) -> int:
    """The step after which the first ranks wrote their checkpoint, which must be before the last."""
    steps = sorted(int(path.name[5:]) for path in (folder_of(job, work) / "checkpoints").glob("step_*"))
    assert steps[-1] == STEPS
    assert len(steps) == 2, steps
    return steps[0]


def test_signal_checkpoint_requeue(cluster: Cluster, work: Path, uninterrupted: Metrics) -> None:
    (job,) = cluster.submit(*kto_on_four_ranks(), cwd=work)
    after_step(job, 2, work)
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)  # what --signal=B:USR1@120 sends
    state = job.finish(seconds=SECONDS)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "1"), job.output()
    assert f"train.sbatch: the run ended early with status 85; requeue job {job.number}\n" in job.output()
    assert 2 <= ended_early(job, work) < STEPS
    assert metrics(folder_of(job, work)) == uninterrupted  # each step once, to the last bit


def test_layout_gpus_and_threads_of_tasks(cluster: Cluster, work: Path, tmp_path: Path) -> None:
    """Each task sees one GPU, and has threads for its CPUs."""
    shows = tmp_path / "nemo-kto"
    shows.write_text(
        '#!/bin/sh\n[ "$1" = check ] && exit\n'
        'echo "node $SLURM_NODEID gpu $CUDA_VISIBLE_DEVICES threads $OMP_NUM_THREADS $2 $3"\n'
    )
    shows.chmod(0o755)
    arguments = [*TWO_BY_TWO, "--gpus-per-task=1", "--cpus-per-task=2", *kto()]
    env = {"PATH": f"{tmp_path}:{cluster.env['PATH']}", "OMP_NUM_THREADS": ""}
    (job,) = cluster.submit(*arguments, cwd=work, **env)
    assert job.finish(seconds=60)["JobState"] == "COMPLETED", job.output()
    assert sorted(job.output().splitlines()) == [
        f"{2 * node + gpu}: node {node} gpu {gpu} threads 2 trainer.num_nodes=2 trainer.devices=2"
        for node in range(2)
        for gpu in range(2)
    ]


def test_a_cancelled_job_is_not_requeued(cluster: Cluster, work: Path, tmp_path: Path) -> None:
    ends_early = tmp_path / "nemo-kto"
    ends_early.write_text(
        "#!/bin/bash\n[[ $1 != check ]] || exit 0\ntrap 'exit 85' TERM\necho began\nwhile :; do sleep 0.1; done\n"
    )
    ends_early.chmod(0o755)
    (job,) = cluster.submit(*TWO_BY_TWO, *kto(), cwd=work, PATH=f"{tmp_path}:{cluster.env['PATH']}")
    job.wait_until("the start of all ranks", lambda: job.output().count("began") == 4, seconds=60)
    cluster.run("scancel", job.number)
    state = job.finish(seconds=60)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0"), job.output()
    assert "requeue" not in job.output()


@pytest.mark.full
def test_a_killed_node(cluster: Cluster, work: Path, uninterrupted: Metrics) -> None:
    """SLURM requeues the job when it misses the node; where the other ranks fail first, it is requeued by hand."""
    (job,) = cluster.submit(*kto_on_four_ranks("trainer.kto.save_interval=4"), cwd=work)
    after_step(job, 6, work)
    cluster.kill_node("n2")
    job.wait_until("the node is missed", lambda: "down" in cluster.run("sinfo", "-h", "-n", "n2").stdout, seconds=90)
    cluster.start_node("n2")
    state = job.finish(seconds=SECONDS)
    if state["JobState"] != "COMPLETED":
        cluster.run("scontrol", "requeue", job.number)
        state = job.finish(seconds=SECONDS)
    assert state["JobState"] == "COMPLETED", job.output()
    assert re.search(r"srun: error: Node failure on n2|srun: error: n1: tasks? .*: Exited with exit code 1", job.output())
    assert metrics(folder_of(job, work)) == uninterrupted
