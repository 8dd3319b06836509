"""Code names on pages lead to their API entries, and private paths in signatures to the public name."""

import re
from collections import defaultdict
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.util.nodes import make_refnode

NAME = re.compile(r"^(?:maxlib\.)?([A-Za-z_][\w.]*[\w])(\(.*\))?$", re.DOTALL)


class Index:
    """Where the entry of a name is."""

    def __init__(self, env: Any):
        self._exact: dict[str, tuple[str, str]] = {}
        self._endings: dict[str, set[str]] = defaultdict(set)
        for full, entry in env.domaindata["py"]["objects"].items():
            if full.startswith("maxlib.") and entry.objtype != "module" and not entry.aliased:
                self._exact[full] = (entry.docname, entry.node_id)
                parts = full.split(".")[1:]
                for start in range(len(parts)):
                    self._endings[".".join(parts[start:])].add(full)

    def find(self, name: str) -> tuple[str, str] | None:
        """Finds `nn.Attention`, `Trainer.fit` or a class by its bare name, where only one entry ends like this."""
        if f"maxlib.{name}" in self._exact:
            return self._exact[f"maxlib.{name}"]
        endings = self._endings.get(name, set())
        if "." not in name and not (name[0].isupper() and len(name) > 2):
            return None
        return self._exact[min(endings)] if len(endings) == 1 else None

    def public(self, target: str) -> tuple[str, str] | None:
        """Finds the entry of a private path such as `maxlib.nn._attention.Attention`."""
        parts = [part for part in target.split(".") if not part.startswith("_")]
        exact = self._exact.get(".".join(parts))
        return exact or (self.find(parts[-1]) if target.startswith("maxlib.") and parts[-1][:1].isupper() else None)


def index_of(app) -> Index:
    if not hasattr(app.env, "maxlib_index_") or app.env.maxlib_index_[0] is not app:
        app.env.maxlib_index_ = (app, Index(app.env))
    return app.env.maxlib_index_[1]


def resolve(app, doctree, docname: str) -> None:
    index = index_of(app)
    for literal in list(doctree.findall(nodes.literal)):
        match = NAME.match(literal.astext())
        if not match or isinstance(literal.parent, nodes.reference | nodes.title | addnodes.pending_xref):
            continue
        if docname == "coming-from" and _is_of_another_library(literal):
            continue
        entry = index.find(match[1])
        if entry and entry[0] != docname:
            literal.replace_self(make_refnode(app.builder, docname, *entry, literal.deepcopy()))


def _is_of_another_library(literal: nodes.literal) -> bool:
    """Tells whether a name is in a column that has another library's names."""
    entry: Any = literal
    while entry is not None and not isinstance(entry, nodes.entry):
        entry = entry.parent
    return entry is not None and entry is not entry.parent[-1]


def missing(app, env, node, contnode):
    """Finds the public entry of a private path."""
    entry = index_of(app).public(node.get("reftarget", "")) if node.get("refdomain") == "py" else None
    return make_refnode(app.builder, node["refdoc"], *entry, contnode) if entry else None


def setup(app) -> dict[str, Any]:
    app.connect("doctree-resolved", resolve)
    app.connect("missing-reference", missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
