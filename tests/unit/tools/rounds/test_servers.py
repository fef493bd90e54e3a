"""Servers that reply with rubbish, too slowly, without end or with the key, and settings of a client that cannot be used."""

from __future__ import annotations

import contextlib
import html
import itertools
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pytest

from nemo_kto.errors import UserError
from nemo_kto.telemetry.console import set_up_logging
from nemo_kto.tools.rounds import endpoint
from nemo_kto.tools.rounds.endpoint import Endpoint
from tests.helpers.messages import Message, raises
from tests.helpers.openai_server import serving
from tests.helpers.tiny_models import write_rows
from tests.unit.tools.rounds.conftest import COMMANDS, answers, read, run

ANSWER = json.dumps({"choices": [{"message": {"content": "Water."}, "finish_reason": "stop"}]}).encode()
OK = b"HTTP/1.1 200 OK\r\n"
KEY = "sk-" + "Q7x_-/" * 5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_MAX_DELAY": 0.01, "_MAX_BYTES": 5000}.items():
        monkeypatch.setattr(endpoint, name, value)


def body(content: bytes, *headers: str) -> list[bytes]:
    given = [*headers, f"Content-Length: {len(content)}", "Connection: close"]
    return [OK + "\r\n".join([*given, "", ""]).encode("latin-1") + content]


@contextlib.contextmanager
def raw_server(pieces: Callable[[], Iterator[bytes]]) -> Iterator[str]:
    """A server that sends these pieces as the reply to each request; its URL."""
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            received = b""
            while not (found := re.search(rb"ength: (\d+)\r\n.*\r\n\r\n", received, re.DOTALL)) or len(received) < (
                found.end() + int(found[1])
            ):
                received += connection.recv(65536)
            for piece in pieces():
                connection.sendall(piece)
                if ended.is_set():
                    return
            ended.wait(2) if piece == b"" else None

    def accept() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                threading.Thread(target=serve, args=[listener.accept()[0]], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.01)
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            thread.join()


def slowly(*pieces: bytes) -> Iterator[bytes]:
    for piece in pieces:
        time.sleep(0.05)
        yield piece


def no_answer(charset: str) -> list[bytes]:
    return body(b"+AOQ- no answer", f"Content-Type: text/plain; charset={charset}")


SHORT = "no complete reply in 0.6 s"
BROKEN: dict[str, tuple[Callable[[], Sequence[bytes] | Iterator[bytes]], list[str]]] = {
    **{
        f"encoded as {name}": (partial(body, ANSWER, f"Content-Encoding: {name}"), [part, "6 attempts"])
        for name, part in {"gzip": "DecodingError", "deflate": "DecodingError", "br": "br", "x, ZSTD": "ZSTD"}.items()
    },
    "encoded twice": (partial(body, ANSWER, "Content-Encoding: gzip, GZIP"), ["gzip, GZIP", "unlimited", "6 attempts"]),
    **{
        f"in {name}": (partial(no_answer, name), ["not JSON", "'+AOQ- no answer'", "6 attempts"])
        for name in ("zlib", "hex", "rot13", "undefined", "idna", "base64", "uu", "nowhere")
    },
    "nested": (lambda: body(b"[" * 4000), ["not JSON", "[[[["]),
    "nested objects": (lambda: body(b'{"a":' * 900), ["not JSON"]),
    "huge number": (lambda: body(b"1" * 4990), ["not JSON"]),
    "too long": (lambda: body(b" " * 6000), ["more than 5,000 bytes", "allow fewer tokens"]),
    "without end": (lambda: itertools.chain([OK + b"\r\n"], itertools.repeat(b" " * 100)), ["more than 5,000 bytes"]),
    "slow": (lambda: slowly(OK + b"\r\n", *[b" "] * 99), [f"{SHORT} in 1 attempt;", "start"]),
    "slow headers": (lambda: slowly(*[b"H"] * 99), [SHORT]),
    "endless preludes": (lambda: slowly(*[b"HTTP/1.1 102 Processing\r\n\r\n"] * 99), [SHORT]),
    "silent": (lambda: [b""], [SHORT]),
    "cut": (lambda: [OK + b"Content-Length: 100\r\n\r\n{"], ["RemoteProtocolError", "6 attempts"]),
    "no HTTP": (lambda: [b"\xff\xfe\0SSH-2.0\r\n\r\n"], ["RemoteProtocolError", "6 attempts"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_reply_that_is_broken_is_one_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reply, parts = BROKEN[name]
    if any(SHORT in part for part in parts):
        monkeypatch.setattr(endpoint, "_MAX_SECONDS", 0.6)
    with raw_server(lambda: iter(reply())) as url:
        client = Endpoint(url=url, option="--endpoint", concurrency=1, model="m")
        with raises(UserError, "--endpoint", *parts):
            client.complete([{"role": "user", "content": "?"}])


def test_cookies_are_not_kept_and_a_wait_is_limited() -> None:
    replies = iter(
        [
            [b"HTTP/1.1 503 Later\r\nRetry-After: 99999999999999\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"],
            *[body(ANSWER, "Set-Cookie: a=\xe9; Path=/")] * 2,
        ]
    )
    with raw_server(lambda: iter(next(replies))) as url:
        client = Endpoint(url=url, option="--endpoint", concurrency=1, model="m")
        assert [client.complete([]).text for _ in range(2)] == ["Water."] * 2


def test_waiting_is_logged_once_for_all_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endpoint, "_MAX_SECONDS", 1.2)
    monkeypatch.setattr(endpoint, "_REPORT_SECONDS", 0.5)
    set_up_logging(rank=0)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "?"}])
    with raw_server(lambda: iter([b""])) as url, raises(UserError, "--endpoint", "no complete reply in 1.2 s"):
        run("sample", prompts, "--endpoint", url, "--model", "m", "--concurrency", "4")
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 3
    assert all(line == Message("waiting for", f"{url}/v1", "no reply for", " s") for line in lines)


