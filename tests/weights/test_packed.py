"""Weights that other libraries packed: bit for bit what those libraries make of them, and errors for misfits."""

import functools
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from maxlib.weights import HFConfig
from maxlib.weights._kept import _Factor
from maxlib.weights._packed import METHODS, unpacked
from maxlib.weights.files import Header, find_tensors, write_file

GOLDEN = Path(__file__).parent / "packed"
SHAPE = (48, 64)


def read(path, tensors, quantization):
    """The values of the only weight in a directory with these tensors, "x." before each name."""
    named = {f"x.{name}": array for name, array in tensors.items()}
    headers = [Header(name, array.dtype, array.shape) for name, array in named.items()]
    write_file(path / "model.safetensors", headers, iter(named.values()))
    joined = unpacked(find_tensors(path), quantization)
    assert joined.keys() == {"x.weight"}
    got = joined["x.weight"].view()
    assert got.shape == joined["x.weight"].shape and got.dtype == joined["x.weight"].dtype
    return got


def to_numpy(tensor):
    """Torch's tensor as numpy's, also in dtypes that numpy has from ml_dtypes."""
    import torch

    names = {torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}
    if tensor.dtype in names:
        raw = torch.int16 if tensor.dtype == torch.bfloat16 else torch.uint8
        return tensor.contiguous().view(raw).numpy().view(names[tensor.dtype])
    return tensor.contiguous().numpy()


COMPRESSED = {
    "int4 in groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16}),
    "int4 with zero points": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int3": ("pack-quantized", {"num_bits": 3, "strategy": "channel"}),
    "int8 packed": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8 with zero points": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "fp8 in all": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 for outputs": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 in blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 24]},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
}


