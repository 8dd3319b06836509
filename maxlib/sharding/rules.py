"""Layers name the axes of their arrays; a rules table says on which mesh axes those names live."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

Rules = Mapping[str, str | tuple[str, ...] | None]

_BATCH = {"batch": ("data", "fsdp")}
_FSDP = {"embed": "fsdp"}
_TENSOR = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "act_heads": "tensor",
    "attn_heads": "tensor",
    "act_mlp": "tensor",
    "act_vocab": "tensor",
}

DP: Rules = _BATCH
FSDP: Rules = _BATCH | _FSDP
TP: Rules = _BATCH | _TENSOR
FSDP_TP: Rules = _BATCH | _FSDP | _TENSOR

# The sequence over devices, beside any of these: `FSDP | CP_RING`. `nn.attend` says how the three differ.
CP_GATHER: Rules = {"seq": "context", "q_seq": "context"}
CP_RING: Rules = {"seq": "context", "q_seq": "context", "kv_seq": "context"}
CP_HEADS: Rules = {"seq": "context", "attn_heads": ("tensor", "context")}

# Part of jit's cache key: a plain context variable would let a second mesh reuse the first one's program.
_context = jax.make_user_context(None)


def _freeze(rules: Rules) -> tuple[tuple[str, str | tuple[str, ...] | None], ...]:
    return tuple(sorted((name, tuple(v) if isinstance(v, list) else v) for name, v in rules.items()))


@contextmanager
def use(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """Inside, `constrain` and the layers' kernels follow `rules` on `mesh`; outside there is no mesh at all."""
    check(mesh, rules)
    with jax.set_mesh(mesh), _context(_freeze(rules)):
        yield


def current() -> tuple[Any, dict[str, str | tuple[str, ...] | None]] | None:
    """The (abstract) mesh and the rules in use, or None."""
    if _context.value is None:
        return None
    return jax.sharding.get_abstract_mesh(), dict(_context.value)


def check(mesh: Mesh, rules: Rules) -> None:
    """Raises ValueError when a rule names an axis that `mesh` does not have."""
    for name, place in rules.items():
        for axis in _as_tuple(place):
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"rule {name!r} -> {place!r} names the mesh axis {axis!r}, but the mesh has {mesh.axis_names}; "
                    "build it with sharding.make_mesh, or take rules that fit it"
                )


def _as_tuple(place: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if place is None else (place,) if isinstance(place, str) else tuple(place)


def spec(names: tuple[str | None, ...], rules: Rules, *, ndim: int | None = None, what: str = "array") -> P:
    """The partition spec of an array whose trailing dimensions bear `names`.

    Dimensions before them (a stack's repeat axis) stay whole. Raises ValueError when two names of one
    array land on one mesh axis; `what` says in the message which array it was.
    """
    places = [rules.get(name) if name is not None else None for name in names]
    used: dict[str, str | None] = {}
    for name, place in zip(names, places, strict=True):
        for axis in _as_tuple(place):
            if axis in used:
                raise ValueError(
                    f"{what}: its axes {names} put {used[axis]!r} and {name!r} both on the mesh axis {axis!r}; "
                    f"an array can use a mesh axis once, so change one of the rules {dict(rules)}"
                )
            used[axis] = name
    lead = 0 if ndim is None else ndim - len(names)
    while places and places[-1] is None:  # as XLA reports shardings: jit compiles anew for P("x", None) after P("x")
        places.pop()
    return P(*[None] * lead, *places) if places else P()


def fit(partition: P, shape: tuple[int, ...], mesh: Any) -> tuple[P, list[int]]:
    """`partition` with those dimensions left whole that their mesh axes do not divide, and their indices."""
    uneven = [d for d, place in enumerate(partition) if shape[d] % _size(mesh, place)]
    return P(*[None if d in uneven else place for d, place in enumerate(partition)]), uneven


def _size(mesh: Any, place: Any) -> int:
    size = 1
    for axis in _as_tuple(place):
        size *= mesh.shape[axis]
    return size


def degree(name: str) -> int:
    """Into how many parts the rules in use split the axis `name`; 1 without rules."""
    if (now := current()) is None:
        return 1
    mesh, rules = now
    return _size(mesh, rules.get(name))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Places an activation by its axis names; without `use(...)` it returns `x` as it is.

    A dimension that its mesh axes do not divide (a batch of one at decoding) stays whole.
    """
    if len(names) != x.ndim:
        raise ValueError(f"constrain needs one name (or None) per axis: got {names} for shape {x.shape}")
    if (now := current()) is None:
        return x
    mesh, rules = now
    partition, _ = fit(spec(names, rules, what=f"activation {x.shape}"), x.shape, mesh)
    return jax.lax.with_sharding_constraint(x, partition)
