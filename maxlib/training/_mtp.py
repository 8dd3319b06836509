"""The loss of multi-token prediction, for models with `predict_ahead` (`nn.predict_ahead` has the details)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib import nn
from maxlib.nn._mtp import shift_left
from maxlib.training._losses import Batch, cross_entropy

_INPUTS = ("positions", "segment_ids", "valid")


def mtp_loss(
    model: Any,
    out: nn.Output,
    batch: Batch,
    *,
    weight: float = 0.3,
    remat: nn.remat.Policy = None,
    acceptance: bool = False,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """What a training loss adds for the modules of `model.predict_ahead`: `next_token_loss(..., extra=mtp_loss)`.

    It is `weight` times their cross-entropy, summed over targets and averaged over modules (DeepSeek V3: 0.3, later
    0.1), plus their blocks' own losses. Beside it, per target token as in `Stats.sums`: `mtp1/nll` and `mtp1/accuracy`
    of the first module and so on, and the main model's reports with the modules' rows behind them. With `acceptance`
    also `mtp1/acceptance`, the share of places where this draft and those before it are the model's own greedy choice:
    for evaluation, it takes logits.
    """
    inputs = {name: batch[name] for name in _INPUTS if name in batch}
    modules = model.predict_ahead(out.hidden, batch["tokens"], remat=remat, **inputs)
    tokens = jnp.sum(batch["targets"] >= 0).astype(jnp.float32)
    total, sums = jnp.zeros(()), {}
    for depth, module in enumerate(modules, start=1):
        targets = jnp.where(module.valid, shift_left(batch["targets"], depth, fill=-1), -1)
        loss, terms = cross_entropy(module.hidden, model.head_weight(), targets, softcap=model.softcap)
        own = sum((jnp.sum(v) for name, v in module.aux.items() if name.startswith("loss/")), start=jnp.zeros(()))
        total += weight / len(modules) * loss + tokens * own
        share = tokens / jnp.maximum(jnp.sum(targets >= 0), 1)
        sums |= {f"mtp{depth}/{name}": value * share for name, value in terms.items()}
    sums |= {name: rows * tokens for name, rows in _reports(out, modules).items()}
    if acceptance:
        sums |= {name: rate * tokens for name, rate in acceptance_rates(model, out.hidden, modules).items()}
    return total, jax.lax.stop_gradient(sums)


def _reports(out: nn.Output, modules: list[nn.MTPOutput]) -> dict[str, Array]:
    """What each layer of the model reports, then each module's block."""
    names = [name for name in out.aux if modules and all(name in module.aux for module in modules)]
    rows = {name: jnp.stack([module.aux[name] for module in modules]) for name in names}
    return {name: jnp.concatenate([out.aux[name], rows[name]]).astype(jnp.float32) for name in names}


def acceptance_rates(model: Any, hidden: Float[Array, "B T D"], modules: list[nn.MTPOutput]) -> dict[str, Array]:
    """By module, the share of valid places where greedy decoding would take its draft and all drafts before it.

    hidden: the model's own, from which the modules looked ahead.
    """
    choices, agreed, rates = _choices(model, hidden), jnp.ones(hidden.shape[:2], bool), {}
    for depth, module in enumerate(modules, start=1):
        agreed &= _choices(model, module.hidden) == shift_left(choices, depth, fill=-1)
        rates[f"mtp{depth}/acceptance"] = jnp.sum(agreed & module.valid) / jnp.maximum(jnp.sum(module.valid), 1)
    return rates


def _choices(model: Any, hidden: Float[Array, "B T D"]) -> Int[Array, "B T"]:
    """The most probable token at each place, a few places at a time."""
    choose = lambda h: jnp.argmax(model.logits(h[:, None])[:, 0], axis=-1)
    return jnp.swapaxes(jax.lax.map(choose, jnp.swapaxes(hidden, 0, 1), batch_size=64), 0, 1)
