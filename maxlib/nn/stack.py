"""Layers applied in order, scanned where they are alike."""

import contextvars
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from maxlib.nn.remat import Policy, remat_policy, rematerialised
from maxlib.nn.tree import is_variable, variables
from maxlib.ops.attention.dispatch import current_device
from maxlib.sharding import LAYER_INPUT, current, map_op, pipelined, stages, to_device

Aux = dict[str, jax.Array]
_trusted = contextvars.ContextVar("trusted", default=False)


@contextmanager
def trusted_layers() -> Iterator[None]:
    """Stacks built within take it on trust that layers which share a place are alike, and trace one of them only.

    For models that are checked elsewhere: a deep one is described in a tenth of the time.
    """
    token = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(token)


class Stack(nnx.Module):
    """Layers `make(0, rngs) ... make(num_layers - 1, rngs)`, each `layer(x, ctx, cache) -> (x, cache, aux)`.

    The first `prefix` layers stand alone. The rest repeats every `period` layers and is stored with a leading repeat
    axis, so that one `lax.scan` applies it; what does not fill a period stands alone at the end. Layer `i` gets the
    stack's key folded with `i`: neither `prefix` nor `period` changes its initial values. `make` may depend on `i`
    only through the layer's structure. Raises ValueError when a layer differs from the one whose place in the period
    it shares.
    """

    def __init__(
        self,
        make: Callable[[int, nnx.Rngs], nnx.Module],
        num_layers: int,
        *,
        prefix: int = 0,
        period: int = 1,
        rngs: nnx.Rngs,
    ):
        if period < 1 or not 0 <= prefix <= num_layers:
            raise ValueError(
                f"period must be at least 1 and prefix between 0 and num_layers; "
                f"got period={period}, prefix={prefix}, num_layers={num_layers}"
            )
        key = rngs.params()
        one = lambda i, key: make(i, nnx.Rngs(key))
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(num_layers))
        repeats = (num_layers - prefix) // period
        if repeats == 1:  # nothing repeats: keep the layers as they are
            prefix, repeats = prefix + period, 0
        suffix = prefix + repeats * period
        slots = range(prefix, prefix + period) if repeats else ()
        if not _trusted.get():
            _check_alike(one, keys, slots, suffix, period)
        self.num_layers, self.period = num_layers, period
        self.prefix = nnx.List([one(i, keys[i]) for i in range(prefix)])
        self.body = nnx.List([jax.vmap(lambda key, i=i: one(i, key))(keys[i:suffix:period]) for i in slots])
        self.suffix = nnx.List([one(i, keys[i]) for i in range(suffix, num_layers)])

    @property
    def layout(self) -> dict[str, int]:
        """`num_layers`, `prefix` and `period` as they are stored."""
        return {"num_layers": self.num_layers, "prefix": len(self.prefix), "period": self.period}

    @property
    def repeats(self) -> int:
        """How many periods are scanned."""
        return (self.num_layers - len(self.prefix)) // self.period

    def where(self, i: int) -> tuple[str, int | None]:
        """Layer `i`'s path below this stack and its index on the repeat axis (None if it stands alone)."""
        return place_of(i, **self.layout)

    def __len__(self) -> int:
        return self.num_layers

    def __getitem__(self, i: int) -> Any:
        """Layer `i` by itself. Of a scanned layer it is a copy: what is set on it does not reach the stack."""
        i = range(self.num_layers)[i]
        path, repeat = self.where(i)
        kind, slot = path.split(".")
        layer = getattr(self, kind)[int(slot)]
        return layer if repeat is None else jax.tree.map(lambda a: to_device(a)[repeat], layer)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.num_layers))

    def __call__(self, x: Any, ctx: Any = None, cache: Any = None, *, remat: Policy = None) -> tuple[Any, Any, Aux]:
        """Applies all layers. `cache` is what `init_cache` made; `aux` entries come back with one row per layer that
        reports them."""
        prefix, body, suffix = cache if cache is not None else (None, None, None)
        x, prefix, first = _run(x, ctx, self.prefix, prefix, remat_policy(remat))
        x, body, middle = self._body(x, ctx, body, remat)
        x, suffix, last = _run(x, ctx, self.suffix, suffix, remat_policy(remat))
        aux = _in_layer_order(first, middle, last)
        return x, None if cache is None else (prefix, body, suffix), aux

    def _body(self, x, ctx, caches, remat):
        if not len(self.body):
            return x, caches, []
        if caches is not None or stages() == 1:
            return periods(self.body, x, ctx, caches, remat=remat)

        def stage(body, works, x, ctx):
            x, _, aux = periods(body, x, ctx, remat=remat, works=works)
            return x, aux

        x, aux = pipelined(stage, self.body, x, ctx, remat=remat_policy(remat))
        return x, None, aux

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> tuple[list, list, list]:
        """An empty cache of every layer, laid out like the layers."""
        empty = lambda layers: [layer.init_cache(batch, capacity, dtype) for layer in layers]
        repeat = lambda cache: jax.tree.map(lambda a: jnp.repeat(a[None], self.repeats, axis=0), cache)
        return empty(self.prefix), [repeat(c) for c in empty(self.body)], empty(self.suffix)

    def relaid(self, *, prefix: int, period: int) -> "Stack":
        """The same layers in another layout. Layers that come to share a place must be alike."""
        layers, repeats = list(self), (self.num_layers - prefix) // period
        if repeats == 1:
            prefix, repeats = prefix + period, 0
        suffix = prefix + repeats * period
        slots = range(prefix, prefix + period) if repeats else ()
        new = jax.tree.map(lambda a: a, self)
        new.period, new.prefix, new.suffix = period, nnx.List(layers[:prefix]), nnx.List(layers[suffix:])
        new.body = nnx.List([jax.tree.map(lambda *a: jnp.stack(a), *layers[i:suffix:period]) for i in slots])
        return new

    def unstacked(self) -> "Stack":
        """The same layers, each standing alone: faster to decode with, slower to compile."""
        new = jax.tree.map(lambda a: a, self)
        new.prefix, new.body, new.suffix = nnx.List(list(self)), nnx.List([]), nnx.List([])
        return new


