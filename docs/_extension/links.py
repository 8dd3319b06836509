"""Links between pages: code names lead to their API entries, and entries lead back to the guides that use them.

Private paths in signatures (`maxlib.nn._attention.Attention`) lead to the public name.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import api
import cards
import figures
import programs
from docutils import nodes
from sphinx import addnodes
from sphinx.util.nodes import make_refnode

NAME = re.compile(r"^(?:maxlib\.)?([A-Za-z_][\w.]*[\w])(\(.*\))?$", re.DOTALL)
DOTTED = re.compile(r"\b(?:maxlib\.)?((?:[a-z_]+\.)+[A-Za-z_]\w*)")
GUIDES = ("guides/", "start", "concepts", "notebooks/", "examples/")  # pages that use names, the first first
MOST = 5  # guides that an entry names
OBJECTS = "api/objects/"
THEIRS = "coming-from/"  # pages whose tables name other libraries in all columns but the last


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

    def find(self, name: str, module: str = "") -> tuple[str, str] | None:
        """Finds `nn.Attention`, `Trainer.fit` or a class by its bare name, where one entry only ends like this; on the
        page of a module's object also `make_mesh`, a neighbour by its bare name.
        """
        if module and "_" in name and (found := self._exact.get(f"{module}.{name}")):
            return found
        if found := self._exact.get(f"maxlib.{name}"):
            return found
        endings = self._endings.get(name, set())
        bare = "." not in name
        if bare and not (name[0].isupper() and len(name) > 2):
            return None
        return self._exact[min(endings)] if len(endings) == 1 else None

    def public(self, target: str) -> tuple[str, str] | None:
        parts = [part for part in target.split(".") if not part.startswith("_")]
        exact = self._exact.get(".".join(parts))
        return exact or (self.find(parts[-1]) if target.startswith("maxlib.") and parts[-1][:1].isupper() else None)


def index_of(app) -> Index:
    if not hasattr(app.env, "maxlib_index_") or app.env.maxlib_index_[0] is not app:
        app.env.maxlib_index_ = (app, Index(app.env))
    return app.env.maxlib_index_[1]


def collect(app, doctree) -> None:
    """Notes the names that a guide uses, in its text and in its programs."""
    page = app.env.docname
    if not page.startswith(GUIDES):
        return
    names = set()
    for node in doctree.findall(lambda n: isinstance(n, nodes.literal | nodes.literal_block)):
        names |= set(DOTTED.findall(node.astext()))
    if not hasattr(app.env, "maxlib_uses"):
        app.env.maxlib_uses = {}
    app.env.maxlib_uses[page] = names


def purge(app, env, docname: str) -> None:
    getattr(env, "maxlib_uses", {}).pop(docname, None)


def merge(app, env, docnames, other) -> None:
    """Takes over what another process has read."""
    env.maxlib_uses = getattr(env, "maxlib_uses", {}) | getattr(other, "maxlib_uses", {})


def resolve(app, doctree, docname: str) -> None:
    index = index_of(app)
    for literal in list(doctree.findall(nodes.literal)):
        _link(app, index, docname, literal)
    if docname.startswith("api/"):
        _add_guides(app, index, docname, doctree)


def _link(app, index: Index, docname: str, literal: nodes.literal) -> None:
    if isinstance(literal.parent, nodes.reference | nodes.title | addnodes.pending_xref):
        return
    if page := _page_of_program(literal.astext(), docname):
        literal.replace_self(make_refnode(app.builder, docname, page, "", literal.deepcopy()))
        return
    if docname.startswith(THEIRS) and _is_of_another_library(literal):
        return
    match = NAME.match(literal.astext())
    found = index.find(match[1], _module_of(docname)) if match else None
    if found and found[1] != f"maxlib.{docname.removeprefix(OBJECTS)}":  # nobody needs a link to where they are
        link = make_refnode(app.builder, docname, *found, literal.deepcopy())
        literal.replace_self(link)


def _module_of(docname: str) -> str:
    """Returns the module of an object's page, "" for others."""
    return f"maxlib.{docname.removeprefix(OBJECTS)}".rpartition(".")[0] if docname.startswith(OBJECTS) else ""


def _page_of_program(text: str, docname: str) -> str | None:
    """Finds the page of an example program that a text is about: a path, a file name or a command."""
    words = (word for word in text.split() if word in programs.pages_of_words())
    page = programs.pages_of_words()[word] if (word := next(words, None)) else None
    return None if page == docname else page


def _is_of_another_library(literal: nodes.literal) -> bool:
    """Tells whether a name is in a column that has another library's names."""
    entry: Any = literal
    while entry is not None and not isinstance(entry, nodes.entry):
        entry = entry.parent
    return entry is not None and entry is not entry.parent[-1]


def _add_guides(app, index: Index, docname: str, doctree) -> None:
    used = defaultdict(set)
    for page, names in getattr(app.env, "maxlib_uses", {}).items():
        for name in names:
            if found := index.find(name):
                used[found].add(page)
    for signature in list(doctree.findall(addnodes.desc_signature)):
        content = signature.parent[-1]
        for node_id in signature["ids"]:
            if pages := sorted(used.get((docname, node_id), ()), key=_rank):
                content += _paragraph(app, docname, pages)
                break


