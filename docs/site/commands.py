"""The generated part of the page of commands: each command as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from nemo_kto.cli.main import COMMANDS, Commands
from nemo_kto.utils.text import markdown_table


def command_contexts() -> Iterator[click.Context]:
    """Yield each command except training, whose options are keys, with its name."""
    for name in sorted(COMMANDS):
        context, command = click.Context(Commands(), info_name="nemo-kto"), None
        for word in name.split():
            group = context.command
            assert isinstance(group, click.Group)
            command = group.get_command(context, word)
            assert command is not None, name
            context = click.Context(command, info_name=word, parent=context)
        yield context


def commands() -> str:
    """Return a section for each command: its usage, its description, its arguments and options."""
    shown: dict[tuple[str, str], str] = {}  # name and meaning of an option -> first command that has it
    return "\n\n".join(_section(context, shown) for context in command_contexts())


def _section(context: click.Context, shown: dict[tuple[str, str], str]) -> str:
    parameters, path = context.command.params, context.command_path
    arguments = [parameter for parameter in parameters if isinstance(parameter, click.Argument)]
    usage = " ".join([path, *map(_in_usage, arguments)]) + (" [OPTION ...]" if len(arguments) < len(parameters) else "")
    options = [(_name(parameter), parameter.help or "") for parameter in parameters]
    first = [shown.setdefault(option, path) for option in options]
    rows: dict[str, list[str]] = {}  # meaning -> options
    for (name, text), command in zip(options, first, strict=True):
        rows.setdefault(f"as for `{command}`" if command != path and first.count(command) > 2 else text, []).append(name)
    cells = [(f"`{_escaped(', '.join(names))}`", _escaped(text)) for text, names in rows.items()]
    parts = [
        f"## {path}",
        f"```text\n{usage}\n```",
        _paragraphs(context.command.help or ""),
        markdown_table(("argument", "meaning"), cells),
    ]
    return "\n\n".join(filter(None, parts))


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")


def _paragraphs(text: str) -> str:
    text = re.sub(r"(?<![\w`-])--?[a-z][\w-]*", r"`\g<0>`", text.replace("<", r"\<").replace("*", r"\*"))
    return " ".join(text.split())


def _in_usage(argument: click.Argument) -> str:
    name = argument.human_readable_name
    return name if argument.nargs == 1 else f"{name} ..." if argument.required else f"[{name} ...]"


def _name(parameter: click.Parameter) -> str:
    if not isinstance(parameter, click.Option):
        return parameter.human_readable_name
    options = ", ".join(parameter.opts)
    return f"{options} {parameter.metavar}" if parameter.metavar else options
