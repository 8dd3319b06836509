"""API pages: `{api} maxlib.nn` and a list of names become a table of summaries; each name has a page of its own in
docs/api/objects.

A star stands for the public names of the module that the page does not list elsewhere, so that a new name is never
left out. `{api} maxlib.models.*` gives every module of the package a section with a star.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
import types
import typing
from pathlib import Path
from typing import Any

from docutils import nodes
from flax import nnx
from sphinx import addnodes
from sphinx.domains.python import PyObject
from sphinx.util import logging
from sphinx.util.inspect import stringify_signature

HERE = Path(__file__).parents[1]
MOST = 12  # names that a page lists beside its own
LOG = logging.getLogger(__name__)
BLOCK = re.compile(r"^```\{api\} (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EVERY_MODULE = re.compile(r"^```\{api\} (\S+)\.\*\n```$", re.MULTILINE)
EMPTY = re.compile(r"^## More\n\s*(?=^#|\Z)", re.MULTILINE)  # a heading left out where nothing is left
QUOTED_STAR = re.compile(r'(?<=")(\*)(?=\w)')
LITERAL = re.compile(r"(?<!`)`([^`]+)`(?!`)(?=(\w)?)")
KNOWN = {"PRESETS": "Published sizes by name.", "FAMILY": "The family, as `weights.families` lists it."}
LONGEST = 60  # letters of a default
NUMBER = r"Array \| ndarray \| bool \| number \| (?:bool \| )?int \| float \| complex"
SCHEDULE = re.compile(rf"Callable\[\[{NUMBER}\], {NUMBER}\]")
SECTION = re.compile(r"^ *(Args|Attributes|Returns|Raises|Yields)s?:\s*$")


def write() -> None:
    """Lets docs/api/objects have a page for each name that an API page lists; pages that are the same stay."""
    folder = HERE / "api" / "objects"
    folder.mkdir(exist_ok=True)
    pages = {}
    for group in sorted((HERE / "api").glob("*.md")):
        for module, names in listed(group.read_text()):
            pages |= {page_of(module, name): page(module, name, names) for name in names}
    for old in set(folder.glob("*.md")) - {folder / f"{name}.md" for name in pages}:
        old.unlink()
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:  # else Sphinx would read it again
            path.write_text(text)


def listed(text: str) -> list[tuple[str, list[str]]]:
    """Returns the module and the names of each block of an API page."""
    found = BLOCK.findall(spelled_out(text))
    explicit = {(module, name) for module, names in [*found, *_of_all_pages()] for name in names.split()}
    return [(module, _names(module, names.split(), explicit)) for module, names in found]


def spelled_out(text: str) -> str:
    """Writes a section for each module where a page asks for every module of a package."""

    def sections(match: re.Match[str]) -> str:
        package = importlib.import_module(match[1])
        modules = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
        public = [name for name in modules if not name.startswith("_")]
        return "\n\n".join(f"## {name}\n\n```{{api}} {match[1]}.{name}\n*\n```" for name in public)

    return EVERY_MODULE.sub(sections, text)


@functools.cache
def _of_all_pages() -> list[tuple[str, str]]:
    return [
        block for path in sorted((HERE / "api").glob("*.md")) for block in BLOCK.findall(spelled_out(path.read_text()))
    ]


def _names(module: str, names: list[str], explicit: set[tuple[str, str]]) -> list[str]:
    if names == ["*"]:
        return [name for name in public_names(module) if (module, name) not in explicit]
    if missing := [name for name in names if not hasattr(importlib.import_module(module), name)]:
        LOG.warning("%s has no %s: change the list on its API page", module, ", ".join(missing))
    return [name for name in names if name not in missing]


def page_of(module: str, name: str) -> str:
    """Returns the name of an object's page. Names that differ only by case, such as `nn.context` and `nn.Context`, get
    pages that differ by more, for file systems that ignore case.
    """
    same = [other for other in dir(importlib.import_module(module)) if other.lower() == name.lower() and name != other]
    kind = "-function" if name.islower() else "-constant" if name.isupper() else ""
    return f"{module}.{name}".removeprefix("maxlib.") + (kind if same else "")


def page(module: str, name: str, siblings: list[str]) -> str:
    """Returns the page of an object: its entry, and links to those that an API page lists beside it."""
    others = [f":py:obj:`{other} <{module}.{other}>`" for other in siblings if other != name]
    beside = f"\n\n.. container:: api-guides\n\n   See also: {', '.join(others)}" if 0 < len(others) <= MOST else ""
    title = f"{module}.{name}" if module == "maxlib" else f"{module}.{name}".removeprefix("maxlib.")
    return f"# {title}\n\n```{{eval-rst}}\n{_entry(module, name)}{beside}\n```\n"


def expand(app, docname: str, source: list[str]) -> None:
    """Replaces the blocks of a page by tables, and puts the contents below them; runs on every page."""
    blocks = listed(source[0])
    if not blocks:
        return
    of_block = iter(blocks)
    text = BLOCK.sub(lambda match: _table(*next(of_block)), spelled_out(source[0]))
    pages = {page_of(module, name): name for module, names in blocks for name in names}
    several = len({module for module, _ in blocks}) > 1  # gpt2.Config and llama.Config
    labels = {page: page.partition(".")[2] if several else name for page, name in pages.items()}
    listed_below = "\n".join(f"{label} <objects/{page}>" for page, label in labels.items())
    contents = f"\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n\n{listed_below}\n```\n"
    source[0] = EMPTY.sub("", text) + contents


def _table(module: str, names: list[str]) -> str:
    if not names:
        return ""
    rows = [f"   * - :py:obj:`{name} <{module}.{name}>`\n     - {summary(module, name)}" for name in names]
    table = "\n".join([".. list-table::", "   :class: api-summary", "   :widths: 30 70", "", *rows])
    return f"```{{eval-rst}}\n{table}\n```"


def short_names(app, doctree) -> None:
    """Writes `Array` in the signatures of overloads, which no event of autodoc shows."""
    for signature in doctree.findall(addnodes.desc_signature):
        for text in list(signature.findall(nodes.Text)):
            if "jaxlib._jax.Array" in text:
                text.parent.replace(text, nodes.Text(text.replace("jaxlib._jax.Array", "Array")))


def one_document(app, doctree) -> None:
    """Lets every node belong to the page. MyST reads `eval-rst` as a document of its own, whose settings hold all that
    Sphinx knows; stored with each page, that was 2 GB.
    """
    for node in doctree.findall():
        node.document = doctree


def _signature_of(value: Any) -> inspect.Signature:
    """Returns the constructor's own signature for flax modules, whose metaclass hides it."""
    if not inspect.isclass(value) or not issubclass(value, nnx.Module):
        return _with_short_defaults(inspect.signature(value))
    found = inspect.signature(value.__init__)
    return found.replace(parameters=[one for name, one in found.parameters.items() if name != "self"])


