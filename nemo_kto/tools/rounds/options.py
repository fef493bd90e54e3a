"""Commands around the answers of a model: `nemo-kto sample`, `label` and `compare`; options that several of them have."""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nemo_kto.cli import integer_from
from nemo_kto.errors import UserError, plural
from nemo_kto.utils.files import read_bytes
from nemo_kto.utils.text import print_error

if TYPE_CHECKING:
    from nemo_kto.tools.rounds.endpoint import Endpoint
    from nemo_kto.tools.rounds.judge import Judge
    from nemo_kto.tools.rounds.labelling import Question

_CONCURRENCY = 8  # default of the requests to a server at the same time
_LEFT_OUT = ("max_tokens", "seed", "temperature")


def add_deciders(parser: argparse.ArgumentParser) -> None:
    """Add the options of a function that scores, and of a model that judges."""
    score = "a function of the prompt (a text or messages) and the answer, which returns a number or a bool"
    parser.add_argument("--score", metavar="MODULE.FUNCTION", help=score)
    parser.add_argument("--judge", metavar="URL", help="a server with OpenAI's interface, whose model judges")
    parser.add_argument("--rubric", metavar="FILE", help="what the model must look for, as text")
    add_server(parser)


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options of a server with OpenAI's interface."""
    parser.add_argument("--model", metavar="NAME", help="name of the model for the server; not needed if it has only one")
    left_out = "do not send this setting to the server: max_tokens, seed or temperature; may be repeated"
    parser.add_argument("--leave-out", action="append", choices=_LEFT_OUT, metavar="NAME", help=left_out)
    concurrency = f"requests to the server at the same time ({_CONCURRENCY})"
    parser.add_argument("--concurrency", type=integer_from(1), default=_CONCURRENCY, metavar="N", help=concurrency)


def judge_mistakes(flags: argparse.Namespace) -> Iterator[str]:
    """Yield the mistakes in the options of a model that judges."""
    yield from server_mistakes(flags, "judge", "rubric", "model", "leave_out")
    if flags.judge is not None and flags.rubric is None:
        yield "--rubric must be given with --judge, got none; write a file that says what a good answer is"


def server_mistakes(flags: argparse.Namespace, server: str, *names: str) -> Iterator[str]:
    """Yield the mistakes in options that need the option of a server."""
    for name in names:
        if (value := getattr(flags, name)) is not None and getattr(flags, server) is None:
            got = " ".join(value) if isinstance(value, list) else value
            yield f"--{name.replace('_', '-')} must be used with --{server}, got {got} without it; leave it out"


def read_rubric(path: str) -> str:
    """Return the text of a rubric; UserError if it cannot be read."""
    try:
        return read_bytes(path).decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--rubric must be a file of text in UTF-8, got {path}: {error}; correct the path") from error


def rubric_hash(rubric: str) -> str:
    """Return the hash of a rubric, for the rows of a file."""
    return f"{zlib.crc32(rubric.encode()):08x}"


def make_judge(flags: argparse.Namespace, rubric: str) -> Judge:
    """Return the judge of the options; UserError if its server cannot be used."""
    from nemo_kto.tools.rounds.judge import Judge

    return Judge(endpoint=make_endpoint(flags, "judge"), rubric=rubric)


def make_endpoint(flags: argparse.Namespace, name: str) -> Endpoint:
    """Return the server of an option; UserError if it cannot be used."""
    from nemo_kto.tools.rounds.endpoint import Endpoint

    about = {"model": flags.model, "concurrency": flags.concurrency, "left_out": flags.leave_out or ()}
    return Endpoint(url=getattr(flags, name), option=f"--{name}", **about)


def report_undecided(command: str, questions: Sequence[Question], undecided: Mapping[str, str], noun: str) -> None:
    """Print the number of questions without a verdict, and the reason of the first; ``undecided``: key -> reason."""
    if undecided:
        first = next(question for question in questions if question.key in undecided)
        count = f"{plural(len(undecided), noun)} without a verdict"
        place = f"the first at {first.answers[0].place}: {undecided[first.key]}"
        print_error(f"nemo-kto {command}: {count}, {place}; they are left out")
