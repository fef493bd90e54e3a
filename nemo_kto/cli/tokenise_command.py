"""Command `nemo-kto data tokenise`: the tokens of a run's rows, in the cache before the run starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli.command import command, run_words
from nemo_kto.config import compose
from nemo_kto.config.checker import Checker
from nemo_kto.config.resolved import ResolvedRun
from nemo_kto.config.rules.training_rules import run_errors
from nemo_kto.errors import ConfigError
from nemo_kto.telemetry.display import progress_bar, table

_DESCRIPTION = """\
Tokenise the rows of a run into model.data.cache_dir, so that the training reads them from there. MODEL, DATA and KEY=VALUE:
as in training. Large files are tokenised by one process for each core, or by model.data.preprocess_workers processes.
"""


@command("data tokenise", _DESCRIPTION)
@run_words()
def main(algorithm: str, words: Sequence[str], config_name: str | None, config_dir: str | None) -> None:
    """Run the command; raise UserError if the command line, the model's tokenizer or the rows are invalid."""
    recipe = RECIPES[algorithm]
    source = compose.Source(config_name=config_name or recipe.config_name, config_dir=config_dir)
    title = "the rows cannot be tokenised"
    run = Checker(recipe=recipe, source=source, rules=data_errors, gpus=0, title=title, weights=False).resolve(words)
    from nemo_kto.run.data import model_tokenizer, source_settings, split_text

    settings = source_settings(with_all_cores(run), model_tokenizer(run.files))
    settings["progress"] = partial(progress_bar, shown=True)
    splits = recipe.build_splits(settings, run.cfg.data_options())
    rows = {name: split_text(recipe.unit, examples.counts) for name, examples in splits.in_use.items()}
    print(table(f"nemo-kto data tokenise {recipe.name}", {**rows, "cache": run.cfg.model.data.cache_dir}))


def data_errors(run: ResolvedRun) -> list[ConfigError]:
    """Return errors in data, model and loss, not in machine or run: training may run on another machine."""
    sections = ("model.data.", "pretrained_checkpoint.", f"model.{run.cfg.recipe.name}.")
    return [error for error in run_errors(run, elsewhere=True) if error.key.startswith(sections)]


def with_all_cores(run: ResolvedRun) -> ResolvedRun:
    """Return the run with a process for each core that this process may use, unless their number is configured."""
    data = run.cfg.model.data
    workers = data.preprocess_workers or len(os.sched_getaffinity(0))
    return run.with_model(data=data.model_copy(update={"preprocess_workers": workers}))
