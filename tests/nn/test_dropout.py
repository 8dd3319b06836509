"""Dropout by name: the right share, a mask for each layer, the same under remat, and by the key of the step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import adapters, nn, training
from maxlib.training._step import make_gradient
from tests.nn.tiny import filled_llama, tokens
from tests.training.tiny import QUICKLY

KEY = jax.random.key(0)


@functools.partial(jax.jit, compiler_options=QUICKLY)
def call(model, ids):
    return model(ids, dtype=jnp.float32)


def captured(model, names, ids):
    return jax.jit(nn.capture(model, names), static_argnames="dtype", compiler_options=QUICKLY)(ids, dtype=jnp.float32)[
        1
    ]


@pytest.fixture(scope="module")
def model():
    return filled_llama(num_layers=2)


def test_values_are_dropped_and_scaled_in_every_layer_by_itself(model):
    ids = tokens(2, 32)
    noisy = nn.with_dropout(model, {"attn": 0.25, "mlp": 0.0}, KEY)
    values = captured(noisy, ["resid_pre", "attn", "resid_mid"], ids)
    added = np.asarray(values["resid_mid"] - values["resid_pre"])
    dropped = np.asarray(values["attn"]) == 0  # captured after what replaces it
    np.testing.assert_allclose(dropped.mean(axis=(1, 2, 3)), 0.25, atol=0.03)
    assert (np.abs(added[dropped]) < 1e-6).all()
    assert len({layer.tobytes() for layer in dropped}) == 2
    first = np.asarray(captured(model, "attn", ids)["attn"][0])
    np.testing.assert_allclose(values["attn"][0], np.where(dropped[0], 0, first / 0.75), atol=1e-6)


def test_the_backward_pass_drops_the_same(model):
    """Under remat the forward pass runs again; and probabilities of attention may be dropped."""
    ids = tokens(1, 8)

    def loss(model, remat):
        noisy = nn.with_dropout(model, {"attention_pattern": 0.3, "mlp": 0.3}, KEY)
        return jnp.sum(noisy(ids, dtype=jnp.float32, remat=remat).hidden ** 2)

    gradient = jax.jit(jax.grad(loss), static_argnums=1, compiler_options=QUICKLY)
    plain, again = (gradient(model, remat) for remat in (None, "full"))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3 * float(jnp.abs(a).max()))


def test_adapters_drop_what_they_read(model):
    """The base reads all of it: while `b` is zero, nothing changes."""
    adapted = adapters.add(model, adapters.LoRA(rank=2, alpha=2), rngs=nnx.Rngs(0))
    noisy = nn.with_dropout(adapted, {"lora_input": 0.5}, KEY)
    ids = tokens(1, 8)
    hidden = call(model, ids).hidden
    np.testing.assert_allclose(call(noisy, ids).hidden, hidden, atol=1e-5)
    for path, variable in nn.variables(noisy).items():
        if path.endswith(".b"):
            variable.set_value(jnp.ones_like(variable.get_value()))
    assert np.abs(call(noisy, ids).hidden - hidden).max() > 1e-2


def test_steps_draw_from_their_keys(model):
    ids = tokens(2, 9)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    gradient = make_gradient(training.NextToken(), dtype=jnp.float32, dropout={"mlp": 0.5})
    gradient = jax.jit(gradient, compiler_options=QUICKLY)
    parts = nn.partition(model)
    first, same, other = (gradient(*parts, batch, jax.random.key(seed))[1] for seed in (0, 0, 1))
    assert first == same != other
    assert training.make_train_step(training.NextToken(), optax.sgd(0.1), dropout={"mlp": 0.5})


def test_wrong_rates_and_names_are_errors(model):
    with pytest.raises(ValueError, match=r"below 1, got \{'mlp': 1\}"):
        nn.with_dropout(model, {"mlp": 1}, KEY)
    with pytest.raises(KeyError, match="residual"):
        jax.eval_shape(lambda ids: nn.with_dropout(model, {"residual": 0.1}, KEY)(ids), tokens(1, 4))
