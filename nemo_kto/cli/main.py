"""The command `nemo-kto`: the table of its commands, and the one place where each ends, with its status and message."""

from __future__ import annotations

import contextlib
import difflib
import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.shell_completion import BashComplete, add_completion_class, shell_complete

from nemo_kto import __version__
from nemo_kto.cli.command import HELP, SETTINGS, did_you_mean, invoke, is_present, load, printing_option
from nemo_kto.cli.train_command import TrainingCommand, train
from nemo_kto.errors import UserError, either
from nemo_kto.processes import ranks
from nemo_kto.telemetry import console
from nemo_kto.utils.text import print_error, terminal_line

if TYPE_CHECKING:
    from nemo_kto.algorithms.recipes import Recipe

__all__ = ["main", "train"]

_COMPLETE = "_NEMO_KTO_COMPLETE"  # environment variable with which a shell asks for completions


class Entry(NamedTuple):
    """A command in the table: the module of this package that contains it, the line about it, and its name there."""

    module: str
    summary: str
    name: str = "main"
    logs: bool = False  # whether it shows what the modules of this package log


# Imported when they are used. Those in tools/ vanish from the list where the folder of the tool is absent.
COMMANDS = {
    "export": Entry("cli.export_command", "Write a checkpoint in Hugging Face format, or publish it on the hub.", logs=True),
    "chat": Entry(
        "tools.chat.chat_command", "Talk with a trained model, beside the one that the run started from.", logs=True
    ),
    "sample": Entry("tools.rounds.sample_command", "Write answers of a model to the prompts of a file.", logs=True),
    "label": Entry("tools.rounds.label_command", "Label answers by hand, by a function or by a model.", logs=True),
    "compare": Entry("tools.rounds.compare_command", "Win rate of a model against another one.", logs=True),
    "import": Entry(
        "tools.convert.import_command", "Write a .nemo or Megatron checkpoint in Hugging Face format.", logs=True
    ),
    "plan": Entry("tools.plan.plan_command", "Estimate memory and speed of a run; find layouts that fit.", logs=True),
    "check": Entry("tools.plan.check_command", "Check every key, file and row of a run, without its GPUs.", logs=True),
    "translate": Entry("tools.translate.translate_command", "Print the command for a configuration of TRL or ms-swift."),
    "report": Entry("tools.report.report_command", "Write a page about a run, or a comparison of several."),
    "ui": Entry("tools.ui.ui_command", "Open a page on this machine that checks, starts and watches runs."),
    "data preview": Entry("tools.inspect.preview_command", "Show the first rows of a file as the model sees them."),
    "data check": Entry("tools.inspect.check_data_command", "Report statistics and invalid rows of data files."),
    "data tokenise": Entry("cli.tokenise_command", "Tokenise the rows of a run in advance, with all cores.", logs=True),
    "checkpoint ls": Entry("cli.checkpoint_command", "List the checkpoints of a run.", "ls"),
    "checkpoint verify": Entry("cli.checkpoint_command", "Compare every file of checkpoints with its hash.", "verify"),
}
_ABOUT = "nemo-kto: alignment training of large language models on human feedback, on one CPU or many GPUs"
_VERSION = printing_option("--version", about="Show the version and exit.", text=lambda _: f"nemo-kto {__version__}")
_GROUPS = {"data": "Look at data files, and tokenise them.", "checkpoint": "List or verify the checkpoints of a run."}
_FIRST_RUN = """\
nemo-kto {names} MODEL DATA [KEY=VALUE ...] trains the model of a Hugging Face folder, or hf:ORG/NAME, and writes the aligned
one to {folders}, in Hugging Face format. nemo-kto {names} --help lists all keys, nemo-kto COMMAND --help the options.
"""


@add_completion_class
class _BashCompletion(BashComplete):
    """Completion in bash, with the names of files where no command or option fits."""

    source_template = BashComplete.source_template.replace("complete -o nosort", "complete -o default -o nosort")


