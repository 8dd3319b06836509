"""Model FLOPs, counted on the traced forward pass, and the peak FLOP/s of devices.

`maxlib.plan` instead counts the FLOPs that a compiled program executes, including recomputation and padding.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from maxlib._utils.loops import scan_counts
from maxlib.hardware import chip_of
from maxlib.ops import registered_flops


class Counts(list[tuple[float, Any, str]]):
    """Counted FLOPs: number of executions, FLOPs of each, op and dtypes.

    Args:
        follow: True computes the integers on which masks depend, as far as they are known.
    """

    def __init__(self, follow: bool = True):
        super().__init__()
        self.follow = follow


class Fact(NamedTuple):
    """Static knowledge about a value in a trace.

    Args:
        value: Its value; None if unknown.
        trained: True if it depends on trained parameters, so that a backward pass computes its gradient.
    """

    value: Any = None
    trained: bool = False


def training_flops(loss: Callable[..., Any], model: Any, batch: Any, *, trained: Any = None) -> float:
    """Counts the model FLOPs of one training step: each matmul of the loss, and once more for every operand of it that
    has a gradient.

    An operand has a gradient if it depends on trained parameters: three times the forward pass if everything is
    trained, two for the frozen matrices of LoRA after the first factors, one for a frozen reference. An op of several
    matmuls, such as attention, counts as one matmul with its first two operands of that kind. Recomputation by remat,
    and anything that is not a matmul, does not count. For a decoder whose weights are all trained this is `6 N T + 6 L
    pairs heads (Hk + Hv)`: N weights in matmuls, T tokens, L layers, and visible pairs of a query and a key.

    Args:
        loss: `(model, batch, key) -> anything`.
        model: Arrays or shapes.
        batch: Arrays or shapes.
        trained: A boolean for each array of the model, in the model's structure; None means that all are trained.
    """
    model = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
    flags = jax.tree.leaves(jax.tree.map(lambda _: True, model) if trained is None else trained)
    key = jax.eval_shape(jax.random.key, 0)
    return sum(flops for _, flops in _counted(loss, (model, batch, key), follow=True, trained=flags))


def forward_flops(fn: Callable[..., Any], *args: Any) -> float:
    """Counts the FLOPs of the matmuls and convolutions in `fn(*args)`: two for each multiply-add.

    The body of a `lax.scan` counts once per iteration, and a `lax.cond` counts its most expensive branch. Attention
    counts the visible pairs of its mask; documents are considered if `args` contain their segment ids, while with a
    `jax.ShapeDtypeStruct` they are unknown (then every pair counts). Ops with `ops.register_flops` use their own
    formula. No floats are computed. Call it outside `sharding.use`, to count without a mesh.
    """
    return sum(flops for _, flops in _counted(fn, args, follow=True))


def flops_by_dtype(fn: Callable[..., Any], *args: Any) -> dict[str, float]:
    """Counts like `forward_flops`, by the dtypes of the operands, such as "int8 x int8".

    Ops of `maxlib.ops` are listed by name ("grouped_matmul int8 x int8"); attention is counted as if every query
    attended to every key.
    """
    totals: dict[str, float] = {}
    for what, flops in _counted(fn, args, follow=False):
        totals[what] = totals.get(what, 0.0) + flops
    return totals


def _counted(
    fn: Callable[..., Any], args: Any, *, follow: bool, trained: Sequence[bool] = ()
) -> list[tuple[str, float]]:
    """Returns the operands and FLOPs of each matmul in the trace of `fn(*args)`.

    Args:
        fn: The function to trace.
        args: Its arguments.
        follow: As in `Counts`.
        trained: Whether each of the first leaves of `args` is trained; then the backward pass counts too.
    """
    leaves, tree = jax.tree.flatten(args)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    traced = jax.make_jaxpr(lambda *leaves: fn(*jax.tree.unflatten(tree, leaves)))(*shapes)
    known = [np.asarray(x) if follow and _is_known(x) else None for x in leaves]
    counted: list[tuple[float, str]] = []

    def evaluate(known: list[Any]) -> list[jax.Array]:
        counts = Counts(follow)
        flags = [*trained, *[False] * (len(known) - len(trained))]
        inputs = [
            Fact(x, flag and _is_float(var.aval))
            for x, flag, var in zip(known, flags, traced.jaxpr.invars, strict=True)
        ]
        _walk(traced, inputs, 1.0, counts)
        counted[:] = [(times, what) for times, _, what in counts]
        return [jnp.asarray(flops, jnp.float32) for _, flops, _ in counts]

    # One small program computes the integers on which masks depend; the rest of the trace is dead code.
    flops = jax.device_get(jax.jit(evaluate)(known))
    return [(what, times * float(count)) for (times, what), count in zip(counted, flops, strict=True)]


def peak_flops() -> float | None:
    """Returns the dense bfloat16 FLOP/s of all devices together, from `maxlib.hardware`; None on CPUs, unknown kinds.

    A CPU has no such number: its clock changes with the load, and other processes share it.
    """
    chip = chip_of(jax.devices()[0].device_kind)
    return None if chip is None else chip.flops * jax.device_count()


def _is_known(x: Any) -> bool:
    if isinstance(x, jax.ShapeDtypeStruct) or not jnp.issubdtype(x.dtype, jnp.integer):
        return False
    return getattr(x, "is_fully_addressable", True)


def _walk(traced: Any, inputs: Sequence[Fact], times: float, counts: Counts) -> list[Fact]:
    """Adds the FLOPs of `times` executions of `traced` to `counts`, given the facts about its inputs; returns those
    about its outputs.
    """
    jaxpr = getattr(traced, "jaxpr", traced)
    facts = dict(zip(jaxpr.constvars, map(Fact, getattr(traced, "consts", ())), strict=False))
    facts |= dict(zip(jaxpr.invars, inputs, strict=True))

    def fact(atom: Any) -> Fact:
        known = Fact(jnp.asarray(atom.val)) if isinstance(atom, core.Literal) else facts.get(atom, Fact())
        return known if counts.follow else known._replace(value=None)

    for eqn in jaxpr.eqns:
        outputs = _count(eqn, [fact(atom) for atom in eqn.invars], times, counts)
        facts |= dict(zip(eqn.outvars, outputs, strict=True))
    return [fact(atom) for atom in jaxpr.outvars]


def _count(eqn: Any, inputs: list[Fact], times: float, counts: Counts) -> list[Fact]:
    """Counts one equation. Its outputs are known if they are integers computed from known ones."""
    name, params = eqn.primitive.name, eqn.params
    trained = name != "stop_gradient" and any(fact.trained for fact in inputs)
    unknown = [Fact(None, trained and _passes_gradients(v.aval)) for v in eqn.outvars]
    if name in _RULES:
        return _RULES[name](eqn, inputs, times, counts) or unknown
    formula = registered_flops(params["name"]) if name in ("jit", "pjit") else None
    if formula is not None and len(eqn.invars) >= formula.fewest:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        arguments = [shape if fact.value is None else fact.value for shape, fact in zip(shapes, inputs, strict=True)]
        op = params["name"].rpartition(".")[2].lstrip("_")
        counts.append((times * _passes(inputs), formula.flops(*arguments), f"{op} {_dtypes(eqn)}"))
        return unknown
    inner = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
    if inner is not None:
        return _walk(inner, inputs, times, counts)
    values = [fact.value for fact in inputs]
    if not counts.follow or any(x is None for x in values) or not all(_is_integer(v.aval) for v in eqn.outvars):
        return unknown
    result = eqn.primitive.bind(*values, **params)
    return [Fact(x) for x in (result if eqn.primitive.multiple_results else [result])]


def _passes(inputs: Sequence[Fact]) -> int:
    """Counts a matmul and those of its backward pass: one for each operand with a gradient."""
    return 1 + min(2, sum(fact.trained for fact in inputs))


def _unknown(facts: Sequence[Fact]) -> list[Fact]:
    return [fact._replace(value=None) for fact in facts]


def _dtypes(eqn: Any) -> str:
    return " x ".join(str(atom.aval.dtype) for atom in eqn.invars[:2])


def _is_integer(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.integer) or aval.dtype == bool


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _passes_gradients(aval: Any) -> bool:
    """Returns True for floats and for the storage of quantized numbers, False for indices and masks."""
    if not hasattr(aval, "dtype"):
        return False
    is_index = aval.dtype in (jnp.int32, jnp.int64)
    return _is_float(aval) or (jnp.issubdtype(aval.dtype, jnp.integer) and not is_index)


# ---------------------------------------------------------------------------------------------- rules
# Each rule counts an equation and returns the facts about its outputs; None if only their dependencies are known.


def _dot(eqn, inputs, times, counts):
    """Counts matmuls; sums of products of two vectors and scaled vectors, which CPUs compute as dots, are none."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    if not contracted or len(eqn.outvars[0].aval.shape) == len(batch):
        return
    summed = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    counts.append((times * _passes(inputs), 2 * summed * math.prod(eqn.outvars[0].aval.shape), _dtypes(eqn)))


