"""How long a file of rows takes to tokenise, in one process and in several, and how much memory; side by side.

    python benchmarks/tokenise.py --model FOLDER [--rows 1000000] [--workers 1 2] [--repeats 3] [--messages]
    python benchmarks/tokenise.py --check [--rows 1000000]       the command `nemo-kto data check` on the same file

The rows are short: about ten words each for prompt and answer. The processes take turns, and the best time of each counts,
so that what else the machine does matters less.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent


def write_rows(file: Path, count: int, *, messages: bool) -> None:
    """Rows of words with the frequencies of a language: few are common, most are rare. One of a hundred is a repetition."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlucmfwypvbgkq", k=draw.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    text = draw.choices(words, weights, k=2_000_000)
    with file.open("w", encoding="utf-8") as lines:
        for number in range(count):
            start = draw.randrange(len(text) - 50) if number % 100 else 0
            prompt, answer = " ".join(text[start : start + 10]), " ".join(text[start + 10 : start + draw.randint(16, 30)])
            row: dict[str, object] = {"prompt": prompt, "response": " " + answer}
            if messages:
                row = {"prompt": [{"role": "user", "content": prompt}], "completion": answer}
            lines.write(json.dumps({**row, "label": draw.random() < 0.5}) + "\n")


def peak_mib(processes: int) -> float:
    """The peak of this process and, for each of the others, that of the largest; what they share counts for each."""
    import resource

    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (processes if processes > 1 else 0)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + children) / 2**10


def tokenise(model: Path, file: Path, folder: Path, workers: int) -> None:
    """One measurement, in a process of its own; prints seconds, MiB, seconds of CPU time and rows."""
    from nemo_kto.data.rows.reader import Fields, RowErrors
    from nemo_kto.data.tokens.cache import KTO_EXAMPLES, TokenCache
    from nemo_kto.data.tokens.chat import RecordEncoder, load_tokenizer
    from nemo_kto.data.tokens.truncation import Truncation

    encoder = RecordEncoder(tokenizer=load_tokenizer(model))
    cache = TokenCache(
        kind=KTO_EXAMPLES,
        folder=folder,
        fields=Fields(),
        encoder=encoder,
        truncation=Truncation(2048, "keep_end", encoder.bos_id),
        preprocess_workers=workers,
    )
    broken = RowErrors()
    began = time.monotonic()
    table, _ = cache.open([file], broken=broken)[file]
    seconds = time.monotonic() - began
    broken.raise_if_any()
    assert table is not None
    print(seconds, peak_mib(workers), sum(os.times()[:4]), len(table))


def measure(arguments: argparse.Namespace, file: Path, scratch: Path, workers: int) -> tuple[float, float, float, int]:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        command = [sys.executable, __file__, "--model", str(arguments.model), "--measure", str(file), folder, str(workers)]
        environment = {**os.environ, "PYTHONPATH": str(HERE)}
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    seconds, memory, cpu, rows = done.stdout.split()
    return float(seconds), float(memory), float(cpu), int(rows)


def check(file: Path) -> None:
    """Time and memory of `nemo-kto data check`."""
    import resource

    began = time.monotonic()
    command = [sys.executable, "-m", "nemo_kto.cli.main", "data", "check", str(file)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(HERE)}, check=True, stdout=subprocess.DEVNULL)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"data check: {time.monotonic() - began:.1f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU time, "
        f"{used.ru_maxrss / 2**10:.0f} MiB in the largest process"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long rows take to tokenise.")
    parser.add_argument("--model", type=Path, help="folder with a tokenizer")
    parser.add_argument("--check", action="store_true", help="measure `nemo-kto data check` instead")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="processes; the first is compared with")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--messages", action="store_true", help="rows of messages, which go through the chat template")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model is None and not arguments.check:
        parser.error("--model must name a folder with a tokenizer, got none")
    if arguments.measure:
        file, folder, workers = arguments.measure
        tokenise(arguments.model, Path(file), Path(folder), int(workers))
        return
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        write_rows(scratch / "rows.jsonl", arguments.rows, messages=arguments.messages)
        if arguments.check:
            check(scratch / "rows.jsonl")
            return
        best: dict[int, tuple[float, float, float, int]] = {}
        for _ in range(arguments.repeats):
            for workers in arguments.workers:
                found = measure(arguments, scratch / "rows.jsonl", scratch, workers)
                best[workers] = min(found, best.get(workers, found))
        size = (scratch / "rows.jsonl").stat().st_size / 2**20
    first = best[arguments.workers[0]][0]
    for workers, (seconds, memory, cpu, rows) in best.items():
        print(
            f"{workers} process{'es' * (workers > 1)}: {rows} rows ({size:.0f} MiB) in {seconds:.1f} s, "
            f"{first / seconds:.2f} times as fast, {cpu:.0f} s of CPU time, at most {memory:.0f} MiB"
        )


if __name__ == "__main__":
    main()
