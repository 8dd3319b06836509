"""Checks the names in `remat`: a misspelt one would silently keep nothing."""

import difflib
from typing import Any

import jax

from maxlib import nn
from maxlib.training._objectives.objective import Batch, run


def check_remat_names(remat: nn.remat.Policy, params: dict[str, Any], rest: Any, batch: Batch) -> None:
    """Raises ValueError if `remat` has a name that neither maxlib's layers nor the model's own layers mark.

    Checking names of maxlib's layers is free. Other names need an additional trace of the forward and backward pass.

    Args:
        remat: The policy.
        params: Trained parameters by path.
        rest: The rest of the model.
        batch: Arrays or their shapes.
    """
    if remat is None or isinstance(remat, str) or callable(remat) or set(remat) <= set(nn.remat.INTERMEDIATES):
        return
    marked = marked_names(params, rest, batch)
    if unknown := sorted(set(remat) - set(nn.remat.INTERMEDIATES) - marked):
        known = [name for name in nn.remat.INTERMEDIATES if name in marked]
        known += sorted(marked - set(known))
        near = difflib.get_close_matches(unknown[0], known, 1)
        raise ValueError(
            f"remat names {', '.join(map(repr, unknown))}, which no layer marks; this model's layers mark "
            f"{', '.join(known)}" + (f": did you mean {near[0]!r}?" if near else "")
        )


def marked_names(params: dict[str, Any], rest: Any, batch: Batch) -> set[str]:
    """Returns the names that the model's layers give to intermediates with `checkpoint_name`."""
    found = set()

    def note(primitive: Any, *_: Any, **params: Any) -> bool:
        found.update([params["name"]] if primitive.name == "name" else [])
        return False

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        model = nn.combine(params, rest)
        return run(getattr(model, "trained", model), batch, remat=note).hidden.sum()

    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    jax.eval_shape(jax.grad(loss), *jax.tree.map(shape, (params, batch)))
    return found
