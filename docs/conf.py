"""How Sphinx builds the documentation: `make docs`."""

from __future__ import annotations

from fastgrad import __version__

project = "fastgrad"
author = "the fastgrad contributors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

# A single backtick links what is documented and sets anything else in italics.
default_role = "autolink"
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
autodoc_preserve_defaults = True
napoleon_google_docstring = False
napoleon_use_ivar = False
napoleon_use_rtype = False
maximum_signature_line_length = 90
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"fastgrad {version}"
html_copy_source = False

# Ours must resolve; others' would need the network.
nitpick_ignore_regex = [("py:.*", r"(collections\.abc|functools|torch|typing)\..*"), ("py:class", "Figure|Mode|Part")]