def _ragged_dot(eqn, inputs, times, counts):
    """Counts each row with one group, both for kept and for summed rows."""
    dims = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = dims.dot_dimension_numbers
    lhs, out = eqn.invars[0].aval.shape, math.prod(eqn.outvars[0].aval.shape)
    groups = eqn.invars[2].aval.shape[-1] if dims.lhs_ragged_dimensions[0] in contracted else 1
    flops = 2 * math.prod(lhs[d] for d in contracted) * out / groups
    counts.append((times * _passes(inputs), flops, f"ragged_dot {_dtypes(eqn)}"))


def _convolution(eqn, inputs, times, counts):
    kernel, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    flops = 2 * math.prod(out) * math.prod(kernel) / features
    counts.append((times * _passes(inputs), flops, f"convolution {_dtypes(eqn)}"))


def _scan(eqn, inputs, times, counts):
    params = eqn.params
    consts, carry = scan_counts(params)
    inputs = [*inputs[:consts], *_unknown(inputs[consts:])]
    return _loop(params["jaxpr"], inputs, slice(consts, consts + carry), times * params["length"], counts)


def _while(eqn, inputs, times, counts):
    body, skip, consts = (eqn.params[key] for key in ("body_jaxpr", "cond_nconsts", "body_nconsts"))
    before = len(counts)
    inputs = [*inputs[skip : skip + consts], *_unknown(inputs[skip + consts :])]
    outputs = _loop(body, inputs, slice(consts, len(inputs)), times, counts)
    if len(counts) > before:
        warnings.warn(
            "A loop with matmuls runs an unknown number of times; its FLOPs count once. Use lax.scan, or decorate the "
            "function around it with ops.register_flops(formula).",
            stacklevel=2,
        )
    return outputs


