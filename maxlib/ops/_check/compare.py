"""Comparison of one implementation with float32 on one case; `check` does it in a process of its own."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlib.ops import _findings
from maxlib.ops._check.cases import Case, bound, tolerance

REPEATS = 10  # runs that must agree bit for bit
# Those that add up some gradients in an order that varies: their runs differ in bits, and each of them must be right.
VARY = {("attention", "cudnn"), ("attention", "tokamax")}
Job = tuple[str, Case]  # name of an implementation, and the case


def device(_: None) -> tuple[str, str]:
    """Returns the platform and the kind of the device that this process runs on."""
    return jax.devices()[0].platform, jax.devices()[0].device_kind


def prepare(job: Job) -> dict[str, Any] | None:
    """Computes what to compare with; returns a row if the implementation refuses the case, or this fails."""
    implementation, case = job
    os.environ[_findings.IGNORE] = "1"  # what failed before is to be checked again
    try:
        if why := refusal(case, implementation, case.arrays(_dtype())):
            return {"status": "refused", "why": why}
        _prepared(case)
    except Exception as error:  # any error: the other cases continue
        return _failed(error)
    return None


def compare(job: Job) -> dict[str, Any]:
    """Runs an implementation; returns its status, the largest error, and the reason if it is not right."""
    implementation, case = job
    try:
        arrays, truth = _prepared(case)
        same = (case.op, implementation) not in VARY
        return compared(case, bound(case.op, implementation), arrays, truth, same=same)
    except Exception as error:  # any error: a failing kernel is a result
        return _failed(error)


@functools.lru_cache(maxsize=1)
def _prepared(case: Case) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    arrays = case.arrays(_dtype())
    return arrays, truth_of(case, arrays)


def _dtype() -> Any:
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def _failed(error: Exception) -> dict[str, str]:
    message = str(error).strip().split("\n")[0][:200]
    full = "RESOURCE_EXHAUSTED" in str(error)
    return {"status": "out of memory" if full else "failed", "why": f"{type(error).__name__}: {message}"}


def refusal(case: Case, implementation: str, arrays: dict[str, jax.Array]) -> str | None:
    """Returns the reason why an implementation cannot run a case here, or None."""
    answer = case.explain(arrays, implementation=implementation)
    return None if answer.chosen == implementation else answer.refused.get(implementation, answer.reason)


def _results(case: Case, run: Callable, **compiler_options: Any) -> Callable:
    """Returns a compiled function from the arrays to the output and the gradients."""

    def results(arrays):
        inputs = {name: x for name, x in arrays.items() if name != "d_out"}
        if not case.gradients:
            return {"out": case.call(run, inputs)}
        out, vjp = jax.vjp(lambda x: case.call(run, x), inputs)
        return {"out": out} | {f"d_{name}": x for name, x in vjp(arrays["d_out"])[0].items()}

    return jax.jit(results, compiler_options=compiler_options)


def truth_of(case: Case, arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """Returns the results in float32."""
    # It runs once: XLA on a GPU would take seconds to find the fastest way to compute each of its matmuls.
    quick = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else {}
    with jax.default_matmul_precision("float32"):
        wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
        return jax.device_get(_results(case, bound(case.op, case.truth), **quick)(wide))


def compared(
    case: Case, run: Callable, arrays: dict[str, jax.Array], truth: dict[str, Any], *, same: bool = True
) -> dict[str, Any]:
    """Compares the results with the truth, and those of further runs: with the first, bit for bit, if they are to be
    the `same`, else with the truth.
    """
    compiled, dtype = _results(case, run), str(arrays["d_out"].dtype)
    got = jax.device_get(compiled(arrays))
    row = _worst(case, got, truth, dtype)
    if row["status"] == "wrong":
        return row
    # A kernel with a missing wait sometimes reads data too early.
    for _ in range(REPEATS):
        again = jax.device_get(compiled(arrays))
        if same and any(not np.array_equal(again[name], got[name]) for name in got):
            return row | {"status": "varies", "why": f"{REPEATS} runs differ in some bit"}
        if not same and (other := _worst(case, again, truth, dtype))["status"] == "wrong":
            return other
    return row


def _worst(case: Case, got: dict[str, Any], truth: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Finds the array whose error is closest to its bound, or furthest beyond.

    A wrong tile changes the norm of the difference, rounding does not.
    """
    errors = {name: _error(got[name], x) for name, x in truth.items()}
    shares = {name: error / tolerance(case, name, dtype) for name, error in errors.items()}
    worst = max(shares, key=lambda name: np.nan_to_num(shares[name], nan=np.inf))
    row = {"error": errors[worst], "of": worst, "status": "right"}
    if shares[worst] <= 1:
        return row
    why = f"{worst} is off by {errors[worst]:.2g} of its norm, more than {tolerance(case, worst, dtype):.0e}"
    return row | {"status": "wrong", "why": why}


def _error(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-6))
