"""Files, links, commands and keys in the documents exist, and the documents speak only of the project."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from docs.site import generate, pages
from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli import main
from nemo_kto.config import compose
from nemo_kto.config.checker import read_positions
from nemo_kto.config.migration import aligner_keys
from tests.helpers.documented import NEEDS, Block, blocks, commands, modules, runnable

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# A key after + is an option that the configuration lacks.
KEY = re.compile(
    r"(?<![\w./+])((?:trainer|exp_manager|pretrained_checkpoint|model|export)(?:\.[a-z][a-z_0-9]*)+)(?![\w.(/])"
)
# What has no place in a public document: paths of somebody's machine, and work that was left over.
OUT_OF_PLACE = re.compile(r"(?<![\w.])/(?:root|home|work|tmp)/|\b(?:TODO|FIXME|XXX)\b")


# A line that starts with a complete command, without the brackets of a synopsis.
PROGRAMS = (
    r"make|python[\d.]*|pip|torchrun|srun|sbatch|scancel|docker|kubectl|hf|vllm|ollama|lm_eval|curl|git|source|\.ci/\w+"
)
COMMAND = re.compile(
    rf"^(?:[A-Z_]+=\S+ )*(?:(?:{PROGRAMS}) (?!= )\S|nemo-kto (?!(?:kto|dpo)(?: finished|$)))[^:\[\n|]*$", re.MULTILINE
)
LANGUAGES = {"bash", "console", "text", "python", "json", "yaml", "mermaid"}


def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def names(document: Path) -> str:
    return document.relative_to(REPOSITORY).as_posix()


@cache
def known_keys() -> set[str]:
    sources = [compose.our_source(recipe) for recipe in RECIPES.values()]
    ours = {key for source in sources for key in compose.known_keys(compose.load(source=source), sections=True)}
    return ours | {*aligner_keys(), "model.kto.tau"}  # tau: the option of the loss that the pages write


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_linked_files_exist(document: Path) -> None:
    """Sphinx checks only pages and headings below docs/."""
    paths = {link.partition("#")[0] for link in LINK.findall(text_of(document)) if not link.startswith(("http:", "https:"))}
    assert not [path for path in paths if not (document.parent / path).exists()]


def test_the_site_has_four_cards_links_to_examples_and_units() -> None:
    index, slurm = (pages.for_site(page, text_of(pages.DOCS / page), "") for page in ("index.md", "scale/slurm.md"))
    cards, _, rest = index.partition("\n::::\n")
    assert (cards.count("{grid-item-card}"), rest.count("{grid-item-card}")) == (4, 0)
    assert "[Reference](reference/README.md)" in rest.partition("Which page for me?")[2]
    assert "[train.sbatch](../../examples/slurm/train.sbatch)" in slurm, "a download"
    figure = text_of(pages.DOCS / "figures/run-kto.svg")
    assert (figure.count(">nats</text>"), figure.count(">optimizer step</text>")) == (3, 4)


def test_generated_parts_are_up_to_date() -> None:
    old = [page for page in pages.reading_order() if generate.generated(page) != text_of(pages.DOCS / page)]
    assert not old, "python -m docs.site.generate"


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_keys_exist(document: Path) -> None:
    used = {key for key in KEY.findall(text_of(document)) if not key.endswith((".py", ".yaml", ".md"))}
    unknown = used - known_keys()
    assert not unknown, f"{names(document)}: {sorted(unknown)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_commands_exist(document: Path) -> None:
    """Commands in the middle of a sentence count too, and options."""
    targets = set(re.findall(r"^([a-z][\w-]*):", text_of(REPOSITORY / "Makefile"), re.MULTILINE))
    unknown = []
    known = {*RECIPES, *(name.split()[0] for name in main.COMMANDS), "--version", "--help", "COMMAND"}
    options = {*re.findall(r"--[a-z][a-z-]*", text_of(REPOSITORY / "docs/reference/commands.md")), "--version"}
    spans = re.findall(r"(?<!`)`((?:nemo-kto|make) [^`\n]*)`", text_of(document))
    for command in [*commands(document), *spans]:
        words = command.split()
        if words[:1] == ["make"]:
            unknown += [command for target in words[1:2] if target not in targets]
        elif words[:1] == ["nemo-kto"]:
            unknown += [command for name in words[1:2] if not {*name.rstrip(":").split("|")} <= known]
            unknown += [command for word in words if word.startswith("--") and word.partition("=")[0] not in options]
        elif words[:1] in (["python"], ["sbatch"]):
            files = [word for word in words if word.endswith((".py", ".sbatch")) and word not in modules(document)]
            unknown += [command for file in files if not (REPOSITORY / file).exists()]
    assert not unknown, f"{names(document)}: {unknown}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_every_command_is_run_or_says_why_not(document: Path) -> None:
    """tests/helpers/documented.py explains the marks of a block of commands. Indented blocks would have no marks."""
    wrong = [f"{block}: write a fence" for block in MarkdownIt().parse(text_of(document)) if block.type == "code_block"]
    for block in blocks(document):
        for mark in block.marks if block.language in ("bash", "console") else ():
            kind, _, value = mark.partition("=")
            known = {"needs": value in NEEDS, "by": is_run_by(value, block), "continue": not value}
            wrong += [] if known.get(kind) else [f"line {block.line}: {mark}"]
        if block.language not in LANGUAGES and block.marks != ("{eval-rst}",):
            wrong.append(f"line {block.line}: a language of {sorted(LANGUAGES)}")
        if block.language == "text" and document.name != "commands.md":  # synopses
            wrong += [f"line {block.line}: {command}" for command in COMMAND.findall(block.code)]
    if document.name != "README.md" and REPOSITORY / "docs" not in document.parents:  # no test runs their commands
        wrong += [f"line {block.line}: a mark is missing" for block in (*runnable(document), *runnable(document, "console"))]
    assert not wrong, f"{names(document)}: {wrong}"


def is_run_by(file: str, block: Block) -> bool:
    """A test contains the subcommands and options of a block's nemo-kto commands; or another file, if no test can."""
    path = REPOSITORY / file
    if not file.startswith("tests/") and not any(mark.startswith("needs=") for mark in block.marks):
        return False
    words = re.findall(r"(?<=nemo-kto )\w+|(?<= )--?[a-z][\w-]*", block.code)
    return path.is_file() and all(word in path.read_text(encoding="utf-8") for word in words)


