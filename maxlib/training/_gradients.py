"""The gradient of a loss by autodiff: of a batch at once, or of one microbatch after the other."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr_consts
from jaxtyping import Array

from maxlib import nn, sharding
from maxlib.training._batch_checks import trained_model, with_trained_model
from maxlib.training._placement import place_like_parameters
from maxlib.training._qk_clip import is_max_logits
from maxlib.training.losses import Batch, LossFunction, Stats

Params = dict[str, Any]


def bind_options(
    loss: LossFunction,
    *,
    dtype: Any = None,
    remat: nn.remat.Policy = None,
    neftune_alpha: float | None = None,
    dropout: Mapping[str, float] | None = None,
) -> LossFunction:
    """Returns `loss(model, batch, key)` with the options of a step, as `make_train_step` has them.

    Raises:
        TypeError: when the loss is not a function, or does not take an option.
    """
    if not callable(loss) or isinstance(loss, type):
        raise TypeError(
            f"loss must be a function loss(model, batch, key) or a training.Loss, such as training.NextToken(), got {loss!r:.80}"
        )
    options = {name: value for name, value in (("dtype", dtype), ("remat", remat)) if value is not None}
    try:
        inspect.signature(loss).bind(None, None, None, **options)
    except TypeError as error:
        raise TypeError(
            f"the step calls loss(model, batch, key{''.join(f', {name}' for name in options)}), which {loss!r} does not "
            f"take ({error}): leave out what it does not take, or derive it from training.Loss"
        ) from error

    if not options and not neftune_alpha and not dropout:
        return loss

    def bound(model: Any, batch: Batch, key: Array | None = None) -> tuple[Array, Stats]:
        if neftune_alpha or dropout:
            if key is None:
                raise ValueError(
                    "NEFTune's noise and dropout need a key: call the loss with one, loss(model, batch, key)"
                )
            trained = trained_model(model)  # a reference or a teacher beside it is neither noisy nor cut
            noisy = nn.with_dropout(trained, dropout, jax.random.fold_in(key, 1)) if dropout else trained
            noisy = with_embedding_noise(noisy, key, neftune_alpha) if neftune_alpha else noisy
            return _with_others_of(model, loss)(with_trained_model(model, noisy), batch, key, **options)
        return loss(model, batch, key, **options)

    return bound


def _with_others_of(model: Any, loss: LossFunction) -> LossFunction:
    """Returns the loss whose reference or teacher is made of this model, whatever model it is called with."""
    functions = {name: getattr(loss, name) for name in getattr(loss, "others", ())}
    fixed = {name: lambda _, make=make: make(model) for name, make in functions.items() if make is not None}
    return dataclasses.replace(cast(Any, loss), **fixed) if fixed else loss


def with_embedding_noise(model: Any, key: Array, alpha: float) -> Any:
    """Returns a model with the same arrays whose token vectors are noisy (NEFTune): uniform in ±alpha / √(L D).

    L is the number of real tokens of a document: of its segment in rows with `segment_ids`, of the row in rows with
    `valid`, and of all tokens of a row with neither. So a document has the same noise alone, padded and packed.
    """
    if not (hasattr(model, "embed_tokens") and hasattr(model, "embed_inputs")):
        raise TypeError(
            "embedding noise needs a model with embed_tokens and embed_inputs, such as an nn.Decoder, got "
            f"{type(model).__name__}"
        )
    noisy = jax.tree.map(lambda x: x, model)  # another object with the same arrays
    embed_inputs, embed_tokens = noisy.embed_inputs, noisy.embed_tokens
    documents = {}

    def noting_documents(tokens: Array, **inputs: Any) -> Any:
        documents.update({name: inputs.get(name) for name in ("segment_ids", "valid")})
        return embed_inputs(tokens, **inputs)

    def with_noise(tokens: Array, dtype: Any) -> Array:
        x = embed_tokens(tokens, dtype)
        bounds = nn.make_context(*tokens.shape, **documents)
        length = jnp.maximum(bounds.stop - bounds.start, 1)[..., None]  # B T 1; padding has none
        size = (alpha / jnp.sqrt(length * x.shape[2])).astype(x.dtype)
        return x + size * jax.random.uniform(cast(Array, key), x.shape, x.dtype, -1, 1)

    noisy.embed_inputs, noisy.embed_tokens = noting_documents, with_noise
    return noisy


def gradient(
    loss: LossFunction, trainable: Params, rest: Any, batch: Batch, key: Array, *, microbatches: int = 1
) -> tuple[Params, Array, Stats]:
    """Returns the gradient of the mean loss, the mean loss, and the statistics of the batch.

    Args:
        loss: The loss, with its options bound.
        trainable: Trained parameters by path.
        rest: The rest of the model.
        batch: The batch.
        key: Random key; each microbatch draws its own numbers.
        microbatches: Number of parts of the batch; each takes every `microbatches`-th row and is weighted by its number
            of targets.

    Raises:
        ValueError: when microbatches do not divide the rows, or arrays have other numbers of rows than the tokens.
    """
    if microbatches == 1:
        (value, stats), grads = _autodiff(loss, trainable, rest, batch, key, mean=True)
        return grads, value, stats
    check_rows(batch)
    rows = jax.tree.map(lambda x: _split_rows(x, microbatches), batch)
    xs = rows, jax.random.split(key, microbatches)
    first = jax.tree.map(lambda x: x[0], xs)

    def place(grads: Params) -> Params:
        return place_like_parameters(grads, trainable, rest)

    def add(total: Any, xs: Any) -> tuple[Any, None]:
        (value, stats), grads = _autodiff(loss, trainable, rest, *xs, mean=False)
        new = place(jax.tree.map(lambda g: g.astype(jnp.float32), grads)), value, stats
        largest = {path: jnp.maximum(total[0][path], g) for path, g in new[0].items() if is_max_logits(path)}
        grads, value, stats = jax.tree.map(jnp.add, total, new)
        return (grads | largest, value, stats), None

    (_, stats), _ = jax.eval_shape(lambda t: _autodiff(loss, t, rest, *first, mean=False), trainable)
    zeros = place(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trainable))
    start = zeros, jnp.zeros(()), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stats)
    (grads, value, stats), _ = jax.lax.scan(add, start, xs)
    # Weighting microbatches by their numbers of targets gives the mean of the whole batch.
    count = divisor(stats.num_targets)
    means = {path: g if is_max_logits(path) else (g / count).astype(trainable[path].dtype) for path, g in grads.items()}
    return means, value / count, stats


def parameters_outside(loss: LossFunction, trainable: Params, rest: Any, batch: Batch, key: Array) -> list[str]:
    """Lists the trained parameters on which a loss of this batch does not depend; weight decay alone moves them.

    Args:
        loss: The loss, with its options bound.
        trainable: Trained parameters by path, or their shapes.
        rest: The rest of the model.
        batch: The batch, or its shapes.
        key: Random key.
    """

    def total(trainable: Params, batch: Batch, key: Array) -> Array:
        return loss(nn.combine(trainable, rest), batch, key)[0]

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (trainable, batch, key))
    traced = jax.make_jaxpr(total)(*shapes)
    reached = dce_jaxpr_consts(traced.jaxpr, [True])[2]
    return [path for path, is_reached in zip(sorted(trainable), reached, strict=False) if not is_reached]


def divisor(count: Any) -> Array:
    """Returns the divisor for a number of targets, or for a sum of weights that may be below 1; 1 if it is zero."""
    return jnp.where(count > 0, count, 1)


def _autodiff(loss: LossFunction, trainable: Params, rest: Any, batch: Batch, key: Array, *, mean: bool) -> Any:
    """Returns `((loss, Stats), gradient)`, of the mean over the targets or of their sum."""

    def loss_of(trainable: Params) -> tuple[Array, Stats]:
        total, stats = _checked(loss(nn.combine(trainable, rest), batch, key))
        return total / divisor(stats.num_targets) if mean else total, stats

    value, grads = jax.value_and_grad(loss_of, has_aux=True)(trainable)
    return value, sharding.memory.to_device(grads)  # gradients of parameters in host memory are created there


def _checked(result: Any) -> tuple[Array, Stats]:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Stats):
        kinds = ", ".join(type(x).__name__ for x in (result if isinstance(result, tuple) else (result,)))
        raise TypeError(f"a loss must return its sum over the targets and a training.Stats, got ({kinds})")
    return result


def check_rows(batch: Batch) -> None:
    """Raises ValueError for arrays without a row for each row of tokens, which microbatches would mix up."""
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="."): x
        for path, x in jax.tree_util.tree_leaves_with_path(batch)
    }
    tokens = next((name for name in arrays if name.rpartition(".")[2] == "tokens"), next(iter(arrays)))
    if odd := [f"{name} {x.shape}" for name, x in arrays.items() if x.shape[:1] != arrays[tokens].shape[:1]]:
        raise ValueError(
            f"microbatches split a batch by its {arrays[tokens].shape[0]} rows of {tokens}, but these have other "
            f"numbers of rows: {', '.join(odd)}. Store them by row; images and audio as data.pack makes them"
        )


def _split_rows(x: Array, count: int) -> Array:
    """Splits a batch: each microbatch takes every `count`-th row, so that rows stay evenly spread over devices."""
    if x.shape[0] % count:
        raise ValueError(f"{count} microbatches must divide the batch's {x.shape[0]} rows; change one of them")
    # [B, ...] -> [B / count, count, ...] -> [count, B / count, ...]
    return jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1)
