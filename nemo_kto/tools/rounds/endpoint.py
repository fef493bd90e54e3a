"""Client of servers with OpenAI's interface, such as vLLM and SGLang."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

try:
    import httpx2 as httpx  # the name in huggingface_hub from version 2 on
except ImportError:
    import httpx

from nemo_kto.data.rows.records import TextOrMessages
from nemo_kto.errors import UserError, describe, plural, printable, refuse_broken, show
from nemo_kto.redaction import without_secret
from nemo_kto.utils.text import print_error

logger = logging.getLogger(__name__)

API_KEY = "OPENAI_API_KEY"
_ATTEMPTS = 6
_FIRST_DELAY, _MAX_DELAY = 0.5, 60.0  # seconds before the second attempt, doubled before each further one
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses of a server that may answer later
_ABOUT_THE_PROMPT = frozenset({400, 413, 422})  # such as one above the context length
_MAX_UNANSWERED = 10  # tasks in a row
_MAX_SECONDS = 600.0  # of an attempt, after which there is no further one; an answer may wait behind many others
_REPORT_SECONDS = 10.0  # between two lines about a server that sends nothing
_MAX_BYTES = 2**24  # of a reply
_UNBOUNDED = re.compile("br|zstd|(?:gzip|deflate).*(?:gzip|deflate)", re.IGNORECASE)  # encodings of any size in memory
_CHAT = "/chat/completions"
_VERSION = re.compile(r"[^/]/v\d+\w*(?=/|$)")  # in the path of a URL: /v1, /api/paas/v4, /v1beta/openai
# Settings that some models refuse, and the names that these have for them
_OTHER_NAMES = {"max_tokens": "max_completion_tokens", "seed": None, "temperature": None, "top_p": None}
_UNKNOWN = re.compile("unsupported|not supported|unrecogni[sz]ed|unknown|unexpected|extra|not permitted", re.IGNORECASE)
THOUGHTS = "reasoning_content"  # of a message, as chat templates read it
_THOUGHTS_FIELDS = (THOUGHTS, "reasoning")  # vLLM from 0.19 on and OpenRouter have the second one
_THOUGHTS_PARTS = ("thinking", "reasoning")  # of content that is a list of parts, such as Mistral's
_CUT = "length"
_FILTERED = frozenset({"content_filter", "sensitive"})
# of an answer that the server could not end; OpenRouter, vLLM and SGLang, DeepSeek, Z.ai
_BROKEN_OFF = frozenset({"error", "abort", "insufficient_system_resource", "network_error"})
_LEAVE_OUT = "leave the prompt out"

T = TypeVar("T")


class Reply(NamedTuple):
    """An answer of a server: a text, or a list with a message that has thoughts."""

    answer: TextOrMessages
    finish: str  # "stop", "length" or another reason of the server
    left_out: Sequence[str] = ()  # settings that the server was not given

    @property
    def text(self) -> str:
        """The answer without its thoughts."""
        return self.answer if isinstance(self.answer, str) else str(self.answer[0]["content"])


class NoAnswer(NamedTuple):
    """Why a reply of a server has no answer."""

    got: str
    remedy: str = f"repeat the command, or {_LEAVE_OUT}"
    may_pass: bool = False  # whether the same request may have an answer later
    refusal: str = ""  # the server's text about a request that it does not accept


class RefusedError(UserError):
    """Error about one request, such as a prompt above the context length; others may succeed."""


class UnansweredError(RefusedError):
    """Error about one request that has no answer after all attempts."""


class Endpoint:
    """A server, asked by several threads, each of which repeats a request that the server could not answer yet.

    Attributes:
        model: name of the model for the server.
    """

    def __init__(
        self, *, url: str, option: str, model: str | None = None, concurrency: int, left_out: Sequence[str] = ()
    ) -> None:
        """Find the model, if the server has only one; ``option`` names the URL in messages.

        Settings that are ``left_out`` are not sent. Raises UserError if the URL is none, or the server does not answer, or
        has several models.
        """
        refuse_broken("--model", model or "")
        self._base, self._option, self._concurrency, self._key = _base(url, option), option, concurrency, _key()
        self._quoted = self._key if re.search(r"\d", self._key) else ""  # others are placeholders, such as "anything"
        headers = {"Accept-Encoding": "gzip, deflate"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        timeout, limits = httpx.Timeout(None, connect=10.0), httpx.Limits(max_connections=None)
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        try:
            self._client = httpx.Client(headers=headers, timeout=timeout, limits=limits, cookies=no_cookies)
        except Exception as error:  # of httpx and the packages for proxies and certificates
            text = f"HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR must be usable for {option}"
            raise UserError(f"{text}, got {describe(error)}; correct them, or leave them unset") from error
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._heard = self._reported = time.monotonic()  # last reply; last line about its absence
        self._names = dict[str, str | None].fromkeys(left_out)  # of settings for this server; None: not sent
        self.model = self._only_model() if model is None else model

    def complete(self, messages: Sequence[Any], **settings: object) -> Reply:
        """Return the answer to a conversation; settings that are None are left to the server.

        A setting that the server refuses is sent under its other name, or left out of all further requests, with a warning.
        Raises RefusedError if this request has no answer, UserError if the server cannot be used.
        """
        names = dict(self._names)
        given = {name: value for name, value in settings.items() if value is not None}
        while True:
            sent = {names.get(name, name): value for name, value in given.items()}
            body = {"model": self.model, "messages": list(messages), **{name: sent[name] for name in sent if name}}
            reply = self._request("POST", _CHAT, read_reply, json=body)
            if isinstance(reply, Reply):
                self._remember(names, given)
                return reply._replace(left_out=[name for name in given if names.get(name, name) is None])
            other = next((each for each in given if each not in names and _is_refused(each, reply.refusal)), None)
            if other is None:
                error = UnansweredError if reply.may_pass else RefusedError
                raise error(f"{self._option} must give an answer, got {reply.got}; {reply.remedy}")
            names[other] = _OTHER_NAMES[other]

    def map(self, ask: Callable[[T], Reply], tasks: Sequence[T]) -> Iterator[tuple[T, Reply | RefusedError]]:
        """Yield each task with its reply, or the server's refusal, in the order in which they come."""
        self._stopped.clear()
        self._heard = self._reported = time.monotonic()
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
            unanswered = 0
            for _ in tasks:
                task, reply = done.get()
                if not isinstance(reply, Reply | RefusedError):
                    raise reply
                unanswered = unanswered + 1 if isinstance(reply, UnansweredError) else 0
                if unanswered == _MAX_UNANSWERED:
                    raise self._silent(f"{unanswered} requests in a row without an answer, the last: {reply}")
                yield task, reply
        finally:
            self._stopped.set()  # ends the delays before further attempts

    def _remember(self, names: Mapping[str, str | None], given: Mapping[str, object]) -> None:
        """Keep the names with which the server has answered, and warn of those that are new."""
        with self._lock:
            for name in [*names.keys() - self._names.keys()]:
                self._names[name] = names[name]
                instead = f"{names[name]} is sent instead" if names[name] else "it is left out of all requests"
                print_error(f"nemo-kto: warning: {self._option} refuses {name} {given[name]}; {instead}")

    def _only_model(self) -> str:
        content: Any = self._request("GET", "/models", lambda content: content)
        if isinstance(content, NoAnswer):
            raise self._silent(content.got) if content.may_pass else self._no_server(content.got)
        try:
            names = [str(each["id"]) for each in content["data"]]
        except (LookupError, TypeError):
            raise self._no_server(show(content, 200)) from None
        if len(names) != 1:
            raise UserError(f"--model must name one of the models of {self._base}, got none; it has {', '.join(names)}")
        return names[0]

    def _request(self, method: str, path: str, read: Callable[[Any], T | NoAnswer], **arguments: Any) -> T | NoAnswer:
        """Return what ``read`` finds in the server's reply; why there is no answer, if that may be due to this request.

        Raises UserError if the server cannot be used.
        """
        began = time.monotonic()
        for attempt in range(1, _ATTEMPTS + 1):
            wait, reply = "", None
            try:
                response, body = self._exchange(method, path, **arguments)
            except Exception as error:  # of httpx, proxies, TLS and codecs
                problem = describe(error)
            else:
                reply = self._read(response, body, read)
                if not (isinstance(reply, NoAnswer) and reply.may_pass):
                    return reply
                wait = response.headers.get("retry-after", "")
            delay = min(float(wait) if wait.isdecimal() else _FIRST_DELAY * 2 ** (attempt - 1), _MAX_DELAY)
            if attempt == _ATTEMPTS or time.monotonic() - began >= _MAX_SECONDS or self._wait(self._stopped, delay):
                break
        count = f"in {plural(attempt, 'attempt')}"
        if isinstance(reply, NoAnswer):
            return reply._replace(got=f"{reply.got} {count}")
        raise self._silent(f"{problem} {count}")

    def _exchange(self, method: str, path: str, **arguments: Any) -> tuple[httpx.Response, bytes]:
        """Return a reply and its content, received in a thread, because a timeout of httpx starts again with each byte."""
        done, found = threading.Event(), list[tuple[httpx.Response, bytes] | Exception]()

        def receive() -> None:
            try:
                with self._client.stream(method, self._base + path, **arguments) as response:
                    if _UNBOUNDED.search(encoding := response.headers.get("content-encoding", "")):
                        raise ValueError(f"a reply with Content-Encoding {encoding}, whose size is unlimited")
                    body = bytearray()
                    for chunk in response.iter_bytes():
                        body += chunk
                        if len(body) > _MAX_BYTES:
                            break
                    found.append((response, bytes(body)))
            except Exception as error:
                found.append(error)
            done.set()

        threading.Thread(target=receive, daemon=True).start()
        if not self._wait(done, _MAX_SECONDS):
            raise TimeoutError(f"no complete reply in {_MAX_SECONDS:g} s")
        self._heard = self._reported = time.monotonic()
        if isinstance(reply := found[0], Exception):
            raise reply
        return reply

    def _wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait for an event, and log at intervals that the server sends nothing; return whether it came in time."""
        end = time.monotonic() + seconds
        while not event.wait(max(0.0, min(end - time.monotonic(), _REPORT_SECONDS / 10))):
            if (now := time.monotonic()) >= end:
                return False
            with self._lock:
                if now - self._reported >= _REPORT_SECONDS:
                    self._reported = now
                    logger.info("waiting for %s, which has sent no reply for %.0f s", self._base, now - self._heard)
        return True

    def _read(self, response: httpx.Response, body: bytes, read: Callable[[Any], T | NoAnswer]) -> T | NoAnswer:
        if len(body) > _MAX_BYTES:
            return NoAnswer(f"a reply of more than {_MAX_BYTES:,} bytes", "allow fewer tokens, or leave the prompt out")
        status, text = response.status_code, body.decode("utf-8", "replace")
        if response.is_success:
            try:
                return read(self._public(json.loads(body)))
            except (ValueError, RecursionError):
                return NoAnswer(f"a reply that is not JSON: {show(text, 200)}", may_pass=True)
        problem = f"status {status}: {printable(text.strip())}"
        if status in _BUSY:
            return NoAnswer(problem, may_pass=True)
        if status in _ABOUT_THE_PROMPT or (status == 403 and "flagged" in text):  # by OpenRouter's filter
            return NoAnswer(problem, "correct the request as the server says, or leave the prompt out", refusal=text)
        raise self._no_server(problem)

    def _public(self, value: Any) -> Any:
        """Return JSON without lone surrogates, which no file takes, and without a key that the server quotes."""
        if isinstance(value, str):
            return without_secret(value.encode("utf-8", "replace").decode(), self._quoted)
        if isinstance(value, dict):
            return {self._public(name): self._public(inner) for name, inner in value.items()}
        return [self._public(inner) for inner in value] if isinstance(value, list) else value

    def _silent(self, problem: str) -> UserError:
        text = f"{self._option} must be a server that answers, got {self._base} with {problem}"
        return UserError(f"{text}; start the server, and repeat the command, which continues")

    def _no_server(self, problem: str) -> UserError:
        text = f"{self._option} must be a server with OpenAI's interface, got {self._base} with {problem}"
        return UserError(f"{text}; correct the URL, --model or {API_KEY}")


def _key() -> str:
    """Return the key without white space around it, as of a line of a file; UserError, without it, if it cannot be sent."""
    key = os.environ.get(API_KEY, "").strip()
    if wrong := re.search("[^!-~]", key):
        text = f"{API_KEY} must be ASCII without spaces and line breaks, got another character at place {wrong.start() + 1}"
        raise UserError(f"{text} of {len(key)}; set the key alone")
    return key


def _base(url: str, option: str) -> str:
    """Return the address before "/chat/completions", with a version: /v1, if the URL has none and does not end so."""
    base = url.rstrip("/")
    try:
        parts, _ = urlsplit(base), httpx.URL(base)
        is_url = parts.scheme in ("http", "https") and parts.port != 0 and bool((parts.hostname or "").encode("idna"))
    except (httpx.InvalidURL, ValueError):
        is_url = False
    if not is_url:
        raise UserError(f"{option} must be a URL, got {url}; e.g. {option} http://localhost:8000")
    is_whole = base.endswith(_CHAT)
    return base.removesuffix(_CHAT) if is_whole or _VERSION.search(base) else f"{base}/v1"


def _is_refused(name: str, refusal: str) -> bool:
    """Return whether a server's text about a request may refuse a setting, not only its value if it has another name."""
    other = _OTHER_NAMES.get(name, name)
    is_unknown = other is None or other in refusal or _UNKNOWN.search(refusal)
    return other != name and re.search(rf"\b{name}\b", refusal) is not None and bool(is_unknown)


