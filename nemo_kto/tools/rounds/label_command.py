"""Command `nemo-kto label`: labels for answers, by a person, a function or a model that judges, as rows for training."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from nemo_kto.cli.command import command, integer_from, number
from nemo_kto.errors import UserError, plural
from nemo_kto.telemetry.display import progress_bar
from nemo_kto.tools.inference.row_output import PERSON, open_rows
from nemo_kto.tools.rounds.answers import read_answers
from nemo_kto.tools.rounds.judge import Judge, Scorer, Scores
from nemo_kto.tools.rounds.label_page import LOOPBACK, PageServer
from nemo_kto.tools.rounds.labelling import Labelling, best_and_worst, pair_questions, single_questions
from nemo_kto.tools.rounds.options import Server, decider_options, judge_mistakes, read_rubric, report_undecided, rubric_hash
from nemo_kto.utils.text import print_error, terminal_line

_DESCRIPTION = """\
Label answers that nemo-kto sample has written: on a page of this machine (--page, the default), by a function (--score), or
by a model (--judge). Each label is a row for training, and is on disk before the next question; the same command
continues. Skipped questions come again at the next start.
"""
_PAIRS = "which of two answers is better, shown in random order; with --score, the best against the worst"
_PAGE = "label on a page of this machine, whose address is printed; the default"
_HOST = f"address at which the page is served ({LOOPBACK}); any other is reached from the network, without encryption"
_PORT = "port of the page; by default a free one"
_MAX_PORT = 65535
_FINITE = number("that is finite", lambda value: True)


@command("label", _DESCRIPTION)
@click.argument("answers", metavar="ANSWERS", help="a file of nemo-kto sample")
@click.option("--out", required=True, metavar="FILE", help="file of the rows, as JSON lines")
@click.option("--pairs", is_flag=True, help=_PAIRS)
@click.option("--page", is_flag=True, help=_PAGE)
@click.option("--host", metavar="HOST", help=_HOST)
@click.option("--port", type=integer_from(0), metavar="N", help=_PORT)
@decider_options
@click.option("--threshold", type=_FINITE, metavar="X", help="an answer with a score of at least X is good")
@click.option("--round", "round_number", type=integer_from(0), metavar="N", help="a number that is written into each row")
def main(
    answers: str,
    out: str,
    pairs: bool,
    page: bool,
    host: str | None,
    port: int | None,
    score: str | None,
    judge: str | None,
    rubric: str | None,
    model: str | None,
    leave_out: Sequence[str],
    concurrency: int,
    threshold: float | None,
    round_number: int | None,
) -> None:
    """Run the command; raise UserError for mistakes."""
    server = Server(option="--judge", url=judge, model=model, leave_out=leave_out, concurrency=concurrency)
    way = "--judge" if judge is not None else "--score" if score is not None else None
    mistakes = [*judge_mistakes(server, rubric), *_page_mistakes(host, port, way)]
    if mistakes := [*mistakes, *_mistakes(page, score, judge, threshold, pairs=pairs)]:
        raise UserError("\n  ".join(mistakes))
    sampled = read_answers(Path(answers))
    scores = None if score is None else Scorer(path=score).scores(sampled)
    if scores is not None and pairs:
        questions = best_and_worst(sampled, scores)
    else:
        questions = pair_questions(sampled) if pairs else single_questions(sampled)
    labeller = PERSON if score is None else f"score {score}"
    judging = rubric_key = None
    if rubric is not None:
        text = read_rubric(rubric)
        judging, rubric_key = Judge(endpoint=server.connect(), rubric=text), rubric_hash(text)
        labeller = f"judge {judging.model}"
    given = {"labeller": labeller, "round": round_number, "threshold": threshold, "rubric": rubric_key}
    about = {name: value for name, value in given.items() if value is not None}
    next_step = _next_step(sampled[0].source["model"], out, pairs=pairs)
    with open_rows(Path(out), option="--out") as file:
        labelling = Labelling(questions=questions, file=file, about=about)
        if scores is not None:
            _label_by_scores(labelling, scores, threshold, pairs=pairs)
        elif judging is not None:
            _label_by_judge(labelling, judging)
        else:
            _label_on_page(labelling, host=host or LOOPBACK, port=port or 0, next_step=next_step)
        if judging is not None and labelling.left and not file.rows:
            got = f"got none on {plural(labelling.total, 'question')}"
            raise UserError(f"the judge must give a verdict on at least one question, {got}; remove the reason above")
        kinds = f": {labelling.tally}" if file.rows else ""
        left = labelling.total - len(file.rows)
        rest = f"; {plural(left, 'question')} left, for which the same command asks again" if left else ""
        print(terminal_line(f"{out}: {plural(len(file.rows), 'row')}{kinds}{rest}"))
        if file.rows:
            print(terminal_line(f"next: {next_step}"))


def _next_step(model: str, rows: str, *, pairs: bool) -> str:
    """Return the command that trains on the rows; a server's name of a model is none of files."""
    from nemo_kto.records.run_record import is_run  # its configuration needs Hydra

    folder = Path(model)
    model = str(folder / "hf") if is_run(folder) else model if folder.is_dir() or model.startswith("hf:") else "MODEL"
    return f"nemo-kto {'dpo' if pairs else 'kto'} {shlex.join([model, rows])}"


