"""Signals to real runs of two ranks, in every phase: status 85, one line, and the losses of an uninterrupted run.

The processes send themselves the signals, so that each arrives in the intended phase.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.commands import CLI, TRAINING, environment, run
from tests.helpers.messages import Message, assert_names
from tests.helpers.tiny_models import make_rows, write_rows

# Python runs sitecustomize at its start, in the ranks too.
_SEND = """
import importlib, os, signal, sys, time

def send(who, name):
    from nemo_kto.processes import signals
    number = signal.Signals[name]
    if who == "launcher":
        if os.environ["RANK"] == "0":
            os.kill(os.getppid(), number)
        while not signals.received():  # until it was passed on
            time.sleep(0.001)
    elif who in ("all", os.environ["RANK"]):
        os.kill(os.getpid(), number)

def spoil(module, path, call, who, name):
    owner = importlib.import_module(module)
    *classes, function = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    original, calls = getattr(owner, function), []

    def sending(*arguments, **options):
        calls.append(1)
        if len(calls) == int(call):
            send(who, name)
        return original(*arguments, **options)

    setattr(owner, function, sending)

if "SIGNAL" in os.environ and "RANK" in os.environ:
    for each in os.environ["SIGNAL"].split(";"):
        spoil(*each.split())
"""
MODEL = "nemo_kto.models.nlp.gpt.megatron_gpt_kto_model"
# Where a signal is sent: module, function, which call of it.
DATA = "nemo_kto.data.tokens.cache TokenCache.open 1"
LOADING = "nemo_kto.run.train build_policy 1"
REFERENCE = "nemo_kto.models.engine.engine LogProbEngine.logprobs 2"
SAVE = "nemo_kto.checkpoint.manager CheckpointManager.save 1"
EXPORT = "nemo_kto.run.lifecycle export_policy 1"


def pass_of_model(number: int) -> str:
    """A batch of the training or the validation, counted from the start of the process."""
    return f"{MODEL} MegatronGPTKTOModel.get_loss_and_metrics {number}"


class Runs:
    """A job of two ranks: 24 rows, three steps an epoch, two epochs, a validation of two batches after every second step."""

    def __init__(self, folder: Path, model: Path) -> None:
        modules = folder / "modules"
        modules.mkdir()
        (modules / "sitecustomize.py").write_text(_SEND)
        self.folder, self._environment = folder, environment(modules)
        rows = make_rows(40)
        train, validation = write_rows(folder / "rows.jsonl", rows[:24]), write_rows(folder / "val.jsonl", rows[24:])
        data = f"{{train: {train}, validation: {validation}}}"
        self._words = [
            *CLI, "kto", f"pretrained_checkpoint.restore_from_path={model}", f"model.data.data_prefix={data}",
            "model.data.seq_length=48", "model.global_batch_size=8", "model.micro_batch_size=4", "recipe=auto",
            "trainer.devices=2", "trainer.precision=32", "trainer.kto.max_epochs=2", "trainer.kto.max_steps=5",
            "trainer.kto.val_check_interval=2", "trainer.kto.save_interval=0", "model.optim.lr=5e-4",
            "exp_manager.create_tensorboard_logger=false", "export.report=false", "exp_manager.samples.count=0",
        ]  # fmt: skip

    def run(self, name: str, *given: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a job with the run folder ``name`` and a separate cache; SIGNAL is an argument of ``spoil``."""
        env = self._environment | variables
        own = [f"exp_manager.explicit_log_dir={name}", f"model.data.cache_dir=cache-{name}"]
        return run([*self._words, *own, *given], cwd=self.folder, env=env, preload=TRAINING, timeout=120)

    def stopped(self, name: str, signal: str, *given: str) -> str:
        """The last line of a stopped job, which must end with status 85 and without a traceback."""
        done = self.run(name, *given, SIGNAL=signal)
        assert done.returncode == 85, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.count("nemo-kto: stopped") == 1
        return done.stderr.splitlines()[-1]

    def logged(self, name: str) -> list[dict[str, float]]:
        """Logged metrics of each step and each validation without times."""
        lines = [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]
        kept = [{key: line[key] for key in line if key.startswith(("train/", "val/", "step"))} for line in lines]
        return [line for line in kept if len(line) > 1]


