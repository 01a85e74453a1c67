"""Sphinx's settings; `make docs` builds the pages into build/docs."""

import importlib.metadata
import importlib.util

project = "dps"
author = "dps developers"
project_copyright = f"2026, {author}"
version = release = importlib.metadata.version("dps")

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc", "myst_parser", "sphinx_click"]

smartquotes = False  # they would turn the two dashes of options into one

html_theme = "sphinx_book_theme"
html_copy_source = False
html_title = f"dps {release}"
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False}
html_static_path = ["_static"]
html_css_files = ["dps.css"]

myst_heading_anchors = 3  # links to headings, as GitHub makes them

autodoc_member_order = "bysource"
# dps.torch is described also where torch is not installed.
autodoc_mock_imports = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
autodoc_typehints = "none"  # the sections on parameters say more
autosummary_generate = False  # the tables lead to what is described on the same page
numpydoc_show_class_members = False

# Every other name in a docstring has to lead somewhere.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(distributed|dask|scipy|sparse|sklearn|pyspark|skein|torch)\..*")]


def setup(app):
    # scikit-learn adds these to every estimator; their text leads to its own pages.
    app.connect("autodoc-skip-member", lambda app, kind, name, *rest: True if name.endswith("_request") else None)
