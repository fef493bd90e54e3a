"""Experiments with the Python interface, the other commands, secrets and full disks; each is run once, with a table.

    python -m tests.chaos.once --page docs/internals/reliability.md [--only NAME]

Each experiment is a real job, notebook or command, and the same call after it. Root and a loopback interface are needed.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.chaos.job import Crash, Ended, Job, compare, files, make_job, replace_figures, run
from tests.chaos.test_disk import FILL, small_disk
from tests.chaos.test_kills import REPORTED
from tests.helpers.commands import CLI
from tests.helpers.hub_server import TOKEN, HubServer
from tests.helpers.megatron_checkpoints import state_dict, write_nemo

# Of a script and of a cell; PLAN is a mapping with the calls, and what happens to the ranks after their third step.
CALLS = """
import os, signal, sys, threading, time
import psutil
import nemo_kto
from nemo_kto.algorithms.callbacks import Callback
from tests.helpers.consumed_rows import RecordRows

class Fault(Callback):
    def on_train_step_end(self, trainer, event):
        note = PLAN["note"] + os.environ["RANK"]
        if event.step == 3 and int(os.environ["RANK"]) in PLAN["ranks"] and not os.path.exists(note):
            open(note, "w").close()
            exec("import os, signal, sys, time; " + PLAN["act"])

def call(rows, settings):
    try:
        nemo_kto.train("kto", callbacks=[RecordRows(folder=rows), Fault()], **settings)
        print("finished")
    except BaseException as error:
        print(type(error).__name__, error)

before = {child.pid for child in psutil.Process().children(recursive=True)}
calls = [threading.Thread(target=call, args=one) for one in PLAN["calls"]]
for each in calls:
    each.start() if PLAN["threads"] else each.run()
for each in calls if PLAN["threads"] else ():
    while each.is_alive():
        try:
            time.sleep(0.1)  # an interrupted join() would declare the thread ended
        except KeyboardInterrupt:
            pass
# W&B's service is a daemon, whose end is awaited by the end of this process
left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
left = [child for child in left if not (child.name().startswith("wandb") and child.status() == psutil.STATUS_ZOMBIE)]
print("left", left)
"""
NOTEBOOK = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(open(sys.argv[1]).read())])
NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
print(*(output.get("text", output) for output in notebook.cells[0].outputs), sep="")
"""
PASSWORD, URI = secrets.token_hex(20), "exp_manager.mlflow_logger_kwargs.tracking_uri"
KEYS = {"WANDB_API_KEY": secrets.token_hex(20), "MLFLOW_TRACKING_PASSWORD": secrets.token_hex(20), "HF_TOKEN": TOKEN}
INTERRUPT = "os.kill(os.getppid(), signal.SIGINT)"


@dataclass(frozen=True, kw_only=True)
class Door:
    """Calls of ``nemo_kto.train``, what a callback does in some ranks, and texts that the first start must print."""

    act: str = ""
    ranks: tuple[int, ...] = ()
    said: tuple[str, ...] = ("finished",)
    folders: tuple[str, ...] = ("one",)
    threads: bool = False
    notebook: bool = False
    overrides: tuple[str, ...] = ()
    resumes: bool = True


