"""Notifications arrive at a command and at an https server, however a run ends, and contain no secret."""

from __future__ import annotations

import json
import os
import shlex
import signal
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from nemo_kto.records import notification
from tests.helpers import fork_server
from tests.helpers.commands import REPOSITORY, environment, is_alive
from tests.helpers.run_folders import write_run

LINES = [{"step": 1, "train/loss": 0.5}, {"step": 3, "train/loss": 0.25}, {"step": 3, "val/loss": 0.375}]
# A process that begins a run in the folder of its first argument and ends it.
RUN = """
import os, signal, sys, time
from pathlib import Path
from nemo_kto.records.notification import notifying
from nemo_kto.records.run_record import begin_run, end_run
folder = Path(sys.argv[1])
def begin():
    begin_run(folder, run={"algorithm": "kto", "total_steps": 6}, data={})
with notifying(sys.argv[2], folder):
    exec(sys.argv[3])
"""
BEFORE = "it ended before the training began; its output has the error"
ENDS = {
    "begin(); end_run(folder, 'finished')": ("finished", "", 0),
    "pass": ("finished", "", 0),  # the same command again, after the end
    "begin(); end_run(folder, 'failed', 'no token=abcdefghi'); sys.exit(1)": ("failed", "no token=***", 1),
    "sys.exit(2)": ("failed", BEFORE, 2),
    "begin(); end_run(folder, 'stopped', 'SIGTERM'); os._exit(85)": ("stopped", "SIGTERM", 85),
    "begin(); os.kill(os.getpid(), signal.SIGKILL)": ("killed", "was killed", -signal.SIGKILL),
}


def ended(folder: Path, target: str, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    words = ["-c", RUN, str(folder), target, code]
    env = {**environment(), "MY_TOKEN": "abcdefghi", **variables}
    preload = ("nemo_kto.records.notification", "nemo_kto.records.run_record")
    return fork_server.run(words, cwd=REPOSITORY, env=env, preload=preload, timeout=60)


def test_a_sender_that_has_died_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def died(words: list[str], **options: Any) -> subprocess.Popen[str]:
        process = popen(["true"], **options)
        process.wait()
        return process

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", died)
    with notification.notifying("cat", tmp_path):
        begun = True
    assert begun


@pytest.mark.parametrize("code", ENDS)
def test_a_command_gets_json_however_the_run_ends(tmp_path: Path, code: str) -> None:
    state, reason, status = ENDS[code]
    folder, out = write_run(tmp_path / "run", LINES), tmp_path / "out.json"
    receive = "import os, sys; text = sys.stdin.read(); open('new', 'w').write(text); os.rename('new', 'out.json')"
    done = ended(folder, shlex.join(["env", "-C", str(tmp_path), sys.executable, "-c", receive]), code)
    assert done.returncode == status, done.stderr
    deadline = time.monotonic() + 30
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    sent = json.loads(out.read_text())
    assert (sent["run"], sent["folder"], sent["state"]) == ("run", str(folder), state)
    assert reason in sent["reason"]
    assert sent["text"].startswith(f"nemo-kto: run run {state}")
    if reason != BEFORE:
        assert (sent["step"], sent["metrics"]) == (3, {"train/loss": 0.25, "val/loss": 0.375})


def test_a_post_to_an_https_server(tmp_path: Path) -> None:
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            got.append((self.path, self.headers["Content-Type"], json.loads(self.rfile.read(length))["state"]))
            self.send_response(500 if "broken" in self.path else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    name, made = "/CN=localhost", ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048"]
    made += ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert"), "-subj", name]
    subprocess.run([*made, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    folder, trusted = write_run(tmp_path / "run", LINES), {"SSL_CERT_FILE": str(tmp_path / "cert"), "no_proxy": "*"}
    with HTTPServer(("localhost", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        address = f"https://localhost:{server.server_address[1]}"
        good = ended(folder, f"{address}/services/T0/B0", "pass", **trusted)
        broken = ended(folder, f"{address}/broken/T0", "pass", **trusted)
        server.shutdown()
        thread.join()
    assert got == [(path, "application/json", "finished") for path in ("/services/T0/B0", "/broken/T0")]
    assert (good.returncode, good.stderr, broken.returncode) == (0, "", 0)
    text = "nemo-kto: warning: exp_manager.notify failed: HTTPError: HTTP Error 500: Internal Server Error"
    assert broken.stderr == f"{text}; the run is not affected\n"


def test_a_process_that_the_command_leaves_does_not_hold_the_run(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    target = shlex.join(["sh", "-c", f"sleep 100 & echo $! >{pid}; echo said; echo more >&2"])
    done = ended(write_run(tmp_path / "run", LINES), target, "pass")
    assert (done.returncode, done.stderr) == (0, "said\nmore\n")
    os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_command_that_hangs_is_killed_with_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notification, "_SECONDS", 1)
    pid = tmp_path / "pid"
    with pytest.raises(TimeoutError, match="no end within 1 s"):
        notification.send(shlex.join(["sh", "-c", f"sleep 100 & echo $! >{pid}; wait"]), "{}")
    deadline = time.monotonic() + 20
    while is_alive(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(int(pid.read_text()))


@pytest.mark.parametrize(("target", "text"), [("false", "status 1"), ("sleep 30", "TimeoutError: no end within 1 s")])
def test_a_failure_is_a_warning_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str, text: str
) -> None:
    monkeypatch.setattr(notification, "_SECONDS", 1)
    reading, writing = os.pipe()
    os.write(writing, json.dumps([target, str(write_run(tmp_path / "run", LINES)), 0.0]).encode() + b"\n")
    os.close(writing)
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        notification.main()
    assert capsys.readouterr().err == f"nemo-kto: warning: exp_manager.notify failed: {text}; the run is not affected\n"
