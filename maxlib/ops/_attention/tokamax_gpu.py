"""tokamax's attention for Hopper and Blackwell GPUs (the extra `maxlib[cuda]`), imported when it is first called.

Its kernels take an interval of keys for each query, but its public function does not, so this module calls the
internals of tokamax 0.0.12 and 0.0.17.
"""

import functools
import importlib.metadata
import importlib.util
import re
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from maxlib.ops._attention.masks import MaskHint, StaticMask
from maxlib.ops._attention.reference import AttentionInputs, Results

INSTALL = "pip install 'maxlib[cuda]'"
TILE = 256  # lengths are padded to multiples of it: two tiles of queries, the most that a kernel processes at once


BLACKWELL = (0, 0, 17)  # the oldest version that was tried whose backward kernels fit into Blackwell's shared memory


@functools.cache
def is_installed(least: tuple[int, ...] = ()) -> bool:
    """Returns True if this version of tokamax or a later one can be imported, without importing it."""
    if importlib.util.find_spec("tokamax") is None:
        return False
    return not least or version("tokamax") >= least


def version(name: str) -> tuple[int, ...]:
    """Returns the first three numbers of an installed package's version; nothing where it is not installed."""
    try:
        return tuple(map(int, re.findall(r"\d+", importlib.metadata.version(name))[:3]))
    except importlib.metadata.PackageNotFoundError:
        return ()


def parse_no_flags() -> None:
    """Marks absl's flags as parsed: otherwise tokamax parses the program's arguments and exits at unknown ones.

    Raises:
        ImportError: When absl, which tokamax needs, is not installed.
    """
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def tokamax(x: AttentionInputs, *, kernel: str = "mosaic_gpu") -> Results:
    """Returns the output and None for the log-sum-exp, which tokamax does not differentiate."""
    try:
        parse_no_flags()
        from tokamax._src.ops.attention.api import IMPLEMENTATIONS
        from tokamax._src.ops.attention.base import Mask
    except ImportError as error:
        raise ImportError(f"tokamax must have the internals of 0.0.12 or 0.0.17, and absl: {INSTALL}") from error
    T, S = x.q.shape[1], x.k.shape[1]
    start, end, visible = intervals(x.start, x.end, S)
    masks = named(padded(start, 0), padded(end, 1), whole_tiles(T, S, x.mask_hint))
    q, k, v = (padded(a.astype(x.q.dtype), 0) for a in (x.q, x.k, x.v))
    out = IMPLEMENTATIONS[kernel](q, k, v, mask=Mask(**masks), logits_scale=x.scale, logits_soft_cap=x.softcap)
    return jnp.where(visible[..., None, None], out[:, :T], 0), None


def padded(x: Array, value: int) -> Array:
    """Pads the second dimension to whole tiles."""
    return jnp.pad(x, [(0, -x.shape[1] % TILE if d == 1 else 0) for d in range(x.ndim)], constant_values=value)


def intervals(
    k_start: Int[Array, "B T"], k_end: Int[Array, "B T"], keys: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Any]:
    """Returns bounds clipped so that each query attends to at least one key, and which queries really do."""
    # A softmax over no keys has a NaN gradient. Rows without visible keys get one key, and are set to zero afterwards.
    start, end = (jnp.clip(x, 0, keys) for x in (k_start, k_end))
    visible = start < end
    start = jnp.minimum(start, keys - 1)
    return start, jnp.maximum(end, start + 1), visible


def whole_tiles(T: int, S: int, mask_hint: MaskHint | None) -> StaticMask | None:
    """Returns the named mask, where no padding adds keys to it."""
    return None if T % TILE or S % TILE or mask_hint is None else mask_hint.static


def named(start: Int[Array, "B T"], end: Int[Array, "B T"], static: StaticMask | None) -> dict[str, Any]:
    """Returns the arguments of tokamax's mask: intervals, or named bounds where it skips tiles by name."""
    causal = static is not None and static.aligned and static.kind == "causal"
    plain = static is not None and static.aligned and static.window is None and not static.segmented
    arguments: dict[str, Any] = {"is_causal": causal}
    if not (plain and static is not None and static.kind != "any"):  # otherwise every key up to the end is visible
        arguments["k_start"] = start[:, None]  # [B, T] -> [B, 1, T]: the same for all heads
    if not causal and not (plain and static is not None and static.kind == "full"):
        arguments["k_end"] = end[:, None]
    return arguments
