"""How much arithmetic a model asks for, counted on its traced forward pass, and how much a device offers.

`maxlib.plan` counts another thing, on the compiler's text: what a program executes, recomputation and padding included.
"""

import functools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from maxlib.hardware import chip_of
from maxlib.ops._cost import FORMULAS


class Counts(list[tuple[float, Any, str]]):
    """Counted FLOPs: how often, FLOPs of one time, and by which op and on which dtypes.

    Args:
      follow: compute the integers on which masks depend, as far as they are known.
    """

    def __init__(self, follow: bool = True):
        super().__init__()
        self.follow = follow


def training_flops(loss_fn: Callable[..., Any], model: Any, batch: Any) -> float:
    """Counts the model FLOPs of one training step: three times those of the loss (a backward pass has two matmuls for
    each one).

    Recomputation by remat and whatever is no matmul do not count, and frozen parameters count like others. For a
    decoder this is `6 N T + 6 L pairs heads (Hk + Hv)`: N weights in matmuls, T tokens, L layers, pairs of a query and
    a key it sees.
    """
    model = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
    return 3 * forward_flops(loss_fn, model, batch, jax.random.key(0))


def forward_flops(fn: Callable[..., Any], *args: Any) -> float:
    """Counts the FLOPs of the matmuls and convolutions in `fn(*args)`: two for each multiplication with its addition.

    The body of a `lax.scan` counts as often as it runs, of a `lax.cond` the dearest branch. Attention counts the pairs
    that its masks leave; documents count where `args` hold the integers that mark them, while a `jax.ShapeDtypeStruct`
    leaves them unknown (then every pair counts). Ops with `ops.register_flops` go by their own formula. No float
    is computed. Count without a mesh: call it outside `sharding.use`.
    """
    return sum(flops for _, flops in _counted(fn, args, follow=True))


def flops_by_dtype(fn: Callable[..., Any], *args: Any) -> dict[str, float]:
    """Counts as `forward_flops` does, by the dtypes of the operands, such as "int8 x int8".

    Ops of `maxlib.ops` come under their own name ("grouped_matmul int8 x int8"), attention as if every query attended
    to every key.
    """
    found: dict[str, float] = {}
    for what, flops in _counted(fn, args, follow=False):
        found[what] = found.get(what, 0.0) + flops
    return found


def _counted(fn: Callable[..., Any], args: Any, *, follow: bool) -> list[tuple[str, float]]:
    """Returns what `fn(*args)` multiplies and the FLOPs of it, once for each equation of the trace."""
    leaves, tree = jax.tree.flatten(args)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    traced = jax.make_jaxpr(lambda *leaves: fn(*jax.tree.unflatten(tree, leaves)))(*shapes)
    known = [np.asarray(x) if follow and _is_known(x) else None for x in leaves]
    found: list[tuple[float, str]] = []

    def evaluate(known: list[Any]) -> list[jax.Array]:
        counts = Counts(follow)
        _walk(traced, known, 1.0, counts)
        found[:] = [(times, what) for times, _, what in counts]
        return [jnp.asarray(flops, jnp.float32) for _, flops, _ in counts]

    # One small program computes the integers that masks depend on; all else in the trace is dead code to it.
    flops = jax.device_get(jax.jit(evaluate)(known))
    return [(what, times * float(one)) for (times, what), one in zip(found, flops, strict=True)]


