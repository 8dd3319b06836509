"""The stack: layers by number, however they are stored."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.tracers import TraceState
from jaxtyping import Array, Float, Int

from maxlib.nn._linear import draw_key
from maxlib.nn.decoder._model import Model
from maxlib.nn.mixer import check_cache_dtype, check_order, check_pairs, check_position_bias, is_reorderable
from maxlib.nn.remat import Policy, remat_policy
from maxlib.nn.stack._run import Aux, run_alone, scan_group
from maxlib.nn.stack._storage import (
    Group,
    Grouping,
    find_groups,
    layer_groups,
    number_kinds,
    with_layer_axis,
    without_layer_axis,
)
from maxlib.nn.tree import StackedLayers
from maxlib.sharding.layers import LAYERS, UNSTAGED_LAYERS
from maxlib.sharding.memory import to_device
from maxlib.sharding.pipelining import pipelined as run_pipeline
from maxlib.sharding.pipelining import stages

Layer = TypeVar("Layer")


@runtime_checkable
class SupportsPipelining(Model, Protocol):
    """Protocol of models whose parts a 1F1B pipeline can run separately, as with `nn.Decoder`."""

    layers: Any  # an `nn.Stack`

    def embed_inputs(
        self, tokens: Int[Array, "B T"], *, dtype: Any, remat: Policy = None, **inputs: Any
    ) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
        """Returns the vectors of tokens and images, and the arguments of `enter`."""
        ...

    def enter(self, x: Float[Array, "B T D"], **inputs: Any) -> tuple[Float[Array, "B T D"], Any]:
        """Returns the input of the first layer: `x`, sharded over the mesh, and the context."""
        ...

    def layer_inputs(self, x: Float[Array, "B T D"], ctx: Any) -> Any:
        """Returns inputs of individual layers: arrays whose leading axis is the layers; None if there are none."""
        ...

    def leave(self, x: Float[Array, "B T D"], ctx: Any) -> Float[Array, "B T D"]:
        """Returns the input of the head: the last layer's `x`, normed."""
        ...


