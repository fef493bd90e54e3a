"""Command `nemo-kto compare`: the win rate of a model against another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from nemo_kto.cli.command import command
from nemo_kto.errors import UserError, error_of, plural
from nemo_kto.model_files.model_folders import quick_hash
from nemo_kto.records.run_record import ComparisonResult, is_run, record_comparison
from nemo_kto.telemetry.display import progress_bar
from nemo_kto.tools.inference.named_models import find_model, load_reward_model
from nemo_kto.tools.inference.row_output import RowFile, open_rows
from nemo_kto.tools.inference.sampling import check_sampling
from nemo_kto.tools.rounds.answers import WEIGHTS, Sampled, find_tasks, messages_of, planned_answers, read_answers
from nemo_kto.tools.rounds.judge import Scorer
from nemo_kto.tools.rounds.labelling import Question
from nemo_kto.tools.rounds.options import (
    decider_options,
    drawing_options,
    judge_mistakes,
    make_judge,
    read_rubric,
    report_undecided,
    rubric_hash,
)
from nemo_kto.tools.rounds.sample_command import check_drawing, check_template, drawing_settings, write_answers
from nemo_kto.tools.rounds.win_rate import Comparison, WinRate, pair_answers, undecided_pairs, win_rate
from nemo_kto.utils.text import aligned, interval_text, percent_text, terminal_line

if TYPE_CHECKING:
    from nemo_kto.tools.inference.reward_model import RewardModel

_BATCH = 8  # pairs that a reward model scores at once
_DESCRIPTION = """\
Compare the answers of two models to the same prompts: the share of prompts for which a function (--score), a model that
judges (--judge, asked in both orders) or a reward model (--reward-model) finds the answer of MODEL better than that of BASE;
its 95 % interval; and the share that answers of equal length would have. MODEL and BASE are models, whose answers are drawn
as by nemo-kto sample, or its files of answers. The same command continues after it was killed. If MODEL is a run folder, or
--run names one, the report of that run shows the result.
"""
_DESCRIBED = "a run or a model, as in nemo-kto chat, or a file of nemo-kto sample"
_PROMPTS = "a file of prompts, as in nemo-kto sample; left out if MODEL and BASE are both files of answers"
_REWARD = "a reward model in Hugging Face format (sequence classification with one output) with a chat template"
Decided = Iterator[tuple[Question, tuple[float, float] | str]]  # scores of both answers, or why there are none
Decider = Callable[[Sequence[Question]], Decided]


@command("compare", _DESCRIPTION)
@click.argument("folder", metavar="MODEL", help=_DESCRIBED)
@click.argument("base", metavar="BASE", help=f"the other one: {_DESCRIBED}")
@click.argument("prompts", required=False, metavar="PROMPTS", help=_PROMPTS)
@click.option("--out", required=True, metavar="FILE", help="file of the decisions, as JSON lines")
@click.option("--run", metavar="RUN", help="folder of the run whose report shows the result; by default MODEL, if it is one")
@decider_options
@click.option("--reward-model", metavar="MODEL", help=_REWARD)
@drawing_options(count=1)
def main(**options: Any) -> None:
    """Run the command; raise UserError for mistakes."""
    flags = SimpleNamespace(**options)
    if mistakes := [*_mistakes(flags)]:
        raise UserError("\n  ".join(mistakes))
    by, decider = _check(flags)
    about = {"by": by}
    with open_rows(Path(flags.out), option="--out") as file:
        model, base = _answers(flags, file, about)
        comparison = Comparison(pairs=pair_answers(model, base), file=file, about=about)
        undecided = _decide(comparison, decider)
        decisions = comparison.decisions()
    report_undecided("compare", comparison.left, undecided, "pair")
    if not decisions:
        raise UserError(f"there must be a verdict on at least one pair, got none of {plural(len(undecided), 'pair')}")
    result = win_rate(decisions)
    names = [str(answers[0].source["model"]) for answers in (model, base)]
    _print(result, names, by)
    _record(flags, ComparisonResult(base=names[1], by=by, **asdict(result)))


def _models(flags: SimpleNamespace) -> dict[str, str]:
    """Return MODEL and BASE, except those that are files of answers."""
    return {name: given for name, given in (("MODEL", flags.folder), ("BASE", flags.base)) if not _is_file(given)}


def _check(flags: SimpleNamespace) -> tuple[str, Decider]:
    """Return name and function of the decider; UserError if it, a model or the run cannot be used."""
    deciders = list[tuple[str, Decider]]()
    checks: list[Callable[[], object]] = [lambda: deciders.append(_decider(flags)), partial(_run_folder, flags)]
    checks += [partial(find_model, *each) for each in _models(flags).items()]
    if errors := [*filter(None, map(error_of, checks))]:
        raise UserError("\n  ".join(errors))
    return deciders[0]


def _answers(flags: SimpleNamespace, file: RowFile, about: Mapping[str, object]) -> list[list[Sampled]]:
    """Return the answers of MODEL and of BASE, of which those of models are drawn into files.

    Raises UserError before anything is drawn if prompts or earlier decisions do not fit.
    """
    models, given = _models(flags), {"MODEL": flags.folder, "BASE": flags.base}
    drawing = {name: {**drawing_settings(flags), WEIGHTS: quick_hash(find_model(name, models[name]))} for name in models}
    answers = {name: _expected(name, path, flags, drawing.get(name)) for name, path in given.items()}
    undecided_pairs(pair_answers(*answers.values()), file, about, drawn=False)
    for name, settings in drawing.items():
        write_answers(_file_of(name, flags), models[name], Path(flags.prompts), settings)
        answers[name] = read_answers(_file_of(name, flags))
    return [*answers.values()]


def _decide(comparison: Comparison, decider: Decider) -> dict[str, str]:
    """Record the decisions on the pairs that have none; return the keys of those without a verdict, and why."""
    undecided = dict[str, str]()
    decided = decider(comparison.left)
    for pair, scores in progress_bar(decided, total=len(comparison.left), title="comparing", shown=True):
        if isinstance(scores, str):
            undecided[pair.key] = scores
        else:
            comparison.record(pair, scores)
    return undecided


def _record(flags: SimpleNamespace, result: ComparisonResult) -> None:
    """Record the result in the run whose report shows it, and print which one that is."""
    if (folder := _run_folder(flags)) is None:
        print("  no report shows it, because MODEL is no run folder; --run names one")
        return
    try:
        record_comparison(folder, result)
    except OSError as error:
        text = f"the folder of the run must be one that can be written, got {folder}: {error.strerror}"
        raise UserError(f"{text}; its report lacks the result above, until the same command can write it") from error
    print(terminal_line(f"  nemo-kto report {folder} shows it"))


def _run_folder(flags: SimpleNamespace) -> Path | None:
    """Return the folder of the run whose report shows the result, None without one; UserError if --run names no run."""
    folder = Path(flags.folder if flags.run is None else flags.run).expanduser()
    if is_run(folder):
        return folder
    if flags.run is not None:
        raise UserError(f"--run must be the folder of a run, got {flags.run}; correct the path, or leave it out")
    return None


def _is_file(given: str) -> bool:
    return Path(given).expanduser().is_file()


def _mistakes(flags: SimpleNamespace) -> Iterator[str]:
    """Yield the mistakes in options that do not fit each other."""
    ways = [f"--{name.replace('_', '-')}" for name in ("score", "judge", "reward_model") if getattr(flags, name) is not None]
    if len(ways) != 1:
        got = " and ".join(ways) or "none"
        yield f"one of --score, --judge and --reward-model must be given, got {got}; choose one"
    yield from judge_mistakes(flags)
    if error := error_of(lambda: check_sampling(flags)):
        yield error
    if not (_is_file(flags.folder) and _is_file(flags.base)):
        if flags.prompts is None:
            yield "PROMPTS must be given unless MODEL and BASE are both files of answers, got none; name a file of prompts"
        if error := error_of(lambda: check_drawing(flags)):
            yield error
        return
    defaults = {parameter.name: parameter.default for parameter in main.params if isinstance(parameter, click.Option)}
    for name, value in {"prompts": flags.prompts, **drawing_settings(flags)}.items():
        if value not in (None, defaults.get(name)):
            option = {"prompts": "PROMPTS", "count": "-n"}.get(name, f"--{name.replace('_', '-')}")
            yield f"{option} must be left out if MODEL and BASE are both files of answers, got {value}"


def _decider(flags: SimpleNamespace) -> tuple[str, Decider]:
    """Return name and function of the decider; UserError if its function, server or model cannot be used."""
    if flags.score is not None:
        return f"score {flags.score}", Scorer(path=flags.score).votes
    if flags.judge is not None:
        rubric = read_rubric(flags.rubric)
        judge = make_judge(flags, rubric)
        return f"judge {judge.model}, rubric {rubric_hash(rubric)}", judge.votes
    model = load_reward_model("--reward-model", flags.reward_model)
    return f"reward-model {flags.reward_model}", partial(_by_reward_model, model)


def _expected(name: str, given: str, flags: SimpleNamespace, drawing: Mapping[str, Any] | None) -> list[Sampled]:
    """Return the answers of a file, or those that a model is to give with its settings; UserError if its file has others."""
    if drawing is None:
        return read_answers(Path(given).expanduser())
    prompts = Path(flags.prompts)
    with open_rows(_file_of(name, flags), option="--out") as file:
        check_template(find_model(name, given), find_tasks(file, prompts=prompts, model=given, settings=drawing))
    return planned_answers(prompts, model=given, settings=drawing)


def _file_of(name: str, flags: SimpleNamespace) -> Path:
    """Return the file beside --out for the answers of MODEL or BASE."""
    out = Path(flags.out)
    return out.with_name(f"{out.stem}_{name.lower()}.jsonl")


def _by_reward_model(model: RewardModel, pairs: Sequence[Question]) -> Decided:
    encoded = list[tuple[Question, list[list[int]]]]()
    for pair in pairs:
        try:
            encoded.append((pair, [model.encode(messages_of(each.prompt), each.text) for each in pair.answers]))
        except UserError as error:
            yield pair, str(error)
    encoded.sort(key=lambda each: -max(map(len, each[1])))  # little padding, and the batch that needs most memory first
    for start in range(0, len(encoded), _BATCH):
        batch = encoded[start : start + _BATCH]
        scores = model.scores([ids for _, both in batch for ids in both])
        for (pair, _), own, other in zip(batch, scores[::2], scores[1::2], strict=True):
            finite = math.isfinite(own) and math.isfinite(other)
            yield pair, (own, other) if finite else f"the scores of the reward model are {own} and {other}"


def _print(result: WinRate, names: Sequence[str], by: str) -> None:
    counts = (
        f"{plural(result.wins, 'win')}, {plural(result.ties, 'tie')}, {result.losses:,} loss{'es' * (result.losses != 1)}"
    )
    own, other = result.mean_lengths
    rows = [
        ["win rate", f"{percent_text(result.rate)} {interval_text(result.interval)} (95 % interval): {counts}"],
        ["at equal lengths", percent_text(result.length_controlled)],
        ["mean length", f"{own:,.0f} characters, {other:,.0f} of BASE"],
    ]
    print(terminal_line(f"{names[0]} against {names[1]}, by {by}"), *aligned(rows, indent="  "), sep="\n")
