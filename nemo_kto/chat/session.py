"""A conversation with one model, or with two that get the same messages."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence

from nemo_kto.chat.model import ChatModel, Message, Sampling
from nemo_kto.errors import UserError, either, show
from nemo_kto.utils.text import terminal_line, terminal_text

_HELP = """\
/reset          forget the conversation; the system message stays
/system TEXT    set the system message, and forget the conversation; without TEXT, remove it
/help           list the commands
/quit           end, like Ctrl-D; Ctrl-C stops an answer
"""
_LABELS = ("\x1b[1;32m", "\x1b[1;36m")  # colour of the label of each model
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_PROMPT = "> "


class Session:
    """A conversation, whose answers are printed to stdout: as text while they are generated, or as lines of JSON.

    Each model has a history of its own, with its own answers.
    """

    def __init__(self, *, models: Sequence[ChatModel], sampling: Sampling, system: str | None = None, as_json: bool) -> None:
        self._models, self._sampling, self._as_json = models, sampling, as_json
        self._coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        _refuse_broken("--system", system or "")
        self._system = system
        self._histories: list[list[Message]] = []
        self.reset()
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
        _refuse_broken("a prompt", prompt)
        added = []
        for number, (model, history) in enumerate(zip(self._models, self._histories, strict=True)):
            if len(self._models) > 1 and not self._as_json:
                self._write(self._marked(terminal_line(f"{model.label}:"), _LABELS[number]) + "\n")
            show_text = (lambda text: None) if self._as_json else (lambda text: self._write(terminal_text(text)))
            answer = model.answer([*history, {"role": "user", "content": prompt}], self._sampling, show=show_text)
            if self._as_json:
                fields = {"tokens": answer.tokens, "seconds": round(answer.seconds, 3), "finish": answer.finish}
                line = {"model": model.label, "prompt": prompt, "answer": answer.text, **fields}
                text = json.dumps(line, ensure_ascii=False)
                self._write((text if text == terminal_text(text) else json.dumps(line)) + "\n")
            else:
                details = f"  {self._marked(f'({answer.describe()})', _DIM)}" if sys.stdout.isatty() else ""
                self._write(f"{details}\n")
            added.append([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer.text}])
            if answer.finish == "interrupted":
                break
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
        _refuse_broken("/system", text)
        self._system = text or None
        self.reset()

    def _marked(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._coloured else text

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _refuse_broken(name: str, text: str) -> None:
    """Raise a UserError for a byte that is not UTF-8, or a lone surrogate, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} must be text in UTF-8, got {show(text[error.start :])}; save it as UTF-8") from None


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
