"""Hooks that read layers' outputs and their gradients, without changing the model or its results.

Every layer of a copy gets a variable of zeros, its tap. The layer's output passes through an identity function whose
"gradient" with respect to the tap is a row of statistics of the output and its gradient. So the statistics are returned
along with the gradients: through `lax.scan`, which stacks them layer by layer, through remat, on any mesh, and without
a callback from the device.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn

FIELDS = ("rms", "max", "nonfinite", "gradient_rms", "gradient_nonfinite")
LOGITS = ("max_logit", "entropy")


class Tap(nnx.Variable):
    """Zeros; its gradient is a row of `FIELDS` (or `LOGITS`)."""


def with_hooks(model: Any) -> tuple[Any, list[str]]:
    """Returns a copy of `model` with hooks, and a list that tracing the copy fills with the paths of layers as they
    finish.
    """
    model, order = jax.tree.map(lambda leaf: leaf, model), []
    _attach(model, "", (), order)
    return model, order


def read(path: str, row: Any) -> dict[str, Any]:
    """Returns the fields in the gradient of the tap at `path`."""
    return dict(zip(LOGITS if path.endswith(".logit_tap") else FIELDS, row, strict=True))


def in_layer_order(order: Iterable[str], groupings: Mapping[str, nn.stack.Grouping]) -> list[tuple[str, int | None]]:
    """Returns the hooks, with their row on a stack's repeat axis, in the order in which their layers finish."""
    hooks: list[tuple[str, int | None]] = []
    for group, paths in itertools.groupby(dict.fromkeys(order), key=lambda path: _scanned(path, groupings)):
        rows = [None] if group is None else range(group[1])
        hooks += [(path, row) for row, path in itertools.product(rows, list(paths))]
    return hooks


def _scanned(path: str, groupings: Mapping[str, nn.stack.Grouping]) -> tuple[str, int] | None:
    """Returns the path of the scanned group that stores this layer, and how often it repeats."""
    group = nn.stack.group_at(path, groupings)
    return None if group is None or group[1].repeats == 1 else (group[0], group[1].repeats)


def _attach(module: nnx.Module, path: str, repeats: tuple[int, ...], order: list[str]) -> None:
    """Attaches taps below `module`; `repeats` are the leading axes that enclosing stacks give to every variable."""
    for name, child in [child for attribute in vars(module).items() for child in _modules(*attribute)]:
        here = f"{path}.{name}" if path else name
        inner = (*repeats, *_rows(module, name))
        _attach(child, here, inner, order)
        if not nn.tree.is_stack(child):
            # Layers differ only by their paths, so that equal classes with equal paths are equal to jit and scan.
            child.__class__ = _hooked_class(type(child))
            child.tap_path = here  # pyright: ignore[reportAttributeAccessIssue]
            child.tap = Tap(jnp.zeros((*inner, len(FIELDS))))  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(child, nn.SequenceMixer) and child.probes_scores:
                child.logit_tap = Tap(jnp.zeros((*inner, len(LOGITS))))  # pyright: ignore[reportAttributeAccessIssue]
            child.tap_order = _Order(order)  # pyright: ignore[reportAttributeAccessIssue]


def _rows(module: nnx.Module, child: str) -> tuple[int, ...]:
    """Returns the leading axis that a stack gives to a child with several layers."""
    if not isinstance(module, nn.Stack):
        return ()
    _, group, _ = child.split(".")  # "groups.1.0"
    repeats = module.layer_groups[int(group)].repeats
    return () if repeats == 1 else (repeats,)


class _Order:
    """List of paths that equals every other instance, so that it does not change jit's cache key."""

    def __init__(self, paths: list[str]):
        self.paths = paths

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Order)

    def __hash__(self) -> int:
        return 0


