"""How Sphinx builds the documentation; `nox -s docs` runs it with warnings as errors."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extension"))

import api
import notebooks

import maxlib

notebooks.copy()
notebooks.keep_compiled()
api.write()

project = "maxlib"
author = "The maxlib authors"
copyright = author
version = release = maxlib.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "api",  # docs/_extension, as the next two
    "links",
    "notebooks",
]
exclude_patterns = ["_build", "_extension", "jupyter_execute", "**.ipynb_checkpoints"]

html_theme = "pydata_sphinx_theme"
html_title = f"maxlib {version}"
html_short_title = "maxlib"
html_extra_path = ["llms.txt"]
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}  # light or dark as the browser is
html_css_files = ["maxlib.css"]
html_sidebars = {page: [] for page in ("index", "concepts", "search", "genindex")}
html_show_sourcelink = False
html_domain_indices = False  # of modules: the API pages are the index
html_theme_options = {
    "show_nav_level": 2,
    "navigation_depth": 3,
    "collapse_navigation": True,  # else every API page would list every object
    "header_links_before_dropdown": 7,
    "show_prev_next": True,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}

if "DOCS_VERSION" in os.environ:  # beside other versions, in a folder of its own; see docs/versions.py
    # The address is relative to the first page.
    html_theme_options["switcher"] = {"json_url": "../switcher.json", "version_match": os.environ["DOCS_VERSION"]}
    html_theme_options["check_switcher"] = False  # it is not there yet
    html_theme_options["navbar_end"] = ["version-switcher", *html_theme_options["navbar_end"]]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Notebooks are Markdown (myst-nb). A page is executed again when its code or maxlib's has changed. A cell that fails
# is a warning, which `nox -s docs` turns into an error after it has tried the other pages.
nb_execution_mode = "cache"
nb_execution_cache_path = str(notebooks.cache_folder())
nb_execution_raise_on_error = False
nb_execution_timeout = 300
nb_execution_excludepatterns = ["notebooks/*"]  # shown as they are stored; `nox -s notebooks` runs them
nb_execution_show_tb = True
nb_render_markdown_format = "gfm"  # outputs that are Markdown may be tables
nb_merge_streams = True  # one box for the lines that a cell prints
nb_execution_in_temp = True  # pages write directories, which a second build would find

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "special-members": "__call__"}
python_maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"

napoleon_use_ivar = True
napoleon_attr_annotations = False  # types are in the entries of the attributes
