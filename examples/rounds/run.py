"""Rounds of KTO on a model's own answers: sample, label by a function, train, export, and again from the export.

    python examples/rounds/run.py MODEL PROMPTS --score package.function --rounds 3 [--out runs/rounds] [KEY=VALUE ...]

Round N is the folder OUT/N: answers.jsonl and thumbs.jsonl of the model that it starts from, and the run with its export in
OUT/N/run. The last folder has the answers of the last model. Each model is compared with MODEL, by the answers of both, and
OUT/report.html shows all runs: win rates, AUC, lengths, KL. Start the same command again after it was stopped or killed, in
any phase: each command continues its own file or run, and finished ones change nothing.

KEY=VALUE are keys of the training. The reference is the model that each round starts from, or with --reference first, MODEL.
Words after --sample are options of `nemo-kto sample`, such as --sample '-n 8 --max-new-tokens 64'.

A server samples faster. --serve starts it for the model of each round, and stops it before the training:

    --serve 'vllm serve {model} --port 8000' --endpoint http://localhost:8000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean


def nemo_kto(*words: object) -> None:
    """Run a command of nemo_kto, which is printed; end with its status if it fails."""
    arguments = [str(word) for word in words]
    print(f"\n$ nemo-kto {shlex.join(arguments)}", flush=True)
    if status := subprocess.run([sys.executable, "-m", "nemo_kto.cli.main", *arguments], check=False).returncode:
        raise SystemExit(status)


def is_ready(url: str) -> bool:
    """Return whether a server answers at the path that vLLM, SGLang and transformers have for it."""
    try:
        with urllib.request.urlopen(url.rstrip("/").removesuffix("/v1") + "/health", timeout=10) as reply:  # nosec B310
            return bool(reply.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def serving(command: str, url: str, model: str) -> Iterator[None]:
    """Run a server of a model until the block ends."""
    if is_ready(url):
        raise SystemExit(f"--endpoint must be free for the server of each model, got {url}, where one answers; stop that")
    words = [word.replace("{model}", model) for word in shlex.split(command)]
    print(f"\n$ {shlex.join(words)}", flush=True)
    with subprocess.Popen(words) as server:
        try:
            while not is_ready(url):
                if (status := server.poll()) is not None:
                    raise SystemExit(f"--serve must be a server, got a command that ended with status {status}; correct it")
                time.sleep(1)
            yield
        finally:
            server.terminate()


def good_share(thumbs: Path) -> float:
    """Return the share of good answers."""
    labels = [json.loads(line)["label"] for line in thumbs.read_text(encoding="utf-8").split("\n") if line]
    return fmean(labels)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the model of the first round")
    parser.add_argument("prompts", help="a file of prompts, as for nemo-kto sample")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the training")
    parser.add_argument("--score", required=True, metavar="MODULE.FUNCTION", help="as for nemo-kto label")
    parser.add_argument("--threshold", metavar="X", help="as for nemo-kto label")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="number of rounds (3)")
    parser.add_argument("--reference", choices=("first", "last"), default="last", help="model of the reference (last)")
    parser.add_argument("--sample", type=shlex.split, default=[], metavar="OPTIONS", help="options of nemo-kto sample")
    parser.add_argument("--serve", metavar="COMMAND", help="start a server of {model} with OpenAI's interface")
    parser.add_argument("--endpoint", metavar="URL", help="address of that server")
    parser.add_argument("--out", type=Path, default=Path("runs/rounds"), help="folder of the rounds (runs/rounds)")
    flags = parser.parse_intermixed_args()
    if (flags.serve is None) != (flags.endpoint is None):
        parser.error("--serve and --endpoint must be given together, got one of them; add the other")
    return flags


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a server is stopped, too
    flags = parse()
    threshold = [] if flags.threshold is None else ["--threshold", flags.threshold]
    model, first_answers = flags.model, flags.out / "1" / "answers.jsonl"
    shares, runs = list[float](), list[Path]()
    for number in range(1, flags.rounds + 2):
        folder = flags.out / str(number)
        answers, thumbs, run = (folder / name for name in ("answers.jsonl", "thumbs.jsonl", "run"))
        sampling = [flags.prompts, "--out", answers, "--seed", number, *flags.sample]
        if flags.serve is None:
            nemo_kto("sample", model, *sampling)
        elif not thumbs.is_file():  # the answers are complete before the first label
            with serving(flags.serve, flags.endpoint, model):
                nemo_kto("sample", *sampling, "--endpoint", flags.endpoint, "--model", model)
        nemo_kto("label", answers, "--out", thumbs, "--score", flags.score, *threshold, "--round", number)
        shares.append(good_share(thumbs))
        if runs:
            about = ["--score", flags.score, "--out", folder / "comparison.jsonl", "--run", runs[-1]]
            nemo_kto("compare", answers, first_answers, *about)
        if number <= flags.rounds:
            first = number > 1 and flags.reference == "first"
            reference = [f"model.reference.restore_from_path={flags.model}"] if first else []
            nemo_kto("kto", model, thumbs, f"exp_manager.explicit_log_dir={run}", *reference, *flags.overrides)
            model = str(run / "hf")
            runs.append(run)
    nemo_kto("report", *runs, "--out", flags.out / "report.html")
    print("\nafter round  good answers")
    for number, share in enumerate(shares):
        print(f"{number:11}  {share:.1%}")
    print(f"\nlast model  {model}\nreport      {flags.out / 'report.html'}")


if __name__ == "__main__":
    main()
