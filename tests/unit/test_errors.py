"""Messages quote untrusted text safely."""

from __future__ import annotations

import pickle

import pytest

from nemo_kto.data.rows.records import DataError
from nemo_kto.errors import ConfigError, UserError, printable, show


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, \u00e4\u4e16", "plain, \u00e4\u4e16"),
        ("\x1b[2J\r\n\t\0", r"\x1b[2J\r\n\t\x00"),
        ("\u202eturned\u2028", r"\u202eturned\u2028"),
        ("\ud800", r"\ud800"),
        ("x" * 300, "x" * 300),
        ("a" * 5000 + "b" * 5000, "a" * 147 + " ... " + "b" * 147),
    ],
)
def test_text_from_outside_is_one_line_of_limited_length(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_messages_contain_no_terminal_control_characters() -> None:
    message = "first\n  second \x1b[31m\n" + "y" * 100_000
    for error in (UserError(message), DataError(message)):
        first, second, third = str(error).split("\n")
        assert (first, second, len(third)) == ("first", r"  second \x1b[31m", 1999)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(ConfigError("model.seed", "must be \x07")) == r"model.seed must be \x07"


def test_a_value_in_a_message() -> None:
    assert show("\x1b") == r"'\x1b'"
    assert show([1] * 100) == "[" + "1, " * 18 + "1,..."
    assert len(show("x" * 100)) == 60
