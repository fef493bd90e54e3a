"""Labels by single keys in a terminal."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Collection

from nemo_kto.data.rows.records import TextOrMessages
from nemo_kto.errors import UserError
from nemo_kto.tools.inference.row_output import RowFile
from nemo_kto.tools.rounds.answers import messages_of, text_of
from nemo_kto.tools.rounds.labelling import PERSON, Labelling, thumb_row
from nemo_kto.utils.text import terminal_line, terminal_text

THUMBS = {"g": True, "b": False}
PAIRS = {"1": True, "2": False}
SKIP, UNDO, QUIT = "s", "u", "q"
_RULE = "\u2500" * 60


def require_terminal(option: str, *, remedy: str) -> None:
    """Raise UserError unless keys can be read and questions be shown."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(f"{option} must be used in a terminal, whose keys are read, got a pipe or a file; {remedy}")


def read_key(keys: Collection[str], *, forgets_earlier: bool = False) -> str:
    """Wait for one of the keys on the terminal, and return it; Ctrl-D is the key q, if it is one of them.

    Keys that were pressed before count, unless ``forgets_earlier``.
    """
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSAFLUSH if forgets_earlier else termios.TCSADRAIN)
        while True:
            key = os.read(terminal, 1).decode(errors="replace").lower()
            if key == "\x1b":
                _skip_code(terminal)
                continue
            key = QUIT if key in ("", "\x04") else key
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
        _write(f"  [g]ood  [b]ad  [{SKIP}]kip ")
        key = read_key([*THUMBS, SKIP, QUIT], forgets_earlier=True)  # keys pressed during the answer are no thumbs
        _write(f"{key}\n")
        if key in THUMBS:
            self._file.append(thumb_row(prompt, answer, good=THUMBS[key], source={"model": model, "labeller": PERSON}))


def label_in_terminal(labelling: Labelling) -> None:
    """Show the questions that are left, one after the other, until the key q."""
    shown: TextOrMessages | None = None
    while True:
        verdicts, choice = dict[str, bool](), "no question is left "
        if labelling.left:
            question = labelling.left[0]
            is_pair = len(question.answers) == 2
            verdicts, choice = (PAIRS, "[1] or [2] is better") if is_pair else (THUMBS, "[g]ood  [b]ad")
            choice += f"  [{SKIP}]kip "
            _write(f"\n{_RULE}\n{labelling.position + 1} of {labelling.total}\n")
            if question.prompt != shown:
                shown = question.prompt
                for message in messages_of(shown):
                    _write(f"{terminal_line(message['role'])}: {terminal_text(text_of([message]))}\n")
            for number, answer in enumerate(question.answers, start=1):
                _write(f"\n{f'answer {number}' if is_pair else 'answer'}:\n{terminal_text(answer.text)}\n")
        _write(f"\n  {choice} [{UNDO}]ndo  [{QUIT}]uit ")
        key = read_key([*verdicts, *([SKIP] if verdicts else []), UNDO, QUIT])
        _write(f"{key}\n")
        if key == QUIT:
            return
        if key == UNDO:
            labelling.undo()
        else:
            labelling.answer(verdicts.get(key))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
