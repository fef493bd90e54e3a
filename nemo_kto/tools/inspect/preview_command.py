"""Command `nemo-kto data preview`: the first rows of a file as the model sees them.

The rows are processed by the same code as in training, in a temporary folder. megatron-core is not loaded.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli.command import command, integer_from, is_set
from nemo_kto.cli.tokenise_command import data_errors
from nemo_kto.config import compose
from nemo_kto.config.checker import POSITIONS, Checker, quoted
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.data.rows.data_sources import read_data_prefix
from nemo_kto.errors import UserError
from nemo_kto.tools.inspect.check_data_command import ALGORITHM_OPTION
from nemo_kto.utils.text import terminal_line

_MODEL, _DATA = POSITIONS.values()
_DESCRIPTION = """\
Show the first rows of a file as the model sees them: the decoded tokens with prompt and response marked,
their number, the label, and the response of the KL example. KEY=VALUE: as in training.
"""


@command("data preview", _DESCRIPTION)
@click.argument("file", help="a data file, a folder of them, or hf:ORG/NAME[:SPLIT]")
@click.argument("overrides", nargs=-1, metavar="KEY=VALUE", help="such as model.data.seq_length=512")
@click.option("--model", metavar="FOLDER", help="the model that will be trained: a Hugging Face folder")
@click.option("--rows", type=integer_from(1), default=3, metavar="N", help="rows to show (3)")
@ALGORITHM_OPTION
def main(file: str, overrides: Sequence[str], model: str | None, rows: int, algorithm: str) -> None:
    """Run the command; raise UserError if the command line, the model's tokenizer or the rows are invalid."""
    recipe = RECIPES[algorithm]
    if model is None and not is_set(_MODEL, overrides):
        raise UserError(
            "--model must be a Hugging Face folder, whose tokenizer and chat template are used, got none; "
            f"e.g. nemo-kto data preview {file} --model MODEL"
        )
    if Path(file).is_dir():
        file = str(next(found for group in read_data_prefix(file).values() for found in group[0].files))
    named = {_MODEL: model, _DATA: file}
    given = [f"{key}={quoted(value)}" for key, value in named.items() if value is not None]
    source, title = compose.Source(config_name=recipe.config_name), "the rows cannot be shown"
    checker = Checker(recipe=recipe, source=source, rules=data_errors, gpus=0, title=title, weights=False)
    run = checker.resolve([*given, *overrides])
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    sys.stdout.write("\n".join(_lines(run, file, rows=rows, coloured=coloured)) + "\n")


def _lines(run: ResolvedRun, file: str, *, rows: int, coloured: bool) -> Iterator[str]:
    from nemo_kto.memory.micro_batches import multiple_of
    from nemo_kto.run.data import collate_settings, model_tokenizer, source_settings
    from nemo_kto.tools.inspect.data_preview import Marks, Preview

    cfg = run.cfg
    tokenizer = model_tokenizer(run.files)
    batch_size = max(cfg.model.global_batch_size, 2)
    with tempfile.TemporaryDirectory() as folder:
        first = {"data_prefix": {"train": file}, "cache_dir": Path(folder), "max_rows": max(batch_size, rows)}
        splits = cfg.recipe.build_splits(source_settings(run, tokenizer) | first, cfg.data_options())
        dataset: Any = splits.train
        examples = dataset.__getitems__(range(min(len(dataset), batch_size)))
        shown = dataset.examples_of_lines(rows)
        options = collate_settings(cfg, tokenizer, multiple=multiple_of(run)) | cfg.loss.collate_options()
        if len(examples) == 1 and "with_kl" in options:  # a KL example takes the response of another example
            options["with_kl"] = False
        batch = cfg.recipe.collate(examples, **options, kept=range(min(shown, len(examples))))
        decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        preview = Preview(decode=decode, seq_length=cfg.seq_length, marks=Marks(coloured=coloured))
        yield f"{terminal_line(f'{file} as {run.files.source}')} sees it in `nemo-kto {cfg.recipe.name}`"
        yield f"Marks: {preview.marks.legend()}."
        if splits.prompts:
            yield f"Prompts: {splits.prompts}."
        for warning in splits.warnings:
            yield f"Of the first rows, {terminal_line(warning.removeprefix(f'{file}: '))}."
        if cfg.recipe.has_pairs:
            yield from preview.dpo(dataset, batch, with_rewards=cfg.loss.definition.needs_rewards)
        else:
            yield from preview.kto(dataset, batch, examples)
