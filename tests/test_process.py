"""Global state of the process (a notebook or a server) that maxlib must not change."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WATCHED = """if True:
    import logging, signal, sys, threading, time

    def process():
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        absl = logging.getLogger("absl")
        return sys.excepthook, threading.excepthook, sys.unraisablehook, handlers, absl.filters[:], absl.level

    def threads():
        return {thread for thread in threading.enumerate() if "maxlib" in thread.name}

    import absl.logging, jax, orbax.checkpoint  # what these do to a process is theirs
    before = process()
"""


def left_alone(body: str, directory: Path, **environment: str) -> None:
    """Runs `body`, then compares the state of the process with that before."""
    after = """
    assert process() == before, (process(), before)
    while threads():  # they end by themselves, and a test that waits for ever fails
        time.sleep(0.05)
    print("left alone")
    """
    done = subprocess.run(
        [sys.executable, "-c", WATCHED + body + after, str(directory)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("left alone\n"), done.stdout + done.stderr


def test_imports_and_a_trainer_change_nothing(tmp_path):
    """All modules, then a run with metrics on disk and data that is read ahead.

    Imports start no backend: else `jax.distributed.initialize` after them fails, and XLA's flags come too late. The
    run keeps its compiled programs in the user's cache.
    """
    body = """
    import importlib, pkgutil, maxlib
    from jax._src import xla_bridge
    lacking = "maxlib.kernels", "maxlib.ops._attention.tokamax", "maxlib.inference._harness"  # packages, on some machines
    for module in pkgutil.walk_packages(maxlib.__path__, "maxlib."):
        if "__main__" not in module.name and not module.name.startswith(lacking):
            importlib.import_module(module.name)
    assert process() == before, "imports"
    assert not xla_bridge.backends_are_initialized()
    jax.devices()
    before = process()
    from flax import nnx
    from maxlib import data, ops, training
    from maxlib.models import llama
    rope = ops.Rope(8, max_length=16)
    cfg = llama.Config(vocab=32, num_layers=1, dim=16, mlp_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, rope=rope)
    documents = data.in_memory([list(range(1, 30))]).repeat()
    loader = data.Loader(lambda part: data.pack(documents[part], length=8), batch_size=2, num_shards=1)
    build = lambda: llama.Llama(cfg, rngs=nnx.Rngs(0))
    trainer = training.Trainer(build, optimizer=training.adamw(1e-3), loader=loader, directory=sys.argv[1])
    assert process() == before
    assert trainer.fit(2)["loss"] > 0
    loader.close()
    """
    left_alone(body, tmp_path, JAX_COMPILATION_CACHE_DIR="", XDG_CACHE_HOME=str(tmp_path))
    assert list((tmp_path / "maxlib" / "compiled").glob("jit*"))


@pytest.mark.parametrize("asked", [False, True])
def test_initialize_hooks_exceptions_only_when_asked(asked, monkeypatch):
    import jax

    from maxlib.distributed import _initialize

    monkeypatch.setattr(_initialize, "rendezvous", lambda *_, **__: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(sys, "excepthook", before := sys.excepthook)
    monkeypatch.delenv(_initialize.EXIT_ON_ERROR, raising=False)
    _initialize.initialize("localhost:1234", 2, 0, exit_on_error=asked)
    assert (sys.excepthook is before) != asked
    monkeypatch.setattr(sys, "excepthook", before)
    monkeypatch.setenv(_initialize.EXIT_ON_ERROR, "1")  # as the launcher does
    _initialize.initialize("localhost:1234", 2, 0)
    assert sys.excepthook is not before
