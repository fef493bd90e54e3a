"""A tiny job that is killed, restarted with the same command, and compared with an uninterrupted one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.helpers.commands import REPOSITORY, TRAINING, environment, start
from tests.helpers.consumed_rows import recorded_rows
from tests.helpers.tiny_models import make_checkpoint, make_rows, write_rows

HOOK = Path(__file__).parent / "hook"
COMMAND = [sys.executable, str(REPOSITORY / "examples/nlp/gpt/train_gpt_kto.py")]
DEADLINE = 120.0  # seconds, for any start of the job; one takes 5
SECONDS_TO_END = 10.0  # that ranks may outlive their launcher
SHOWN_LINES = 20  # of the output, among which the cause must be
ROWS, BATCH = 24, 8  # of the training file: three steps an epoch
STEPS_OF_EPOCH = ROWS // BATCH
# What a killed process may leave: a checkpoint that it was about to remove (the next save removes it), and the lock, which
# nobody holds, of an export that had its name already.
_MAY_STAY = re.compile(r"run/checkpoints/step_\d+|run/\.hf\.lock(\.owner)?")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is run: six steps in two epochs, with a checkpoint after every second.

    Attributes:
        model, rows, validation: what it reads.
        ranks: on this machine.
        restarts: of torchrun, which then starts the ranks; None: they are started by the command.
        overrides: its layout and reference mode.
    """

    model: Path
    rows: Path
    validation: Path
    ranks: int = 2
    restarts: int | None = None
    overrides: tuple[str, ...] = ("model.reference.mode=swap",)

    def command(self, folder: Path) -> list[str]:
        """The command line of a run in ``folder``."""
        python, script = COMMAND
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [
            python,
            *([] if self.restarts is None else [*torchrun, f"--max-restarts={self.restarts}"]),
            script,
            f"pretrained_checkpoint.restore_from_path={self.model}",
            f"model.data.data_prefix={{train: {self.rows}, validation: {self.validation}}}",
            f"model.data.cache_dir={folder / 'cache'}",
            f"exp_manager.explicit_log_dir={folder / 'run'}",
            f"trainer.callbacks=[{{_target_: tests.helpers.consumed_rows.RecordRows, folder: {folder / 'rows'}}}]",
            f"trainer.devices={self.ranks}",
            "trainer.accelerator=cpu",
            "trainer.precision=32",
            "trainer.kto.max_epochs=2",
            "trainer.kto.save_interval=2",
            "trainer.kto.val_check_interval=3",
            f"model.global_batch_size={BATCH}",
            "model.micro_batch_size=2",
            "model.data.seq_length=64",
            "model.optim.lr=5e-4",
            "model.optim.sched.warmup_steps=2",
            "exp_manager.checkpoint_callback_params.save_top_k=1",
            "exp_manager.create_tensorboard_logger=false",
            "export.report=false",
            *self.overrides,
        ]


def make_job(folder: Path) -> Job:
    """A job of two ranks with its model and rows in ``folder``."""
    model = make_checkpoint(
        folder / "model", "llama", num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    rows, validation = make_rows(ROWS), make_rows(4, seed=1)
    return Job(
        model=model, rows=write_rows(folder / "rows.jsonl", rows), validation=write_rows(folder / "val.jsonl", validation)
    )


@dataclass(frozen=True, kw_only=True)
class Crash:
    """What happens to a start of a job, and when.

    Attributes:
        victims: processes that are killed: launcher, rank0, rank1, ...
        point: that the process ``at`` reaches for the ``count``-th time (tests/chaos/hook/sitecustomize.py lists them).
        seconds: after the start of the launcher, in the place of a point; victims are then all there is.
        shell: a command that is run at that moment.
    """

    victims: tuple[str, ...] = ()
    point: str = ""
    count: int = 1
    at: str = "rank0"
    seconds: float = 0.0
    shell: str = ""

    def __str__(self) -> str:
        when = f"{self.point}-{self.count}-at-{self.at}" if self.point else f"{self.seconds:.2f}s"
        return f"{when}-kills-{'+'.join(self.victims)}"

    def environment(self) -> dict[str, str]:
        if not self.point:
            return {}
        order = {"at": self.at, "point": self.point, "count": self.count, "victims": self.victims, "shell": self.shell}
        return {"CHAOS": json.dumps(order)}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a start of the job ended.

    Attributes:
        status: exit status as subprocess gives it.
        output: what the user saw, stdout and stderr.
        fired: what should happen to it did.
        hung: it did not end within the deadline and was killed.
        left_running: processes that outlived the launcher.
        seconds: wall-clock time.
    """

    status: int
    output: str
    fired: bool
    hung: bool
    left_running: list[str]
    seconds: float

    @property
    def last_lines(self) -> str:
        return "\n".join(self.output.splitlines()[-SHOWN_LINES:])


def run(
    job: Job | Sequence[str],
    folder: Path,
    *,
    crash: Crash | None = None,
    name: str = "job",
    deadline: float = DEADLINE,
    forked: bool = True,
) -> Ended:
    """Start the job or command, let ``crash`` happen to it, and wait for its end; concurrent jobs need different names.

    ``forked``: from a process that has the imports, as :func:`start` does; a crash at a point needs it.
    """
    command = job.command(folder) if isinstance(job, Job) else [*job]
    chaos = folder / f"chaos_{name}"  # also the working directory, by which its processes are known
    shutil.rmtree(chaos, ignore_errors=True)
    (chaos / "pids").mkdir(parents=True)
    env = environment(HOOK) | {"CHAOS_FOLDER": str(chaos)} | (crash.environment() if crash else {})
    with (chaos / "output").open("w") as output:
        number = output.fileno()
        process = (
            start(command, cwd=chaos, env=env, output=number, errors=number, preload=TRAINING)
            if forked
            else subprocess.Popen(command, cwd=chaos, env=env, stdout=number, stderr=number)
        )
    began, hung = time.monotonic(), False
    while process.poll() is None and not hung:
        passed = time.monotonic() - began
        if crash is not None and crash.seconds and passed > crash.seconds and not (chaos / "fired").exists():
            (chaos / "fired").touch()
            _kill(_known(chaos, crash.victims).values())
        hung = passed > deadline
        time.sleep(0.005)
    waited = time.monotonic()
    while (left := _running(chaos)) and not hung and time.monotonic() - waited < SECONDS_TO_END:
        time.sleep(0.02)
    _kill(left)
    names = {number: name for name, number in _known(chaos).items()}
    return Ended(
        status=process.wait(timeout=SECONDS_TO_END),
        output=(chaos / "output").read_text(errors="replace"),
        fired=(chaos / "fired").exists(),
        hung=hung,
        left_running=[] if hung else [names.get(number, f"process {number}") for number in left],
        seconds=time.monotonic() - began,
    )


def _known(chaos: Path, names: Sequence[str] = ()) -> dict[str, int]:
    """Names (or only those named) and numbers of the processes that have begun."""
    links = sorted((chaos / "pids").iterdir())
    return {link.name: int(os.readlink(link)) for link in links if not names or link.name in names}


def _kill(numbers: Iterable[int]) -> None:
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def _running(chaos: Path) -> list[int]:
    """Every process that was started in the folder and has not ended, those unknown to the launcher too."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.readlink(f"/proc/{process.pid}/cwd") == str(chaos.resolve()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def metrics(run_folder: Path) -> list[dict[str, float]]:
    """Every logged line but times, to the last bit."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    kept = [
        {name: value for name, value in json.loads(line).items() if name.startswith(("step", "train/", "val/"))}
        for line in lines
    ]
    return [line for line in kept if len(line) > 1]


def files(folder: Path) -> dict[str, bytes]:
    """Content of every file below."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@dataclass(kw_only=True)
class Comparison:
    """Differences between a killed and restarted run and ``whole``, an uninterrupted one.

    Attributes:
        rows_lost, rows_doubled: over all epochs.
        other_losses: a metric of a step differs, so that the run was resumed from a wrong state.
        differences: descriptions of all other differences.
    """

    rows_lost: int = 0
    rows_doubled: int = 0
    other_losses: bool = False
    differences: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.rows_lost or self.rows_doubled or self.differences)


