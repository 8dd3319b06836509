"""A model, batches and a loader small enough to train in tests."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlib import nn, training
from maxlib.sharding import constrain
from maxlib.training import _trainer
from tests.nn import tiny as nn_tiny
from tests.nn.tiny import tiny_llama

VOCAB = 32
QUICKLY = {"xla_backend_optimization_level": "0"}  # compiling is what takes the time here
jit_step = functools.partial(jax.jit, donate_argnums=0, compiler_options=QUICKLY)
loss = functools.partial(training.NextToken(), dtype=jnp.float32)  # a plain function
_train_step, _eval_step = functools.cache(training.make_train_step), functools.cache(training.make_eval_step)


def share_steps(monkeypatch) -> None:
    """Trainers of one loss and one optimizer share a step, which is traced and compiled once.

    A trainer with a layout needs a loss of its own: what was traced for one layout must not run under another.
    """
    monkeypatch.setattr(_trainer, "make_train_step", _train_step)
    monkeypatch.setattr(_trainer, "make_eval_step", _eval_step)
    monkeypatch.setattr(_trainer, "jit_step", jit_step)


class Layer(nnx.Module):
    def __init__(self, dim: int = 16, *, rngs: nnx.Rngs):
        self.norm = nn.RMSNorm(dim)
        self.mlp = nn.MLP(dim, 3 * dim // 2, bias=True, rngs=rngs)

    def __call__(self, x: Any, ctx: Any, cache: Any):
        return constrain(x + self.mlp(self.norm(x)), "batch", "seq", "act_embed"), cache, {}


class Bigram(nnx.Module):
    """A model without attention, which traces and compiles in no time."""

    softcap = None

    def __init__(self, dim: int = 16, kinds: str | int = "abb", *, rngs: nnx.Rngs):
        self.embed = nn.Embed(VOCAB, dim, rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: Layer(dim, rngs=rngs), kinds, rngs=rngs)
        self.head = nn.Embed(VOCAB, dim, rngs=rngs)

    def __call__(self, tokens, *, positions=None, segment_ids=None, valid=None, cache=None, dtype=None, remat=None):
        x, _, aux = self.layers(self.embed(tokens, dtype=dtype), remat=remat)
        return nn.Output(x, None, aux)

    def head_weight(self):
        return self.head.w[...]

    def logits(self, hidden):
        return self.head.logits(hidden)


@jax.jit
def model():
    return Bigram(rngs=nnx.Rngs(0))


SIZES = {"num_layers": 2, "dim": 16, "mlp_dim": 24, "num_heads": 2, "vocab": VOCAB}


def llama(**changes):
    return tiny_llama(**SIZES | changes)


def filled_llama(**changes):
    """With other values, which take no program."""
    return nn_tiny.filled_llama(**SIZES | changes)


def optimizer(model, learning_rate=1e-2, **options):
    return training.adamw(learning_rate, mask=training.decay_mask(model), **options)


def batch(rows: int = 8, length: int = 12, *, vocab: int = VOCAB, seed: int = 0, uneven: bool = False) -> dict:
    """Next-token pairs, in numpy as a loader gives them; `uneven` leaves every row another number of targets, the first
    none.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, length + 1), dtype=np.int32)
    targets = tokens[:, 1:].copy()
    if uneven:
        targets[np.arange(length)[None, :] >= length * np.arange(rows)[:, None] / rows] = -1
    return {"tokens": tokens[:, :-1], "targets": targets}


class Loader:
    """Batches by number; the number is the state."""

    def __init__(self, num_batches: int = 1000, rows: int = 8):
        self.num_batches, self.rows, self.next = num_batches, rows, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.num_batches:
            raise StopIteration
        self.next += 1
        return batch(self.rows, seed=self.next)

    def reset(self):
        self.next = 0

    def get_state(self):
        return {"0": {"next": self.next}}

    def set_state(self, state):
        self.next = state["0"]["next"]


def by_autodiff(loss):
    """Returns gradients, mean and statistics of a loss as a function, as those of a step."""

    def gradients(params, rest, data, key):
        def mean(params):
            value, stats = loss(nn.combine(params, rest), data, key)
            return value / stats.num_targets, stats

        (value, stats), grads = jax.value_and_grad(mean, has_aux=True)(params)
        return grads, value, stats

    return gradients
