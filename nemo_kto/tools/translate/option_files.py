"""Files of other trainers with their options: YAML, JSON, shell scripts with a command line, and programs with TRL."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nemo_kto.errors import UserError, printable, show
from nemo_kto.tools.translate.trainer_options import table, too_large
from nemo_kto.tools.translate.trl_programs import find_method, read_program
from nemo_kto.utils.files import load_yaml, read_bytes

_MAX_BYTES = 2**20  # of a file; a script may have twice that with the values of its variables
# Names in torchrun, deepspeed, ms-swift and accelerate: processes of each machine, machines, and processes of all machines.
_RANKS = (("nproc_per_node", "num_gpus"), ("nnodes", "num_machines"), ("num_processes",))
_ENVIRONMENT = ("nproc_per_node", "nnodes", "use_hf")  # variables that ms-swift reads, in capitals
_VALUE = r"\$(?:\w+|\{[^{}\n]*\}|\((?:[^()\n]|\([^()\n]*\))*\)|[@*#?!$])"
_PIECE = re.compile(
    rf"""\\(?:\r?\n|\Z) | \\(?P<escaped>.) | '(?P<single>[^']*)' | "(?P<double>[^"\\]*(?:\\.[^"\\]*)*)" | (?P<value>{_VALUE})
    | (?P<end>[\n;&|()<>`]+) | (?P<space>[ \t\r]+) | (?P<plain>[^\s\\'"$;&|()<>`]+|[$\f\v])""",
    re.VERBOSE | re.DOTALL,
)
_IN_QUOTES = re.compile(rf'\\(?P<escaped>[$`"\\\n])|(?P<value>{_VALUE})')
_VARIABLE = re.compile(r"\$\{?(?P<name>\w+)(?::?-(?P<default>[^{}$`]*))?\}?")
_QUOTIENT = re.compile(r"(?:expr\s|\()\s*(\d{1,15})\s*/\s*(\d{1,15})\s*\)?")  # of $(expr 16 / 4) and $((16 / 4))
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)


class GivenOptions(NamedTuple):
    """Options in a file of another trainer; the trainer and method if its command or program implies them."""

    values: dict[str, Any]
    trainer: str | None
    method: str | None
    without: dict[str, str]  # option as given -> why its value cannot be read
    notes: list[str]


def read_options(file: Path) -> GivenOptions:
    """Return the options in a file of another trainer; raise UserError if there are none."""
    text = _read(file)
    given = None
    if file.suffix == ".py":
        given = GivenOptions(*read_program(text, file))
    elif file.suffix not in (".yaml", ".yml", ".json"):
        given = _script_options(text, file)
    given = given or GivenOptions(_yaml_options(text, file), None, None, {}, [])
    for name, value in given.values.items():
        if (wrong := too_large(value)) is not None:
            line = next((number for number, each in enumerate(text.split("\n"), 1) if name in each), 1)
            raise UserError(f"FILE must have {wrong}, got others in {name} ({file}:{line}); correct them")
    return given._replace(values=_with_ranks(given.values))


def _read(file: Path) -> str:
    try:
        return read_bytes(file, limit=_MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"FILE must be a text file that can be read, got {file}: {error}") from error


def _yaml_options(text: str, file: Path) -> dict[str, Any]:
    try:
        content = load_yaml(text)
    except ValueError as error:
        raise UserError(f"FILE must be valid YAML, got {file}: {error}") from error
    if not isinstance(content, dict) or not content:
        raise UserError(f"FILE must have options KEY: VALUE, or a command line with --KEY VALUE, got none in {file}")
    return {str(name): value for name, value in content.items()}


def _with_ranks(values: dict[str, Any]) -> dict[str, Any]:
    """Name the numbers of machines, and of processes on each, as ms-swift names them."""
    ranks, nodes, total = (next((values.pop(name) for name in names if name in values), None) for names in _RANKS)
    if ranks is None and all(re.fullmatch(r"\d{1,9}", str(number)) for number in (total, nodes or 1)):
        ranks = int(str(total)) // max(1, int(str(nodes or 1)))
    found = {"nproc_per_node": total if ranks is None else ranks, "nnodes": nodes}
    return values | {name: value for name, value in found.items() if value is not None}


class _Command(NamedTuple):
    """A command of a shell script."""

    line: int
    words: list[str]
    assigned: dict[str, str]  # variables before it
    open: set[str]  # words of the script with a part whose value it does not show

    def entry(self) -> tuple[int, str | None, str | None]:
        """Return the number of words before the options of a training, 0 if it is none, its trainer and its method."""
        for index, word in enumerate(self.words):
            program, following = word.rpartition("/")[2], "".join(self.words[index + 1 : index + 2])
            if program in ("swift", "megatron") and following == "rlhf":
                return index + 2, "megatron-swift" if program == "megatron" else "ms-swift", None
            if program == "trl" and following in table()["methods"]:
                return index + 2, "trl", following
            if (program.endswith(".py") or word.startswith("trl.")) and not word.startswith("-"):  # trl.scripts.kto
                named = [part for part in re.split(r"[^a-z]+", program.lower()) if part in table()["methods"]]
                return index + 1, None, next(iter(named), None)
        return 0, None, None


def _script_options(text: str, file: Path) -> GivenOptions | None:
    """Return the options of the training command of a shell script, which is not run; None if it has no options."""
    script = _Script(file=file)
    script.read(text)
    commands = [(each.entry(), each) for each in script.commands if any(word.startswith("--") for word in each.words)]
    if not commands:
        return None
    (start, trainer, method), command = max(commands, key=lambda each: (each[0][0] > 0, len(each[1].words)))
    place, without = f"{file}:{command.line}", dict[str, str]()
    others = [str(each.line) for entry, each in commands if entry[0] and each is not command]
    notes = [f"{place} is translated, and the training in line {', '.join(others[:9])} is not"] if others else []
    environment = script.variables | command.assigned
    values: dict[str, Any] = {name: environment[name.upper()] for name in _ENVIRONMENT if name.upper() in environment}
    for name, value in read_command_line([word for word in command.words[: max(0, start - 1)] if word != "-m"]):
        if any(name in names for names in _RANKS):
            values[name] = value
        elif name:
            notes.append(f"--{name} of the launcher is not read; --ranks N is the number of GPUs")
    words, config = _config_file(command.words[start:], place, file)
    values |= config
    for name, value in read_command_line(words):
        parts = [str(value), f"--{name}={value}"] if not isinstance(value, list) else [*value, f"--{name}={value[-1]}"]
        is_open = not command.open.isdisjoint(parts)
        if not name or is_open:
            reason = "does not show its value; write it there" if is_open else "has it before the options"
            without[printable(f"{name}={value}" if name else str(value))] = f"{place} {reason}"
        else:
            values[name] = value
    if trainer not in (None, "trl"):
        values.setdefault("rlhf_type", "dpo")  # the default of ms-swift
    program = file.parent / command.words[max(0, start - 1)]
    if start and method is None and trainer is None and os.path.isfile(program):
        method = find_method(_read(program))
    return GivenOptions(values, trainer, method, without, notes)


def _config_file(words: Sequence[str], place: str, file: Path) -> tuple[list[str], dict[str, Any]]:
    """Return a command line without --config FILE, or FILE as its first word, and the options in that YAML file."""
    rest = [part for word in words for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if rest[:1] and rest[0].endswith((".yaml", ".yml", ".json")):
        rest.insert(0, "--config")
    if "--config" not in rest[:-1]:
        return list(words), {}
    index = rest.index("--config")
    name = rest[index + 1]
    found = next((path for path in (file.parent / name, Path(name)) if os.path.isfile(path)), None)
    if found is None:
        got = printable(name, 200)
        raise UserError(f"{place} must name a --config that exists, got {got}; put it beside the script, or translate it")
    return rest[:index] + rest[index + 2 :], _yaml_options(_read(found), found)


def read_command_line(words: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield the options --NAME VALUE ... and --NAME=VALUE; one without a value is true, and words before have no name."""
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if name or values:
            yield name, (values[0] if len(values) == 1 else values or True)
        name, separator, value = word[2:].partition("=")
        name, values = name.replace("-", "_"), [value] if separator else []


