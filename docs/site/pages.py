"""Pages of the documentation: their reading order, and their text as the site shows it.

The pages are plain Markdown that a repository's web page shows as well. ``index.md`` links to the ``README.md`` of each
folder, and that links to the pages of its folder. The order of these links is the reading order: the site's table of
contents and the "Next" line at the end of each page are made from it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
REPOSITORY = DOCS.parent
# Files of the repository's root that are pages of the site as well; there, each replaces a page with a link to it.
ROOT_PAGES = {
    "reference/changelog.md": "CHANGELOG.md",
    "internals/contributing.md": "CONTRIBUTING.md",
    "internals/security.md": "SECURITY.md",
}
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>(?!\w+:|#)[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
_CARD = re.compile(r"^- \[([^\]]*)\]\(([\w/-]+)\.md\): (.*)\n", re.MULTILINE)
_CARDS = re.compile(rf"(?:{_CARD.pattern})+", re.MULTILINE)
_NEXT = re.compile(r"\n+Next: \[[^\]]*\]\([^)]*\)\.\n*$")


def title(page: str) -> str:
    """Return the first heading of a page, given by its path within docs/."""
    return next(line[2:] for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if line.startswith("# "))


def children(page: str) -> list[str]:
    """Return the pages below a page, in the order of the links to them: folders below the index, files below a README."""
    if Path(page).name not in ("index.md", "README.md"):
        return []
    found = []
    for match in _LINK.finditer((DOCS / page).read_text(encoding="utf-8")):
        target = _normal(page, match["path"])
        below = (
            re.fullmatch(r"[\w-]+/README\.md", target) if page == "index.md" else Path(target).parent == Path(page).parent
        )
        if below and target.endswith(".md") and target != page:
            found.append(target)
    return list(dict.fromkeys(found))


def reading_order() -> list[str]:
    """Return the paths of all pages within docs/, from the index on."""
    return ["index.md", *(page for folder in children("index.md") for page in (folder, *children(folder)))]


def with_next(page: str) -> str:
    """Return the text of a page with the line that links to its successor."""
    text = _NEXT.sub("\n", (DOCS / page).read_text(encoding="utf-8"))
    order = reading_order()
    following = order[order.index(page) + 1 : order.index(page) + 2]
    if page == "index.md" or not following:
        return text
    link = os.path.relpath(following[0], Path(page).parent)
    return f"{text.rstrip()}\n\nNext: [{title(following[0])}]({link}).\n"


def for_site(page: str, text: str, repository: str) -> str:
    """Return a page's text for Sphinx.

    The theme links to the next page, so that the page's own line is dropped. Links to files outside of docs/ lead to
    ``repository``, the address of the repository's files; without one, examples are downloads, and other links are text. The
    first list of the index becomes cards.
    """
    source = page
    if page in ROOT_PAGES:
        source = f"../{ROOT_PAGES[page]}"
        text = (DOCS / source).read_text(encoding="utf-8")
    text = _NEXT.sub("\n", text)
    text = _LINK.sub(lambda match: _link_for_site(match, page, source, repository), text)
    if page == "index.md":
        text = _CARDS.sub(lambda cards: f"::::{{grid}} 1 2 2 2\n:gutter: 3\n\n{cards[0]}::::\n", text)
        text = _CARD.sub(r":::{grid-item-card} \1\n:link: \2\n:link-type: doc\n\3.\n:::\n\n", text)
    if pages := children(page):
        entries = "\n".join(os.path.relpath(child, Path(page).parent).removesuffix(".md") for child in pages)
        text += f"\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"
    return text


def _link_for_site(match: re.Match[str], page: str, source: str, repository: str) -> str:
    target, anchor = _normal(source, match["path"]), match["anchor"] or ""
    roots = {f"../{root}": shown for shown, root in ROOT_PAGES.items()}
    target = {**roots, "../README.md": "index.md"}.get(target, target)
    if target == "index.md":
        anchor = ""  # headings of the README
    if not target.startswith("..") and not (DOCS / target).is_dir():
        return f"{match['image']}[{match['text']}]({os.path.relpath(target, Path(page).parent)}{anchor})"
    file = os.path.normpath(f"docs/{target}")
    if file.startswith("examples/") and not repository:
        return f"[{match['text']}]({os.path.relpath(target, Path(page).parent)})"
    return f"[{match['text']}]({repository}/{file}{anchor})" if repository else match["text"]


def _normal(page: str, link: str) -> str:
    return os.path.normpath(Path(page).parent / link)
