"""muP's coordinate check: the size of every layer's output in the first steps, for models of several widths."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from maxlib.training._state import make_state
from maxlib.training._step import jit_step, make_train_step
from maxlib.training.losses import Batch, LossFunction
from maxlib.training.probes._layers import observe


def mup_coord_check(
    build: Callable[[int], Any],
    widths: Sequence[int],
    *,
    optimizer: Callable[[Any], optax.GradientTransformation],
    batches: Sequence[Batch],
    loss: LossFunction,
) -> dict[str, Float[np.ndarray, "W S"]]:
    """Trains a model in several widths for a few steps and records the size of every layer's output (for muP).

    If the sizes do not depend on the width, one learning rate works for all widths (arXiv:2203.03466, appendix D.1).
    Outputs are recorded on the first batch, before each step and after the last. An output of sizes `x` after the last
    step grows as the width to the power `np.polyfit(np.log(widths), np.log(x[:, -1]), 1)[0]`.

    Args:
        build: Function from a width to a model.
        widths: At least two widths.
        optimizer: Function from the (abstract) model to an optimizer, so that it may end with
            `scale_by_path(mup_lr_factors(model, base), model=model)`; use the learning rate that you want to check.
        batches: One batch per step; a few are enough.
        loss: The training loss.

    Returns:
        By layer (`layers.3.attn.q`, and `logits`), the root mean square of its output, by width and number of steps.

    Raises:
        ValueError: when there are fewer than two widths, or the models have different layers.
    """
    if len(set(widths)) < 2:
        raise ValueError(f"growth needs at least two widths, got {list(widths)}")
    by_width = [_one_width(lambda width=width: build(width), optimizer, batches, loss) for width in widths]
    if any(sizes.keys() != by_width[0].keys() for sizes in by_width):
        raise ValueError("models of all widths must have the same layers; let build change widths only")
    return {name: np.array([sizes[name] for sizes in by_width]) for name in by_width[0]}


def _one_width(build, optimizer, batches, loss) -> dict[str, list[float]]:
    chosen = optimizer(jax.eval_shape(build))
    state, step = make_state(jax.jit(build)(), chosen), jit_step(make_train_step(loss, chosen))
    seen = [_sizes(state.model, batches[0], loss)]
    for batch in batches:
        state, _ = step(state, batch)
        seen.append(_sizes(state.model, batches[0], loss))
    return {name: [sizes[name] for sizes in seen] for name in seen[0]}


def _sizes(model: Any, batch: Batch, loss: LossFunction) -> dict[str, float]:
    outputs = observe(model, batch, loss).outputs
    return {name: seen["rms"] for name, seen in outputs.items()} | {"logits": float(_logits(model, batch["tokens"]))}


@jax.jit
def _logits(model: Any, tokens: Int[Array, "B T"]) -> Float[Array, ""]:
    return jnp.sqrt(jnp.mean(jnp.square(model.logits(model(tokens, dtype=jnp.float32).hidden))))
