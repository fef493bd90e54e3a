"""The page of nemo-kto ui: words of its commands, its processes, its gate, and what it refuses."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from nemo_kto.errors import UserError
from nemo_kto.tools.ui import ui_command
from nemo_kto.tools.ui.started_command import StartedCommand
from nemo_kto.tools.ui.workbench import Choices, Workbench, columns_of, found_data, found_models
from tests.helpers.commands import run_here
from tests.helpers.messages import Message, raises
from tests.helpers.tiny_models import write_rows, write_stub_model


def chosen(**changes: Any) -> Choices:
    given = {"algorithm": "kto", "model": "m", "data": "d.csv", "folder": "results/a b", "columns": {}, "more": ""}
    return Choices(**{**given, **changes})


FOLDER = "exp_manager.explicit_log_dir='results/a b'"


@pytest.mark.parametrize(
    ("choices", "command", "words"),
    [
        (chosen(), "", ["kto", "m", "d.csv", FOLDER]),
        (chosen(more="lr=1e-6 'name=a b'"), "check", ["check", "kto", "m", "d.csv", FOLDER, "lr=1e-6", "name=a b"]),
        (
            chosen(columns={"prompt": "my question", "response": "", "label": "label"}, algorithm="dpo"),
            "plan",
            ["plan", "dpo", "m", "d.csv", "model.data.fields={prompt:'my question'}", FOLDER],
        ),
        (
            chosen(more="lr=1 model.data.seq_length=64 template=true"),
            "data preview",
            ["data", "preview", "d.csv", "--model", "m", "--algorithm", "kto", "model.data.seq_length=64", "template=true"],
        ),
    ],
)
def test_words_of_a_command(choices: Choices, command: str, words: list[str]) -> None:
    assert choices.words(command) == words


def test_what_is_not_chosen() -> None:
    with raises(UserError, "model, data must be chosen", "none"):
        chosen(model=" ", data="").words()
    with raises(UserError, "further settings", "KEY=VALUE", "name='a", "quote"):
        chosen(more="name='a").words()
    with raises(UserError, "a run folder or a model must be chosen"):
        Workbench().answer(" ", "hello")


def test_files_to_choose_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_stub_model(tmp_path / "models" / "one")
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "a.jsonl", [{"question": "q", "answer": "a", "label": True}])
    (tmp_path / "b.csv").write_text("prompt,good\n1,2\n")
    (tmp_path / "broken.json").write_text("{")
    assert found_models() == ["models/one"]
    assert found_data() == ["b.csv", "broken.json", "data/a.jsonl"]
    found = {name: columns_of(name) for name in [*found_data(), "missing.csv", "hf:a/b"]}
    assert found["data/a.jsonl"] == ["question", "answer", "label"]
    assert found["b.csv"] == ["prompt", "good"]
    assert found["broken.json"] == found["missing.csv"] == found["hf:a/b"] == []


def test_a_short_command_shows_its_output_and_status() -> None:
    shown = [*Workbench().show(["plan", "sft"])][-1]
    assert shown.endswith("(exit status 2)")
    assert "must be kto or dpo" in shown


def test_a_run_is_stopped_with_sigterm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "program").write_text(
        f"#!{sys.executable}\nimport signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))\nprint(sys.argv[5:], flush=True)\ntime.sleep(60)\n"
    )
    (tmp_path / "program").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "program"))
    workbench, folder = Workbench(), str(tmp_path / "run")
    assert workbench.watch() == ("No run was started on this page.", "", "")
    workbench.start(chosen(folder=folder))
    while not workbench.watch()[1]:
        time.sleep(0.05)
    assert workbench.watch() == (f"{folder}: running", f"{['kto', 'm', 'd.csv', chosen(folder=folder).words()[-1]]}\n", "")
    with raises(UserError, "one run at a time", "stop"):
        workbench.start(chosen(folder=folder))
    workbench.stop()
    while (state := workbench.watch()[0]) == f"{folder}: running":
        time.sleep(0.05)
    assert state == f"{folder}: stopped, with a checkpoint"


# A page that starts a command at once; the command says when it began, and how it was stopped.
SERVED = """
import signal, socket, sys
from nemo_kto.tools.ui import server
from nemo_kto.tools.ui.workbench import Choices
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
sys.executable, build_page = sys.argv[1], server.build_page
def build(workbench):
    names = ("algorithm", "model", "data", "folder", "more")
    workbench.start(Choices(**dict.fromkeys(names, "kto"), columns={}))
    return build_page(workbench)
server.build_page = build
listening = socket.create_server(("127.0.0.1", 0))
try:
    server.serve(listening)
except KeyboardInterrupt:
    print("ended")
