"""Rounds of KTO on a model's own answers: sample, label by a function, train, export, and again from the export.

    python examples/rounds/run.py MODEL PROMPTS --score package.function --rounds 3 [--out runs/rounds] [KEY=VALUE ...]

Round N is the folder OUT/N: answers.jsonl, thumbs.jsonl, and the run with its export in OUT/N/run. Start the same command
again after it was stopped or killed, in any phase: each command continues its own file or run, and finished ones change
nothing.

KEY=VALUE are keys of the training. The reference is the model that each round starts from, or with --reference first, MODEL.
Words after --sample are options of `nemo-kto sample`, such as --sample '-n 8 --max-new-tokens 64'.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path


def nemo_kto(*words: object) -> None:
    """Run a command of nemo_kto, which is printed; end with its status if it fails."""
    arguments = [str(word) for word in words]
    print(f"\n$ nemo-kto {shlex.join(arguments)}", flush=True)
    if status := subprocess.run([sys.executable, "-m", "nemo_kto.cli.main", *arguments], check=False).returncode:
        raise SystemExit(status)


def good_share(thumbs: Path) -> float:
    """The share of good answers."""
    labels = [json.loads(line)["label"] for line in thumbs.read_text(encoding="utf-8").split("\n") if line]
    return sum(labels) / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the model of the first round")
    parser.add_argument("prompts", help="a file of prompts, as for nemo-kto sample")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the training")
    parser.add_argument("--score", required=True, metavar="MODULE.FUNCTION", help="as for nemo-kto label")
    parser.add_argument("--threshold", metavar="X", help="as for nemo-kto label")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="number of rounds (3)")
    parser.add_argument("--reference", choices=("first", "last"), default="last", help="model of the reference (last)")
    parser.add_argument("--sample", type=shlex.split, default=[], metavar="OPTIONS", help="options of nemo-kto sample")
    parser.add_argument("--out", type=Path, default=Path("runs/rounds"), help="folder of the rounds (runs/rounds)")
    flags = parser.parse_intermixed_args()
    threshold = [] if flags.threshold is None else ["--threshold", flags.threshold]
    model, shares = flags.model, []
    for number in range(1, flags.rounds + 1):
        folder = flags.out / str(number)
        answers, thumbs, run = (folder / name for name in ("answers.jsonl", "thumbs.jsonl", "run"))
        nemo_kto("sample", model, flags.prompts, "--out", answers, "--seed", number, *flags.sample)
        nemo_kto("label", answers, "--out", thumbs, "--score", flags.score, *threshold, "--round", number)
        shares.append(good_share(thumbs))
        first = number > 1 and flags.reference == "first"
        reference = [f"model.reference.restore_from_path={flags.model}"] if first else []
        nemo_kto("kto", model, thumbs, f"exp_manager.explicit_log_dir={run}", *reference, *flags.overrides)
        model = run / "hf"
    print("\nround  good answers of the model that it started from")
    for number, share in enumerate(shares, start=1):
        print(f"{number:5}  {share:.1%}")
    runs = shlex.join(str(flags.out / str(number) / "run") for number in range(1, flags.rounds + 1))
    print(f"\nlast model  {model}\nreport      nemo-kto report {runs}")


if __name__ == "__main__":
    main()
