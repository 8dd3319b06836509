"""Worker process of `check` or `tune`: runs cases with one implementation and prints a line of JSON about each.

It is a separate process, because a kernel that hangs or crashes ends its process.
"""

import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlib.hardware import chip_of
from maxlib.ops import _tuning
from maxlib.ops._attention.splash import splash
from maxlib.ops._check.cases import CASES, OPS, Case, bound, tolerance

REPEATS = 10  # runs that must agree bit for bit
# Those that add up some gradients in an order that varies: their runs differ in bits, and each of them must be right.
VARY = {("attention", "cudnn"), ("attention", "tokamax")}
DEFINITIONS = ("reference", "sequential")


def names(op: str) -> list[str]:
    """Returns the implementations of an operation to check: all but its definition."""
    return [kernel.name for kernel in OPS[op].kernels if kernel.name not in DEFINITIONS]


def describe() -> dict[str, Any]:
    """Returns the device that this process runs on, and every implementation by operation."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "jax": jax.__version__,
        "implementations": {op: names(op) for op in OPS},
    }


def check(op: str, implementation: str, skip: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Runs every case of an operation. Yields a line before each, to identify a case that hangs, and one after it."""
    for name, case in cases(op).items():
        if name not in skip:
            yield from _checked(name, case, implementation, rounds)


def cases(op: str) -> dict[str, Case]:
    """Returns the cases of an operation: on a CPU, small ones without repeats."""
    cases = {name: case for name, case in CASES.items() if case.op == op}
    if jax.default_backend() != "cpu":
        return cases
    small = {case.small(): name for name, case in reversed(cases.items())}
    return {name: case for case, name in reversed(small.items())}


def _checked(name: str, case: Case, implementation: str, rounds: int) -> Iterator[dict[str, Any]]:
    on_a_cpu = jax.default_backend() == "cpu"
    yield {"prepares": name}  # what fails from here on is not the implementation's fault
    try:
        arrays = case.arrays(jnp.float32 if on_a_cpu else jnp.bfloat16)
        run, how = _runner(case, implementation, arrays)
        if run is None:
            yield {"case": name, "status": "refused", "why": how}
            return
        truth = _truth(case, arrays)
        yield {"begins": name}
        row = _compared(case, run, arrays, truth, REPEATS, same=(case.op, implementation) not in VARY)
        times = {} if on_a_cpu else _timed(case, run, arrays, rounds)
        yield {"case": name, "how": how} | row | times
    except Exception as error:  # any error: a failing kernel is a result, and the other cases continue
        yield {"case": name} | _failed(error)


def _failed(error: Exception) -> dict[str, str]:
    message = str(error).strip().split("\n")[0][:200]
    full = "RESOURCE_EXHAUSTED" in str(error)
    return {"status": "out of memory" if full else "failed", "why": f"{type(error).__name__}: {message}"}


def _runner(case: Case, implementation: str, arrays: dict[str, jax.Array]) -> tuple[Callable | None, str]:
    """Returns a function to run and how it runs, or None and the reason why it cannot run."""
    why = _refusal(case, implementation, arrays)
    if why is None:
        return bound(case.op, implementation), "natively"
    if jax.default_backend() == "cpu" and (case.op, implementation) == ("attention", "splash"):
        return _interpreted_splash, "interpreted"
    return None, why


def _refusal(case: Case, implementation: str, arrays: dict[str, jax.Array]) -> str | None:
    answer = case.explain(arrays, implementation=implementation)
    return None if answer.chosen == implementation else answer.refused.get(implementation, answer.reason)


def _interpreted_splash(q, k, v, *, mask_hint, softcap, **options):
    """Runs splash attention in Pallas's interpreter, which `ops.attention` refuses on a CPU."""
    values = k[..., :v] if isinstance(v, int) else v
    scale = q.shape[-1] ** -0.5
    return splash(q, k, values, scale=scale, mask_hint=mask_hint, softcap=softcap, interpret=True, **options)[0]