def periods(
    body: Any, x: Any, ctx: Any, caches: Any = None, *, remat: Policy = None, works: jax.Array | None = None
) -> tuple[Any, Any, list[Aux]]:
    """Scans the repeating layers of a stack, which may be some of all repeats; aux is that of each place in the
    period. Repeats for which `works` is False change nothing and report zeros."""

    def step(x, period):
        layers, caches, works = period
        new, caches, aux = _run(x, ctx, layers, caches, remat_policy(remat), prevent_cse=False)
        if works is not None:
            new = jax.tree.map(lambda a, b: jnp.where(works, a, b), new, x)
            aux = jax.tree.map(lambda a: jnp.where(works, a, 0), aux)
        return new, (caches, aux)

    x, (caches, aux) = jax.lax.scan(step, x, (body, caches, works))
    return x, caches, aux


def ends(layers: Any, x: Any, ctx: Any, *, remat: Policy = None) -> tuple[Any, list[Aux]]:
    """Applies a stack's prefix or suffix."""
    x, _, aux = _run(x, ctx, layers, None, remat_policy(remat))
    return x, aux


def unstack(model: Any) -> Any:
    """`model` with the layers of all its stacks standing alone."""
    is_stack = lambda x: isinstance(x, Stack)
    return jax.tree.map(lambda x: x.unstacked() if is_stack(x) else x, model, is_leaf=is_stack)


def layout_for(kinds: Iterable[Hashable]) -> dict[str, int]:
    """The `prefix` and `period` that scan the most, given what distinguishes each layer (its mask, say)."""
    kinds = tuple(kinds)
    n = len(kinds)

    def repeats(prefix: int, period: int) -> bool:
        end = n - (n - prefix) % period
        return kinds[prefix : end - period] == kinds[prefix + period : end]

    traced = lambda prefix, period: prefix + period + (n - prefix) % period
    layouts = [(traced(a, p), a, p) for p in range(1, n + 1) for a in range(n - p + 1) if repeats(a, p)]
    _, prefix, period = min(layouts, default=(0, 0, 1))
    return {"prefix": prefix, "period": period}


def place_of(i: int, *, num_layers: int, prefix: int, period: int) -> tuple[str, int | None]:
    """Where layer `i` of a stack with this layout lies: its path, and its index on the repeat axis."""
    if not 0 <= i < num_layers:
        raise IndexError(f"layer {i} of a stack of {num_layers}")
    repeats = (num_layers - prefix) // period
    if i < prefix:
        return f"prefix.{i}", None
    if i < prefix + repeats * period:
        return f"body.{(i - prefix) % period}", (i - prefix) // period
    return f"suffix.{i - prefix - repeats * period}", None


