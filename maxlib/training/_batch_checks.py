"""Checks of batches: names that no loss reads, and values that would silently train the wrong thing."""

import difflib
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from maxlib import nn, ops
from maxlib._utils.arguments import check_array

INPUTS = ("positions", "segment_ids", "valid", "images", "audio", "source")
# Other libraries' names for the inputs.
_ELSEWHERE = {
    "tokens": ("input_ids", "token_ids", "inputs"),
    "targets": ("labels", "label_ids", "target_ids"),
    "positions": ("position_ids", "inputs_position"),
    "segment_ids": ("segments", "segmentation", "inputs_segmentation", "document_ids", "doc_ids", "sequence_ids"),
    "valid": ("attention_mask", "padding_mask", "key_padding_mask"),
    "loss_weights": ("weights", "token_weights", "loss_scale"),
    "images": ("pixel_values",),
    "audio": ("input_features",),
    "old_log_probs": ("old", "old_logps", "old_per_token_logps", "behavior_log_probs"),
    "sampler_log_probs": ("rollout_log_probs", "sampling_per_token_logps", "inference_logps"),
    "reference_log_probs": ("reference", "ref_log_probs", "ref_logps", "ref_per_token_logps"),
    "desirable": ("good", "label", "labels"),
    "kl_baseline": ("z", "kl"),
}
# Entries of maxlib's batches that a loss need not read.
_MADE = {*_ELSEWHERE, "sources", "advantages", "sampler", "weight_versions", "mismatched", "reference_sampler"}
_MADE |= {"teacher_ids", "teacher_log_probs", "teacher_sampler"}
_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "target_mask", "prompt_mask", "mask")


def check_batch_names(loss: str, batch: dict[str, Any], reads: Collection[str]) -> None:
    """Raises ValueError for a token mask or weights that the loss does not read, and for another library's name of an
    input that it reads.

    Args:
        loss: Name of the loss.
        batch: Arrays by name; nested batches are checked too.
        reads: Names that the loss reads besides tokens, targets and the model's other inputs.
    """
    known = {"tokens", "targets", *INPUTS, *reads}
    for name, x in batch.items():
        if isinstance(x, dict):
            check_batch_names(loss, x, reads)
        if name in _MASKS and name not in known:
            raise ValueError(
                f"{loss} does not read batch[{name!r}]: set targets to -1 where nothing is learned, and omit it"
            )
        if name == "loss_weights" and name not in known:
            raise ValueError(
                f"{loss} does not read batch['loss_weights'], so all targets would weigh the same: omit them, or train with "
                "training.NextToken, MTP or DFT"
            )
        if name not in {*known, *_MADE} and (meant := _meant(name, known - batch.keys())) is not None:
            raise ValueError(f"{loss} reads batch[{meant!r}], got {name!r}: rename it, or omit it")


def check_batch(batch: Any, name: str = "batch") -> None:
    """Raises TypeError unless a batch is a dictionary of arrays, in dictionaries of any depth.

    Args:
        batch: The batch.
        name: How the message calls it.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f'a {name} must be a dictionary of arrays, such as {{"tokens": ..., "targets": ...}}, got '
            f"{type(batch).__name__}; give its parts names"
        )
    for key, x in batch.items():
        here = f"{name}[{key!r}]"
        if isinstance(x, Mapping):
            check_batch(x, here)
        elif (isinstance(x, list | tuple) and not hasattr(x, "_fields")) or type(x).__module__.startswith("torch"):
            check_array(x, here)


def check_has_targets(loss: str, batch: dict[str, Any]) -> None:
    """Raises ValueError for tokens without targets."""
    if "tokens" in batch and "targets" not in batch:
        raise ValueError(
            f"{loss} reads batch['targets'], the token that follows each of batch['tokens'], or -1 where nothing is "
            "learned: for rows of ids, tokens are ids[:, :-1] and targets ids[:, 1:]"
        )


def warn_of_unread(loss: str, batch: dict[str, Any], reads: Collection[str]) -> None:
    """Warns about other names that the loss does not read; takes the arguments of `check_batch_names`."""
    for name in batch.keys() - {"tokens", "targets", *INPUTS, *reads, *_MADE}:
        warnings.warn(
            f"{loss} does not read batch[{name!r}]: omit it, or read it in a loss of your own (training.Loss)",
            stacklevel=2,
        )


def _meant(name: str, absent: Collection[str]) -> str | None:
    """Returns the missing name that `name` probably means."""
    elsewhere = [ours for ours, theirs in _ELSEWHERE.items() if ours in absent and name in theirs]
    return next(iter(elsewhere or difflib.get_close_matches(name, sorted(absent), 1, cutoff=0.8)), None)


def check_first_batch(batch: dict[str, Any], model: Any) -> None:
    """Raises ValueError for tokens, targets or positions beyond the model's and for images and audio that do not
    match their placeholders, and warns about targets that are not shifted.

    Args:
        batch: This host's rows; nested batches are checked too.
        model: The trained model; tokens are only checked if it has `embed`, targets if it has `head_weight`, positions
            if it has `max_length`.
    """
    check_ids(batch, model)
    model = trained_model(model)
    read = "tokens", "targets", "segment_ids", "valid", "positions"
    for inner in _batches(batch):
        # On the host: eager operations on devices would be compiled one by one.
        arrays = {name: np.asarray(inner[name]) for name in read if inner.get(name) is not None}
        _check_padding(arrays)
        if isinstance(model, nn.MultimodalModel) and "tokens" in arrays:
            source = {"source": inner["source"]} if "source" in inner else {}
            model.check_inputs(arrays["tokens"], images=inner.get("images"), audio=inner.get("audio"), **source)
        _check_positions(arrays, getattr(model, "max_length", None))
        warn_of_copies(arrays)


def check_ids(batch: dict[str, Any], model: Any) -> None:
    """Raises ValueError for tokens and targets outside of the model's vocabulary; a step makes their loss NaN.

    Args:
        batch: This host's rows; nested batches are checked too.
        model: The trained model.
    """
    model = trained_model(model)
    rows = model.embed.w.shape[0] if isinstance(getattr(model, "embed", None), nn.Embed) else None
    scores = isinstance(getattr(model, "head", None), nn.ScoreHead | nn.EmbeddingHead)  # its loss reads targets or not
    has_vocab = hasattr(model, "head_weight") and not scores
    vocab = jax.eval_shape(lambda model: model.head_weight(), model).shape[0] if has_vocab else None
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
            "are the next tokens, tokens[:, :-1] and tokens[:, 1:] of the same text (Hugging Face shifts labels inside the model)",
            stacklevel=2,
        )


def trained_model(model: Any) -> Any:
    """Returns the model that is trained: that of a `post_training.WithFrozen`, or the model itself."""
    return getattr(model, "trained", model)


def with_trained_model(model: Any, trained: Any) -> Any:
    """Returns the model with another one in the place of `trained_model(model)`."""
    if trained_model(model) is model:
        return trained
    new = jax.tree.map(lambda leaf: leaf, model)
    new.trained = trained
    return new


def _batches(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the batch and its nested batches that have targets."""
    if "targets" in batch:
        yield batch
    for x in batch.values():
        if isinstance(x, dict):
            yield from _batches(x)
