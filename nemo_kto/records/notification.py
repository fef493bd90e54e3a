"""Notification at the end of a run, by a process that outlives it: a killed run is reported too."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_kto.errors import UserError, describe
from nemo_kto.redaction import redacted_value, without_secret
from nemo_kto.utils.text import print_error

_SECONDS = 20  # to send a notification, at most
_SECONDS_TO_RECORD = 10  # for the processes of a run to record its end
_MAX_TEXT = 1000  # characters of an error
_ENDED = "ended"


@contextlib.contextmanager
def notifying(target: str | None, folder: Path) -> Iterator[None]:
    """Send a notification about the run of a folder when the block ends or this process dies; None sends none.

    ``target`` is an https URL, which gets a POST of JSON, or a command, which gets the JSON on stdin.
    """
    if target is None:
        yield
        return
    words = [sys.executable, "-P", "-m", __name__]
    sender = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=sys.__stderr__, text=True, start_new_session=True)
    assert sender.stdin is not None
    try:
        with contextlib.suppress(OSError):  # a sender that died must not end the run
            sender.stdin.write(json.dumps([target, str(folder.absolute()), time.time()]) + "\n")  # other users see arguments
            sender.stdin.flush()
        yield
        with contextlib.suppress(OSError):
            sender.stdin.write(_ENDED)
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            sender.stdin.close()
            sender.wait(2 * _SECONDS)  # a container ends with this process


def notification(folder: Path, *, since: float, succeeded: bool) -> dict[str, Any]:
    """Return the content of a notification, from the files of the run that was started after ``since``."""
    from nemo_kto.records.run_record import FAILED, RUNNING, read_run

    before = {"run": folder.name, "folder": str(folder), "state": FAILED}
    before["reason"] = "it ended before the training began; its output has the error"
    before["text"] = f"nemo-kto: run {folder.name} {FAILED}: {before['reason']}"
    try:
        deadline, record = time.monotonic() + _SECONDS_TO_RECORD, read_run(folder)
        while record.state.word == RUNNING and time.monotonic() < deadline:
            time.sleep(0.2)
            record = read_run(folder)
    except UserError:
        return before
    if record.run.get("started", 0.0) < since and not succeeded:
        return before
    state, reason = record.state
    progress = f"at step {record.step:,}" + (f" of {record.total_steps:,}" if record.total_steps else "")
    return {
        **before,
        "state": state,
        "reason": (reason := reason[-_MAX_TEXT:]),
        "text": f"nemo-kto: run {record.name} {state} {progress}" + (f": {reason}" if reason else ""),
        "step": record.step,
        "total_steps": record.total_steps,
        "metrics": {name: curve.last for name, curve in record.curves.items() if name.startswith(("train/", "val/"))},
    }


def send(target: str, content: str) -> None:
    """Send a text of JSON; TimeoutError after 20 s, other errors if the server or the command fails."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"no end within {_SECONDS} s")

    signal.signal(signal.SIGALRM, expire)
    signal.alarm(_SECONDS)
    try:
        if not target.startswith("https://"):
            _run(shlex.split(target), content)
            return
        import urllib.request

        headers = {"Content-Type": "application/json", "User-Agent": "nemo-kto"}
        request = urllib.request.Request(target, content.encode(), headers)
        with urllib.request.urlopen(request):  # nosec B310  # the scheme is https
            pass
    finally:
        signal.alarm(0)


def _run(words: Sequence[str], content: str) -> None:
    """Give a text to a command, and pass on its output; CalledProcessError if it fails."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=output,  # not ours: processes that the command leaves would keep it open, and pipes of the run
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        ) as process,
    ):
        try:
            process.communicate(content)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            output.seek(0)
            sys.stderr.write(output.read())
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)


def main() -> None:
    """Wait until the process that wrote the first line to stdin has ended, then send its notification."""
    target, folder, since = json.loads(sys.stdin.readline())
    succeeded = sys.stdin.read() == _ENDED
    try:
        content = redacted_value(notification(Path(folder), since=since, succeeded=succeeded))
        send(target, without_secret(json.dumps(content), target))
    except Exception as error:  # a notification must not change the result of a run
        text = f"status {error.returncode}" if isinstance(error, subprocess.CalledProcessError) else describe(error)
        print_error(f"nemo-kto: warning: exp_manager.notify failed: {without_secret(text, target)}; the run is not affected")


if __name__ == "__main__":
    main()
