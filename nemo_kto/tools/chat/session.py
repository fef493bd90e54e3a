"""A conversation in a terminal or over pipes, with one model or with two that get the same messages."""

from __future__ import annotations

import json
import os
import sys
import termios
import tty
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nemo_kto.data.rows.records import TextOrMessages
from nemo_kto.errors import UserError, either, refuse_broken, show
from nemo_kto.tools.inference.row_output import PERSON, RowFile, thumb_row
from nemo_kto.utils.text import terminal_line, terminal_text

if TYPE_CHECKING:
    from nemo_kto.tools.inference.chat_model import ChatModel, Message
    from nemo_kto.tools.inference.sampling import Sampling

_HELP = """\
/reset          forget the conversation; the system message stays
/system TEXT    set the system message, and forget the conversation; without TEXT, remove it
/help           list the commands
/quit           end, like Ctrl-D; Ctrl-C stops an answer
"""
_LABELS = ("\x1b[1;32m", "\x1b[1;36m")  # colour of the label of each model
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_PROMPT = "> "
_THUMBS = {"g": True, "b": False}
_SKIP, _QUIT = "s", "q"


class Session:
    """A conversation, whose answers are printed to stdout: as text while they are generated, or as lines of JSON.

    Each model has a history of its own, with its own answers. ``collect`` gets each complete answer after it is printed: the
    name of its model, the prompt that the model has seen (a text, if it has no chat template), and the answer of a row.
    """

    def __init__(
        self,
        *,
        models: Sequence[ChatModel],
        sampling: Sampling,
        system: str | None = None,
        as_json: bool,
        collect: Callable[[str, Any, TextOrMessages], None] | None = None,
    ) -> None:
        self._collect = collect
        self._models, self._sampling, self._as_json = models, sampling, as_json
        self._coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        refuse_broken("--system", system or "")
        self._system = system
        self._histories: list[list[Message]] = []
        self.reset()
        for model in models:
            if ignored := model.settings[1]:
                _report(f"{model.label}: a chat ignores {', '.join(ignored)} of its generation settings")
        if without := [model for model in models if not model.has_template]:
            names = " and ".join(model.label for model in without)
            if system is not None:
                raise UserError(f"--system must be used with a chat template, which {names} lacks; leave it out")
            text = "no chat template, so that each prompt is completed as it is, without the conversation before it"
            _report(f"{names}: {text}")

    def reset(self) -> None:
        """Forget the conversation, except for the system message."""
        start = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._histories = [list(start) for _ in self._models]

    def say(self, prompt: str) -> bool:
        """Print the answer of each model to a prompt, and add both to its history; return whether none was interrupted.

        Raises UserError if the prompt does not fit into the context, or the chat template rejects the messages; the
        histories then remain unchanged.
        """
        refuse_broken("a prompt", prompt)
        added = []
        for number, (model, history) in enumerate(zip(self._models, self._histories, strict=True)):
            if len(self._models) > 1 and not self._as_json:
                self._write(self._marked(terminal_line(f"{model.label}:"), _LABELS[number]) + "\n")
            show_text = (lambda text: None) if self._as_json else (lambda text: self._write(terminal_text(text)))
            answer = model.answer([*history, {"role": "user", "content": prompt}], self._sampling, show=show_text)
            if self._as_json:
                fields = {"tokens": answer.tokens, "seconds": round(answer.seconds, 3), "finish": answer.finish}
                message = {"message": answer.message} if answer.message.keys() - {"role", "content"} else {}
                line = {"model": model.label, "prompt": prompt, "answer": answer.drawn.text, **message, **fields}
                text = json.dumps(line, ensure_ascii=False)
                self._write((text if text == terminal_text(text) else json.dumps(line)) + "\n")
            else:
                details = f"  {self._marked(f'({answer.describe()})', _DIM)}" if sys.stdout.isatty() else ""
                self._write(f"{details}\n")
            added.append([{"role": "user", "content": prompt}, answer.message])
            if answer.finish == "interrupted":
                break
            if self._collect is not None:
                seen = [*history, {"role": "user", "content": prompt}] if model.has_template else prompt
                self._collect(model.label, seen, answer.drawn.answer)
        for history, messages in zip(self._histories, added, strict=False):
            history += messages
        return answer.finish != "interrupted"

    def talk(self) -> None:
        """Answer lines of stdin until its end or /quit.

        On a terminal, lines can be edited, and a UserError is printed; otherwise it is raised.
        """
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        for line in _typed_lines() if interactive else sys.stdin:
            word, _, rest = line.rstrip("\n").partition(" ")
            try:
                if word == "/quit":
                    return
                if word == "/help":
                    self._write(_HELP)
                elif word == "/reset":
                    self.reset()
                elif word == "/system":
                    self._set_system(rest.strip())
                elif word.startswith("/"):
                    known = either(["/reset", "/system", "/help", "/quit"])
                    raise UserError(f"the command must be {known}, got {show(word)}; a prompt may begin with a space")
                elif line.strip() and not self.say(line.strip()) and not interactive:
                    raise KeyboardInterrupt
            except UserError as error:
                if not interactive:
                    raise
                _report(str(error))

    def _set_system(self, text: str) -> None:
        if not all(model.has_template for model in self._models):
            raise UserError("/system must be used with a chat template, which the model lacks; write it into the prompt")
        refuse_broken("/system", text)
        self._system = text or None
        self.reset()

    def _marked(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._coloured else text

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _report(text: str) -> None:
    sys.stderr.write(f"nemo-kto chat: {terminal_text(text)}\n")
    sys.stderr.flush()


def _typed_lines() -> Iterator[str]:
    """Yield lines typed on a terminal; Ctrl-C discards the line that is being written."""
    import readline  # noqa: F401  # input() then edits lines and recalls earlier ones

    while True:
        try:
            yield input(_PROMPT)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
        except EOFError:
            sys.stdout.write("\n")
            return


def require_terminal(option: str, *, remedy: str) -> None:
    """Raise UserError unless keys can be read and questions be shown."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(f"{option} must be used in a terminal, whose keys are read, got a pipe or a file; {remedy}")


def read_key(keys: Collection[str]) -> str:
    """Wait for one of the keys on the terminal, and return it; Ctrl-D is the key q. Keys pressed before do not count."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSAFLUSH)
        while True:
            key = os.read(terminal, 1).decode(errors="replace").lower()
            if key == "\x1b":
                _skip_code(terminal)
                continue
            key = _QUIT if key in ("", "\x04") else key
            if key in keys:
                return key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _skip_code(terminal: int) -> None:
    """Read the rest of the code of an arrow or another key: a character, or after [ or O one from @ to ~ that ends it."""
    byte = os.read(terminal, 1)
    if byte in (b"[", b"O"):
        while (byte := os.read(terminal, 1)) and not b"@" <= byte <= b"~":
            pass


class Collector:
    """Question for a thumb after an answer of a chat, whose row is appended to a file."""

    def __init__(self, *, file: RowFile) -> None:
        self._file = file

    def __call__(self, model: str, prompt: TextOrMessages, answer: TextOrMessages) -> None:
        """Ask whether the answer above is good, and append its row unless it is skipped."""
        print(f"  [g]ood  [b]ad  [{_SKIP}]kip ", end="", flush=True)
        key = read_key([*_THUMBS, _SKIP, _QUIT])
        print(key, flush=True)
        if key in _THUMBS:
            self._file.append(thumb_row(prompt, answer, good=_THUMBS[key], source={"model": model, "labeller": PERSON}))
