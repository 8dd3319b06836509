"""Layers applied in order, scanned where they are alike."""

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

from maxlib.nn._layer_axis import with_layer_axis, without_layer_axis
from maxlib.nn._stack_layout import Segment, as_layout, normalized_layout, place_of, segments
from maxlib.nn.mixer import check_cache_dtype, check_order, is_reorderable
from maxlib.nn.remat import Policy, remat_policy, rematerialised
from maxlib.nn.tree import StackedLayers, is_variable, variables
from maxlib.ops._attention.dispatch import current_device
from maxlib.sharding import current, shard_map_by_name
from maxlib.sharding.layers import LAYERS, LEAD_LAYERS
from maxlib.sharding.memory import to_device
from maxlib.sharding.pipelining import LAYER_INPUT, pipelined, stages

Aux = dict[str, jax.Array]
_AXES = {"lead": LEAD_LAYERS, "body": LAYERS}
# Part of jit's cache key, which a plain context variable would not be.
_skip_check = jax.make_user_context(False)


@contextmanager
def skip_layer_check() -> Iterator[None]:
    """Lets stacks built within trust that layers which share a place are alike, so that one of them is traced.

    For models that are checked elsewhere: a deep one is described in a tenth of the time.
    """
    with _skip_check(True):
        yield


class Stack(StackedLayers):
    """Layers `make(0, rngs) ... make(num_layers - 1, rngs)`, each `layer(x, ctx, cache) -> (x, cache, aux)`.

    The first `lead` layers are alike, and are scanned among themselves; `prefix` layers stand alone after them. The
    rest repeats every `period` layers, so that one `lax.scan` applies it; what does not fill a period stands alone at
    the end. For `lead=2, prefix=1, period=3` and 12 layers of the kinds A to E:

        D D | E | A B C  A B C  A B C        lead, prefix, body (and an empty suffix)

    What is scanned is stored with a leading axis, which is named in the variables' metadata: `("layers", "heads",
    ...)`, in the lead `("lead_layers", ...)`. A layer that stands alone, or is taken out (`stack[i]`), has its own
    names only.

    Layer `i` gets the stack's key folded with `i`: the layout does not change its initial values.

    Args:
        make: Builds layer `i` from its number and `nnx.Rngs`. It may depend on `i` only through the layer's structure.
        num_layers: How many layers there are.
        lead: How many layers of their own kind begin the stack.
        prefix: How many layers stand alone after them.
        period: After how many layers their kinds repeat. `nn.layout_for` finds the three numbers.
        rngs: One key is drawn from `params`.

    Raises:
        ValueError: A layer differs from one whose place it shares, or the numbers do not fit.
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
        layout = normalized_layout(num_layers, lead, prefix, period)
        key = rngs.params()
        one = lambda i, key: make(i, nnx.Rngs(key))
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(num_layers))
        if not _skip_check.value:
            _check_alike(one, keys, layout)
        alone = lambda layers: one(layers[0], keys[layers[0]])
        stacked = lambda layers: jax.vmap(lambda key: one(layers[0], key))(
            keys[layers.start : layers.stop : layers.step]
        )
        self._store(layout, alone, stacked)

    def _store(self, layout: dict[str, int], alone: Callable, stacked: Callable) -> None:
        """Stores the layers of every slot, which the two functions make from their numbers."""
        self.num_layers, self.period, self.num_lead = layout["num_layers"], layout["period"], layout.get("lead", 0)
        for name, segment in segments(**layout).items():
            slots = [segment.layers(slot) for slot in range(segment.slots)]
            if segment.repeats is None:
                made = [alone(numbers) for numbers in slots]
            else:
                made = [with_layer_axis(stacked(numbers), _AXES[name]) for numbers in slots]
            setattr(self, name, nnx.List(made))

    @property
    def layout(self) -> dict[str, int]:
        """`num_layers`, `prefix` and `period` as they are stored, and `lead` where there is one."""
        return as_layout(self.num_layers, self.num_lead, len(self.prefix), self.period)

    @property
    def repeats(self) -> int:
        """Number of periods that are scanned."""
        return self.segments["body"].repeats or 0

    @property
    def segments(self) -> dict[str, Segment]:
        """The layers in `lead`, `prefix`, `body` and `suffix`, in the order in which they run."""
        return segments(**self.layout)

    @property
    def is_reorderable(self) -> bool:
        """True if every layer allows tokens to be reordered among devices (`SequenceMixer.reorderable`)."""
        return all(is_reorderable(layer) for name in self.segments for layer in getattr(self, name))

    def where(self, i: int) -> tuple[str, int | None]:
        """Returns layer `i`'s path below this stack and its index on the leading axis (None if it stands alone)."""
        return place_of(i, **self.layout)

    def __len__(self) -> int:
        return self.num_layers

    def __getitem__(self, i: int) -> Any:
        """Takes out layer `i`. A scanned layer is copied: what is set on it does not reach the stack."""
        i = range(self.num_layers)[i]
        path, repeat = self.where(i)
        kind, slot = path.split(".")
        layer = getattr(self, kind)[int(slot)]
        if repeat is None:
            return layer
        return without_layer_axis(jax.tree.map(lambda a: to_device(a)[repeat], layer))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.num_layers))

    def __call__(
        self, x: Any, ctx: Any = None, cache: Any = None, *, remat: Policy = None, layer_inputs: Any = None
    ) -> tuple[Any, Any, Aux]:
        """Applies all layers.

        Args:
            x: What passes from layer to layer: an array, or a pytree that carries more beside it.
            ctx: What all layers share, as `nn.context` makes it.
            cache: What `init_cache` made.
            remat: What layers keep for the backward pass, see `nn.remat`.
            layer_inputs: Arrays with a leading axis of `num_layers`. Layer `i` gets their row `i` as a fourth argument.

        Returns:
            The last layer's `x`, the new cache (None without one), and the layers' `aux` entries by name, with a row
            for each layer that reports them.

        Raises:
            ValueError: Tokens were reordered for a layer that needs them in order, or `layer_inputs` meet a pipeline.
        """
        check_order(self, ctx)
        new_caches, auxes = [], []
        for i, (name, segment) in enumerate(self.segments.items()):
            run = self._run_body if name == "body" else scan_segment if segment.repeats is not None else run_segment
            inputs = _inputs_of(segment, layer_inputs)
            layers, caches = getattr(self, name), None if cache is None else cache[i]
            x, new, aux = run(layers, x, ctx, caches, remat=remat, inputs=inputs)
            new_caches.append(new)
            auxes.append(aux)
        return x, None if cache is None else tuple(new_caches), _in_layer_order(self.segments.values(), auxes)

    def _run_body(self, body, x, ctx, caches, *, remat, inputs):
        if caches is not None or stages() == 1 or not len(body):
            return scan_segment(body, x, ctx, caches, remat=remat, inputs=inputs)
        if jax.tree.leaves(inputs):
            raise ValueError(
                "layer_inputs do not travel through the stages of a pipeline: put them into x or ctx, or take rules "
                "without a Pipeline"
            )

        def stage(body, works, x, ctx):
            x, _, aux = scan_segment(body, x, ctx, remat=remat, works=works)
            return x, aux

        x, aux = pipelined(stage, body, x, ctx, remat=remat_policy(remat))
        return x, None, aux

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> tuple[list, list, list, list]:
        """Makes an empty cache of every layer, laid out like the layers: `lead`, `prefix`, `body`, `suffix`.

        Raises:
            ValueError: A layer cannot keep its state in `dtype` (`SequenceMixer.quantizable_cache`).
        """
        check_cache_dtype(self, dtype)
        repeat = lambda cache, n: jax.tree.map(lambda a: jnp.repeat(a[None], n, axis=0), cache)
        found = []
        for name, segment in self.segments.items():
            caches = [layer.init_cache(batch, capacity, dtype) for layer in getattr(self, name)]
            found.append(caches if segment.repeats is None else [repeat(cache, segment.repeats) for cache in caches])
        return tuple(found)

    def with_layout(self, *, lead: int = 0, prefix: int, period: int) -> "Stack":
        """Stores the same layers in another layout. Layers that come to share a place must be alike."""
        layers, new = list(self), jax.tree.map(lambda a: a, self)
        stacked = lambda numbers: jax.tree.map(lambda *a: jnp.stack(a), *(layers[i] for i in numbers))
        new._store(normalized_layout(len(layers), lead, prefix, period), lambda numbers: layers[numbers[0]], stacked)
        return new

    def unstacked(self) -> "Stack":
        """Stores each layer alone: faster to decode with, slower to compile."""
        return self.with_layout(prefix=self.num_layers, period=self.period)


