import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from maxlib import adapters, inference, nn, ops
from maxlib import quantization as quant
from maxlib.distributed.xla_flags import WITHOUT_TPU
from maxlib.nn.quantized import pack, unpack
from maxlib.ops._quantized_einsum import QUANTIZED_EINSUM
from maxlib.quantization._matmul import Quantized
from tests.nn.tiny import tokens
from tests.quantization.tiny import model, shapes, stored
from tests.training.tiny import VOCAB, llama

# The error of the logits that each format may have on these small random models, about one and a half times what it
# has.
FORMATS = {
    "int8": (quant.INFERENCE["int8"], 0.03),
    "int8_w8a8": (quant.INFERENCE["int8_w8a8"], 0.04),
    "fp8": (quant.INFERENCE["fp8"], 0.12),
    "fp8_w8a8": (quant.INFERENCE["fp8_w8a8"], 0.18),
    "int4": (quant.Format("int4", group=16), 0.3),
    "int4_asymmetric": (quant.Format("int4", group=16, symmetric=False), 0.3),
    "nf4": (quant.Format("nf4", group=16), 0.3),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def values(qtype: str, group: int | None):
    w = jax.random.normal(jax.random.key(0), (4, 3, 32))
    return w, nn.quantized.QuantizedWeight(w, qtype=qtype, outputs=(0, 1), group=group, axes=("a", "b", "c"))


@pytest.mark.parametrize(
    ("qtype", "group", "error", "bits"),
    [("int8", None, 0.006, 9), ("float8_e4m3fn", None, 0.03, 9), ("int4", 16, 0.1, 5), ("nf4", 16, 0.1, 5)],
)
def test_weights_in_fewer_bits(qtype, group, error, bits):
    w, q = values(qtype, group)
    assert q.shape == w.shape and q.nbytes * 8 == bits * w.size
    assert np.linalg.norm(np.asarray(q[...]) - w) < error * np.linalg.norm(w)


@pytest.mark.parametrize(("qtype", "least"), [("int4", -8), ("int8", -128)])
def test_zero_points_spread_a_group_over_the_range(qtype, least):
    """By the formula, of numbers around 1: from the least, or 0, to the largest."""
    w = 1 + np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)

    @jax.jit
    def stored(w):
        q = nn.quantized.QuantizedWeight(w, qtype=qtype, outputs=(0,), group=16, axes=("a", "b"), symmetric=False)
        return q.zeros[...], q.quantized().qvalue.astype(jnp.int32), q[...]

    zeros, integers, numbers = stored(jnp.asarray(w))
    groups = np.asarray(w, np.float64).reshape(3, 2, 16)
    low, high = np.minimum(groups.min(-1), 0), groups.max(-1)
    scale = (high - low) / (-2 * least - 1)
    zero = np.round(least - low / scale)
    values = np.clip(np.round(groups / scale[..., None]) + zero[..., None], least, -least - 1)
    np.testing.assert_array_equal(zeros, zero)
    np.testing.assert_array_equal(integers, values.reshape(3, 32))
    scale = scale.astype(jnp.bfloat16).astype(np.float64)
    np.testing.assert_allclose(numbers, ((values - zero[..., None]) * scale[..., None]).reshape(3, 32), rtol=1e-6)


def test_four_bits_hold_every_code():
    codes = jnp.arange(16, dtype=jnp.uint8).reshape(2, 8)
    for qtype, want in (("nf4", np.arange(16)), ("int4", [*range(8), *range(-8, 0)])):
        packed = pack(codes.astype(jnp.uint4) if qtype == "nf4" else jnp.array(want, jnp.int4).reshape(2, 8))
        assert packed.dtype == jnp.uint8 and packed.shape == (2, 4)
        np.testing.assert_array_equal(unpack(packed, qtype).astype(jnp.int32).ravel(), want)


@pytest.mark.parametrize(
    "formats", [("int8_w8a8", "int4"), pytest.param(tuple(FORMATS), marks=pytest.mark.full)], ids=["two", "all"]
)
def test_logits_of_every_format(formats):
    """Of dense and expert matmuls, in one program: compiling is what takes the time."""
    t = tokens(2, 12, vocab=VOCAB)
    logits = lambda m: m.logits(m(t, dtype=jnp.float32).hidden)
    low = lambda m: {what: logits(quant.for_inference(m, FORMATS[what][0])) for what in formats}
    exact, rounded = jax.jit(lambda m: (logits(m), low(m)))(model("both"))
    for what, got in rounded.items():
        # The median over tokens: where rounding changes the choice of an expert, a token's result is another one.
        error = jnp.median(jnp.linalg.norm(got - exact, axis=-1) / jnp.linalg.norm(exact, axis=-1))
        assert 0 < error < FORMATS[what][1], (what, error)


