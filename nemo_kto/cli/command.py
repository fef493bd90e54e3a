"""The class of the commands, their options and option types, and access to the tools, which the core does not import."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import click

from nemo_kto.errors import UserError, either
from nemo_kto.telemetry import console

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Function], Function]
SETTINGS: dict[str, Any] = {"max_content_width": 120}


def printing_option(*names: str, about: str, text: Callable[[click.Context], str]) -> click.Option:
    """Return an option that prints a text and ends the command; click's own print bytes, which console.protect lacks."""

    def show(context: click.Context, option: click.Parameter, given: bool) -> None:
        if given:
            print(text(context))
            context.exit()

    return click.Option(names, help=about, is_flag=True, is_eager=True, expose_value=False, callback=show)


HELP = printing_option("--help", "-h", about="Show this text and exit.", text=click.Context.get_help)


class CheckedCommand(click.Command):
    """A command that raises UserError for mistakes on its command line."""

    def get_help_option(self, ctx: click.Context) -> click.Option:
        return HELP

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words after the name; click.UsageError names all arguments and options that are missing."""
        given, further, order = self.make_parser(ctx).parse_args(args=list(args))
        if not ctx.resilient_parsing and HELP not in order:
            if further:
                arguments = [_name(each) for each in self.get_params(ctx) if isinstance(each, click.Argument)]
                last = f"{arguments[-1]} must be the last argument" if arguments else "there must be no argument"
                raise click.UsageError(f"{last}, got {' '.join(further)}{' after it' if arguments else ''}", ctx)
            required = [parameter for parameter in self.get_params(ctx) if parameter.required]
            missing = [_name(each) for each in required if each.value_is_missing(each.consume_value(ctx, given)[0])]
            if missing:
                raise click.UsageError(f"{', '.join(missing)} must be given, got none", ctx)
        return super().parse_args(ctx, args)

    def __call__(self, argv: Sequence[str]) -> Any:  # type: ignore[override]
        """Run the command with the words after its name, and return its exit status."""
        return invoke(self, argv, program=f"nemo-kto {self.name}")


def invoke(command: click.Command, argv: Sequence[str], *, program: str) -> int | None:
    """Run a command, called ``program`` in its help, and return its exit status; UserError for mistakes in ``argv``."""
    try:
        with usage_errors(), command.make_context(program, list(argv)) as context:
            status: int | None = command.invoke(context)
            return status
    except click.exceptions.Exit as end:  # after --help
        with console.exit_if_output_lost():
            return end.exit_code


def command(
    name: str, description: str, *, kind: type[CheckedCommand] = CheckedCommand
) -> Callable[[Callable[..., Any]], CheckedCommand]:
    """Return the decorator that makes a command of a function of its options."""
    return click.command(name, cls=kind, help=description, context_settings=SETTINGS)


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn errors of click into UserErrors that name the option or argument first."""
    try:
        yield
    except click.UsageError as error:
        context, parameter = error.ctx, getattr(error, "param", None)
        name = "" if parameter is None else _name(parameter)
        remedy = "--help" if context is None else f"{context.command_path} --help"
        if isinstance(error, click.NoSuchOption):
            text = f"there is no option {error.option_name}{did_you_mean(error.possibilities)}"
        elif parameter is not None:
            raise UserError(f"{name} {error.message}") from None
        elif error.message == "Missing command.":
            raise UserError(f"a command must be given, got none; {remedy} lists them") from None
        else:
            text = error.format_message().rstrip(".")
        raise UserError(f"{text}; {remedy} lists arguments and options") from None


def did_you_mean(similar: Sequence[str] | None) -> str:
    """Return the question whether one of these names was meant."""
    return f", did you mean {either(similar)}?" if similar else ""


def _name(parameter: click.Parameter) -> str:
    return max(parameter.opts, key=len) if isinstance(parameter, click.Option) else parameter.human_readable_name


class Reader(click.ParamType):
    """The type of the values that a function reads, whose UserError explains a wrong one."""

    name = "value"

    def __init__(self, *, read: Callable[[str], object]) -> None:
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value of a text; defaults are values already."""
        try:
            return self._read(value) if isinstance(value, str) else value
        except UserError as error:
            self.fail(str(error), param, ctx)


class WordChoice(click.Choice[str]):
    """One of several words."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"must be {either([str(choice) for choice in self.choices])}, got {value}"


class File(click.Path):
    """A path, which the command checks."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return Path(value)


def integer_from(least: int) -> Reader:
    """Return the type of integers of at least ``least``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise UserError(f"must be an integer of at least {least}, got {text}")
        return int(text)

    return Reader(read=read)


def number(constraint: str, holds: Callable[[float], bool], *, remedy: str = "") -> Reader:
    """Return the type of finite numbers with a constraint, which is described for the message."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not holds(value):
            raise UserError(f"must be a number {constraint}, got {text}{remedy}")
        return value

    return Reader(read=read)


def _gpu_kind(text: str) -> str:
    """Return the key of ``memory.hardware.GPUS`` for a word in any case, such as H100."""
    from nemo_kto.memory.hardware import GPUS

    if text.lower() not in GPUS:
        raise UserError(f"must be {either(list(GPUS))}, got {text}; for another kind, give --memory GB too")
    return text.lower()


GPU_KIND = Reader(read=_gpu_kind)
_GIGABYTES = number("above 0, in 10^9 bytes", lambda value: value > 0, remedy="; e.g. --memory 80")
MEMORY_OPTION = click.option(
    "--memory", "--gpu-memory", "memory", type=_GIGABYTES, metavar="GB", help="memory of each rank, in 10^9 bytes"
)


def together(*decorators: Decorator[Any]) -> Decorator[Any]:
    """Return one decorator with the arguments and options of several, in their order."""

    def decorate(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def algorithm_choice() -> WordChoice:
    """Return the type of the names of algorithms."""
    from nemo_kto.algorithms.recipes import RECIPES

    return WordChoice(list(RECIPES))


def run_words(words: str = "MODEL DATA KEY=VALUE") -> Decorator[Any]:
    """Return the arguments and options of a run as in training: algorithm, words, and the user's configuration."""
    algorithms = algorithm_choice()
    return together(
        click.argument("algorithm", type=algorithms, metavar="|".join(algorithms.choices), help="the algorithm of the run"),
        click.argument("words", nargs=-1, metavar=words, help="as in training"),
        click.option("--config-name", metavar="FILE", help="your configuration file"),
        click.option("--config-dir", metavar="FOLDER", help="folder of that file"),
    )


def is_set(key: str, overrides: Iterable[str]) -> bool:
    """Return whether an override sets the key."""
    return any(text.lstrip("+").startswith(f"{key}=") for text in overrides)


_PACKAGE = "nemo_kto"


def is_present(module: str) -> bool:
    """Return whether a module of this package, such as tools.plan.auto, exists; it is not imported."""
    try:
        return importlib.util.find_spec(f"{_PACKAGE}.{module}") is not None
    except ModuleNotFoundError:  # the folder of a tool
        return False


def load(module: str) -> ModuleType:
    """Import a module of this package; UserError if a tool that it needs is absent."""
    try:
        return importlib.import_module(f"{_PACKAGE}.{module}")
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if not missing.startswith(f"{_PACKAGE}.tools"):
            raise
        raise UserError(
            f"{missing} must be installed for this, but is missing; install the whole package nemo-kto"
        ) from error


def tool(name: str) -> ModuleType:
    """Return a module of nemo_kto.tools, such as "plan.auto"; UserError if its tool is absent."""
    return load(f"tools.{name}")