@dataclass(kw_only=True)
class _Script:
    """Splits a shell script into commands and replaces the variables that it assigns."""

    file: Path
    commands: list[_Command] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    line: int = 1
    start: int = 1  # line in which the command begins
    size: int = 0
    words: list[str] = field(default_factory=list)
    word: list[str] | None = None  # parts of the word that is read
    is_open: bool = False  # the word has a part without a value
    open: set[str] = field(default_factory=set)

    def read(self, text: str) -> None:
        position = 0
        while position < len(text):
            piece = _PIECE.match(text, position)
            if piece is None:
                got = show(text[position : position + 40])
                raise UserError(f"FILE must have closed quotes, got {got} in {self.file}:{self.line}; close them")
            if piece["plain"] is not None and self.word is None and piece[0].startswith("#"):
                end = text.find("\n", position)
                position = len(text) if end < 0 else end
                continue
            self._add(piece)
            position = piece.end()
            self.line += piece[0].count("\n")
        self._end_command()

    def _add(self, piece: re.Match[str]) -> None:
        text = next((piece[kind] for kind in ("escaped", "single", "plain") if piece[kind] is not None), None)
        if text is not None:
            self._append(text)
        elif piece["double"] is not None:
            self._append(_IN_QUOTES.sub(lambda part: part["escaped"] or self._expand(part["value"]), piece["double"]))
        elif piece["value"] is not None:
            value = self._expand(piece["value"])
            for number, part in enumerate([value] if value == piece[0] else value.split()):
                if number:
                    self._end_word()
                self._append(part)
        elif piece["space"] is not None:
            self._end_word()
        elif piece["end"] is not None:
            if piece[0][0] in "<>" and "".join(self.word or ()).isdecimal():
                self.word = None  # 2> is no word
            self._end_command()

    def _append(self, text: str) -> None:
        self.word = [] if self.word is None else self.word
        self.word.append(text)
        self.size += len(text)
        if self.size > 2 * _MAX_BYTES:
            limit = f"{2 * _MAX_BYTES:,} bytes with the values of its variables"
            raise UserError(f"FILE must have at most {limit}, got more in {self.file}:{self.line}; shorten it")

    def _expand(self, text: str) -> str:
        """Return the value for $NAME, ${NAME:-DEFAULT} or $(expr A / B); others as they are written."""
        variable = _VARIABLE.fullmatch(text)
        if variable is not None and (value := self.variables.get(variable["name"], variable["default"])) is not None:
            return value
        inner = re.sub(r"\$\{?(\w+)\}?", lambda part: self.variables.get(part[1], part[0]), text[2:-1])
        numbers = _QUOTIENT.fullmatch(inner.strip()) if text.startswith("$(") else None
        if numbers is not None and int(numbers[2]):
            return str(int(numbers[1]) // int(numbers[2]))
        self.is_open = True
        return text

    def _end_word(self) -> None:
        if self.word is not None:
            self.start = self.start if self.words else self.line
            self.words.append("".join(self.word))
            if self.is_open:
                self.open.add(self.words[-1])
        self.word, self.is_open = None, False

    def _end_command(self) -> None:
        self._end_word()
        rest = self.words[1:] if self.words[:1] in (["export"], ["declare"], ["local"], ["readonly"]) else self.words
        given = dict[str, str]()
        while rest and (assigned := _ASSIGNMENT.fullmatch(rest[0])) is not None:
            given |= {} if rest[0] in self.open else {assigned[1]: assigned[2]}
            rest = rest[1:]
        if rest:
            self.commands.append(_Command(self.start, rest, given, self.open))
        else:
            self.variables |= given
        self.words = []
