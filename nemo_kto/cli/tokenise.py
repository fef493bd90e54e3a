"""Command `nemo-kto data tokenise`: fill the token cache of a run, for example on a machine without GPUs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli.preview import data_errors
from nemo_kto.config import compose
from nemo_kto.config.check import Checker
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.telemetry.progress import progress_bar
from nemo_kto.telemetry.summary import table

_DESCRIPTION = """\
Tokenise the rows of a run into model.data.cache_dir, so that the training reads them from there. MODEL, DATA and KEY=VALUE:
as in training. Large files are tokenised by one process for each core, or by model.data.preprocess_workers processes.
"""


def main(argv: Sequence[str]) -> None:
    """Run the command; raise UserError if the command line, the model's tokenizer or the rows are invalid."""
    parser = argparse.ArgumentParser(prog="nemo-kto data tokenise", description=_DESCRIPTION)
    parser.add_argument("algorithm", choices=list(RECIPES), help="the algorithm of the run")
    parser.add_argument("words", nargs="*", metavar="MODEL DATA KEY=VALUE", help="as in training")
    parser.add_argument("--config-name", metavar="FILE", help="your configuration file")
    parser.add_argument("--config-dir", metavar="FOLDER", help="folder of that file")
    flags = parser.parse_intermixed_args(list(argv))
    recipe = RECIPES[flags.algorithm]
    source = compose.Source(config_name=flags.config_name or recipe.config_name, config_dir=flags.config_dir)
    title = "the rows cannot be tokenised"
    run = Checker(recipe=recipe, source=source, rules=data_errors, gpus=0, title=title, weights=False).resolve(flags.words)
    from nemo_kto.run.rows import model_tokenizer, source_settings, split_text

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
