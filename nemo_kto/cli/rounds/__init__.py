"""Commands around the answers of a model: `nemo-kto sample`, `label` and `compare`; options that several of them have."""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_kto.cli import integer_from
from nemo_kto.errors import UserError, plural
from nemo_kto.utils.text import print_error

if TYPE_CHECKING:
    from nemo_kto.rounds.labelling import Question
    from nemo_kto.rounds.scoring import Judge

CONCURRENCY = 8  # default of the requests to a server at the same time


def add_deciders(parser: argparse.ArgumentParser) -> None:
    """Add the options of a function that scores, and of a model that judges."""
    score = "a function of the prompt (a text or messages) and the answer, which returns a number or a bool"
    parser.add_argument("--score", metavar="MODULE.FUNCTION", help=score)
    parser.add_argument("--judge", metavar="URL", help="a server with OpenAI's interface, whose model judges")
    parser.add_argument("--rubric", metavar="FILE", help="what the model must look for, as text")
    parser.add_argument("--model", metavar="NAME", help="name of the model for the server; not needed if it has only one")
    concurrency = f"requests to the server at the same time ({CONCURRENCY})"
    parser.add_argument("--concurrency", type=integer_from(1), default=CONCURRENCY, metavar="N", help=concurrency)


def judge_mistakes(flags: argparse.Namespace) -> Iterator[str]:
    """Yield the mistakes in the options of a model that judges."""
    for name in ("rubric", "model"):
        if getattr(flags, name) is not None and flags.judge is None:
            yield f"--{name} must be used with --judge, got {getattr(flags, name)} without it; leave it out"
    if flags.judge is not None and flags.rubric is None:
        yield "--rubric must be given with --judge, got none; write a file that says what a good answer is"


def read_rubric(path: str) -> str:
    """Return the text of a rubric; UserError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--rubric must be a file of text in UTF-8, got {path}: {error}; correct the path") from error


def rubric_hash(rubric: str) -> str:
    """Return the hash of a rubric, for the rows of a file."""
    return f"{zlib.crc32(rubric.encode()):08x}"


def make_judge(flags: argparse.Namespace, rubric: str) -> Judge:
    """Return the judge of the options; UserError if its server cannot be used."""
    from nemo_kto.rounds.endpoint import Endpoint
    from nemo_kto.rounds.scoring import Judge

    endpoint = Endpoint(url=flags.judge, option="--judge", model=flags.model, concurrency=flags.concurrency)
    return Judge(endpoint=endpoint, rubric=rubric)


def report_undecided(command: str, questions: Sequence[Question], undecided: Mapping[str, str], noun: str) -> None:
    """Print the number of questions without a verdict, and the reason of the first; ``undecided``: key -> reason."""
    if undecided:
        first = next(question for question in questions if question.key in undecided)
        count = f"{plural(len(undecided), noun)} without a verdict"
        place = f"the first at {first.answers[0].place}: {undecided[first.key]}"
        print_error(f"nemo-kto {command}: {count}, {place}; they are left out")
