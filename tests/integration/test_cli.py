"""Start and end of ranks, contents of a run folder, and Hydra's flags."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

import nemo_kto
from nemo_kto.algorithms.recipes import RECIPES, Recipe
from nemo_kto.config import keys
from tests.helpers.commands import (
    CLI,
    GOOD,
    REPOSITORY,
    environment,
    of_every_algorithm,
    run,
    run_interpreter,
    start,
    stub_training,
)
from tests.helpers.messages import Message, assert_names

TELL = """
names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "NEMO_KTO_FORCE_CPU")
names += ("NVTE_FWD_LAYERNORM_SM_MARGIN", "CUDA_DEVICE_MAX_CONNECTIONS")
told = {"rank": rank, "algorithm": cfg.algorithm, "lr": cfg.model.optim.lr, "run": cfg.exp_manager.explicit_log_dir}
told["export"] = cfg.export.path
open(f"rank{rank}-{cfg.model.seed}.json", "w").write(__import__("json").dumps(told | {n: os.environ.get(n) for n in names}))
"""
MEET = """
import datetime, torch, torch.distributed as dist
from nemo_kto.processes import rendezvous
rendezvous.join("gloo", timeout=datetime.timedelta(minutes=1))
dist.barrier()
"""


# Ranks are forked; with --matrix=full also started as new interpreters.
either_way = pytest.mark.parametrize(
    "fork_ranks", [True, pytest.param(False, marks=pytest.mark.full)], ids=["forked", "anew"]
)


def ended(process_id: int) -> bool:
    """True if the process is gone within seconds, or only waits for someone to ask how it ended."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@of_every_algorithm("kto")
