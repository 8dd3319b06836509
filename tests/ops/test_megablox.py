"""JAX's grouped matmul kernels for TPUs: run by Pallas's interpreter and lowered for TPUs, both without one."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox import ops as _  # noqa: F401  loads the kernels
from jax.sharding import PartitionSpec as P

from maxlib import ops, sharding
from maxlib.kernels.grouped_matmul.megablox_tiles import Sizes, choose_tiles
from maxlib.kernels.vector_memory import asking, vmem_of
from maxlib.ops._grouped_matmul import api
from maxlib.ops._grouped_matmul import megablox as module
from maxlib.ops._grouped_matmul.megablox import megablox, megablox_outer
from tests.ops.test_grouped_matmul import COUNTS, arrays, close, loop

KERNELS = sys.modules["jax.experimental.pallas.ops.tpu.megablox.gmm"]


@pytest.fixture
def interpreted(monkeypatch):
    for name in ("gmm", "tgmm"):
        monkeypatch.setattr(KERNELS, name, functools.partial(getattr(KERNELS, name), interpret=True))


@functools.partial(jax.jit, static_argnames=("weight_order", "tiles"))
def value_and_gradients(rows, weights, counts, d_out, weight_order="EOI", tiles=None):
    run = lambda rows, weights: megablox(rows, weights, counts, weight_order, tiles=tiles)
    out, pull = jax.vjp(run, rows, weights)
    return out, *pull(d_out)


@pytest.mark.parametrize("weight_order", ["EOI", pytest.param("EIO", marks=pytest.mark.full)])
def test_equals_a_loop_over_experts(weight_order, interpreted):
    """Experts without rows, rows without an expert, rows and widths that fill no tile."""
    rows, weights, d_out = arrays(700, 160, 136, 3)
    turn = (lambda w: w) if weight_order == "EOI" else (lambda w: w.swapaxes(1, 2))
    for counts in COUNTS.values():
        got = value_and_gradients(rows, turn(weights), jnp.array(counts), d_out, weight_order)
        out, d_rows, d_weights = loop(rows, weights, counts, d_out)
        close(got, (out, d_rows, turn(d_weights)))


@pytest.mark.parametrize(
    "kinds",
    [
        ("float8_e5m2", "float8_e4m3fn"),
        *(pytest.param((kind, kind), marks=pytest.mark.full) for kind in ("int8", "float32")),
    ],
)
def test_the_transpose_of_narrow_operands(kinds, interpreted):
    """Summed as they are: of small integers, and of float8 that hold them, exactly."""
    rng, counts = np.random.default_rng(0), jnp.array([20, 0, 13])
    d_out, rows = (jnp.asarray(rng.integers(-4, 5, shape)) for shape in ((40, 7), (40, 5)))
    got = megablox_outer(*(x.astype(kind) for x, kind in zip((d_out, rows), kinds, strict=True)), counts)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, loop(rows, np.zeros((3, 7, 5)), counts, d_out)[2])


def test_rows_beyond_the_experts_do_not_matter(interpreted, monkeypatch):
    """Gate and up joined, with rows and gradients that are undefined: the others are those of the loop."""
    monkeypatch.setattr(api, "current_device", lambda: ("tpu", "TPU v5p"))
    rows, gate, d_out = arrays(512, 24, 16, 3)
    up, counts, used = gate[::-1], jnp.array([90, 0, 200]), 290
    assert len(rows) >= 4 * 3 * 16  # then they are joined

    def run(implementation, rows, gate, up, d_out):
        call = functools.partial(ops.grouped_glu, rows_per_expert=counts, implementation=implementation)
        return call(rows, gate, up), jax.vjp(functools.partial(call, zero_rest=False), rows, gate, up)[1](d_out)

    unknown = [x.at[used:].set(jnp.nan) for x in (rows, d_out)]
    out, (d_rows, *d_weights) = jax.jit(functools.partial(run, None))(unknown[0], gate, up, unknown[1])
    want_out, (want_rows, *want_weights) = jax.jit(functools.partial(run, "tiled"))(
        rows, gate, up, d_out.at[used:].set(0)
    )
    close((out[:used], d_rows[:used], *d_weights), (want_out[:used], want_rows[:used], *want_weights))
    assert not out[used:].any()
    multiply = lambda rows, w: ops.grouped_matmul(rows, w, counts, zero_rest=False)
    want_rows, want_weights = loop(rows, gate, counts, d_out)[1:]
    d_rows, d_weights = jax.jit(lambda rows, w, d: jax.vjp(multiply, rows, w)[1](d))(unknown[0], gate, unknown[1])
    close((d_rows[:used], d_weights), (want_rows[:used], want_weights))


@pytest.mark.full
def test_stages_of_a_pipeline(interpreted):
    """Under `jax.vmap` each runs by itself, with its own gradient."""
    rows, weights = (jnp.stack([a, 2 * a]) for a in arrays(24, 6, 6, 3)[:2])
    counts = jnp.array([[5, 0, 19], [8, 8, 2]])
    gradient = jax.grad(lambda *args: jnp.sum(jnp.sin(megablox(*args))), (0, 1))
    got, alone = jax.jit(jax.vmap(gradient))(rows, weights, counts), jax.jit(gradient)
    each = [alone(rows[i], weights[i], counts[i]) for i in range(2)]
    want = jax.tree.map(lambda *a: np.stack(a), *each)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, want)


@pytest.mark.full
def test_shards_of_experts(interpreted):
    rows, weights, d_out = arrays(8 * 12, 5, 7, 3)
    counts = np.random.default_rng(0).multinomial(11, np.ones(3) / 3, size=8)
    mesh, split = sharding.make_mesh(data=8), P("data")

    def loss(rows, weights):
        local = lambda rows, w, counts: megablox(rows, w, counts[0])
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(split, P(), split), out_specs=split, check_vma=False)
        return jnp.sum(mapped(rows, weights, jnp.array(counts)) * d_out)

    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(rows, weights)
    parts = [loop(rows[12 * i :][:12], weights, counts[i], d_out[12 * i :][:12]) for i in range(8)]
    close(got, (np.concatenate([p[1] for p in parts]), sum(p[2] for p in parts)))


@pytest.mark.parametrize("weight_order", ["EOI", "EIO"])
def test_tpus_get_kernels_in_both_passes(weight_order, monkeypatch):
    """Never XLA's transposed ragged dot, which some of its versions compute with every row and every expert."""
    monkeypatch.setattr(api, "current_device", lambda: ("tpu", "TPU v5p"))
    rows, weights, d_out = arrays(512, 256, 256, 4, jnp.bfloat16)

    def run(rows, weights, counts, d_out):
        call = lambda rows, weights: ops.grouped_matmul(rows, weights, counts, weight_order=weight_order)
        return jax.vjp(call, rows, weights)[1](d_out)

    text = jax.jit(run).trace(rows, weights, jnp.full(4, 100), d_out).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= 2 and "ragged_dot" not in text


