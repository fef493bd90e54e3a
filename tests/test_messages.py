"""Messages of the package can be reworded: no test repeats them, and the snapshot can be rewritten."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import messages
from tests.helpers.messages import REPOSITORY, Message, assert_names, missing, plain, raises, updated

WORDS_IN_COMMON = 5


def texts_of(file: Path) -> Iterator[str]:
    """The string constants of a module without its docstrings; of f-strings the constant parts. Space is made single."""
    tree = ast.parse(file.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield " ".join(node.value.split())


def runs_of_words(text: str) -> Iterator[str]:
    words = text.split()
    return (" ".join(words[start : start + WORDS_IN_COMMON]) for start in range(len(words) - WORDS_IN_COMMON + 1))


def repeated(package: set[str], tests: set[str]) -> list[str]:
    """The texts of the tests that have five words in a row in common with a text of the package."""
    of_package = {run for text in package for run in runs_of_words(text)}
    return sorted(text for text in tests if any(run in of_package for run in runs_of_words(text)))


def test_no_test_repeats_a_message_of_the_package() -> None:
    package = {text for file in (REPOSITORY / "nemo_kto").rglob("*.py") for text in texts_of(file)}
    files = [file for file in (REPOSITORY / "tests").rglob("*.py") if file != Path(__file__)]
    assert repeated(package, {text for file in files for text in texts_of(file)}) == []


def test_a_repeated_message_is_detected() -> None:
    package = {"must be at least", "; name the folder of a Hugging Face model"}
    assert repeated(package, {"x must be at least 1, got 0", "name the folder of a model"}) == ["name the folder of a model"]
    assert repeated(package, {"name the folder of the model"}) == []


def test_each_part_matches_a_separate_place() -> None:
    text = "model.seed must be from 0 to 10, got -1; e.g. model.seed=1234"
    assert missing(text, ["model.seed=1234", "model.seed", "0", "10", "-1"]) == []
    assert missing(text, ["model.seed=12", "1", "see", "model.seed=1234", "model.seed", "model.seed"]) == [
        "model.seed=12",
        "model.seed",
        "see",
        "1",
    ]
    assert_names(text, "model.seed", "-1")
    with pytest.raises(AssertionError):
        assert_names(text, "model.seed", "11")


def test_paths_of_this_machine_have_placeholders(tmp_path: Path) -> None:
    assert plain(f"{tmp_path}/model/config.json") == "<tmp>/model/config.json"
    assert (
        plain(f"{REPOSITORY}/conf, at 0x7f00aa112233, 1.5 s", varies=[r"[\d.]+ s"])
        == "<repository>/conf, at <address>, <...>"
    )


@pytest.fixture
def stored(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages that the snapshot has for the test that runs."""
    file, _, name = request.node.nodeid.partition("::")
    texts: list[str] = []
    monkeypatch.setattr(messages, "read_snapshot", lambda: {file: {name: texts}})
    monkeypatch.setattr(messages, "_seen", {})
    monkeypatch.setattr(messages, "_updating", False)
    return texts


def test_a_message_contains_its_parts_and_equals_the_snapshot(stored: list[str]) -> None:
    message = Message("model.seed", "-1")
    assert message != "model.seed is -1", "it has no entry yet"
    stored += ["model.seed is -1", "model.seed is 7"]
    assert [message] == ["model.seed is -1"]
    assert message != "model.seed must not be -1", "the text differs"
    assert "pytest --update-messages" in repr(message)
    assert message != "model.seed is 7", "a part is missing"
    assert "'-1'" in repr(message)
    with raises(ValueError, "model.seed", "7"):
        raise ValueError("model.seed is 7")
    with pytest.raises(AssertionError), raises(ValueError, "model.seed", "7"):
        raise ValueError("model.seed is 8")


def test_an_update_keeps_the_messages_of_tests_that_did_not_run() -> None:
    here, other = "tests/test_messages.py", "tests/test_docs.py"
    one, two = "test_each_part_matches_a_separate_place", "test_a_repeated_message_is_detected"
    before = {
        here: {f"{one}[a]": ["old"], f"{one}[gone]": ["old"], two: ["kept"], "test_that_was_renamed": ["gone"]},
        "tests/test_that_was_deleted.py": {"test_x": ["gone"]},
    }
    seen = {f"{here}::{one}[a]": ["new"]}
    assert updated(before, seen, collected={f"{here}::{one}[a]"}) == {here: {two: ["kept"], f"{one}[a]": ["new"]}}
    assert updated(before, seen, collected=set())[here][f"{one}[gone]"] == ["old"]
    assert updated({}, {f"{other}::{two}": ["of no test"]}, collected=set()) == {}


def test_every_entry_of_the_snapshot_belongs_to_a_test() -> None:
    snapshot = messages.read_snapshot()
    assert updated(snapshot, {}, collected=set()) == snapshot