def scan_segment(
    layers: Any,
    x: Any,
    ctx: Any,
    caches: Any = None,
    *,
    remat: Policy = None,
    works: jax.Array | None = None,
    inputs: Any = None,
) -> tuple[Any, Any, list[Aux]]:
    """Scans the `body` (or `lead`) of a stack, or some of its repeats.

    Args:
        layers: The slots of a period, each with a leading axis of repeats.
        x: What passes from layer to layer.
        ctx: What all layers share.
        caches: Of each slot, with the same leading axis.
        remat: What layers keep for the backward pass.
        works: `repeats`; where it is False a repeat changes nothing and reports zeros. None: all work.
        inputs: Of each slot, `layer_inputs` with the same leading axis; empty if there are none.

    Returns:
        The last layer's `x`, the new caches, and the aux of each slot with a row per repeat.
    """
    if not len(layers):
        return x, caches, []

    def step(x, period):
        layers, caches, works, inputs = period
        new, caches, aux = _run(x, ctx, without_layer_axis(layers), caches, inputs, remat_policy(remat), False)
        if works is not None:
            new = jax.tree.map(lambda a, b: jnp.where(works, a, b), new, x)
            aux = jax.tree.map(lambda a: jnp.where(works, a, 0), aux)
        return new, (caches, aux)

    x, (caches, aux) = jax.lax.scan(step, x, (layers, caches, works, inputs))
    return x, caches, aux


