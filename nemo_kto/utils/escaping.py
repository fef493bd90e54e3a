"""Escaping of text from other sources, one function for each target."""

from __future__ import annotations

import shlex


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
