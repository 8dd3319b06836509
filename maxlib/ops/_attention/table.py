"""The table of attention implementations: the devices, features and shapes that each supports.

A call runs the first row that supports its platform, features and shapes. Kernels with the most production use come
first (cuDNN and splash), then those that have been compared with them on hardware (maxlib's for Hopper), then
tokamax's, which maxlib has run on Hopper only, and then plain XLA (`chunked`).

| device | one query, whole cache | few queries | whole rows, named mask, sinks | packed, intervals, soft-cap | bias |
|---|---|---|---|---|---|
| TPU v4, v5e, v5p, v6e, v7x | `split_kv` | `split_kv` | `splash` | `splash` | `chunked` |
| NVIDIA H100, H200 | `cudnn` | `mosaic_gpu` | `cudnn` | `mosaic_gpu` | `chunked` |
| NVIDIA B200, B300 | `cudnn` | `split_kv` | `cudnn` | `tokamax`, `tokamax_triton` | `chunked` |
| NVIDIA A100, L40S | `cudnn` | `split_kv` | `cudnn` | `tokamax_triton` | `chunked` |
| CPU and others | `chunked` | `chunked` | `chunked` | `chunked` | `chunked` |

On Hopper a cache of latents (MLA) is decoded by `mosaic_gpu_mla`, and heads of 192 with values of 128 run `mosaic_gpu`,
where cuDNN would pad values. The log-sum-exp, which rings need, comes from `splash`, `mosaic_gpu` and `chunked`.
"""

import dataclasses
from collections.abc import Callable

from maxlib.hardware import is_ampere_or_later, is_blackwell, is_hopper
from maxlib.kernels.attention.mosaic_gpu import config as gpu
from maxlib.kernels.tile_sizes import chosen_tiles
from maxlib.kernels.vector_memory import vmem_of
from maxlib.ops._attention.chunked import chunked, chunked_tiles
from maxlib.ops._attention.cudnn import cudnn, head_width, refuses_sinks
from maxlib.ops._attention.masks import StaticMask
from maxlib.ops._attention.mosaic_gpu import mosaic_gpu, mosaic_gpu_mla
from maxlib.ops._attention.reference import reference
from maxlib.ops._attention.splash import MOST_BLOCKS, SplashTiles, splash, splash_tiles
from maxlib.ops._attention.split_kv import MAX_QUERIES, SplitTiles, split_kv
from maxlib.ops._attention.tokamax_gpu import BLACKWELL, INSTALL, is_installed, tokamax
from maxlib.ops._attention.tokamax_triton import (
    NEEDED,
    WIDEST,
    has_triton_attention,
    tokamax_triton,
    triton_tiles,
)
from maxlib.ops._dispatch import Call, Kernel, Op

FEATURES = {
    "gqa": "fewer key than query heads",
    "value_dim": "values of another width than keys",
    "softcap": "soft-capped logits",
    "sinks": "a sink logit per head",
    "bias": "an additive bias",
    "lse": "the log-sum-exp as a result",
    "float64": "double precision",
}

