"""A server with OpenAI's interface, of the standard library, which may fail before it answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], "str | tuple[int, object]"]
DROP = 0  # instead of a status: the connection is closed without a reply


class OpenAIServer(ThreadingHTTPServer):
    """Requests, and how the next ones fail.

    Attributes:
        answer: text of the answer to a request, or status and content of a reply: JSON, or text that is none.
        failures: statuses of the next replies, instead of answers.
        requests: bodies of the requests that were answered.
        keys: values of their header Authorization.
        paths: the paths of all requests.
        models: names of the models.
    """

    daemon_threads = True
    request_queue_size = 64  # a connection above it would wait for a second

    def __init__(self, answer: Answer) -> None:
        self.answer, self.models = answer, ["served"]
        self.failures, self.requests, self.keys = list[int](), list[dict[str, Any]](), list[str | None]()
        self.paths = list[str]()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: OpenAIServer

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self._reply(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.failures:
            if (status := self.server.failures.pop(0)) == DROP:
                self.connection.close()
            else:
                self._reply(status, {"error": {"message": "as the test wants"}})
            return
        text = self.server.answer(body)
        if isinstance(text, str) and text.startswith("REFUSED"):
            self._reply(400, {"error": {"message": text[8:] or "maximum context length"}})
            return
        self.server.requests.append(body)
        self.server.keys.append(self.headers.get("Authorization"))
        if not isinstance(text, str):
            self._reply(*text)
            return
        self._reply(200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]})

    def _reply(self, status: int, content: object) -> None:
        raw = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@contextmanager
def serving(answer: Answer, failures: Sequence[int] = ()) -> Iterator[OpenAIServer]:
    """Serve for the block."""
    server = OpenAIServer(answer)
    server.failures += failures
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
