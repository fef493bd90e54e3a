"""Signals that stop a run, in this process and in a forked one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from nemo_kto.processes import signals
from tests.helpers.messages import Message, raises

LISTENED = ("SIGTERM", "SIGUSR1", "SIGINT")


@pytest.fixture(autouse=True)
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The handlers as they were afterwards."""
    monkeypatch.setattr(signals, "_listener", None)
    before = {number: signal.getsignal(number) for number in signals.numbers(signals.NAMES)}
    signals.listen(LISTENED, has_launcher=False)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(name: str) -> None:
    signal.raise_signal(signal.Signals[name])


@pytest.mark.parametrize("name", LISTENED)
def test_with_nothing_to_save_only_the_first_signal_is_raised(name: str) -> None:
    assert signals.raised() is None
    with raises(signals.Stopped, name, "first step", "start"):
        send(name)
    send("SIGUSR1")
    assert signals.raised() == Message(name, "first step", "start")
    assert signals.received() == signal.Signals[name]
    assert not issubclass(signals.Stopped, Exception), "libraries catch exceptions and continue"


def test_a_deferred_signal_is_only_recorded() -> None:
    with signals.deferred():
        assert signals.received() == 0
        send("SIGUSR1")
        send("SIGTERM")
        assert signals.received() == signal.SIGUSR1
    with raises(signals.Stopped, "SIGTERM"):
        send("SIGTERM")


def test_a_failure_after_a_signal_that_a_library_swallowed_is_a_failure() -> None:
    with pytest.raises(signals.Stopped):
        send("SIGTERM")
    with signals.deferred():
        assert signals.raised() is None
        assert signals.received() == signal.SIGTERM, "the run stops at the next opportunity"


def test_a_second_interrupt_ends_the_process() -> None:
    with signals.deferred():
        send("SIGTERM")
        send("SIGINT")
        signals.listen(LISTENED, has_launcher=True)
        with signals.deferred():
            send("SIGINT")
            send("SIGINT")
        signals.listen(LISTENED, has_launcher=False)
        with signals.deferred():
            send("SIGINT")
            with pytest.raises(KeyboardInterrupt):
                send("SIGINT")


def test_blocked_signals_arrive_when_handlers_are_installed() -> None:
    signals.listen([], has_launcher=False)
    with signals.blocked():
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        with signals.deferred(), pytest.raises(signals.Stopped):
            signals.listen(LISTENED, has_launcher=False)  # replaces the earlier handlers
    assert signals.received() == signal.SIGUSR1


def test_a_child_started_with_blocked_signals_inherits_the_mask() -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGTERM); print(*signal.sigpending())"
    with signals.blocked():
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "15\n")
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(signals.numbers(signals.NAMES))


@pytest.mark.parametrize(("name", "status"), [("SIGUSR1", 0), ("SIGINT", 0), ("SIGTERM", -signal.SIGTERM)])
def test_a_forked_helper_ignores_signals_and_can_be_terminated(name: str, status: int) -> None:
    child = os.fork()
    if child == 0:
        try:
            send(name)
        finally:
            os._exit(int(signals.received() != 0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