SETTINGS: dict[str, tuple[dict[str, str], str, list[str]]] = {
    "socks": ({"ALL_PROXY": "socks5://127.0.0.1:1"}, "http://x", ["ALL_PROXY", "--endpoint", "socks", "leave them unset"]),
    "ftp": ({"HTTP_PROXY": "ftp://me:pass1word@127.0.0.1"}, "http://x", ["HTTP_PROXY", "ValueError", "ftp://"]),
    "certificates": ({"SSL_CERT_FILE": "/gone.pem"}, "http://x", ["SSL_CERT_FILE", "FileNotFoundError", "unset"]),
    "empty label": ({}, "http://a..b", ["a URL", "http://a..b", "http://localhost:8000"]),
    "long label": ({}, f"http://{'a' * 70}.b", ["a URL", "http://localhost:8000"]),
    "bracket": ({}, "http://[", ["a URL", "http://[", "http://localhost:8000"]),
    "no host": ({}, "http://", ["a URL", "http://localhost:8000"]),
    "nothing": ({}, "", ["a URL", "http://localhost:8000"]),
    "port": ({}, "http://x:99999", ["a URL", "http://x:99999"]),
    "scheme": ({}, "ftp://x", ["a URL", "ftp://x"]),
    "surrogate": ({}, "http://\udcff", ["a URL", "http://\\udcff"]),
    "key of two lines": (
        {"OPENAI_API_KEY": f"{KEY}\n{KEY}"},
        "http://x",
        ["OPENAI_API_KEY", "34 of 67", "set the key"],
    ),
    "key with CR": ({"OPENAI_API_KEY": f"a{KEY}\rb"}, "http://x", ["OPENAI_API_KEY", "place 35 of 36"]),
    "key not ASCII": ({"OPENAI_API_KEY": f"{KEY}é"}, "http://x", ["OPENAI_API_KEY", "ASCII", "place 34 of 34"]),
    "key with a space": ({"OPENAI_API_KEY": f"Bearer {KEY}"}, "http://x", ["OPENAI_API_KEY", "spaces", "place 7 of 40"]),
    "key with an escape": ({"OPENAI_API_KEY": f"{KEY}\x1b"}, "http://x", ["OPENAI_API_KEY", "place 34 of 34"]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_a_client_cannot_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, url, parts = SETTINGS[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with raises(UserError, *parts) as error:
        Endpoint(url=url, option="--endpoint", concurrency=1, model="m")
    assert "Q7x" not in str(error.value)
    assert "pass1word" not in str(error.value)


def test_white_space_around_a_key_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\r\n")
    with serving(lambda body: "Water.") as server:
        Endpoint(url=server.url, option="--endpoint", concurrency=1).complete([])
        assert server.keys == [f"Bearer {KEY}"]


def test_lone_surrogates_of_a_server_are_replaced(tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "?"}])
    reply = {"choices": [{"message": {"content": "\ud800a", "reasoning": "\udfffb"}, "finish_reason": "\udc00c"}]}
    with serving(lambda body: (200, reply)) as server:
        server.models = ["\ud800m"]
        run("sample", prompts, "--endpoint", server.url, "-n", "1")
    (row,) = read(Path("out.jsonl"))
    assert (row["answer"][0]["content"], row["answer"][0]["reasoning_content"]) == ("?a", "?b")
    assert (row["finish"], row["model"]) == ("?c", "?m")


QUOTED: dict[str, tuple[int, Callable[[str], object]]] = {
    **{f"status {status}": (status, lambda key: {"error": f"refused: {key}"}) for status in (400, 401, 403, 413, 422, 500)},
    "long error": (400, lambda key: f"{'x' * 130} {key} {'y' * 150}"),
    "many times": (400, lambda key: f"{key}," * 80),
    "escaped": (400, lambda key: json.dumps(json.dumps(repr(f"{key}\r")))),
    "setting": (400, lambda key: {"error": f"unknown max_tokens, seed, temperature {key}"}),
    "error in a reply": (200, lambda key: {"error": {"message": f"Bearer {key}"}}),
    "no JSON": (200, lambda key: f"<html>{'x' * 180}{key}</html>"),
    "answer": (200, lambda key: {"choices": [{"message": {"content": f"You are {key}."}, "finish_reason": "stop"}]}),
    "reason": (200, lambda key: {"choices": [{"message": {"content": "good"}, "finish_reason": key}]}),
    "name": (200, lambda key: {"choices": [{"message": {"content": "good", key: key}, "finish_reason": "stop"}]}),
    "call": (200, lambda key: {"choices": [{"message": {"tool_calls": [key]}, "finish_reason": "stop"}]}),
    "refusal": (200, lambda key: {"choices": [{"message": {"content": "", "refusal": key}, "finish_reason": key}]}),
    "page": (302, lambda key: f"moved to http://x/{key}"),
}  # fmt: skip


def shown_by(command: str, url: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that asks a server writes: its output, its error and its file."""
    write_rows(Path("prompts.jsonl"), [{"prompt": "?"}])
    judge, error = ["--judge", url, "--rubric", "rubric.txt"], ""
    words: dict[str, list[str]] = {
        "sample": ["prompts.jsonl", "--endpoint", url, "-n", "1"],
        "label": [answers("a", ["in a"]), *judge],
        "compare": [answers("a", ["in a"]), answers("b", ["in b"]), *judge],
    }
    try:
        run(command, *words[command])
    except UserError as raised:
        error = str(raised)
    out = Path("out.jsonl")
    return error + "".join(capsys.readouterr()) + (out.read_text() if out.exists() else "")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", QUOTED)
def test_a_key_that_a_server_quotes_is_not_written(
    name: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, content = QUOTED[name]
    monkeypatch.setattr(endpoint, "_MAX_BYTES", 20_000)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(lambda body: (status, content(KEY))) as server:
        server.models = [f"served {KEY}"]
        shown = shown_by(command, server.url, capsys)
    assert not re.search("Q7x|sk-", shown), shown
    assert "***" in shown or command == "compare"


def test_a_placeholder_as_a_key_is_left_in_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "anything")
    with serving(lambda body: "Anything is not-needed.") as server:
        assert Endpoint(url=server.url, option="--endpoint", concurrency=1).complete([]).text == "Anything is not-needed."


@pytest.mark.parametrize("command", COMMANDS)
def test_a_key_of_any_characters_is_not_written(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key that cannot be sent is refused; any other one is quoted by the server in several ways."""
    draw, sent = random.Random(command), 0
    for number in range(24):
        special = "\r\n\t \x01\x1b\x7fé日\u2028" if number % 2 else "\"'\\%&<>{}[]$^*?+/=~`"
        key = f"begin{''.join(draw.choices('aZ09-_.' + special, k=12))}ended"
        monkeypatch.setenv("OPENAI_API_KEY", f"{key}{draw.choice(['', ' ', chr(13) + chr(10)])}")
        texts = f"{key} {key!r} {json.dumps(key)} {quote(key)} {html.escape(key)} {key.encode()!r}"
        replies = iter([(400, {"error": texts}), (200, {"error": texts})])
        with serving(lambda body, key=key, replies=replies: next(replies, (401, key))) as server:  # type: ignore[misc]
            shown = shown_by(command, server.url, capsys)
            sent += bool(server.keys)
        assert not re.search("begin|ended", shown), (key, shown)
        Path("out.jsonl").unlink(missing_ok=True)
    assert 6 < sent < 24
