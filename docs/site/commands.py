"""The generated part of the page of commands: the parser of each command as Markdown."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from unittest import mock

from nemo_kto.cli import main
from nemo_kto.utils.text import markdown_table


class _Found(BaseException):
    """Carries a parser out of its command, before it parses anything."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of each command except training, whose options are keys."""
    for command in ["export", *main._PRINTING]:
        parser = _parser(command)
        inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        yield from (each for action in inner for each in action.choices.values()) if inner else [parser]


def _parser(command: str) -> argparse.ArgumentParser:
    def find(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Found(parser)

    parsing = mock.patch.object(argparse.ArgumentParser, "parse_known_args", find)
    with parsing, mock.patch.object(argparse.ArgumentParser, "parse_known_intermixed_args", find):
        try:
            main.main(command.split())
        except _Found as found:
            return found.parser
    raise AssertionError(f"{command} parses no arguments")


def commands() -> str:
    """Return a section for each command: its usage, its description, its arguments and options."""
    return "\n\n".join(map(_section, sorted(parsers(), key=lambda parser: parser.prog)))


def _section(parser: argparse.ArgumentParser) -> str:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    usage = " ".join([parser.prog, *(_positional(action) for action in actions if not action.option_strings)])
    usage += " [OPTION ...]" if any(action.option_strings for action in actions) else ""
    rows = [[_escaped(text) for text in (f"`{_name(action)}`", action.help or "")] for action in actions]
    parts = [
        f"## {parser.prog}",
        f"```text\n{usage}\n```",
        _paragraphs(parser.description or ""),
        markdown_table(("argument", "meaning"), rows),
    ]
    return "\n\n".join(filter(None, parts))


def _escaped(text: str) -> str:
    return text.replace("%%", "%").replace("|", r"\|")


def _paragraphs(text: str) -> str:
    text = re.sub(r"(?<![\w`-])--?[a-z][\w-]*", r"`\g<0>`", text.replace("<", r"\<").replace("*", r"\*"))
    return " ".join(text.split())


def _positional(action: argparse.Action) -> str:
    name = _value(action)
    return {"*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name)


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return _value(action)
    options = ", ".join(action.option_strings)
    return options if action.nargs == 0 else f"{options} {_value(action)}"


def _value(action: argparse.Action) -> str:
    if action.metavar is None and action.choices is not None:
        return "|".join(map(str, action.choices))
    return str(action.metavar or action.dest.upper())
