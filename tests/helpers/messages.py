"""Assertions about messages: each contains its parts, and equals its entry in tests/data/messages.yaml.

``pytest --update-messages`` rewrites the entries of the tests that it runs; ``--matrix=full`` includes every combination.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
SNAPSHOT = REPOSITORY / "tests" / "data" / "messages.yaml"
_TEMPORARY = re.escape(os.path.realpath(tempfile.gettempdir()))
# Parts of a message that differ between machines and runs, and their placeholders in the snapshot.
_PLACEHOLDERS = {
    rf"{_TEMPORARY}/pytest-of-[^/\s]+/pytest-\d+(/popen-gw\d+)?(/[^/\s]*?\d+(?![\w-]))?": "<tmp>",
    rf"{_TEMPORARY}/tmp\w{{8}}": "<tmp>",
    re.escape(str(REPOSITORY)): "<repository>",
    re.escape(sys.prefix): "<environment>",
    r"\b0x[0-9a-f]{6,}": "<address>",
    r"\b[0-9a-f]{24,64}(?=\.(sha256|arrow))": "<hash>",
    r"/proc/\d+": "/proc/<number>",
}
Snapshot = dict[str, dict[str, list[str]]]  # test file, test, messages
_seen: dict[str, list[str]] = {}  # in this session, by the id of the test
_passed: set[str] = set()
_collected: set[str] = set()
_updating = False


def plain(text: str, varies: Sequence[str] = ()) -> str:
    """The text with a placeholder for each path of this machine, and ``<...>`` for each match of a pattern in ``varies``."""
    for pattern, placeholder in (_PLACEHOLDERS | dict.fromkeys(varies, "<...>")).items():
        text = re.sub(pattern, placeholder, text)
    return text


def missing(text: str, parts: Sequence[str]) -> list[str]:
    """The parts that the text does not contain as complete words or numbers, at separate places, in any order."""
    absent = []
    for part in sorted(parts, key=len, reverse=True):
        before, after = (r"(?<![\w.-])", r"(?!\w|\.\d)") if re.fullmatch(r"-?[\d.]+", part) else (r"(?<!\w)", r"(?!\w)")
        pattern = (before if re.match(r"[\w-]", part) else "") + re.escape(part) + (after if re.search(r"\w$", part) else "")
        if re.search(pattern, text):
            text = re.sub(pattern, "\0", text, count=1)
        else:
            absent.append(part)
    return absent


def assert_names(message: object, *parts: str) -> None:
    """Assert that a message (a text, or an exception) contains each part: key, value, remedy, or file and line."""
    failure = Naming(*parts).failure(str(message))
    assert not failure, failure


class Naming:
    """Equals a text (or an exception, or a ConfigError) that names each part.

    Args:
        parts: what every wording must contain: key, value, remedy, or file and line.
    """

    def __init__(self, *parts: str) -> None:
        self.parts = parts
        self._failure = ""

    def __eq__(self, other: object) -> bool:
        self._failure = self.failure(str(other))
        return not self._failure

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        failed = f" <- {self._failure}" if self._failure else ""
        return f"{type(self).__name__}({', '.join(map(repr, self.parts))}){failed}"

    def failure(self, text: str) -> str:
        """Why the text is not this message; empty if it is."""
        absent = missing(plain(text), [plain(part) for part in self.parts])
        return f"{absent} missing in: {text}" if absent else ""


class Message(Naming):
    """Equals a text that names each part and reads as it does in the snapshot.

    Args:
        parts: what every wording must contain.
        varies: patterns of what differs between runs, such as a time.
    """

    def __init__(self, *parts: str, varies: Sequence[str] = ()) -> None:
        super().__init__(*parts)
        self.varies = varies

    def replace(self, old: str, new: str) -> Message:
        """With another text in the parts, as of a string."""
        return Message(*(part.replace(old, new) for part in self.parts), varies=self.varies)

    def failure(self, text: str) -> str:
        """Why the text is not this message; empty if it is."""
        if failed := super().failure(text):
            return failed
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
        text = re.sub(r"\bprocess \d+", "process <number>", plain(text, self.varies))
        seen = _seen.setdefault(test, [])
        if text not in seen:
            seen.append(text)
        file, _, name = test.partition("::")
        if _updating or text in read_snapshot().get(file, {}).get(name, ()):
            return ""
        return f"not in {SNAPSHOT.relative_to(REPOSITORY)}, if it is right: pytest --update-messages '{test}'; {text}"


@contextmanager
def raises(error: type[BaseException] | tuple[type[BaseException], ...], *parts: str | Naming) -> Iterator[Any]:
    """Like ``pytest.raises``, of an error whose text is ``Message(*parts)``, or the one given."""
    with pytest.raises(error) as caught:
        yield caught
    message = parts[0] if isinstance(parts[0], Naming) else Message(*map(str, parts))
    failure = message.failure(str(caught.value))
    assert not failure, failure


def parsed(text: str) -> Snapshot:
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}


@cache
def read_snapshot() -> Snapshot:
    return parsed(SNAPSHOT.read_text()) if SNAPSHOT.exists() else {}


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Lines stay lines."""


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


def updated(stored: Snapshot, seen: dict[str, list[str]], collected: set[str]) -> Snapshot:
    """The snapshot with the messages of the tests in ``said``, and without tests that are not there any more.

    Args:
        collected: ids of tests; of a function that has tests among them, the other tests are dropped.
    """
    functions = {test.partition("[")[0] for test in collected}
    tests = {f"{file}::{name}": messages for file, names in stored.items() for name, messages in names.items()}
    kept = {
        test: messages for test, messages in tests.items() if test in collected or test.partition("[")[0] not in functions
    }
    result: Snapshot = {}
    for test, messages in sorted((kept | seen).items()):
        file, _, name = test.partition("::")
        path = REPOSITORY / file
        if (
            messages
            and path.exists()
            and re.search(rf"def {name.partition('[')[0].rpartition('::')[2]}\b", path.read_text())
        ):
            result.setdefault(file, {})[name] = messages
    return result


# The hooks: tests/conftest.py registers this module as a plugin.


def pytest_configure(config: pytest.Config) -> None:
    global _updating
    _updating = config.getoption("--update-messages")


def pytest_make_parametrize_id(val: object) -> str | None:
    """A message is called by its parts in the id of a test."""
    return ",".join(val.parts)[:50] if isinstance(val, Naming) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("[" in argument for argument in config.args):
        _collected.update(item.nodeid for item in items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Each worker of pytest-xdist adds what its tests saw; their controller saw none of it."""
    is_controller = not hasattr(session.config, "workerinput") and session.config.getoption("numprocesses", None)
    if is_controller or not (_updating and _passed):
        return
    seen = {test: _seen.get(test, []) for test in _passed}
    with SNAPSHOT.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        snapshot = updated(parsed(file.read()), seen, _collected)
        file.truncate(0)
        yaml.dump(snapshot, file, _Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)