def _modules(name: str, value: Any) -> list[tuple[str, nnx.Module]]:
    """Returns the modules of an attribute, including those in lists and in lists of lists."""
    if isinstance(value, nnx.List):
        return [child for i, item in enumerate(value) for child in _modules(f"{name}.{i}", item)]
    return [(name, value)] if isinstance(value, nnx.Module) else []


@functools.cache
def _hooked_class(cls: Any) -> type:
    """Returns a subclass that can be assigned to `__class__` of an instance of `cls`, because it adds no slots."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten(cls.__call__(self, *args, **kwargs))
        for i, leaf in enumerate(leaves):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                self.tap_order.paths.append(self.tap_path)
                leaves[i] = _through(_with_scores(self, leaf, args), self.tap[...])
                break  # the first array that a layer returns is its output
        return jax.tree.unflatten(tree, leaves)

    return type(cls.__name__, (cls,), {"__slots__": (), "__call__": __call__})


def _with_scores(layer: Any, out: Array, args: Sequence[Any]) -> Array:
    """Makes the gradient of an attention layer's `logit_tap` return statistics of its scores."""
    if not hasattr(layer, "logit_tap"):
        return out
    x, ctx = args[0], args[1] if len(args) > 1 else None
    ctx = nn.make_context(*x.shape[:2]) if ctx is None else ctx
    q, k = layer.queries_and_keys(x, ctx)
    k_start, k_end = (bound[0] for bound in ctx.key_intervals(layer.mask))
    seen = jax.lax.stop_gradient(logits_seen(q[0], k[0], k_start, k_end, layer.scale))
    return beside(out, layer.logit_tap[...], seen)


@jax.custom_vjp
def _through(x: Array, tap: Array) -> Array:
    return x


def _through_fwd(x: Array, tap: Array) -> tuple[Array, Array]:
    value = x.astype(jnp.float32)
    return x, jnp.stack([_rms(value), jnp.max(jnp.abs(value)), _nonfinite(value)])


def _through_bwd(seen: Array, gradient: Array) -> tuple[Array, Array]:
    value = gradient.astype(jnp.float32)
    return gradient, jnp.concatenate([seen, jnp.stack([_rms(value), _nonfinite(value)])])


_through.defvjp(_through_fwd, _through_bwd)


@jax.custom_vjp
def beside(x: Array, tap: Array, seen: Array) -> Array:
    """Returns `x`; the gradient with respect to `tap` is `seen`."""
    return x


beside.defvjp(lambda x, tap, seen: (x, seen), lambda seen, gradient: (gradient, seen, jnp.zeros_like(seen)))


def _rms(x: Array) -> Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def _nonfinite(x: Array) -> Array:
    return jnp.sum(~jnp.isfinite(x)).astype(jnp.float32)


def logits_seen(
    q: Float[Array, "T N H"], k: Float[Array, "S K H"], k_start: Array, k_end: Array, scale: float | None
) -> Float[Array, "2"]:
    """Returns the largest visible attention logit and the mean entropy in nats of one row, one head at a time.

    Logits are those before the soft-cap, and without sinks.
    """
    factor, group = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[1] // k.shape[1]
    index = jnp.arange(k.shape[0])[None, :]
    kept = (index >= k_start[:, None]) & (index < k_end[:, None])
    real = jnp.any(kept, axis=1)

    def head(n: Array) -> tuple[Array, Array]:
        logits = factor * jnp.einsum("TH,SH->TS", q[:, n].astype(jnp.float32), k[:, n // group].astype(jnp.float32))
        logits = jnp.where(kept, logits, -1e30)
        log_p = jax.nn.log_softmax(logits, axis=1)
        entropy = -jnp.sum(jnp.where(kept, jnp.exp(log_p) * log_p, 0.0), axis=1)
        return jnp.max(logits), jnp.sum(jnp.where(real, entropy, 0.0)) / jnp.maximum(jnp.sum(real), 1)

    largest, entropy = jax.lax.map(head, jnp.arange(q.shape[1]))
    return jnp.stack([jnp.max(largest), jnp.mean(entropy)])
