"""Runs flash-linear-attention's kernels on a CPU, in numpy, by Triton's own interpreter, and prints their errors.

    TRITON_INTERPRET=1 python -m tests.ops.fla_interpreter OPERATION DTYPE [CASE ...]

A process of its own: Triton reads that variable when it is imported, and then compiles nothing.
"""

import inspect
import json
import operator
import sys

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from maxlib.ops._fla import choice
from maxlib.ops._gated_delta import api as gated_delta
from maxlib.ops._kda import api as kda
from maxlib.ops._ssd import api as ssd
from tests.ops import test_jax_linear_attention as values
from tests.ops.recurrences import RECURRENCES

A100 = ("gpu", "NVIDIA A100-SXM4-80GB")
# Tokens, heads of keys and values, widths, rate of decay.
CASES = {
    "slow": (150, (2, 4), (64, 64), 0.05),
    "fast": (150, (2, 4), (64, 64), 10.0),
    "very fast": (150, (2, 4), (64, 64), 40.0),
    "wide": (100, (1, 2), (96, 128), 0.05),
    "narrow": (100, (1, 2), (128, 32), 0.05),
}
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}


class Pointer:
    """An array as Triton's interpreter takes it."""

    def __init__(self, array):
        self.array, self.dtype = array, TYPES[str(array.dtype)]

    def data_ptr(self):
        return self.array.ctypes.data


def counted(*bounds):
    """A `range` of Triton's integers: kernels call methods of their counters, which the interpreter leaves Python's."""
    return map(interpreter._implicit_cvt, range(*map(operator.index, bounds)))


def triton_call(*, kernel, out_type, grid, name, num_warps, num_stages, **given):
    """A stand-in for `jax_triton.triton_call`; what a kernel does not write is NaN."""
    arrays = {name: x for name, x in given.items() if isinstance(x, jax.Array)}
    parameters = inspect.signature(kernel.fn).parameters.values()
    outputs = [one.name for one in parameters if one.name not in given and one.default is inspect.Parameter.empty]
    assert len(outputs) == len(out_type), (outputs, out_type)

    def run(arrays):
        pointers = {name: Pointer(np.array(x, order="C")) for name, x in arrays.items()}
        pointers |= {
            name: Pointer(np.full(x.shape, np.nan, x.dtype)) for name, x in zip(outputs, out_type, strict=True)
        }
        kernel.fn.__globals__["range"] = counted
        kernel[grid](**(given | pointers))
        return tuple(pointers[name].array for name in outputs)

    return jax.pure_callback(run, out_type, arrays)


class Builder(interpreter.InterpreterBuilder):
    """Operations in bfloat16, which Triton's interpreter truncates, or multiplies as the integers that hold them."""

    def cast_impl(self, src, dst_type):
        kinds = {src.dtype.scalar, dst_type.scalar}
        return narrow(wide(src), dst_type) if kinds == {tl.float32, tl.bfloat16} else super().cast_impl(src, dst_type)

    def get_bf16(self, value):  # which Triton 3.8 lacks
        return narrow(self.get_fp32(value), tl.bfloat16)

    def binary_op(self, lhs, rhs, op):
        if lhs.dtype.scalar != tl.bfloat16:
            return super().binary_op(lhs, rhs, op)
        return narrow(super().binary_op(wide(lhs), wide(rhs), op), lhs.dtype)

    def unary_op(self, arg, op):
        return narrow(super().unary_op(wide(arg), op), arg.dtype)

    def create_dot(self, a, b, *rest):
        return super().create_dot(wide(a), wide(b), *rest)


class Sums(interpreter.ReduceOps):
    """Sums of blocks, which a GPU would round to bfloat16 again and again."""

    def sum(self, input):
        assert input.dtype.scalar != tl.bfloat16
        return super().sum(input)


def wide(x):
    """Returns a block of bfloat16 in float32, and any other as it is."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle(x.data.view(jnp.bfloat16).astype(np.float32), tl.float32)


def narrow(x, dtype):
    """Rounds a block of float32 to bfloat16, if that is the dtype."""
    if dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle(x.data.astype(jnp.bfloat16).view(np.uint16), tl.bfloat16)


def install() -> None:
    """Makes JAX run kernels in the interpreter, and maxlib take the CPU for an A100, and float32 for a dtype of it."""
    jax_triton.triton_call = triton_call
    # The arrays are numpy's, in place of torch's, and need no copies.
    interpreter.GridExecutor._init_args_hst = lambda self, args, options: (args, options)
    interpreter.GridExecutor._restore_args_dev = lambda self, *args: None
    interpreter.interpreter_builder.__class__ = Builder
    interpreter.ReduceOps = Sums
    choice.HALF = (*choice.HALF, "float32")
    for api in (gated_delta, kda, ssd):
        api.current_device = lambda: A100


def main() -> None:
    install()
    rule, dtype = RECURRENCES[sys.argv[1]], jnp.dtype(sys.argv[2])
    in_dtype = lambda x: {name: a.astype(dtype) if a.dtype == jnp.bfloat16 else a for name, a in x.items()}
    run = jax.jit(lambda x, *rest: values.results(rule, "fla", in_dtype(x), *rest))
    found = {}
    for case in sys.argv[3:] or CASES:
        found[case] = values.compared(rule, run, *CASES[case])
        print(case, {name: float(f"{error:.2g}") for name, error in found[case].items()}, file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