DOORS = {
    "called twice in a process": Door(folders=("one", "two", "one"), said=("finished",)),
    "in a thread": Door(threads=True),
    "in two threads, two folders": Door(threads=True, folders=("one", "two"), said=("finished\n", "finished\n")),
    "in two threads, one folder": Door(threads=True, folders=("one", "one"), said=("UserError", "finished")),
    "in a notebook": Door(notebook=True),
    "a callback raises on one rank": Door(
        act="raise ValueError('by it')", ranks=(1,), said=("RuntimeError rank 1", "ValueError: by it")
    ),
    "a callback raises on both ranks": Door(act="raise ValueError('by it')", ranks=(0, 1), said=("ValueError: by it",)),
    "a callback raises in a notebook": Door(
        act="raise ValueError('by it')", ranks=(1,), said=("RuntimeError rank 1", "ValueError: by it"), notebook=True
    ),
    "a callback exits with 0 on one rank": Door(act="sys.exit(0)", ranks=(1,), said=("RuntimeError rank 1",)),
    "a callback exits with 0 on both ranks": Door(act="sys.exit(0)", ranks=(0, 1), said=("RuntimeError rank",)),
    "a callback exits with 3 on one rank": Door(act="sys.exit(3)", ranks=(1,), said=("RuntimeError rank 1",)),
    "a callback calls os._exit(0) on one rank": Door(act="os._exit(0)", ranks=(1,), said=("RuntimeError rank 1",)),
    "a callback calls os._exit(0) on both ranks": Door(act="os._exit(0)", ranks=(0, 1), said=("RuntimeError rank",)),
    "a callback raises KeyboardInterrupt": Door(
        act="raise KeyboardInterrupt", ranks=(1,), said=("RuntimeError rank 1",)
    ),
    "a callback sleeps": Door(
        act="time.sleep(900)", ranks=(1,), said=("RuntimeError", "rank 1", "on_train_step_end"),
        overrides=("trainer.timeout_minutes=1",),
    ),
    "a rank is stopped": Door(
        act="os.kill(os.getpid(), signal.SIGSTOP)", ranks=(1,), said=("RuntimeError", "rank 1"),
        overrides=("trainer.timeout_minutes=1",),
    ),
    "an interrupt": Door(act=INTERRUPT, ranks=(0,), said=("KeyboardInterrupt",)),
    "an interrupt in a notebook": Door(act=INTERRUPT, ranks=(0,), said=("KeyboardInterrupt",), notebook=True),
    "two interrupts": Door(
        act=f"{INTERRUPT}; time.sleep(1); {INTERRUPT}; time.sleep(9)", ranks=(0,), said=("KeyboardInterrupt",)
    ),
    "W&B and MLflow, a callback raises a key": Door(
        act="raise ValueError(os.environ['WANDB_API_KEY'])", ranks=(0,), said=("RuntimeError", "ValueError: ***"),
        overrides=(
            "exp_manager.create_wandb_logger=true", "exp_manager.wandb_logger_kwargs.offline=true",
            "exp_manager.create_mlflow_logger=true", f"exp_manager.wandb_logger_kwargs.group=https://me:{PASSWORD}@host",
        ),
    ),
    "MLflow refuses a password": Door(
        said=("UserError", "mlflow"), resumes=False,
        overrides=("exp_manager.create_mlflow_logger=true", f"{URI}=http://me:{PASSWORD}@127.0.0.1:9"),
    ),
    "an interrupt of the thread that waits": Door(act=INTERRUPT, ranks=(0,), threads=True),
}  # fmt: skip
KILLED = [("export", "export_write", 1), ("export", "export_write", 3), ("export", "export_publish", 1),
          ("export", "export_published", 1), ("import", "export_write", 1), ("import", "export_write", 3),
          ("import", "export_publish", 1), ("import", "export_published", 1), ("report", "report_write", 1),
          ("report", "report_write", 2), ("report", "report_publish", 1), ("report", "report_published", 2)]  # fmt: skip
REQUESTS = 8  # of an upload, at each of which it is killed


@dataclass(kw_only=True)
class Result:
    """An experiment: what was not as required, and whether the same call ended as an undisturbed run."""

    group: str
    name: str
    mistakes: list[str] = field(default_factory=list)
    resumed: bool | None = None  # None: there was nothing to resume
    rows_lost: int = 0
    left: int = 0

    def judge(self, ended: Ended, *said: str, status: int | None = None) -> None:
        """Note a hang, processes left running, another exit status, missing texts, and secrets."""
        self.left += len(ended.left_running)
        wrong = [f"not said: {text}" for text in said if text not in ended.output]
        wrong += ["a hang"] * ended.hung + ended.left_running
        wrong += [f"status {ended.status}"] * (status not in (None, ended.status))
        wrong += [f"shown: {key}" for key in (PASSWORD, *KEYS.values()) if key in ended.output]
        self.mistakes += [f"{wrong}\n{ended.output[-3000:]}"] if wrong else []

    def compare(self, folder: Path, whole: Path, *, logs: bool = False) -> None:
        compared = compare(folder, whole)
        self.rows_lost += compared.rows_lost
        self.hold([text for text in compared.differences if not (logs and text.startswith("in the run folder"))])

    def hold(self, differences: Sequence[str]) -> None:
        self.resumed = not differences and self.resumed is not False
        self.mistakes += differences


