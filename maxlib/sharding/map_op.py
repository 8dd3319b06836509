"""Runs an op on each device's own part of its arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from maxlib.sharding.rules import Rules, current, fit, settle, spec

Names = tuple[str | None, ...]


def map_op(
    op: Callable[..., Any], in_names: Sequence[Names | None], out_names: Any, *, changes: Rules | None = None
) -> Callable[..., Any]:
    """`op` under `jax.shard_map`, its arrays split by axis names as the rules in use say; `op` itself without rules.

    An argument that is None has names None. An axis with a `Spare` place takes what no axis of any array here takes. A
    name whose dimension does not divide, in any argument, is left whole in all of them, so that all parts match.
    `out_names` is a pytree of name tuples. `changes` replace some of the rules in use, for this call.
    """

    def run(*args):
        if (now := current()) is None:
            return op(*args)
        mesh, rules = now[0], {**now[1], **(changes or {})}
        rules = _dividing(args, in_names, mesh, settle(_flat(in_names, out_names), rules))
        place = lambda names: spec(names, rules)
        present = [(i, a, n) for i, (a, n) in enumerate(zip(args, in_names, strict=True)) if a is not None]
        in_specs = tuple(place(n) for _, _, n in present)
        out_specs = jax.tree.map(place, out_names, is_leaf=_is_names)

        def local(*parts):
            full = list(args)
            for (i, _, _), part in zip(present, parts, strict=True):
                full[i] = part
            return op(*full)

        # Varying-axis checks reject custom kernels, which do not say over which axes their results vary.
        mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return mapped(*[a for _, a, _ in present])

    return run


def _flat(in_names, out_names) -> list[Any]:
    groups = [names for names in in_names if names is not None] + jax.tree.leaves(out_names, is_leaf=_is_names)
    return [name for names in groups for name in names]


def _is_names(x: Any) -> bool:
    return isinstance(x, tuple) and all(name is None or isinstance(name, str) for name in x)


def _dividing(args, in_names, mesh, rules):
    rules = dict(rules)
    for arg, names in zip(args, in_names, strict=True):
        if arg is not None:
            _, uneven = fit(spec(names, rules), arg.shape, mesh)
            rules.update({names[d]: None for d in uneven})
    return rules
