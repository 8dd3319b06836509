"""Where the kernels of flash-linear-attention run; nothing of the package is imported here."""

import functools
from collections.abc import Callable
from typing import Any

from maxlib.hardware import is_ampere_or_later, is_hopper
from maxlib.ops._attention.tokamax_gpu import version
from maxlib.ops._recurrences import Call, Implementation

NAME = "fla"
INSTALL = "pip install 'maxlib[fla]' on Python 3.12 or later"
NEEDED = {"jax-triton": (0, 4, 1), "triton": (3, 8), "torch": (2, 7)}  # the oldest versions; fla-core: 0.6 only
PACKAGE, VERSION = "fla-core", (0, 6)  # whose kernels below the public functions are called here
HALF = ("bfloat16", "float16")
WIDEST = {"keys": 256, "values": 1024}
MOST = 65535  # rows times heads: blocks in the second dimension of CUDA's grid


@functools.cache
def lacking() -> tuple[str, ...]:
    """Returns which packages are missing, or have a version that is not supported, without importing any."""
    found = [name for name, least in NEEDED.items() if version(name) < least]
    return (*([] if version(PACKAGE)[:2] == VERSION else ["fla-core 0.6"]), *map(_named, found))


def _named(package: str) -> str:
    return f"{package} {'.'.join(map(str, NEEDED[package]))}"


def refuses(call: Call) -> str | None:
    """Returns the reason why the kernels cannot run a call, or None."""
    if is_hopper(call.device_kind):
        return "is not for Hopper, where Triton has miscompiled some of its kernels; jax_linear_attention is"
    if not is_ampere_or_later(call.device_kind):
        return f"is for NVIDIA's GPUs since Ampere, not for {call.device_kind}"
    if call.dtype not in HALF:
        return f"takes values in {' or '.join(HALF)}, not in {call.dtype}"
    for name, width in (("keys", call.key_dim), ("values", call.value_dim)):
        if width % 16 or width > WIDEST[name]:
            return f"takes {name} whose width is a multiple of 16 up to {WIDEST[name]}, not of {width}"
    if call.batch * call.heads > MOST:
        return f"takes at most {MOST} heads of all rows together, not {call.batch * call.heads}"
    if call.tracked:
        return "does not say over which mesh axes its results vary: pass check_vma=False to jax.shard_map"
    return f"needs {', '.join(lacking())}: {INSTALL}" if lacking() else None


def _refuses_delta(call: Call, _: Any) -> str | None:
    # The inverse of longer keys grows from token to token, and is rounded to bfloat16.
    return refuses(call) if call.l2_norm else "is only stable for keys of unit norm: pass l2_norm=True"


def _row(accepts: Callable[[Call, Any], str | None]) -> Implementation:
    about = "kernels of flash-linear-attention in Triton, in both passes"
    return Implementation(about, frozenset({"gpu"}), accepts=accepts)


DELTA, OTHER = _row(_refuses_delta), _row(lambda call, _: refuses(call))
