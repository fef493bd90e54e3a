"""Writes the generated parts of the pages: tables, and the links to the next page. `python -m docs.site.generate`."""

from __future__ import annotations

from docs.site import pages
from nemo_kto.config import keys


def generated(page: str) -> str:
    """Return the text of a page as it must be."""
    return keys.with_tables(pages.with_next(page))


if __name__ == "__main__":
    for page in pages.reading_order():
        (pages.DOCS / page).write_text(generated(page), encoding="utf-8")
