"""Writes the generated parts of the pages: tables, and the links to the next page. `python -m docs.site.generate`."""

from __future__ import annotations

import re

from docs.site import pages, tables
from docs.site.commands import commands

_COMMANDS = re.compile(r"(<!-- commands -->\n).*?(\n<!-- end -->)", re.DOTALL)


def generated(page: str) -> str:
    """Return the text of a page as it must be."""
    text = tables.with_tables(pages.with_next(page))
    return _COMMANDS.sub(lambda match: f"{match[1]}\n{commands()}\n{match[2]}", text)


if __name__ == "__main__":
    for page in pages.reading_order():
        (pages.DOCS / page).write_text(generated(page), encoding="utf-8")