def read_reply(content: Any) -> Reply | NoAnswer:
    """Return the answer in the JSON of a reply, or why it has none.

    An answer has text. A tool call, a refusal, thoughts without an answer, and what a filter has left over are none.
    """
    try:
        if content.get("error"):
            raise LookupError
        choice = content["choices"][0]
        message, finish = choice["message"], str(choice.get("finish_reason"))
        text, thoughts, refusal = map("".join, _parts(message.get("content")))
        refusal = message.get("refusal") or refusal
        thoughts = next((each for name in _THOUGHTS_FIELDS if isinstance(each := message.get(name), str) and each), thoughts)
        calls = message.get("tool_calls") or message.get("function_call")
    except (LookupError, TypeError, AttributeError):
        return NoAnswer(f"a reply with status 200 and no answer: {show(content, 200)}", may_pass=True)
    except ValueError as error:
        return NoAnswer(str(error), _LEAVE_OUT)
    if choice.get("error") or finish in _BROKEN_OFF:
        return NoAnswer(f"an answer that broke off: {show(choice.get('error') or finish, 200)}", may_pass=True)
    if calls:
        return NoAnswer(f"a tool call: {show(calls, 200)}", f"serve the model without tools, or {_LEAVE_OUT}")
    if refusal:
        return NoAnswer(f"a refusal: {show(refusal, 200)}", _LEAVE_OUT)
    if finish in _FILTERED:
        return NoAnswer(f"an answer that a filter has cut: finish_reason {finish}", _LEAVE_OUT)
    is_empty = not (text.strip() if thoughts else text)
    if is_empty and finish == _CUT:
        remedy = "allow more tokens, or any number with --leave-out max_tokens"
        return NoAnswer(f"thoughts that are cut before the answer: finish_reason {finish}", remedy)
    if is_empty and thoughts:
        return NoAnswer(f"thoughts without an answer: finish_reason {finish}", _LEAVE_OUT)
    if message.get("content") is None:
        return NoAnswer(f"null as content: finish_reason {finish}", _LEAVE_OUT)
    return Reply([{"role": "assistant", "content": text, THOUGHTS: thoughts}] if thoughts else text, finish)


def _parts(content: Any) -> tuple[list[str], list[str], list[str]]:
    """Return the texts, thoughts and refusals of content: a text, a list of parts, or null; ValueError for other parts."""
    texts, thoughts, refusals = list[str](), list[str](), list[str]()
    parts: list[Any] = content if isinstance(content, list) else [content or ""]
    for part in parts:
        kind = "text" if isinstance(part, str) else part.get("type", "text")
        if kind in _THOUGHTS_PARTS:
            thoughts += _parts(part.get(kind, part.get("text")))[0]
        elif kind in ("text", "output_text", "refusal"):
            text = part if isinstance(part, str) else part["refusal" if kind == "refusal" else "text"]
            (refusals if kind == "refusal" else texts).append(text)
        else:
            raise ValueError(f"content with a part of the type {show(kind)}, which is no text")
    return texts, thoughts, refusals
