"""Helpers for tests of mixtures of experts: small random layers, a reference implementation, and comparisons."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlib import adapters, nn, quantization
from tests.models.parity import QUICK

DIM, MLP, E, X = 16, 12, 6, 2
LOSSES = (nn.router.SwitchBalance(0.3), nn.router.SequenceBalance(0.2), nn.router.RouterZ(0.1))


def router(**options):
    return nn.Router(DIM, E, **{"top_k": X, "rngs": nnx.Rngs(1), **options})


def input_router():
    return nn.router.SigmoidInputRouter(DIM, E, top_k=X, rngs=nnx.Rngs(1))


def filled(make, seed=0):
    """The module with random values everywhere, biases too, and nothing to compile."""
    rng = np.random.default_rng(seed)
    draw = lambda a: jnp.asarray((rng.normal(size=a.shape) * (0.5 if a.ndim == 2 else 0.3)).astype(a.dtype))
    return jax.tree.map(draw, jax.eval_shape(make))


def moe(*, make_router=router, mlp_dim=MLP, **options):
    return filled(lambda: nn.MoE(DIM, mlp_dim, router=make_router(), rngs=nnx.Rngs(0), **options))


def with_nvfp4(layer):
    return quantization.for_training(layer, [quantization.Rule(quantization.TRAINING["nvfp4"])])


def with_dora(layer):
    rules = [adapters.Rule(adapters.LoRA(2, 4, dora=True), kinds=("expert",))]
    return adapters.add(layer, rules, rngs=nnx.Rngs(2))


def inputs(B=4, T=7, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, T, DIM)).astype(np.float32))


@jax.jit
def context(valid):
    return nn.make_context(*valid.shape, valid=valid)


def lengths(*each, T=7):
    return context(np.arange(T)[None] < np.array(each)[:, None])


@jax.jit
def call(layer, x, ctx=None):
    return layer(x, ctx)


def one_expert(layer, e, x):
    """A single expert in float64, silu gated."""
    x = np.asarray(x, np.float64)
    linear = lambda m, x: x @ np.asarray(m.w[e], np.float64).T + (0 if m.b is None else np.asarray(m.b[e], np.float64))
    gate, up = linear(layer.gate, x), linear(layer.up, x)
    return linear(layer.down, gate / (1 + np.exp(-gate)) * up)


def in_float64(layer, x, valid=None):
    """The definition, token by token, with the layer's own routing."""
    routing = jax.tree.map(np.asarray, jax.jit(layer.router)(x))
    outputs, y = [one_expert(layer, e, x) for e in range(E)], np.zeros(x.shape)
    for b in range(len(x)):
        for t in range(x.shape[1]) if valid is None else np.flatnonzero(valid[b]):
            for e, weight in zip(routing.experts[b, t], routing.weights[b, t], strict=True):
                y[b, t] += weight * outputs[e][b, t]
    return y


def close(got, want, tol=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=tol * max(1, np.abs(np.asarray(b)).max())), got, want
    )


def value_and_gradients(run, layer, x):
    """Of a loss that weighs every output differently: the value, and gradients by path."""
    trainable, rest = nn.partition(layer)

    def loss(trainable, x):
        y = run(nn.combine(trainable, rest), x)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape)))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), compiler_options=QUICK)(trainable, x)