def _check_alike(one, keys, slots, suffix: int, period: int) -> None:
    """Compares the structure of every scanned layer, static attributes included, with its place in the period."""
    shape = lambda i: jax.eval_shape(lambda: one(i, keys[i]))
    for slot in slots:
        first = shape(slot)
        for i in range(slot + period, suffix, period):
            other = shape(i)
            if jax.tree.structure(first) != jax.tree.structure(other) or jax.tree.leaves(first) != jax.tree.leaves(
                other
            ):
                raise ValueError(
                    f"layer {i} differs from layer {slot}, whose place in the period of {period} it shares; choose prefix and "
                    f"period so that layers in one place are alike. They differ in {_difference(first, other)}"
                )


def _difference(first, other) -> str:
    """The arrays that only one has, or has otherwise; else it is something static."""
    found = [{path: str(x.get_value()) for path, x in variables(layer).items()} for layer in (first, other)]
    paths = sorted({path for path, _ in found[0].items() ^ found[1].items()})
    said = [f"{path} ({found[0].get(path, 'absent')} and {found[1].get(path, 'absent')})" for path in paths]
    return ", ".join(said) or "options, not arrays"


def _run(x, ctx, layers, caches, policy, prevent_cse: bool = True):
    """Applies `layers` one by one."""
    new_caches, auxes = [], []
    for i, layer in enumerate(layers):
        apply = lambda layer, x, cache: to_device(layer)(x, ctx, cache)
        if policy is not None:
            apply = lambda layer, x, cache: _as_it_lies(jax.tree.map(_held, to_device(layer)))(x, ctx, cache)
            apply = rematerialised(apply, policy, prevent_cse=prevent_cse)
            x = jax.tree.map(lambda a: checkpoint_name(a, LAYER_INPUT), x)
        x, new, aux = apply(layer, x, None if caches is None else caches[i])
        new_caches.append(new)
        auxes.append(aux)
    return x, None if caches is None else new_caches, auxes


def _as_it_lies(layer: Any) -> Any:
    """The same layer of a sharded stack, of which XLA for GPUs must not lay out all layers anew before the loop: it
    would, in float32, since it gathers a layer's weights along the dimension that lies furthest apart."""
    if current() is None or current_device()[0] != "gpu":
        return layer

    def keep(leaf):
        names = leaf.get_metadata().get("axes", ()) if is_variable(leaf) else ()
        value = leaf.get_value() if len(names) > 1 else None
        if not isinstance(value, jax.Array) or len(names) != value.ndim:
            return leaf
        return leaf.replace(_in_order(value, names))

    return jax.tree.map(keep, layer, is_leaf=is_variable)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _in_order(weight: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The same: each device's part with its dimensions as they are written."""
    layout = Layout(tuple(range(weight.ndim)))
    return map_op(lambda w: with_layout_constraint(w, layout), [names], names)(weight)


@_in_order.defjvp
def _(names, primals, tangents):
    return _in_order(*primals, names), *tangents


@jax.custom_jvp
def _held(weight: jax.Array) -> jax.Array:
    """The same float32, which XLA must not narrow before the loop: on TPU it would keep bfloat16 copies of all layers'
    weights."""
    if weight.dtype != jnp.float32:
        return weight
    bits = jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(weight, jnp.uint32))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@_held.defjvp
def _(primals, tangents):
    return _held(*primals), *tangents


def _in_layer_order(first: list[Aux], middle: list[Aux], last: list[Aux]) -> Aux:
    """One array per name, a row for each layer that reports it."""
    rows: dict[str, list[tuple[np.ndarray, jax.Array]]] = {}
    repeats = len(jax.tree.leaves(middle)[0]) if jax.tree.leaves(middle) else 0
    for i, aux in enumerate(first):
        for name, value in aux.items():
            rows.setdefault(name, []).append((np.array([i]), jnp.asarray(value)[None]))
    for slot, aux in enumerate(middle):
        for name, value in aux.items():
            rows.setdefault(name, []).append((len(first) + slot + len(middle) * np.arange(repeats), value))
    for i, aux in enumerate(last):
        for name, value in aux.items():
            index = len(first) + len(middle) * repeats + i
            rows.setdefault(name, []).append((np.array([index]), jnp.asarray(value)[None]))
    join = lambda parts: jnp.concatenate([v for _, v in parts])[np.argsort(np.concatenate([i for i, _ in parts]))]
    return {name: join(parts) for name, parts in rows.items()}
