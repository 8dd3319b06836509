"""What passes through a stack beside the activations: values that a layer hands to all later ones."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from maxlib.nn._pytree import pytree


@pytree
class WithShared:
    """Activations with what earlier layers share with later ones (keys and values, chosen tokens).

    A layer that is stored alone may add entries to `shared`; none may change or remove them. Scanned layers only read
    them, so that they are constants of the scan: there is one copy, to which the gradients of all readers flow.

    Args:
        x: Activations, which every layer changes.
        shared: Pytrees by name.
    """

    x: Any
    shared: Mapping[str, Any]

    def updated(self, x: Any, **shared: Any) -> "WithShared":
        """Returns a copy with a layer's `x`, and with what the layer adds to `shared`."""
        return WithShared(x, {**self.shared, **shared})


def map_activations(fn: Callable[[jax.Array], jax.Array], x: Any) -> Any:
    """Applies `fn` to the arrays that every layer changes, and not to what earlier ones share."""
    return WithShared(jax.tree.map(fn, x.x), x.shared) if isinstance(x, WithShared) else jax.tree.map(fn, x)


def only_added(before: Any, out: tuple[Any, ...]) -> tuple[Any, ...]:
    """Leaves out of a layer's result what earlier layers shared, so that it is no output of a rematerialised layer."""
    after, *rest = out
    # jax.checkpoint keeps its outputs: what only passes through would be kept once for each layer.
    if isinstance(after, WithShared):
        after = WithShared(after.x, {name: value for name, value in after.shared.items() if name not in before.shared})
    return after, *rest


def with_earlier(before: Any, after: Any) -> Any:
    """Undoes `only_added`."""
    return before.updated(after.x, **after.shared) if isinstance(after, WithShared) else after


def constant_in_scan(x: Any) -> tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]:
    """Splits `x` into what a scan carries and what is constant in it.

    Returns:
        What the scan carries, a function that joins it with the constants, and one that splits a layer's result,
        which raises ValueError if a scanned layer shares anything.
    """
    if not isinstance(x, WithShared):
        return x, lambda carried: carried, lambda new: new

    # `shared` is closed over, not carried: a loop keeps what it closes over once, and what it carries for every turn.
    def split(new: WithShared) -> Any:
        if added := sorted(new.shared.keys() - x.shared.keys()):
            raise ValueError(
                f"a layer that is scanned shares {', '.join(added)}: only one that is stored alone can, as each of its "
                "repeats would share its own. Choose lead, prefix and period so that it is alone (nn.grouping_for does if "
                "its kind is its own)"
            )
        return new.x

    return x.x, lambda carried: WithShared(carried, x.shared), split
