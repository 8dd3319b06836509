"""The vector memory of TPUs that kernels get, and how JAX's kernels, which have no argument for it, ask for it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from maxlib.hardware import chip_of

MIB = 2**20
# Bytes that every TPU since v4 gives a kernel that does not ask for more, and the most that kernels ask for on chips
# with 128 MiB a core. Two cores of a v4 or v5p share a kernel's columns of tiles: of larger tiles there may be only one
# column, and one core would wait.
DEFAULT_VMEM, ASKED_VMEM = 16 * MIB, {"TPU v6e": 112 * MIB}


def vmem_of(device_kind: str) -> int:
    """Returns the bytes of vector memory that a grouped matmul gets on a device."""
    chip = chip_of(device_kind)
    return ASKED_VMEM.get(chip.kind, DEFAULT_VMEM) if chip else DEFAULT_VMEM


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
    equations = [eqn.replace(params=_params(eqn, vmem)) for eqn in traced.jaxpr.eqns]
    return traced.replace(jaxpr=traced.jaxpr.replace(eqns=equations))


def _params(eqn: Any, vmem: int) -> dict[str, Any]:
    if eqn.primitive.name == "pallas_call":
        return eqn.params | {
            "compiler_params": dataclasses.replace(eqn.params["compiler_params"], vmem_limit_bytes=vmem)
        }
    inner = eqn.params.get("jaxpr")
    return eqn.params | {"jaxpr": _with_vmem(inner, vmem)} if isinstance(inner, ClosedJaxpr) else eqn.params
