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

# Notebooks are run as the site is built: what they print is what fastgrad says now.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120

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
html_static_path = ["_static"]
html_css_files = ["tables.css"]

# Ours must resolve; others' would need the network.
nitpick_ignore_regex = [
    ("py:.*", r"(collections\.abc|functools|os|torch|typing)\..*"),
    ("py:class", "Figure|Mode|Part"),
]

# Formulas as MathML, which browsers render by themselves: no script from the network.
html_math_renderer = "mathml"


def append_mathml(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """Writes a formula, and leaves nothing of it for others to write."""
    is_block = isinstance(node, nodes.math_block)
    formula = tex2mathml(node.astext(), as_block=is_block)
    # With room above and below: the theme gives whatever is too high a scroll bar.
    translator.body.append(f'<div class="math" style="padding: 0.5em">{formula}</div>' if is_block else formula)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.add_html_math_renderer("mathml", (append_mathml, None), (append_mathml, None))
