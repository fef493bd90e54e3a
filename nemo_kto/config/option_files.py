"""Files of other trainers with their options: YAML, JSON, and shell scripts with a command line."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_kto.errors import UserError
from nemo_kto.utils.files import load_yaml, read_bytes

# Such as $(expr 16 / 4) in a script.
_QUOTIENT = re.compile(r"\$\((?:expr|\() *(\d+) */ *(\d+) *\)\)?")
_RANKS = ("nproc_per_node", "num_processes")  # of torchrun, ms-swift and accelerate
_MAX_BYTES = 2**20


def read_options(file: Path) -> dict[str, Any]:
    """Return the options in a file of another trainer; raise UserError if there are none."""
    try:
        text = read_bytes(file, limit=_MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"FILE must be a text file that can be read, got {file}: {error}") from error
    is_script = file.suffix not in (".yaml", ".yml", ".json")
    content: Any = dict(_script_options(text)) if is_script else None
    try:
        content = content or load_yaml(text)
    except ValueError as error:
        if not is_script:
            raise UserError(f"FILE must be valid YAML, got {file}: {error}") from error
    if not isinstance(content, dict) or not content:
        raise UserError(f"FILE must have options KEY: VALUE, or a command line with --KEY VALUE, got none in {file}")
    ranks = next((content.pop(name) for name in _RANKS if name in content), None)
    return {str(name): value for name, value in content.items()} | ({} if ranks is None else {"nproc_per_node": ranks})


def _script_options(text: str) -> Iterator[tuple[str, object]]:
    """Yield the options of the longest command line of a shell script, with the algorithm in its name and its ranks."""
    lines = text.replace("\\\n", " ").splitlines()
    line = max(lines, key=lambda each: each.count(" --"), default="")
    assigned = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=(\S+)\s*$", text, re.MULTILINE))
    line = re.sub(r"\$\{?(\w+)\}?", lambda match: assigned.get(match[1], match[0]), line)
    line = _QUOTIENT.sub(lambda match: str(int(match[1]) // max(1, int(match[2]))), line)
    try:
        words = shlex.split(line, comments=True) if " --" in line else []
    except ValueError as error:
        raise UserError(f"FILE must be a shell script with closed quotes, got {line.strip()[:80]}: {error}") from error
    for word in words:
        name, separator, value = word.partition("=")
        if separator and name.lower() in (*_RANKS, "use_hf"):
            yield name.lower(), value
    yield from read_command_line(words)


def read_command_line(words: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield the options --NAME VALUE ... and --NAME=VALUE of a command line; an option without a value is true."""
    rest = list(itertools.dropwhile(lambda word: not word.startswith("--"), words))
    while rest:
        name, separator, value = rest.pop(0).partition("=")
        values = [value] if separator else []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        if name.startswith("--"):
            yield name[2:].replace("-", "_"), (values[0] if len(values) == 1 else values or True)
