"""The loss of multi-token prediction, for models with `predict_ahead` (`nn.mtp.predict_ahead` has the details)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.nn.mtp import shift_left
from maxlib.training._objectives.next_token import next_token_loss
from maxlib.training._objectives.objective import COUNTS, Batch, Quotient, Stats, objective, own_losses

_INPUTS = ("positions", "segment_ids", "valid")


@objective(sums_over_rows=False, reads=())
def mtp_loss(
    model: Any,
    hidden: Float[Array, "B T D"],
    batch: Batch,
    *,
    weight: float = 0.3,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    remat_modules: nn.remat.Policy = None,
    acceptance: bool = False,
) -> tuple[Float[Array, ""], Stats]:
    """Computes `next_token_loss` plus the losses of the modules of `model.predict_ahead` (DeepSeek V3,
    arXiv:2412.19437).

    The modules add `weight` times their cross-entropy, summed over targets and averaged over modules, and the losses of
    their blocks. Additional metrics are `mtp1/nll` and `mtp1/accuracy` of the first module, and so on; the modules'
    rows are appended to the model's reports.

    Args:
        model: the model.
        hidden: its last hidden states.
        batch: as for `next_token_loss`.
        weight: factor of the modules' loss; DeepSeek V3 begins with 0.3 and ends with 0.1.
        z_loss: as in `next_token_loss`, for the model's own prediction.
        label_smoothing: as in `next_token_loss`, for the model's own prediction.
        remat_modules: what the modules keep for the backward pass.
        acceptance: True reports `mtp1/acceptance`, the share of positions where this draft and those before it are the
            model's greedy choice. Use it for evaluation, because it computes logits.

    Raises:
        ValueError: for a batch with images or audio, which the modules do not support.
    """
    if has := [name for name in ("images", "audio") if name in batch]:
        raise ValueError(
            f"multi-token prediction modules support text only, but this batch has {has[0]}: train with next_token_loss"
        )
    options = {"z_loss": z_loss, "label_smoothing": label_smoothing}
    loss, stats = next_token_loss.from_hidden(model, hidden, batch, **options)
    inputs = {name: batch[name] for name in _INPUTS if name in batch}
    modules, sums = model.predict_ahead(hidden, batch["tokens"], remat=remat_modules, **inputs), dict(stats.sums)
    for depth, module in enumerate(modules, start=1):
        added, terms = _module_loss(model, module, depth, batch["targets"])
        loss += weight / len(modules) * added + stats.num_targets * own_losses(module.aux)
        sums |= {f"mtp{depth}/{name}": quotient for name, quotient in terms.items()}
    reports = _reports(modules)
    counts = reports.pop(COUNTS, None)
    sums |= {name: rows * stats.num_targets for name, rows in reports.items()}
    if acceptance:
        sums |= acceptance_rates(model, hidden, modules)
    return loss, jax.lax.stop_gradient(Stats(stats.num_targets, sums, counts))


def _module_loss(model: Any, module: nn.mtp.MTPOutput, depth: int, targets: Int[Array, "B T"]):
    """Returns the sum of the loss over the module's targets, and its metrics, which are means over them."""
    own = jnp.where(module.valid, shift_left(targets, depth, fill=-1), -1)
    loss, terms = nn.cross_entropy(module.hidden, model.head_weight(), own, softcap=model.softcap)
    return loss, {name: Quotient(value, jnp.sum(ops.is_learned(own))) for name, value in terms.items()}


def _reports(modules: list[nn.mtp.MTPOutput]) -> dict[str, Array]:
    """Returns the reports of the modules' blocks, with a row for each module."""
    names = [name for name in (modules[0].aux if modules else ()) if all(name in module.aux for module in modules)]
    return {name: jnp.stack([module.aux[name] for module in modules]).astype(jnp.float32) for name in names}


def acceptance_rates(model: Any, hidden: Float[Array, "B T D"], modules: list[nn.mtp.MTPOutput]) -> dict[str, Quotient]:
    """Computes, for each module, the share of valid positions where greedy decoding would accept its draft and all
    before.

    `hidden` are the model's hidden states from which the modules predicted.
    """
    choices, agreed, rates = _choices(model, hidden), jnp.ones(hidden.shape[:2], bool), {}
    for depth, module in enumerate(modules, start=1):
        agreed &= _choices(model, module.hidden) == shift_left(choices, depth, fill=-1)
        rates[f"mtp{depth}/acceptance"] = Quotient(jnp.sum(agreed & module.valid), jnp.sum(module.valid))
    return rates


def _choices(model: Any, hidden: Float[Array, "B T D"]) -> Int[Array, "B T"]:
    """Returns the most probable token at each position, a few positions at a time."""
    choose = lambda h: jnp.argmax(model.logits(h[:, None])[:, 0], axis=-1)
    return jnp.swapaxes(jax.lax.map(choose, jnp.swapaxes(hidden, 0, 1), batch_size=64), 0, 1)
