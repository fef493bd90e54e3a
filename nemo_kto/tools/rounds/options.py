"""Commands around the answers of a model: `nemo-kto sample`, `label` and `compare`; options that several of them have."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from nemo_kto.cli.command import Decorator, WordChoice, integer_from, together
from nemo_kto.errors import UserError, plural
from nemo_kto.tools.inference.sampling_options import sampling_options
from nemo_kto.utils.files import read_bytes
from nemo_kto.utils.text import print_error

if TYPE_CHECKING:
    from nemo_kto.tools.rounds.endpoint import Endpoint
    from nemo_kto.tools.rounds.judge import Judge
    from nemo_kto.tools.rounds.labelling import Question

_CONCURRENCY = 8  # default of the requests to a server at the same time
_LEFT_OUT = ("max_tokens", "seed", "temperature")


DRAWING: Mapping[str, Any] = {"max_new_tokens": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0}
_SCORE = "a function of the prompt (a text or messages) and the answer, which returns a number or a bool"
_LEAVE_OUT = "do not send this setting to the server: max_tokens, seed or temperature; may be repeated"

# A server with OpenAI's interface
server_options = together(
    click.option("--model", metavar="NAME", help="name of the model for the server; not needed if it has only one"),
    click.option("--leave-out", multiple=True, type=WordChoice(_LEFT_OUT), metavar="NAME", help=_LEAVE_OUT),
    click.option(
        "--concurrency",
        type=integer_from(1),
        default=_CONCURRENCY,
        metavar="N",
        help=f"requests to the server at the same time ({_CONCURRENCY})",
    ),
)
# A function that scores, or a model that judges
decider_options = together(
    click.option("--score", metavar="MODULE.FUNCTION", help=_SCORE),
    click.option("--judge", metavar="URL", help="a server with OpenAI's interface, whose model judges"),
    click.option("--rubric", metavar="FILE", help="what the model must look for, as text"),
    server_options,
)


def drawing_options(*, count: int) -> Decorator[Any]:
    """Return the options with which answers are drawn; ``count``: the default of their number."""
    answers = f"answers to each prompt ({count})"
    return together(
        click.option("-n", "count", type=integer_from(1), default=count, metavar="N", help=answers),
        click.option("--system", metavar="TEXT", help="a system message before each prompt"),
        sampling_options(
            length=f"maximum length of an answer ({DRAWING['max_new_tokens']})",
            temperature=f"0 takes the most probable token ({DRAWING['temperature']:g})",
            seed=f"answers with another seed differ ({DRAWING['seed']})",
            defaults=DRAWING,
        ),
    )


def judge_mistakes(flags: SimpleNamespace) -> Iterator[str]:
    """Yield the mistakes in the options of a model that judges."""
    yield from server_mistakes(flags, "judge", "rubric", "model", "leave_out")
    if flags.judge is not None and flags.rubric is None:
        yield "--rubric must be given with --judge, got none; write a file that says what a good answer is"


def server_mistakes(flags: SimpleNamespace, server: str, *names: str) -> Iterator[str]:
    """Yield the mistakes in options that need the option of a server."""
    for name in names:
        if (value := getattr(flags, name)) not in (None, ()) and getattr(flags, server) is None:
            got = " ".join(value) if isinstance(value, tuple) else value
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


def make_judge(flags: SimpleNamespace, rubric: str) -> Judge:
    """Return the judge of the options; UserError if its server cannot be used."""
    from nemo_kto.tools.rounds.judge import Judge

    return Judge(endpoint=make_endpoint(flags, "judge"), rubric=rubric)


def make_endpoint(flags: SimpleNamespace, name: str) -> Endpoint:
    """Return the server of an option; UserError if it cannot be used."""
    from nemo_kto.tools.rounds.endpoint import Endpoint

    about = {"model": flags.model, "concurrency": flags.concurrency, "left_out": flags.leave_out}
    return Endpoint(url=getattr(flags, name), option=f"--{name}", **about)


def report_undecided(command: str, questions: Sequence[Question], undecided: Mapping[str, str], noun: str) -> None:
    """Print the number of questions without a verdict, and the reason of the first; ``undecided``: key -> reason."""
    if undecided:
        first = next(question for question in questions if question.key in undecided)
        count = f"{plural(len(undecided), noun)} without a verdict"
        place = f"the first at {first.answers[0].place}: {undecided[first.key]}"
        print_error(f"nemo-kto {command}: {count}, {place}; they are left out")
