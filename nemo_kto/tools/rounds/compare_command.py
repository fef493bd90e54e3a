"""Command `nemo-kto compare`: the win rate of a model against another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nemo_kto.cli.command import command
from nemo_kto.errors import UserError, error_of, plural
from nemo_kto.model_files.model_folders import quick_hash
from nemo_kto.records.run_record import ComparisonResult, is_run, record_comparison
from nemo_kto.telemetry.display import progress_bar
from nemo_kto.tools.inference.named_models import find_model, load_reward_model
from nemo_kto.tools.inference.row_output import RowFile, open_rows
from nemo_kto.tools.inference.sampling import Sampling, check_sampling
from nemo_kto.tools.rounds.answers import WEIGHTS, Sampled, find_tasks, messages_of, planned_answers, read_answers
from nemo_kto.tools.rounds.judge import Judge, Scorer
from nemo_kto.tools.rounds.labelling import Question
from nemo_kto.tools.rounds.options import (
    Drawing,
    Server,
    decider_options,
    drawing_options,
    judge_mistakes,
    read_rubric,
    report_undecided,
    rubric_hash,
)
from nemo_kto.tools.rounds.sample_command import check_template, write_answers
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
def main(
    folder: str,
    base: str,
    prompts: str | None,
    out: str,
    run: str | None,
    score: str | None,
    judge: str | None,
    rubric: str | None,
    model: str | None,
    leave_out: Sequence[str],
    concurrency: int,
    reward_model: str | None,
    count: int,
    system: str | None,
    device: str,
    **generation: Any,
) -> None:
    """Run the command; raise UserError for mistakes."""
    given = {"MODEL": folder, "BASE": base}
    drawing = Drawing(sampling=Sampling(**generation), count=count, system=system)
    server = Server(option="--judge", url=judge, model=model, leave_out=leave_out, concurrency=concurrency)
    mistakes = [*_decider_mistakes(score, server, rubric, reward_model)]
    mistakes += filter(None, [error_of(lambda: check_sampling(drawing.sampling, device))])
    if mistakes := [*mistakes, *_drawing_mistakes(_models(given), prompts, drawing)]:
        raise UserError("\n  ".join(mistakes))
    deciders = list[tuple[str, Decider]]()
    checks: list[Callable[[], object]] = [lambda: deciders.append(_decider(score, server, rubric, reward_model))]
    checks += [partial(_run_folder, folder, run), *(partial(find_model, *each) for each in _models(given).items())]
    if errors := [*filter(None, map(error_of, checks))]:
        raise UserError("\n  ".join(errors))
    ((by, decider),) = deciders
    with open_rows(Path(out), option="--out") as file:
        about = {"by": by}
        own, other = _answers(given, prompts, drawing, file, about)
        comparison = Comparison(pairs=pair_answers(own, other), file=file, about=about)
        undecided = _decide(comparison, decider)
        decisions = comparison.decisions()
    report_undecided("compare", comparison.left, undecided, "pair")
    if not decisions:
        raise UserError(f"there must be a verdict on at least one pair, got none of {plural(len(undecided), 'pair')}")
    result = win_rate(decisions)
    names = [str(answers[0].source["model"]) for answers in (own, other)]
    _print(result, names, by)
    _record(_run_folder(folder, run), ComparisonResult(base=names[1], by=by, **asdict(result)))


def _models(given: Mapping[str, str]) -> dict[str, str]:
    """Return those of MODEL and BASE that are no files of answers."""
    return {name: each for name, each in given.items() if not Path(each).expanduser().is_file()}


def _answers(
    given: Mapping[str, str], prompts: str | None, drawing: Drawing, file: RowFile, about: Mapping[str, object]
) -> list[list[Sampled]]:
    """Return the answers of MODEL and of BASE, of which those of models are drawn into files beside the one of decisions.

    Raises UserError before anything is drawn if prompts or earlier decisions do not fit.
    """
    models = _models(given)
    settings = {name: {**drawing.settings, WEIGHTS: quick_hash(find_model(name, each))} for name, each in models.items()}
    files = {name: file.path.with_name(f"{file.path.stem}_{name.lower()}.jsonl") for name in models}
    answers = dict[str, list[Sampled]]()
    for name, each in given.items():
        if name not in models:
            answers[name] = read_answers(Path(each).expanduser())
            continue
        assert prompts is not None
        about_model: Any = {"prompts": Path(prompts), "model": each, "settings": settings[name]}
        with open_rows(files[name], option="--out") as drawn:
            check_template(find_model(name, each), find_tasks(drawn, **about_model))
        answers[name] = planned_answers(**about_model)
    undecided_pairs(pair_answers(*answers.values()), file, about, drawn=False)
    for name, each in models.items():
        write_answers(files[name], each, Path(str(prompts)), settings[name])
        answers[name] = read_answers(files[name])
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


def _record(run_folder: Path | None, result: ComparisonResult) -> None:
    """Record the result in the run whose report shows it, and print which one that is."""
    if run_folder is None:
        print("  no report shows it, because MODEL is no run folder; --run names one")
        return
    try:
        record_comparison(run_folder, result)
    except OSError as error:
        text = f"the folder of the run must be one that can be written, got {run_folder}: {error.strerror}"
        raise UserError(f"{text}; its report lacks the result above, until the same command can write it") from error
    print(terminal_line(f"  nemo-kto report {run_folder} shows it"))


def _run_folder(model: str, run: str | None) -> Path | None:
    """Return the folder of the run whose report shows the result, None without one; UserError if --run names no run."""
    folder = Path(model if run is None else run).expanduser()
    if is_run(folder):
        return folder
    if run is not None:
        raise UserError(f"--run must be the folder of a run, got {run}; correct the path, or leave it out")
    return None


def _decider_mistakes(score: str | None, server: Server, rubric: str | None, reward_model: str | None) -> Iterator[str]:
    given = {"--score": score, "--judge": server.url, "--reward-model": reward_model}
    if len(ways := [name for name, value in given.items() if value is not None]) != 1:
        got = " and ".join(ways) or "none"
        yield f"one of --score, --judge and --reward-model must be given, got {got}; choose one"
    yield from judge_mistakes(server, rubric)


def _drawing_mistakes(models: Mapping[str, str], prompts: str | None, drawing: Drawing) -> Iterator[str]:
    if models:
        if prompts is None:
            yield "PROMPTS must be given unless MODEL and BASE are both files of answers, got none; name a file of prompts"
        if error := error_of(drawing.check):
            yield error
        return
    defaults = {parameter.name: parameter.default for parameter in main.params if isinstance(parameter, click.Option)}
    for name, value in {"prompts": prompts, **drawing.settings}.items():
        if value not in (None, defaults.get(name)):
            option = {"prompts": "PROMPTS", "count": "-n"}.get(name, f"--{name.replace('_', '-')}")
            yield f"{option} must be left out if MODEL and BASE are both files of answers, got {value}"


def _decider(score: str | None, server: Server, rubric: str | None, reward_model: str | None) -> tuple[str, Decider]:
    """Return name and function of the decider; UserError if its function, server or model cannot be used."""
    if score is not None:
        return f"score {score}", Scorer(path=score).votes
    if reward_model is not None:
        return f"reward-model {reward_model}", partial(_by_reward_model, load_reward_model("--reward-model", reward_model))
    text = read_rubric(str(rubric))
    judge = Judge(endpoint=server.connect(), rubric=text)
    return f"judge {judge.model}, rubric {rubric_hash(text)}", judge.votes


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