HALF = ("bfloat16", "float16")
TRACKED = "does not say over which mesh axes its results vary: pass check_vma=False to jax.shard_map"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall(Call):
    """The properties of a call that decide its kernel.

    Args:
        batch: Number B of rows.
        queries: Number T of queries in a row.
        keys: Number S of keys in a row.
        heads: Number N of query heads.
        kv_heads: Number K of key heads.
        key_dim: Width of queries and keys.
        value_dim: Width of values.
        mask: Static description of the intervals, or None.
        tracked: True if JAX tracks the mesh axes that arrays vary over (`jax.shard_map` with `check_vma`).
        shared: True if the values are the first channels of the keys (a cache of latents).
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    mask: StaticMask | None = None
    tracked: bool = False
    shared: bool = False

    def __str__(self) -> str:
        uses = ", ".join(sorted(self.features)) or "no extra features"
        uses = f"{uses}; mask: {self.mask or 'intervals'}{'; values are channels of the keys' if self.shared else ''}"
        return (
            f"B={self.batch} T={self.queries} S={self.keys} N={self.heads} K={self.kv_heads} "
            f"Hk={self.key_dim} Hv={self.value_dim} {self.dtype} ({uses}) on {self.platform} ({self.device_kind})"
        )


def split_refuses(call: AttentionCall) -> str | None:
    """Returns the reason why `split_kv` should not run `call`, or None."""
    few = call.queries <= MAX_QUERIES
    return None if few else f"is for at most {MAX_QUERIES} queries at a time, not {call.queries}"


def splash_refuses(call: AttentionCall) -> str | None:
    """Returns the reason why splash attention cannot run `call`, or None."""
    if call.dtype not in ("bfloat16", "float32"):
        return f"takes queries in bfloat16 or float32, not in {call.dtype}"
    if call.mask is None:
        return "needs to know where intervals begin: pass mask_hint= (ops.StaticMask), or no k_start"
    if call.mask.window is not None and call.mask.kind != "causal":
        return "takes a window only under a causal mask"
    block = chosen_tiles(_splash_tiles(call)).forward
    if (count := block.count(call.queries, call.keys)) > MOST_BLOCKS:
        return f"takes at most {MOST_BLOCKS} blocks of {block.queries} x {block.keys}, not {count}: split the sequence"
    return None


def _splash_tiles(call: AttentionCall) -> SplashTiles:
    window = None if call.mask is None else call.mask.window
    vmem = vmem_of(call.device_kind)
    return splash_tiles(call.queries, call.keys, call.key_dim, call.value_dim, window, vmem=vmem)


def _names_no_mask(call: AttentionCall) -> str | None:
    """Returns the reason why cuDNN, which takes a named mask and no intervals, cannot run `call`."""
    if call.mask is None or call.mask.kind == "any":
        return "takes causal, full and windowed masks, not intervals: pass mask_hint= (ops.StaticMask)"
    if call.mask.segmented:
        return "takes packed documents only with a fixed number in every row, which JAX's function does not offer"
    if not call.mask.aligned:
        one_query = call.queries == 1 and call.mask.window is None and "sinks" not in call.features
        return (
            None if one_query else "takes a KV cache or a split sequence only for one query, without a window or sinks"
        )
    if call.mask.window is not None and call.mask.kind != "causal":
        return "takes a window only under a causal mask"
    return None


def _gpu_refuses(call: AttentionCall, fits: Callable[[str], bool], generations: str) -> str | None:
    """Returns the reason why a kernel for some GPUs, in half precision, cannot run `call`, or None."""
    if not fits(call.device_kind):
        return f"is for NVIDIA's {generations}, not for {call.device_kind}"
    return None if call.dtype in HALF else f"takes queries in bfloat16 or float16, not in {call.dtype}"


def cudnn_refuses(call: AttentionCall) -> str | None:
    """Returns the reason why cuDNN cannot run `call`, or None."""
    if reason := _gpu_refuses(call, is_ampere_or_later, "GPUs since Ampere"):
        return reason
    # Heads of 256 need the registers of Hopper's warpgroups.
    widest = 256 if is_hopper(call.device_kind) or is_blackwell(call.device_kind) else 128
    width = head_width(call.key_dim, call.value_dim, call.device_kind)
    if width % 8 or width > widest:
        return f"takes heads whose width is a multiple of 8, at most {widest} here, not {width}"
    if is_hopper(call.device_kind) and call.key_dim != call.value_dim and width > 128:
        return (
            f"pads keys and values to a width of {width}, which took 1.4 to 1.6 times as long as mosaic_gpu on an H100"
        )
    return _names_no_mask(call) or (refuses_sinks() if "sinks" in call.features else None)


def tokamax_refuses(call: AttentionCall) -> str | None:
    """Returns the reason why tokamax cannot run `call`, or None."""
    blackwell = is_blackwell(call.device_kind)
    generations = "Hopper and Blackwell (H100, H200, B200, B300 ...)"
    if reason := _gpu_refuses(call, lambda kind: is_hopper(kind) or is_blackwell(kind), generations):
        return reason
    # On Blackwell wider heads do not fit into shared memory in the backward pass.
    for name, width, widest in (("Hk", call.key_dim, 192), ("Hv", call.value_dim, 128)):
        if width > (widest if blackwell else 256):
            return f"takes heads of at most {widest if blackwell else 256} here, not {name}={width}"
    if call.tracked:
        return TRACKED
    return None if is_installed(BLACKWELL if blackwell else ()) else _not_installed(BLACKWELL if blackwell else ())


def tokamax_triton_refuses(call: AttentionCall) -> str | None:
    """Returns the reason why tokamax's kernels in Triton cannot run `call`, or None."""
    if reason := _gpu_refuses(call, is_ampere_or_later, "GPUs since Ampere"):
        return reason
    if (width := max(call.key_dim, call.value_dim)) > WIDEST:
        return f"takes heads of at most {WIDEST}, what fits into registers, not {width}"
    if call.tracked:
        return TRACKED
    return None if has_triton_attention() else _not_installed(NEEDED)


def _not_installed(least: tuple[int, ...]) -> str:
    version = ".".join(map(str, least))
    return f"needs tokamax {version}: {INSTALL} on Python 3.12 or later" if least else f"is not installed: {INSTALL}"


