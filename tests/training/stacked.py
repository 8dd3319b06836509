"""A model with a stack of any groups, and the state of its training, without compiling anything."""

import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxlib import nn

# Seven layers, in groups of all kinds: (period, repeats) of each group.
KINDS = {
    "aaaaaaa": [[1, 7]],
    "abababc": [[2, 3], [1, 1]],
    "abcdbcd": [[1, 1], [3, 2]],
    "abcdcde": [[2, 1], [2, 2], [1, 1]],
    "abcdefg": [[7, 1]],
    "aaabbbb": [[1, 3], [1, 4]],
    "aabcdcd": [[1, 2], [1, 1], [2, 2]],
}


class Layer(nnx.Module):
    """A weight, a scale, and a count that is not trained."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.zeros((4, 8)), axes=("embed", "mlp"))
        self.scale = nnx.Param(jnp.zeros(8), axes=("norm",))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))


class Model(nnx.Module):
    def __init__(self, kinds: str = "aaaaaaa"):
        self.layers = nn.Stack(lambda _, rngs: Layer(rngs=rngs), kinds, rngs=nnx.Rngs(0))
        self.head = nnx.Param(jnp.zeros(8), axes=("embed",))


def abstract_model(kinds: str = "aaaaaaa") -> Model:
    return jax.eval_shape(lambda: Model(kinds))


def state_of(model: Model) -> dict[str, Any]:
    """Parameters, rest and moments of an abstract model; every layer's values depend on its number alone."""
    params, rest = nn.partition(model)
    state = {"params": params, "rest": rest, "opt": jax.eval_shape(optax.adamw(1e-3).init, params)}
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _fill(jax.tree_util.keystr(path), leaf, model), state)


def _fill(name: str, leaf: jax.ShapeDtypeStruct, model: Model) -> jax.Array:
    match = re.fullmatch(r"(.*)\b(groups\W+\d+\W+\d+)\b(.*)", name)
    if not match:
        return _values(name, leaf.shape, leaf.dtype)
    place = re.sub(r"\W+", ".", match[2])
    rows = [(model.layers.where(i)[1], i) for i in range(len(model.layers)) if model.layers.where(i)[0] == place]
    layer = lambda i, shape: _values(f"{match[1]}{i}{match[3]}", shape, leaf.dtype)
    if rows[0][0] is None:
        return layer(rows[0][1], leaf.shape)
    return jnp.asarray(np.stack([layer(i, leaf.shape[1:]) for _, i in sorted(rows)]))


def _values(name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.asarray((np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape) * 100).astype(dtype))
