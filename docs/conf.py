"""How Sphinx builds the documentation; `nox -s docs` runs it with warnings as errors."""

import inspect
import re

from flax import nnx
from sphinx.util.inspect import stringify_signature

import maxlib

project = "maxlib"
author = "The maxlib authors"
copyright = author
version = release = maxlib.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx.ext.mathjax"]
exclude_patterns = ["_build", "jupyter_execute", "**.ipynb_checkpoints"]

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
nb_execution_in_temp = True  # pages write directories, which a second build would find

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "imported-members": True, "special-members": "__call__"}
python_maximum_signature_line_length = 100


def signature(app, what, name, obj, options, signature, return_annotation):
    """The constructor's own signature for flax modules, whose metaclass hides it, and shapes without jaxlib's path."""
    if what == "class" and issubclass(obj, nnx.Module):
        signature = stringify_signature(
            inspect.signature(obj.__init__), show_return_annotation=False, unqualified_typehints=True
        )
        signature = signature.replace("(self, ", "(").replace("(self)", "()")
    return signature and signature.replace("jaxlib._jax.Array", "Array"), (return_annotation or "").replace(
        "jaxlib._jax.Array", "Array"
    )


def docstring(app, what, name, obj, options, lines):
    """Docstrings are written in Markdown; all they use of it that reStructuredText reads otherwise is `code`."""
    lines[:] = re.sub(r"(?<!`)`([^`]+)`(?!`)(?=(\w)?)", _literal, "\n".join(lines)).split("\n")


def _literal(match):
    return f"``{match[1]}``" + ("\\ " if match[2] else "")


def setup(app):
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", docstring)
