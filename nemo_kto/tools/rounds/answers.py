"""Files of answers: a line for each answer of a model to a prompt; a killed command continues where its file ends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_kto.data.rows.forms import row_place
from nemo_kto.data.rows.reader import RowErrors, read_prompts
from nemo_kto.data.rows.records import PromptRecord, Row, RowError, TextOrMessages, records_of_row
from nemo_kto.data.rows.row_files import read_rows
from nemo_kto.errors import UserError, show
from nemo_kto.tools.inference.row_output import RowFile

VARIABLES = "chat_template_kwargs"
CUT = "length"  # "finish" of an answer that the maximum number of tokens has cut
WEIGHTS = "weights"  # setting with a hash of the model's weights; a server does not tell it
_MAX_DIFFERENCES = 5  # of a message
_COLUMNS: Mapping[str, Any] = {"prompt": (str, list), "answer": (str, list), "model": str, "line": int, "index": int}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A prompt, some of whose answers are missing in the file.

    Attributes:
        place: file and line of the prompt.
        prompt: text or messages, with the system message of the command.
        missing: numbers of the missing answers, from 0.
        variables: arguments of the chat template.
    """

    place: str
    line: int
    prompt: TextOrMessages
    missing: Sequence[int]
    variables: Mapping[str, object]

    @property
    def messages(self) -> list[Any]:
        """The prompt as messages."""
        return messages_of(self.prompt)

    def row(
        self,
        index: int,
        answer: TextOrMessages,
        finish: str,
        left_out: Sequence[str] = (),
        *,
        model: str,
        settings: Mapping[str, object],
    ) -> dict[str, object]:
        """Return the line of an answer in the file; ``left_out``: settings that a server was not given."""
        variables = {VARIABLES: self.variables} if self.variables else {}
        source = {"model": model, "line": self.line, "index": index, "finish": finish, "settings": settings}
        source |= {"left_out": left_out} if left_out else {}
        return {"prompt": self.prompt, **variables, "answer": answer, **source}


def messages_of(prompt: TextOrMessages) -> list[Any]:
    """Return a prompt as messages; a text is a message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def text_of(answer: TextOrMessages) -> str:
    """Return an answer as text for people, functions and judges: thoughts, content and calls as most models write them."""
    if isinstance(answer, str):
        return answer
    message = answer[0]
    thoughts = [str(message[name]) for name in ("reasoning_content", "thinking") if message.get(name)]
    calls: Any = message.get("tool_calls") or []
    calls = calls if isinstance(calls, list) else [calls]
    parts = [*(f"<think>\n{each}\n</think>" for each in thoughts), str(message.get("content") or "")]
    parts += [f"<tool_call>\n{json.dumps(_function(each), ensure_ascii=False)}\n</tool_call>" for each in calls]
    return "\n\n".join(filter(None, parts))


def _function(call: object) -> object:
    return call.get("function", call) if isinstance(call, dict) else call


def read_tasks(prompts: Path, settings: Mapping[str, Any]) -> dict[int, Task]:
    """Return the prompts of a file by their lines, without their answers.

    ``settings`` have the ``count`` of answers and the ``system`` message. Raises UserError for all prompts that cannot be
    answered.
    """
    broken, tasks = RowErrors(), dict[int, Task]()
    for record in read_prompts(prompts, limit=None):
        if (fault := _fault(record, settings["system"])) is not None:
            broken.add(prompts, record.line, fault)
        prompt = record.prompt
        if settings["system"] is not None:
            prompt = [{"role": "system", "content": settings["system"]}, *messages_of(prompt)]
        variables = dict(record.template)
        place = row_place(prompts, record.line)
        missing = range(settings["count"])
        tasks[record.line] = Task(place=place, line=record.line, prompt=prompt, missing=missing, variables=variables)
    broken.raise_if_any()
    return tasks


def find_tasks(file: RowFile, *, prompts: Path, model: str, settings: Mapping[str, Any]) -> list[Task]:
    """Return the prompts that lack answers in a file, as :func:`read_tasks` does.

    Raises UserError also if the file has answers of another command.
    """
    tasks = read_tasks(prompts, settings)
    differences, found = dict[str, None](), set[tuple[int, int]]()
    for row in file.rows:
        task = tasks.get(row["line"]) if isinstance(row.get("line"), int) else None
        differences |= dict.fromkeys(_differences(row, task, model, settings))
        if task is not None and isinstance(row.get("index"), int):
            found.add((task.line, row["index"]))
    if differences:
        shown, more = [*differences][:_MAX_DIFFERENCES], len(differences) - _MAX_DIFFERENCES
        shown += [f"and {more:,} more"] * (more > 0)
        text = f"--out must have answers of this command, got {file.path} with {'; '.join(shown)}"
        raise UserError(f"{text}; repeat the command of that file, or name another --out")
    missing_of = {line: [each for each in task.missing if (line, each) not in found] for line, task in tasks.items()}
    return [replace(task, missing=missing_of[line]) for line, task in tasks.items() if missing_of[line]]


def _fault(record: PromptRecord, system: str | None) -> str | None:
    """Return why a prompt cannot be answered; None if it can."""
    if "tools" in record.template:
        return '"tools" are not supported, because an answer may be a call; leave them out'
    if system is not None and messages_of(record.prompt)[0]["role"] == "system":
        return "a prompt must have no system message beside --system; leave one out"
    return None


def _differences(row: Row, task: Task | None, model: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs between a line of the file and the command: prompt, model, settings."""
    if task is None:
        yield "prompts of another file"
    elif (row.get("prompt"), row.get(VARIABLES, {})) not in [
        (prompt, task.variables) for prompt in (task.prompt, task.messages)
    ]:
        yield f"another prompt than {task.place}"
    given = row.get("settings")
    found = {**given, "model": row.get("model")} if isinstance(given, dict) else {}
    for name, value in {"model": model, **settings}.items():
        if found.get(name) != value and (name != WEIGHTS or name in found):
            yield f"{name} {show(found.get(name))} instead of {show(value)}"


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """An answer of a file, with the place of its line: a text, or a list with a message that has thoughts or tool calls."""

    place: str
    prompt: TextOrMessages
    variables: Mapping[str, object]
    answer: TextOrMessages
    source: Mapping[str, Any]  # model, line of the prompt, index
    is_cut: bool = False  # at the maximum number of tokens

    @property
    def text(self) -> str:
        """The answer as text."""
        return text_of(self.answer)

    @property
    def key(self) -> tuple[int, int]:
        """Line of the prompt and number of the answer, which are unique in a file."""
        return self.source["line"], self.source["index"]