def test_report_names_what_is_quantized_and_what_is_not():
    full = model("moe")
    report = quant.report(stored("moe", "int8"))
    assert set(report.unquantized) == {"embed", "head", "layers.groups.0.0.mlp.router.gate"}
    experts = 2 * 3 * 4 * 16 * 32
    scales = 4 * 2 * 4 * (16 + 16 + 32)
    assert report.bytes_before == sum(a.nbytes for a in jax.tree.leaves(full))
    assert report.bytes_before - report.bytes_after == 3 * experts - scales
    assert report.share == experts / (experts + 2 * VOCAB * 32 + 2 * 4 * 32)
    text = str(report)
    assert "layers.groups.0.0.mlp.gate" in text and f"{report.bytes_after:,}" in text and "full precision" in text


def test_errors_of_a_quantized_model():
    full, t = model("moe"), tokens(2, 12, vocab=VOCAB)
    run = jax.jit(lambda m, t: m.logits(m(t, dtype=jnp.float32).hidden))
    low = stored("moe", (quant.Rule(quant.INFERENCE["int8"], kinds=("dense", "expert", "embedding")),))
    errors = quant.compare(full, low, t)
    logits, t = np.asarray(run(full, t), np.float64)[:, :-1], np.asarray(t)[:, 1:]
    nll = np.mean(np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, t[..., None], axis=-1)[..., 0])
    np.testing.assert_allclose(errors.perplexity, np.exp(nll), rtol=1e-5)
    assert 0 < errors.logit_error < 0.05 and 0 < errors.divergence < 1e-3 and errors.agreement > 0.9
    assert "perplexity" in str(errors)


@pytest.mark.parametrize(
    "cache_dtype", [jnp.int8, pytest.param(jnp.float8_e4m3fn, marks=pytest.mark.full)], ids=["int8", "fp8"]
)
def test_generates_with_quantized_weights_and_cache(cache_dtype):
    """As a pass without a cache says, in spite of the generator's own casts."""
    low = stored("llama", "int8_w8a8")
    prompt = tokens(1, 9, vocab=VOCAB)[0].tolist()
    run = jax.jit(lambda low, ids: low.logits(low(ids, dtype=jnp.float32).hidden))
    full = np.asarray(run(low, jnp.array([prompt])))[0, -1]
    generator = inference.Generator(low, dtype=jnp.float32, cache_dtype=cache_dtype)
    q = generator.model.layers[0].attn.q  # values are cast once: CPUs multiply 8 bits slowly
    assert q.w.qtype == "int8" and q.w.values.get_value().dtype == jnp.float32
    text = generator.generate([prompt], max_new_tokens=3)[0]
    assert text[0] == full.argmax()


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_every_way_to_multiply_by_a_stored_weight(qtype):
    _, w = values(qtype, None)
    x, spec = jax.random.normal(jax.random.key(1), (5, 2, 32)), "...D,NHD->...NH"
    run = functools.partial(ops.quantized_einsum, spec, x)
    for weight in (w, w.widened(jnp.float32)):
        np.testing.assert_allclose(
            run(weight, activations=qtype), run(w, activations=qtype, implementation="narrow"), rtol=1e-5, atol=1e-5
        )
    after = QUANTIZED_EINSUM["scaled_after"].run(spec, x, w, None, jnp.einsum)
    np.testing.assert_allclose(after, run(w), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="narrow was requested, but it needs rounded activations; dequantized can"):
        run(w, implementation="narrow")


def test_experts_multiply_the_same_values_in_a_wider_dtype():
    rng, counts = np.random.default_rng(0), jnp.array([4, 0, 5])

    @jax.jit
    def products(rows, w):
        w = nn.quantized.QuantizedWeight(w, qtype="int8", outputs=(0, 1), group=None, axes=("a", "b", "c"))
        return [Quantized(quant.INFERENCE["int8_w8a8"]).grouped(rows, w, counts) for w in (w, w.widened(jnp.float32))]

    narrow, wide = products(*(jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((10, 32), (3, 8, 32))))
    np.testing.assert_allclose(wide, narrow, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("device", "qtype", "group", "activations", "chosen"),
    [
        (("cpu", "cpu"), "int8", None, None, "dequantized"),
        (("cpu", "cpu"), "int8", None, "int8", "widened"),
        (("gpu", "H100"), "int8", None, None, "scaled_after"),
        (("gpu", "H100"), "int4", 16, None, "dequantized"),
        (("gpu", "H100"), "int8", None, "int8", "narrow"),
        (("tpu", "v5e"), "float8_e4m3fn", None, "float8_e4m3fn", "widened"),  # no units for FP8
        (("tpu", "v7x"), "float8_e4m3fn", None, "float8_e4m3fn", "narrow"),
    ],
)
def test_the_choice_is_explained(device, qtype, group, activations, chosen):
    w = jax.eval_shape(lambda: values(qtype, group)[1])
    x = jax.ShapeDtypeStruct((5, 2, 32), jnp.bfloat16)
    text = ops.explain_quantized_einsum("...D,NHD->...NH", x, w, activations=activations, device=device)
    assert text.chosen == chosen and text.reason in str(text) and qtype in str(text)