def compare(folder: Path, whole: Path) -> Comparison:
    """Compare losses, rows, exported files, and the contents of the run folder."""
    found = Comparison()
    _compare_losses(folder, whole, found)
    _compare_rows(folder, whole, found)
    if not (folder / "run" / "hf").is_dir():
        found.differences.append("no exported model")
    elif files(folder / "run" / "hf") != files(whole / "run" / "hf"):
        found.differences.append("exported files")
    others = {name for name in _names(folder) - _names(whole) if not _MAY_STAY.fullmatch(name)}
    others |= _names(whole) - _names(folder)
    if others:
        found.differences.append(f"in the run folder: {', '.join(sorted(others))}")
    return found


def _compare_losses(folder: Path, whole: Path, found: Comparison) -> None:
    expected = metrics(whole / "run")
    try:
        ours = metrics(folder / "run")
    except (OSError, ValueError) as error:
        ours = []
        found.differences.append(f"metrics.jsonl cannot be read: {error}")
    if ours != expected:
        found.other_losses = True
        same = next((n for n, (mine, other) in enumerate(zip(ours, expected, strict=False)) if mine != other), len(ours))
        place = f"another one from line {same + 1}"
        found.differences.append(f"metrics.jsonl has {len(ours)} lines for {len(expected)}, {place}")


def _compare_rows(folder: Path, whole: Path, found: Comparison) -> None:
    expected = recorded_rows(whole / "rows")
    try:
        rows = recorded_rows(folder / "rows")
    except (OSError, ValueError) as error:
        rows = {}
        found.differences.append(str(error))
    if rows != expected:
        found.differences.append("rows of a step")
    for first in range(1, len(expected) + 1, STEPS_OF_EPOCH):
        epoch = range(first, first + STEPS_OF_EPOCH)
        used = Counter(row for step in epoch for row in rows.get(step, []))
        due = Counter(row for step in epoch for row in expected[step])
        found.rows_lost += (due - used).total()
        found.rows_doubled += (used - due).total()


def _names(folder: Path) -> set[str]:
    """Contents of the run folder and of its checkpoints folder."""
    places = (folder / "run", folder / "run" / "checkpoints")
    return {str(path.relative_to(folder)) for place in places for path in place.iterdir()}


def assert_resumes(job: Job, folder: Path, whole: Path) -> Ended:
    """The same command once more, by which the run becomes ``whole``."""
    ended = run(job, folder)
    assert (ended.status, ended.hung, ended.left_running) == (0, False, []), ended.output
    found = compare(folder, whole)
    assert found.clean, f"{found}\n{ended.output}"
    return ended


def replace_figures(page: Path, begin: str, figures: str, end: str) -> None:
    """Replace the text of a page between two comments."""
    before, _, rest = page.read_text().partition(begin)
    page.write_text(f"{before}{begin}\n{figures}\n{end}{rest.partition(end)[2]}")
