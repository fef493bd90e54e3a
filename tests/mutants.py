"""Deliberate faults of tests/mutants.toml, each of which the quick tests that it names must find: `make mutants`."""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import importlib
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
QUICK = "not slow and not slurm and not browser"
MAY_BE_MISSED = 3  # of all mutants
LIMIT_SECONDS = 600
# What most tests import; imported once, before the tests of a mutant run in a forked process.
IMPORTED = ("torch.distributed.checkpoint", "transformers.modeling_utils", "megatron.core.models.gpt", "hydra", "datasets")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault: ``text``, which occurs once in ``file``, is replaced, and some of ``tests`` must fail."""

    name: str
    file: str
    text: str
    replacement: str
    tests: list[str]

    def applies(self) -> bool:
        """Return whether the text occurs once and the tests exist."""
        file = REPOSITORY / self.file
        count = file.read_text().count(self.text) if file.is_file() else 0
        return count == 1 and bool(self.tests) and all((REPOSITORY / test).exists() for test in self.tests)

    def is_found(self, tree: Path) -> bool:
        """Return whether the tests fail with the fault, which is removed again from the copy of the repository."""
        file = tree / self.file
        before = file.read_text()
        file.write_text(before.replace(self.text, self.replacement))
        try:
            return not passes(tree, self.tests)
        finally:
            file.write_text(before)


def passes(tree: Path, tests: Collection[str]) -> bool:
    """Return whether tests pass in a tree; RuntimeError if they could not be run. A forked process runs them.

    A fault may keep a loop from ending: tests that are not done within the limit fail.
    """
    with tempfile.TemporaryFile() as output:
        process = multiprocessing.get_context("fork").Process(target=run_tests, args=(tree, tests, output.fileno()))
        process.start()
        process.join(LIMIT_SECONDS)
        if process.is_alive():
            process.kill()
            return False
        if process.exitcode not in (0, 1):
            output.seek(0)
            raise RuntimeError(f"{' '.join(tests)} ended with status {process.exitcode}:\n{output.read().decode()}")
    return process.exitcode == 0


def run_tests(tree: Path, tests: Collection[str], output: int) -> None:
    """Run tests with the packages of a tree in this process, which ends with pytest's status."""
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(tree)
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(REPOSITORY)))]
    os.environ["PYTHONPATH"] = str(tree)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "nemo_kto")]:
        del sys.modules[name]
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", QUICK, *tests]))


def copy_of_the_tree(folder: Path) -> Path:
    """Copy the files that git tracks, as they are now, and new ones that it does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (REPOSITORY / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name, follow_symlinks=False)
    return folder


def read_mutants(names: Collection[str]) -> list[Mutant]:
    """Return the mutants of these names, or all of them; end the program if there is none, or one no longer applies."""
    mutants = [Mutant(**each) for each in tomllib.loads((REPOSITORY / "tests/mutants.toml").read_text())["mutant"]]
    wanted = [mutant for mutant in mutants if not names or mutant.name in names]
    if stale := [mutant.name for mutant in wanted if not mutant.applies()]:
        sys.exit(
            f"each text must occur once in its file, and the tests exist, got otherwise: {', '.join(stale)}; adapt them"
        )
    return wanted or sys.exit(f"names must be of {', '.join(each.name for each in mutants)}; got {' '.join(names)}")


def main(*names: str) -> None:
    mutants = read_mutants(names)
    for module in IMPORTED:
        importlib.import_module(module)
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_the_tree(Path(folder))
        if not passes(tree, dict.fromkeys(test for mutant in mutants for test in mutant.tests)):
            sys.exit("the tests must pass without a mutant")
        for mutant in mutants:
            is_found = mutant.is_found(tree)
            found += is_found
            print("found " if is_found else "MISSED", mutant.name, flush=True)
    print(f"{found} of {len(mutants)} found")
    sys.exit(found < len(mutants) - (0 if names else MAY_BE_MISSED))


if __name__ == "__main__":
    main(*sys.argv[1:])
