"""--matrix: each combination marked full is in exactly one of M parts, unmarked tests in all; --part divides all of them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, _part

CASES = """
import pytest

@pytest.mark.parametrize("number", range(30))
@pytest.mark.full
def test_marked(number): ...

@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.full)])
def test_one_of_two(number): ...

def test_not_marked(): ...
"""
# All in one process: what matters is which tests are chosen, and starting five times would take five times as long.
CODE = """
import sys, pytest
folder = sys.argv[1]
for given in sys.argv[2:]:
    print(f"== {given}", flush=True)
    pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *given.split(), "--rootdir", folder, folder])
"""


def collected(tmp_path: Path, *given: str) -> list[set[str]]:
    """The names of the tests that run with each of some command lines."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_addoption, pytest_collection_modifyitems\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full\n")
    (tmp_path / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-c", CODE, str(tmp_path), *given]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    parts: list[set[str]] = []
    for line in done.stdout.splitlines():
        if line.startswith("== "):
            parts.append(set())
        elif "::" in line:
            parts[-1].add(line.split("::")[1])
    return parts


def test_parts(tmp_path: Path) -> None:
    numbers = ["0/3", "1/3", "2/3"]
    given = ["quick", "full", *numbers]
    found = collected(
        tmp_path, *(f"--matrix={each}" for each in given), *(f"--matrix=full --part={each}" for each in numbers)
    )
    quick, full, thirds, parts = *found[:2], found[2:5], found[5:]
    assert quick == {"test_one_of_two[0]", "test_not_marked"}
    assert len(full) == 33
    assert all(third >= quick for third in thirds)
    added = [third - quick for third in thirds]
    assert sum(map(len, added)) == len(set.union(*added)) == 31
    assert all(added), "no third is empty"
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(full)


@pytest.mark.parametrize("wrong", ["3/3", "1", "a/b", "-1/3", "0/0", "all"])
def test_a_part_that_does_not_exist(wrong: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        _part(wrong)
    assert str(error.value) == f"must be quick, full or N/M with N from 0 to M - 1, got {wrong!r}"