@pytest.fixture(scope="module")
def runs(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("stops"), tiny_llama)
    assert made.run("whole").returncode == 0
    return made


def test_a_repeatedly_stopped_job_equals_an_uninterrupted_one(runs: Runs) -> None:
    nothing = Message("nemo-kto", "SIGTERM", "first step", "start")
    assert runs.stopped("run", f"{DATA} 0 SIGTERM") == nothing
    message = runs.stopped("run", f"{REFERENCE} 1 SIGUSR1")
    assert message == Message("nemo-kto", "SIGUSR1", "32", f"{cache(runs)}", "start")
    # the first step of the process, and again during the shutdown; the launcher ends ranks that have lost one
    where = "checkpoint run/checkpoints/step_00000"
    message = runs.stopped("run", f"{pass_of_model(1)} launcher SIGTERM;nemo_kto.processes.ranks end_early 1 all SIGTERM")
    assert message == Message("SIGTERM", "step 1 of 5", f"{where}1", "start", "resume")
    # the first batch of the validation, which is begun again
    message = runs.stopped("run", f"{pass_of_model(2)} 1 SIGINT")
    assert message == Message("SIGINT", "step 2 of 5", f"{where}2", "start", "resume")
    assert len(runs.logged("run")) == 2
    done = runs.run("run", SIGNAL=f"{EXPORT} all SIGTERM")
    assert (done.returncode, "stopped" in done.stderr) == (0, False), "the export is completed"
    assert list((runs.folder / "run/hf").glob("*.safetensors"))
    assert runs.logged("run") == runs.logged("whole")


@pytest.mark.full
def test_signals_at_other_moments(runs: Runs) -> None:
    """While the model is loaded, at a rank that the others wait for; and during a save, which is finished."""
    assert runs.stopped("other", f"{LOADING} 1 SIGTERM") == Message("nemo-kto", "SIGTERM", "first step", "start")
    message = runs.stopped("other", f"{SAVE} all SIGTERM", "trainer.kto.save_interval=1")
    # the step after the save is the one at whose end the ranks agree
    assert message.startswith("nemo-kto: stopped by SIGTERM at step 2 of 5, checkpoint other/checkpoints/step_000002;")
    assert [path.name for path in sorted((runs.folder / "other/checkpoints").iterdir())] == ["step_000001", "step_000002"]


@pytest.mark.full
def test_a_signal_in_the_last_validation(runs: Runs) -> None:
    """Steps 1 and 2, a validation of two batches, steps 3 and 4, a validation, step 5, a validation."""
    message = runs.stopped("last", f"{pass_of_model(10)} 0 SIGTERM")
    assert message.startswith("nemo-kto: stopped by SIGTERM at step 5 of 5, checkpoint last/checkpoints/step_000005;")
    assert not (runs.folder / "last/hf").exists()
    done = runs.run("last")
    assert done.returncode == 0, done.stderr
    assert list((runs.folder / "last/hf").glob("*.safetensors"))
    assert runs.logged("last") == runs.logged("whole")
    assert_names(runs.run("last").stdout, "nemo-kto", "5")


def test_max_time_counts_from_the_start_of_the_launcher_and_the_job_is_requeued(runs: Runs) -> None:
    scontrol = runs.folder / "bin/scontrol"
    scontrol.parent.mkdir()
    asked = runs.folder / "asked"
    scontrol.write_text(f'#!/bin/sh\nls {runs.folder}/timed/checkpoints >> {asked}\necho "$@" >> {asked}\n')
    scontrol.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "31", "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    given = ("trainer.max_time=00:00:00:01", "trainer.requeue=true", "model.reference.mode=swap")
    done = runs.run("timed", *given, **slurm)
    assert done.returncode == 85, done.stderr
    where = "at step 1 of 5, checkpoint timed/checkpoints/step_000001"
    message = f"nemo-kto: stopped by max_time=00:00:00:01 {where}; SLURM job 31 was requeued to resume"
    assert done.stderr.splitlines()[-1] == message
    assert asked.read_text() == "step_000001\nrequeue 31\n"
    assert not (runs.folder / "timed/hf").exists()


def cache(runs: Runs) -> Path:
    (folder,) = (runs.folder / "cache-run/reference").iterdir()
    return folder.relative_to(runs.folder)
