"""The documentation as a site: `python -m sphinx -W docs site`."""

from __future__ import annotations

from pathlib import Path

import jaxpage

project = "jaxpage"
copyright = "the jaxpage authors"
release = jaxpage.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "jaxpage"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
smartquotes = False  # they would make one dash of the two before a flag
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
