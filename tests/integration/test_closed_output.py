"""Commands whose standard output is full or closed by its reader."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.commands import CLI, GOOD, start, stub_training
from tests.helpers.messages import assert_names


def run(command: list[str], folder: Path, env: dict[str, str], *, full: bool) -> tuple[int, str]:
    """Status and stderr of a command whose standard output is full, or a pipe without reader."""
    if full:
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        read, output = os.pipe()
        os.close(read)
    with (folder / "errors").open("w") as errors:
        status = start(command, cwd=folder, env=env, output=output, errors=errors.fileno()).wait(100)
    os.close(output)
    return status, (folder / "errors").read_text()


def test_a_run_is_finished(tmp_path: Path) -> None:
    body = "print('started', flush=True)\nopen(f'finished{rank}', 'w').close()\nprint('finished', flush=True)"
    env = stub_training(tmp_path, body)
    status, message = run([*CLI, "kto", *GOOD, "trainer.devices=2"], tmp_path, env, full=True)
    assert status == 0, message
    assert "Traceback" not in message
    assert_names(message, "nemo-kto: standard output", "No space left on device")
    assert len(list(tmp_path.glob("finished*"))) == 2


@pytest.mark.parametrize("words", [["kto", "--help"], ["checkpoint", "ls", "results"]], ids=" ".join)
def test_closed_output_of_a_printing_command(tmp_path: Path, words: list[str]) -> None:
    """A command ends without a traceback; its status is an error only if its output is lost."""
    env = stub_training(tmp_path, "")
    (tmp_path / "results/checkpoints/step_000001").mkdir(parents=True)
    status, message = run([*CLI, *words], tmp_path, env, full=True)
    assert status == 1, message
    assert_names(message, "nemo-kto: standard output", "No space left on device")
    assert "Traceback" not in message
    assert run([*CLI, *words], tmp_path, env, full=False) == (0, "")