def public_names(module: str) -> list[str]:
    """Names that users of a module type: all that a facade offers, else what the module itself defines."""
    found = importlib.import_module(module)
    names = [name for name in dir(found) if not name.startswith("_")]
    objects = {name: getattr(found, name) for name in names}
    objects = {name: value for name, value in objects.items() if not isinstance(value, types.ModuleType)}
    own = [name for name, value in objects.items() if _home(value) == module]
    facade = hasattr(found, "__path__") or not own
    parent = importlib.import_module(module.rpartition(".")[0])
    public = [name for name, value in objects.items() if _belongs(name, value, module, facade)]
    is_room = module.count(".") == 1  # maxlib itself exports some names of its rooms
    return [name for name in public if is_room or getattr(parent, name, None) is not objects[name]]


def _home(value: Any) -> str:
    is_code = inspect.isclass(value) or inspect.isfunction(value)
    return (value.__module__ or "") if is_code else ""


def _belongs(name: str, value: Any, module: str, facade: bool) -> bool:
    if inspect.isclass(value) or inspect.isfunction(value):
        return _home(value).startswith("maxlib.") if facade else _home(value) == module
    if type(value).__module__ == "typing" or name == "TYPE_CHECKING":
        return name in ("Layout", "Rules")
    return name.isupper() or facade


