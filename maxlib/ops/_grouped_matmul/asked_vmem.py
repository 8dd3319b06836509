"""Vector memory for JAX's Pallas kernels that have no argument for it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun


def asking(kernel: Callable[..., jax.Array], vmem: int | None) -> Callable[..., jax.Array]:
    """Makes the Pallas kernels for TPUs in a function ask for so many bytes of vector memory.

    A kernel states its demand among its compiler parameters (`pltpu.CompilerParams(vmem_limit_bytes=...)`). It holds
    for this kernel only and needs no flag of XLA. The function is traced, and its kernels get the parameter.

    Args:
        kernel: A function of arrays only, whose result is one array.
        vmem: Bytes; None if the kernels need not ask.

    Returns:
        The same function, with these demands.
    """
    if vmem is None:
        return kernel

    def run(*arrays: Any) -> jax.Array:
        (out,) = jaxpr_as_fun(_with_vmem(jax.make_jaxpr(kernel)(*arrays), vmem))(*arrays)
        return out

    return run


def _with_vmem(traced: ClosedJaxpr, vmem: int) -> ClosedJaxpr:
    """Returns a traced function whose kernels, also inside of jitted functions, ask for so many bytes."""
    equations = [one.replace(params=_params(one, vmem)) for one in traced.jaxpr.eqns]
    return traced.replace(jaxpr=traced.jaxpr.replace(eqns=equations))


def _params(one: Any, vmem: int) -> dict[str, Any]:
    if one.primitive.name == "pallas_call":
        return one.params | {
            "compiler_params": dataclasses.replace(one.params["compiler_params"], vmem_limit_bytes=vmem)
        }
    inner = one.params.get("jaxpr")
    return one.params | {"jaxpr": _with_vmem(inner, vmem)} if isinstance(inner, ClosedJaxpr) else one.params
