"""Command `nemo-kto data check`: statistics and errors of data files before training. It does not load megatron-core."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli.command import CheckedCommand, Decorator, Reader, algorithm_choice, command, integer_from
from nemo_kto.data.rows.data_sources import read_data_prefix
from nemo_kto.data.rows.labels import Labels
from nemo_kto.data.rows.normalise import check_json_columns
from nemo_kto.data.rows.reader import Fields, RowErrors
from nemo_kto.data.rows.records import DEFAULT_DROPS, check_drops
from nemo_kto.data.rows.row_files import file_parts, number_of_parts
from nemo_kto.data.tokens.truncation import TRUNCATION_MODES, Truncation
from nemo_kto.data.tokens.workers import map_parts, number_of_processes
from nemo_kto.errors import UserError
from nemo_kto.model_files.hub import is_hub_name, local_folder, pin
from nemo_kto.telemetry.display import progress_bar
from nemo_kto.tools.inspect.data_check import PartCheck, Report
from nemo_kto.utils.text import terminal_line

if TYPE_CHECKING:
    from nemo_kto.data.tokens.chat_template import RecordEncoder

_DESCRIPTION = """\
Statistics of data files: rows and their balance, lengths, duplicates, contradictions, invalid rows. Exit status 2 if rows
are invalid. With --model, lengths are also counted in tokens, with the rows that --seq-length would truncate, and rows whose
text the model's chat template leaves out are found.
"""


def _as_options(word: str) -> list[str]:
    """Return the options for a setting of a training, such as fields=label:rating or model.data.drop=[lost_text]."""
    if setting := re.fullmatch(r"(?:model\.data\.apply_chat_template|template)=(true|false)", word, re.IGNORECASE):
        return ["--apply-chat-template"] if setting[1].lower() == "true" else []
    whole = f"model.data.{word}" if word.startswith("fields=") else word
    setting = re.fullmatch(r"model\.data\.(fields|labels|json_columns|drop|seq_length)=(.*)", whole, re.DOTALL)
    return [word] if setting is None else [f"--{setting[1].replace('_', '-')}={setting[2]}"]


class _DataCheck(CheckedCommand):
    """The command, which also takes settings of data as they are written in training."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse options, and settings as options."""
        return super().parse_args(ctx, [option for word in args for option in _as_options(word)])


_ALGORITHM = algorithm_choice()
ALGORITHM_OPTION = click.option(
    "--algorithm",
    type=_ALGORITHM,
    metavar="|".join(_ALGORITHM.choices),
    default=_ALGORITHM.choices[0],
    help=f"algorithm of the rows ({_ALGORITHM.choices[0]})",
)
_TEMPLATE = "count the tokens as with model.data.apply_chat_template=true"
_DROP = "rows left out (model.data.drop): unlabelled, empty_answers, lost_text"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.strip("[] ").split(",") if name.strip()]


def _json_columns(text: str) -> list[str]:
    check_json_columns(columns := _names(text))
    return columns


def _drops(text: str) -> list[str]:
    check_drops(kinds := _names(text))
    return kinds


def _columns(text: str) -> dict[str, str]:
    columns = {}
    for pair in filter(None, text.strip("{} ").split(",")):
        field, colon, column = pair.partition(":")
        if not (colon and field.strip() and column.strip()):
            raise UserError(f"must be OURS:COLUMN, separated by commas, got {pair}; e.g. --fields prompt:question")
        columns[field.strip()] = column.strip()
    return columns


def _settings(name: str, read: Callable[[str], object], metavar: str, text: str) -> Decorator[Any]:
    return click.option(name, type=Reader(read=read), metavar=metavar, help=text)


