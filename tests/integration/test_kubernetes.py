"""examples/kubernetes: the numbers of the YAML files agree, and the script of a pod starts, stops and reports its ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.config import compose
from nemo_kto.config.checker import read_positions
from tests.helpers.commands import CLI, REPOSITORY, environment
from tests.helpers.tiny_models import make_rows, write_rows

FOLDER = REPOSITORY / "examples/kubernetes"
JOB_SET: dict[str, Any] = yaml.safe_load((FOLDER / "train.yaml").read_text())
RANKS: dict[str, Any] = JOB_SET["spec"]["replicatedJobs"][0]
JOB: dict[str, Any] = RANKS["template"]["spec"]
POD: dict[str, Any] = JOB["template"]["spec"]
(CONTAINER,) = POD["containers"]
ENV = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}
SCRIPT, *WORDS = CONTAINER["args"]


def test_the_jobs_are_valid_for_kubernetes() -> None:
    """The job for the check, and the one that the JobSet creates, against the schema of batch/v1 without unknown fields."""
    check = yaml.safe_load((FOLDER / "check.yaml").read_text())
    training = {"apiVersion": "batch/v1", "kind": "Job", "metadata": JOB_SET["metadata"], "spec": dict(JOB)}
    for job in (check, training):
        kubernetes_validate.validate(job, "1.33", strict=True)
    del training["spec"]["template"]
    with pytest.raises(kubernetes_validate.ValidationError, match="template"):
        kubernetes_validate.validate(training, "1.33", strict=True)


def test_the_numbers_of_machines_and_gpus_agree() -> None:
    assert (JOB_SET["apiVersion"], JOB_SET["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    nodes, gpus = int(ENV["NODES"]), int(ENV["GPUS"])
    assert {JOB["parallelism"], JOB["completions"]} == {nodes}
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == gpus
    assert {f"trainer.num_nodes={nodes}", f"trainer.devices={gpus}"} <= set(WORDS)
    name = JOB_SET["metadata"]["name"]
    assert ENV["MASTER_ADDR"] == f"{name}-{RANKS['name']}-0-0.{name}"
    check = yaml.safe_load((FOLDER / "check.yaml").read_text())["spec"]["template"]["spec"]["containers"][0]
    run = [word for word in WORDS[1:] if not word.startswith("trainer.")]
    assert sorted(check["args"]) == sorted([*run, f"--nodes={nodes}", f"--gpus-per-node={gpus}"])
    assert (check["image"], check["workingDir"]) == (CONTAINER["image"], CONTAINER["workingDir"])


def test_the_words_are_a_valid_command_line() -> None:
    assert WORDS[0] == "nemo-kto"
    recipe = RECIPES[WORDS[1]]
    overrides, wrong = read_positions(WORDS[2:], recipe)
    cfg, errors = compose.to_config(compose.load(overrides, source=compose.our_source(recipe)))
    assert (wrong, errors) == ([], [])
    assert cfg is not None
    assert Path(CONTAINER["workingDir"], cfg.exp_manager.explicit_log_dir).is_relative_to("/work")


def test_ends_of_pods() -> None:
    """Status 85 and evictions are retried without a limit; all pods start again together; NCCL has shared memory."""
    retried = [rule for rule in JOB_SET["spec"]["failurePolicy"]["rules"] if "IgnoreMaxRestarts" in rule["action"]]
    assert [rule["onJobFailureReasons"] for rule in retried] == [["PodFailurePolicy"]]
    codes, evicted = JOB["podFailurePolicy"]["rules"]
    assert codes["action"] == evicted["action"] == "FailJob"
    assert codes["onExitCodes"] == {"containerName": CONTAINER["name"], "operator": "In", "values": [85]}
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert (JOB["backoffLimit"], POD["restartPolicy"]) == (0, "Never")
    assert POD["terminationGracePeriodSeconds"] >= 300
    memory = [volume["name"] for volume in POD["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"]
    assert [mount["name"] for mount in CONTAINER["volumeMounts"] if mount["mountPath"] == "/dev/shm"] == memory


def start_pod(folder: Path, command: str, *, index: int = 1, **variables: str) -> subprocess.Popen[str]:
    """The script of pod ``index`` with two GPUs and the words of the example, and ``command`` in place of nemo-kto."""
    for name, content in (("nemo-kto", command), ("sleep", "exec /bin/sleep 0.05")):
        (folder / name).write_text(f"#!/bin/bash\n{content}\n")
        (folder / name).chmod(0o755)
    env = {**environment(), **ENV, "GPUS": "2", "JOB_COMPLETION_INDEX": str(index), "HOME": str(folder), **variables}
    env["PATH"] = f"{folder}:{env['PATH']}"
    return subprocess.Popen(
        [*CONTAINER["command"], SCRIPT, *WORDS],
        cwd=folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("exit 0", 0),
        ("exit 85", 85),
        ("[ $RANK = 2 ] && exit 85; /bin/sleep 0.3; exit 1", 85),  # it misses the rank that has stopped
        ("[ $RANK = 3 ] && exit 2; exec /bin/sleep 60", 2),
        ("[ $RANK = 3 ] && kill -KILL $$; exec /bin/sleep 60", 137),
    ],
)
def test_the_status_of_a_pod(tmp_path: Path, ends: str, status: int) -> None:
    shown = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_PORT $*"'
    pod = start_pod(tmp_path, f"{shown}\n{ends}")
    assert pod.stdout is not None
    lines = sorted(pod.stdout.readline() for _ in range(2))
    assert lines == [f"{2 + local} {local} 4 2 29500 {' '.join(WORDS[1:])}\n" for local in range(2)]
    try:
        assert pod.wait(timeout=60) == status
    finally:
        pod.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pod.pid, signal.SIGKILL)  # ranks that the end of a container would kill


def test_a_pod_passes_on_the_signal_of_its_end(tmp_path: Path) -> None:
    wait = "trap 'touch stopped$RANK; exit 85' TERM\ntouch began$RANK\nwhile :; do /bin/sleep 0.05; done"
    pod = start_pod(tmp_path, wait, index=0)
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("began*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(timeout=60) == 85
    assert sorted(path.name for path in tmp_path.glob("stopped*")) == ["stopped0", "stopped1"]


@pytest.mark.slow
def test_two_ranks_of_a_pod_train(tmp_path: Path, tiny_llama: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", make_rows(40))
    (tmp_path / "model").symlink_to(tiny_llama)
    small = "hardware=cpu trainer.num_nodes=1 trainer.devices=2 model.global_batch_size=16 trainer.kto.max_steps=2"
    small += " export.enabled=false model.data.cache_dir=cache model.data.seq_length=64"
    words = 'exec {} "${{@:1:3}}" "${{@:6}}" {}'  # without the numbers of machines and GPUs of the example
    pod = start_pod(tmp_path, words.format(" ".join(CLI), small), index=0, NODES="1", MASTER_ADDR="127.0.0.1")
    output, _ = pod.communicate(timeout=200)
    assert pod.returncode == 0, output
    assert (tmp_path / "results/nemo-kto/checkpoints/step_000002").is_dir()