def run_segment(
    layers: Any, x: Any, ctx: Any, caches: Any = None, *, remat: Policy = None, inputs: Any = None
) -> tuple[Any, Any, list[Aux]]:
    """Applies the `prefix` or `suffix` of a stack one by one; arguments and results are those of `scan_segment`."""
    return _run(x, ctx, layers, caches, inputs, remat_policy(remat))


def _inputs_of(segment: Segment, layer_inputs: Any) -> list[Any] | None:
    """Takes for each slot the rows of its layers."""
    if layer_inputs is None:
        return None
    rows = [segment.layers(slot) for slot in range(segment.slots)]
    if segment.repeats is None:
        return [jax.tree.map(lambda a, i=row[0]: a[i], layer_inputs) for row in rows]
    return [jax.tree.map(lambda a, r=row: a[r.start : r.stop : r.step], layer_inputs) for row in rows]


def unstack(model: Any) -> Any:
    """Returns `model` with the layers of all its stacks standing alone."""
    is_stack = lambda x: isinstance(x, Stack)
    return jax.tree.map(lambda x: x.unstacked() if is_stack(x) else x, model, is_leaf=is_stack)


def _check_alike(one, keys, layout: dict[str, int]) -> None:
    """Compares the structure of every scanned layer, static attributes included, with the first in its place."""
    shape = lambda i: jax.eval_shape(lambda: one(i, keys[i]))
    scanned = [segment for segment in segments(**layout).values() if segment.repeats]
    for numbers in (segment.layers(slot) for segment in scanned for slot in range(segment.slots)):
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
    """Names the arrays that only one has, or has in another shape; without any it is something static."""
    found = [{path: str(x.get_value()) for path, x in variables(layer).items()} for layer in (first, other)]
    paths = sorted({path for path, _ in found[0].items() ^ found[1].items()})
    said = [f"{path} ({found[0].get(path, 'absent')} and {found[1].get(path, 'absent')})" for path in paths]
    return ", ".join(said) or "options, not arrays"


def _run(x, ctx, layers, caches, inputs, policy, prevent_cse: bool = True):
    """Applies `layers` one by one."""
    new_caches, auxes = [], []
    for i, layer in enumerate(layers):
        more = () if inputs is None else (inputs[i],)
        apply = lambda layer, x, cache, *more: to_device(layer)(x, ctx, cache, *more)
        if policy is not None:
            prepare = lambda layer: _pin_row_major(jax.tree.map(_keep_float32, to_device(layer)))
            apply = lambda layer, x, cache, *more, prepare=prepare: prepare(layer)(x, ctx, cache, *more)
            apply = rematerialised(apply, policy, prevent_cse=prevent_cse)
            x = jax.tree.map(lambda a: checkpoint_name(a, LAYER_INPUT), x)
        x, new, aux = apply(layer, x, None if caches is None else caches[i], *more)
        new_caches.append(new)
        auxes.append(aux)
    return x, None if caches is None else new_caches, auxes


def _pin_row_major(layer: Any) -> Any:
    """Pins the weights of a sharded stack's layer to row-major order.

    Without it XLA for GPUs transposes all layers, in float32, before the loop, since it gathers a layer's weights
    along the dimension that lies furthest apart.
    """
    if current() is None or current_device()[0] != "gpu":
        return layer

    def keep(leaf):
        names = leaf.get_metadata().get("axes", ()) if is_variable(leaf) else ()
        value = leaf.get_value() if len(names) > 1 else None
        return leaf.replace(_row_major(value, names)) if isinstance(value, jax.Array) else leaf

    return jax.tree.map(keep, layer, is_leaf=is_variable)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _row_major(weight: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Identity that lays each device's part out in the order of its dimensions."""
    layout = Layout(tuple(range(weight.ndim)))
    return shard_map_by_name(lambda w: with_layout_constraint(w, layout), [names], names)(weight)


@_row_major.defjvp
def _(names, primals, tangents):
    return _row_major(*primals, names), *tangents


@jax.custom_jvp
def _keep_float32(weight: jax.Array) -> jax.Array:
    """Identity that keeps XLA from casting before the loop: on TPU it would keep bfloat16 copies of all layers."""
    if weight.dtype != jnp.float32:
        return weight
    bits = jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(weight, jnp.uint32))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@_keep_float32.defjvp
def _(primals, tangents):
    return _keep_float32(*primals), *tangents


def _in_layer_order(parts: Iterable[Segment], auxes: Iterable[list[Aux]]) -> Aux:
    """Joins what layers report into one array per name, a row for each layer that reports it."""
    rows: dict[str, list[tuple[np.ndarray, jax.Array]]] = {}
    for segment, found in zip(parts, auxes, strict=True):
        for slot, aux in enumerate(found):
            for name, value in aux.items():
                value = jnp.asarray(value)[None] if segment.repeats is None else value
                rows.setdefault(name, []).append((np.array(segment.layers(slot)), value))
    join = lambda parts: jnp.concatenate([v for _, v in parts])[np.argsort(np.concatenate([i for i, _ in parts]))]
    return {name: join(parts) for name, parts in rows.items()}