class Commands(click.Group):
    """All commands, or those whose names begin with the name of the group."""

    def __init__(self, *, name: str = "nemo-kto", about: str = _ABOUT, prefix: str = "") -> None:
        settings: dict[str, Any] = {"context_settings": SETTINGS, "no_args_is_help": False, "options_metavar": ""}
        super().__init__(name, help=about, subcommand_metavar="COMMAND [ARGUMENT ...]", **settings)
        self._prefix = prefix
        self.params += [] if prefix else [_VERSION]

    def get_help_option(self, ctx: click.Context) -> click.Option:
        return HELP

    def entries(self) -> Iterator[tuple[str, str]]:
        """Yield the names of the commands that exist, without that of the group, and the lines about them."""
        if not self._prefix:
            yield from ((recipe.name, f"{recipe.title}: MODEL DATA [KEY=VALUE ...]") for recipe in _recipes().values())
        for name, entry in COMMANDS.items():
            if name.startswith(self._prefix) and is_present(entry.module):
                yield name.removeprefix(self._prefix), entry.summary

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the first words of these names."""
        return list(dict.fromkeys(name.split()[0] for name, _ in self.entries()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, which is imported now, or the group of a first word; None if there is neither."""
        if cmd_name in _GROUPS and not self._prefix:
            return Commands(name=cmd_name, about=_GROUPS[cmd_name], prefix=f"{cmd_name} ")
        entry = COMMANDS.get(f"{self._prefix}{cmd_name}")
        if entry is not None and is_present(entry.module):
            command: click.Command = getattr(load(entry.module), entry.name)
            return command
        recipe = None if self._prefix else _recipes().get(cmd_name)
        return None if recipe is None else TrainingCommand(recipe=recipe)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command of the first word with the other words; UserError, except in completion, if there is none."""
        if (command := self.get_command(ctx, args[0])) is None and not ctx.resilient_parsing:
            known = self.list_commands(ctx)
            similar = did_you_mean(difflib.get_close_matches(args[0], known, n=1))
            if not self._prefix and difflib.get_close_matches(args[0], ["train"]):
                similar = did_you_mean(list(_recipes()))
            where = f"{ctx.command_path} --help"
            raise UserError(f"the command must be {either(known)} ({where}), got {terminal_line(args[0])}{similar}")
        return args[0], command, args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of the commands, none of which is imported."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.entries()))
        if not self._prefix:
            names = "|".join(_recipes())
            folders = " or ".join(f"results/{recipe.config_name}/hf" for recipe in _recipes().values())
            formatter.write_paragraph()
            formatter.write_text(_FIRST_RUN.format(names=names, folders=folders))


def _recipes() -> Mapping[str, Recipe]:
    from nemo_kto.algorithms.recipes import RECIPES  # a third of the time of a command that does not use them

    return RECIPES


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command `nemo-kto`."""
    if instruction := os.environ.get(_COMPLETE):
        sys.exit(shell_complete(Commands(), {}, "nemo-kto", _COMPLETE, instruction))
    console.protect()
    words = list(sys.argv[1:] if argv is None else argv)
    words = ["--help", *words[1:]] if words[:1] in ([], ["help"]) else words
    name = next((name for count in (2, 1) if (name := " ".join(words[:count])) in COMMANDS), "")
    entry = COMMANDS.get(name)
    if entry is not None and entry.logs:
        console.set_up_logging(rank=0)
    gc.disable()  # imports dominate the time of short commands, and imported objects are never freed
    try:
        # the result of an export, or of a training, is not its output
        with contextlib.nullcontext() if name in ("", "export") else console.exit_if_output_lost():
            if status := _status(words, name):
                sys.exit(status)
    except KeyboardInterrupt:
        ranks.exit_rank(ranks.INTERRUPTED, world=None)
    finally:
        gc.enable()


def _status(words: Sequence[str], name: str) -> int | None:
    """Run a command line, and return its exit status; print the mistakes of the user."""
    try:
        return invoke(Commands(), words, program="nemo-kto")
    except UserError as error:
        name = name or (words[0] if words[0] in _recipes() else "")
        print_error(f"{f'nemo-kto {name}'.rstrip()}: {error}")
        return ranks.USAGE_ERROR


if __name__ == "__main__":
    main()
