"""Stands in for the kernels of jax-linear-attention: what they compute by its documentation, token by token."""

import importlib.util
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp

from maxlib.ops._recurrent import jax_linear_attention, recurrence
from tests.ops import recurrences

H100 = "gpu", "NVIDIA H100 80GB HBM3"


def contract(q, k, v, g, beta, *, scale, initial_state, segment_ids, output_final_state, **unused):
    """Linear attention of q and k `B T Hk K`, v `B T H V`, log decays `B T H` or `B T H K`, steps `B T H` or None.

    A state, `B H K V`, is zero where the segment id differs from that of the token before.
    """
    q, k = (jnp.repeat(a, v.shape[2] // a.shape[2], axis=2) for a in (q, k))
    g = g if g.ndim == 4 else g[..., None]
    ids = jnp.zeros(q.shape[:2], jnp.int32) if segment_ids is None else segment_ids
    new = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    shape = (*v.shape[::2], k.shape[-1], v.shape[-1])
    state = jnp.zeros(shape, v.dtype) if initial_state is None else initial_state
    assert state.shape == shape and output_final_state

    def step(state, token):
        q, k, v, g, new, *beta = token
        state = jnp.where(new[:, None, None, None], 0, jnp.exp(g)[..., None] * state)
        if beta:
            v = beta[0][..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, state, precision="highest"))
        state = state + k[..., None] * v[..., None, :]
        return state, scale * jnp.einsum("bhk,bhkv->bhv", q, state, precision="highest")

    tokens = (q, k, v, g, new) if beta is None else (q, k, v, g, new, beta)
    state, out = jax.lax.scan(step, state, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), tokens))
    return jnp.moveaxis(out, 0, 1), state


def reference(q, k, v, g, beta, *, grouped_key_grads=False, **options):
    """The package's own definition, which takes as many heads of keys as of values."""
    from jla.ops import reference as package

    q, k = (jnp.repeat(a, v.shape[2] // a.shape[2], axis=2) for a in (q, k))
    if beta is None:
        return package.simple_gla(q, k, v, g, **options)
    return (package.gated_delta_rule if g.ndim == 3 else package.kda)(q, k, v, g, beta, **options)


def install(monkeypatch: Any, run: Any) -> None:
    """Puts `run` in the place of the package's kernels, as if on an H100, for any shape and dtype."""
    scalar = types.SimpleNamespace(run=lambda *args, delta, **more: run(*args, **more))
    wide = types.SimpleNamespace(run=run, handles=lambda q, v: q.shape[-1] < v.shape[-1])
    kernels = lambda q, k, v, g, gates, interpret, **more: run(q, k, v, g, *gates, output_final_state=True, **more)
    vector = types.SimpleNamespace(chunked_vector_gate=kernels)
    modules = {"scalar_gate": scalar, "scalar_gate_kb": wide, "vector_gate_ops": vector}
    if importlib.util.find_spec("jla") is None:
        for name in ("jla", "jla.ops"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    package = types.ModuleType("jla.ops.mosaic_gpu")
    package.__dict__.update(modules)
    monkeypatch.setitem(sys.modules, "jla.ops.mosaic_gpu", package)
    monkeypatch.setattr(jax_linear_attention, "_refuses", lambda *call: None)
    monkeypatch.setattr(recurrence, "current_device", lambda: H100)
    recurrences._run.clear_cache()