def planned_answers(prompts: Path, *, model: str, settings: Mapping[str, Any]) -> list[Sampled]:
    """Return the answers that a model is to give to the prompts of a file, without their texts."""
    return [
        Sampled(
            place=task.place,
            prompt=task.prompt,
            variables=task.variables,
            answer="",
            source={"model": model, "line": task.line, "index": index},
        )
        for task in read_tasks(prompts, settings).values()
        for index in task.missing
    ]


def read_answers(path: Path) -> list[Sampled]:
    """Read the answers of a file, in the order of prompts and numbers; UserError with all lines that are no answers."""
    broken, answers = RowErrors(), dict[tuple[int, int], Sampled]()
    for line, row in read_rows(path):
        if isinstance(row, RowError):
            broken.add(path, line, str(row))
            continue
        wrong = [name for name, kind in _COLUMNS.items() if not isinstance(row.get(name), kind)]
        if isinstance(answer := row.get("answer"), list) and not (len(answer) == 1 and isinstance(answer[0], dict)):
            wrong = ["answer"]
        if wrong:
            got = f"got {show(row.get(wrong[0]))} as {wrong[0]}"
            broken.add(path, line, f"must be an answer with {', '.join(_COLUMNS)}, {got}; write it with nemo-kto sample")
            continue
        value: Any = row
        try:  # as the labelled row is read for training
            records_of_row({"prompt": value["prompt"], "response": value["answer"], "label": True}, line)
        except RowError as error:
            broken.add(path, line, str(error))
            continue
        source = {name: value[name] for name in ("model", "line", "index")}
        variables = value.get(VARIABLES) or {}
        sampled = Sampled(
            place=row_place(path, line),
            prompt=value["prompt"],
            variables=variables,
            answer=value["answer"],
            source=source,
            is_cut=row.get("finish") == CUT,
        )
        if (earlier := answers.setdefault(sampled.key, sampled)) is not sampled:
            key = f"line {source['line']} and index {source['index']}"
            text = f"must be the only answer with its line and index, got {key}, as in {earlier.place}"
            broken.add(path, line, f"{text}; label files of different commands one after the other")
    broken.raise_if_any()
    if not answers:
        raise UserError(f"{path} must have at least one answer, got an empty file; write it with nemo-kto sample")
    return [answers[key] for key in sorted(answers)]