def summary(module: str, name: str) -> str:
    """The first sentence of what an entry says."""
    text = " ".join(documentation(module, name).split("\n\n")[0].split())
    first = re.match(r"(.*?[^.A-Z]\.)(?= [A-Z`]|$)", text)
    return _rst(first[1] if first else text)


def documentation(module: str, name: str) -> str:
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value) or inspect.isfunction(value):
        return inspect.getdoc(value) or ""
    wrapped = inspect.unwrap(value) if callable(value) else value
    own = inspect.getdoc(wrapped) if inspect.isfunction(wrapped) else None
    if not own and (written := getattr(value, "__dict__", {}).get("__doc__")):
        own = inspect.cleandoc(written)
    said = own or below(module).get(name) or comment(module, name) or KNOWN.get(name)
    if not said and typing.get_origin(value) is typing.Literal:
        return f"One of {', '.join(f'`{choice!r}`' for choice in typing.get_args(value))}."
    return said or _of_its_class(value) or f"A `{type(value).__name__}`."


def _of_its_class(value: Any) -> str:
    """Returns the first paragraph about the class of a value, if that is one of maxlib's."""
    is_ours = type(value).__module__.startswith("maxlib.")
    return (inspect.getdoc(type(value)) or "").split("\n\n")[0] if is_ours else ""


@functools.cache
def below(module: str) -> dict[str, str]:
    """Returns the strings below values that a subpackage assigns, by the values' names."""
    found = {}
    for path in sorted(Path(inspect.getfile(importlib.import_module(module))).parent.rglob("*.py")):
        found |= _below_in(path)
    return found


