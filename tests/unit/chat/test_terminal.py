"""`nemo-kto chat` on a terminal: a session through a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import environment
from tests.helpers.tiny_models import make_checkpoint

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LONG = 10**5  # tokens of the context
SECONDS = 120.0


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, words: list[str]) -> None:
        self.master, slave = pty.openpty()
        env = {**environment(), "TERM": "xterm", "NEMO_KTO_FORCE_CPU": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nemo_kto.cli.main", "chat", *words],
            stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where pytest runs in the background
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def read_until(self, pattern: str) -> str:
        """Text up to the end of the first match, which is removed from what later calls see."""
        end = time.monotonic() + SECONDS
        while (found := re.search(pattern, self.seen)) is None:
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{pattern} did not appear in {self.seen!r}"
            try:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
            except OSError:  # the process has ended
                pytest.fail(f"{pattern} did not appear in {self.seen!r}")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait_until_it_sleeps(self) -> None:
        """Wait until the process waits for a key: Python's readline misses a signal that arrives just before that."""
        status = Path(f"/proc/{self.process.pid}/stat")
        end = time.monotonic() + SECONDS
        while status.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < end, "the process never waits"
            time.sleep(0.01)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    model = make_checkpoint(tmp_path / "model", "llama", max_position_embeddings=LONG, **SMALL)
    opened = Terminal([str(model), "--max-new-tokens", "50000", "--temperature", "0"])
    yield opened
    opened.process.kill()
    opened.process.wait()
    os.close(opened.master)


def test_a_session(terminal: Terminal) -> None:
    start = terminal.read_until("> ")
    assert "llama" in start
    assert "/help" in start
    terminal.type("/help\n")
    assert "/reset" in terminal.read_until("Ctrl-C[^>]*> ")
    terminal.type("Hello\n")
    terminal.read_until(r"Hello\r\n[\s\S]{60}")
    terminal.interrupt()
    details = terminal.read_until(r"\(\d+ tokens? in [\d.]+ s, interrupted\)\S*\r\n\S*> ")
    assert "\x1b[2m" in details  # in colour
    terminal.type("/rest\n")
    assert "'/rest'" in terminal.read_until("begin with a space[^>]*> ")
    terminal.type("/system Be brief.\n")
    terminal.read_until("> ")
    terminal.type("/reset\n")
    terminal.read_until("> ")
    terminal.type("half a line")
    terminal.read_until("half a line")
    terminal.wait_until_it_sleeps()
    terminal.interrupt()
    terminal.read_until("> ")
    terminal.type("/quit\n")
    assert terminal.process.wait(SECONDS) == 0
