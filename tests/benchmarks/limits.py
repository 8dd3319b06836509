"""The highest MFU that a training step can have on a chip, by the fewest bytes that it moves: a count by hand.

The trace of the loss gives the matmuls and the ops of `maxlib.ops`. Each reads its operands from main memory and writes
its results there; everything between two of them fuses, and collectives read and write what they must once. Counted are

- weights, in the compute dtype: read in both passes, written once where devices gather them; their gradients, written;
- optimizer: four arrays in float32 read and three written, the gradient written for its norm, of this chip's share;
- activations: read and written once in the forward pass; in the backward pass both read once, and the gradient written.
  Operands that several matmuls share are read once;
- experts' rows: written once and read once each way, to the experts and back, in both passes;
- recomputation, of that share of the layers whose activations do not fit beside the parameters and the optimizer.

Not counted are residual streams, norms' and gates' own passes, logits, dtypes wider than a matmul's, and tiles that a
kernel reads more than once.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from maxlib import plan
from maxlib._utils.loops import scan_counts
from maxlib.hardware import Chip
from maxlib.ops import registered_flops
from maxlib.plan._analytic import _repeats, _sizes
from maxlib.plan._program import Program, make_program, moes

STATE, OPTIMIZER = 12, 32  # bytes a parameter: stored, and moved by AdamW
# What only renames or rearranges an array.
VIEWS = ("convert_element_type", "copy", "name", "reshape", "sharding_constraint", "squeeze", "transpose")


@dataclasses.dataclass(frozen=True)
class Use:
    """A matmul or an op in the trace of a loss: its arrays, each a number, which equal arrays share, and bytes a step.

    Args:
        inputs: Activations that it reads.
        output: Bytes of what it writes.
        weight: Its matrix; None for an op without one.
        of_experts: True for a matrix of each expert.
    """

    inputs: tuple[tuple[int, float], ...]
    output: float
    weight: tuple[int, float] | None = None
    of_experts: bool = False


class _Trace:
    """A walk over a jaxpr that follows each array to where it was made."""

    def __init__(self):
        self.uses: list[Use] = []
        self.made: list[tuple[float, Any]] = []  # of each array, how often it is made in a step, and its shape

    def new(self, aval: Any, times: float) -> int:
        self.made.append((times, aval))
        return len(self.made) - 1

    def written(self, number: int, read: int) -> float:
        """Returns the bytes of a matmul's result; none if it is wider than what was read: logits need not be stored."""
        wider = self.made[number][1].dtype.itemsize > self.made[read][1].dtype.itemsize
        return 0.0 if wider else self.array(number)[1]

    def array(self, number: int) -> tuple[int, float]:
        times, aval = self.made[number]
        return number, times * math.prod(aval.shape) * min(aval.dtype.itemsize, 2)

    def walk(self, traced: Any, inputs: Sequence[int], times: float) -> list[int]:
        jaxpr = getattr(traced, "jaxpr", traced)
        numbers = {var: self.new(var.aval, times) for var in jaxpr.constvars}
        numbers |= dict(zip(jaxpr.invars, inputs, strict=True))

        def number(atom):
            return numbers[atom] if not hasattr(atom, "val") else self.new(atom.aval, times)

        for eqn in jaxpr.eqns:
            outputs = self._equation(eqn, [number(atom) for atom in eqn.invars], times)
            numbers |= dict(zip(eqn.outvars, outputs, strict=True))
        return [number(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[int], times: float) -> list[int]:
        name, params = eqn.primitive.name, eqn.params
        if name in VIEWS and math.prod(eqn.outvars[0].aval.shape) == math.prod(eqn.invars[0].aval.shape):
            return inputs[:1]
        outputs = [self.new(var.aval, times) for var in eqn.outvars]
        if name == "scan":
            consts, _ = scan_counts(params)
            often = times * params["length"]
            body = params["jaxpr"].jaxpr.invars
            inner = inputs[:consts] + [self.new(var.aval, often) for var in body[consts:]]
            self.walk(params["jaxpr"], inner, often)
        elif name == "cond":
            self.walk(params["branches"][-1], inputs[1:], times)
        elif name == "dot_general" and not any(params["dimension_numbers"][1]):
            self._matmul(inputs[0], inputs[1], outputs[0], of_experts=False)
        elif name in ("jit", "pjit") and registered_flops(params["name"]):
            floats = [
                n for n, var in zip(inputs, eqn.invars, strict=True) if jnp.issubdtype(var.aval.dtype, jnp.floating)
            ]
            if "grouped" in params["name"]:
                for weight in floats[1:]:
                    if len(self.made[weight][1].shape) == 3:
                        self._matmul(floats[0], weight, outputs[0], of_experts=True)
            else:
                self.uses.append(Use(tuple(map(self.array, floats)), self.array(outputs[0])[1]))
        elif inner := next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None):
            return self.walk(inner, inputs, times)
        return outputs

    def _matmul(self, rows: int, weight: int, out: int, *, of_experts: bool) -> None:
        self.uses.append(Use((self.array(rows),), self.written(out, rows), self.array(weight), of_experts))


@functools.cache
def traced(name: str, sequence: int) -> tuple[Program, list[Use]]:
    """Returns a preset's program, and what its loss does for one sequence on one device."""
    program = make_program(plan.Job(name, "v6e-4", sequence=sequence, remat=None))
    leaves, tree = jax.tree.flatten((program.model, program._row, jax.eval_shape(lambda: jax.random.key(0))))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    jaxpr = jax.make_jaxpr(lambda *leaves: program._loss(*jax.tree.unflatten(tree, leaves)))(*shapes)
    trace = _Trace()
    trace.walk(jaxpr, [trace.new(var.aval, 1) for var in jaxpr.jaxpr.invars], 1)
    return program, trace.uses


@dataclasses.dataclass(frozen=True)
class Limit:
    """The fewest bytes of a step on one chip, by what they are for, and the MFU that they allow, which may exceed 1."""

    bytes: Mapping[str, float]
    mfu: float


def limit(name: str, chip: Chip, mesh: Mapping[str, int], sequence: int, batch: float) -> Limit:
    """Counts a preset's step.

    Args:
        name: The preset.
        chip: The kind of chip.
        mesh: From mesh axis to number of devices.
        sequence: Tokens of a sequence.
        batch: Sequences a chip.
    """
    program, uses = traced(name, sequence)
    devices, experts = math.prod(mesh.values()), mesh.get("expert", 1)
    parameters = sum(math.prod(matrix.shape) for matrix in program.matrices.values()) / devices
    weights = {use.weight[0]: use.weight[1] / (experts if use.of_experts else 1) for use in uses if use.weight}
    gathered = {
        number: weights[number]
        for use in uses
        if use.weight
        for number in use.weight[:1]
        if devices > (experts if use.of_experts else 1)
    }
    read = batch * sum({number: size for use in uses for number, size in use.inputs}.values())
    written = batch * sum(use.output for use in uses)
    rows = sum(moe.router.top_k * _sizes(moe)["expert_embed"] * _repeats(moe) for moe in moes(program.plain))
    free = chip.memory - STATE * parameters
    again = max(0.0, 1 - free / read)
    moved = {
        "weights": 3 * sum(weights.values()) + 2 * sum(gathered.values()),
        "optimizer": OPTIMIZER * parameters,
        "activations": 3 * read + 2 * written,
        "rows of experts": 4 * 2 * batch * sequence * rows,
        "recomputation": again * (read + written),
    }
    seconds = sum(moved.values()) / chip.bandwidth
    return Limit(moved, batch * program.model_flops / program.rows / chip.flops / seconds)
