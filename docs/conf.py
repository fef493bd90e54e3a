"""Sphinx's configuration of the documentation site; `make docs` builds it in build/docs."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs.site import pages
from docs.site.flowchart import Flowchart
from nemo_kto import __version__

logging.getLogger("megatron").setLevel(logging.WARNING)  # imported for the docstrings

project = "nemo_kto"
release = version = __version__
copyright = "the authors of nemo_kto"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["site", "figures/*.md"]
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!nemo_kto).*")]  # other packages: nothing is looked up on a network

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
highlight_language = "none"
smartquotes = False  # they would change options such as --nodes in a sentence
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
viewcode_line_numbers = True

html_theme = "furo"
html_title = "nemo_kto"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_logo": "wordmark-light.svg",
    "dark_logo": "wordmark-dark.svg",
    "sidebar_hide_name": True,
}


def setup(app: Sphinx) -> None:
    """Register what the pages need besides the extensions."""
    address = os.environ.get("NEMO_KTO_REPOSITORY", "").rstrip("/")
    files = f"{address}/blob/main" if address else ""

    def read(_: Sphinx, name: str, source: list[str]) -> None:
        source[0] = pages.for_site(f"{name}.md", source[0], files)

    app.connect("source-read", read)
    app.add_directive("mermaid", Flowchart)
