"""The cache of compiled programs, which `Trainer` and the examples turn on."""

import os
import subprocess
import sys

import jax
import pytest

import maxlib

PROGRAM = """
import jax, jax.numpy as jnp, maxlib
jnp.ones(3) + 1  # what is compiled before does not matter
print(maxlib.enable_compilation_cache())
jax.jit(lambda x: jnp.sort(jnp.sin(x) @ x.T, axis=0))(jnp.ones((64, 64)))
"""


def test_programs_are_kept_in_the_users_cache(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, check=True, capture_output=True, text=True
    ).stdout
    assert printed.split() == [str(tmp_path / "maxlib" / "compiled")]
    assert list((tmp_path / "maxlib" / "compiled").glob("jit*"))


@pytest.fixture
def _config():
    names = "jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("_config")
def test_what_is_set_in_jax_stays(tmp_path, monkeypatch):
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    assert maxlib.enable_compilation_cache(tmp_path) == "elsewhere"
    jax.config.update("jax_compilation_cache_dir", None)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no directory can be made there
    assert maxlib.enable_compilation_cache() is None and jax.config.jax_compilation_cache_dir is None
    jax.config.update("jax_enable_compilation_cache", False)
    assert maxlib.enable_compilation_cache(tmp_path) is None
