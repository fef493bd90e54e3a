"""Labels on a web page of this machine, which only the holder of its address can open."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from nemo_kto.errors import UserError, describe
from nemo_kto.tools.rounds.answers import messages_of, text_of
from nemo_kto.tools.rounds.labelling import BOTH_BAD, TIE, Labelling, Verdict

LOOPBACK = "127.0.0.1"
_PAGE = Path(__file__).with_name("label_page.html")
_MAX_REQUEST = 2**16  # bytes
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
_VERDICTS: dict[str, Verdict | None] = {"first": True, "second": False, "tie": TIE, "both_bad": BOTH_BAD, "skip": None}


class PageServer(ThreadingHTTPServer):
    """The server of the page.

    Attributes:
        address: address of the page, with the token that each request must have.
        is_local: whether only this machine can reach it.
    """

    daemon_threads = True
    request_queue_size = 64  # a connection above it would wait for a second

    def __init__(self, *, labelling: Labelling, host: str = LOOPBACK, port: int = 0, next_step: str = "") -> None:
        """Listen at a port, 0 for a free one; UserError if that is impossible.

        ``next_step`` is shown after the last question.
        """
        self._labelling, self._token, self._lock = labelling, secrets.token_urlsafe(16), threading.Lock()
        self._next_step = next_step
        try:
            self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            super().__init__((str(address[0]), int(address[1])), _Handler)
        except (OSError, UnicodeError, OverflowError) as error:
            text = f"--host and --port must be a free address of this machine, got {host} and {port}: {describe(error)}"
            raise UserError(f"{text}; name others, or leave them out") from error
        found = ip_address(str(self.server_address[0]))
        self.is_local = found.is_loopback
        shown = socket.gethostname() if found.is_unspecified else f"[{found}]" if found.version == 6 else str(found)
        self.address = f"http://{shown}:{self.server_address[1]}/?token={self._token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over browsers that close their connection before they have their reply."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def knows(self, token: str) -> bool:
        """Return whether a request has the token."""
        return hmac.compare_digest(token.encode(), self._token.encode())

    def state(self) -> dict[str, object]:
        """Return the next question, and how many are behind; its key is None after the last one."""
        with self._lock:
            left = self._labelling.left
            prompt = messages_of(left[0].prompt) if left else []
            return {
                "position": self._labelling.position,
                "total": self._labelling.total,
                "key": left[0].key if left else None,
                "prompt": [{"role": str(turn["role"]), "content": text_of([turn])} for turn in prompt],
                "answers": [{"text": answer.text, "cut": answer.is_cut} for answer in left[0].answers] if left else [],
                "tally": self._labelling.tally,
                "next_step": self._next_step,
            }

    def act(self, key: object, action: object) -> None:
        """Apply a verdict, "skip" or "undo"; a request about another question than the next one has no effect."""
        with self._lock:
            left = self._labelling.left
            if key != (left[0].key if left else None):
                return  # a second click, or an older window
            if action == "undo":
                self._labelling.undo()
            elif left and action in _VERDICTS and (verdict := _VERDICTS[str(action)]) in (*left[0].verdicts, None):
                self._labelling.answer(verdict)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 60  # seconds without a byte

    def log_message(self, *_: object) -> None:
        """Log nothing: addresses have the token."""

    def do_GET(self) -> None:
        pages: dict[str, Callable[[], tuple[str, bytes]]] = {
            "/": lambda: ("text/html; charset=utf-8", _PAGE.read_bytes()),
            "/state": lambda: ("application/json", json.dumps(self.server.state()).encode()),
        }
        self._answer(pages)

    def do_POST(self) -> None:
        self._answer({"/verdict": lambda: ("application/json", json.dumps(self._act()).encode())})

    def _act(self) -> dict[str, object]:
        length = self.headers.get("Content-Length", "")
        raw = self.rfile.read(min(int(length) if length.isdecimal() else 0, _MAX_REQUEST))
        request: Any = json.loads(raw)
        if request.get("action") == "quit":
            threading.Thread(target=self.server.shutdown).start()  # waits for the loop that started this thread
            return {"ended": True}
        self.server.act(request.get("key"), request.get("action"))
        return self.server.state()

    def _answer(self, pages: dict[str, Callable[[], tuple[str, bytes]]]) -> None:
        kind, content, status = "text/plain; charset=utf-8", b"open the address that nemo-kto label has printed\n", 403
        try:
            url = urlsplit(self.path)
            if self.server.knows(parse_qs(url.query).get("token", [""])[0]):
                status, content = 404, b""
                if url.path in pages:
                    (kind, content), status = pages[url.path](), 200
        except UserError as error:  # such as a full disk; the page shows it, and the same verdict may be given again
            status, content = 507, str(error).encode()
        except (ValueError, TypeError, AttributeError, RecursionError):
            status = 400
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), **_HEADERS}
        for name, value in {**headers, "Content-Security-Policy": f"{_POLICY}; frame-ancestors 'none'"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