def _label_by_scores(labelling: Labelling, scores: Scores, threshold: float | None, *, pairs: bool) -> None:
    numbers = [score for score in scores.values() if not isinstance(score, bool)]
    if numbers and threshold is None and not pairs:
        text = f"--threshold must be given if the function returns numbers, got none and {numbers[0]:g} as a score"
        raise UserError(f"{text}; e.g. --threshold {numbers[0]:g}, from which on an answer is good")
    for question in labelling.left:
        score = scores[question.answers[0].key]
        # the first answer of a pair is the best one
        labelling.record(question, pairs or (score if isinstance(score, bool) else score >= (threshold or 0.0)))


def _label_by_judge(labelling: Labelling, judge: Judge) -> None:
    undecided = dict[str, str]()
    left = labelling.left
    verdicts = judge.verdicts(left)
    for question, verdict in progress_bar(verdicts, total=len(left), title="judging", shown=True):
        if isinstance(verdict, bool):
            labelling.record(question, verdict)
        else:
            undecided[question.key] = verdict
    report_undecided("label", left, undecided, "question")


def _label_on_page(labelling: Labelling, *, host: str, port: int, next_step: str) -> None:
    with PageServer(labelling=labelling, host=host, port=port, next_step=next_step) as server:
        print(f"open {server.address}\nCtrl-C ends; every label is in the file at once.", flush=True)
        if not server.is_local:
            text = "the network can read the page, which is not encrypted, and whoever has its address can label"
            print_error(f"nemo-kto label: warning: {text}; without --host, ssh -L forwards the port safely")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def _page_mistakes(host: str | None, port: int | None, way: str | None) -> Iterator[str]:
    """Yield the mistakes in options of the page."""
    for name, value in (("host", host), ("port", port)):
        if value is not None and way is not None:
            yield f"--{name} must be used with the page, got {value} with {way}; leave it out"
    if port is not None and port > _MAX_PORT:
        yield f"--port must be at most {_MAX_PORT:,}, got {port}; leave it out for a free one"


def _mistakes(page: bool, score: str | None, judge: str | None, threshold: float | None, *, pairs: bool) -> Iterator[str]:
    """Yield the mistakes in options that do not fit each other."""
    given = {"--page": page, "--score": score is not None, "--judge": judge is not None}
    if len(ways := [name for name, is_given in given.items() if is_given]) > 1:
        yield f"at most one of --page, --score and --judge must be given, got {' and '.join(ways)}; choose one"
    if threshold is not None and score is None:
        yield f"--threshold must be used with --score, got {threshold:g} without it; leave it out"
    if threshold is not None and pairs:
        text = "--threshold must be used without --pairs, which are the best and the worst answer"
        yield f"{text}, got {threshold:g}; leave it out"
