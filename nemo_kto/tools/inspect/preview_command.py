"""Commands `nemo-kto data preview`, the first rows of a file as the model sees them, and `nemo-kto data tokenise`.

The rows are processed by the same code as in training, for the preview in a temporary folder. megatron-core is not loaded.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli import integer_from, is_set, run_parser
from nemo_kto.config import compose
from nemo_kto.config.checker import POSITIONS, Checker, quoted
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.rules.training_rules import run_errors
from nemo_kto.data.rows.data_sources import read_data_prefix
from nemo_kto.errors import ConfigError, UserError
from nemo_kto.telemetry.progress import progress_bar
from nemo_kto.telemetry.text_table import table
from nemo_kto.utils.text import terminal_line

_MODEL, _DATA = POSITIONS.values()
_DESCRIPTION = """\
Show the first rows of a file as the model sees them: the decoded tokens with prompt and response marked,
their number, the label, and the response of the KL example. KEY=VALUE: as in training.
"""
_TOKENISE = """\
Tokenise the rows of a run into model.data.cache_dir, so that the training reads them from there. MODEL, DATA and KEY=VALUE:
as in training. Large files are tokenised by one process for each core, or by model.data.preprocess_workers processes.
"""


def main(argv: Sequence[str]) -> None:
    """Run the command; raise UserError if the command line, the model's tokenizer or the rows are invalid."""
    flags = _parser().parse_intermixed_args(list(argv))
    recipe = RECIPES[flags.algorithm]
    if flags.model is None and not is_set(_MODEL, flags.overrides):
        raise UserError(
            "--model must be a Hugging Face folder, whose tokenizer and chat template are used, got none; "
            f"e.g. nemo-kto data preview {flags.file} --model MODEL"
        )
    if Path(flags.file).is_dir():
        flags.file = str(next(file for group in read_data_prefix(flags.file).values() for file in group[0].files))
    named = {_MODEL: flags.model, _DATA: flags.file}
    overrides = [f"{key}={quoted(value)}" for key, value in named.items() if value is not None]
    source, title = compose.Source(config_name=recipe.config_name), "the rows cannot be shown"
    checker = Checker(recipe=recipe, source=source, rules=data_errors, gpus=0, title=title, weights=False)
    run = checker.resolve([*overrides, *flags.overrides])
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    sys.stdout.write("\n".join(_lines(run, flags.file, rows=flags.rows, coloured=coloured)) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nemo-kto data preview", description=_DESCRIPTION)
    parser.add_argument("file", metavar="FILE", help="a data file, a folder of them, or hf:ORG/NAME[:SPLIT]")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as model.data.seq_length=512")
    parser.add_argument("--model", metavar="FOLDER", help="the model that will be trained: a Hugging Face folder")
    parser.add_argument("--rows", type=integer_from(1), default=3, metavar="N", help="rows to show (3)")
    names = list(RECIPES)
    parser.add_argument("--algorithm", choices=names, default=names[0], help=f"algorithm of the rows ({names[0]})")
    return parser


def data_errors(run: ResolvedRun) -> list[ConfigError]:
    """Return errors in data, model and loss, not in machine or run: training may run on another machine."""
    sections = ("model.data.", "pretrained_checkpoint.", f"model.{run.cfg.recipe.name}.")
    return [error for error in run_errors(run, elsewhere=True) if error.key.startswith(sections)]


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


def tokenise(argv: Sequence[str]) -> None:
    """Run `nemo-kto data tokenise`; raise UserError if the command line, the model's tokenizer or the rows are invalid."""
    flags = run_parser("data tokenise", _TOKENISE).parse_intermixed_args(list(argv))
    recipe = RECIPES[flags.algorithm]
    source = compose.Source(config_name=flags.config_name or recipe.config_name, config_dir=flags.config_dir)
    title = "the rows cannot be tokenised"
    run = Checker(recipe=recipe, source=source, rules=data_errors, gpus=0, title=title, weights=False).resolve(flags.words)
    from nemo_kto.run.data import model_tokenizer, source_settings, split_text

    settings = source_settings(with_all_cores(run), model_tokenizer(run.files))
    settings["progress"] = partial(progress_bar, shown=True)
    splits = recipe.build_splits(settings, run.cfg.data_options())
    rows = {name: split_text(recipe.unit, examples.counts) for name, examples in splits.in_use.items()}
    print(table(f"nemo-kto data tokenise {recipe.name}", {**rows, "cache": run.cfg.model.data.cache_dir}))


def with_all_cores(run: ResolvedRun) -> ResolvedRun:
    """Return the run with a process for each core that this process may use, unless their number is configured."""
    data = run.cfg.model.data
    workers = data.preprocess_workers or len(os.sched_getaffinity(0))
    return run.with_model(data=data.model_copy(update={"preprocess_workers": workers}))
