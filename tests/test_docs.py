"""Files, links, commands and keys in the documents exist, and the documents speak only of the project."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from docs.site import generate, pages
from nemo_kto.algorithms.recipes import KTO, RECIPES
from nemo_kto.config import compose
from nemo_kto.config.check import read_positions
from nemo_kto.config.migration import aligner_keys

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# A key after + is an option that the configuration lacks.
KEY = re.compile(
    r"(?<![\w./+])((?:trainer|exp_manager|pretrained_checkpoint|model|export)(?:\.[a-z][a-z_0-9]*)+)(?![\w.(/])"
)
# What has no place in a public document: paths of somebody's machine, and work that was left over.
OUT_OF_PLACE = re.compile(r"(?<![\w.])/(?:root|home|work|tmp)/|\b(?:TODO|FIXME|XXX)\b")


def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def commands(document: Path) -> list[str]:
    """Lines of the code blocks (indented by four), with continued lines joined and comments cut off."""
    block = [line[4:] for line in text_of(document).splitlines() if line.startswith("    ")]
    joined = "\n".join(block).replace("\\\n", " ")
    return [line.split(" #")[0].strip() for line in joined.splitlines()]


def names(document: Path) -> str:
    return document.relative_to(REPOSITORY).as_posix()


@cache
def known_keys() -> set[str]:
    sources = [compose.Source(config_name=recipe.config_name) for recipe in RECIPES.values()]
    ours = {key for source in sources for key in compose.known_keys(compose.load(source=source), sections=True)}
    return ours | {*aligner_keys()}


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
    used = {key for key in KEY.findall(text_of(document)) if not key.endswith((".py", ".yaml"))}
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
                "import",
                "data",
                "checkpoint",
                "report",
                "--version",
                "--help",
            )
            unknown += [command for subcommand in words[1:2] if subcommand.rstrip(":") not in known]
        elif words[:1] in (["python"], ["sbatch"]):
            unknown += [command for word in words if word.endswith((".py", ".sbatch")) and not (REPOSITORY / word).exists()]
    assert not unknown, f"{names(document)}: {unknown}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_no_foreign_words(document: Path) -> None:
    assert not OUT_OF_PLACE.findall(text_of(document))


def test_the_documented_calls_exist() -> None:
    rows = re.findall(r"^\|.*\]\((nemo_kto/[\w/]+\.py)\), `(\w+)`", text_of(REPOSITORY / "README.md"), re.MULTILINE)
    assert len(rows) >= 3, "the loss, the step and the loop"
    missing = [f"{file}: {name}" for file, name in rows if f"def {name}(" not in text_of(REPOSITORY / file)]
    assert not missing


def test_the_two_commands_come_first() -> None:
    first = [command for command in commands(REPOSITORY / "README.md") if command][:2]
    assert first == ["make quickstart", "make test"]


def test_the_command_lines_of_the_readme_compose() -> None:
    lines = [line.split() for line in commands(REPOSITORY / "README.md") if line.startswith("nemo-kto kto ") and "=" in line]
    assert lines, "the README shows how to train a user's model"
    for words in lines:
        overrides, misplaced = read_positions(words[2:], KTO)
        cfg, mistakes = compose.to_config(compose.load(overrides), recipe=KTO)
        assert not mistakes + misplaced
        assert cfg is not None
        assert cfg.model.data.data_prefix == "rows.jsonl"


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
