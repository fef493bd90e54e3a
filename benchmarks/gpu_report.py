"""`make gpu`: what a GPU can tell in ten minutes, a line of JSON for each measurement, and the page drawn from the lines.

    python benchmarks/gpu_report.py [--step NAME] [--minutes M] [--trl-python PYTHON] [--folder FOLDER] [--fresh]
    python benchmarks/gpu_report.py --page FILE.jsonl    draw the page again
    python benchmarks/gpu_report.py --toy --folder FOLDER    tiny models, on the CPU too: a test of this program

The steps run in the order of STEPS, each a program with a limit. A run that was stopped continues where it was: a
measurement is made again only if it failed, or if sources or versions have changed (--fresh: all). The lines are in
FOLDER/DEVICE.jsonl; FOLDER/DEVICE.md is written after each step.

The interpreter needs this repository's test packages. Where something is missing (TRL, Transformer Engine, a second GPU),
the page says so. The status is 1 if a measurement or a test failed or is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.gpu_lines import END, HEADER, Lines  # noqa: E402
from benchmarks.gpu_tables import failures, page  # noqa: E402
from benchmarks.gpu_versions import NO_GPU, USAGE_ERROR, gpu_count, versions  # noqa: E402


def key_of(found: dict[str, str]) -> str:
    """Return what measurements must share to be on one page: all versions but the commit's name, which is in the header."""
    return hashlib.sha256(json.dumps({**found, "commit": ""}, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A program of `make gpu`.

    Attributes:
        seconds: after which it is stopped, at its own speed it needs about two thirds of them.
        command: its words after the interpreter, with {lines}, {key}, {folder} (of the model) and {toy}.
        model: of benchmarks/gpu_models.py, written before it starts.
        by_trl: its interpreter is the one that has TRL.
    """

    seconds: float
    command: tuple[str, ...]
    model: str | None = None
    by_trl: bool = False


_OURS = ("benchmarks/gpu_ours.py", "{step}", "{lines}", "{key}", "--folder", "{folder}", "{toy}")
_TESTS = ("-m", "pytest", "-q", "-p", "benchmarks.gpu_tests", "--lines", "{lines}", "--key", "{key}", "--matrix=full")
STEPS = {
    "machine": Step(seconds=60, command=("benchmarks/gpu_kernels.py", "machine", "{lines}", "{key}", "{toy}")),
    "kernels": Step(seconds=90, command=("benchmarks/gpu_kernels.py", "kernels", "{lines}", "{key}", "{toy}")),
    "llama-1b": Step(seconds=150, command=_OURS, model="llama-1b"),
    "qwen-7b": Step(seconds=110, command=_OURS, model="qwen-7b"),
    "trl": Step(
        seconds=100,
        command=("benchmarks/gpu_trl.py", "{lines}", "{key}", "--folder", "{folder}", "{toy}"),
        model="llama-1b",
        by_trl=True,
    ),
    "tests": Step(seconds=400, command=(*_TESTS, "-n", "{workers}", "tests/gpu")),
}
WORKERS = 14  # processes with tests on one GPU, at most one for a processor


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Runs steps on this machine.

    Attributes:
        scratch: folder of the models, in memory if there is room.
        deadline: by time.monotonic(); no step runs longer.
    """

    lines: Lines
    scratch: Path
    trl_python: str
    deadline: float
    toy: bool

    def run(self, name: str) -> None:
        """Run a step to its end or its limit; the measurements are lines, and so is how it ended."""
        step, began = STEPS[name], time.monotonic()
        if self.lines.of(name).get(END, {}).get("status") == 0:
            return
        status: int | str = "no time was left"
        if self.deadline - began > 10:
            try:
                if step.model is not None:
                    toy = ["--toy"] * self.toy
                    self._execute(
                        [sys.executable, "benchmarks/gpu_models.py", step.model, str(self.scratch / step.model), *toy]
                    )
                status = self._execute(
                    self._command(name, step), seconds=min(step.seconds, self.deadline - time.monotonic())
                )
            except subprocess.TimeoutExpired:
                status = "stopped at its limit"
        self.lines.append(name, END, {"status": status, "seconds": round(time.monotonic() - began, 1)})

    def _command(self, name: str, step: Step) -> list[str]:
        workers = min(WORKERS, len(os.sched_getaffinity(0)))
        values = {"step": name, "lines": str(self.lines.file.resolve()), "key": self.lines.key, "workers": str(workers)}
        values |= {"folder": str(self.scratch / (step.model or "")), "toy": "--toy" if self.toy else ""}
        words = [word for word in (each.format(**values) for each in step.command) if word]
        sample = ["-k", "uploaded or exact"] if self.toy and name == "tests" else []
        return [self.trl_python if step.by_trl else sys.executable, *words, *sample]

    def _execute(self, command: list[str], *, seconds: float | None = None) -> int:
        """Run a program of the repository in a session of its own, which ends with it."""
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment(), start_new_session=True)
        try:
            return process.wait(seconds)
        finally:
            interrupt(process)


def environment() -> dict[str, str]:
    """Return the environment of the steps: quiet, without a network, and with this checkout's package."""
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    quiet |= {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **quiet, "PYTHONPATH": path}


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started; it has ten seconds for its own end."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def scratch_folder() -> Path | None:
    """Return a folder in memory with room for a model of 7B, or None for the default of temporary files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 24e9 else None


def slug(device: str) -> str:
    """A device's name as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", device.split(" x ")[-1].split(",")[0].lower()).strip("-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, metavar="FILE.jsonl", help="draw the page of these lines, and run nothing")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="make all measurements again")
    parser.add_argument("--step", choices=STEPS, action="append", help="run this one; may be given again; default: all")
    parser.add_argument("--minutes", type=float, default=12.0, help="after which nothing runs; default: %(default)s")
    parser.add_argument("--trl-python", default=sys.executable, help="the interpreter that has the TRL to compare with")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "docs" / "gpu", help="of DEVICE.md and DEVICE.jsonl")
    arguments = parser.parse_args()
    if arguments.page is not None:
        arguments.page.with_suffix(".md").write_text(page(arguments.page))
        return
    if not arguments.toy and not gpu_count():
        print(NO_GPU, file=sys.stderr)
        sys.exit(USAGE_ERROR)
    import torch

    if not arguments.toy and not torch.cuda.is_available():
        built = f"torch {torch.__version__} of {sys.executable}, built for CUDA {torch.version.cuda}"
        print(f"make gpu: torch must be able to use the GPU, got {built}; install one for this driver", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    deadline = time.monotonic() + 60 * arguments.minutes
    found = versions(arguments.trl_python)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / f"{slug(found['device'])}.jsonl"
    if arguments.fresh:
        file.unlink(missing_ok=True)
    lines = Lines(file=file, key=key_of(found))
    lines.append(HEADER, HEADER, {"date": time.strftime("%Y-%m-%d"), **found})
    with tempfile.TemporaryDirectory(dir=scratch_folder()) as scratch:
        bench = Bench(
            lines=lines, scratch=Path(scratch), trl_python=arguments.trl_python, deadline=deadline, toy=arguments.toy
        )
        for name in arguments.step or STEPS:
            bench.run(name)
            file.with_suffix(".md").write_text(page(file))
    wrong = failures(lines, tuple(arguments.step or STEPS))
    print("\n".join(["", *wrong, f"written: {file.with_suffix('.md')}"]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
