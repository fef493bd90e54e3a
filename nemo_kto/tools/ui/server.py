"""The server of the page, which only the holder of its address can open; nothing leaves this machine."""

from __future__ import annotations

import hmac
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from fastapi import FastAPI
from gradio import mount_gradio_app

from nemo_kto.tools.ui.workbench import Workbench
from nemo_kto.tools.ui.workbench_page import build_page

Message = MutableMapping[str, Any]
Application = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
_COOKIE = "nemo_kto_ui_"  # and the port: a browser has the same cookies for all ports of a machine
_POLICY = "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'none'"
_HEADERS = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
_REFUSED = b"open the address that nemo-kto ui has printed\n"


class Gate:
    """An ASGI application in front of another: requests need the token, in the address or then in a cookie.

    Programs of other users of the machine, and pages of others in the same browser, do not have it.
    """

    def __init__(self, *, inner: Application, token: str) -> None:
        self._inner, self._token = inner, token

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if scope["type"] == "http" and scope["path"] == "/" and self._knows(given):
            cookie = f"{_cookie_name(scope)}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            await _reply(send, 303, {"Location": "/", "Set-Cookie": cookie})
        elif not self._knows(_cookie(scope)):
            await (_reply(send, 403, {}, _REFUSED) if scope["type"] == "http" else send({"type": "websocket.close"}))
        else:

            async def send_with_headers(message: Message) -> None:
                if message["type"] == "http.response.start":
                    added = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                    message = {**message, "headers": [*message.get("headers", []), *added]}
                await send(message)

            await self._inner(scope, receive, send_with_headers)

    def _knows(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())


def _cookie_name(scope: Message) -> str:
    return f"{_COOKIE}{scope['server'][1]}"


def _cookie(scope: Message) -> str:
    text = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"cookie"), "")
    try:
        found = SimpleCookie(text).get(_cookie_name(scope))
    except CookieError:
        return ""
    return "" if found is None else found.value


async def _reply(
    send: Callable[[Message], Awaitable[None]], status: int, headers: dict[str, str], body: bytes = b""
) -> None:
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def serve(listening: socket.socket) -> None:
    """Serve the page on a bound socket until Ctrl-C, SIGTERM or SIGHUP, then stop the commands that it has started."""
    token, workbench = secrets.token_urlsafe(16), Workbench()
    app = mount_gradio_app(FastAPI(), build_page(workbench), path="/", footer_links=[], ssr_mode=False, show_error=True)
    config = uvicorn.Config(Gate(inner=app, token=token), log_level="critical", timeout_graceful_shutdown=1)
    print(f"open http://127.0.0.1:{listening.getsockname()[1]}/?token={token}\nCtrl-C ends, and stops the run.", flush=True)
    # uvicorn raises SIGTERM again at its end, which would end us at once
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        # not an exception: within a request uvicorn would log it and go on
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        workbench.close()
