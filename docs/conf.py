"""How Sphinx builds the documentation: `make docs`."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

from fastgrad import __version__

project = "fastgrad"
author = "the fastgrad contributors"
copyright = author
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

# Notebooks are executed when the site is built, so they show the output of the present code.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120

# Single backticks link documented names, and set everything else in italics.
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
html_static_path = ["_static"]
html_css_files = ["tables.css"]

# Links to our own names must resolve; other links would need the network.
nitpick_ignore_regex = [
    ("py:.*", r"(collections\.abc|functools|os|torch|typing)\..*"),
    ("py:class", "Figure|Mode|Part"),
]

# Formulas are MathML, which browsers render without a script from the network.
html_math_renderer = "mathml"


def append_mathml(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """Writes a formula as MathML; no other writer processes it."""
    is_block = isinstance(node, nodes.math_block)
    formula = tex2mathml(node.astext(), as_block=is_block)
    # With space above and below, because the theme adds a scroll bar to elements that are too high.
    translator.body.append(f'<div class="math" style="padding: 0.5em">{formula}</div>' if is_block else formula)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Registers the functions of this file; called by Sphinx."""
    app.add_html_math_renderer("mathml", (append_mathml, None), (append_mathml, None))
