"""Files, links, commands and keys in the documents exist, and the documents speak only of the project."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from docs.site import generate, pages
from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.config import compose
from nemo_kto.config.check import read_positions
from nemo_kto.config.migration import aligner_keys
from tests.helpers.documented import NEEDS, blocks, commands, modules

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
COMMAND = r"^(?:nemo-kto (?!(?:kto|dpo)(?: finished|$))|make |torchrun |sbatch )[^:\[\n|]*$"


def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def names(document: Path) -> str:
    return document.relative_to(REPOSITORY).as_posix()


@cache
def known_keys() -> set[str]:
    sources = [compose.Source(config_name=recipe.config_name) for recipe in RECIPES.values()]
    ours = {key for source in sources for key in compose.known_keys(compose.load(source=source), sections=True)}
    return ours | {*aligner_keys(), "model.kto.tau"}  # tau: the option of the loss that the pages write


@cache
def anchors(document: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", text_of(document), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in LINK.findall(text_of(document)):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if link.startswith(("http:", "https:")):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target.resolve())):
            broken.append(link)
    assert not broken, f"{names(document)}: {broken}"


def test_every_page_is_in_the_table_of_contents() -> None:
    written = {page.relative_to(pages.DOCS).as_posix() for page in pages.DOCS.rglob("*.md")}
    assert sorted(pages.reading_order()) == sorted(written), "README.md of a folder links to each of its pages"


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
    targets = set(re.findall(r"^([a-z][\w-]*):", text_of(REPOSITORY / "Makefile"), re.MULTILINE))
    unknown = []
    for command in commands(document):
        words = command.split()
        if words[:1] == ["make"]:
            unknown += [command for target in words[1:2] if target not in targets]
        elif words[:1] == ["nemo-kto"]:
            known = (
                *RECIPES,
                "check",
                "plan",
                "translate",
                "export",
                "chat",
                "import",
                "data",
                "checkpoint",
                "report",
                "--version",
                "--help",
            )
            unknown += [command for subcommand in words[1:2] if subcommand.rstrip(":") not in known]
        elif words[:1] in (["python"], ["sbatch"]):
            files = [word for word in words if word.endswith((".py", ".sbatch")) and word not in modules(document)]
            unknown += [command for file in files if not (REPOSITORY / file).exists()]
    assert not unknown, f"{names(document)}: {unknown}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_every_command_is_run_or_says_why_not(document: Path) -> None:
    """tests/helpers/documented.py explains the marks of a block of commands."""
    wrong = []
    for block in blocks(document):
        for mark in block.marks if block.language == "bash" else ():
            kind, _, value = mark.partition("=")
            known = {"needs": value in NEEDS, "by": (REPOSITORY / value).is_file(), "continue": not value}
            wrong += [] if known.get(kind) else [f"line {block.line}: {mark}"]
        if block.language in ("", "text", "console"):
            wrong += [f"line {block.line}: {command}" for command in re.findall(COMMAND, block.code, re.MULTILINE)]
    if REPOSITORY / "docs" in document.parents and document.name != "commands.md":
        indented = re.findall(rf"^    {COMMAND[1:]}", text_of(document), re.MULTILINE)
        wrong += [f"write ```bash instead of indented lines: {command}" for command in indented]
    assert not wrong, f"{names(document)}: {wrong}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_no_foreign_words(document: Path) -> None:
    assert not OUT_OF_PLACE.findall(text_of(document))


def test_the_documented_calls_exist() -> None:
    page = text_of(REPOSITORY / "docs/internals/code.md")
    rows = re.findall(r"^\|.*\]\(\.\./\.\./(nemo_kto/[\w/]+\.py)\), `(\w+)`", page, re.MULTILINE)
    assert len(rows) >= 3, "the loss, the step and the loop"
    missing = [f"{file}: {name}" for file, name in rows if f"def {name}(" not in text_of(REPOSITORY / file)]
    assert not missing


def test_the_two_commands_come_first() -> None:
    first = [command for command in commands(REPOSITORY / "README.md") if command][:2]
    assert first == ["make quickstart", "make test"]


def training_commands(document: Path) -> list[list[str]]:
    """The words of each complete training command from the algorithm on: no synopsis, and no flag of Hydra."""
    found = (re.search(r"\bnemo-kto ((?:kto|dpo) [^|;]*)", line) for line in commands(document))
    words = [shlex.split(match[1]) for match in found if match and not re.search(r" -|\.\.\.|hydra/|\[KEY|: ", match[1])]
    return [each for each in words if len(each) > 2]


@pytest.mark.parametrize("document", [page for page in DOCUMENTS if training_commands(page)], ids=names)
def test_training_commands_compose(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that no test runs, because they need GPUs or a network."""
    for file, code in modules(document).items():
        (tmp_path / file).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    wrong = []
    for name, *words in training_commands(document):
        recipe = RECIPES[name]
        overrides, misplaced = read_positions(words, recipe)
        overrides = [word.removeprefix("+") for word in overrides if ".tau=" not in word]  # an option of a loss on that page
        _, mistakes = compose.to_config(
            compose.load(overrides, source=compose.Source(config_name=recipe.config_name)), recipe=recipe
        )
        wrong += [f"{' '.join(words)}: {mistake}" for mistake in (*mistakes, *misplaced)]
    assert not wrong


# Words of our own for which the field has one, see the glossary: resumed, again, zero, the same, an integer, variants,
# precomputed, unpaired, packages.
HOME_MADE = re.compile(
    r"goes on|gone on from|\banew\b|\bnought\b|\blikewise\b|whole number|\bits kin\b|asked beforehand|judged answers"
)


def test_words_are_those_of_the_field() -> None:
    files = [*DOCUMENTS, *(REPOSITORY / "nemo_kto").rglob("*.py"), *(REPOSITORY / "conf").rglob("*.yaml")]
    found = [
        f"{names(file)}:{number}: {match[0]}"
        for file in files
        for number, line in enumerate(text_of(file).splitlines(), start=1)
        for match in HOME_MADE.finditer(line)
    ]
    assert not found