@functools.cache
def compressed(name):
    """Tensors that compressed-tensors packs, its settings, and what it unpacks."""
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor

    format, settings = COMPRESSED[name]
    arguments = library.quantization.QuantizationArgs(**settings)
    scheme = library.quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    random = torch.Generator().manual_seed(0)
    O, I = SHAPE
    groups = {
        "tensor": (1,),
        "channel": (O, 1),
        "block": (-(-O // 32), -(-I // 24)),
    }.get(settings["strategy"]) or (O, I // settings["group_size"])
    scale = (torch.rand(groups, generator=random) + 0.1).to(torch.bfloat16)
    if name == "mxfp4":
        scale = 2.0 ** torch.randint(-4, 2, groups, generator=random).to(torch.bfloat16)
    if name == "nvfp4":
        scale = (100 * scale).to(torch.float8_e4m3fn).to(torch.bfloat16)
    state = {"weight": 8 * torch.randn(O, I, generator=random).to(torch.bfloat16), "weight_scale": scale}
    if name == "nvfp4":
        state["weight_global_scale"] = torch.tensor([37.0])
    if settings.get("symmetric") is False:
        state["weight_zero_point"] = torch.randint(-4, 4, groups, generator=random).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(format)
    packed = compressor.compress(state, scheme)
    want = compressor.decompress(dict(packed), scheme)["weight"]
    quantization = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": settings}},
    }
    return {n: to_numpy(t) for n, t in packed.items()}, quantization, to_numpy(want)


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors(name, tmp_path):
    tensors, quantization, want = compressed(name)
    got = read(tmp_path, tensors | {"input_scale": np.ones(1, np.float32)}, quantization)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    assert got.dtype == want.dtype
    HFConfig({"quantization_config": quantization}).done()


def test_zero_points_that_are_not_packed(tmp_path):
    """As older versions of compressed-tensors wrote them."""
    torch = pytest.importorskip("torch")
    tensors, quantization, want = compressed("int4 with zero points")
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    shape = tensors["weight_scale"].shape
    points = unpack_from_int32(torch.from_numpy(tensors["weight_zero_point"]), 4, torch.Size(shape), packed_dim=0)
    got = read(tmp_path, tensors | {"weight_zero_point": points.numpy()}, quantization)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_gptq(bits, form, tmp_path):
    """The second version, whose zero points are as stored, and the first, which stores them less one."""
    golden = load_file(GOLDEN / "gptq.safetensors")
    tensors = {name.partition(".")[2]: t for name, t in golden.items() if name.startswith(f"{bits}.")}
    if form == "gptq":
        stream = np.unpackbits(tensors["qzeros"].view(np.uint8), axis=-1, bitorder="little").reshape(4, 32, bits)
        zeros = (np.packbits(stream, axis=-1, bitorder="little")[..., 0].astype(int) - 1) % 2**bits
        stream = np.unpackbits(zeros.astype(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits]
        tensors["qzeros"] = np.packbits(stream.reshape(4, -1), axis=-1, bitorder="little").view(np.int32)
    want = golden[f"want.{bits}"]
    for name in ("checkpoint_format", "format"):
        got = read(tmp_path, tensors, {"quant_method": "gptq", "bits": bits, name: form, "desc_act": True})
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype


def test_awq(tmp_path):
    golden = load_file(GOLDEN / "awq.safetensors")
    tensors = {name.partition(".")[2]: t for name, t in golden.items() if name.startswith("4.")}
    got = read(tmp_path, tensors, {"quant_method": "awq", "bits": 4, "version": "gemm"})
    np.testing.assert_array_equal(got, golden["want.4"])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bitsandbytes_nf4(nested, dtype, tmp_path):
    torch, library = pytest.importorskip("torch"), pytest.importorskip("bitsandbytes")
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    packed, state = library.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    tensors = {"weight": packed, **{f"weight.{name}": t for name, t in state.as_dict(packed=True).items()}}
    want = to_numpy(library.functional.dequantize_4bit(packed, state))
    got = read(
        tmp_path,
        {name: to_numpy(t) for name, t in tensors.items()},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    )
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    assert got.dtype == want.dtype


def test_bitsandbytes_int8(tmp_path):
    """Equal to one unit in the last place: the other library rounds twice."""
    torch, library = pytest.importorskip("torch"), pytest.importorskip("bitsandbytes")
    weight, scale, _ = library.functional.int8_vectorwise_quant(
        torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).half()
    )
    want = library.functional.int8_vectorwise_dequant(weight, scale).numpy()
    tensors = {"weight": weight.numpy(), "SCB": scale.numpy(), "weight_format": np.zeros((), np.uint8)}
    got = read(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    np.testing.assert_array_max_ulp(got, want, 1)


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_fp8_with_weight_scale(method, tmp_path):
    """As AutoFP8 stores it, with fixed scales of activations, which count for nothing."""
    random = np.random.default_rng(0)
    weight = random.standard_normal(SHAPE).astype(ml_dtypes.float8_e4m3fn)
    scale = random.uniform(0.1, 1, () if method == "fp8" else (SHAPE[0], 1)).astype(np.float32)
    tensors = {"weight": weight, "weight_scale": scale, "input_scale": np.float32([3]), "k_scale": np.float32([2])}
    quantization = {"quant_method": method, "activation_scheme": "static"}
    np.testing.assert_array_equal(read(tmp_path, tensors, quantization), weight.astype(np.float32) * scale)
    del tensors["weight_scale"]
    with pytest.raises(ValueError, match=r"x\.weight is stored in float8_e4m3fn and must have a scale"):
        read(tmp_path, tensors, quantization)


def test_modelopt(tmp_path):
    """The same NVFP4 numbers with a factor instead of a divisor."""
    tensors, _, want = compressed("nvfp4")
    renamed = {
        "weight": tensors["weight_packed"],
        "weight_scale": tensors["weight_scale"].astype(ml_dtypes.float8_e4m3fn),
        "weight_scale_2": 1 / tensors["weight_global_scale"],
        "input_scale": np.float32(1),
    }
    got = read(tmp_path, renamed, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=2**-7)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("int4 in groups", {"weight_scale": None}, r"x\.weight, stored as compressed.* needs x\.weight_scale"),
        ("int4 in groups", {"weight_shape": None}, "packed integers need weight_shape"),
        ("int4 in groups", {"weight_shape": np.array([48, 60])}, "has groups of 16, but .* are for groups of 15"),
        (
            "int4 in groups",
            {"weight_shape": np.array([48, 128])},
            r"\(48, 8\) words must hold \(48, 128\) numbers of 4",
        ),
        ("int4 in groups", {"weight_scale": np.ones((48, 3), np.float16)}, "groups must divide 64"),
        ("int4 in groups", {"weight_scale": np.ones((47, 4), np.float16)}, r"weight_scale float16 \(47, 4\)"),
        ("fp8 in blocks", {"weight_scale": np.ones((3, 3), np.float32)}, r"for each block of \(32, 24\)"),
        ("int8", {"weight": np.ones(SHAPE, np.int16)}, "a weight with scales must be int8 or a float8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name, change, message, tmp_path):
    tensors, quantization, _ = compressed(name)
    tensors = {n: t for n, t in (tensors | change).items() if t is not None}
    with pytest.raises(ValueError, match=message):
        read(tmp_path, tensors, quantization)


def test_a_group_that_does_not_exist_is_an_error(tmp_path):
    golden = load_file(GOLDEN / "gptq.safetensors")
    tensors = {name.partition(".")[2]: t for name, t in golden.items() if name.startswith("4.")}
    quantization = {"quant_method": "gptq", "bits": 4, "desc_act": True}
    with pytest.raises(ValueError, match=r"x\.weight, stored as GPTQ, cannot be unpacked: groups must be in \[0, 4\)"):
        read(tmp_path, tensors | {"g_idx": tensors["g_idx"] + 1}, quantization)
    del tensors["g_idx"]
    with pytest.raises(ValueError, match="with desc_act there must be a g_idx"):
        read(tmp_path, tensors, quantization)


def test_numbers_that_do_not_fit_the_stated_bits_are_not_kept(tmp_path):
    """Symmetric numbers have the zero point 8, with which they are int4; another makes them -1 to 14."""
    golden = load_file(GOLDEN / "gptq.safetensors")
    tensors = {name.partition(".")[2]: t for name, t in golden.items() if name.startswith("4.")}
    named = {f"x.{name}": array for name, array in (tensors | {"qzeros": np.zeros_like(tensors["qzeros"])}).items()}
    headers = [Header(name, array.dtype, array.shape) for name, array in named.items()]
    write_file(tmp_path / "model.safetensors", headers, iter(named.values()))
    packed = unpacked(find_tensors(tmp_path), {"quant_method": "gptq", "bits": 4})["x.weight"]
    assert (packed.layout.qtype, packed.layout.group) == ("int4", len(tensors["g_idx"]) // len(tensors["scales"]))
    factor = _Factor(packed.path, packed.offset, packed.dtype, packed.shape, packed, "values")
    with pytest.raises(ValueError, match=r"x\.weight must have values of int4, as its config.json says, got -1 to 14"):
        factor.view()


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "quip"}, f"quant_method must be one of {', '.join(METHODS)}, got 'quip'"),
        ({"bits": 4}, "quant_method must be one of"),
        ({"quant_method": "gptq", "bits": 5}, "2, 3, 4 or 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemm"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "must be nf4"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format must be one of .*, got marlin-24"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "mixed-precision",
                "config_groups": {"a": {"format": "pack-quantized"}, "b": {"format": "marlin-24"}},
            },
            "format must be one of .*, got marlin-24",
        ),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "must be dense"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}}, "rotated"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"got \[64, 64\]"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "NVFP4 or FP8"),
    ],
    ids=json.dumps,
)
def test_unknown_settings_are_refused_with_what_is_supported(quantization, message):
    with pytest.raises(ValueError, match=message):
        HFConfig({"quantization_config": quantization}).done()
