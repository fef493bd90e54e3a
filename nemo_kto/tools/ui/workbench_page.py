"""The page in Gradio: its fields, buttons and what they do."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import gradio as gr

from nemo_kto.errors import UserError
from nemo_kto.tools.ui.workbench import COLUMNS, Choices, Workbench, columns_of, found_data, found_models

_SAME = ""  # the column has the name that it has in the documentation
_SECONDS = 2  # between two looks at the run
_CSS = ".output textarea {font-family: ui-monospace, monospace; font-size: 0.8rem} footer {display: none !important}"


def build_page(workbench: Workbench) -> gr.Blocks:
    """Return the page of a workbench."""
    with gr.Blocks(title="nemo-kto", analytics_enabled=False) as page:
        gr.HTML(f"<style>{_CSS}</style><h1>nemo-kto</h1>Training on feedback. Every button runs the command that is shown.")
        with gr.Tab("Train"):
            _training_tab(workbench)
        with gr.Tab("Chat"):
            _chat_tab(workbench)
    return page


def _training_tab(workbench: Workbench) -> None:
    algorithm = gr.Radio(["kto", "dpo"], value="kto", label="Algorithm", info="kto: answers with a label; dpo: pairs")
    with gr.Row():
        data = gr.Dropdown(found_data(), value=None, allow_custom_value=True, label="Data file", info="or hf:ORG/NAME")
        model = gr.Dropdown(
            found_models(), value=None, allow_custom_value=True, label="Model", info="a folder, or hf:ORG/NAME"
        )
    with gr.Row():
        columns = [gr.Dropdown([_SAME], value=_SAME, allow_custom_value=True, label=name) for name in _labels("kto")]
    with gr.Row():
        folder = gr.Textbox("results/my_run", label="Run folder")
        more = gr.Textbox("", label="Further settings", placeholder="lr=1e-6 epochs=2 peft=lora", info="KEY=VALUE ...")
    fields = [algorithm, model, data, folder, *columns, more]
    text = _command_line(*(field.value for field in fields))
    command = gr.Code(text, label="Command", language="shell", interactive=False, lines=1, wrap_lines=True, buttons=["copy"])
    with gr.Row():
        rows, check, plan = (gr.Button(name) for name in ("Show rows", "Check", "Plan"))
        start, stop = gr.Button("Start", variant="primary"), gr.Button("Stop", variant="stop")
    report = gr.Textbox(label="Rows, check and plan", lines=4, max_lines=30, interactive=False, elem_classes="output")
    state, curves = gr.Markdown(), gr.HTML()
    output = gr.Textbox(label="Output of the run", lines=4, max_lines=20, interactive=False, elem_classes="output")
    shown = gr.State(("", "", ""))

    def find_columns(file: str | None) -> list[Any]:
        found = [_SAME, *columns_of(file)] if file else [_SAME]
        return [gr.update(choices=found) for _ in columns]

    def show(name: str) -> Any:
        def run(*values: str | None) -> Iterator[str]:
            try:
                yield from workbench.show(_choices(*values).words(name))
            except UserError as error:
                yield str(error)

        return run

    def begin(*values: str | None) -> None:
        try:
            workbench.start(_choices(*values))
        except UserError as error:
            raise gr.Error(str(error)) from error

    timer = gr.Timer(_SECONDS)
    algorithm.change(_name_columns, algorithm, columns, show_progress="hidden")
    data.change(find_columns, data, columns, show_progress="hidden")
    gr.on([each.change for each in fields], _command_line, fields, command, show_progress="hidden")
    for button, name in ((rows, "data preview"), (check, "check"), (plan, "plan")):
        button.click(show(name), fields, report, show_progress="minimal")
    start.click(begin, fields, None)
    stop.click(workbench.stop)

    def look(before: tuple[str, str, str]) -> list[Any]:
        now = workbench.watch()
        changed = [new if new != old else gr.skip() for new, old in zip(now, before, strict=True)]
        return [*changed, now]

    timer.tick(look, shown, [state, output, curves, shown], show_progress="hidden")


def _chat_tab(workbench: Workbench) -> None:
    model = gr.Textbox("results/my_run", label="Run or model", info="a folder, or hf:ORG/NAME")
    chat = gr.Chatbot(label="Conversation", render_markdown=False, buttons=["copy"])
    prompt = gr.Textbox(label="Prompt", placeholder="Type a prompt, and press Enter", lines=1)
    again = gr.Button("New conversation")

    def answer(model: str, history: list[Any], text: str) -> Iterator[tuple[list[Any], str]]:
        history = [*history, {"role": "user", "content": text}]
        yield history, ""
        try:
            reply = workbench.answer(model, text)
        except UserError as error:
            raise gr.Error(str(error)) from error
        yield [*history, {"role": "assistant", "content": reply}], ""

    def forget() -> list[Any]:
        workbench.forget()
        return []

    prompt.submit(answer, [model, chat, prompt], [chat, prompt])
    again.click(forget, None, chat)


def _labels(algorithm: str) -> list[str]:
    return [f"Column of {name}" for name in COLUMNS[algorithm]]


def _name_columns(algorithm: str) -> list[Any]:
    return [gr.update(label=label, value=_SAME) for label in _labels(algorithm)]


def _choices(*values: str | None) -> Choices:
    algorithm, model, data, folder, *columns, more = (value or "" for value in values)
    renamed = dict(zip(COLUMNS[algorithm], columns, strict=True))
    return Choices(algorithm=algorithm, model=model, data=data, folder=folder, columns=renamed, more=more)


def _command_line(*values: str | None) -> str:
    try:
        return shlex.join(["nemo-kto", *_choices(*values).words()])
    except UserError as error:
        return f"# {error}"
