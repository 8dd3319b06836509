"""Partition and combine, on a model with leaves that must not be trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn
from tests.nn.tiny import filled_llama, tiny_llama, tokens


@pytest.fixture(scope="module")
def model():
    return filled_llama(num_layers=3)


class Routed(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((2, 2)), axes=("embed", "mlp"))
        self.bias = nnx.Variable(jnp.zeros(2), axes=("expert",))
        self.codes = nnx.Param(jnp.arange(2, dtype=jnp.int8), axes=("embed",))


def test_only_floating_parameters_are_trained():
    trainable, rest = nn.partition(Routed())
    assert list(trainable) == ["w"]
    grads = jax.grad(lambda t: jnp.sum(nn.combine(t, rest).w[...] ** 2))(trainable)
    np.testing.assert_array_equal(grads["w"], 2 * np.ones((2, 2)))


def test_partition_and_combine_are_inverse(model):
    again = nn.combine(*nn.partition(model))
    assert jax.tree.structure(again) == jax.tree.structure(model)
    jax.tree.map(np.testing.assert_array_equal, model, again)


def test_filters_and_axes_see_logical_names(model):
    trainable, rest = nn.partition(model, lambda path, v: path.startswith("layers.attn."))
    assert {nn.tree.pattern_paths(model)[p] for p in trainable} == {f"layers.attn.{n}.w" for n in "qkvo"}
    assert "embed.w" not in trainable
    assert nn.tree.axes(model)["layers.groups.0.0.attn_norm.scale"] == ("layers", "norm")
    assert nn.variables(model)["layers.groups.0.0.attn_norm.scale"].get_value().ndim == 2
    run = jax.jit(lambda model: model(tokens(1, 3), dtype=jnp.float32).hidden)
    np.testing.assert_array_equal(run(nn.combine(trainable, rest)), run(model))


def test_combine_refuses_unknown_paths():
    trainable, rest = nn.partition(jax.eval_shape(tiny_llama))
    with pytest.raises(KeyError, match=r"no place in the model for \['head.x'\]"):
        nn.combine(trainable | {"head.x": jnp.ones(1)}, rest)


class Beside(nn.tree.HasFrozen):
    frozen_parts = ("teacher",)

    def __init__(self, student, teacher):
        self.student, self.teacher = student, teacher


def test_the_default_filter_leaves_frozen_parts_out_wherever_they_are():
    both = {"pair": Beside(Routed(), Routed()), "teacher": Routed()}
    assert sorted(nn.partition(both, nn.tree.default_filter(both))[0]) == ["pair.student.w", "teacher.w"]
    alone = Beside(Routed(), Routed())
    assert sorted(nn.partition(alone, nn.tree.default_filter(alone))[0]) == ["student.w"]
    assert sorted(nn.partition(Routed(), nn.tree.default_filter(Routed()))[0]) == ["w"]
