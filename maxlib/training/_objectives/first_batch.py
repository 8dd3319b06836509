"""Checks of a run's first batch, on the host: values that would silently train the wrong thing."""

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from maxlib import nn, ops
from maxlib.training._objectives.second_model import WithFrozen


def check_first_batch(batch: dict[str, Any], model: Any) -> None:
    """Raises ValueError for tokens, targets or positions beyond the model's and for images and audio that do not
    match their placeholders, and warns about targets that are not shifted.

    Args:
        batch: This host's rows; nested batches are checked too.
        model: The trained model; tokens are only checked if it has `embed`, targets if it has `head_weight`, positions
            if it has `max_length`.
    """
    check_ids(batch, model)
    model = model.trained if isinstance(model, WithFrozen) else model
    read = "tokens", "targets", "segment_ids", "valid", "positions"
    for found in _batches(batch):
        # On the host: eager operations on devices would be compiled one by one.
        part = {name: np.asarray(found[name]) for name in read if found.get(name) is not None}
        _check_padding(part)
        if isinstance(model, nn.MultimodalModel) and "tokens" in part:
            model.check_inputs(part["tokens"], images=found.get("images"), audio=found.get("audio"))
        _check_positions(part, getattr(model, "max_length", None))
        warn_of_copies(part)
        _warn_of_restarts(part)


def check_ids(batch: dict[str, Any], model: Any) -> None:
    """Raises ValueError for tokens and targets outside of the model's vocabulary; a step makes their loss NaN.

    Args:
        batch: This host's rows; nested batches are checked too.
        model: The trained model.
    """
    model = model.trained if isinstance(model, WithFrozen) else model
    rows = model.embed.w.shape[0] if isinstance(getattr(model, "embed", None), nn.Embed) else None
    vocab = jax.eval_shape(lambda model: model.head_weight(), model).shape[0] if hasattr(model, "head_weight") else None
    for inner in _batches(batch):
        targets, tokens = np.asarray(inner["targets"]), np.asarray(inner.get("tokens", ()))
        # Only targets have a number that stands for none.
        for name, ids, limit in (("targets", targets[ops.is_learned(targets)], vocab), ("tokens", tokens, rows)):
            if limit is not None and (bad := ids[(ids < 0) | (ids >= limit)]).size:
                other = "except -1 where nothing is learned" if name == "targets" else "also at padding"
                raise ValueError(
                    f"{name} must be below the model's vocabulary of {limit} tokens and not negative, {other}; the first "
                    f"batch has {bad[0]}: is this the model's tokenizer?"
                )


def _check_padding(batch: dict[str, Any]) -> None:
    """Raises ValueError for targets at padding, which attends to nothing; the loss would learn them."""
    packed = "segment_ids" in batch
    mask, targets = batch.get("segment_ids" if packed else "valid"), np.asarray(batch["targets"])
    if mask is None or np.shape(mask) != targets.shape:
        return
    if count := int(np.sum((np.asarray(mask) == 0) & ops.is_learned(targets))):
        says = "segment_ids is 0" if packed else "valid is False"
        raise ValueError(
            f"{count} targets of the first batch are at padding, where {says}: set them to -1"
            + ("; segment_ids count documents from 1, and 0 is padding" if packed else "")
        )


def _warn_of_restarts(batch: dict[str, Any]) -> None:
    """Warns about positions that restart within a row without segment_ids."""
    positions, valid = batch.get("positions"), np.asarray(batch.get("valid", True))
    if positions is None or "segment_ids" in batch or np.ndim(positions) != 2:
        return
    at = np.asarray(positions)
    falls = at[:, 1:] < at[:, :-1]  # [B, T - 1]: True if the position decreases at the next token
    real = np.broadcast_to(valid != 0, at.shape)
    if (falls & real[:, 1:] & real[:, :-1]).any():
        warnings.warn(
            "positions of the first batch restart within a row, but there are no segment_ids: its documents attend to "
            "one "
            "another. Number them from 1 in batch['segment_ids']",
            stacklevel=2,
        )


def _check_positions(batch: dict[str, Any], limit: int | None) -> None:
    """Raises ValueError for a document of over `limit` tokens in packed or padded rows; inside jit it is not known."""
    documents, places = batch.get("segment_ids", batch.get("valid")), batch.get("positions")
    if limit is None or (documents is None and places is None):
        return
    places = _places(np.asarray(documents)) if places is None else np.asarray(places)
    if documents is not None:
        places = places[np.asarray(documents) != 0]  # without padding
    if (longest := np.max(places, initial=-1) + 1) > limit:
        raise ValueError(
            f"the first batch has {longest} positions in one document, but the model supports {limit}: pack rows of at "
            "most that many tokens, or build the model with a longer rope (larger max_length, and a scaling)"
        )


def _places(segment_ids: np.ndarray) -> np.ndarray:
    """Returns the position of each token, `B T`, in its document."""
    column = np.broadcast_to(np.arange(segment_ids.shape[1]), segment_ids.shape)
    continues = np.pad(segment_ids[:, 1:] == segment_ids[:, :-1], ((0, 0), (1, 0)))
    return column - np.maximum.accumulate(np.where(continues, 0, column), axis=1)


def warn_of_copies(batch: dict[str, Any]) -> None:
    """Warns if every target is the token at its own position instead of the next one, like Hugging Face's labels."""
    if "tokens" not in batch or np.shape(batch["tokens"]) != np.shape(batch["targets"]):
        return
    tokens, targets = np.asarray(batch["tokens"]), np.asarray(batch["targets"])
    learned = ops.is_learned(targets)
    is_next = (targets[..., :-1] == tokens[..., 1:]) | ~learned[..., :-1]
    if learned.any() and (targets == tokens)[learned].all() and not is_next.all():
        warnings.warn(
            "every target of the first batch is the token at its own position, so the model learns to copy: targets "
            "are the next "
            "tokens, tokens[:, :-1] and tokens[:, 1:] of the same text (Hugging Face shifts labels inside the model)",
            stacklevel=2,
        )


def _batches(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the batch and its nested batches that have targets."""
    if "targets" in batch:
        yield batch
    for x in batch.values():
        if isinstance(x, dict):
            yield from _batches(x)
