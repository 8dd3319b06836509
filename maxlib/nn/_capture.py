"""Reading and replacing a model's intermediate values by name.

Layers name values with `checkpoint_name`, for remat. A name is an equation of the traced program (its jaxpr), so a
program can be evaluated again with what stands at a name read, or replaced: no layer takes part, and it works for any
layer, inside scans, remat, jit and gradients.

`Decoder` names the layers' first input "embed", and `Stack` each layer's input "resid_pre", so the number of
"resid_pre" since "embed" tells the layer. All this is known from the program's text; nothing runs twice.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core
from jaxtyping import Array

from maxlib._utils.loops import scan_counts
from maxlib.nn.decoder._context import natural_order
from maxlib.nn.mixer import SequenceMixer

FIRST, LAYER = "embed", "resid_pre"  # the names that count layers
PATTERN = "attention_pattern"
Replacement = Callable[[Array, Any], Array]


def capture(
    model: Any, names: str | Iterable[str], *, layers: int | Iterable[int] | None = None
) -> Callable[..., tuple[Any, dict[str, Array]]]:
    """Returns a function that calls `model` and also returns intermediate values.

        run = nn.capture(model, ["resid_pre", "heads"], layers=[0, 1])
        output, values = run(tokens, dtype=jnp.float32)  # values["heads"] is [2, B, T, N, H]

    It may be used under `jax.jit`, `jax.grad` and with a cache, packed rows or remat, and of a patched model. Only the
    values of the layers asked for are stored. Tokens are in natural order, also where devices split a sequence.

    Args:
        model: Any callable pytree, such as a `Decoder`, a part of it or a model of your own.
        names: Names of values; `named_values` lists them. If a layer has several values of a name, they are "name.0",
            "name.1" and so on. "attention_pattern", the probabilities `B N T S`, runs attention as
            `implementation="reference"`, which computes them for every mask, cap and sink; layers with cross-attention,
            or that join two attentions as DeepSeek V4's do, have one for each.
        layers: Numbers of the layers; None for all that have the name. Values outside of layers have none: ask for them
            with None.

    Returns:
        A function with the model's arguments, which returns the model's result and the values by name. Values have a
        leading axis of layers, in order; that of a name which stands outside of layers, such as "embed", has one row.

    Raises:
        KeyError: when called, if the model has no value of a name, or a layer has none.
        ValueError: when called, if a value cannot be returned from where it is computed (within `jax.shard_map`,
            `lax.cond`, `lax.while_loop` or a function with a derivative of its own), layers' values differ in shape, or
            a layer has several values of a name.
    """
    wanted = (names,) if isinstance(names, str) else tuple(names)
    chosen = _numbers(layers)
    model = _with_reference_attention(model) if PATTERN in map(_base, wanted) else model

    def run(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Array]]:
        result, values = _evaluated(_call, (model, args, kwargs), _Taps(frozenset(wanted), {}, chosen))
        return result, {name: _stacked(name, [v for v in values if v.matches(name)], chosen) for name in wanted}

    return run


def patch(model: Any, replacements: Mapping[str, Replacement], *, layers: int | Iterable[int] | None = None) -> Any:
    """Returns a copy of `model` that replaces intermediate values by what functions make of them.

        quiet = nn.patch(model, {"heads": lambda z, layer: z.at[:, :, 1].set(0)}, layers=2)  # without head 1 of layer 2

    The copy is a model as any other: it trains, generates with a cache, and can be captured and patched again.

    Args:
        model: An `nnx.Module`, such as a `Decoder`.
        replacements: Functions by name, `fn(value, layer) -> value` of the same shape and dtype. `layer` is the layer's
            number: an integer, or traced inside a scan. "name" replaces all values of a name, "name.1" the second of
            each layer.
        layers: Numbers of the layers to change; None for all that have the name.

    Raises:
        TypeError: when called, if a function changes a value's shape or dtype.
        KeyError, ValueError: when called, as for `capture`.
    """
    return patched(model, replacements, layers)


def patched(
    model: Any,
    replacements: Mapping[str, Replacement],
    layers: int | Iterable[int] | None = None,
    *,
    in_order: bool = True,
) -> Any:
    """Returns `patch(model, replacements, layers=layers)`; without `in_order` its functions may get tokens in zigzag
    order.
    """
    base: Any = type(model)
    chosen = _numbers(layers)

    def call(self: Any, args: Any, kwargs: Any) -> Any:
        return base.__call__(self, *args, **kwargs)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        taps = _Taps(frozenset(), replacements, chosen, in_order=in_order)
        result, _ = _evaluated(call, (self, args, kwargs), taps)
        for name in replacements:
            missing = [layer for layer in chosen or () if layer not in taps.replaced.get(name, ())]
            if missing or name not in taps.replaced:
                where = f"layers {missing} have" if missing else "the model has"
                raise KeyError(f"{where} no value named {name!r}; `nn.named_values` lists the layers of each name")
        return result

    patterns = PATTERN in map(_base, replacements)
    model = _with_reference_attention(model) if patterns else jax.tree.map(lambda leaf: leaf, model)
    model.__class__ = type(base.__name__, (base,), {"__slots__": (), "__call__": __call__, "is_patched": True})
    return model


def named_values(model: Any, *args: Any, **kwargs: Any) -> dict[str, dict[int | None, jax.ShapeDtypeStruct]]:
    """Lists the values that `capture` and `patch` can reach in a call of `model`, without computing it.

    Args:
        model: Any callable pytree.
        *args: Its arguments, such as tokens; `jax.ShapeDtypeStruct`s do.
        **kwargs: Its keyword arguments.

    Returns:
        For each name the value's shape by layer; None stands for a value outside of layers.
    """
    jaxpr, arrays, _ = _traced(_call, (model, args, kwargs))
    listed: dict[str, dict[int | None, jax.ShapeDtypeStruct]] = {}

    def evaluate(arrays: list[Any]) -> None:
        run = _Run(_Taps(None, {}, None, strict=False))
        run(jaxpr.jaxpr, jaxpr.consts, arrays)
        several = {value.name for value in run.values if value.place}
        for value in run.values:
            name = f"{value.name}.{value.place}" if value.name in several else value.name
            for layer, x in value.by_layer():
                listed.setdefault(name, {})[layer] = jax.ShapeDtypeStruct(x.shape, x.dtype)

    jax.eval_shape(evaluate, arrays)
    return listed


def _base(name: str) -> str:
    """Returns the name in the program: "heads" of "heads.1", the second in its layer."""
    return re.sub(r"\.[0-9]+$", "", name)


def _call(model: Any, args: Any, kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _numbers(layers: int | Iterable[int] | None) -> tuple[int, ...] | None:
    """Returns numbers of layers as a tuple; None for all."""
    return None if layers is None else tuple(np.atleast_1d(np.asarray(layers, int)).tolist())


@dataclasses.dataclass
class _Taps:
    """What is asked of a program.

    Attributes:
        captured: Names of values to return; None for all.
        replacements: Functions by name.
        layers: Layers whose values are returned or replaced; None for all.
        strict: False skips names in places from where no value can be returned.
        in_order: False leaves the tokens of a split sequence in zigzag order.
        replaced: Layers whose values were replaced, by name.
    """

    captured: frozenset[str] | None
    replacements: Mapping[str, Replacement]
    layers: tuple[int, ...] | None
    strict: bool = True
    in_order: bool = True
    replaced: dict[str, set[int | None]] = dataclasses.field(default_factory=dict)

    def wants(self, name: str) -> bool:
        """Whether any value of a name, in whatever place in its layer, is asked for."""
        return self.captured is None or name in map(_base, (*self.captured, *self.replacements))

    def captures(self, name: str, place: int) -> bool:
        return self.captured is None or not self.captured.isdisjoint((name, f"{name}.{place}"))

    def selects(self, layer: int | None) -> bool:
        return self.layers is None or layer in self.layers


@dataclasses.dataclass
class _Value:
    """A captured value: that of one layer, or inside a scan that of a layer for each iteration.

    Attributes:
        name: Its name.
        place: How many values of that name precede it in its layer.
        array: The value, or after a scan the values of several layers with a leading axis.
        layers: The layers' numbers, None outside of layers.
        stacked: True if `array` has the leading axis.
    """

    name: str
    place: int
    array: Any  # inside a scan, while its body is traced for shapes, a shape
    layers: list[int | None]
    stacked: bool = False

    def matches(self, name: str) -> bool:
        return name in (self.name, f"{self.name}.{self.place}")

    def by_layer(self) -> list[tuple[int | None, Array]]:
        """Returns each layer's number and value."""
        rows = self.array if self.stacked else [self.array]
        return [(layer, rows[i]) for i, layer in enumerate(self.layers)]


