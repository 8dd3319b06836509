"""Dropout of named intermediate values, from outside of the model (Srivastava et al. 2014)."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from maxlib.nn._capture import patch


def with_dropout(model: Any, rates: Mapping[str, float], key: Key[Array, ""]) -> Any:
    """Returns a copy of `model` that drops elements of intermediate values: each is zero with its rate, else divided by
    the rest.

        noisy = nn.with_dropout(model, {"attn": 0.1, "mlp": 0.1}, jax.random.key(0))  # residual dropout

    Without this function nothing is dropped. Names are those of `nn.named_values`: "attn", "cross_attn" and "mlp" are
    what branches add to the residual stream, "embed" is the input of the first layer, "attention_pattern" are the
    probabilities of attention, which then runs as `implementation="reference"`, and "lora_input" what adapters read;
    those of one layer that read the same value drop the same elements.

    Args:
        model: An `nnx.Module`, such as a `Decoder`.
        rates: Probability of a zero, by name; 0 drops nothing.
        key: Random key, a new one for each step. Every layer draws its own numbers from it, and so does every trace of
            the copy: make a copy for each step, inside the jitted function, as `make_train_step` does.

    Raises:
        ValueError: when a rate is not in `[0, 1)`.
        KeyError, ValueError: when called, as for `nn.patch`.
    """
    if wrong := {name: rate for name, rate in rates.items() if not 0 <= rate < 1}:
        raise ValueError(f"rates of dropout must be at least 0 and below 1, got {wrong}")
    places = itertools.count()  # tells apart values of one name in a layer, such as two attentions

    def dropped(rate: float):
        def drop(x: Array, layer: Any) -> Array:
            place = jax.random.fold_in(key, next(places))
            keep = jax.random.bernoulli(place if layer is None else jax.random.fold_in(place, layer), 1 - rate, x.shape)
            return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)

        return drop

    return patch(model, {name: dropped(rate) for name, rate in rates.items() if rate})