def peak_flops() -> float | None:
    """Returns the FLOP/s of all devices together: from `maxlib.hardware`, on a CPU measured; None for unknown kinds.

    Accelerators in dense bfloat16. A CPU's is that of a float32 matmul, and counts once per process.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _measured_peak() * jax.process_count()
    chip = chip_of(device.device_kind)
    return None if chip is None else chip.flops * jax.device_count()


@functools.cache
def _measured_peak(size: int = 1024, rounds: int = 8) -> float:
    """Measures the best of a few square matmuls, which take about 0.3 s in all."""
    x = jnp.ones((size, size), jnp.float32)
    dot = jax.jit(jnp.dot).lower(x, x).compile()
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(dot(x, x))
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds)


def _is_known(x: Any) -> bool:
    if isinstance(x, jax.ShapeDtypeStruct) or not jnp.issubdtype(x.dtype, jnp.integer):
        return False
    return getattr(x, "is_fully_addressable", True)


def _walk(traced: Any, known: Sequence[Any], times: float, counts: Counts) -> list[Any]:
    """Adds to `counts` what `traced` does `times` times, given those inputs that are known; returns its outputs
    likewise.
    """
    jaxpr = getattr(traced, "jaxpr", traced)
    values = dict(zip(jaxpr.constvars, getattr(traced, "consts", ()), strict=False))
    values |= dict(zip(jaxpr.invars, known, strict=True))
    look = lambda atom: jnp.asarray(atom.val) if isinstance(atom, core.Literal) else values.get(atom)
    look = look if counts.follow else lambda atom: None
    for eqn in jaxpr.eqns:
        outputs = _count(eqn, [look(atom) for atom in eqn.invars], times, counts)
        values |= dict(zip(eqn.outvars, outputs, strict=True))
    return [look(atom) for atom in jaxpr.outvars]


def _count(eqn: Any, known: list[Any], times: float, counts: Counts) -> list[Any]:
    """Counts one equation. Its outputs are known (not None) where they are integers that follow from known ones."""
    name, params, unknown = eqn.primitive.name, eqn.params, [None] * len(eqn.outvars)
    if name in _RULES:
        _RULES[name](eqn, known, times, counts)
        return unknown
    formula = FORMULAS.get(params["name"]) if name in ("jit", "pjit") else None
    if formula is not None and len(eqn.invars) >= formula.fewest:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        given = [shape if value is None else value for shape, value in zip(shapes, known, strict=True)]
        op = params["name"].rpartition(".")[2].lstrip("_")
        counts.append((times, formula.flops(*given), f"{op} {_dtypes(eqn)}"))
        return unknown
    inner = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
    if inner is not None:
        return _walk(inner, known, times, counts)
    if not counts.follow or any(value is None for value in known) or not all(_is_integer(v.aval) for v in eqn.outvars):
        return unknown
    result = eqn.primitive.bind(*known, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


def _dtypes(eqn: Any) -> str:
    return " x ".join(str(atom.aval.dtype) for atom in eqn.invars[:2])


def _is_integer(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.integer) or aval.dtype == bool


# ---------------------------------------------------------------------------------------------- rules


def _dot(eqn, known, times, counts):
    (contracted, _), _ = eqn.params["dimension_numbers"]
    summed = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    counts.append((times, 2 * summed * math.prod(eqn.outvars[0].aval.shape), _dtypes(eqn)))


def _ragged_dot(eqn, known, times, counts):
    """Counts each row with one group, whether the rows are kept or summed over."""
    dims = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = dims.dot_dimension_numbers
    lhs, out = eqn.invars[0].aval.shape, math.prod(eqn.outvars[0].aval.shape)
    groups = eqn.invars[2].aval.shape[-1] if dims.lhs_ragged_dimensions[0] in contracted else 1
    counts.append((times, 2 * math.prod(lhs[d] for d in contracted) * out / groups, f"ragged_dot {_dtypes(eqn)}"))


def _convolution(eqn, known, times, counts):
    kernel, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    counts.append((times, 2 * math.prod(out) * math.prod(kernel) / features, f"convolution {_dtypes(eqn)}"))


def _scan(eqn, known, times, counts):
    params = eqn.params
    consts = params["num_consts"] if "num_consts" in params else len(list(params["ft_in"].unpack()[0]))  # from jax 0.12
    changing = [None] * (len(known) - consts)
    _walk(params["jaxpr"], known[:consts] + changing, times * params["length"], counts)


def _while(eqn, known, times, counts):
    body, skip, consts = (eqn.params[key] for key in ("body_jaxpr", "cond_nconsts", "body_nconsts"))
    before = len(counts)
    changing = [None] * (len(known) - skip - consts)
    _walk(body, known[skip : skip + consts] + changing, times, counts)
    if len(counts) > before:
        warnings.warn(
            "A loop with matmuls runs an unknown number of times; its FLOPs count once. Use lax.scan, or decorate the "
            "function around it with ops.register_flops(formula).",
            stacklevel=2,
        )


def _cond(eqn, known, times, counts):
    """Counts the dearest branch."""
    branches, totals = [], []
    for branch in eqn.params["branches"]:
        branches.append(mine := Counts(counts.follow))
        _walk(branch, known[1:], times, mine)
        totals.append(sum((jnp.asarray(n * count, jnp.float32) for n, count, _ in mine), start=jnp.zeros(())))
    dearest = jnp.argmax(jnp.stack(totals))
    for number, branch in enumerate(branches):
        counts += [(n, jnp.where(dearest == number, count, 0), what) for n, count, what in branch]


def _scaled_matmul(eqn, known, times, counts):
    """Counts `jax.nn.scaled_matmul`: [B, M, K] and [B, N, K] with their scales."""
    summed, out = eqn.invars[0].aval.shape[-1], math.prod(eqn.outvars[0].aval.shape)
    counts.append((times, 2 * summed * out, f"scaled_matmul {_dtypes(eqn)}"))


def _shard_map(eqn, known, times, counts):
    """Counts the body once for every device of the mesh."""
    _walk(eqn.params["jaxpr"], [None] * len(known), times * eqn.params["mesh"].size, counts)


def _pallas_call(eqn, known, times, counts):
    """Takes the kernel's own estimate: its body says nothing about how often a tile is skipped."""
    estimate = eqn.params.get("cost_estimate")
    if estimate is None:
        warnings.warn(
            "A Pallas kernel without cost_estimate counts no FLOPs; give it one, or decorate the function around it with "
            "ops.register_flops(formula).",
            stacklevel=2,
        )
    else:
        counts.append((times, estimate.flops, "kernel"))


_RULES = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "scaled_matmul_wrapper": _scaled_matmul,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "pallas_call": _pallas_call,
}
