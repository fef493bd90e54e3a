"""Commands of the documentation: how the pages mark them, and which of them a test runs.

A block of commands begins with "```bash". tests/integration/test_documented_commands.py runs it, in a folder with the files
that the pages name, unless a word after "bash" says otherwise:

    needs=gpu           (or another of NEEDS) it needs more than a test has
    by=tests/FILE.py    that file runs such a command, with files of its own
    continue            it runs in the folder of the block before it, with that block's results

A block of "```console" shows commands after "$ " and their output, in which "..." stands for any text. The test runs
these commands as well, and looks for the shown output in the printed one, unless a mark says otherwise.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
NEEDS = {"gpu", "network", "slurm", "kubernetes", "docker", "time", "clone"}  # time: minutes or hours; clone: after `make`
_BLOCK = re.compile(r"^```(?P<language>\w*)(?P<marks>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    marks: tuple[str, ...]  # words after the language
    code: str
    line: int


def blocks(document: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = document.read_text(encoding="utf-8")
    found = _BLOCK.finditer(text)
    return [
        Block(match["language"], tuple(match["marks"].split()), match["code"], text[: match.start()].count("\n") + 1)
        for match in found
    ]


def runnable(document: Path, language: str = "bash") -> list[Block]:
    """The blocks of commands that a test runs; with "console" those that also show an output."""
    shells = [block for block in blocks(document) if block.language == language]
    return [block for block in shells if not any(mark.startswith(("needs=", "by=")) for mark in block.marks)]


def transcript(block: Block) -> list[tuple[str, str]]:
    """Each command of a console block, and the output below it."""
    return re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block.code, re.MULTILINE)


def commands(document: Path) -> list[str]:
    """Commands of all blocks, with continued lines joined and comments cut off."""
    fenced = blocks(document)
    shells = [block.code for block in fenced if block.language == "bash"]
    shells += [command for block in fenced if block.language == "console" for command, _ in transcript(block)]
    lines = "\n".join(shells).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].strip() for line in lines]


def modules(document: Path) -> dict[str, str]:
    """Python files that a page shows: blocks whose first line is "# NAME.py"."""
    shown = [block.code for block in blocks(document) if block.language == "python"]
    named = [(re.match(r"# (\w+\.py)\n", code), code) for code in shown]
    return {match[1]: code for match, code in named if match}
