"""Command `nemo-kto label`: labels for answers, by a person, a function or a model that judges, as rows for training."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from nemo_kto.cli.command import command, integer_from, number
from nemo_kto.errors import UserError, plural
from nemo_kto.records.run_record import is_run
from nemo_kto.telemetry.progress import progress_bar
from nemo_kto.tools.inference.row_output import PERSON, open_rows
from nemo_kto.tools.rounds.answers import read_answers
from nemo_kto.tools.rounds.judge import Judge, Scorer, Scores
from nemo_kto.tools.rounds.label_page import LOOPBACK, PageServer
from nemo_kto.tools.rounds.labelling import Labelling, best_and_worst, pair_questions, single_questions
from nemo_kto.tools.rounds.options import (
    decider_options,
    judge_mistakes,
    make_judge,
    read_rubric,
    report_undecided,
    rubric_hash,
)
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
@click.option("--round", type=integer_from(0), metavar="N", help="a number that is written into each row")
def main(**options: Any) -> None:
    """Run the command; raise UserError for mistakes."""
    flags = SimpleNamespace(**options)
    _check(flags)
    answers = read_answers(Path(flags.answers))
    scores = None if flags.score is None else Scorer(path=flags.score).scores(answers)
    if scores is not None and flags.pairs:
        questions = best_and_worst(answers, scores)
    else:
        questions = pair_questions(answers) if flags.pairs else single_questions(answers)
    labeller = PERSON if flags.score is None else f"score {flags.score}"
    rubric = judge = None
    if flags.judge is not None:
        rubric = read_rubric(flags.rubric)
        judge = make_judge(flags, rubric)
        labeller = f"judge {judge.model}"
    given = {
        "labeller": labeller,
        "round": flags.round,
        "threshold": flags.threshold,
        "rubric": None if rubric is None else rubric_hash(rubric),
    }
    about = {name: value for name, value in given.items() if value is not None}
    next_step = _next_step(flags, answers[0].source["model"])
    with open_rows(Path(flags.out), option="--out") as file:
        labelling = Labelling(questions=questions, file=file, about=about)
        if scores is not None:
            _label_by_scores(labelling, scores, flags.threshold, pairs=flags.pairs)
        elif judge is not None:
            _label_by_judge(labelling, judge)
        else:
            _label_on_page(labelling, flags, next_step)
        if judge is not None and labelling.left and not file.rows:
            got = f"got none on {plural(labelling.total, 'question')}"
            raise UserError(f"the judge must give a verdict on at least one question, {got}; remove the reason above")
        kinds = f": {labelling.tally}" if file.rows else ""
        left = labelling.total - len(file.rows)
        rest = f"; {plural(left, 'question')} left, for which the same command asks again" if left else ""
        print(terminal_line(f"{flags.out}: {plural(len(file.rows), 'row')}{kinds}{rest}"))
        if file.rows:
            print(terminal_line(f"next: {next_step}"))


def _next_step(flags: SimpleNamespace, model: str) -> str:
    """Return the command that trains on the rows; a server's name of a model is none of files."""
    folder = Path(model).expanduser()
    model = str(folder / "hf") if is_run(folder) else model if folder.is_dir() or model.startswith("hf:") else "MODEL"
    return f"nemo-kto {'dpo' if flags.pairs else 'kto'} {shlex.join([model, flags.out])}"


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


def _label_on_page(labelling: Labelling, flags: SimpleNamespace, next_step: str) -> None:
    with PageServer(labelling=labelling, host=flags.host or LOOPBACK, port=flags.port or 0, next_step=next_step) as server:
        print(f"open {server.address}\nCtrl-C ends; every label is in the file at once.", flush=True)
        if not server.is_local:
            text = "the network can read the page, which is not encrypted, and whoever has its address can label"
            print_error(f"nemo-kto label: warning: {text}; without --host, ssh -L forwards the port safely")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def _check(flags: SimpleNamespace) -> None:
    """Raise UserError with all options that do not fit each other."""
    ways = [f"--{name}" for name in ("page", "score", "judge") if getattr(flags, name) not in (None, False)]
    mistakes = [*judge_mistakes(flags)]
    for name in ("host", "port"):
        if getattr(flags, name) is not None and (flags.score or flags.judge):
            mistakes.append(f"--{name} must be used with the page, got {getattr(flags, name)} with {ways[-1]}; leave it out")
    if len(ways) > 1:
        mistakes.append(f"at most one of --page, --score and --judge must be given, got {' and '.join(ways)}; choose one")
    if flags.port is not None and flags.port > _MAX_PORT:
        mistakes.append(f"--port must be at most {_MAX_PORT:,}, got {flags.port}; leave it out for a free one")
    if flags.threshold is not None and flags.score is None:
        mistakes.append(f"--threshold must be used with --score, got {flags.threshold:g} without it; leave it out")
    if flags.threshold is not None and flags.pairs:
        text = "--threshold must be used without --pairs, which are the best and the worst answer"
        mistakes.append(f"{text}, got {flags.threshold:g}; leave it out")
    if mistakes:
        raise UserError("\n  ".join(mistakes))
