"""Command `nemo-kto data check`: statistics and errors of data files before training. It does not load megatron-core."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.artifacts.hub import is_hub_name, local_folder, pin
from nemo_kto.cli.parameters import Command, algorithm_choice, command, integer_from
from nemo_kto.data.rows.data_sources import read_data_prefix
from nemo_kto.data.rows.drops import DEFAULT_DROPS, check_drops
from nemo_kto.data.rows.labels import Labels
from nemo_kto.data.rows.reader import Fields, RowErrors
from nemo_kto.data.rows.row_files import file_parts, number_of_parts
from nemo_kto.data.rows.values import check_json_columns
from nemo_kto.data.tokens.parts import map_parts, number_of_processes
from nemo_kto.data.tokens.truncation import TRUNCATION_MODES, Truncation
from nemo_kto.errors import UserError
from nemo_kto.telemetry.progress import progress_bar
from nemo_kto.tools.inspect.data_check import PartCheck, Report
from nemo_kto.utils.text import terminal_line

_DESCRIPTION = """\
Statistics of data files: rows and their balance, lengths, duplicates, contradictions, invalid rows. Exit status 2 if rows
are invalid. With --model, lengths are also counted in tokens, with the rows that --seq-length would truncate, and rows whose
text the model's chat template leaves out are found.
"""


def _as_option(word: str) -> str:
    """Return the option for a setting as a message suggests it, such as model.data.fields={label:rating}."""
    setting = re.fullmatch(r"model\.data\.(fields|labels|json_columns|drop)=(.*)", word, re.DOTALL)
    return word if setting is None else f"--{setting[1].replace('_', '-')}={setting[2]}"


class _DataCheck(Command):
    """The command, which also takes settings of data as they are written in training."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse options, and settings as options."""
        return super().parse_args(ctx, [*map(_as_option, args)])


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


@command("data check", _DESCRIPTION, kind=_DataCheck)
@click.argument("file", nargs=-1, required=True, help="data files, folders of them, or hf:ORG/NAME[:SPLIT]")
@click.option("--model", metavar="FOLDER", help="a Hugging Face folder, whose tokenizer counts tokens")
@click.option(
    "--seq-length", type=integer_from(2), metavar="N", help="count the rows that this model.data.seq_length truncates"
)
@click.option("--apply-chat-template", is_flag=True, help=_TEMPLATE)
@click.option("--fields", default="", metavar="OURS:COLUMN,...", help="names of the columns: model.data.fields")
@click.option("--labels", default="", metavar="{CLASS:[VALUE,...]}", help="values of labels (model.data.labels)")
@click.option("--json-columns", metavar="COLUMN,...", help="columns of messages as text: model.data.json_columns")
@click.option("--drop", metavar="KIND,...", help=_DROP)
@click.option("--workers", type=integer_from(1), metavar="N", help="processes for large files (one for each core)")
@ALGORITHM_OPTION
def main(**options: Any) -> None:
    """Run the command; raise UserError if the command line is invalid, or, after the report, if rows are invalid."""
    flags = SimpleNamespace(**options)
    files = _files(flags.file)
    if flags.seq_length is not None and flags.model is None:
        raise UserError(
            "--seq-length must be given with --model, whose tokenizer counts tokens, got no --model; add --model FOLDER"
        )
    if flags.apply_chat_template and flags.model is None:
        raise UserError("--apply-chat-template must be given with --model, whose template it uses, got no --model; add it")
    fields = Fields(
        columns=_columns(flags.fields),
        labels=_labels(flags.labels),
        json_columns=_json_columns(flags.json_columns),
        drop=_drop(flags.drop),
    )
    encoder = truncation = None
    if flags.model is not None:
        from nemo_kto.config.resolved import ModelFiles
        from nemo_kto.data.tokens.chat_template import RecordEncoder
        from nemo_kto.run.row_counts import model_tokenizer, model_vocab_size

        model = ModelFiles(source=local_folder(pin(flags.model, weights=False) if is_hub_name(flags.model) else flags.model))
        encoder = RecordEncoder(
            tokenizer=model_tokenizer(model),
            vocab_size=model_vocab_size(model),
            apply_chat_template=flags.apply_chat_template,
        )
        if flags.seq_length is not None:
            truncation = Truncation(flags.seq_length, TRUNCATION_MODES[0], encoder.bos_id)
    as_pairs = RECIPES[flags.algorithm].unit == "pairs"
    report, errors = Report(as_pairs=as_pairs, seq_length=flags.seq_length, labels=fields.labels), RowErrors()
    for file in files:
        work = PartCheck(path=file, as_pairs=as_pairs, fields=fields, encoder=encoder, truncation=truncation)
        before = errors.total
        expected, title = number_of_parts(file), f"reading {file.name}"
        processes = number_of_processes(flags.workers, expected)
        parts = map_parts(work, file_parts(file), processes=processes, doing=title, setting="--workers")
        for counted in progress_bar(parts, total=expected, title=title, shown=True):
            report.add(file, counted)
            for line, what in counted.broken:
                errors.add(file, line, what)
            if counted.is_last:
                errors.raise_if_any()
        if file in report.columns:
            report.columns[file].add_label_errors(file, fields.labels, errors)
            if errors.total == before and not report.examples_of(file):
                errors.add(file, 1, report.columns[file].no_rows())
    sys.stdout.write("\n".join(map(terminal_line, report.lines())) + "\n")
    sys.stdout.flush()
    errors.raise_if_any()


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


def _labels(text: str) -> Labels:
    try:
        return Labels.parse(text)
    except UserError as error:
        raise UserError(f"--labels {error}") from error


def _json_columns(text: str | None) -> list[str] | None:
    columns = None if text is None else [name.strip() for name in text.strip("[] ").split(",") if name.strip()]
    try:
        check_json_columns(columns)
    except UserError as error:
        raise UserError(f"--json-columns {error}") from error
    return columns


def _drop(text: str | None) -> list[str]:
    kinds = list(DEFAULT_DROPS) if text is None else [name.strip() for name in text.strip("[] ").split(",") if name.strip()]
    try:
        check_drops(kinds)
    except UserError as error:
        raise UserError(f"--drop {error}") from error
    return kinds


def _columns(text: str) -> dict[str, str]:
    columns = {}
    for pair in filter(None, text.strip("{} ").split(",")):
        field, colon, column = pair.partition(":")
        if not (colon and field.strip() and column.strip()):
            raise UserError(f"--fields must be OURS:COLUMN, separated by commas, got {pair}; e.g. --fields prompt:question")
        columns[field.strip()] = column.strip()
    return columns