class Stack(StackedLayers):
    """A sequence of layers: calls `make(kind, rngs)` for each of `kinds`, and runs the layers one after the other.

    A layer is called as `layer(x, ctx, cache) -> (x, cache, aux)`. Layers of the same kind differ only in their
    weights. The stack finds groups in which a sequence of kinds (the period) repeats, and scans each such group: `make`
    is traced once per layer of the period, and weights are arrays with a leading axis of repeats. For 12 layers of the
    kinds A to F:

        D D | E F | A B C  A B C | A B       periods D; E F; A B C; A B. The first and third group have two repeats.

    Its layers are in `groups`, by group and slot of the period: `stack.groups[2][1]` is both layers B of the third
    group, and `groups.2.1.attn.q.w` the path of a weight. The leading axis is named in the variables' metadata:
    `("layers", "heads", ...)` in the group that a pipeline splits into stages (`staged`), and `("unstaged_layers",
    "heads", ...)` in others. A layer that is stored alone, or the copy that `stack[i]` returns, does not have this
    axis.

    The key of layer `i` is the stack's key folded with `i`, so initial values do not depend on the groups.

        stack = nn.Stack(lambda kind, rngs: llama.Block(cfg, rngs=rngs), cfg.num_layers, rngs=nnx.Rngs(0))
        y, cache, aux = stack(jnp.ones((2, 8, cfg.dim)), nn.make_context(2, 8))

    Args:
        make: Builds a layer of a kind from the kind and `nnx.Rngs`.
        kinds: A hashable value for each layer, such as its mask or a tuple of options. A number stands for as many
            layers of one kind, None.
        numbered: True calls `make(kind, rngs, i)` with the layer's number, an integer array, for initial values that
            depend on the depth. It is traced where several layers are made at once.
        rngs: Source of initial values; one key is drawn from `params`.
    """

    groups: nnx.List

    def __init__(
        self,
        make: Callable[..., nnx.Module],
        kinds: Sequence[Hashable] | int,
        *,
        numbered: bool = False,
        rngs: nnx.Rngs,
    ):
        key = draw_key(rngs)
        kinds = [None] * kinds if isinstance(kinds, int) else kinds
        # Stored as numbers: kinds may be functions, which compare unequal when the same model is built twice.
        self.kind_numbers = number_kinds(kinds)
        numbers = jnp.arange(len(kinds))
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(numbers)  # one for each layer

        def slot(layers: range) -> nnx.Module:
            kind = kinds[layers[0]]

            def build(key: Array, i: Array) -> nnx.Module:
                return make(kind, nnx.Rngs(key), i) if numbered else make(kind, nnx.Rngs(key))

            if len(layers) == 1:
                return build(keys[layers[0]], numbers[layers[0]])
            # vmap over the layers of a slot: every variable becomes [repeats, ...].
            in_slot = slice(layers.start, layers.stop, layers.step)
            return jax.vmap(build)(keys[in_slot], numbers[in_slot])

        self._store(find_groups(self.kind_numbers), slot)

    def _store(self, grouping: Grouping, slot: Callable[[range], nnx.Module]) -> None:
        """Stores the result of `slot` for the layers of every slot; several layers have a leading axis."""
        self.grouping = tuple((period, repeats) for period, repeats in grouping)
        groups = []
        for n, group in enumerate(self.layer_groups):
            slots = [slot(group.layers(s)) for s in range(group.period)]
            if group.repeats > 1:
                name = LAYERS if n == self.staged else UNSTAGED_LAYERS
                slots = [with_layer_axis(layers, name) for layers in slots]
            groups.append(nnx.List(slots))
        self.groups = nnx.List(groups)

    @property
    def layer_groups(self) -> list[Group]:
        """The groups, in the order in which they run."""
        return layer_groups(self.grouping)

    @property
    def staged(self) -> int | None:
        """Index of the group that a pipeline splits into stages: of the groups that repeat, the one with the most
        layers, or the last one of several equally long ones. None if no group repeats.
        """
        sizes = {n: (group.period * group.repeats, n) for n, group in enumerate(self.layer_groups) if group.repeats > 1}
        return max(sizes, key=lambda n: sizes[n], default=None)

    @property
    def is_reorderable(self) -> bool:
        """Returns True if every layer allows tokens to be reordered among devices (`SequenceMixer.reorderable`)."""
        return all(is_reorderable(layer) for slots in self.groups for layer in slots)

    def where(self, i: int) -> tuple[str, int | None]:
        """Returns layer `i`'s path below this stack and its index on the leading axis (None if it is stored alone)."""
        n, slot, row = self._place(i)
        return f"groups.{n}.{slot}", row

    def _place(self, i: int) -> tuple[int, int, int | None]:
        """Returns the group and the slot of layer `i`, and its index on the leading axis or None."""
        if not hasattr(i, "__index__"):
            raise TypeError(f"a layer's number must be a whole number, got {i!r}; slices of a stack are not layers")
        if not -len(self) <= i < len(self):
            raise IndexError(f"there is no layer {i}: the stack has {len(self)}, numbered from 0")
        i = range(len(self))[i]
        n, group = next((n, group) for n, group in enumerate(self.layer_groups) if i < group.end)
        # Layers of a group are in the order of its periods: i - first = row * period + slot.
        row, slot = divmod(i - group.first, group.period)
        return n, slot, row if group.repeats > 1 else None

    def __len__(self) -> int:
        """Returns the number of layers."""
        return len(self.kind_numbers)

    def __getitem__(self, i: int) -> Any:
        """Returns layer `i`. A scanned layer is returned as a read-only copy: editing it would not change the stack."""
        layer, (_, _, row) = self._layer(i), self._place(i)
        return layer if row is None else _read_only(layer, range(len(self))[i])

    def _layer(self, i: int) -> Any:
        """Returns layer `i`: the layer itself if it is stored alone, else a copy."""
        n, slot, row = self._place(i)
        layer = self.groups[n][slot]
        # [repeats, ...] -> [...]
        return layer if row is None else without_layer_axis(jax.tree.map(lambda a: to_device(a)[row], layer))

    def __iter__(self) -> Iterator[Any]:
        """Yields the layers in order; scanned layers are copies, as in `__getitem__`."""
        return (self[i] for i in range(len(self)))

    def __call__(
        self,
        x: Any,
        ctx: Any = None,
        cache: Any = None,
        *,
        remat: Policy = None,
        layer_inputs: Any = None,
        pipelined: bool = True,
    ) -> tuple[Any, Any, Aux]:
        """Applies all layers.

        Args:
            x: Value that passes from layer to layer: an array, or a pytree with more values (`Carry`).
            ctx: Values shared by all layers, from `nn.make_context`.
            cache: Cache from `init_cache`, or None.
            remat: What layers keep for the backward pass, see `nn.remat`.
            layer_inputs: Arrays with a leading axis of layers. Layer `i` gets row `i` as a fourth argument. If there
                are fewer rows than layers, the last layers get none; their kind must differ from that of layers with a
                row.
            pipelined: False runs all layers without a pipeline, even on a mesh that has one. Needed if layers report a
                value for each row of the batch, because a pipeline averages reports over microbatches.

        Returns:
            The last layer's `x`, the new cache (None without one), and the layers' `aux` entries by name, with a row
            for each layer that reports them.

        Raises:
            ValueError: when tokens were reordered for a layer that needs their natural order, or `layer_inputs` are
                used in a pipeline.
        """
        check_order(self, ctx)
        check_position_bias(self, ctx)
        check_pairs(self, ctx)
        staged = self.staged if pipelined and cache is None and stages() > 1 else None
        caches = [None] * len(self.groups) if cache is None else list(cache)
        inputs, auxes = self.inputs_by_group(layer_inputs), []
        for n, slots in enumerate(self.groups):
            if n == staged:
                check_no_inputs(inputs[n])
                x, aux = _run_stages(slots, x, ctx, remat)
            else:
                x, caches[n], aux = self.run_group(n, x, ctx, caches[n], remat=remat, inputs=inputs[n])
            auxes.append(aux)
        return x, None if cache is None else tuple(caches), self.in_layer_order(auxes)

    def run_group(
        self, n: int, x: Any, ctx: Any, cache: Any = None, *, remat: Policy = None, inputs: Any = None
    ) -> tuple[Any, Any, list[Aux]]:
        """Applies the layers of group `n`.

        Args:
            n: Index of the group.
            x: Value that passes from layer to layer.
            ctx: Values shared by all layers.
            cache: The cache of this group, or None.
            remat: What layers keep for the backward pass.
            inputs: This group's entry of `inputs_by_group`.

        Returns:
            The last layer's `x`, the group's new cache, and the aux of each slot.
        """
        run = scan_group if self.layer_groups[n].repeats > 1 else run_alone
        return run(self.groups[n], x, ctx, cache, remat=remat, inputs=inputs)

    def inputs_by_group(self, layer_inputs: Any) -> list[list[Any] | None]:
        """Returns the rows of `layer_inputs` for each group, by slot; None for a group that gets none.

        Raises:
            ValueError: when there are rows for some layers of a slot only.
        """
        if layer_inputs is None:
            return [None] * len(self.groups)
        rows = min(len(a) for a in jax.tree.leaves(layer_inputs))

        def slot_inputs(layers: range) -> Any:
            if layers[0] >= rows:
                return None
            if layers[-1] >= rows:
                raise ValueError(
                    f"layer_inputs have {rows} rows, for the first of the layers {layers[0]} to {layers[-1]}, which are "
                    "scanned together: give layers without a row another kind"
                )
            if len(layers) == 1:
                return jax.tree.map(lambda a: a[layers[0]], layer_inputs)
            return jax.tree.map(lambda a: a[layers.start : layers.stop : layers.step], layer_inputs)

        return [[slot_inputs(group.layers(slot)) for slot in range(group.period)] for group in self.layer_groups]

    def in_layer_order(self, auxes: Sequence[list[Aux]]) -> Aux:
        """Joins what `run_group` reports for each group into one array per name.

        Returns:
            By name, a row for each layer that reports it, in layer order.
        """
        values: dict[str, list[Array]] = {}
        numbers: dict[str, list[int]] = {}
        for group, slots in zip(self.layer_groups, auxes, strict=True):
            for slot, aux in enumerate(slots):
                for name, value in aux.items():
                    # [...] -> [1, ...] for a layer that is not scanned
                    values.setdefault(name, []).append(value if group.repeats > 1 else jnp.asarray(value)[None])
                    numbers.setdefault(name, []).extend(group.layers(slot))
        return {name: jnp.concatenate(rows)[np.argsort(numbers[name])] for name, rows in values.items()}

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> tuple[list[Any], ...]:
        """Makes an empty cache of every layer, stored like the layers: by group and slot.

        Args:
            batch: Number of rows.
            capacity: Maximum number of tokens in a row.
            dtype: Dtype of the stored values; int8 and float8 are quantized.

        Raises:
            ValueError: when a layer cannot store its state in `dtype` (`SequenceMixer.quantizable_cache`).
        """
        check_cache_dtype(self, dtype)

        def slot_cache(layer: Any, repeats: int) -> Any:
            cache = layer.init_cache(batch, capacity, dtype)
            # [B, ...] -> [repeats, B, ...]
            return cache if repeats == 1 else jax.tree.map(lambda a: jnp.repeat(a[None], repeats, axis=0), cache)

        groups = zip(self.groups, self.layer_groups, strict=True)
        return tuple([slot_cache(layer, group.repeats) for layer in slots] for slots, group in groups)

    def cache_of(self, i: int, caches: Any) -> Any:
        """Returns layer `i`'s cache from the result of `init_cache`."""
        n, slot, row = self._place(i)
        # [repeats, B, ...] -> [B, ...]
        return caches[n][slot] if row is None else jax.tree.map(lambda a: a[row], caches[n][slot])

    def unstacked(self) -> "Stack":
        """Returns a stack that stores each layer alone, which decodes faster and compiles more slowly."""
        return self._stored(((len(self), 1),) if len(self) else ())

    def restacked(self, kinds: Sequence[Hashable] | None = None) -> "Stack":
        """Returns a stack that scans equal layers again, such as one from `unstacked` whose layers were changed.

        Layers are equal if they have the same kind, the same structure (including attributes that are not arrays), and
        arrays of the same shapes and dtypes.

        Args:
            kinds: A value for each layer, in which equal layers must agree too.
        """
        kinds = (None,) * len(self) if kinds is None else tuple(kinds)
        layers = jax.eval_shape(lambda stack: [stack._layer(i) for i in range(len(stack))], self)
        structures = [(jax.tree.structure(layer), tuple(jax.tree.leaves(layer))) for layer in layers]
        return self._stored(find_groups(number_kinds(zip(self.kind_numbers, structures, kinds, strict=True))))

    def _stored(self, grouping: Grouping) -> "Stack":
        """Returns a stack with copies of the same layers in these groups."""
        layers, new = [self._layer(i) for i in range(len(self))], _copy(self)

        def slot(numbers: range) -> nnx.Module:
            if len(numbers) == 1:
                # Copied even if a layer is stored alone before and after, so that an edit changes only one stack.
                return _copy(layers[numbers[0]])
            # Arrays [...] of the layers of one slot -> [repeats, ...]
            return jax.tree.map(lambda *a: jnp.stack(a), *(layers[i] for i in numbers))

        new._store(grouping, slot)
        return new