def test_ranks_are_started_and_get_the_same_command_line(tmp_path: Path, name: str) -> None:
    env = stub_training(tmp_path, TELL)
    # The working directory may be the folder of a model that somebody else made: ranks import nothing from it.
    for module in ("hydra", "yaml"):
        (tmp_path / f"{module}.py").write_text(f"raise SystemExit('{module}.py of the working directory ran')")
    words = ["model", "rows.jsonl", "trainer.accelerator=cpu", "trainer.devices=2", "model.optim.lr=3e-6"]
    done = run([*CLI, name, *words], cwd=tmp_path, env=env, fork_ranks=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank in ("0", "1"):
        assert json.loads((tmp_path / f"rank{rank}-1234.json").read_text()) == {
            "rank": rank,
            "algorithm": name,
            "lr": 3e-6,
            "run": f"results/gpt_{name}",
            "export": f"results/gpt_{name}/hf",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": rank,
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": threads,
            "NEMO_KTO_FORCE_CPU": "1",
            "NVTE_FWD_LAYERNORM_SM_MARGIN": "16",
            "CUDA_DEVICE_MAX_CONNECTIONS": None,
        }
    saved = yaml.safe_load((tmp_path / f"results/gpt_{name}/config.yaml").read_text())
    assert saved["model"]["optim"]["lr"] == 3e-6
    assert saved["export"]["path"] == f"results/gpt_{name}/hf"  # resolved
    assert (saved["model"]["data"]["data_prefix"], saved["model"]["data"]["seq_length"]) == ("rows.jsonl", 2048)
    given = {"modules", "model", "rows.jsonl", "hydra.py", "yaml.py"}
    written = {path.name for path in tmp_path.iterdir()} - given
    assert written == {"rank0-1234.json", "rank1-1234.json", "results"}, "Hydra leaves nothing behind"


@of_every_algorithm("dpo")
def test_ranks_of_torchrun_are_used(tmp_path: Path, name: str) -> None:
    env = {**stub_training(tmp_path, TELL), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "nemo_kto.cli.main", name]
    done = run([*torchrun, *GOOD, "recipe=auto"], cwd=tmp_path, env=env, fork_ranks=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nemo-kto: recipe=auto: hardware=cpu (no GPU)") == 1
    for rank in ("0", "1"):
        record = json.loads((tmp_path / f"rank{rank}-1234.json").read_text())
        assert (record["rank"], record["algorithm"], record["WORLD_SIZE"]) == (rank, name, "2")


def script(name: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / f"examples/nlp/gpt/train_gpt_{name}.py")]


@of_every_algorithm("kto")
def test_one_rank_runs_in_the_same_process_and_lists_the_overrides(tmp_path: Path, name: str) -> None:
    env = stub_training(tmp_path, "print('rank', rank, cfg.algorithm)")
    assert run([*script(name), *GOOD], cwd=tmp_path, env=env).stdout == f"rank None {name}\n"
    again = run([*script(name), *GOOD, "model.seed=7"], cwd=tmp_path, env=env)
    assert again.stderr == Message("nemo-kto", "model.seed", "1234", "last", "7")


_COUNT = """
import sys
sys.compositions = 0

def _count(event, arguments):
    sys.compositions += event == "open" and str(arguments[0]).endswith("gpt_kto.yaml")

sys.addaudithook(_count)
"""


@pytest.mark.parametrize(
    ("given", "count"),
    [([], 0), (["--config-dir", ".", "--config-name", "mine", "hardware=cpu"], 1)],
    ids=["plain", "own file"],
)
def test_a_valid_command_line_is_composed_once(tmp_path: Path, given: list[str], count: int) -> None:
    """The process is forked from one that has composed our files."""
    env = stub_training(tmp_path, "print(sys.compositions)")
    with (tmp_path / "modules" / "sitecustomize.py").open("a") as sitecustomize:
        sitecustomize.write(_COUNT)
    (tmp_path / "mine.yaml").write_text("defaults: [gpt_kto, _self_]\nmodel: {seed: 7}\n")
    done = run([*CLI, "kto", *given, *GOOD], cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{count}\n", "")


@either_way
@of_every_algorithm("dpo")
def test_a_script_starts_its_ranks(tmp_path: Path, name: str, fork_ranks: bool) -> None:
    env = stub_training(tmp_path, TELL)
    done = run([*script(name), *GOOD, "trainer.devices=2"], cwd=tmp_path, env=env, fork_ranks=fork_ranks)
    assert done.returncode == 0
    record = [json.loads((tmp_path / f"rank{rank}-1234.json").read_text()) for rank in (0, 1)]
    assert [(one["rank"], one["algorithm"]) for one in record] == [("0", name), ("1", name)]


@either_way
@pytest.mark.parametrize(
    ("fault", "rank", "reason"),
    [("raise RuntimeError('enough')", "1", "error"), ("os.kill(os.getpid(), 9)", "0", "SIGKILL")],
    ids=["raises", "killed"],
)
def test_a_rank_that_fails_ends_the_run_and_its_child_processes(
    tmp_path: Path, fault: str, rank: str, reason: str, fork_ranks: bool
) -> None:
    leak = "import multiprocessing\nmanager = multiprocessing.get_context('spawn').Manager()\n"
    leak += "if rank == '0': open('pid', 'w').write(str(manager._process.pid))\n"
    env = stub_training(tmp_path, f"{leak}{MEET}if rank == '{rank}': {fault}\ndist.barrier()")
    # run() returns only when nothing holds the output any more, which the manager would.
    done = run([*CLI, "kto", *GOOD, "trainer.devices=2"], cwd=tmp_path, env=env, fork_ranks=fork_ranks, timeout=60)
    assert done.returncode == 1
    lines = done.stderr.rstrip().splitlines()
    assert lines[0] == Message("nemo-kto", rank, "2", reason, "other")
    if reason == "error":
        assert (lines[-1], done.stderr.count("Traceback")) == ("RuntimeError: enough", 1)
    assert ended(int((tmp_path / "pid").read_text()))


NOTHING_TO_SAVE = ("nemo-kto", "first step", "start")
SAY_PID = "open(f'pid{rank}.partial', 'w').write(str(os.getpid()))\nos.rename(f'pid{rank}.partial', f'pid{rank}')\n"


class Started:
    """Two ranks of a job that have said who they are, and their launcher."""

    def __init__(self, folder: Path, body: str, *given: str, fork_ranks: bool = True) -> None:
        self.folder = folder
        env = stub_training(folder, SAY_PID + body)
        with (folder / "said").open("w") as said:
            command, number = [*CLI, "kto", *GOOD, "trainer.devices=2", *given], said.fileno()
            self.launcher = start(command, cwd=folder, env=env, fork_ranks=fork_ranks, output=number, errors=number)
        files = [folder / f"pid{rank}" for rank in (0, 1)]
        deadline = time.monotonic() + 60
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.ranks = [int(file.read_text()) for file in files]

    def end(self) -> tuple[int, str]:
        """How the launcher ended, and all that was said; every rank must have ended too."""
        status = self.launcher.wait(timeout=30)
        assert all(ended(rank) for rank in self.ranks)
        return status, (self.folder / "said").read_text()


WAITS = "time.sleep(300)"
STOPPED = (85, Message("SIGTERM", *NOTHING_TO_SAVE))


@either_way
@pytest.mark.parametrize(
    ("name", "to_a_rank", "given", "end"),
    [
        ("SIGTERM", False, [], STOPPED),
        pytest.param("SIGINT", False, [], (85, Message("SIGINT", *NOTHING_TO_SAVE)), marks=pytest.mark.full),
        ("SIGUSR1", False, [], (85, Message("SIGUSR1", *NOTHING_TO_SAVE))),
        ("SIGUSR2", True, ["trainer.stop_signals=[SIGUSR2,SIGTERM]"], (85, Message("SIGUSR2", *NOTHING_TO_SAVE))),
        ("SIGKILL", False, [], (-9, "")),  # the ranks do not outlive their launcher
    ],
    ids=["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2 to a rank", "SIGKILL"],
)
def test_a_signal_ends_launcher_and_ranks(
    tmp_path: Path, name: str, to_a_rank: bool, given: list[str], end: tuple[int, object], fork_ranks: bool
) -> None:
    job = Started(tmp_path, WAITS, *given, fork_ranks=fork_ranks)
    os.kill(job.ranks[1] if to_a_rank else job.launcher.pid, signal.Signals[name])
    assert job.end() == end


def test_the_launcher_waits_for_ranks_that_save_and_a_second_interrupt_ends_them(tmp_path: Path) -> None:
    save = """
from nemo_kto.processes import signals
with signals.deferred():
    while not signals.received(): time.sleep(0.01)
    open(f'stopping{rank}', 'w')
    while not os.path.exists('saved'): time.sleep(0.01)
raise signals.Stopped
"""
    for folder, last, status in ((tmp_path / "a", None, 85), (tmp_path / "b", signal.SIGINT, 130)):
        folder.mkdir()
        job = Started(folder, save)
        os.kill(job.launcher.pid, signal.SIGINT)
        while not all((folder / f"stopping{rank}").exists() for rank in (0, 1)):
            time.sleep(0.01)
        os.kill(job.launcher.pid, signal.SIGTERM)  # as a scheduler does that has lost patience
        time.sleep(0.3)
        assert job.launcher.poll() is None
        if last is None:
            (folder / "saved").touch()
        else:
            os.kill(job.launcher.pid, last)
        said = "nemo-kto: SIGINT received; the run stops after this step, and saves its state\n"
        assert job.end() == (status, said), "one line for both ranks and both signals"


SEND = "import signal\nos.kill(os.getpid(), signal.{})\ntime.sleep(300)"
ENDS: dict[str, tuple[str, list[str], dict[str, str], tuple[int, str, object]]] = {
    "the run folder depends on keys that recipe=auto sets": (  # without a GPU it sets hardware=cpu, which sets the precision
        "print(cfg.exp_manager.explicit_log_dir)",
        ["recipe=auto", "exp_manager.explicit_log_dir='in_${trainer.precision}'"],
        {},
        (0, "in_32\n", Message("recipe=auto", "hardware=cpu")),
    ),
    "a callback in a rank may start another training": (
        "print('trains')",
        [],
        {"NEMO_KTO_STARTED_BY": "1"},
        (2, "", Message("NEMO_KTO_STARTED_BY", "1", "unset NEMO_KTO_STARTED_BY")),
    ),
    "variables of a rank are left without its launcher": (
        "print('trains')",
        [],
        {"NEMO_KTO_STORE_FILE": "/nowhere", "RANK": "0"},
        (2, "", Message("NEMO_KTO_STARTED_BY", "None", "unset NEMO_KTO_STORE_FILE, RANK")),
    ),
    "a sweep ends with the job that was stopped": (
        f"print('job', cfg.model.seed, flush=True)\n{SEND.format('SIGUSR1')}",
        ["--multirun", "model.seed=1,2"],
        {},
        (
            85,
            "nemo-kto kto: a sweep of 2 jobs\n  job  model.seed\n  0    1\n  1    2\njob 1\n",
            Message("SIGUSR1", *NOTHING_TO_SAVE),
        ),
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_status_and_output_of_a_job(tmp_path: Path, name: str) -> None:
    body, given, variables, (status, out, errors) = ENDS[name]
    done = run([*CLI, "kto", *GOOD, *given], cwd=tmp_path, env=stub_training(tmp_path, body) | variables)
    assert (done.returncode, done.stdout, done.stderr) == (status, out, errors)
    assert "Traceback" not in done.stderr


def test_a_job_stopped_with_nothing_to_save_is_requeued(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    env = stub_training(tmp_path, f"if rank == '0': {WAITS}\n{SEND.format('SIGTERM')}")
    env |= {"SLURM_JOB_ID": "31", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run([*CLI, "kto", *GOOD, "trainer.devices=2", "trainer.requeue=true"], cwd=tmp_path, env=env)
    assert (done.returncode, done.stderr) == STOPPED
    assert (tmp_path / "asked").read_text() == "requeue 31\n"


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_flags_that_only_print(tmp_path: Path, recipe: Recipe) -> None:
    name = recipe.name
    env = stub_training(tmp_path, "raise AssertionError('started')")
    flags = "--cfg job --resolve --package model.optim"
    shown = run([*CLI, name, "model.optim.lr=3e-6", *flags.split()], cwd=tmp_path, env=env)
    assert yaml.safe_load(shown.stdout)["lr"] == 3e-6
    helped = run([*CLI, name, "--help"], cwd=tmp_path, env=env).stdout
    assert helped.startswith(f"{recipe.title} ({recipe.page})\n\n  nemo-kto {name} MODEL DATA [KEY=VALUE ...]\n")
    assert_names(helped, "torchrun", "--nproc-per-node", "4", "--no-python", "nemo-kto", f"{name}")
    for key in keys.all_keys(recipe):
        assert f"  {key.name}={key.default}\n      {key.comment}\n" in helped
    assert (REPOSITORY / recipe.page).is_file()
    assert helped.count("\n      ") == len(keys.all_keys(recipe))  # and no key of another
    helped = run([*script(name), "--help"], cwd=tmp_path, env=env).stdout
    assert helped.startswith(f"{recipe.title} ({recipe.page})\n\n  python {script(name)[1]} MODEL DATA [KEY=VALUE ...]\n")
    assert not (tmp_path / "results").exists()


def test_version_and_export(tmp_path: Path) -> None:
    env = stub_training(tmp_path, "pass")
    assert run_interpreter([*CLI, "--version"], cwd=tmp_path, env=env).stdout == f"nemo-kto {nemo_kto.__version__}\n"
    (tmp_path / "results").mkdir()
    assert run([*CLI, "export", "results", "out"], cwd=tmp_path, env=env).stdout == "export results out\n"
    alone = run([*CLI, "export", "--adapter", "results", "out"], cwd=tmp_path, env=env)
    assert alone.stdout == "export results out as adapters\n"


SBATCH = ["bash", str(REPOSITORY / "examples/slurm/train.sbatch")]


def slurm(folder: Path, srun: str, *, cpus: int, tasks: int, nodes: int) -> dict[str, str]:
    """An environment of a SLURM job, whose ``srun`` is this shell script."""
    (folder / "srun").write_text(f"#!/bin/bash\n{srun}\n")
    (folder / "srun").chmod(0o755)
    job = {"CPUS_ON_NODE": cpus, "NTASKS_PER_NODE": tasks, "JOB_NUM_NODES": nodes, "JOB_NAME": "mine", "JOB_ID": 7}
    env = environment() | {f"SLURM_{key}": f"{value}" for key, value in job.items()}
    return env | {"PATH": f"{folder}:{env['PATH']}"}


@pytest.mark.parametrize("name", RECIPES)
def test_the_slurm_script_passes_on_its_arguments(tmp_path: Path, name: str) -> None:
    env = slurm(tmp_path, 'printf "%s\\n" "OMP_NUM_THREADS=$OMP_NUM_THREADS" "$@"', cpus=16, tasks=8, nodes=2)
    given = [*SBATCH, name, "/model", "/a b.jsonl", "model.optim.betas=[0.9, 0.95]"]
    done = run(given, cwd=tmp_path, env=env)
    run_words = [name, "trainer.num_nodes=2", "trainer.devices=8", "exp_manager.name=mine-7"]
    run_words += ["pretrained_checkpoint.restore_from_path=/model", "model.data.data_prefix=/a b.jsonl", given[-1]]
    one_process = "OMP_NUM_THREADS=2 --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=16 nemo-kto check"
    all_ranks = "OMP_NUM_THREADS=2 --kill-on-bad-exit=1 --label --cpus-per-task=2 nemo-kto"
    handed_on = [*one_process.split(), *run_words, *all_ranks.split(), *run_words]
    assert done.stdout.splitlines() == handed_on

    # A task of an array, with its own CPUs per task and threads per rank.
    (tmp_path / "rates").write_text("model.optim.lr=1\nmodel.optim.lr=2 'model.optim.betas=[0.8, 0.9]'\n")
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_CPUS_PER_TASK": "4", "SWEEP": "rates"}
    done = run(given, cwd=tmp_path, env=env | array | {"OMP_NUM_THREADS": "3"})
    changed = {"OMP_NUM_THREADS=2": "OMP_NUM_THREADS=3", "--cpus-per-task=2": "--cpus-per-task=4"}
    changed |= {"exp_manager.name=mine-7": "exp_manager.name=mine-5_2"}
    check, ranks = [changed.get(word, word) for word in handed_on[:14]], [changed.get(word, word) for word in handed_on[14:]]
    swept = ["model.optim.lr=2", "model.optim.betas=[0.8, 0.9]"]
    assert done.stdout.splitlines() == [*check, *swept, *ranks, *swept]


def test_the_slurm_script_starts_no_rank_after_a_mistake(tmp_path: Path) -> None:
    env = slurm(tmp_path, 'echo started\nexit "$STATUS"', cpus=2, tasks=2, nodes=1)
    for status, started in ((0, 2), (1, 2), (2, 1)):
        done = run([*SBATCH, "kto", "/model", "/rows.jsonl"], cwd=tmp_path, env=env | {"STATUS": str(status)})
        assert (done.returncode, done.stdout) == (status, "started\n" * started)