def mosaic_gpu_refuses(call: AttentionCall) -> str | None:
    """Returns the reason why maxlib's kernels for Hopper cannot run `call`, or None."""
    if reason := _gpu_refuses(call, is_hopper, "Hopper (H100, H200, GH200, H800, H20)"):
        return reason
    for name, width in (("Hk", call.key_dim), ("Hv", call.value_dim)):
        if width % 16 or width > gpu.WIDEST:
            return f"takes heads whose width is a multiple of 16, at most {gpu.WIDEST}, not {name}={width}"
    return None


def mosaic_gpu_mla_refuses(call: AttentionCall) -> str | None:
    """Returns the reason why maxlib's kernel for latents on Hopper cannot run `call`, or None."""
    if reason := _gpu_refuses(call, is_hopper, "Hopper (H100, H200, GH200, H800, H20)"):
        return reason
    if not call.shared or call.kv_heads > 1:
        return "takes one key head whose first channels are the values: pass their width as v"
    return split_refuses(call) or gpu.latents_refuse(call.key_dim, call.value_dim)


GPU, TPU = frozenset({"gpu"}), frozenset({"tpu"})
ALL = frozenset(FEATURES)

KERNELS = (
    # cuDNN, proven on every generation: the fastest backward pass for whole rows, and the fastest decoding.
    Kernel(
        "cudnn",
        cudnn,
        "cuDNN's fused attention, proven on every generation of GPUs since Ampere",
        GPU,
        frozenset({"gqa", "value_dim", "sinks"}),
        cudnn_refuses,
        takes_mask_hint=True,
    ),
    # maxlib's for Hopper, compared with cuDNN and tokamax on an H100 (docs/results.md): the fastest for packed rows.
    Kernel(
        "mosaic_gpu",
        mosaic_gpu,
        "Hopper kernels, masked tiles skipped in both passes",
        GPU,
        ALL - {"bias", "float64"},
        mosaic_gpu_refuses,
        tiles=lambda call: gpu.attention_tiles(call.key_dim, call.value_dim, "softcap" in call.features),
    ),
    # Decoding with latent attention, for which no package has kernels in JAX.
    Kernel(
        "mosaic_gpu_mla",
        mosaic_gpu_mla,
        "few queries against a cache of latents on Hopper, each read once",
        GPU,
        ALL - {"bias", "float64"},
        mosaic_gpu_mla_refuses,
        tiles=lambda call: gpu.latent_tiles(call.key_dim),
    ),
    # Few queries: the kernels below pad a single query to a whole block.
    # On a CPU one block keeps all cores busy, so chunked is faster.
    Kernel(
        "split_kv",
        split_kv,
        "few queries: parts of the keys in parallel, in XLA",
        GPU | TPU,
        ALL - {"bias"},
        split_refuses,
        tiles=lambda call: SplitTiles(),
    ),
    Kernel(
        "tokamax",
        tokamax,
        "tokamax's kernels for Hopper and Blackwell",
        GPU,
        frozenset({"gqa", "value_dim", "softcap"}),
        tokamax_refuses,
        takes_mask_hint=True,
    ),
    # Behind the kernels for one generation; it skips fewer tiles in the backward pass.
    Kernel(
        "tokamax_triton",
        tokamax_triton,
        "tokamax's kernels in Triton, for GPUs since Ampere",
        GPU,
        frozenset({"gqa", "value_dim", "softcap", "sinks"}),
        tokamax_triton_refuses,
        takes_mask_hint=True,
        tiles=lambda call: triton_tiles(call.key_dim, call.value_dim, call.device_kind),
    ),
    Kernel(
        "splash",
        splash,
        "JAX's splash attention, proven on TPUs",
        TPU,
        ALL - {"bias", "float64"},
        splash_refuses,
        takes_mask_hint=True,
        tiles=_splash_tiles,
    ),
    # The fallback, which supports every call.
    Kernel(
        "chunked",
        chunked,
        "blockwise XLA, memory linear in the sequence",
        features=ALL,
        tiles=lambda call: chunked_tiles(call.queries, call.heads, call.keys, call.platform),
    ),
    Kernel("reference", reference, "the definition, memory T x S", features=ALL),
)
ATTENTION = Op("attention", KERNELS, FEATURES, fused=("cudnn", "mosaic_gpu", "tokamax_triton", "splash"))


def without_device(call: AttentionCall) -> str:
    """Returns the best kernel for a call that compiles without the device, for plans.

    In place of kernels that only compile on a GPU this is maxlib's for Hopper, or plain XLA.
    """
    best = ATTENTION.choose(call).kernel
    stand_in = "mosaic_gpu" if best in ("cudnn", "tokamax", "tokamax_triton") else best
    return stand_in if ATTENTION.refusal(ATTENTION[stand_in], call) is None else "chunked"


def attention_implementations() -> tuple[Kernel, ...]:
    """Returns the implementations of `attention`, in order of preference.

    Each has a `name`, `platforms` (None for all), `features`, and a line `about` it.
    """
    return KERNELS
