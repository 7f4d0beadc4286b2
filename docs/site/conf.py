"""Settings of Sphinx for the documentation site; `docs/build.py` gives it the pages."""

from __future__ import annotations

from importlib import metadata

project = "UniRL"
author = "The UniRL authors"
release = metadata.version("unirl-core")
extensions = ["myst_parser"]
templates_path = ["templates"]

# Anchors of headings are those of GitHub, so links work in both.
myst_heading_anchors = 6

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": ["view"]}