@pytest.mark.parametrize(("qtype", "dtype"), [("int4", jnp.int4), ("nf4", jnp.uint4)])
def test_values_of_four_bits_unpacked(qtype, dtype):
    """As TPUs have them; both give the matrix that qwix does, also in bfloat16."""
    _, packed = values(qtype, 16)
    unpacked = packed.widened(dtype)
    assert unpacked.values.get_value().dtype == dtype and unpacked.shape == packed.shape and not unpacked.is_packed
    exact = qwix.dequantize(packed.quantized())
    for weight in (packed, unpacked):
        np.testing.assert_array_equal(weight[...], exact)
        np.testing.assert_array_equal(weight.matrix(jnp.bfloat16), exact.astype(jnp.bfloat16))


def test_scales_that_are_summed_over_do_not_multiply_the_result():
    """As where a projection of latent attention is absorbed: its outputs are summed over."""
    w = jax.eval_shape(lambda: values("int8", None)[1])
    x = jax.ShapeDtypeStruct((5, 4, 3), jnp.bfloat16)
    assert ops.explain_quantized_einsum("...NH,NHD->...D", x, w, device=("gpu", "H100")).chosen == "dequantized"


def test_accelerators_read_few_bits_and_scale_the_result():
    w = jax.eval_shape(lambda: values("int8", None)[1])
    mesh = AbstractMesh(
        (1,), ("data",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice("TPU v6e", None, "tpu")
    )
    with jax.sharding.use_abstract_mesh(mesh):
        run = jax.jit(functools.partial(ops.quantized_einsum, "...D,NHD->...NH"))
        text = run.trace(jax.ShapeDtypeStruct((5, 32), jnp.bfloat16), w).lower(lowering_platforms=("tpu",)).as_text()
    assert text.index("dot_general") < text.index("stablehlo.multiply") and text.count("dot_general") == 1


TPU_PROGRAM = """
import functools, json
import jax, jax.numpy as jnp
from jax.experimental import topologies
from maxlib import nn, ops
from maxlib.ops._quantized_einsum import QUANTIZED_EINSUM

device = topologies.get_topology_desc("v5e:2x2", "tpu").devices[0]
place = jax.sharding.SingleDeviceSharding(device)

def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

def weight(qtype, group, dtype):
    w = lambda: nn.quantized.QuantizedWeight(
        jnp.zeros((2048, 4096)), qtype=qtype, outputs=(0,), group=group, axes=("mlp", "embed")
    ).widened(dtype)
    return jax.tree.map(lambda a: array(a.shape, a.dtype), jax.eval_shape(w))

def cost(f, w):
    program = jax.jit(f).lower(array((8, 4096), jnp.bfloat16), w).compile()
    return program.cost_analysis()["bytes accessed"], program.memory_analysis().temp_size_in_bytes

costs = {"bfloat16": cost(functools.partial(jnp.einsum, "...D,FD->...F"), array((2048, 4096), jnp.bfloat16))}
for qtype, group, dtype in (("int8", None, "int8"), ("int4", 32, "int4"), ("nf4", 64, "uint4")):
    w, x = weight(qtype, group, dtype), array((8, 4096), jnp.bfloat16)
    chosen = ops.explain_quantized_einsum("...D,FD->...F", x, w, device=("tpu", "v5e")).chosen
    run = QUANTIZED_EINSUM[chosen].run
    costs[qtype] = cost(lambda x, w: run("...D,FD->...F", x, w, None, jnp.einsum), w)
print(json.dumps(costs))
"""


@pytest.mark.full
def test_tpus_read_few_bits_and_write_no_matrix():
    pytest.importorskip("libtpu")
    env = os.environ | WITHOUT_TPU | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", TPU_PROGRAM], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    costs = json.loads(done.stdout.splitlines()[-1])
    wide, _ = costs.pop("bfloat16")
    bounds = {"int8": 0.6, "int4": 0.75, "nf4": 1.0}  # of bfloat16; a lookup in nf4's table takes 190 times as many
    for name, (bytes_accessed, temporary) in costs.items():
        assert bytes_accessed < bounds[name] * wide and temporary < 2048 * 4096 * 2, name


@pytest.mark.parametrize(("dtype", "ring"), [(jnp.int8, 6), (jnp.float8_e4m3fn, None)], ids=["int8", "fp8"])
def test_cache_gives_back_nearly_what_it_was_given(ring, dtype):
    make = lambda dtype: nn.cache.kv_cache(2, 16, num_kv_heads=2, k_dim=8, v_dim=4, ring=ring, dtype=dtype)
    k, v = jax.random.normal(jax.random.key(0), (2, 5, 2, 8)), jax.random.normal(jax.random.key(1), (2, 5, 2, 4))
    ctx = nn.make_context(2, 5, cache=nn.cache.Cache(None, jnp.zeros(2, jnp.int32)))
    bounds = jnp.zeros((2, 5), jnp.int32), jnp.ones((2, 5), jnp.int32)
    extend = jax.jit(lambda cache: cache.extend(k, v, ctx, *bounds))
    (low, *got), (_, *want) = extend(make(dtype)), extend(make(jnp.float32))
    assert isinstance(low, nn.cache.QuantizedCache) and low.values.k.dtype == dtype
    for a, b in zip(got, want, strict=True):
        assert jnp.linalg.norm((a - b).astype(jnp.float32)) <= 0.04 * jnp.linalg.norm(b.astype(jnp.float32))


def test_caches_that_cannot_be_quantized():
    with pytest.raises(ValueError, match="floating or int8, got int16"):
        nn.cache.kv_cache(1, 8, num_kv_heads=1, k_dim=4, v_dim=4, ring=None, dtype=jnp.int16)


def test_saves_and_loads(tmp_path):
    low = stored("llama", (quant.Rule(None, layers=(0,)), quant.Rule(quant.Format("int4", group=16))))
    quant.save(low, tmp_path / "model")
    again = quant.load(tmp_path / "model")
    assert jax.tree.structure(again) == jax.tree.structure(low)
    assert all(
        a.dtype == b.dtype and np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(low), jax.tree.leaves(again), strict=True)
    )
    quant.save(low, tmp_path / "model", overwrite=True)
    (tmp_path / "model" / "quantization.json").unlink()
    with pytest.raises(FileNotFoundError, match="must describe the stored weights"):
        quant.load(tmp_path / "model")


