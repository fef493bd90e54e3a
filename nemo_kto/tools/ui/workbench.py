"""The state of the page: the words of its commands, and the processes that run them."""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from nemo_kto.config.checker import SHORT, override_value
from nemo_kto.data.rows.row_files import read_rows
from nemo_kto.errors import UserError
from nemo_kto.records.plots import summary_picture
from nemo_kto.records.run_record import is_run, read_run
from nemo_kto.telemetry.loggers import METRICS_FILE
from nemo_kto.tools.ui.started_command import StartedCommand
from nemo_kto.utils.text import html_text

COLUMNS = {"kto": ("prompt", "response", "label"), "dpo": ("prompt", "chosen", "rejected")}
_DATA = ("jsonl", "json", "csv", "tsv", "parquet")
_MAX_FOUND = 50


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices made on the page; ``columns`` maps our names to those in the file, empty for equal ones."""

    algorithm: str
    model: str
    data: str
    folder: str
    columns: Mapping[str, str]
    more: str  # further words of the command line

    def words(self, command: str = "") -> list[str]:
        """Return the words of a command after ``nemo-kto``: the training, or "check", "plan" or "data preview".

        Raises UserError if something is not chosen.
        """
        missing = [name for name in ("model", "data", "folder") if not getattr(self, name).strip()]
        if missing:
            raise UserError(f"{', '.join(missing)} must be chosen, got none; fill in the fields above")
        try:
            more = shlex.split(self.more)
        except ValueError as error:
            raise UserError(
                f"further settings must be KEY=VALUE words, got {self.more}: {error}; close the quote"
            ) from error
        renamed = {ours: theirs for ours, theirs in self.columns.items() if theirs and theirs != ours}
        settings = [f"model.data.fields={override_value(renamed)}"] if renamed else []
        model, data = self.model.strip(), self.data.strip()
        of_data = [word for word in more if SHORT.get(word.partition("=")[0], word).startswith("model.data.")]
        if command == "data preview":
            return [*command.split(), data, "--model", model, "--algorithm", self.algorithm, *settings, *of_data]
        folder = f"exp_manager.explicit_log_dir={override_value(self.folder.strip())}"
        return [*command.split(), self.algorithm, model, data, *settings, folder, *more]


def found_models() -> list[str]:
    """Return folders of models in the working directory and one level below it, and those that runs exported."""
    files = [file for depth in ("*", "*/*", "*/*/hf") for file in Path().glob(f"{depth}/config.json")]
    return sorted({str(file.parent) for file in files})[:_MAX_FOUND]


def found_data() -> list[str]:
    """Return data files in the working directory and one level below it."""
    return sorted(str(file) for end in _DATA for depth in ("*", "*/*") for file in Path().glob(f"{depth}.{end}"))[
        :_MAX_FOUND
    ]


def columns_of(file: str) -> list[str]:
    """Return the columns of the first row of a file; empty if it cannot be read, which a check explains."""
    try:
        row = next(read_rows(file))[1]
    except (UserError, OSError, StopIteration):
        return []
    return [str(name) for name in row] if isinstance(row, Mapping) else []


class Workbench:
    """The run, the short command and the conversation that the page has started last."""

    def __init__(self) -> None:
        self._run: StartedCommand | None = None
        self._chat: tuple[str, StartedCommand] | None = None
        self._short: StartedCommand | None = None
        self._folder = Path()
        self._drawn: tuple[object, str] = (None, "")

    def show(self, words: Sequence[str]) -> Iterator[str]:
        """Run a short command, such as a check, and yield its output as it grows."""
        if self._short is not None:
            self._short.stop()
        command = self._short = StartedCommand(words=words)
        while not command.wait(0.3):
            yield f"{command.output}..."
        yield command.output + ("" if command.status == 0 else f"(exit status {command.status})")

    def start(self, choices: Choices) -> None:
        """Start the training; UserError if one is running."""
        words = choices.words()
        if self._run is not None and self._run.status is None:
            raise UserError("one run at a time must be started, got a second; stop the first or wait for its end")
        self._run, self._folder = StartedCommand(words=words), Path(choices.folder.strip())

    def stop(self) -> None:
        """Stop the training as SIGTERM does."""
        if self._run is not None:
            self._run.stop()

    def watch(self) -> tuple[str, str, str]:
        """Return the state of the training in a line, its output, and its curves as HTML."""
        if self._run is None:
            return "No run was started on this page.", "", ""
        status, record = self._run.status, read_run(self._folder) if is_run(self._folder) else None
        step = f", step {record.step:,} of {record.total_steps:,}" if record is not None and record.total_steps else ""
        words = {None: "running", 0: "finished", 85: "stopped, with a checkpoint"}
        state = words.get(status, f"ended with status {status}; the output below has the reason")
        return f"{self._folder}: {state}{step}", self._run.output, self._picture()

    def _picture(self) -> str:
        file = self._folder / METRICS_FILE
        if not file.exists():
            return ""
        found = (file, file.stat().st_mtime_ns)
        if found != self._drawn[0]:
            summary_picture(read_run(self._folder), picture := BytesIO())
            source = f"data:image/png;base64,{b64encode(picture.getvalue()).decode()}"
            self._drawn = found, f'<img src="{source}" alt="curves of {html_text(str(self._folder))}" style="width: 100%">'
        return self._drawn[1]

    def answer(self, model: str, prompt: str) -> str:
        """Return the answer of a model, which keeps the conversation until another model is chosen.

        Raises UserError if the model cannot answer.
        """
        if not model.strip():
            raise UserError("a run folder or a model must be chosen, got none; fill in the field above")
        if self._chat is None or self._chat[0] != model or self._chat[1].status is not None:
            self.forget()
            self._chat = model, StartedCommand(words=["chat", "--json", model.strip()], converses=True)
        command = self._chat[1]
        try:
            command.say(f" {' '.join(prompt.split())}")  # a command of the chat would begin with a slash
        except OSError:
            command.wait(5)
        if (line := command.replies.get()) is None:
            command.wait(5)
            raise UserError(command.output.strip() or f"nemo-kto chat ended with status {command.status}; start it again")
        return str(json.loads(line)["answer"])

    def forget(self) -> None:
        """End the conversation, and free the memory of its model."""
        if self._chat is not None:
            self._chat[1].stop()
            self._chat = None

    def close(self) -> None:
        """Stop all commands, and wait for the checkpoint of the training."""
        started = [self._run, self._short, None if self._chat is None else self._chat[1]]
        for command in started:
            if command is not None:
                command.stop()
        for command in started:
            if command is not None:
                command.wait()
