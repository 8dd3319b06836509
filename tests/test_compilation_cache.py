"""The cache of compiled programs, which `Trainer` and the examples turn on (`test_process` has a run with it)."""

import jax
import pytest

import maxlib


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