def test_adapters_are_not_written_where_they_cannot_be_read(tmp_path):
    low = jax.eval_shape(lambda m: quant.for_inference(m, "int8"), model("llama"))
    tuned = adapters.add(low, adapters.LoRA(2, alpha=4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="has an adapter, which `load` does not read"):
        quant.save(tuned, tmp_path / "low")
    assert not list(tmp_path.iterdir())


def test_restored_weights_are_parameters_again():
    back = jax.eval_shape(quant.full_precision, stored("moe", "int8"))
    assert jax.tree.structure(back) == jax.tree.structure(model("moe"))
    assert nn.partition(back)[0].keys() == nn.partition(model("moe"))[0].keys()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (quant.Format("int4", group=24), "must be a multiple of the group"),
        ([quant.Rule(quant.INFERENCE["fp8_w8a8"], kinds=("embedding",))], "only weights can be quantized"),
        ([quant.Rule(quant.INFERENCE["int8"], "layers.nothing")], "match no matmul"),
    ],
)
def test_rules_that_do_not_fit(rules, message):
    with pytest.raises(ValueError, match=message):
        quant.for_inference(shapes("llama"), rules)


def test_a_named_format_leaves_what_its_groups_do_not_divide():
    """Heads of 72 in an image encoder, say: of this model, heads of 16 before the output projection."""
    full = jax.eval_shape(lambda: llama(num_layers=2, dim=64, mlp_dim=128, head_dim=16))
    with pytest.warns(UserWarning, match=r"not a multiple of the group of nf4 in groups of 64: \['layers.attn.o'\]"):
        low = jax.eval_shape(lambda m: quant.for_inference(m, "nf4"), full)
    formats = {row.path.rpartition(".")[2]: row.format for row in quant.report(low).rows if row.kind == "dense"}
    assert formats == dict.fromkeys(("q", "k", "v", "gate", "up", "down"), "nf4 in groups of 64") | {"o": None}
    with pytest.raises(ValueError, match="got nf4 in groups of 64, which fits none of"):
        jax.eval_shape(lambda m: quant.for_inference(m, "nf4"), shapes("moe"))


def test_quantizing_twice_is_refused():
    low = jax.eval_shape(lambda m: quant.for_inference(m, "int8"), model("moe"))
    with pytest.raises(ValueError, match="already quantized"):
        quant.for_inference(low, "int8")
