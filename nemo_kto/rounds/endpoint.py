"""Client of servers with OpenAI's interface, such as vLLM and SGLang."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

try:
    import httpx2 as httpx  # the name in huggingface_hub from version 2 on
except ImportError:
    import httpx

from nemo_kto.errors import UserError, printable, show

API_KEY = "OPENAI_API_KEY"
_ATTEMPTS = 6
_FIRST_DELAY, _MAX_DELAY = 0.5, 60.0  # seconds before the second attempt, doubled before each further one
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses of a server that may answer later
_ABOUT_THE_PROMPT = frozenset({400, 413, 422})  # such as one above the context length
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)  # an answer may wait behind many others

T = TypeVar("T")


class Reply(NamedTuple):
    """An answer of a server."""

    text: str
    finish: str  # "stop", "length" or another reason of the server


class RefusedError(UserError):
    """Error about one request, such as a prompt above the context length; others may succeed."""


class Endpoint:
    """A server, asked by several threads, each of which repeats a request that the server could not answer yet.

    Attributes:
        model: name of the model for the server.
    """

    def __init__(self, *, url: str, option: str, model: str | None = None, concurrency: int) -> None:
        """Find the model, if the server has only one; ``option`` names the URL in messages.

        Raises UserError if the URL is none, or the server does not answer, or has several models.
        """
        self._base, self._option, self._concurrency = url.rstrip("/").removesuffix("/v1"), option, concurrency
        if not self._base.startswith(("http://", "https://")):
            raise UserError(f"{option} must be a URL, got {url}; e.g. {option} http://localhost:8000")
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=concurrency)
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT, limits=limits)
        self._stopped = threading.Event()
        self.model = self._only_model() if model is None else model

    def complete(self, messages: Sequence[Any], **settings: object) -> Reply:
        """Return the answer to a conversation; settings that are None are left to the server.

        Raises RefusedError if the server refuses this request, UserError if it cannot be used.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        body = {"model": self.model, "messages": list(messages), **given}
        content = self._request("POST", "/v1/chat/completions", json=body)
        try:
            (choice,) = content["choices"]
            text = choice["message"].get("content") or ""
            # a lone surrogate in an answer could not be written
            return Reply(text.encode("utf-8", "replace").decode(), str(choice.get("finish_reason")))
        except (LookupError, TypeError, ValueError, AttributeError):
            raise self._no_server(show(content, 200)) from None

    def map(self, ask: Callable[[T], Reply], tasks: Sequence[T]) -> Iterator[tuple[T, Reply | RefusedError]]:
        """Yield each task with its reply, or the server's refusal, in the order in which they come."""
        self._stopped.clear()
        waiting, done = iter(tasks), queue.SimpleQueue[tuple[T, Reply | BaseException]]()
        lock = threading.Lock()

        def work() -> None:
            while not self._stopped.is_set():
                with lock:
                    if (task := next(waiting, None)) is None:
                        return
                try:
                    done.put((task, ask(task)))
                except BaseException as error:  # raised below
                    done.put((task, error))

        try:
            for _ in range(min(self._concurrency, len(tasks))):
                threading.Thread(target=work, daemon=True).start()  # the command ends without the replies to come
            for _ in tasks:
                task, reply = done.get()
                if not isinstance(reply, Reply | RefusedError):
                    raise reply
                yield task, reply
        finally:
            self._stopped.set()  # ends the delays before further attempts

    def _only_model(self) -> str:
        content = self._request("GET", "/v1/models")
        try:
            names = [str(each["id"]) for each in content["data"]]
        except (LookupError, TypeError):
            raise self._no_server(show(content, 200)) from None
        if len(names) != 1:
            raise UserError(f"--model must name one of the models of {self._base}, got none; it has {', '.join(names)}")
        return names[0]

    def _request(self, method: str, path: str, **arguments: Any) -> Any:
        for attempt in range(_ATTEMPTS):
            try:
                response = self._client.request(method, self._base + path, **arguments)
            except httpx.TransportError as error:
                problem, wait = f"{type(error).__name__}: {error}", ""
            except httpx.InvalidURL as error:
                raise self._no_server(str(error)) from error
            else:
                if response.is_success:
                    try:
                        return response.json()
                    except ValueError:
                        raise self._no_server(f"a reply that is not JSON: {show(response.text, 200)}") from None
                problem = f"status {response.status_code}: {printable(response.text.strip())}"
                if response.status_code in _ABOUT_THE_PROMPT:
                    text = f"{self._option} refuses the request, {problem}"
                    raise RefusedError(f"{text}; correct it as the server says, or leave the prompt out")
                if response.status_code not in _BUSY:
                    raise self._no_server(problem)
                wait = response.headers.get("retry-after", "")
            delay = min(float(wait) if wait.isdecimal() else _FIRST_DELAY * 2**attempt, _MAX_DELAY)
            if attempt + 1 < _ATTEMPTS and self._stopped.wait(delay):
                break
        text = f"{self._option} must be a server that answers, got {self._base}{path} with {problem}"
        raise UserError(f"{text} in {_ATTEMPTS} attempts; start the server, and repeat the command, which continues")

    def _no_server(self, problem: str) -> UserError:
        text = f"{self._option} must be a server with OpenAI's interface, got {self._base} with {problem}"
        return UserError(f"{text}; correct the URL, --model or {API_KEY}")