class _Run:
    """Evaluates a program (a jaxpr), and captures and replaces its named values.

    Args:
        taps: What to capture and replace.
        layer: Number of the last layer begun, in the first iteration of an enclosing scan; None for none.
        strides: What each iteration of the enclosing scan adds to that number; 0 outside of one.
        shift: The stride of the current iteration, traced.

    Attributes:
        values: The captured values.
    """

    def __init__(self, taps: _Taps, layer: int | None = None, strides: Sequence[int] = (0,), shift: Any = 0):
        self.taps, self.layer, self.strides, self.shift = taps, layer, strides, shift
        self.values: list[_Value] = []
        self.places: dict[str, int] = {}  # how many values of each name the layer has so far

    def __call__(self, jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr, as `jax.core.eval_jaxpr` does."""
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arrays], strict=True))
        for eqn in jaxpr.eqns:
            read = [x.val if isinstance(x, core.Literal) else env[x] for x in eqn.invars]
            with eqn.ctx.manager:
                results = self._apply(eqn, read)
            env.update(zip(eqn.outvars, results, strict=True))
        return [x.val if isinstance(x, core.Literal) else env[x] for x in jaxpr.outvars]

    def _apply(self, eqn: Any, read: list[Any]) -> Sequence[Any]:
        """Applies one equation; only those with wanted names, or layers, inside are taken apart."""
        primitive = eqn.primitive.name
        if primitive == "name":
            return _bind(eqn, [self._at_name(eqn.params["name"], read[0])])
        names = _names_inside(eqn)
        if not any(self.taps.wants(name) or name in (FIRST, LAYER) for name in names):
            return _bind(eqn, read)
        if primitive == "jit":
            return self(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, read)
        if primitive == "remat2":
            return self._rematerialised(eqn, read)
        if primitive == "scan":
            return self._scan(eqn, read)
        if self.taps.strict and (wanted := sorted({name for name in names if self.taps.wants(name)})):
            raise ValueError(
                f"{', '.join(wanted)} is computed within {primitive}, from where it cannot be returned; ask for a value "
                "around it (`nn.named_values` lists those in reach)"
            )
        return _bind(eqn, read)

    def _at_name(self, name: str, x: Any) -> Any:
        """Returns the value at a name, replaced if that is asked for."""
        if name == FIRST:
            # The layers before it were those of an encoder of images or sound.
            self.layer, self.values = None, [value for value in self.values if value.layers == [None]]
            self.places = {}
        if name == LAYER:
            self.layer = 0 if self.layer is None else self.layer + 1
            self.places = {}
        place = self.places.get(name, 0)
        self.places = self.places | {name: place + 1}
        layers = [None if self.layer is None else self.layer + stride for stride in self.strides]
        if not any(map(self.taps.selects, layers)):
            return x
        for label in (name, f"{name}.{place}"):
            if label in self.taps.replacements:
                x = self._replaced(label, x, layers)
        if self.taps.captures(name, place):
            self.values.append(_Value(name, place, x, layers))
        return x

    def _replaced(self, name: str, x: Array, layers: list[int | None]) -> Array:
        """Returns what the replacement makes of `x`, in the iterations of selected layers."""
        layer = None if self.layer is None else self.layer + self.shift
        new = self.taps.replacements[name](x, layer)
        if (jnp.shape(new), jnp.result_type(new)) != (x.shape, x.dtype):
            raise TypeError(
                f"the replacement of {name} must keep its shape and dtype, {x.dtype}{list(x.shape)}, got "
                f"{jnp.result_type(new)}{list(jnp.shape(new))}"
            )
        self.taps.replaced.setdefault(name, set()).update(layers)
        if all(map(self.taps.selects, layers)):
            return new
        return jnp.where(jnp.isin(jnp.asarray(layer), np.array(self.taps.layers)), new, x)

    def _rematerialised(self, eqn: Any, read: list[Any]) -> Sequence[Any]:
        """Evaluates a function under `jax.checkpoint`; captured values are among its results, so they are kept."""
        inner = self._inner(self.strides, self.shift)

        def run(*arrays: Any) -> Any:
            results = inner(eqn.params["jaxpr"], (), arrays)
            return results, [value.array for value in inner.values]

        run = jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
        results, arrays = run(*read)
        self.layer, self.places = inner.layer, inner.places
        self.values += [dataclasses.replace(v, array=array) for v, array in zip(inner.values, arrays, strict=True)]
        return results

    def _inner(self, strides: Sequence[int], shift: Any) -> "_Run":
        inner = _Run(self.taps, self.layer, strides, shift)
        inner.places = self.places
        return inner

    def _scan(self, eqn: Any, read: list[Any]) -> Sequence[Any]:
        """Evaluates a scan, over layers or over parts of a layer, and returns its results.

        The captured values of all iterations are stacked. If only some layers are asked for, a buffer with a row for
        each of them is carried instead.
        """
        params, body, length = eqn.params, eqn.params["jaxpr"], eqn.params["length"]
        num_consts, num_carry = scan_counts(params)
        first, last = num_consts, num_consts + num_carry
        consts, carry, xs = read[:first], read[first:last], read[last:]
        period = _names(body.jaxpr).count(LAYER)  # layers in an iteration
        if period and (len(self.strides) > 1 or params["reverse"]):
            raise ValueError("layers in a scan within a scan, or in a reversed scan, have no number")
        strides = range(0, period * length, period) if period else self.strides
        values: list[_Value] = []  # of the last trace of the body
        places: dict[str, int] = {}  # after it

        def step(carry: Any, row: Any) -> Any:
            i, carry, buffers = carry
            inner = self._inner(strides, period * i if period else self.shift)
            results = inner(body.jaxpr, body.consts, [*consts, *carry, *row])
            values[:] = [dataclasses.replace(value, array=jax.typeof(value.array)) for value in inner.values]
            places.update(inner.places)
            full = [value.array for value in inner.values if self._rows(value, period) is None]
            partial = [(value.array, rows) for value in inner.values if (rows := self._rows(value, period)) is not None]
            if buffers is not None:  # None in the trace that finds their shapes
                buffers = [_stored(buffer, *new, i, length) for buffer, new in zip(buffers, partial, strict=True)]
            return (i + 1, results[: len(carry)], buffers), (results[len(carry) :], full)

        start = jnp.int32(0)
        jax.eval_shape(step, (start, carry, None), [jax.eval_shape(lambda x: x[0], x) for x in xs])
        empty = [
            jnp.zeros((len(rows), *value.array.shape), value.array.dtype)
            for value in values
            if (rows := self._rows(value, period)) is not None
        ]
        options = {"length": length, "reverse": params["reverse"], "unroll": params["unroll"]}
        (_, carry, buffers), (ys, full) = jax.lax.scan(step, (start, carry, empty), xs, **options)
        buffers, full = iter(buffers), iter(full)
        for value in values:
            rows = self._rows(value, period)
            array = next(full) if rows is None else next(buffers)
            layers = value.layers if rows is None else [value.layers[row] for row in rows]
            self.values.append(_Value(value.name, value.place, array, layers, stacked=period > 0))
        self.places = places
        self.layer = self.layer if not period else (-1 if self.layer is None else self.layer) + period * length
        return [*carry, *ys]

    def _rows(self, value: _Value, period: int) -> list[int] | None:
        """Returns the iterations of a scan over layers whose value is asked for; None if all are."""
        rows = [i for i, layer in enumerate(value.layers) if self.taps.selects(layer)]
        return None if not period or len(rows) == len(value.layers) else rows


def _stored(buffer: Array, x: Array, rows: list[int], i: Array, length: int) -> Array:
    """Writes `x` to the row of `buffer` for iteration `i`, if there is one."""
    row_of = np.full(length, len(rows))
    row_of[rows] = np.arange(len(rows))
    return buffer.at[jnp.asarray(row_of)[i]].set(x, mode="drop")


def _bind(eqn: Any, read: list[Any]) -> Sequence[Any]:
    """Applies an equation as it is."""
    results = eqn.primitive.bind(*read, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def _names(jaxpr: Any) -> list[str]:
    """Returns the names in a program, in order; those in a loop once."""
    return [
        name
        for eqn in jaxpr.eqns
        for name in ([eqn.params["name"]] if eqn.primitive.name == "name" else _names_inside(eqn))
    ]


def _names_inside(eqn: Any) -> list[str]:
    return [name for jaxpr in core.jaxprs_in_params(eqn.params) for name in _names(jaxpr)]


def _evaluated(fn: Callable, arguments: Any, taps: _Taps) -> tuple[Any, list[_Value]]:
    """Returns the result of `fn(*arguments)` and the captured values."""
    with natural_order(natural_order.value or taps.in_order):
        jaxpr, arrays, tree = _traced(fn, arguments)
    run = _Run(taps)
    return jax.tree.unflatten(tree, run(jaxpr.jaxpr, jaxpr.consts, arrays)), run.values


def _traced(fn: Callable, arguments: Any) -> tuple[Any, list[Any], Any]:
    """Returns the program of `fn(*arguments)`, the arrays it reads, and the structure of its result.

    What is no array among the arguments (a dtype, a policy) is part of the program.
    """
    leaves, tree = jax.tree.flatten(arguments)
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]
    arrays = [leaf for leaf, flag in zip(leaves, is_array, strict=True) if flag]

    def call(arrays: list[Any]) -> Any:
        read = iter(arrays)
        return fn(*tree.unflatten(next(read) if flag else leaf for leaf, flag in zip(leaves, is_array, strict=True)))

    jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)(arrays)
    return jaxpr, arrays, jax.tree.structure(shapes)


def _stacked(name: str, values: list[_Value], layers: tuple[int, ...] | None) -> Array:
    """Returns the values of a name with a leading axis of layers."""
    rows = [row for value in values for row in value.by_layer()]
    present = [layer for layer, _ in rows]
    if len(set(present)) < len(present):
        raise ValueError(f"a layer has several values named {name!r}: ask for '{name}.0', '{name}.1' and so on")
    if missing := [layer for layer in layers or () if layer not in present]:
        raise KeyError(f"layers {missing} have no {name!r}; `nn.named_values` lists the layers of each name")
    if not rows:
        raise KeyError(f"the model has no value named {name!r}; `nn.named_values` lists its names")
    if layers is not None:
        by_layer = dict(rows)
        rows = [(layer, by_layer[layer]) for layer in layers]
    elif len(values) == 1 and values[0].stacked:
        return values[0].array
    else:  # a scan over periods of several layers gives the first of each period, then the second
        rows.sort(key=lambda row: -1 if row[0] is None else row[0])
    shapes = {row.shape for _, row in rows}
    if len(shapes) > 1:
        raise ValueError(
            f"{name!r} has another shape in each kind of layer, {sorted(shapes)}: ask for layers= of one kind"
        )
    return jnp.stack([row for _, row in rows])


def _with_reference_attention(model: Any) -> Any:
    """Returns a copy whose attention computes its probabilities, as a matrix."""
    model = jax.tree.map(lambda leaf: leaf, model)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, SequenceMixer) and module.op == "attention":
            module.implementation = "reference"  # pyright: ignore[reportAttributeAccessIssue]
    return model