def _rank(page: str) -> tuple[int, str]:
    return next(number for number, start in enumerate(GUIDES) if page.startswith(start)), page


def _paragraph(app, docname: str, pages: list[str]) -> nodes.paragraph:
    text = nodes.paragraph(classes=["api-guides"])
    text += nodes.Text("Used in: ")
    for number, page in enumerate(pages[:MOST]):
        text += nodes.Text(", " if number else "")
        title = app.env.titles[page].astext()
        text += make_refnode(app.builder, docname, page, "", nodes.Text(title))
    return text


def missing(app, env, node, contnode):
    """Finds the public entry of a private path."""
    found = index_of(app).public(node.get("reftarget", "")) if node.get("refdomain") == "py" else None
    return make_refnode(app.builder, node["refdoc"], *found, contnode) if found else None


def mend_source_links(app, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Lets "[docs]" in a module's source lead to the entry: viewcode takes all entries for those of one module."""
    if not pagename.startswith("_modules/maxlib"):
        return
    entries = app.env.domaindata["py"]["objects"]

    def mended(match: re.Match) -> str:
        path, name = match[2], match[3]
        if name in entries:
            top = path[: len(path) - len(path.lstrip("./"))]
            return f'{match[1]}{top}{entries[name].docname}.html#{entries[name].node_id}"'
        page = [full for full, entry in entries.items() if path.endswith(f"{entry.docname}.html")]
        parts = name.split(".")[1:]
        endings = [".".join(parts[start:]) for start in range(len(parts))]
        found = next((full for ending in endings for full in page if full.endswith(f".{ending}")), name)
        return f'{match[1]}{path}#{found}"'

    context["body"] = re.sub(r'(href=")([^"#]*)#(maxlib[\w.]+)"', mended, context["body"])


def rest_of_guides(app, docname: str, source: list[str]) -> None:
    """Fills `<<others>>` on a page of contents with the pages of its folder that it does not list."""
    if "<<others>>" in source[0]:
        folder = Path(docname).parent
        names = [Path(found).name for found in sorted(app.env.found_docs) if Path(found).parent == folder]
        others = [n for n in names if n != "index" and not re.search(rf"^{re.escape(n)}$", source[0], re.MULTILINE)]
        source[0] = source[0].replace("<<others>>", "\n".join(others))


def link_cards(app, docname: str, source: list[str]) -> None:
    """Links the families in the tables of docs/models.md, which a program writes, to their cards."""
    if docname == "models":
        linked = lambda row: f"| [{row[1]}](cards/{row[1]}.md) |" if f"cards/{row[1]}" in app.env.found_docs else row[0]
        source[0] = re.sub(r"^\| (\w+) \|", linked, source[0], flags=re.MULTILINE)


def prose_on_cards(app, docname: str, source: list[str]) -> None:
    """Lets links to a file of docs/families lead to the family's card, which has its text."""
    source[0] = re.sub(r"\]\(((?:\.\./)*)(?:families/)(\w+\.md)", r"](\1cards/\2", source[0])


def copied_notebooks(app, docname: str, source: list[str]) -> None:
    """Lets links to a file of examples/notebooks lead to its copy beside the pages (notebooks.py)."""
    source[0] = re.sub(r"\]\(((?:\.\./)*)\.\./examples/notebooks/(\w+\.ipynb)", r"](\1notebooks/\2", source[0])


def without_pragmas(app, docname: str, source: list[str]) -> None:
    """Leaves out the comments for the formatter."""
    source[0] = source[0].replace("  # fmt: skip", "")


def landing(app, docname: str, source: list[str]) -> None:
    """Draws Llama, from the model itself, on the first page, and names the families there."""
    if docname == "index":
        drawing = f"```{{raw}} html\n{figures.llama_3_1_8b()}\n```"
        source[0] = with_families(source[0]).replace("<<figure>>", drawing)


def with_families(text: str) -> str:
    """Puts links to the families' cards in the place of `<<families>>`."""
    return text.replace("<<families>>", ", ".join(f"[{t}](cards/{name}.md)" for name, t in cards.titles().items()))


def write_llms_full(app, error) -> None:
    """Writes every page of text into one file for readers that are programs."""
    if error is None and app.builder.format == "html":
        left_out = ("index", "changelog", OBJECTS)
        pages = ["index", *(page for page in sorted(app.env.found_docs) if not page.startswith(left_out))]
        texts = [api.as_text(with_families(Path(app.env.doc2path(page)).read_text())) for page in pages]
        Path(app.outdir, "llms-full.txt").write_text("\n\n".join(texts))


def setup(app) -> dict[str, Any]:
    app.connect("source-read", rest_of_guides)
    app.connect("source-read", landing)
    app.connect("source-read", link_cards)
    app.connect("source-read", prose_on_cards)
    app.connect("source-read", copied_notebooks)
    app.connect("source-read", without_pragmas)
    app.connect("doctree-read", collect)
    app.connect("env-purge-doc", purge)
    app.connect("env-merge-info", merge)
    app.connect("doctree-resolved", resolve)
    app.connect("missing-reference", missing)
    app.connect("html-page-context", mend_source_links)
    app.connect("build-finished", write_llms_full)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