def _loop(body: Any, inputs: list[Fact], carry: slice, times: float, counts: Counts) -> list[Fact]:
    """Counts the body of a loop. Iterates the dependencies of its carry to a fixed point, as autodiff does."""
    body_counts = Counts(counts.follow)
    outputs = _unknown(_walk(body, inputs, times, body_counts))
    after = [a._replace(trained=a.trained or b.trained) for a, b in zip(inputs[carry], outputs, strict=False)]
    if after != inputs[carry]:
        return _loop(body, [*inputs[: carry.start], *after, *inputs[carry.stop :]], carry, times, counts)
    counts += body_counts
    return outputs


def _cond(eqn, inputs, times, counts):
    """Counts the most expensive branch."""
    branches, totals, outputs = [], [], []
    for branch in eqn.params["branches"]:
        branches.append(mine := Counts(counts.follow))
        outputs.append(_walk(branch, inputs[1:], times, mine))
        totals.append(sum((jnp.asarray(n * count, jnp.float32) for n, count, _ in mine), start=jnp.zeros(())))
    dearest = jnp.argmax(jnp.stack(totals))
    for number, branch in enumerate(branches):
        counts += [(n, jnp.where(dearest == number, count, 0), what) for n, count, what in branch]
    return [Fact(None, any(fact.trained for fact in facts)) for facts in zip(*outputs, strict=True)]


def _scaled_matmul(eqn, inputs, times, counts):
    """Counts `jax.nn.scaled_matmul`: [B, M, K] and [B, N, K] with their scales."""
    summed, out = eqn.invars[0].aval.shape[-1], math.prod(eqn.outvars[0].aval.shape)
    counts.append((times * _passes(inputs[:2]), 2 * summed * out, f"scaled_matmul {_dtypes(eqn)}"))


def _shard_map(eqn, inputs, times, counts):
    """Counts the body once for every device of the mesh."""
    return _unknown(_walk(eqn.params["jaxpr"], _unknown(inputs), times * eqn.params["mesh"].size, counts))


def _pallas_call(eqn, inputs, times, counts):
    """Uses the kernel's own estimate, because its body does not show how many tiles are skipped."""
    estimate = eqn.params.get("cost_estimate")
    if estimate is None:
        warnings.warn(
            "A Pallas kernel without cost_estimate counts no FLOPs; give it one, or decorate the function around it with "
            "ops.register_flops(formula).",
            stacklevel=2,
        )
    else:
        counts.append((times * _passes(inputs), estimate.flops, "kernel"))


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