def call_of(job: Job, folder: Path) -> tuple[str, dict[str, Any]]:
    """The folder of a call's recorded rows, and its arguments."""
    words = [word.partition("=") for word in job.command(folder)[2:] if not word.startswith("trainer.callbacks")]
    settings: dict[str, Any] = {key: yaml.safe_load(value) for key, _, value in words}
    settings |= {"model": settings.pop("pretrained_checkpoint.restore_from_path"), "model.optim.lr": 5e-4}
    return str(folder / "rows"), settings | {"data": settings.pop("model.data.data_prefix")}


def python(job: Job, whole: Path, place: Path, name: str) -> Result:
    """Calls of ``nemo_kto.train``, and the same again."""
    door, result = DOORS[name], Result(group="Python interface", name=name)
    calls = [call_of(replace(job, overrides=job.overrides + door.overrides), place / folder) for folder in door.folders]
    plan = {"calls": calls, "threads": door.threads, "act": door.act, "ranks": door.ranks, "note": str(place / "note")}
    script = place / "script.py"
    place.mkdir()
    script.write_text(f"PLAN = {plan!r}\n{CALLS}")
    command = [sys.executable, *(["-c", NOTEBOOK] if door.notebook else []), str(script)]
    result.judge(run(command, place, deadline=300, forked=not door.notebook), *door.said, "left []", status=0)
    if door.act and not door.threads:
        result.judge(run(command, place, deadline=300, forked=not door.notebook), "finished", "left []", status=0)
    script.unlink()
    for folder in sorted({*door.folders}) if door.resumes else ():
        result.compare(place / folder, whole, logs=bool(door.overrides))
    return result


def written(place: Path) -> dict[str, bytes]:
    """The files of the run folder without the lock and the time in a report, whose drawings have random names."""
    found = {name: text for name, text in files(place / "run").items() if not name.startswith(".hf.lock")}
    return {name: b"" if name == "report.html" else re.sub(rb"Written by .*", b"", text) for name, text in found.items()}


def command_of(kind: str, job: Job, whole: Path, place: Path) -> list[str]:
    """A command that works on a new copy of a run."""
    shutil.rmtree(place / "run", ignore_errors=True)
    shutil.copytree(
        whole / "run",
        place / "run",
        ignore=lambda folder, _: {"hf", "report.html"} if folder.endswith("/run") else set(),
        dirs_exist_ok=True,
    )
    source = whole.parent / "model.nemo" if kind == "import" else place / "run"
    options = ["--tokenizer", str(job.model)] if kind == "import" else []
    return [*CLI, kind, str(source), *([] if kind == "report" else [str(place / "run" / "hf")]), *options]


def kill_command(job: Job, whole: Path, place: Path, name: str) -> Result:
    """A command is killed, and started again."""
    kind, point, count = name.split()
    result = Result(group=f"kills of {kind}", name=name)
    result.judge(run(command_of(kind, job, whole, place), place), status=0)
    expected, command = written(place), command_of(kind, job, whole, place)
    ended = run(command, place, crash=Crash(victims=("launcher",), point=point, count=int(count), at="launcher"))
    result.judge(ended)
    result.mistakes += [] if ended.fired else ["never happened"]
    result.judge(run(command, place), status=0)
    found = written(place)
    result.hold([text for text in {*expected, *found} if expected.get(text) != found.get(text)])
    return result


class Killing(list[tuple[str, str]]):
    """The requests to the hub, at one of which the process that sends them is killed."""

    def __init__(self, chaos: Path, at: int) -> None:
        super().__init__()
        self.chaos, self.at = chaos, at

    def append(self, request: tuple[str, str]) -> None:
        super().append(request)
        if len(self) == self.at:
            os.kill(int(os.readlink(self.chaos / "pids" / "launcher")), signal.SIGKILL)


def kill_upload(hub: HubServer, whole: Path, place: Path, name: str) -> Result:
    at, result = int(name.split()[1]), Result(group="kills of an upload", name=name)
    command = [*CLI, "export", str(whole / "run"), "--push", f"hf:me/trial{at}"]
    hub.requests = Killing(place / "chaos_job", at)
    result.judge(run(command, place), status=-9)
    hub.requests = []
    result.judge(run(command, place), status=0)
    sent = hub.files(f"me/trial{at}")
    own = {file: text for file, text in files(whole / "run" / "hf").items() if file != "README.md"}
    result.hold([file for file, text in own.items() if sent.get(file) != text])
    return result


