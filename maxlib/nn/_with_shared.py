"""Values that a layer of a stack shares with all later layers, such as keys and values."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from maxlib.nn._pytree import pytree


@pytree
class WithShared:
    """Activations together with values that earlier layers share with later ones (keys and values, chosen tokens).

    A layer that is stored alone may add entries to `shared`; no layer may change or remove them. Scanned layers only
    read them, so they are constants of the scan: there is one copy, which sums the gradients of all readers.

    Args:
        x: Activations, which every layer changes.
        shared: Pytrees by name.
    """

    x: Any
    shared: Mapping[str, Any]

    def updated(self, x: Any, **shared: Any) -> "WithShared":
        """Returns a copy with a new `x` and with entries added to `shared`."""
        return WithShared(x, {**self.shared, **shared})


def map_activations(fn: Callable[[jax.Array], jax.Array], x: Any) -> Any:
    """Applies `fn` to the activations, and not to the values shared by earlier layers."""
    return WithShared(jax.tree.map(fn, x.x), x.shared) if isinstance(x, WithShared) else jax.tree.map(fn, x)


def only_added(before: Any, out: tuple[Any, ...]) -> tuple[Any, ...]:
    """Removes values shared by earlier layers from a layer's result, so that a rematerialised layer does not return
    them.
    """
    after, *rest = out
    # jax.checkpoint keeps its outputs, so values that only pass through would be kept once per layer.
    if isinstance(after, WithShared):
        after = WithShared(after.x, {name: value for name, value in after.shared.items() if name not in before.shared})
    return after, *rest


def with_earlier(before: Any, after: Any) -> Any:
    """Undoes `only_added`."""
    return before.updated(after.x, **after.shared) if isinstance(after, WithShared) else after


def constant_in_scan(x: Any) -> tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]:
    """Splits `x` into the carry of a scan and its constants.

    Returns:
        The carry, a function that joins it with the constants, and a function that extracts the carry from a layer's
        result; the latter raises ValueError if a scanned layer shares anything.
    """
    if not isinstance(x, WithShared):
        return x, lambda carried: carried, lambda new: new

    # `shared` is closed over, not carried: a scan saves closed-over values once, but the carry for every iteration.
    def split(new: WithShared) -> Any:
        if added := sorted(new.shared.keys() - x.shared.keys()):
            raise ValueError(
                f"a scanned layer shares {', '.join(added)}: only a layer that is stored alone can, because each "
                "repeat would share its own. Choose lead, prefix and period so that it is stored alone "
                "(nn.grouping_for does if no other layer has its kind)"
            )
        return new.x

    return x.x, lambda carried: WithShared(carried, x.shared), split
