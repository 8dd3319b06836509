"""Weights that other libraries store in few bits: several tensors that stand for one, read as one plain tensor.

`METHODS` lists what is read, by the `quant_method` of config.json. A `Scheme` names the tensors of a weight, and
unpacks them to a matrix `values * scale`. So model tables do not mention quantization, and `_kept` can store the
factors. Scales of activations are ignored: products are computed in the dtype of the activations.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from maxlib._utils.files import read_json_object
from maxlib.weights._fp8 import is_scaled_fp8, with_scales
from maxlib.weights.files import Stored

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each of 8 outputs among the nibbles of a word
_E8M0_BIAS = 127
_FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
# Scales of activations, of keys and of values.
_UNUSED = re.compile(r".*\.(input|output|[kqv])_(scale|zero_point|global_scale|scale_ub)|.*\.weight_format")


@dataclass(frozen=True)
class Factors:
    """A matrix as `values * scale`, or `(values - zeros) * scale`.

    Attributes:
        values: Numbers of few bits, `O I`.
        scale: float32, of the shape of `values` or one that broadcasts to it.
        dtype: Dtype to which the product is rounded.
        codes: For values from a table, their indices in it, `O I`.
        zeros: Zero points, of a shape as that of `scale`.
    """

    values: np.ndarray
    scale: np.ndarray
    dtype: np.dtype
    codes: np.ndarray | None = None
    zeros: np.ndarray | None = None

    @property
    def numbers(self) -> np.ndarray:
        """Returns the values less their zero points."""
        return self.values if self.zeros is None else self.values.astype(np.int16) - self.zeros


@dataclass(frozen=True)
class Layout:
    """Shape of a packed weight, and how `nn.quantized.QuantizedWeight` can store its factors.

    Attributes:
        shape: Shape of the weight, `O I`.
        qtype: Type that has all its values; None if the factors cannot be stored.
        group: Number of neighbouring inputs that share a scale; None if all inputs of an output do.
        has_zeros: True if its groups have zero points.
    """

    shape: tuple[int, ...]
    qtype: str | None = None
    group: int | None = None
    has_zeros: bool = False


Parts = Mapping[str, Stored]
_Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Scheme:
    """How a method stores one weight.

    Attributes:
        name: Name for errors.
        marker: Suffix of the tensor that shows that a weight is stored in this way.
        required: Suffixes of the tensors that a weight must have, in place of `marker`'s; `marker` is one of them.
        optional: Suffixes of the tensors that it may have.
        layout: Returns the layout of the weight; raises ValueError for tensors that do not fit.
        unpack: Returns the weight's factors.
    """

    name: str
    marker: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    layout: Callable[[Parts], Layout]
    unpack: Callable[[_Arrays], Factors]


@dataclass(frozen=True)
class Packed(Stored):
    """A plain tensor, computed from the tensors of a scheme."""

    as_stored: ClassVar[bool] = False
    name: str
    scheme: Scheme
    layout: Layout
    parts: Mapping[str, Stored]

    def factors(self) -> Factors:
        """Returns the factors of the weight; raises ValueError for indices or settings that are not valid."""
        try:
            return self.scheme.unpack({suffix: tensor.view() for suffix, tensor in self.parts.items()})
        except (ValueError, IndexError) as error:
            raise ValueError(f"{self.name}, stored as {self.scheme.name}, cannot be unpacked: {error}") from error

    def view(self) -> np.ndarray:
        """Returns the values, rounded once to the dtype of the method."""
        factors = self.factors()
        return (factors.numbers.astype(np.float32) * factors.scale).astype(factors.dtype)


def quantization_of(directory: str | Path) -> Mapping[str, Any]:
    """Returns the `quantization_config` of a directory, which may be that of its text model; {} if there is none."""
    path = Path(directory) / "config.json"
    config = read_json_object(path) if path.is_file() else {}
    places = [fields for fields in (config, config.get("text_config")) if isinstance(fields, dict)]
    entries = [fields.get(name) for fields in places for name in ("quantization_config", "compression_config")]
    return next((entry for entry in entries if isinstance(entry, dict)), {})


def unreadable(quantization: Any) -> str:
    """Explains why weights with this `quantization_config` cannot be read; empty if they can."""
    try:
        schemes_of(quantization)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        return str(error)
    return ""


def schemes_of(quantization: Mapping[str, Any]) -> Sequence[Scheme]:
    """Returns the schemes of a `quantization_config`; raises ValueError for one that is not supported."""
    method = quantization.get("quant_method")
    if method not in METHODS:
        raise ValueError(f"quant_method must be one of {', '.join(METHODS)}, got {method!r}")
    return METHODS[method](quantization)


def unpacked(stored: Mapping[str, Stored], quantization: Mapping[str, Any]) -> dict[str, Stored]:
    """Returns the tensors with those of each quantized weight joined to one.

    Args:
        stored: The tensors of the files.
        quantization: The `quantization_config` of config.json; {} if there is none.

    Raises:
        ValueError: For tensors that are missing or do not fit; names tensor and scheme.
    """
    joined = with_scales(stored)
    if unreadable(quantization):  # either none, or one that the reader of config.json was told to ignore
        return joined
    schemes = schemes_of(quantization)
    for scheme in schemes:
        for name in [name for name in joined if name.endswith(f".{scheme.marker}")]:
            _join(name.removesuffix(scheme.marker), scheme, joined)
    plain = {
        name: t for name, t in joined.items() if isinstance(t, Packed) or not (schemes and _UNUSED.fullmatch(name))
    }
    if bare := [name for name, t in plain.items() if t.dtype in _FLOAT8]:
        raise ValueError(
            f"{bare[0]} is stored in {plain[bare[0]].dtype} and must have a scale ({' or '.join(_SCALES)}), but the files "
            f"have none. Is the download complete? ({len(bare)} such tensors)"
        )
    return plain


_SCALES = ("weight_scale", "weight_scale_inv")


def _join(module: str, scheme: Scheme, joined: dict[str, Stored]) -> None:
    """Replaces the tensors of one weight by the weight."""
    if missing := [module + suffix for suffix in scheme.required if module + suffix not in joined]:
        raise ValueError(
            f"{module}weight, stored as {scheme.name}, needs {', '.join(missing)}, which the files do not have. Is the "
            "download complete?"
        )
    parts = {
        suffix: joined.pop(module + suffix)
        for suffix in (*scheme.required, *scheme.optional)
        if module + suffix in joined
    }
    marked = parts[scheme.marker]
    try:
        layout = scheme.layout(parts)
    except ValueError as error:
        shapes = ", ".join(f"{suffix} {tensor.dtype} {tensor.shape}" for suffix, tensor in parts.items())
        raise ValueError(f"{module}weight, stored as {scheme.name}: {error}; got {shapes}") from error
    dtype = _dtype(parts)
    joined[f"{module}weight"] = Packed(
        marked.path, marked.offset, dtype, layout.shape, f"{module}weight", scheme, layout, parts
    )


def _dtype(parts: Parts) -> np.dtype:
    """Returns the dtype to which products are rounded."""
    scale = next((parts[suffix].dtype for suffix in ("scales", "weight_scale") if suffix in parts), None)
    if _STATE in parts:
        return np.dtype(_state(parts[_STATE].view())["dtype"])
    if scale in (np.float16, np.float32, np.dtype(ml_dtypes.bfloat16)):
        return np.dtype(scale)
    return np.dtype(np.float32) if "SCB" in parts else np.dtype(ml_dtypes.bfloat16)


def _words(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Reads `count` unsigned numbers of `bits` bits each from the last axis of int32 words, without gaps."""
    bytes_ = np.ascontiguousarray(packed).astype("<i4", copy=False).view(np.uint8)
    if bits == 4:  # [..., W] words -> [..., 8 W] nibbles
        return np.stack([bytes_ & 0xF, bytes_ >> 4], axis=-1).reshape(*bytes_.shape[:-1], -1)[..., :count]
    stream = np.unpackbits(bytes_, axis=-1, bitorder="little")[..., : count * bits]
    numbers = stream.reshape(*packed.shape[:-1], count, bits)
    return (numbers << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


def _signed(
    bits: int, codes: np.ndarray, zeros: np.ndarray, scale: np.ndarray, groups: np.ndarray | None = None
) -> Factors:
    """Returns the factors of unsigned numbers `O I`, with a zero point and a scale for each group, `O G`.

    Args:
        bits: Bits of a number; half of their range is subtracted from numbers and zero points.
        codes: The numbers.
        zeros: The zero points.
        scale: The scales.
        groups: The group of each input; None for groups of neighbours.
    """
    I, G = codes.shape[1], scale.shape[1]
    groups = np.arange(I) // (I // G) if groups is None else groups
    if len(groups) and not (groups.min() >= 0 and groups.max() < G):
        raise ValueError(f"groups must be in [0, {G}), got {groups.min()} to {groups.max()}")
    values, zeros = (array.astype(np.int16) - (1 << bits - 1) for array in (codes, zeros))
    return Factors(values, scale.astype(np.float32)[:, groups], scale.dtype, zeros=zeros[:, groups])


def _spread(scale: np.ndarray, shape: tuple[int, ...], blocks: Sequence[int] | None = None) -> np.ndarray:
    """Repeats scales over a matrix `O I`: one in all, or for each output, group of inputs, or block."""
    O, I = shape
    scale = scale.astype(np.float32)
    if scale.size == 1:
        return scale.reshape(1, 1)
    if scale.shape in ((O,), (O, 1)):
        return scale.reshape(O, 1)
    if blocks is not None and scale.shape == _blocks(shape, blocks):
        return np.repeat(np.repeat(scale, blocks[0], axis=0)[:O], blocks[1], axis=1)[:, :I]
    return np.repeat(scale, I // scale.shape[-1], axis=-1)


def _blocks(shape: tuple[int, ...], blocks: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-size // side) for size, side in zip(shape, blocks, strict=True))


def _layout(
    shape: tuple[int, ...], qtype: str | None, scale: tuple[int, ...], blocks: Sequence[int] | None = None
) -> Layout:
    """Returns the layout of a matrix `O I`; raises ValueError unless scales of the shape `scale` fit it."""
    O, I = shape
    if scale in ((), (1,), (1, 1), (O,), (O, 1)):
        return Layout(shape, qtype)
    if blocks is not None and scale == _blocks(shape, blocks):
        return Layout(shape, None if I % blocks[1] else qtype, blocks[1])
    if len(scale) == 2 and scale[0] == O and scale[1] and I % scale[1] == 0:
        return Layout(shape, qtype, I // scale[1])
    raise ValueError(
        f"there must be one scale for the matrix {shape}, for each output, for each group of inputs (groups must divide "
        f"{I})" + ("" if blocks is None else f" or for each block of {tuple(blocks)}")
    )


def _sized(layout: Layout, sizes: Collection[int]) -> Layout:
    """Returns a layout; raises ValueError if its groups are not of a size in config.json."""
    if layout.group is not None and sizes and layout.group not in sizes:
        raise ValueError(
            f"config.json has groups of {' or '.join(map(str, sizes))}, but the scales of the matrix {layout.shape} are for "
            f"groups of {layout.group}"
        )
    return layout


# ------------------------------------------------------------------------------------------- compressed-tensors


def _compressed_tensors(quantization: Mapping[str, Any]) -> Sequence[Scheme]:
    """Reads the formats of compressed-tensors; the tensors show which of them a weight has."""
    if (quantization.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError("sparsity_config.format must be dense: sparse weights are not supported")
    if (quantization.get("transform_config") or {}).get("config_groups"):
        raise ValueError("transform_config must be empty: weights that are rotated at run time are not supported")
    groups = (quantization.get("config_groups") or {}).values()
    known = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
    known += ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
    formats = {quantization.get("format"), *(group.get("format") for group in groups)} - {None, "dense"}
    if unknown := formats - {*known}:
        raise ValueError(f"the format must be one of {', '.join(known)}, got {', '.join(map(str, unknown))}")
    weights = [group["weights"] for group in groups if group.get("weights")]
    blocks = next((w["block_structure"] for w in weights if w.get("block_structure")), None)
    bits = {w["num_bits"] for w in weights if w.get("type", "int") == "int"}
    sizes = {w["group_size"] for w in weights if w.get("group_size")}
    return _packed_weights(bits, sizes), _narrow_weights(blocks)


def _packed_weights(bits: Collection[int], sizes: Collection[int]) -> Scheme:
    """Returns the scheme of integers in words, and of pairs of E2M1 numbers."""

    def layout(parts: Parts) -> Layout:
        packed, scale = parts["weight_packed"], parts["weight_scale"].shape
        if packed.dtype == np.uint8:
            return _sized(_layout((packed.shape[0], 2 * packed.shape[1]), "float8_e4m3fn", scale), sizes)
        if "weight_shape" not in parts:
            raise ValueError("packed integers need weight_shape")
        shape = tuple(map(int, parts["weight_shape"].view()))
        qtype = "int4" if width(packed.shape, shape) <= 4 else "int8"
        if "weight_g_idx" in parts:
            return Layout(shape)
        layout = _sized(_layout(shape, qtype, scale), sizes)
        return replace(layout, has_zeros="weight_zero_point" in parts)

    def width(packed: tuple[int, ...], shape: tuple[int, ...]) -> int:
        fitting = [n for n in sorted(bits) if packed == (shape[0], -(-shape[1] * n // 32))]
        if len(fitting) != 1:
            raise ValueError(f"{packed} words must hold {shape} numbers of {' or '.join(map(str, bits))} bits")
        return fitting[0]

    def unpack(arrays: _Arrays) -> Factors:
        packed, scale = arrays["weight_packed"], arrays["weight_scale"]
        if packed.dtype == np.uint8:
            return _fp4(packed, scale, 1 / arrays["weight_global_scale"] if "weight_global_scale" in arrays else None)
        O, I = map(int, arrays["weight_shape"])
        n = width(packed.shape, (O, I))
        scale = scale if scale.ndim == 2 else scale.reshape(-1, 1)
        zeros, points = np.full(scale.shape, 1 << n - 1), arrays.get("weight_zero_point")
        if points is not None and points.dtype == np.int8:  # of one scale for all, or of older versions
            zeros = points.reshape(scale.shape).astype(np.int16) + zeros
        elif points is not None:  # packed along the outputs: [O / 8, G] words -> [G, O] -> [O, G]
            zeros = _words(points.T, n, O).T
        return _signed(n, _words(packed, n, I), zeros, scale, arrays.get("weight_g_idx"))

    optional = ("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
    name, tensors = "compressed-tensors' packed weights", ("weight_packed", "weight_scale")
    return Scheme(name, "weight_packed", tensors, optional, layout, unpack)


def _narrow_weights(blocks: Sequence[int] | None = None) -> Scheme:
    """Returns the scheme of a weight of a dtype of eight bits."""

    def layout(parts: Parts) -> Layout:
        weight = parts["weight"]
        if len(weight.shape) != 2 or weight.dtype not in (np.int8, *_FLOAT8):
            raise ValueError("a weight with scales must be int8 or a float8, and a matrix")
        layout = _layout(weight.shape, weight.dtype.name, parts["weight_scale"].shape, blocks)
        return replace(layout, has_zeros="weight_zero_point" in parts and weight.dtype == np.int8)

    def unpack(arrays: _Arrays) -> Factors:
        values, scale = arrays["weight"], arrays["weight_scale"]
        if scale.dtype == np.uint8:  # MXFP8
            return Factors(values, _spread(_e8m0(scale), values.shape), np.dtype(ml_dtypes.bfloat16))
        zeros = None
        if "weight_zero_point" in arrays and values.dtype == np.int8:
            zeros = _spread(arrays["weight_zero_point"], values.shape, blocks).astype(np.int16)
        return Factors(values, _spread(scale, values.shape, blocks), scale.dtype, zeros=zeros)

    name, tensors = "int8 or FP8 with weight_scale", ("weight", "weight_scale")
    return Scheme(name, "weight_scale", tensors, ("weight_zero_point",), layout, unpack)


def _e8m0(scale: np.ndarray) -> np.ndarray:
    return np.ldexp(np.float32(1), scale.astype(np.int32) - _E8M0_BIAS)


def _fp4(packed: np.ndarray, scale: np.ndarray, factor: np.ndarray | None) -> Factors:
    """Unpacks pairs of E2M1 numbers: NVFP4, with E4M3 scales and a factor of all, or MXFP4, with powers of two."""
    halves = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    values = halves.view(ml_dtypes.float4_e2m1fn).astype(ml_dtypes.float8_e4m3fn)  # E4M3 has all values of E2M1
    scales = _e8m0(scale) if scale.dtype == np.uint8 else scale.astype(np.float32)
    if factor is not None:
        scales = (scales * factor.astype(np.float32)).astype(np.float32)
    return Factors(values, _spread(scales, values.shape), np.dtype(ml_dtypes.bfloat16))


def _modelopt(quantization: Mapping[str, Any]) -> Sequence[Scheme]:
    """Reads NVFP4 and FP8 of NVIDIA's ModelOpt."""
    algorithm = quantization.get("quant_algo")
    if algorithm not in ("NVFP4", "FP8"):
        raise ValueError(f"quant_algo must be NVFP4 or FP8, got {algorithm!r}")
    if algorithm == "FP8":
        return (_narrow_weights(),)

    def layout(parts: Parts) -> Layout:
        rows, columns = parts["weight"].shape
        return _layout((rows, 2 * columns), "float8_e4m3fn", parts["weight_scale"].shape)

    def unpack(arrays: _Arrays) -> Factors:
        return _fp4(arrays["weight"], arrays["weight_scale"], arrays["weight_scale_2"])

    tensors = ("weight", "weight_scale", "weight_scale_2")
    return (Scheme("ModelOpt's NVFP4", "weight_scale_2", tensors, (), layout, unpack),)


def _auto_fp8(quantization: Mapping[str, Any]) -> Sequence[Scheme]:
    """Reads FP8 with `weight_scale`, of AutoFP8 and FBGEMM; `_fp8` reads it with `weight_scale_inv`."""
    if quantization.get("quant_method") == "fp8" and not is_scaled_fp8(quantization):
        raise ValueError(f"weight_block_size must be absent or [128, 128], got {quantization['weight_block_size']}")
    return (_narrow_weights(),)


# ---------------------------------------------------------------------------------------------- GPTQ and AWQ


def _gptq(quantization: Mapping[str, Any]) -> Sequence[Scheme]:
    """Reads GPTQ: words along the inputs, zero points that the first version stores less one, groups in any order."""
    bits, form = quantization.get("bits"), quantization.get("checkpoint_format", quantization.get("format", "gptq"))
    if bits not in (2, 3, 4, 8) or form not in ("gptq", "gptq_v2"):
        raise ValueError(
            f"GPTQ must have 2, 3, 4 or 8 bits and the checkpoint_format gptq or gptq_v2, got bits {bits!r}, {form!r}"
        )
    ordered = not quantization.get("desc_act", False)
    sizes = _group_sizes(quantization)
    qtype, has_zeros = "int4" if bits <= 4 else "int8", not quantization.get("sym", True)

    def layout(parts: Parts) -> Layout:
        words, O = parts["qweight"].shape
        I = words * 32 // bits
        if "g_idx" not in parts and not ordered:
            raise ValueError("with desc_act there must be a g_idx, the group of each input")
        groups = _count_groups(parts, (O, I), bits)
        layout = Layout((O, I), qtype if ordered else None, None if groups == 1 else I // groups, has_zeros)
        return layout if "g_idx" in parts else _sized(layout, sizes)

    def unpack(arrays: _Arrays) -> Factors:
        # [I / 8, O] words -> [O, I]
        codes = _words(arrays["qweight"].T, bits, arrays["qweight"].shape[0] * 32 // bits)
        zeros = _words(arrays["qzeros"], bits, len(codes))  # [G, O]
        zeros = zeros + 1 & (1 << bits) - 1 if form == "gptq" else zeros
        return _signed(bits, codes, zeros.T, arrays["scales"].T, arrays.get("g_idx"))

    return (Scheme("GPTQ", "qweight", ("qweight", "qzeros", "scales"), ("g_idx",), layout, unpack),)


def _count_groups(parts: Parts, shape: tuple[int, int], bits: int) -> int:
    """Returns the number of groups of inputs; raises ValueError for scales or zero points that do not fit."""
    (O, I), scales = shape, parts["scales"].shape
    fit = len(scales) == 2 and scales[0] > 0 and parts["qzeros"].shape == (scales[0], O * bits // 32)
    divided = parts["g_idx"].shape == (I,) if "g_idx" in parts else fit and I % scales[0] == 0
    if not (fit and scales[1] == O and divided):
        raise ValueError(f"{bits} bits need scales, zero points and a group for each of {I} inputs, {O} outputs")
    return scales[0]


def _group_sizes(quantization: Mapping[str, Any]) -> list[int]:
    """Returns the size of groups in config.json; none if there are no groups, or it does not say."""
    size = quantization.get("group_size", quantization.get("q_group_size", -1))
    return [] if size == -1 else [size]


def _awq(quantization: Mapping[str, Any]) -> Sequence[Scheme]:
    """Reads AWQ: words along the outputs, whose nibbles are interleaved."""
    bits, version = quantization.get("bits"), str(quantization.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise ValueError(f"AWQ must have 4 bits and the version gemm, got bits {bits!r}, {version!r}")

    def layout(parts: Parts) -> Layout:
        I, O = parts["qweight"].shape[0], parts["qweight"].shape[1] * 8
        layout = Layout((O, I), "int4", I // _count_groups(parts, (O, I), bits), has_zeros=True)
        return _sized(layout, _group_sizes(quantization))

    def numbers(words: np.ndarray) -> np.ndarray:
        # [N, O / 8] words -> [N, O / 8, 8] -> [O, N]
        nibbles = _words(words, 4, words.shape[1] * 8).reshape(*words.shape, 8)
        return nibbles[..., _AWQ_ORDER].reshape(len(words), -1).T

    def unpack(arrays: _Arrays) -> Factors:
        return _signed(bits, numbers(arrays["qweight"]), numbers(arrays["qzeros"]), arrays["scales"].T)

    return (Scheme("AWQ", "qweight", ("qweight", "qzeros", "scales"), (), layout, unpack),)


# ---------------------------------------------------------------------------------------------- bitsandbytes

_STATE = "weight.quant_state.bitsandbytes__nf4"


def _state(tensor: np.ndarray) -> dict[str, Any]:
    """Reads the settings that bitsandbytes stores beside a weight, as JSON in a tensor of bytes."""
    return json.loads(tensor.tobytes())


def _bitsandbytes(quantization: Mapping[str, Any]) -> Sequence[Scheme]:
    """Reads NF4 with scales of 32 or 8 bits, and int8 with one scale for each output."""
    if quantization.get("load_in_8bit"):

        def int8_layout(parts: Parts) -> Layout:
            return _layout(parts["weight"].shape, "int8", parts["SCB"].shape)

        def int8(arrays: _Arrays) -> Factors:
            scale = _spread(arrays["SCB"], arrays["weight"].shape) * np.float32(1 / 127)
            return Factors(arrays["weight"], scale, np.dtype(np.float32))

        return (Scheme("bitsandbytes' int8", "SCB", ("weight", "SCB"), (), int8_layout, int8),)
    if quantization.get("bnb_4bit_quant_type", "nf4") != "nf4":
        raise ValueError(f"bnb_4bit_quant_type must be nf4, got {quantization['bnb_4bit_quant_type']!r}")

    def layout(parts: Parts) -> Layout:
        state = _state(parts[_STATE].view())
        size = math.prod(state["shape"])
        if parts["weight"].shape != (-(-size // 2), 1) or parts["weight"].dtype != np.uint8:
            raise ValueError(f"two of {size} values must be in each byte")
        if parts["weight.absmax"].shape != (-(-size // state["blocksize"]),):
            raise ValueError(f"there must be one scale for each {state['blocksize']} of {size} values")
        if "nested_blocksize" in state and not {*_NESTED} <= {*parts}:
            raise ValueError(f"scales of 8 bits need {' and '.join(_NESTED)}")
        shape, block = tuple(state["shape"]), state["blocksize"]
        return Layout(shape, None if shape[-1] % block else "nf4", block)

    def unpack(arrays: _Arrays) -> Factors:
        state = _state(arrays[_STATE])
        size, block, scale = math.prod(state["shape"]), state["blocksize"], arrays["weight.absmax"]
        if "nested_blocksize" in state:
            outer = np.repeat(arrays[_NESTED[0]], state["nested_blocksize"])[: len(scale)]
            scale = arrays[_NESTED[1]][scale] * outer + np.float32(state["nested_offset"])
        packed = arrays["weight"].reshape(-1)
        codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)[:size].reshape(state["shape"])
        spread = np.repeat(scale.astype(np.float32), block)[:size].reshape(state["shape"])
        return Factors(arrays["weight.quant_map"][codes], spread, np.dtype(state["dtype"]), codes)

    tensors = ("weight", "weight.absmax", "weight.quant_map", _STATE)
    return (Scheme("bitsandbytes' NF4", "weight.absmax", tensors, _NESTED, layout, unpack),)


_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
METHODS: dict[str, Callable[[Mapping[str, Any]], Sequence[Scheme]]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "fp8": _auto_fp8,
    "fbgemm_fp8": _auto_fp8,
    "modelopt": _modelopt,
}
