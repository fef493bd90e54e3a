"""Command `nemo-kto data check`: statistics and errors of data files before training. It does not load megatron-core."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli import integer_from
from nemo_kto.data.rows.data_sources import read_data_prefix
from nemo_kto.data.rows.drops import DEFAULT_DROPS, check_drops
from nemo_kto.data.rows.labels import Labels
from nemo_kto.data.rows.normalise import check_json_columns
from nemo_kto.data.rows.reader import Fields, RowErrors
from nemo_kto.data.rows.row_files import file_parts, number_of_parts
from nemo_kto.data.tokens.truncation import TRUNCATION_MODES, Truncation
from nemo_kto.data.tokens.workers import map_parts, number_of_processes
from nemo_kto.errors import UserError
from nemo_kto.model_files.hub import is_hub_name, local_folder, pin
from nemo_kto.telemetry.progress import progress_bar
from nemo_kto.tools.inspect.data_check import PartCheck, Report
from nemo_kto.utils.text import terminal_line

_DESCRIPTION = """\
Statistics of data files: rows and their balance, lengths, duplicates, contradictions, invalid rows. Exit status 2 if rows
are invalid. With --model, lengths are also counted in tokens, with the rows that --seq-length would truncate, and rows whose
text the model's chat template leaves out are found.
"""


def main(argv: Sequence[str]) -> None:
    """Run the command; raise UserError if the command line is invalid, or, after the report, if rows are invalid."""
    flags = _parser().parse_args([*map(_as_flag, argv)])
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
        from nemo_kto.run.data import model_tokenizer, model_vocab_size

        model = ModelFiles(source=local_folder(pin(flags.model, weights=False) if is_hub_name(flags.model) else flags.model))
        encoder = RecordEncoder(
            tokenizer=model_tokenizer(model),
            vocab_size=model_vocab_size(model),
            apply_chat_template=flags.apply_chat_template,
        )
        if flags.seq_length is not None:
            truncation = Truncation(flags.seq_length, TRUNCATION_MODES[0], encoder.bos_id)
    as_pairs = RECIPES[flags.algorithm].has_pairs
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


def _as_flag(word: str) -> str:
    """Return the flag for a setting as a message suggests it, such as model.data.fields={label:rating}."""
    setting = re.fullmatch(r"model\.data\.(fields|labels|json_columns|drop)=(.*)", word, re.DOTALL)
    return word if setting is None else f"--{setting[1].replace('_', '-')}={setting[2]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nemo-kto data check", description=_DESCRIPTION)
    parser.add_argument("file", metavar="FILE", nargs="+", help="data files, folders of them, or hf:ORG/NAME[:SPLIT]")
    parser.add_argument("--model", metavar="FOLDER", help="a Hugging Face folder, whose tokenizer counts tokens")
    parser.add_argument(
        "--seq-length", type=integer_from(2), metavar="N", help="count the rows that this model.data.seq_length truncates"
    )
    parser.add_argument(
        "--apply-chat-template", action="store_true", help="count the tokens as with model.data.apply_chat_template=true"
    )
    parser.add_argument("--fields", default="", metavar="OURS:COLUMN,...", help="names of the columns: model.data.fields")
    parser.add_argument("--labels", default="", metavar="{CLASS:[VALUE,...]}", help="values of labels (model.data.labels)")
    parser.add_argument("--json-columns", metavar="COLUMN,...", help="columns of messages as text: model.data.json_columns")
    parser.add_argument(
        "--drop", metavar="KIND,...", help="rows left out (model.data.drop): unlabelled, empty_answers, lost_text"
    )
    parser.add_argument("--workers", type=integer_from(1), metavar="N", help="processes for large files (one for each core)")
    names = list(RECIPES)
    parser.add_argument("--algorithm", choices=names, default=names[0], help=f"algorithm of the rows ({names[0]})")
    return parser


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
