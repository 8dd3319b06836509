"""How Sphinx builds the documentation; `nox -s docs` runs it with warnings as errors."""

import maxlib

project = "maxlib"
author = "The maxlib authors"
copyright = author
version = release = maxlib.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx.ext.mathjax"]
exclude_patterns = ["_build", "jupyter_execute", "**.ipynb_checkpoints"]
# A page is listed once it is written: the lists are patterns, and a pattern may still be empty.
suppress_warnings = ["toc.empty_glob", "mystnb.unknown_mime_type"]

html_theme = "sphinx_book_theme"
html_title = "maxlib"
html_extra_path = ["llms.txt"]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Notebooks are Markdown (jupytext), executed on every build; a cell that fails fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_show_tb = True

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "imported-members": True, "undoc-members": False, "show-inheritance": False}