@command("data check", _DESCRIPTION, kind=_DataCheck)
@click.argument("file", nargs=-1, required=True, help="data files, folders of them, or hf:ORG/NAME[:SPLIT]")
@click.option("--model", metavar="FOLDER", help="a Hugging Face folder, whose tokenizer counts tokens")
@click.option(
    "--seq-length", type=integer_from(2), metavar="N", help="count the rows that this model.data.seq_length truncates"
)
@click.option("--apply-chat-template", is_flag=True, help=_TEMPLATE)
@_settings("--fields", _columns, "OURS:COLUMN,...", "names of the columns: model.data.fields")
@_settings("--labels", Labels.parse, "{CLASS:[VALUE,...]}", "values of labels (model.data.labels)")
@_settings("--json-columns", _json_columns, "COLUMN,...", "columns of messages as text: model.data.json_columns")
@_settings("--drop", _drops, "KIND,...", _DROP)
@click.option("--workers", type=integer_from(1), metavar="N", help="processes for large files (one for each core)")
@ALGORITHM_OPTION
def main(
    file: Sequence[str],
    model: str | None,
    seq_length: int | None,
    apply_chat_template: bool,
    fields: dict[str, str] | None,
    labels: Labels | None,
    json_columns: list[str] | None,
    drop: list[str] | None,
    workers: int | None,
    algorithm: str,
) -> None:
    """Run the command; raise UserError if the command line is invalid, or, after the report, if rows are invalid."""
    files = _files(file)
    if seq_length is not None and model is None:
        raise UserError(
            "--seq-length must be given with --model, whose tokenizer counts tokens, got no --model; add --model FOLDER"
        )
    if apply_chat_template and model is None:
        raise UserError("--apply-chat-template must be given with --model, whose template it uses, got no --model; add it")
    encoder = None if model is None else _encoder(model, apply_chat_template=apply_chat_template)
    truncation = None
    if encoder is not None and seq_length is not None:
        truncation = Truncation(seq_length, TRUNCATION_MODES[0], encoder.bos_id)
    settings = Fields(
        columns=fields or {},
        labels=labels or Labels.parse(""),
        json_columns=json_columns,
        drop=list(DEFAULT_DROPS) if drop is None else drop,
    )
    as_pairs = RECIPES[algorithm].has_pairs
    report, errors = Report(as_pairs=as_pairs, seq_length=seq_length, labels=settings.labels), RowErrors()
    for path in files:
        work = PartCheck(path=path, as_pairs=as_pairs, fields=settings, encoder=encoder, truncation=truncation)
        _read(work, report, errors, workers)
    sys.stdout.write("\n".join(map(terminal_line, report.lines())) + "\n")
    sys.stdout.flush()
    errors.raise_if_any()


def _encoder(name: str, *, apply_chat_template: bool) -> RecordEncoder:
    from nemo_kto.config.resolved import ModelFiles
    from nemo_kto.data.tokens.chat_template import RecordEncoder
    from nemo_kto.run.data import model_tokenizer, model_vocab_size

    model = ModelFiles(source=local_folder(pin(name, weights=False) if is_hub_name(name) else name))
    return RecordEncoder(
        tokenizer=model_tokenizer(model), vocab_size=model_vocab_size(model), apply_chat_template=apply_chat_template
    )


def _read(work: PartCheck, report: Report, errors: RowErrors, workers: int | None) -> None:
    """Add the rows of a file to the report, and its invalid ones to the errors."""
    file, before = work.path, errors.total
    expected, title = number_of_parts(file), f"reading {file.name}"
    processes = number_of_processes(workers, expected)
    parts = map_parts(work, file_parts(file), processes=processes, doing=title, setting="--workers")
    for counted in progress_bar(parts, total=expected, title=title, shown=True):
        report.add(file, counted)
        for line, what in counted.broken:
            errors.add(file, line, what)
        if counted.is_last:
            errors.raise_if_any()
    if file in report.columns:
        report.columns[file].add_label_errors(file, work.fields.labels, errors)
        if errors.total == before and not report.examples_of(file):
            errors.add(file, 1, report.columns[file].no_rows())


def _files(named: Sequence[str]) -> list[Path]:
    """Return the files that the arguments name, each once; raise UserError with all that are missing."""
    files, missing = list[Path](), []
    for name in named:
        try:
            groups = read_data_prefix(name).values()
        except UserError as error:
            missing.append(str(error).removeprefix("data_prefix names "))
        else:
            files += [file for group in groups for source in group for file in source.files]
    if missing:
        raise UserError("\n  ".join(["FILE must be a data file, or a folder with such files:", *missing]))
    return list(dict.fromkeys(files))