@functools.cache
def _below_in(path: Path) -> dict[str, str]:
    """Those of one file, which packages within packages share."""
    return {
        ast.unparse(one.targets[0]): str(after.value.value).strip()
        for one, after in itertools.pairwise(ast.parse(_source(path)).body)
        if isinstance(one, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


@functools.cache
def _source(path: Path) -> str:
    return path.read_text()


def comment(module: str, name: str) -> str:
    """The comment before a constant, or on its line, wherever the subpackage defines it."""
    folder = Path(inspect.getfile(importlib.import_module(module))).parent
    for path in sorted(folder.rglob("*.py")):
        if name not in (text := _source(path)):
            continue
        if match := re.search(rf"((?:^#[^\n]*\n)*)^{name}\b[^=\n]*=[^\n]*", text, re.MULTILINE):
            trailing = re.search(r"  # (?!fmt:)(.*)$", match[0])
            before = " ".join(line.lstrip("# ") for line in match[1].splitlines() if not line.startswith("# fmt:"))
            if text := (trailing[1] if trailing else before):
                return text[0].upper() + text[1:].rstrip(".") + "."
    return ""


def _entry(module: str, name: str) -> str:
    value, full = getattr(importlib.import_module(module), name), f"{module}.{name}"
    if inspect.isclass(value):
        return f".. autoclass:: {full}"
    if inspect.isfunction(value):
        return f".. autofunction:: {full}"
    kind = f"   :type: {type(value).__name__}\n" if type(value).__module__ != "typing" else ""
    if len(text := _literal_value(value)) < 400 and "<" not in text and not callable(value):
        kind += f"   :value: {text}\n"
    body = "\n".join(f"   {line}" if line else "" for line in prepared(documentation(module, name).split("\n")))
    return f".. py:data:: {full}\n{kind}\n{_napoleon(body)}"


def _literal_value(value: Any) -> str:
    return "{" + ", ".join(map(repr, value)) + "}" if isinstance(value, dict) else repr(value)


def _napoleon(text: str) -> str:
    from sphinx.ext.napoleon import GoogleDocstring

    lines = [line.removeprefix("   ") for line in text.split("\n")]
    return "\n".join(f"   {line}" if line else "" for line in GoogleDocstring(lines).lines())


def prepared(lines: list[str]) -> list[str]:
    """Turns the little Markdown that docstrings use into reStructuredText: `code`, and indented blocks of code."""
    return _rst("\n".join(_code_blocks(_tables(lines)))).split("\n")


def _tables(lines: list[str]) -> list[str]:
    """Turns a table in Markdown into a `list-table`."""
    found: list[str] = []
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.strip().startswith("|"):
            found.append(line)
        elif not found or not found[-1].startswith("     "):
            found += ["", ".. list-table::", "   :header-rows: 1", "", *_row(cells)]
        elif not set("".join(cells)) <= {"-", ":"}:
            found += _row(cells)
    return found


def _row(cells: list[str]) -> list[str]:
    return [f"{'   * -' if i == 0 else '     -'} {cell}" for i, cell in enumerate(cells)] + ["     "]


def _rst(text: str) -> str:
    text = re.sub(r"(?<![\w`*])(\*\*?)(?=\w+[,: \"])", r"\\\1", text)
    text = QUOTED_STAR.sub(r"\\*", text)
    return LITERAL.sub(lambda match: f"``{match[1]}``" + ("\\ " if match[2] else ""), text)


def _code_blocks(lines: list[str]) -> list[str]:
    """Marks paragraphs that are indented by four, before the sections for arguments, as code."""
    found: list[str] = []
    inside = False
    for index, line in enumerate(lines):
        if SECTION.match(line):
            return found + lines[index:]
        indented = line.startswith("    ")
        if indented and not inside and found and not found[-1].strip():
            found += [".. code-block:: python", ""]
            inside = True
        inside = inside and (indented or not line.strip())
        found.append(line)
    return found


def docstring(app, what, name, obj, options, lines: list[str]) -> None:
    if what == "class" and lines[:1] == ["Call self as a function."]:
        lines.clear()
    lines[:] = prepared(lines)
    if what in ("attribute", "property") and (colon := re.match(r"([^:]*) ([^ :]+:.*)", lines[0] if lines else "")):
        lines[:1] = colon.groups()  # napoleon takes what precedes a colon on the first line for a type


def signature(app, what, name, obj, options, signature, return_annotation):
    """Signatures of flax modules and dataclasses, and defaults that readers can read."""
    if what == "class" and (issubclass(obj, nnx.Module) or dataclasses.is_dataclass(obj)):
        signature = stringify_signature(_signature_of(obj), show_return_annotation=False, unqualified_typehints=True)
    return _readable(signature), _readable(return_annotation)


class _Omitted:
    def __repr__(self) -> str:
        return "..."


def _with_short_defaults(signature: inspect.Signature) -> inspect.Signature:
    """Leaves out defaults that would fill lines, such as whole layouts."""
    brief = lambda one: one.replace(default=_Omitted()) if len(_readable(repr(one.default)) or "") > LONGEST else one
    return signature.replace(parameters=[brief(one) for one in signature.parameters.values()])


def _readable(text: str | None) -> str | None:
    text = (text or "").replace("jaxlib._jax.Array", "Array").replace("<factory>", "...")
    name = r"<(?:function|class|module) '?([\w.<>]+)'?[^>]*>"
    text = re.sub(name, lambda match: match[1].rpartition(".")[2], text)
    text = re.sub(r"<PjitFunction of (\w+)>", r"\1", text)
    text = SCHEDULE.sub("optax.Schedule", _without_modules(text)) if "complex" in text else text
    return re.sub(r" at 0x[0-9a-f]+", "", text) or None


def _without_modules(text: str) -> str:
    """Leaves out the modules of the types that optax's schedules are made of."""
    return re.sub(r"~?\b(?:[a-z_]+\.)+(?=(?:Array|ndarray|bool|number|Callable)\b)", "", text)


def skip(app, what, name, obj, skip, options):
    """Leaves out `__call__` where it is not written for the class, and names that no sentence explains."""
    if name == "__call__" and (inspect.getdoc(obj) or "Call self as a function.") == "Call self as a function.":
        return not inspect.isfunction(obj)
    return skip


def name_attributes(app) -> None:
    """Heads the list of a class's attributes as docstrings do; Sphinx says "Variables"."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"


def setup(app) -> dict[str, Any]:
    app.connect("builder-inited", name_attributes)
    app.connect("source-read", expand)
    app.connect("doctree-read", short_names)
    app.connect("doctree-read", one_document, priority=999)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", docstring, priority=400)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
