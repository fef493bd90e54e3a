"""Pictures of a real run: its report, a chat, its output on a terminal, and the page of `nemo-kto label`.

    python -m docs.figures.pictures MODEL FOLDER

The example of the README is trained in FOLDER, unless it has been, and the pictures are written to docs/figures. It needs
Chromium (CHROMIUM=PATH).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from html import escape
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "examples" / "quickstart" / "thumbs.csv"
WORDS = "fields=prompt:question,response:answer,label:thumb template=true batch=8 steps=12 lr=2e-5"
PROMPTS = ("What is the capital of Germany?", "What is the opposite of hard?")
COLUMNS = 92  # of a terminal
LINE, CHARACTER, MARGIN = 19, 8.05, 16  # pixels
DARK, INK, TYPED, FAINT = "#16181d", "#d7dae0", "#8fd18a", "#8b9099"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def command(*words: str, folder: Path) -> str:
    """The output of a nemo-kto command in a folder."""
    call = [sys.executable, "-m", "nemo_kto", *words]
    return subprocess.run(call, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def terminal(name: str, lines: Iterable[str]) -> None:
    """Write docs/figures/NAME.svg: lines on a terminal; those after "$ " or "> " were typed."""
    texts: list[str] = []
    for line in lines:
        colour = TYPED if line.startswith(("$ ", "> ")) else FAINT if line.endswith(":") or line == "..." else INK
        for row in textwrap.wrap(line, COLUMNS, subsequent_indent="  "):
            place = f'x="{MARGIN}" y="{MARGIN + len(texts) * LINE + 14}"'
            texts.append(f'<text {place} fill="{colour}" xml:space="preserve">{escape(row)}</text>')
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, len(texts) * LINE + 2 * MARGIN
    (HERE / f"{name}.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="13.3">\n'
        f'<rect width="100%" height="100%" rx="8" fill="{DARK}"/>\n' + "\n".join(texts) + "\n</svg>\n",
        encoding="utf-8",
    )


def screenshot(name: str, address: str, *, height: int, below: str = "") -> None:
    """Write docs/figures/NAME.png: a page from its top, or from a heading, on."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        page = browser.new_page(viewport={"width": 1000, "height": height}, color_scheme="light")
        page.goto(address)
        box = page.get_by_role("heading", name=below, exact=True).bounding_box() if below else None
        top = 0 if box is None else box["y"] - 24
        clip = {"x": 0, "y": top, "width": 1000, "height": height}
        page.screenshot(path=HERE / f"{name}.png", full_page=True, clip=clip)  # type: ignore[arg-type]
        browser.close()


def train(model: Path, folder: Path) -> Path:
    """The run folder of the README's example, with its output in FOLDER/log."""
    folder.mkdir(parents=True, exist_ok=True)
    run = folder / "results" / "gpt_kto"
    if not (run / "report.html").exists():
        shutil.copy(EXAMPLE, folder)
        words = [sys.executable, "-m", "nemo_kto", "kto", str(model), EXAMPLE.name, *WORDS.split()]
        with (folder / "log").open("w", encoding="utf-8") as log:
            subprocess.run(words, cwd=folder, check=True, stdout=log, stderr=subprocess.STDOUT)
    return run


def draw_training(log: list[str], folder: Path, model: Path) -> None:
    """The output of the training, without its times, which other programs on the machine would change."""
    lines = [
        re.sub(r"  [\d.]+ s/step.*| in \d+ \w+(?=,|$)", "", line).replace(f"{folder}/", "").replace(f"{model.parent}/", "")
        for line in log
    ]
    steps = [line for line in lines if line.startswith("step ")]
    first, last = lines.index(steps[0]), lines.index(steps[-1])
    shown = ("  model ", "  train ", "  labels ", "  steps ", "  reference ")
    start = [line for line in lines[:first] if line.startswith(shown)]
    end = [line for line in lines[last + 1 :] if line.strip()]
    typed = f"$ nemo-kto kto MODEL {EXAMPLE.name} {WORDS}"
    terminal("terminal", [typed, *start, *steps[:3], "...", *steps[-3:], *end])


def draw_chat(rows: list[dict[str, str]], names: tuple[str, str]) -> None:
    """A chat: the answers of the aligned model, each above that of the model before."""
    lines = ["$ nemo-kto chat results/gpt_kto --against"]
    for aligned, before in zip(rows[::2], rows[1::2], strict=True):
        lines.append(f"> {aligned['prompt']}")
        for name, row in zip(names, (aligned, before), strict=True):
            lines += [f"{name}:", textwrap.shorten(row["answer"], 180, placeholder=" ...")]
    terminal("chat", lines)


def draw_label_page(answers: list[dict[str, str]], folder: Path) -> None:
    """The page of `nemo-kto label` with these answers."""
    rows = [{**row, "line": line, "index": 0} for line, row in enumerate(answers, start=1)]
    (folder / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (folder / "rows.jsonl").unlink(missing_ok=True)
    call = [sys.executable, "-u", "-m", "nemo_kto", "label", "answers.jsonl", "--out", "rows.jsonl"]
    with subprocess.Popen(call, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http"))
        screenshot("label", address, height=560)
        server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of a real run.")
    parser.add_argument("model", type=Path, help="SmolLM2-135M-Instruct")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    folder, model = arguments.folder.resolve(), arguments.model.resolve()
    run = train(model, folder)
    draw_training((folder / "log").read_text(encoding="utf-8").splitlines(), folder, model)
    screenshot("report", (run / "report.html").as_uri(), below="Advice", height=860)
    words = [word for prompt in PROMPTS for word in ("-p", prompt)]
    printed = command("chat", str(run), "--against", "--temperature", "0", "--json", *words, folder=folder)
    rows = [json.loads(line) for line in printed.splitlines()]
    draw_chat(rows, ("results/gpt_kto", model.name))
    draw_label_page([{"prompt": row["prompt"], "model": model.name, "answer": row["answer"]} for row in rows[1::2]], folder)


if __name__ == "__main__":
    main()
