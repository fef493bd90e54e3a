"""Command `nemo-kto sample`: answers of a model to the prompts of a file, drawn on this machine or by a server."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nemo_kto.cli.command import command
from nemo_kto.data.rows.reader import RowErrors
from nemo_kto.errors import UserError, plural
from nemo_kto.model_files.model_folders import quick_hash
from nemo_kto.model_files.tokenizer_files import has_chat_template
from nemo_kto.telemetry.display import progress_bar
from nemo_kto.tools.inference.named_models import base_of_adapters, find_model, load_models
from nemo_kto.tools.inference.row_output import open_rows
from nemo_kto.tools.inference.sampling import Sampling, check_sampling
from nemo_kto.tools.rounds.answers import CUT, WEIGHTS, Task, find_tasks, text_of
from nemo_kto.tools.rounds.options import Drawing, Server, drawing_options, server_options
from nemo_kto.utils.text import print_error, terminal_line

if TYPE_CHECKING:
    from nemo_kto.tools.rounds.endpoint import Endpoint

_DESCRIPTION = """\
Write answers of a model to the prompts of a file, a line for each answer. The same command continues after it was killed,
with the answers that it would have drawn. With --endpoint a server with OpenAI's interface answers (vLLM, SGLang), which
gets the key in OPENAI_API_KEY; RUN|MODEL is then left out.
"""
_PROMPTS = 'a text (.txt) with a prompt in each line, or a data file with "prompt" or "messages"'
# answers, reasons of their ends and settings that were left out, or why there is none
Drawn = tuple[Task, Sequence[tuple[Any, ...]] | UserError]


@command("sample", _DESCRIPTION)
@click.argument("folder", required=False, metavar="RUN|MODEL", help="a run or a model, as in nemo-kto chat")
@click.argument("prompts", required=False, metavar="PROMPTS", help=_PROMPTS)
@click.option("--out", required=True, metavar="FILE", help="file of the answers, as JSON lines")
@drawing_options(count=4)
@click.option("--endpoint", metavar="URL", help="ask this server, such as http://localhost:8000")
@server_options
def main(
    folder: str | None,
    prompts: str | None,
    out: str,
    count: int,
    system: str | None,
    device: str,
    endpoint: str | None,
    model: str | None,
    leave_out: Sequence[str],
    concurrency: int,
    **generation: Any,
) -> None:
    """Run the command; raise UserError for mistakes, or, after all other answers, for prompts that have none."""
    if prompts is None:  # the only word
        folder, prompts = None, folder
    if prompts is None:
        raise UserError("PROMPTS must be given, got none; name a text with a prompt in each line, or a data file")
    drawing = Drawing(sampling=Sampling(**generation), count=count, system=system)
    server = Server(option="--endpoint", url=endpoint, model=model, leave_out=leave_out, concurrency=concurrency)
    check_sampling(drawing.sampling, device)
    if (folder is None) == (endpoint is None):
        got = "neither" if folder is None else f"{folder} and {endpoint}"
        raise UserError(f"one of RUN|MODEL and --endpoint must be given, got {got}; --model names a model of the server")
    if mistakes := [*server.mistakes()]:
        raise UserError("\n  ".join(mistakes))
    drawing.check()
    if folder is None:
        client = server.connect()
        write_answers(Path(out), client.model, Path(prompts), drawing.settings, endpoint=client)
    else:
        settings = {**drawing.settings, WEIGHTS: quick_hash(find_model("MODEL", folder))}
        write_answers(Path(out), folder, Path(prompts), settings)


def write_answers(
    out: Path, model: str, prompts: Path, settings: Mapping[str, Any], *, endpoint: Endpoint | None = None
) -> None:
    """Write the missing answers of a model to a file; those of an endpoint if there is one.

    Raises UserError for a file of another command and, after all other answers, for prompts that have none.
    """
    with open_rows(out, option="--out") as file:
        tasks, refused = find_tasks(file, prompts=prompts, model=model, settings=settings), RowErrors()
        missing, total = sum(len(task.missing) for task in tasks), len(tasks)
        drawn: Iterator[Drawn] = iter(())
        if endpoint is not None:
            drawn, total = _from_server(endpoint, tasks, settings), missing
        elif tasks:
            drawn = _on_this_machine(find_model("MODEL", model), model, tasks, settings)
        for task, answers in progress_bar(drawn, total=total, title="sampling", shown=True):
            if isinstance(answers, UserError):
                refused.add(prompts, task.line, str(answers))
            else:
                numbered = zip(task.missing, answers, strict=True)
                file.append(*(task.row(index, *answer, model=model, settings=settings) for index, answer in numbered))
        refused.raise_if_any()
        cut = sum(row.get("finish") == CUT for row in file.rows)
        different = len({(row["line"], text_of(row["answer"])) for row in file.rows})
    added = "" if missing == len(file.rows) else f" ({missing:,} new)"
    is_limited = not any("max_tokens" in row.get("left_out", ()) for row in file.rows)
    limit = f" at {settings['max_new_tokens']:,} tokens" if is_limited else ""
    print(terminal_line(f"{out}: {plural(len(file.rows), 'answer')}{added}, {cut:,} cut{limit}"))
    if settings["count"] > 1 and file.rows and different == len({row["line"] for row in file.rows}):
        reason = "perhaps the server takes the most probable token, whatever it is asked for"
        print_error(f"nemo-kto sample: warning: all answers to each prompt are equal; {reason}")


def _on_this_machine(folder: Path, label: str, tasks: Sequence[Task], settings: Mapping[str, Any]) -> Iterator[Drawn]:
    """Yield the answers to each prompt, which are drawn as one batch with a seed of the prompt."""
    check_template(folder, tasks)
    (model,) = load_models({label: folder})
    changed = total = 0
    for given in tasks:
        task = replace(given, prompt=given.messages) if model.has_template else given
        sampling = Sampling(
            max_new_tokens=settings["max_new_tokens"],
            temperature=settings["temperature"],
            top_p=settings["top_p"],
            top_k=settings["top_k"],
            seed=_seed(settings["seed"], task.line),
        )
        try:
            drawn = model.draw(task.messages, sampling, count=settings["count"], variables=task.variables)
        except UserError as error:  # such as a prompt above the context length
            yield task, error
        else:
            yield task, [(drawn[index].drawn.answer, drawn[index].finish) for index in task.missing]
            changed += sum(not drawn[index].drawn.is_same for index in task.missing)
            total += len(task.missing)
    if changed:
        text = f"{changed:,} of {plural(total, 'answer')} would be trained as other tokens than were drawn"
        reason = "the chat template cannot write them, such as thoughts that were cut"
        print_error(f"nemo-kto sample: {text}: {reason}")


def check_template(folder: Path, tasks: Sequence[Task]) -> None:
    """Raise UserError if prompts are messages, and the model has no chat template."""
    if all(isinstance(task.prompt, str) for task in tasks):
        return
    if not has_chat_template(base_of_adapters(folder) or folder):
        text = f"prompts must be texts for {folder}, which has no chat template and continues them, got messages"
        raise UserError(f"{text}; use a model with a template, or texts without --system")


def _from_server(endpoint: Endpoint, tasks: Sequence[Task], settings: Mapping[str, Any]) -> Iterator[Drawn]:
    """Yield each answer of a server as it comes."""
    single = [replace(task, prompt=task.messages, missing=[index]) for task in tasks for index in task.missing]
    given = {name: settings[name] for name in ("temperature", "top_p", "top_k")}
    given["top_k"] = given["top_k"] or -1  # all tokens, for vLLM, SGLang and llama.cpp

    def ask(task: Task) -> Any:
        variables = {"chat_template_kwargs": task.variables} if task.variables else {}
        seed = _seed(settings["seed"], task.line, task.missing[0])
        sent = {**given, **variables}
        try:
            return endpoint.complete(task.messages, max_tokens=settings["max_new_tokens"], seed=seed, **sent)
        except UserError as error:
            if settings["top_k"] or "top_k" not in sent or "top_k" not in str(error):
                raise
            given.pop("top_k", None)  # a server that does not know it, such as OpenAI's, draws from all tokens
            return ask(task)

    for task, reply in endpoint.map(ask, single):
        yield task, reply if isinstance(reply, UserError) else [reply]


def _seed(*parts: int) -> int:
    return zlib.crc32(repr(parts).encode())