"""


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGHUP, pytest.param(signal.SIGINT, marks=pytest.mark.full)],
    ids=lambda number: number.name,
)
def test_the_end_of_the_page_stops_its_run(tmp_path: Path, number: signal.Signals) -> None:
    pytest.importorskip("gradio", reason="needs the extra ui")
    program, told = tmp_path / "program", tmp_path / "told"
    program.write_text(
        f"#!{sys.executable}\nimport signal, sys, time\nfrom pathlib import Path\n"
        f"told = Path({str(told)!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: (told.write_text('stopped'), sys.exit(85)))\n"
        "told.write_text('begun')\ntime.sleep(60)\n"
    )
    program.chmod(0o755)
    nohup = ["nohup"] if number == signal.SIGTERM else []
    words = [*nohup, sys.executable, "-c", SERVED, str(program)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        address = page.stdout.readline().removeprefix("open ").split("?")[0]
        with pytest.raises(HTTPError, match="403"):  # it serves
            urlopen(address)
        while not (told.exists() and told.read_text() == "begun"):
            time.sleep(0.05)
        if nohup:
            page.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                page.wait(1)
        page.send_signal(number)
        output, errors = page.communicate(timeout=30)
    assert (told.read_text(), page.returncode, output.splitlines()[-1], errors) == ("stopped", 0, "ended", "")


def test_a_chat_that_cannot_start_says_why(tmp_path: Path) -> None:
    with raises(UserError, "nemo-kto chat", "MODEL", str(tmp_path / "nothing")):
        Workbench().answer(str(tmp_path / "nothing"), "hello")


def test_a_command_that_ended_is_not_signalled() -> None:
    command = StartedCommand(words=["--version"])
    assert command.wait(60)
    command.stop()
    assert (command.status, command.output.split()[0]) == (0, "nemo-kto")


HOSTS = ("0.0.0.0", "::", "example.org")  # nosec B104


@pytest.mark.parametrize("host", HOSTS)
def test_other_hosts_are_refused(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("ui", "--host", host, "--port", "7861") == 2
    expected = Message("nemo-kto ui: --host", "127.0.0.1", host, "rights", "ssh -L 7861:127.0.0.1:7861")
    assert capsys.readouterr().err == expected


def test_without_gradio(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ui_command, "installed", lambda package: False)
    assert run_here("ui") == 2
    assert capsys.readouterr().err == Message("nemo-kto ui", "gradio", "not installed", "pip install 'nemo-kto[ui]'")


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gradio", reason="needs the extra ui")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert run_here("ui", "--port", str(port)) == 2
    assert capsys.readouterr().err == Message("nemo-kto ui: --port", str(port), "in use")


def test_only_the_holder_of_the_address_passes_the_gate() -> None:
    pytest.importorskip("gradio", reason="needs the extra ui")
    from nemo_kto.tools.ui.server import Gate

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def ask(path: str, query: str = "", cookie: str = "", kind: str = "http") -> tuple[Any, dict[str, str]]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"cookie", cookie.encode())] if cookie else []
        scope = {"type": kind, "path": path, "query_string": query.encode(), "headers": headers, "server": ("127.0.0.1", 7)}
        asyncio.run(Gate(inner=inner, token="right")(scope, None, send))  # type: ignore[arg-type]  # nosec B106
        named = {name.decode(): value.decode() for name, value in sent[0].get("headers", [])}
        return sent[0].get("status", sent[0]["type"]), named

    assert ask("/")[0] == ask("/", "token=wrong")[0] == ask("/gradio_api/queue/join", "token=right")[0] == 403
    assert ask("/", cookie="nemo_kto_ui_7=wrong")[0] == ask("/", cookie="nemo_kto_ui_7=\xe4")[0] == 403
    assert ask("/", cookie="nemo_kto_ui_8=right")[0] == 403
    assert ask("/x", kind="websocket")[0] == "websocket.close"
    status, headers = ask("/", "token=right")
    cookie = SimpleCookie(headers["set-cookie"])["nemo_kto_ui_7"]
    assert (status, headers["location"], cookie["samesite"], cookie["httponly"]) == (303, "/", "Strict", True)
    status, headers = ask("/config", cookie=f"nemo_kto_ui_8=of-another-page; nemo_kto_ui_7={cookie.value}")
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'self'")


def test_the_page_shows_the_command_that_it_runs() -> None:
    pytest.importorskip("gradio", reason="needs the extra ui")
    from nemo_kto.tools.ui.workbench_page import _command_line

    assert _command_line("kto", "m", "d.csv", "out", "q", None, None, "lr=1e-6") == (
        "nemo-kto kto m d.csv 'model.data.fields={prompt:q}' exp_manager.explicit_log_dir=out lr=1e-6"
    )
    assert (
        _command_line("kto", None, "d", "out", "", "", "", "")
        == "# model must be chosen, got none; fill in the fields above"
    )


def test_the_page_needs_no_torch() -> None:
    pytest.importorskip("gradio", reason="needs the extra ui")
    text = "import sys; from nemo_kto.tools.ui.server import *; build_page(Workbench()); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"
