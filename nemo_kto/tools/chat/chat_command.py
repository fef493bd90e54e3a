"""Command `nemo-kto chat`: answers of a trained model, alone or beside those of the model that it was trained from."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from nemo_kto.cli.command import command
from nemo_kto.errors import UserError
from nemo_kto.tools.chat.session import Collector, Session, require_terminal
from nemo_kto.tools.inference.named_models import START, find_model, load_models, starting_model
from nemo_kto.tools.inference.row_output import open_rows
from nemo_kto.tools.inference.sampling import Sampling, check_sampling, sampling_options
from nemo_kto.utils.text import terminal_line, terminal_text

_STDIN = "-"
_DESCRIPTION = """\
Talk with a model: type a prompt, or give prompts with -p. The chat template and the generation settings are those of the
model's folder. Commands: /reset, /system TEXT, /help, /quit; Ctrl-C stops an answer, Ctrl-D ends.
"""
_MODEL = "a run folder, a checkpoint, a model or adapters in Hugging Face format, or hf:ORGANISATION/NAME"
_AGAINST = "also answer with this model; without BASE, with the model that the run started from"
_PROMPT = "answer this prompt and end; - reads it from stdin; each -p is a conversation of its own"
_COLLECT = "ask for a thumb after each answer, and append it to this file, as a row for training"
_LENGTH = "maximum length of an answer; by default that of the model's generation_config.json, or 512"


@command("chat", _DESCRIPTION)
@click.argument("model", metavar="RUN|MODEL", help=_MODEL)
@click.option("--against", is_flag=False, flag_value=START, metavar="BASE", help=_AGAINST)
@click.option("-p", "--prompt", multiple=True, metavar="PROMPT", help=_PROMPT)
@click.option("--json", "as_json", is_flag=True, help="print a line of JSON for each answer")
@click.option("--system", metavar="TEXT", help="the system message")
@click.option("--collect", metavar="FILE", help=_COLLECT)
@sampling_options(length=_LENGTH, temperature="0 takes the most probable token", seed="draw every answer with this seed")
def main(
    model: str,
    against: str | None,
    prompt: Sequence[str],
    as_json: bool,
    system: str | None,
    collect: str | None,
    device: str,
    **generation: Any,
) -> None:
    """Run the command; raise UserError if a model cannot be used, or a prompt cannot be answered."""
    sampling = Sampling(**generation)
    check_sampling(sampling, device)
    if collect is not None:
        require_terminal("--collect", remedy="leave it out, or use nemo-kto sample and nemo-kto label")
        if as_json:
            raise UserError(
                "--collect must be used without --json, whose answers are for a program, got both; leave one out"
            )
    named = {model: find_model("MODEL", model)}
    if against is not None:
        if against == START:
            against = starting_model(named[model])
        if against in named:
            raise UserError(f"--against must be another model than MODEL, got {against} for both; correct one")
        named[against] = find_model("--against", against)
    if isinstance(sys.stdin, io.TextIOWrapper):  # broken text is refused with its place, as in files of rows
        sys.stdin.reconfigure(encoding=None if sys.stdin.isatty() else "utf-8-sig", errors="surrogateescape")
    prompts = [sys.stdin.read().strip() if each == _STDIN else each for each in prompt]

    with contextlib.ExitStack() as opened:
        collector = None
        if collect is not None:
            collector = Collector(file=opened.enter_context(open_rows(Path(collect), option="--collect")))
        models = load_models(named)
        session = Session(models=models, sampling=sampling, system=system, as_json=as_json, collect=collector)
        if prompts:
            _answer(session, prompts, show_prompts=len(prompts) > 1 and not as_json)
            return
        if sys.stdin.isatty() and sys.stdout.isatty():
            for each in models:
                print(terminal_line(f"{each.label}: {each.describe()}"))
            print("/help lists the commands, Ctrl-D ends.")
        session.talk()


def _answer(session: Session, prompts: Sequence[str], *, show_prompts: bool) -> None:
    """Answer each prompt as a separate conversation; KeyboardInterrupt if an answer was interrupted."""
    for prompt in prompts:
        if show_prompts:
            print(f"> {terminal_text(prompt)}", flush=True)
        session.reset()
        if not session.say(prompt):
            raise KeyboardInterrupt
