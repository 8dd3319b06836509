"""The library runs no code that comes from data: no shell, no eval, no pickle, no module out of a model's directory."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from maxlib import observability

ROOT = Path(__file__).parents[1] / "maxlib"
SOURCES = sorted(ROOT.rglob("*.py"))
BUILTINS = {"eval", "exec", "compile", "__import__"}  # what runs text
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "runpy", "code", "codeop", "yaml"}
ATTRIBUTES = {"os.system", "os.popen", "torch.load", "imp.load_source", "importlib.util.spec_from_file_location"}
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}
# Modules by name: the library's own, its trackers' packages, and the loss that a user names on the command line of a
# plan.
DYNAMIC = {
    "_lazy.py",
    "__init__.py",
    "_command/__init__.py",
    "observability/_trackers.py",
    "models/__init__.py",
    "weights/_family.py",
    "plan/_job.py",
}
# Programs that are started: the interpreter itself, and what the launcher was told to supervise.
STARTS = {"plan/_run.py", "distributed/_launcher.py", "distributed/xla_flags.py"}
STARTS |= {"tokenization/_sandbox.py"}


def findings(tree: ast.AST, path: str) -> Iterator[str]:
    for node in ast.walk(tree):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Import(names=names):
                yield from (f"{where} imports {n.name}" for n in names if bad_module(n.name, path))
            case ast.ImportFrom(module=str(module)) if bad_module(module, path):
                yield f"{where} imports {module}"
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                yield f"{where} calls {name}"
            case ast.Attribute() if ast.unparse(node) in ATTRIBUTES:
                yield f"{where} uses {ast.unparse(node)}"
            case ast.Attribute(attr="import_module") if path not in DYNAMIC:
                yield f"{where} imports a module by name"
            case ast.keyword(arg=str(name), value=value) if name in KEYWORDS and ast.unparse(value) != "False":
                yield f"{where} says {name}={ast.unparse(value)}"


def bad_module(name: str, path: str) -> bool:
    return name.split(".")[0] in MODULES or (name.split(".")[0] == "subprocess" and path not in STARTS)


def test_no_source_runs_what_it_is_given():
    assert len(SOURCES) > 100
    problems = [f for p in SOURCES for f in findings(ast.parse(p.read_text()), p.relative_to(ROOT).as_posix())]
    assert problems == []


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "from dill import loads",
        "eval(text)",
        "os.system(text)",
        "import subprocess",
        "run(text, shell=True)",
        "np.load(file, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
        "importlib.import_module(config['auto_map'])",
        "torch.load(file)",
    ],
)
def test_the_walk_finds_it(bad):
    assert len(list(findings(ast.parse(bad), "weights/x.py"))) == 1


GUARD = """
import json, os, sys
from pathlib import Path
import jax.numpy as jnp
import maxlib
from maxlib import ops, tokenization
from tests.nn.tiny import filled_llama
RUNS = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "shutil.unpack")
events = []
RENDERER = [sys.executable, "-P", Path(tokenization.__file__).with_name("_renderer.py")]
def record(event, args):
    if event in RUNS and not (event == "subprocess.Popen" and args[1][:3] == RENDERER):
        events.append((event, repr(args)))
sys.addaudithook(record)
directory = Path(sys.argv[1])
maxlib.save_pretrained(filled_llama(num_layers=1, rope=ops.Rope(12, max_length=64)), directory)
config = json.loads((directory / "config.json").read_text())
names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", None]}
(directory / "config.json").write_text(json.dumps(config | {"auto_map": names}))
for name in ("evil.py", "modeling_llama.py", "configuration_llama.py", "__init__.py"):
    (directory / name).write_text(f"open({str(directory / 'ran')!r}, 'w')")
os.chdir(directory)
(directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
tokenization.ChatTemplate.from_directory(directory)([{"role": "user", "content": "Hello"}])
try:
    maxlib.from_pretrained(directory)
except ValueError as error:
    print("refused:", error)
starters = ("maxlib.plan._run", "maxlib.distributed._launcher", "dill", "joblib", "transformers", "torch")
print((directory / "ran").exists(), events, [m for m in sys.modules if "evil" in m or m in starters])
"""


def test_code_in_a_models_directory_is_not_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", GUARD, tmp_path], capture_output=True, text=True, timeout=300, cwd=ROOT.parent
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Nor are programs started (except the interpreter that renders templates) or pickles read, by maxlib or what it
    # imports; what starts other programs is not loaded.
    assert done.stdout.splitlines()[-1] == "False [] []"


class Tags(HTMLParser):
    """Matches text that a browser would interpret."""

    def __init__(self):
        super().__init__()
        self.active: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        handlers = [name for name, value in attrs if name.startswith("on") or "javascript:" in (value or "")]
        if tag in ("script", "iframe", "object", "img", "a", "form", "b1") or handlers:
            self.active.append(f"{tag} {handlers}")


@pytest.mark.parametrize("num_runs", [1, 2])
def test_a_report_escapes_what_comes_from_data(tmp_path, num_runs):
    evil = "</pre></td><script>alert(1)</script><img src=x onerror=alert(2)><b1 onclick='x'>"
    runs = [tmp_path / f"<script>alert({i})<" for i in range(num_runs)]
    for run in runs:
        run.mkdir()
        rows = [{"step": i, "loss": 3.0 - i, evil: 1.0, "tokens_per_second": 5.0, "tokens": 9} for i in range(1, 5)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": evil, "text": evil}) + "\n")
        (run / "config.json").write_text(json.dumps({evil: evil, "environment": {"devices": evil, "jax": evil}}))
    page = observability.report(*runs, out=tmp_path / "page.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.active == []
    assert "&lt;script&gt;alert(1)" in page
