"""Commands around the answers of a model: `nemo-kto sample`, `label` and `compare`; options that several of them have."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from nemo_kto.cli.command import Decorator, WordChoice, integer_from, together
from nemo_kto.errors import UserError, plural, refuse_broken
from nemo_kto.tools.inference.sampling import Sampling, sampling_options
from nemo_kto.utils.files import read_bytes
from nemo_kto.utils.text import print_error

if TYPE_CHECKING:
    from nemo_kto.tools.rounds.endpoint import Endpoint
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


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How the answers to each prompt are drawn."""

    sampling: Sampling
    count: int
    system: str | None

    @property
    def settings(self) -> dict[str, Any]:
        """The values by the names of their options, which each answer of a file records."""
        return {"count": self.count, **asdict(self.sampling), "system": self.system}

    def check(self) -> None:
        """Raise UserError if the options contradict each other."""
        refuse_broken("--system", self.system or "")
        if self.sampling.temperature == 0 and self.count > 1:
            raise UserError(f"-n must be 1 with --temperature 0, whose answers are equal, got {self.count}; change one")


@dataclass(frozen=True, kw_only=True)
class Server:
    """The options of a server with OpenAI's interface; ``option`` is the one with its URL, --endpoint or --judge."""

    option: str
    url: str | None
    model: str | None
    leave_out: Sequence[str]
    concurrency: int

    def mistakes(self, **others: str | None) -> Iterator[str]:
        """Yield the mistakes in options that need a server: ``others``, and those of this class."""
        for name, value in {**others, "model": self.model, "leave-out": " ".join(self.leave_out) or None}.items():
            if value is not None and self.url is None:
                yield f"--{name} must be used with {self.option}, got {value} without it; leave it out"

    def connect(self) -> Endpoint:
        """Return the client of the server; UserError if it cannot be used."""
        from nemo_kto.tools.rounds.endpoint import Endpoint

        assert self.url is not None
        about: Any = {"option": self.option, "concurrency": self.concurrency, "left_out": self.leave_out}
        return Endpoint(url=self.url, model=self.model, **about)


def judge_mistakes(server: Server, rubric: str | None) -> Iterator[str]:
    """Yield the mistakes in the options of a model that judges."""
    yield from server.mistakes(rubric=rubric)
    if server.url is not None and rubric is None:
        yield "--rubric must be given with --judge, got none; write a file that says what a good answer is"


def read_rubric(path: str) -> str:
    """Return the text of a rubric; UserError if it cannot be read."""
    try:
        return read_bytes(path).decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--rubric must be a file of text in UTF-8, got {path}: {error}; correct the path") from error


def rubric_hash(rubric: str) -> str:
    """Return the hash of a rubric, for the rows of a file."""
    return f"{zlib.crc32(rubric.encode()):08x}"


def report_undecided(command: str, questions: Sequence[Question], undecided: Mapping[str, str], noun: str) -> None:
    """Print the number of questions without a verdict, and the reason of the first; ``undecided``: key -> reason."""
    if undecided:
        first = next(question for question in questions if question.key in undecided)
        count = f"{plural(len(undecided), noun)} without a verdict"
        place = f"the first at {first.answers[0].place}: {undecided[first.key]}"
        print_error(f"nemo-kto {command}: {count}, {place}; they are left out")
