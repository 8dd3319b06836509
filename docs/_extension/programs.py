"""Writes a page for each example program into docs/examples, with its whole text, and one for the command line.

Words such as `examples/pretrain.py` on other pages lead there (`links.py`).
"""

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
ROOT = HERE.parent
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash"}
HELP = """
from maxlib._command import COMMANDS, parser
from maxlib.plan.__main__ import _parser as plan
for name, text in COMMANDS.items():
    top = parser(None if name == 'plan' else name)
    (group,) = (one for one in top._actions if one.choices)
    print(f"\\0{name}\\0{text}\\0{(plan() if name == 'plan' else group.choices[name]).format_help()}", end="")
"""


def programs() -> list[Path]:
    """Returns the example programs and the files that launch them, without notebooks."""
    return sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in LANGUAGES)


def page_of(path: Path) -> str:
    """Returns the name of a program's page: examples/interop/export_gguf.py has examples/interop-export-gguf."""
    parts = path.relative_to(ROOT / "examples").with_suffix("").parts
    return f"examples/{'-'.join(parts).replace('_', '-')}"


@functools.cache
def pages_of_words() -> dict[str, str]:
    """Returns the page of each name by which a text may call a program: its path and, if it has no other, its name."""
    found = programs()
    names = [path.name for path in found]
    words = {path.relative_to(ROOT).as_posix(): page_of(path) for path in found}
    return words | {path.name: page_of(path) for path in found if names.count(path.name) == 1}


def write() -> None:
    """Lets the pages be in docs/examples; those that are the same stay, or Sphinx would read them again."""
    (HERE / "examples").mkdir(exist_ok=True)
    pages = {page_of(path): page(path) for path in programs()}
    kept = {HERE / f"{name}.md" for name in ("examples/index", *pages)}
    for old in set((HERE / "examples").glob("*.md")) - kept:
        old.unlink()
    for name, text in pages.items():
        put(HERE / f"{name}.md", text)


def page(path: Path) -> str:
    """Returns the text of a program's page: what it says about itself, how to start it, and the program."""
    place, language = path.relative_to(ROOT).as_posix(), LANGUAGES[path.suffix]
    said = (ast.get_docstring(ast.parse(path.read_text())) or "") if language == "python" else ""
    own = language == "python" and path.parent.name == "examples"
    start = f"```bash\npython {place} --help\n```\n" if own else ""
    code = f"```{{literalinclude}} ../../{place}\n:language: {language}\n```\n"
    return f"# {place}\n\n{said}\n\n{start}\n{code}"


def write_commands(made: Path) -> None:
    """Lets docs/cli.md show what each command prints as its help.

    Args:
      made: a folder named after the state of maxlib's code; a file beside it has the page.
    """
    kept = made.with_name(f"{made.name}-cli.md")
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(commands())
    put(HERE / "cli.md", kept.read_text())


def commands() -> str:
    """Returns the page of the command line; a process of its own asks the parsers, since Sphinx forks."""
    env = os.environ | {"COLUMNS": "96", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", HELP], check=True, capture_output=True, text=True, cwd=ROOT, env=env)
    words = done.stdout.split("\0")[1:]
    parts = list(zip(words[::3], words[1::3], words[2::3], strict=True))
    rows = "\n".join(f"| [`maxlib {name}`](#maxlib-{name}) | {text} |" for name, text, _ in parts)
    helps = "\n\n".join(f"## maxlib {name}\n\n```text\n{text.strip()}\n```" for name, _, text in parts)
    return (
        "# The command line\n\nThe command `maxlib` comes with the package. Its exit "
        "status is 0 when all is well, 1 when the answer is no\n(a plan that does not fit, two checkpoints that differ), 2 for bad "
        "input. This page is what `--help` prints.\n\n| command | what it does |\n|---|---|\n" + rows + "\n\n"
        "Four modules have commands of their own: `python -m maxlib.distributed launch` ([many machines](guides/launch.md)), "
        "`python -m maxlib.data tokenize`\n([data](guides/data.md#tokens-ahead-of-time)), "
        "`python -m maxlib.ops check` ([the kernels](kernels.md)) and `python -m maxlib.distributed.xla_flags`\n"
        f"([XLA flags](guides/launch.md#xla-flags)).\n\n{helps}\n"
    )


def put(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