def full_disk(job: Job, whole: Path, place: Path, name: str) -> Result:
    """A disk is full at the end of a run, or during a command."""
    kind, result = name.partition(",")[0], Result(group="full disks", name=name)
    with small_disk(place / "run"):
        fill = FILL.format(folder=place / "run", left=0)
        if kind == "run":
            result.judge(run(job, place, crash=Crash(point="report_write", shell=fill)), "No space left", status=0)
            command: Job | list[str] = job
        else:
            command = command_of(kind, job, whole, place)
            before = written(place)
            subprocess.run(fill, shell=True, check=True)
            result.judge(run(command, place), str(place / "run"), status=2)
            result.mistakes += [] if {*written(place)} - {*before} == {"filler"} else ["files of a command that failed"]
        (place / "run" / "filler").unlink()
        result.judge(run(command, place), status=0)
        if kind == "run":
            result.compare(place, whole)
        else:
            result.hold([] if len(written(place)) > len(before) else ["nothing was written"])
    return result


def experiments(job: Job, whole: Path, hub: HubServer) -> dict[str, Callable[[Path, str], Result]]:
    return {
        **dict.fromkeys((f"upload {number}" for number in range(1, REQUESTS + 1)), partial(kill_upload, hub, whole)),
        **dict.fromkeys((f"{kind} {point} {count}" for kind, point, count in KILLED), partial(kill_command, job, whole)),
        **dict.fromkeys(("report, full disk", "export, full disk", "run, full disk"), partial(full_disk, job, whole)),
        **dict.fromkeys(DOORS, partial(python, job, whole)),
    }


def table(results: Sequence[Result], secrets_found: Sequence[str]) -> str:
    lines = [
        f"Run on {date.today().isoformat()}; secrets in files: {len(secrets_found)}.", "",
        "| experiments | number | as required | ended as an undisturbed run | rows lost | processes left running |",
        "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for group in dict.fromkeys(result.group for result in results):
        those = [result for result in results if result.group == group]
        held, due = sum(not result.mistakes for result in those), [each for each in those if each.resumed is not None]
        same = f"{sum(bool(each.resumed) for each in due)} of {len(due)}"
        lost, left = sum(each.rows_lost for each in those), sum(each.left for each in those)
        lines.append(f"| {group} | {len(those)} | {held} | {same} | {lost} | {left} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="page whose figures are replaced")
    parser.add_argument("--only", default="", help="expression for the names of experiments")
    args = parser.parse_args()
    folder, results = Path(tempfile.mkdtemp(prefix="once_")), list[Result]()
    with HubServer() as hub:
        os.environ.update({**KEYS, "HOME": str(folder / "home"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"})
        job, whole = replace(make_job(folder / "job"), overrides=REPORTED), folder / "whole"
        (folder / "nemo").mkdir()
        torch.save(state_dict(job.model), folder / "nemo" / "model_weights.ckpt")
        write_nemo(job.model, folder / "nemo" / "model_weights.ckpt", folder / "model.nemo")
        if (ended := run(job, whole)).status != 0:
            raise RuntimeError(ended.output)
        for number, (name, function) in enumerate(experiments(job, whole, hub).items()):
            if re.match(args.only, name):
                results.append(function(folder / f"trial_{number}", name))
                print(f"{name}: {'; '.join(results[-1].mistakes) or 'as required'}", flush=True)
    hidden = [text.encode() for text in (PASSWORD, *KEYS.values())]
    found = [str(file) for file in folder.rglob("*") if file.is_file() and any(key in file.read_bytes() for key in hidden)]
    print(table(results, found), *found, sep="\n")
    if args.page is not None:
        begin, end = "<!-- figures: python -m tests.chaos.once -->", "<!-- end of these figures -->"
        replace_figures(args.page, begin, table(results, found), end)
    return int(bool(found) or any(result.mistakes for result in results))


if __name__ == "__main__":
    sys.exit(main())
