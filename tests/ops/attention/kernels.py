"""The test shared by all kernels: values and gradients against the float64 reference."""

import itertools
import zlib

import jax
import numpy as np

from maxlib.ops._attention import reference as definition
from maxlib.ops._attention.reference import AttentionInputs
from tests.ops.attention import cases

MASKS = list(itertools.product(cases.MASKS, cases.DOCUMENTS))
on_a_cpu = jax.default_backend() == "cpu"


def by_name(implementation, **options):
    """An implementation as a function of arrays by name, as `ops.attention` is."""

    def run(q, k, v, *, k_start, k_end, scale=1.0, **named):
        inputs = {name: named.pop(name) for name in AttentionInputs._fields if name in named}
        return implementation(AttentionInputs(q, k, v, k_start, k_end, scale, **inputs), **options, **named)

    return run


reference = by_name(definition.reference)


def everything(run, case, scale=0.125):
    """A compiled function of (arrays, bounds) to output, log-sum-exp and the gradients of all that is there."""

    def results(arrays, start, end):
        inputs = {name: arrays[name] for name in ("q", "k", "v", "sinks") if arrays[name] is not None}
        call = lambda x: run(**x, k_start=start, k_end=end, scale=scale, softcap=case.softcap)
        (out, lse), vjp = jax.vjp(call, inputs)
        return {"out": out, "lse": lse} | vjp((arrays["d_out"], arrays["d_lse"].astype(lse.dtype)))[0]

    return compiled(results)


def values(run, case, scale=0.125):
    """The same without gradients, for which there may be kernels of their own."""

    def results(arrays, start, end):
        inputs = {name: arrays[name] for name in ("q", "k", "v", "sinks")}
        out, lse = run(**inputs, k_start=start, k_end=end, scale=scale, softcap=case.softcap)
        return {"out": out, "lse": lse}

    return compiled(results)


def compiled(fn):
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": "0"} if on_a_cpu else {})


def check(run, case, masks, dtype, tol, scale=0.125, results=everything, truth=reference):
    """Compares with the reference in float64, as norms: errors are those of the whole array."""
    inputs, ours = cases.arrays(case, dtype), results(run, case, scale)
    with jax.enable_x64(True):
        truth = results(truth, case, scale)
        as_float64 = jax.tree.map(lambda x: np.asarray(x).astype(np.float64), inputs)
    for mask in masks:
        bounds = cases.bounds(*mask, case.lengths)
        got = ours(inputs, *bounds)
        with jax.enable_x64(True):
            want = truth(as_float64, *map(np.asarray, bounds))
        for name, x in want.items():
            x, y = np.asarray(x), np.asarray(got[name]).astype(np.float64)
            assert y.shape == x.shape
            np.testing.assert_array_equal(np.isinf(y), np.isinf(x), err_msg=f"{mask} {name}")
            finite = np.isfinite(x)
            error = np.linalg.norm(y[finite] - x[finite]) / max(np.linalg.norm(x[finite]), 1e-3)
            assert error < tol, (mask, name, error)


def some_masks(case, count: int):
    """A few masks that differ from case to case."""
    at = zlib.crc32(str(case).encode())
    return [MASKS[(at + 5 * i) % len(MASKS)] for i in range(count)]
