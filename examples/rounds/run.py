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

It also ends when this script is killed (on Linux), and must be ready within --ready-minutes; a shell script must `exec` it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
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
from urllib.parse import urlsplit

from nemo_kto.redaction import redacted

REPORT_SECONDS = 10  # between two lines about a server that is not ready
STOP_SECONDS = 60  # for a server to end, before it is killed
PR_SET_PDEATHSIG = 1  # option of prctl(2)


def nemo_kto(*words: object) -> None:
    """Run a command of nemo_kto, which is printed; end with its status if it fails."""
    arguments = [str(word) for word in words]
    print(redacted(f"\n$ nemo-kto {shlex.join(arguments)}"), flush=True)
    if status := subprocess.run([sys.executable, "-m", "nemo_kto.cli.main", *arguments], check=False).returncode:
        raise SystemExit(status)


def is_ready(url: str) -> bool:
    """Return whether a server answers at the path that vLLM, SGLang and transformers have for it."""
    try:
        with urllib.request.urlopen(url.rstrip("/").removesuffix("/v1") + "/health", timeout=10) as reply:  # nosec B310
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def end_with_script() -> None:
    """Let this process, which becomes the server, end when the script ends in any way, also by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def wait_until_ready(server: subprocess.Popen[bytes], url: str, minutes: float) -> None:
    """Wait for a server; end with an error if it ends, or is not ready in time."""
    began = reported = time.monotonic()
    while not is_ready(url):
        now = time.monotonic()
        if (status := server.poll()) is not None:
            raise SystemExit(f"--serve must be a server, got a command that ended with status {status}; correct it")
        if now - began >= minutes * 60:
            got = f"got none at {redacted(url)}"
            text = f"--serve must start a server that is ready within {minutes:g} minutes, {got}"
            raise SystemExit(f"{text}; correct --serve or --endpoint, or raise --ready-minutes")
        if now - reported >= REPORT_SECONDS:
            reported = now
            print(f"waiting for the server for {now - began:.0f} s", file=sys.stderr, flush=True)
        time.sleep(1)


@contextlib.contextmanager
def serving(command: list[str], url: str, model: str, minutes: float) -> Iterator[None]:
    """Run a server of a model until the block ends."""
    if is_ready(url):
        raise SystemExit(f"--endpoint must be free for the server of each model, got {url}, where one answers; stop that")
    words = [word.replace("{model}", model) for word in command]
    print(redacted(f"\n$ {shlex.join(words)}"), flush=True)
    try:
        server = subprocess.Popen(words, preexec_fn=end_with_script)
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"--serve must be a command that can be started, got {words[0]}: {error}; correct it") from None
    try:
        wait_until_ready(server, url, minutes)
        yield
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def good_share(thumbs: Path) -> float:
    """Return the share of good answers."""
    labels = [json.loads(line)["label"] for line in thumbs.read_text(encoding="utf-8").split("\n") if line]
    return fmean(labels)


def command_words(text: str) -> list[str]:
    """Return the words of a command; for argparse."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be words of a shell, got {text} ({error}); close the quote") from None


def server_url(text: str) -> str:
    """Return the address of a server; for argparse."""
    with contextlib.suppress(ValueError):  # of a host or port that is none
        url = urlsplit(text)
        if url.scheme in ("http", "https") and (url.hostname or "").encode("idna") and url.port != 0:
            return text
    raise argparse.ArgumentTypeError(f"must be a URL, got {redacted(text) or 'nothing'}; e.g. http://localhost:8000")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the model of the first round")
    parser.add_argument("prompts", help="a file of prompts, as for nemo-kto sample")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the training")
    parser.add_argument("--score", required=True, metavar="MODULE.FUNCTION", help="as for nemo-kto label")
    parser.add_argument("--threshold", metavar="X", help="as for nemo-kto label")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="number of rounds (3)")
    parser.add_argument("--reference", choices=("first", "last"), default="last", help="model of the reference (last)")
    parser.add_argument("--sample", type=command_words, default=[], metavar="OPTIONS", help="options of nemo-kto sample")
    serve = "start a server of {model} with OpenAI's interface"
    parser.add_argument("--serve", type=command_words, metavar="COMMAND", help=serve)
    parser.add_argument("--endpoint", type=server_url, metavar="URL", help="address of that server")
    ready = "minutes within which the server must be ready (30)"
    parser.add_argument("--ready-minutes", type=float, default=30, metavar="N", help=ready)
    parser.add_argument("--out", type=Path, default=Path("runs/rounds"), help="folder of the rounds (runs/rounds)")
    flags = parser.parse_intermixed_args()
    if (flags.serve is None) != (flags.endpoint is None):
        parser.error("--serve and --endpoint must be given together, got one of them; add the other")
    if flags.serve == []:
        parser.error("--serve must be a command, got nothing; e.g. --serve 'vllm serve {model} --port 8000'")
    return flags


def main() -> None:
    for ending in (signal.SIGTERM, signal.SIGHUP):  # so that a server is stopped, too
        if signal.getsignal(ending) is not signal.SIG_IGN:  # as SIGHUP under nohup
            signal.signal(ending, lambda number, _: sys.exit(128 + number))
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
            with serving(flags.serve, flags.endpoint, model, flags.ready_minutes):
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
