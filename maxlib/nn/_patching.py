"""What `capture` and `patch` are used for: router replay, and dropout from outside of the model.

Router replay (R3, arXiv:2510.11370): a trainer uses the experts that the engine chose when it sampled. Engine and
trainer round differently, so some tokens would go to other experts, and the ratio of their probabilities would be that
of two networks. Only the choice is replayed: weights come from the current scores, so routers learn.

Shapes: B rows, T tokens, M layers with experts, X chosen experts of a token.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Key

from maxlib.nn._capture import capture, patched
from maxlib.nn.decoder._context import natural_order
from maxlib.sharding.layers import can_zigzag, zigzag

EXPERTS = "router_experts"  # the name of the chosen ids
_AXES = ("batch", "seq", None, None)


def record(model: Any) -> Callable[..., tuple[Any, Int[Array, "B T M X"]]]:
    """Returns a function that calls `model` and also returns the experts of each token, `B T M X` int16.

    It is called as the model is: `output, routes = nn.router.record(model)(tokens)`.

    Args:
        model: A `Decoder` with experts.
    """

    def run(tokens: Int[Array, "B T"], **inputs: Any) -> tuple[Any, Int[Array, "B T M X"]]:
        output, values = capture(model, EXPERTS)(tokens, **inputs)
        # [M, B, T, X] -> [B, T, M, X]
        return output, jnp.moveaxis(values[EXPERTS], 0, 2).astype(jnp.int16)

    return run


def replay(model: Any, routes: Int[Any, "B T M X"]) -> Any:
    """Returns a copy of `model` whose routers choose the experts `routes`.

    A `post_training.PolicyLoss` does this itself for a batch with `routed_experts`. Expert counts, and with them
    balancing, follow the replayed ids. Within the stages of a pipeline no value can be replaced, which raises
    ValueError.

    Args:
        model: A `Decoder` with experts.
        routes: Ids of the chosen experts, in any order, with a row for each layer with experts or for each layer of the
            model. Tokens with a negative id, such as padding and a text's last token, choose for themselves.

    Raises:
        ValueError: when `routes` has another number of layers, or when called, of rows, tokens or experts per token.
    """
    layers = _expert_layers(model)
    if routes.ndim != 4 or routes.shape[2] not in (len(layers), len(model.layers)):
        raise ValueError(
            f"routes must be B T M X, with M = {len(layers)} layers with experts or all {len(model.layers)} layers, got the "
            f"shape {routes.shape}"
        )
    row_of = np.arange(len(model.layers))
    if routes.shape[2] == len(layers):
        row_of[layers] = np.arange(len(layers))

    def chosen(experts: Int[Array, "B T X"], layer: Any) -> Int[Array, "B T X"]:
        of_layer = jax.lax.dynamic_index_in_dim(jnp.asarray(routes), jnp.asarray(row_of)[layer], axis=2, keepdims=True)
        if of_layer[:, :, 0].shape != experts.shape:
            raise ValueError(f"routes of a layer must be {experts.shape}, as its router's, got {of_layer.shape}")
        if model.layers.is_reorderable and can_zigzag(experts.shape[1]) and not natural_order.value:
            of_layer = zigzag(of_layer, *_AXES)
        of_layer = of_layer[:, :, 0].astype(experts.dtype)
        return jnp.where(jnp.any(of_layer < 0, axis=-1, keepdims=True), experts, of_layer)

    return patched(model, {EXPERTS: chosen}, in_order=False)


def route_rows(routes: Sequence[Int[np.ndarray, "_ M X"]], *, length: int) -> Int[np.ndarray, "B T M X"]:
    """Pads the routes of texts to rows for `replay`, int16; tokens without routes get -1.

    vLLM's `routed_experts` are such arrays: all layers, and all tokens of prompt and completion but the last, which it
    never reads. For a packed row, pad each text to its number of tokens and concatenate.

    Args:
        routes: Ids of experts for each text.
        length: Number of tokens in a row.

    Raises:
        ValueError: when a text has more than `length` tokens.
    """
    arrays = [np.asarray(route) for route in routes]
    if (longest := max(map(len, arrays))) > length:
        raise ValueError(f"the routes of a text must fit a row of {length} tokens, got {longest}")
    rows = np.full((len(arrays), length, *arrays[0].shape[1:]), -1, np.int16)
    for row, route in zip(rows, arrays, strict=True):
        row[: len(route)] = route
    return rows


def _expert_layers(model: Any) -> list[int]:
    """Returns the numbers of the layers that have a router."""

    def has_router(i: int) -> bool:
        _, group, slot = model.layers.where(i)[0].split(".")
        modules = nnx.iter_modules(model.layers.groups[int(group)][int(slot)])
        return any(hasattr(module, "top_k") and hasattr(module, "num_experts") for _, module in modules)

    return [i for i in range(len(model.layers)) if has_router(i)]


def with_dropout(model: Any, rates: Mapping[str, float], key: Key[Array, ""]) -> Any:
    """Returns a copy of `model` that drops elements of intermediate values (Srivastava et al. 2014): each is zero with
    its rate, else divided by the rest.

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

    return patched(model, {name: dropped(rate) for name, rate in rates.items() if rate}, in_order=False)
