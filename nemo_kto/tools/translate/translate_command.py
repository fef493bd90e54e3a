"""Command `nemo-kto translate`: a configuration of TRL or ms-swift as a command of this program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli.command import File, WordChoice, algorithm_choice, command, integer_from
from nemo_kto.cli.job import Job, refuse_mistakes
from nemo_kto.config import compose
from nemo_kto.config.checker import SHORT, find_mistakes, read_positions
from nemo_kto.config.schema import config_type
from nemo_kto.tools.translate.option_files import read_options
from nemo_kto.tools.translate.trainer_options import table
from nemo_kto.tools.translate.translation import Translation, translate
from nemo_kto.utils.fields import names
from nemo_kto.utils.text import shell_comment

_DESCRIPTION = """\
Print the command of this program for a configuration of TRL or ms-swift: a YAML or JSON file, a shell script with its
command line, or a Python program that uses TRL, which is not run. The command also sets the defaults of the other trainer.
Options without a counterpart are listed with the reason, as comments.
"""
_TRAINER, _ALGORITHM = WordChoice(list(table()["trainers"])), algorithm_choice()


@command("translate", _DESCRIPTION)
@click.argument("file", type=File(), help="YAML or JSON file, shell script, or Python program")
@click.option(
    "--trainer", type=_TRAINER, metavar="|".join(_TRAINER.choices), help="trainer of the file; found by its options"
)
@click.option(
    "--algorithm", type=_ALGORITHM, metavar="|".join(_ALGORITHM.choices), help="algorithm, if the options do not name it"
)
@click.option("--ranks", type=integer_from(1), metavar="N", help="GPUs of the other trainer's run (1)")
def main(file: Path, trainer: str | None, algorithm: str | None, ranks: int | None) -> None:
    """Run the command; raise UserError if the file cannot be translated."""
    given = read_options(file)
    values = given.values | ({} if ranks is None else {"nproc_per_node": ranks})
    trainer, recipe = trainer or given.trainer, RECIPES.get(algorithm or "")
    found = translate(values, trainer=trainer, method=given.method, recipe=recipe)
    found = found._replace(without=given.without | found.without, notes=[*given.notes, *found.notes])
    print(f"{shell_comment(f'{file}, of {found.trainer}')}\n{found.command()}")
    comments = [*found.remarks(), *(f"to be corrected: {error}" for error in remaining_errors(found))]
    if comments:
        print("\n" + "\n".join(map(shell_comment, comments)))


def remaining_errors(found: Translation, further: Sequence[str] = ()) -> list[str]:
    """Return the errors that the translated command would have, apart from those in files."""
    words, recipe = [*found.words(), *further], found.recipe
    source = compose.our_source(recipe)
    return [str(error) for error in find_mistakes(words, source=source, recipe=recipe, rules=lambda cfg: [])]


def refuse_options(job: Job, others: Sequence[str], words: Sequence[str]) -> NoReturn:
    """Print the errors of a command line with options of another trainer, --NAME=VALUE, and its translation; exit.

    ``words`` are the positions and overrides in our form; they take precedence.
    """
    options = dict(option[2:].split("=", 1) for option in others)
    ours = names(config_type(job.recipe)).keys() | SHORT.keys() - {"template"}  # an option of ms-swift
    given, _ = read_positions([*words, *(f"{key}={options.pop(key)}" for key in list(options) if key in ours)], job.recipe)
    known = {name: {*entry["names"], *entry["signs"]} for name, entry in table()["trainers"].items()}
    trainer = max(known, key=lambda name: len(known[name] & options.keys()))
    found = translate(options, trainer=trainer, recipe=job.recipe, with_defaults=False)
    own = {text.lstrip("+").partition("=")[0] for text in given}
    found = found._replace(overrides={key: value for key, value in found.overrides.items() if key not in own})
    recipe, source = job.recipe, job.source
    errors = find_mistakes([*others, *found.words(), *given], source=source, recipe=recipe, rules=lambda cfg: [])
    remarks = "".join(f"\n  {line}" for line in found.remarks())
    title = f"the options of {found.trainer}" if options else "the options"
    refuse_mistakes(errors, job.world, remedy=f"{title} as keys:\n\n{found.command(given)}\n{remarks}")
