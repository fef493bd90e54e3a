"""Text that is written or printed: escapes for terminal, Markdown, HTML and shell, numbers and values."""

from __future__ import annotations

import html
import re
import shlex
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nemo_kto.redaction import redacted

_TURNED = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # change the direction of the text after them
_HARMLESS = "\t\n"
_MARKDOWN = re.compile(r"[\\`*_{}\[\]<>|#~&]")
_MARKDOWN_START = re.compile(r"^(?:\d+(?=[.)](?:\s|$))|(?=[-+=]))")  # of a list, or of the line below a heading


def terminal_text(text: str) -> str:
    r"""Return text for a terminal or a file: control characters, except tabs and newlines, as escapes such as ``\x1b``.

    The same holds for line separators, characters that change the direction of text, and lone surrogates.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(repr(each)[1:-1] if _controls(each) else each for each in text)


def terminal_line(text: str) -> str:
    """Return :func:`terminal_text` for one line: tabs and newlines are escaped as well."""
    return terminal_text(text).replace("\t", r"\t").replace("\n", r"\n")


def print_error(text: str) -> None:
    """Write a message to stderr as :func:`terminal_text`, without secrets."""
    sys.stderr.write(f"{terminal_text(redacted(text))}\n")
    sys.stderr.flush()


def markdown_text(text: str) -> str:
    """Return text for one line of Markdown, or a cell of a table, that is shown as it is; spaces are joined."""
    line = " ".join(terminal_text(text).split())
    return _MARKDOWN_START.sub(r"\g<0>\\", _MARKDOWN.sub(r"\\\g<0>", line))


def markdown_code(text: str) -> str:
    """Return text as code in Markdown, also in a cell of a table; text that would end the code is escaped instead."""
    line = " ".join(terminal_text(text).split())
    return f"`{line}`" if line and not re.search(r"[`|\\]", line) else markdown_text(text)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; the cells are written as they are."""
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(header)}", *lines[1:]])


def aligned(rows: Sequence[Sequence[str]], *, indent: str = "") -> Iterator[str]:
    """Yield the rows of a table as lines of text, with the cells of a column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield indent + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def html_text(text: str) -> str:
    """Return text for HTML, also in a quoted attribute."""
    return html.escape(terminal_text(text))


def _controls(character: str) -> bool:
    category = unicodedata.category(character)
    return (category in ("Cc", "Cs", "Zl", "Zp") and character not in _HARMLESS) or character in _TURNED


def shell_comment(text: str) -> str:
    """Return a comment of a shell script: one line, in which control characters are visible as escapes."""
    return "# " + "".join(char if char.isprintable() else _escape(char) for char in text)


def shell_word(word: str) -> str:
    """Return a word quoted for a shell; one with control characters as $'...', in which they are visible as escapes."""
    if word.isprintable():
        return shlex.quote(word)
    quoted = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{''.join(char if char.isprintable() else _escape(char) for char in quoted)}'"


def _escape(char: str) -> str:
    r"""Return an escape that means the same character in Python and in $'...', where \x80 would be a byte."""
    return f"\\u{ord(char):04x}" if 128 <= ord(char) < 256 else char.encode("unicode_escape").decode("ascii")


def mixture_name(weights: Mapping[str, object]) -> str:
    """Return how messages and reports name a mixture.

    Examples:
        >>> mixture_name({"dpo": 0.8, "bco_pair": 0.2})
        '0.8 dpo + 0.2 bco_pair'
    """
    return " + ".join(f"{weight} {name}" for name, weight in weights.items())


MINUS = "\N{MINUS SIGN}"
_UNITS = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))  # from this size on, the number divided by this, with this unit
_TRAILING_ZEROS = re.compile(r"\.?0*e-0*")


def percent_text(share: float) -> str:
    """Format a share: "62.5 %"."""
    return f"{share:.1%}".replace("%", " %")


def interval_text(interval: tuple[float, float]) -> str:
    """Format an interval of shares, in percent: "[54.0, 70.1]"."""
    return f"[{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def number_text(value: float, digits: int = 4) -> str:
    """Format a number for an axis or a table, as short as its digits allow.

    Numbers from 1,000 to 10,000 have all their digits before the point; those below 0.001 have an exponent.

    Examples:
        >>> [number_text(value) for value in (12_000, 0.25, 2_500_000, 0.00025, 0)]
        ['12k', '0.25', '2.5M', '2.5e-4', '0']
        >>> number_text(1899.3, digits=3)
        '1899'
    """
    size = abs(value)
    divisor, unit = next(((divisor, unit) for limit, divisor, unit in _UNITS if size >= limit), (1.0, ""))
    text = f"{size / divisor:.{digits}g}"
    if 0 < size < 1e-3:
        text = _TRAILING_ZEROS.sub("e-", f"{size:.{digits - 1}e}")
    elif "e" in text:
        text = f"{size / divisor:.0f}"
    return f"{MINUS if value < 0 else ''}{text}{unit}"


def value_text(value: object) -> str:
    """Write the value of a key as on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {value_text(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    return str(value)