def unstack(model: Any) -> Any:
    """Returns `model` with all layers of all its stacks stored one by one."""
    return jax.tree.map(
        lambda x: x.unstacked() if isinstance(x, Stack) else x, model, is_leaf=lambda x: isinstance(x, Stack)
    )


def _run_stages(slots: nnx.List, x: Any, ctx: Any, remat: Policy) -> tuple[Any, list[Aux]]:
    """Runs a group as a pipeline."""

    # `active` is False for repeats that pad a stage with fewer layers than the others.
    def stage(slots, active, x, ctx):
        x, _, aux = scan_group(slots, x, ctx, remat=remat, active=active)
        return x, aux

    return run_pipeline(stage, slots, x, ctx, remat=remat_policy(remat))


def check_no_inputs(inputs: Any) -> None:
    """Raises ValueError if layers of a pipeline get inputs of their own."""
    if jax.tree.leaves(inputs):
        raise ValueError(
            "layer_inputs are not supported in a pipeline; put the values in x or ctx, or use a strategy without Pipeline"
        )


def _copy(tree: Layer) -> Layer:
    """Returns a tree with new variables, which share their arrays with the old ones."""
    return jax.tree.map(lambda a: a, tree)


class _ReadOnlyState(TraceState):
    """State that flax checks before it changes a module or a variable. It is not part of the pytree, so `jax.tree.map`
    and `jit` treat the layer as an ordinary one.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int):
        super().__init__()
        self._number = number

    def is_valid(self) -> NoReturn:
        raise ValueError(
            f"layer {self._number} was read from a stack that scans its layers, so it is a copy, and a change to it "
            "would not reach the model. Change it in `nn.unstack(model)`, which stores each layer alone; `restacked()` of "
            "a stack scans equal layers again. To change only the copy, copy it first: `jax.tree.map(lambda a: a, layer)`"
        )


def _read_only(layer: Layer, number: int) -> Layer:
    """Makes assignments to a layer, its submodules and their variables raise an error.

    Args:
        layer: The copy, which is changed in place.
        number: The layer's index in its stack, for the message.
    """
    state = _ReadOnlyState(number)
    for _, node in nnx.iter_graph(layer):
        if isinstance(node, nnx.Variable):
            object.__setattr__(node, "_trace_state", state)
        elif isinstance(node, nnx.Pytree):
            object.__setattr__(node._pytree__state, "_trace_state", state)
    return layer
