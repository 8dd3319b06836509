"""Checks of the names in a batch: names that no loss reads would silently train the wrong thing."""

import difflib
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from maxlib._utils.arguments import check_array

INPUTS = ("positions", "segment_ids", "valid", "images", "audio")
# Other libraries' names for the inputs.
_ELSEWHERE = {
    "tokens": ("input_ids", "token_ids", "inputs"),
    "targets": ("labels", "label_ids", "target_ids"),
    "positions": ("position_ids", "inputs_position"),
    "segment_ids": ("segments", "segmentation", "inputs_segmentation", "document_ids", "doc_ids", "sequence_ids"),
    "valid": ("attention_mask", "padding_mask", "key_padding_mask"),
    "images": ("pixel_values",),
    "audio": ("input_features",),
    "old_log_probs": ("old", "old_logps", "old_per_token_logps", "behavior_log_probs"),
    "sampler_log_probs": ("rollout_log_probs", "sampling_per_token_logps", "inference_logps"),
    "reference_log_probs": ("reference", "ref_log_probs", "ref_logps", "ref_per_token_logps"),
    "desirable": ("good", "label", "labels"),
    "kl_baseline": ("z", "kl"),
}
# Entries of maxlib.post_training's batches that a loss need not read.
_MADE = {*_ELSEWHERE, "advantages", "sampler", "mismatched", "teacher_ids", "teacher_log_probs"}
_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "target_mask", "prompt_mask", "mask")


def check_batch_names(loss: str, batch: dict[str, Any], reads: Collection[str]) -> None:
    """Raises ValueError for a token mask, and for another library's name of an input that the loss reads.

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
        if name not in known and (meant := _meant(name, known - batch.keys())) is not None:
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
            f"{loss} does not read batch[{name!r}]: omit it, or read it in a loss of your own (training.objective)",
            stacklevel=2,
        )


def _meant(name: str, absent: Collection[str]) -> str | None:
    """Returns the missing name that `name` probably means."""
    elsewhere = [own for own, theirs in _ELSEWHERE.items() if own in absent and name in theirs]
    return next(iter(elsewhere or difflib.get_close_matches(name, sorted(absent), 1, cutoff=0.8)), None)
