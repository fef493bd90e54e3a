"""A command of this package as a process whose output is collected, and which is stopped as users stop it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from queue import Queue

_MAX_LINES = 400  # of output that are kept
_ENDED = None


class StartedCommand:
    """A running or ended command. ``replies`` get the lines of stdout instead of ``output`` if it is a conversation."""

    def __init__(self, *, words: Sequence[str], converses: bool = False) -> None:
        """Start ``nemo-kto`` with these words."""
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self.replies: Queue[str | None] = Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-P", "-m", "nemo_kto.cli.main", *words],
            stdin=subprocess.PIPE if converses else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if converses else subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "NO_COLOR": "1"},
            start_new_session=True,  # Ctrl-C ends the page, which then stops the command once
        )
        self._readers = [threading.Thread(target=self._read, args=(converses,), daemon=True)]
        if converses:
            self._readers.append(threading.Thread(target=self._read_errors, daemon=True))
        for reader in self._readers:
            reader.start()

    @property
    def output(self) -> str:
        """The last lines of the output."""
        return "".join([*self._lines])

    @property
    def status(self) -> int | None:
        """Exit status; None while the command runs."""
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the command, at most ``seconds``, and of its output; return whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        for reader in self._readers:
            reader.join(1)
        return True

    def say(self, line: str) -> None:
        """Write a line to a conversation; OSError if it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """Send SIGTERM: a training finishes its step and saves a checkpoint."""
        if self.status is None:
            self._process.send_signal(signal.SIGTERM)

    def _read(self, converses: bool) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if converses:
                self.replies.put(line)
            else:
                self._lines.append(line)
        self.replies.put(_ENDED)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._lines.extend(self._process.stderr)