def test_the_documentation_has_at_most_50_000_words() -> None:
    """Marks of tables, lists and fences are no words; the history of changes does not count."""
    read = [page for page in DOCUMENTS if page.name == "README.md" or REPOSITORY / "docs" in page.parents]
    words = {names(page): sum(any(map(str.isalnum, word)) for word in text_of(page).split()) for page in read}
    largest = ", ".join(f"{page} {words[page]:,}" for page in sorted(words, key=words.__getitem__, reverse=True)[:8])
    assert len(words) > 40
    assert sum(words.values()) <= 50_000, (
        f"{sum(words.values()):,} words; shorten a page, or link to another. Largest: {largest}"
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_no_foreign_words(document: Path) -> None:
    assert not OUT_OF_PLACE.findall(text_of(document))


def test_the_documented_calls_exist() -> None:
    page = text_of(REPOSITORY / "docs/internals/design.md")
    rows = re.findall(r"^\|.*\]\(\.\./\.\./(nemo_kto/[\w/]+\.py)\), `(\w+)`", page, re.MULTILINE)
    assert len(rows) >= 3, "the loss, the step and the loop"
    missing = [f"{file}: {name}" for file, name in rows if f"def {name}(" not in text_of(REPOSITORY / file)]
    assert not missing


def training_commands(document: Path) -> list[list[str]]:
    """The words of each complete training command from the algorithm on: no synopsis, and no flag of Hydra."""
    found = (re.search(r"\bnemo-kto ((?:kto|dpo) [^|;]*)", line) for line in commands(document))
    words = [shlex.split(match[1]) for match in found if match and not re.search(r" -|\.\.\.|hydra/|\[KEY|: ", match[1])]
    return [each for each in words if len(each) > 2]


@pytest.mark.parametrize("document", [page for page in DOCUMENTS if training_commands(page)], ids=names)
def test_training_commands_compose(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands that no test runs, because they need GPUs or a network, are composed too."""
    for file, code in modules(document).items():
        (tmp_path / file).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    wrong = []
    for name, *words in training_commands(document):
        recipe = RECIPES[name]
        overrides, misplaced = read_positions(words, recipe)
        overrides = [word.removeprefix("+") for word in overrides if ".tau=" not in word]  # an option of a loss on that page
        _, mistakes = compose.to_config(compose.load(overrides, source=compose.our_source(recipe)), recipe=recipe)
        wrong += [f"{' '.join(words)}: {mistake}" for mistake in (*mistakes, *misplaced)]
    assert not wrong