PUBLISHED = {  # rows of a device, the width of the model, that of an expert, experts
    "Qwen3-30B-A3B": (32768, 2048, 768, 128),
    "Mixtral-8x7B": (8192, 4096, 14336, 8),
    "GPT-OSS-20B": (16384, 2880, 2880, 32),
    "DeepSeek-V3, 8 shards": (65536, 7168, 2048, 32),
    "DeepSeek-V2-Lite, one token": (6, 2048, 1408, 64),
}


@pytest.mark.parametrize("sizes", PUBLISHED.values(), ids=PUBLISHED)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("chip", ["TPU v5p", "TPU v6 lite"])
def test_tiles_fit_and_waste_little(sizes, width, transposed, chip):
    M, I, O, E = sizes
    of = Sizes(M, I, O, E, width, width, transposed, vmem_of(chip))
    tiles = choose_tiles(of)
    assert (tiles.asked(of) or 0) <= vmem_of(chip)
    assert tiles.vmem(of) <= 15 * 2**20 or chip == "TPU v6 lite"
    assert all(tile % 128 == 0 or tile == full for tile, full in ((tiles.summed, I), (tiles.out, O)))
    assert tiles.rows % 16 == 0
    computed = -(-I // tiles.summed) * tiles.summed * -(-O // tiles.out) * tiles.out
    assert computed <= 1.2 * I * O
    assert tiles.visits(of) * tiles.rows <= 1.5 * M or tiles.rows <= 128


def lowered(chip, sizes, monkeypatch):
    """Both passes as text, for a TPU that is not here."""
    monkeypatch.setattr(module, "current_device", lambda: ("tpu", chip))
    M, I, O, E = sizes
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    run = lambda rows, weights, counts, d_out: jax.vjp(lambda *x: megablox(*x, counts), rows, weights)[1](d_out)
    inputs = array(M, I), array(E, O, I), jax.ShapeDtypeStruct((E,), jnp.int32), array(M, O)
    return jax.jit(run).trace(*inputs).lower(lowering_platforms=("tpu",)).as_text()


def test_kernels_ask_for_vector_memory_where_they_need_to(monkeypatch):
    """On the chip that has it; without asking, the compiler refuses larger tiles there."""
    text, other = (lowered(chip, (4096, 2880, 2880, 2), monkeypatch) for chip in ("TPU v6 lite", "TPU v5p"))
    asked = [int(size) for size in re.findall(r"scoped_memory_configs.*?size\\22: (\d+)", text)]
    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 2880), (2, 2880, 2880)))
    of = module.matmuls(*shapes, "EOI", "TPU v6e")
    tiles = of.tiles()
    assert sorted(asked) == sorted([tiles.d_rows.asked(of.d_rows), tiles.d_weights.asked(of.d_weights)])
    assert all(16 * 2**20 < size <= vmem_of("TPU v6e") for size in asked)
    assert "tpu_custom_call" in other and "scoped_memory_configs" not in other


@pytest.mark.full
def test_larger_tiles_equal_a_loop_over_experts(interpreted, monkeypatch):
    """Of v6e, whose kernels are traced first to ask for memory."""
    monkeypatch.setattr(module, "current_device", lambda: ("tpu", "TPU v6 lite"))
    rows, weights, d_out = arrays(130, 1536, 1408, 2)
    of = module.matmuls(rows, weights, "EOI", "TPU v6 lite")
    assert of.tiles().forward.vmem(of.forward) > 16 * 2**20
    counts = [90, 0]
    got = value_and_gradients(rows, weights, jnp.array(counts), d_out)
    close(got, loop(rows, weights, counts, d_out))


def test_asking_reaches_kernels_in_jitted_functions():
    shapes = {(128, 128): jnp.bfloat16, (1, 128, 128): jnp.bfloat16, (1,): jnp.int32}
    inputs = [jax.ShapeDtypeStruct(*shape_and_dtype) for shape_and_dtype in shapes.items()]
    kernel = lambda *inputs: KERNELS.gmm(*inputs)  # a jitted function
    assert str(jax.make_jaxpr(asking(kernel, 12345))(*inputs)).count("vmem_limit_bytes=12345") == 1
    assert "vmem_limit_bytes=12345" not in str(jax.make_jaxpr(kernel)(*inputs))
