"""Layers applied in order, scanned where they are alike."""

import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from maxlib.nn._stack_layout import Part, as_layout, parts, place_of, settled
from maxlib.nn.remat import Policy, remat_policy, rematerialised
from maxlib.nn.tree import is_variable, variables
from maxlib.ops._attention.dispatch import current_device
from maxlib.sharding import LAYER_INPUT, current, pipelined, shard_map_by_name, stages, to_device

Aux = dict[str, jax.Array]
_skip_check = contextvars.ContextVar("trusted", default=False)


@contextmanager
def skip_layer_check() -> Iterator[None]:
    """Stacks built within take it on trust that layers which share a place are alike, and trace one of them only.

    For models that are checked elsewhere: a deep one is described in a tenth of the time.
    """
    token = _skip_check.set(True)
    try:
        yield
    finally:
        _skip_check.reset(token)


class Stack(nnx.Module):
    """Layers `make(0, rngs) ... make(num_layers - 1, rngs)`, each `layer(x, ctx, cache) -> (x, cache, aux)`.

    The first `lead` layers are alike, and are scanned among themselves; `prefix` layers stand alone after them. The
    rest repeats every `period` layers and is stored with a leading repeat axis, so that one `lax.scan` applies it; what
    does not fill a period stands alone at the end. Layer `i` gets the stack's key folded with `i`: the layout does not
    change its initial values. `make` may depend on `i` only through the layer's structure. Raises ValueError when a
    layer differs from one whose place it shares.
    """

    lead: nnx.List
    prefix: nnx.List
    body: nnx.List
    suffix: nnx.List

    def __init__(
        self,
        make: Callable[[int, nnx.Rngs], nnx.Module],
        num_layers: int,
        *,
        lead: int = 0,
        prefix: int = 0,
        period: int = 1,
        rngs: nnx.Rngs,
    ):
        layout = settled(num_layers, lead, prefix, period)
        key = rngs.params()
        one = lambda i, key: make(i, nnx.Rngs(key))
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(num_layers))
        if not _skip_check.get():
            _check_alike(one, keys, layout)
        alone = lambda layers: one(layers[0], keys[layers[0]])
        stacked = lambda layers: jax.vmap(lambda key: one(layers[0], key))(
            keys[layers.start : layers.stop : layers.step]
        )
        self._lay_out(layout, alone, stacked)

    def _lay_out(self, layout: dict[str, int], alone: Callable, stacked: Callable) -> None:
        """Stores the layers of every slot, as the functions make them of their numbers."""
        self.num_layers, self.period, self.num_lead = layout["num_layers"], layout["period"], layout.get("lead", 0)
        for name, part in parts(**layout).items():
            made = alone if part.repeats is None else stacked
            setattr(self, name, nnx.List([made(part.layers(slot)) for slot in range(part.slots)]))

    @property
    def layout(self) -> dict[str, int]:
        """`num_layers`, `prefix` and `period` as they are stored, and `lead` where there is one."""
        return as_layout(self.num_layers, self.num_lead, len(self.prefix), self.period)

    @property
    def repeats(self) -> int:
        """How many periods are scanned."""
        return self.parts["body"].repeats or 0

    @property
    def parts(self) -> dict[str, Part]:
        """What `lead`, `prefix`, `body` and `suffix` hold, in the order in which they run."""
        return parts(**self.layout)

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
        caches = (None,) * 4 if cache is None else cache
        x, lead, first = periods(self.lead, x, ctx, caches[0], remat=remat)
        x, prefix, second = _run(x, ctx, self.prefix, caches[1], remat_policy(remat))
        x, body, third = self._body(x, ctx, caches[2], remat)
        x, suffix, last = _run(x, ctx, self.suffix, caches[3], remat_policy(remat))
        aux = _in_layer_order(self.parts.values(), (first, second, third, last))
        return x, None if cache is None else (lead, prefix, body, suffix), aux

    def _body(self, x, ctx, caches, remat):
        if caches is not None or stages() == 1 or not len(self.body):
            return periods(self.body, x, ctx, caches, remat=remat)

        def stage(body, works, x, ctx):
            x, _, aux = periods(body, x, ctx, remat=remat, works=works)
            return x, aux

        x, aux = pipelined(stage, self.body, x, ctx, remat=remat_policy(remat))
        return x, None, aux

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> tuple[list, list, list, list]:
        """An empty cache of every layer, laid out like the layers: `lead`, `prefix`, `body`, `suffix`."""
        repeat = lambda cache, n: jax.tree.map(lambda a: jnp.repeat(a[None], n, axis=0), cache)
        found = []
        for name, part in self.parts.items():
            caches = [layer.init_cache(batch, capacity, dtype) for layer in getattr(self, name)]
            found.append(caches if part.repeats is None else [repeat(cache, part.repeats) for cache in caches])
        return tuple(found)

    def relaid(self, *, lead: int = 0, prefix: int, period: int) -> "Stack":
        """The same layers in another layout. Layers that come to share a place must be alike."""
        layers, new = list(self), jax.tree.map(lambda a: a, self)
        stacked = lambda numbers: jax.tree.map(lambda *a: jnp.stack(a), *(layers[i] for i in numbers))
        new._lay_out(settled(len(layers), lead, prefix, period), lambda numbers: layers[numbers[0]], stacked)
        return new

    def unstacked(self) -> "Stack":
        """The same layers, each standing alone: faster to decode with, slower to compile."""
        return self.relaid(prefix=self.num_layers, period=self.period)


def periods(
    body: Any, x: Any, ctx: Any, caches: Any = None, *, remat: Policy = None, works: jax.Array | None = None
) -> tuple[Any, Any, list[Aux]]:
    """Scans the `body` (or `lead`) of a stack, which may be some of all repeats; aux is that of each place in the
    period. Repeats for which `works` is False change nothing and report zeros."""
    if not len(body):
        return x, caches, []

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


def _check_alike(one, keys, layout: dict[str, int]) -> None:
    """Compares the structure of every scanned layer, static attributes included, with the first in its place."""
    shape = lambda i: jax.eval_shape(lambda: one(i, keys[i]))
    scanned = [part for part in parts(**layout).values() if part.repeats]
    for numbers in (part.layers(slot) for part in scanned for slot in range(part.slots)):
        first = shape(numbers[0])
        for i in numbers[1:]:
            other = shape(i)
            if jax.tree.structure(first) != jax.tree.structure(other) or jax.tree.leaves(first) != jax.tree.leaves(
                other
            ):
                raise ValueError(
                    f"layer {i} differs from layer {numbers[0]}, whose place it shares in the layout {layout}; choose lead, prefix "
                    f"and period so that layers in one place are alike. They differ in {_difference(first, other)}"
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
    return shard_map_by_name(lambda w: with_layout_constraint(w, layout), [names], names)(weight)


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


def _in_layer_order(parts: Iterable[Part], auxes: Iterable[list[Aux]]) -> Aux:
    """One array per name, a row for each layer that reports it."""
    rows: dict[str, list[tuple[np.ndarray, jax.Array]]] = {}
    for part, found in zip(parts, auxes, strict=True):
        for slot, aux in enumerate(found):
            for name, value in aux.items():
                value = jnp.asarray(value)[None] if part.repeats is None else value
                rows.setdefault(name, []).append((np.array(part.layers(slot)), value))
    join = lambda parts: jnp.concatenate([v for _, v in parts])[np.argsort(np.concatenate([i for i, _ in parts]))]
    return {name: join(parts) for name, parts in rows.items()}
