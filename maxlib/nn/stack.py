"""Stacks of layers; layers of equal structure are scanned."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib.nn._layer_axis import with_layer_axis, without_layer_axis
from maxlib.nn._layer_rows import Aux, in_layer_order, inputs_by_slot
from maxlib.nn._layer_rows import check_no_inputs as check_no_inputs
from maxlib.nn._linear import draw_key
from maxlib.nn._model import Model
from maxlib.nn._read_only import read_only
from maxlib.nn._scan_check import check_alike, skip_check, slots_built_apart
from maxlib.nn._scan_check import skip_layer_check as skip_layer_check
from maxlib.nn._scan_layers import run_group as run_group
from maxlib.nn._scan_layers import scan_group as scan_group
from maxlib.nn._stack_grouping import LayerGroup, as_grouping, layer_groups, locate, normalized_grouping
from maxlib.nn._with_shared import WithShared as WithShared
from maxlib.nn.mixer import check_cache_dtype, check_order, is_reorderable
from maxlib.nn.remat import Policy, remat_policy
from maxlib.nn.tree import StackedLayers
from maxlib.sharding.layers import LAYERS, LEAD_LAYERS
from maxlib.sharding.memory import to_device
from maxlib.sharding.pipelining import pipelined, stages

_AXES = {"lead": LEAD_LAYERS, "body": LAYERS}


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
        """Returns what each layer gets for itself, as arrays with a leading axis of layers; None for nothing."""
        ...

    def leave(self, x: Float[Array, "B T D"], ctx: Any) -> Float[Array, "B T D"]:
        """Returns the input of the head: the last layer's `x`, normed."""
        ...