def _inputs(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the arrays without the output's cotangent."""
    return {name: x for name, x in arrays.items() if name != "d_out"}


def _results(case: Case, run: Callable, **compiler_options: Any) -> Callable:
    """Returns a compiled function from the arrays to the output and the gradients."""

    def results(arrays):
        inputs = _inputs(arrays)
        if not case.gradients:
            return {"out": case.call(run, inputs)}
        out, vjp = jax.vjp(lambda x: case.call(run, x), inputs)
        return {"out": out} | {f"d_{name}": x for name, x in vjp(arrays["d_out"])[0].items()}

    return jax.jit(results, compiler_options=compiler_options)


def _truth(case: Case, arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """Returns the results in float32."""
    # It runs once: XLA on a GPU would take seconds to find the fastest way to compute each of its matmuls.
    quick = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else {}
    with jax.default_matmul_precision("float32"):
        wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
        return jax.device_get(_results(case, bound(case.op, case.truth), **quick)(wide))


def _compared(
    case: Case, run: Callable, arrays: dict[str, jax.Array], truth: dict[str, Any], repeats: int = 0, same: bool = True
) -> dict[str, Any]:
    """Compares the results with the truth, and on an accelerator those of further runs: with the first, bit for bit, if
    they are to be the `same`, else with the truth.
    """
    compiled, dtype = _results(case, run), str(arrays["d_out"].dtype)
    got = jax.device_get(compiled(arrays))
    row = _worst(case, got, truth, dtype)
    if row["status"] == "wrong" or jax.default_backend() == "cpu":
        return row
    # A kernel with a missing wait sometimes reads data too early.
    for _ in range(repeats):
        again = jax.device_get(compiled(arrays))
        if same and any(not np.array_equal(again[name], got[name]) for name in got):
            return row | {"status": "varies", "why": f"{repeats} runs differ in some bit"}
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


def _timed(case: Case, run: Callable, arrays: dict[str, jax.Array], rounds: int) -> dict[str, Any]:
    """Measures the median time of a forward pass, and of both passes together, in seconds."""
    inputs = _inputs(arrays)
    forward, both = case.flops()
    # Time both passes together, as in training: the backward pass profits from caches that the forward pass filled.
    times = {"forward_s": seconds(jax.jit(lambda x: case.call(run, x)), inputs, rounds)}
    times["forward_flops"] = forward / times["forward_s"]
    if case.gradients:
        times["both_s"] = seconds(_results(case, run), arrays, rounds)
        times["both_flops"] = (forward + both) / times["both_s"]
    chip = chip_of(jax.devices()[0].device_kind)
    return times | ({} if chip is None else {"share": times["forward_flops"] / chip.flops})


def seconds(compiled: Callable, argument: Any, rounds: int) -> float:
    """Returns the median seconds of a call. Each round waits once for ten calls, which hides the launch."""
    jax.block_until_ready(compiled(argument))
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        jax.block_until_ready([compiled(argument) for _ in range(10)])
        times.append((time.perf_counter() - begun) / 10)
    return statistics.median(times)


# ---------------------------------------------------------------------------------------------- tiles


def tune(implementations: list[str], skip: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Tries tile sizes of every kernel that runs here, a line for each; on a CPU one small case of each, without times.

    Args:
        implementations: Names of those to try; none for all.
        skip: Labels of tries that ended a process.
        rounds: Rounds of ten timed calls.
    """
    few = 1 if jax.default_backend() == "cpu" else None
    for op in OPS:
        wanted = [name for name in names(op) if name in implementations or not implementations]
        for implementation, (name, case) in itertools.product(wanted, [*cases(op).items()][:few]):
            yield from _tries(name, case, implementation, skip, rounds)


def _tries(name: str, case: Case, implementation: str, skip: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    arrays = case.arrays(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    run, how = _runner(case, implementation, arrays)
    # Sizes that an interpreted kernel would have where it is not interpreted.
    device = ("tpu", "TPU v5p") if how == "interpreted" else None
    tiles = case.explain(arrays, implementation=implementation, device=device).tiles
    if run is None or tiles is None:
        return
    truth = functools.cache(lambda: _truth(case, arrays))  # computed once, and only if something is left to try
    for sizes in tiles.sizes.neighbours():
        label = f"{case.op}/{implementation} {name} {sizes}"
        if label not in skip:
            yield {"begins": label}
            sized = functools.partial(run, tiles=sizes) if how == "interpreted" else run
            with _tuning.tile_sizes(sizes):
                row = _tried(case, sized, arrays, truth, rounds)
            yield {"case": label, "key": tiles.key, "tiles": sizes.to_json(), "how": how} | row


def _tried(
    case: Case, run: Callable, arrays: dict[str, jax.Array], truth: Callable[[], dict[str, Any]], rounds: int
) -> dict[str, Any]:
    try:
        # First right, then fast: a tile that leaves something out is faster than one that does not.
        row = _compared(case, run, arrays, truth())
        if row["status"] != "right" or jax.default_backend() == "cpu":
            return row
        return row | {"seconds": seconds(_results(case, run), arrays, rounds)}
    except Exception as error:  # any error: sizes that do not fit are skipped
        return _failed(error)


def say(lines: Iterator[dict[str, Any]]) -> None:
    """Prints each line immediately, and at last that there are no more: a process may still fail as it ends."""
    for line in itertools.chain(lines, [{"finished": True}]):
        print(json.dumps(line), flush=True)