class Stack(StackedLayers):
    """Layers `make(0, rngs) ... make(num_layers - 1, rngs)`, each `layer(x, ctx, cache) -> (x, cache, aux)`.

    The first `lead` layers repeat with period `lead_period` (1 = all identical) and are scanned together; the next
    `prefix` layers are stored one by one. The rest repeats every `period` layers, so that one `lax.scan` applies it;
    layers that do not fill a period are stored one by one at the end. For `lead=2, prefix=1, period=3` and 12 layers of
    the kinds A to E:

        D D | E | A B C  A B C  A B C        lead, prefix, body (and an empty suffix)

    Scanned layers are stored as one layer with a leading axis, which is named in the variables' metadata: `("layers",
    "heads", ...)`, in the lead `("lead_layers", ...)`. A layer that is stored alone, or taken out (`stack[i]`), does
    not have this axis.

    The key of layer `i` is the stack's key folded with `i`, so initial values do not depend on the grouping.

        stack = nn.Stack(lambda i, rngs: llama.Block(cfg, rngs=rngs), cfg.num_layers, rngs=nnx.Rngs(0))
        y, cache, aux = stack(jnp.ones((2, 8, cfg.dim)), nn.context(2, 8))

    Args:
        make: Builds layer `i` from its index and `nnx.Rngs`. Layers that are scanned together must have one structure,
            and are built at once by vmap; if initial values depend on `i` (scaled by depth), each layer is compiled
            separately.
        num_layers: Number of layers.
        lead: Number of initial layers that differ from the body and are scanned separately.
        prefix: Number of layers after the lead that are stored one by one.
        period: Number of layers after which the kinds of the body repeat. `nn.grouping_for` finds these numbers.
        lead_period: Number of layers after which the kinds of the lead repeat.
        rngs: Source of initial values; one key is drawn from `params`.

    Raises:
        ValueError: when layers that would be scanned together differ, or the numbers do not fit.
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
        lead_period: int = 1,
        rngs: nnx.Rngs,
    ):
        grouping = normalized_grouping(num_layers, lead, prefix, period, lead_period)
        key = draw_key(rngs)
        # [num_layers] keys, one per layer.
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(num_layers))

        def build(i: int, key: Any) -> nnx.Module:
            return make(i, nnx.Rngs(key))

        def alone(numbers: range) -> nnx.Module:
            return build(numbers[0], keys[numbers[0]])

        def stacked(numbers: range) -> nnx.Module:
            if numbers in apart:
                return jax.tree.map(lambda *a: jnp.stack(a), *(build(i, keys[i]) for i in numbers))
            # vmap over the keys of layers that are scanned together: every variable becomes [repeats, ...].
            of_slot = keys[numbers.start : numbers.stop : numbers.step]
            return jax.vmap(lambda key: build(numbers[0], key))(of_slot)

        # Slots whose layers have initial values that depend on the index are built layer by layer.
        apart = set() if skip_check.value else slots_built_apart(build, keys, grouping)
        self._store(grouping, alone, stacked)

    def _store(self, grouping: dict[str, int], alone: Callable, stacked: Callable) -> None:
        """Stores the layers of every slot; `alone` makes a single layer, and `stacked` several, from their indices."""
        self.num_layers, self.period, self.num_lead = (
            grouping["num_layers"],
            grouping["period"],
            grouping.get("lead", 0),
        )
        self.lead_period = grouping.get("lead_period", 1)
        for name, group in layer_groups(**grouping).items():
            slots = [group.layers(slot) for slot in range(group.slots)]
            if group.repeats is None:
                made = [alone(numbers) for numbers in slots]
            else:
                made = [with_layer_axis(stacked(numbers), _AXES[name]) for numbers in slots]
            setattr(self, name, nnx.List(made))

    @property
    def grouping(self) -> dict[str, int]:
        """Returns `num_layers`, `prefix` and `period` as stored, and `lead` and `lead_period` if there is a lead."""
        return as_grouping(self.num_layers, self.num_lead, len(self.prefix), self.period, self.lead_period)

    @property
    def repeats(self) -> int:
        """Number of scanned periods of the body."""
        return self.layer_groups["body"].repeats or 0

    @property
    def layer_groups(self) -> dict[str, LayerGroup]:
        """The layers in `lead`, `prefix`, `body` and `suffix`, in the order in which they run."""
        return layer_groups(**self.grouping)

    @property
    def is_reorderable(self) -> bool:
        """Returns True if every layer allows tokens to be reordered among devices (`SequenceMixer.reorderable`)."""
        return all(is_reorderable(layer) for name in self.layer_groups for layer in getattr(self, name))

    def where(self, i: int) -> tuple[str, int | None]:
        """Returns layer `i`'s path below this stack and its index on the leading axis (None if it is stored alone)."""
        return locate(self._index(i), **self.grouping)

    def _index(self, i: int) -> int:
        if not hasattr(i, "__index__"):
            raise TypeError(f"a layer's number must be a whole number, got {i!r}; slices of a stack are not layers")
        if not -self.num_layers <= i < self.num_layers:
            raise IndexError(f"there is no layer {i}: the stack has {self.num_layers}, numbered from 0")
        return range(self.num_layers)[i]

    def __len__(self) -> int:
        """Returns the number of layers."""
        return self.num_layers

    def __getitem__(self, i: int) -> Any:
        """Returns layer `i`. A scanned layer is returned as a read-only copy: editing it would not change the stack."""
        i = self._index(i)
        layer = self._layer(i)
        return layer if self.where(i)[1] is None else read_only(layer, i)

    def _layer(self, i: int) -> Any:
        """Returns layer `i`: the layer itself if it is stored alone, else a copy."""
        path, repeat = self.where(i)
        kind, slot = path.split(".")
        layer = getattr(self, kind)[int(slot)]
        if repeat is None:
            return layer
        # [repeats, ...] -> [...]
        return without_layer_axis(jax.tree.map(lambda a: to_device(a)[repeat], layer))

    def __iter__(self) -> Iterator[Any]:
        """Yields the layers in order; scanned layers are copies, as in `__getitem__`."""
        return (self[i] for i in range(self.num_layers))

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
            x: Value that passes from layer to layer: an array, or a pytree with more values (`WithShared`).
            ctx: Values shared by all layers, from `nn.context`.
            cache: Cache from `init_cache`, or None.
            remat: What layers keep for the backward pass, see `nn.remat`.
            layer_inputs: Arrays with a leading axis of `num_layers`. Layer `i` gets row `i` as a fourth argument. If
                they have fewer rows, later layers get none; such layers must not be scanned together with layers that
                get one.
            pipelined: False if layers report rows, which a pipeline would average over microbatches: no pipeline then.

        Returns:
            The last layer's `x`, the new cache (None without one), and the layers' `aux` entries by name, with a row
            for each layer that reports them.

        Raises:
            ValueError: when tokens were reordered for a layer that needs their natural order, or `layer_inputs` are
                used in a pipeline.
        """
        check_order(self, ctx)
        new_caches, auxes = [], []
        body = self._run_body if pipelined else scan_group
        runners = {"lead": scan_group, "prefix": run_group, "body": body, "suffix": run_group}
        # Groups run in the order lead, prefix, body, suffix; the cache is a tuple in the same order.
        for i, (name, inputs) in enumerate(self.inputs_by_group(layer_inputs).items()):
            layers, caches = getattr(self, name), None if cache is None else cache[i]
            x, new, aux = runners[name](layers, x, ctx, caches, remat=remat, inputs=inputs)
            new_caches.append(new)
            auxes.append(aux)
        return x, None if cache is None else tuple(new_caches), in_layer_order(self.layer_groups.values(), auxes)

    def inputs_by_group(self, layer_inputs: Any) -> dict[str, list[Any] | None]:
        """Returns for each group its rows of `layer_inputs` by slot; None without them."""
        return {name: inputs_by_slot(group, layer_inputs) for name, group in self.layer_groups.items()}

    def _run_body(self, body, x, ctx, caches, *, remat, inputs):
        """Scans the body, or runs it as a pipeline if the grouping splits it into stages."""
        if caches is not None or stages() == 1 or not len(body):
            return scan_group(body, x, ctx, caches, remat=remat, inputs=inputs)
        check_no_inputs(inputs)

        # `active` is False for repeats that pad a stage with fewer layers than the others.
        def stage(body, active, x, ctx):
            x, _, aux = scan_group(body, x, ctx, remat=remat, active=active)
            return x, aux

        x, aux = pipelined(stage, body, x, ctx, remat=remat_policy(remat))
        return x, None, aux

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16) -> tuple[list, list, list, list]:
        """Makes an empty cache of every layer, stored like the layers: `lead`, `prefix`, `body`, `suffix`.

        Args:
            batch: Number of rows.
            capacity: Maximum number of tokens in a row.
            dtype: Dtype of the stored values; int8 and float8 are quantized.

        Raises:
            ValueError: when a layer cannot store its state in `dtype` (`SequenceMixer.quantizable_cache`).
        """
        check_cache_dtype(self, dtype)
        # [B, ...] -> [repeats, B, ...]
        repeat = lambda cache, n: jax.tree.map(lambda a: jnp.repeat(a[None], n, axis=0), cache)
        found = []
        for name, group in self.layer_groups.items():
            caches = [layer.init_cache(batch, capacity, dtype) for layer in getattr(self, name)]
            found.append(caches if group.repeats is None else [repeat(cache, group.repeats) for cache in caches])
        return tuple(found)

    def cache_of(self, i: int, caches: Any) -> Any:
        """Returns layer `i`'s cache from the result of `init_cache`."""
        path, repeat = self.where(i)
        kind, slot = path.split(".")
        found = caches[list(self.layer_groups).index(kind)][int(slot)]
        # [repeats, B, ...] -> [B, ...]
        return found if repeat is None else jax.tree.map(lambda a: a[repeat], found)

    def regrouped(self, *, lead: int = 0, prefix: int, period: int, lead_period: int = 1) -> "Stack":
        """Returns a new stack with the same layers in another grouping; layers stored together must be alike.

        Raises:
            ValueError: when layers that would be stored together differ, or the numbers do not fit.
        """
        layers, new = [self._layer(i) for i in range(len(self))], jax.tree.map(lambda a: a, self)

        # Arrays [...] of the layers of one slot -> [repeats, ...]
        def stacked(numbers: range) -> nnx.Module:
            check_alike(layers, numbers, grouping)
            return jax.tree.map(lambda *a: jnp.stack(a), *(layers[i] for i in numbers))

        grouping = normalized_grouping(len(layers), lead, prefix, period, lead_period)
        # Copy the variables even if a layer is stored alone before and after, so that an edit changes only one stack.
        alone = lambda numbers: jax.tree.map(lambda a: a, layers[numbers[0]])
        new._store(grouping, alone, stacked)
        return new

    def unstacked(self) -> "Stack":
        """Returns a stack that stores each layer alone, which decodes faster and compiles more slowly."""
        return self.regrouped(prefix=self.num_layers, period=self.period)


def unstack(model: Any) -> Any:
    """Returns `model` with all layers of all its stacks stored one by one."""
    is_stack = lambda x: isinstance(x, Stack)
    return jax.tree.map(lambda x: x.unstacked() if is_stack(x) else x, model, is_leaf=is_stack)
