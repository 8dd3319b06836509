"""Grouped matmul: every implementation against a float64 loop, and the tiled one under JAX's transformations."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxlib import ops, sharding
from maxlib.ops._grouped_matmul import api
from maxlib.ops._grouped_matmul.tiled import _for_each_expert, _for_each_tile, tiled_tiles
from maxlib.ops._grouped_matmul.xla import ragged_dot

IMPLEMENTATIONS = ["tiled", "ragged_dot", "reference"]
TILED_FIRST = ["tiled", *(pytest.param(name, marks=pytest.mark.full) for name in IMPLEMENTATIONS[1:])]
COUNTS = {
    "uneven": [101, 0, 599],
    "rows left over": [1, 257, 130],
    "one expert": [0, 700, 0],
    "last expert": [0, 0, 31],
    "nothing": [0, 0, 0],
    "tile borders": [256, 32, 288],
}


def arrays(M, I, O, E, dtype=np.float32):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(dtype))
    return draw(M, I), draw(E, O, I), draw(M, O)


def loop(rows, weights, counts, d_out):
    """Value, gradient of rows and gradient of weights, in float64."""
    rows, weights, d_out = (np.asarray(x, np.float64) for x in (rows, weights, d_out))
    out, d_rows, d_weights = np.zeros_like(d_out), np.zeros_like(rows), np.zeros_like(weights)
    start = 0
    for e, count in enumerate(counts):
        mine = slice(start, start + count)
        out[mine], d_rows[mine] = rows[mine] @ weights[e].T, d_out[mine] @ weights[e]
        d_weights[e] = d_out[mine].T @ rows[mine]
        start += count
    return out, d_rows, d_weights


@functools.partial(jax.jit, static_argnames=("implementation", "weight_order"))
def value_and_gradients(rows, weights, counts, d_out, implementation=None, weight_order="EOI"):
    # On a CPU XLA's own is refused, as it multiplies every row by every expert.
    options = {} if implementation == "ragged_dot" else {"implementation": implementation}
    run = ragged_dot if implementation == "ragged_dot" else ops.grouped_matmul
    f = lambda rows, weights: run(rows, weights, counts, weight_order=weight_order, **options)
    out, pull = jax.vjp(f, rows, weights)
    return out, *pull(d_out)


def close(got, want, tol=1e-5):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=tol * max(1, np.abs(b).max()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_a_loop_over_experts(implementation):
    rows, weights, d_out = arrays(700, 5, 7, 3)
    for counts in COUNTS.values():
        got = value_and_gradients(rows, weights, jnp.array(counts), d_out, implementation)
        close(got, loop(rows, weights, counts, d_out))


def test_the_transpose_of_narrow_operands():
    """Summed as they are: of small integers, and of float8 that hold them, exactly."""
    rng, counts = np.random.default_rng(0), jnp.array([20, 0, 13])
    d_out, rows = (jnp.asarray(rng.integers(-4, 5, shape)) for shape in ((40, 7), (40, 5)))
    want = loop(rows, np.zeros((3, 7, 5)), counts, d_out)[2]
    for d_type, type in (("int8", "int8"), ("float8_e5m2", "float8_e4m3fn"), ("float32", "float32")):
        got = ops.grouped_outer(d_out.astype(d_type), rows.astype(type), counts)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", TILED_FIRST)
def test_matrices_may_lie_the_other_way(implementation):
    rows, weights, d_out = arrays(700, 5, 7, 3)
    counts = COUNTS["rows left over"]
    got = value_and_gradients(rows, weights.swapaxes(1, 2), jnp.array(counts), d_out, implementation, "EIO")
    out, d_rows, d_weights = loop(rows, weights, counts, d_out)
    close(got, (out, d_rows, d_weights.swapaxes(1, 2)))


def test_no_rows():
    assert ops.grouped_matmul(jnp.ones((0, 4)), jnp.ones((2, 3, 4)), jnp.zeros(2, int)).shape == (0, 3)


@pytest.mark.parametrize("implementation", TILED_FIRST)
def test_bfloat16_accumulates_in_float32(implementation):
    rows, weights, d_out = arrays(600, 256, 5, 2, jnp.bfloat16)
    counts = [590, 10]
    got = value_and_gradients(rows, weights.astype(jnp.float32), jnp.array(counts), d_out, implementation)
    assert [x.dtype for x in got] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    want = loop(rows, weights, counts, d_out)
    close(got[:2], want[:2], tol=2**-8)  # one rounding at the end
    if implementation == "tiled":
        close(got[2:], want[2:])  # and none at all


@pytest.mark.parametrize("counts", [[256] * 16, [4000, *[6] * 15], [1] * 16])
def test_cost_follows_the_rows(counts):
    sizes = tiled_tiles(4096, 16).sizes
    add = lambda tile, total: total + jnp.array([tile.size, 1])
    tiles_of = lambda expert, start, stop, total: _for_each_tile(add, start, stop, 4096, sizes, total)
    rows, tiles = jax.jit(lambda counts: _for_each_expert(tiles_of, counts, jnp.zeros(2, int)))(np.array(counts))
    assert rows <= sum(counts) * 1.1 + 32 * np.count_nonzero(counts)
    assert tiles <= sum(counts) / 256 + 4 * np.count_nonzero(counts)


def test_inside_scan_checkpoint_and_vmap():
    rows, weights, _ = arrays(24, 6, 6, 3)
    counts = jnp.array([[5, 0, 19], [8, 8, 2]])

    def run(implementation, weights, counts):
        layer = jax.checkpoint(
            lambda x, w: (jnp.tanh(ops.grouped_matmul(x, w, counts, implementation=implementation)), None)
        )
        return jnp.sum(jax.lax.scan(layer, rows, weights)[0] ** 2)

    both = lambda name: jax.jit(jax.vmap(jax.value_and_grad(functools.partial(run, name)), in_axes=(None, 0)))
    stacked = jnp.stack([weights, weights * 0.5])
    got, want = both("tiled")(stacked, counts), both("reference")(stacked, counts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, want)


def test_tpus_get_no_ragged_dot_with_a_batch():
    """Their compiler refuses it; a pipeline's stages are one. Gradients are those of each by itself."""
    rows, weights = (jnp.stack([a, 2 * a]) for a in arrays(24, 6, 6, 3)[:2])
    counts = jnp.array([[5, 0, 19], [8, 8, 2]])
    loss = lambda *args: jnp.sum(jnp.sin(ragged_dot(*args)))
    inside, outside = jax.vmap(jax.grad(loss, (0, 1))), jax.grad(lambda *args: jax.vmap(loss)(*args).sum(), (0, 1))
    alone = jax.jit(jax.grad(loss, (0, 1)))
    want = jax.tree.map(lambda *a: np.stack(a), *[alone(rows[i], weights[i], counts[i]) for i in range(2)])
    for both in (inside, outside):
        got = jax.jit(both)(rows, weights, counts)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, want)
        text = jax.jit(both).trace(rows, weights, counts).lower(lowering_platforms=("tpu",)).as_text()
        batched = [line for line in text.splitlines() if "ragged_dot" in line and "tensor<24x6xf32>" in line]
        assert len(batched) >= 6 and not any("tensor<2x24x6xf32>" in line for line in batched)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.full)])
def test_inside_shard_map(check_vma):
    rows, weights, d_out = arrays(8 * 12, 5, 7, 3)
    counts = np.random.default_rng(0).multinomial(11, np.ones(3) / 3, size=8)
    mesh = sharding.make_mesh(data=8)
    split = P("data")

    def loss(rows, weights):
        local = lambda rows, w, counts: ops.grouped_matmul(rows, w, counts[0])
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(split, P(), split), out_specs=split, check_vma=check_vma)
        return jnp.sum(mapped(rows, weights, jnp.array(counts)) * d_out)

    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(rows, weights)
    parts = [loop(rows[12 * i :][:12], weights, counts[i], d_out[12 * i :][:12]) for i in range(8)]
    close(got, (np.concatenate([p[1] for p in parts]), sum(p[2] for p in parts)))


def test_tpus_get_a_ragged_dot_for_narrow_operands(monkeypatch):
    monkeypatch.setattr(api, "current_device", lambda: ("tpu", "TPU v5p"))
    rows, weights, _ = arrays(16, 8, 8, 2, np.int8)
    run = lambda *args: ops.grouped_matmul(*args, out_dtype=jnp.float32)
    exported = jax.export.export(jax.jit(run), platforms=["tpu"])(rows, weights, jnp.array([3, 4]))
    assert "ragged_dot" in exported.mlir_module()
    choice = ops.explain_grouped_matmul(rows, weights, out_dtype=jnp.float32, device=("tpu", "v5p"))
    assert choice.chosen == "ragged_dot" and "bfloat16 and float32" in choice.refused["megablox"]


def test_the_choice_is_explained_for_any_device():
    rows, weights = (
        jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 1024, 4096), jnp.bfloat16),
    )
    explain = functools.partial(ops.explain_grouped_matmul, rows, weights)
    for kind in ("TPU v4", "TPU v5 lite", "TPU v5p", "TPU v6 lite", "TPU7x"):
        assert explain(device=("tpu", kind)).chosen == "megablox"
    for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        assert explain(device=("gpu", kind)).chosen == "mosaic_gpu"
    for device in (("gpu", "NVIDIA B200"), ("gpu", "NVIDIA A100-SXM4-80GB"), ("gpu", "NVIDIA L40S"), ("cpu", "cpu")):
        assert explain(device=device).chosen == "tiled"
        assert "megablox: runs on tpu, not on" in str(explain(device=device))
    assert explain(device=("gpu", "NVIDIA B200"), implementation="mosaic_gpu").chosen is None


def test_a_kernel_of_another_machine_is_an_error():
    rows, weights, d_out = arrays(8, 64, 64, 2)
    counts = jnp.array([4, 4])
    with pytest.raises(
        ValueError,
        match="grouped_matmul: megablox was requested, but it runs on tpu, not on cpu.*Pass implementation=None",
    ):
        ops.grouped_matmul(rows, weights, counts, implementation="megablox")
    with pytest.raises(ValueError, match="grouped_outer: megablox was requested, but it runs on tpu, not on cpu"):
        ops.grouped_outer(d_out, rows, counts, implementation="megablox")


def test_clear_errors():
    unchecked = inspect.unwrap(ops.grouped_matmul)  # the shape checker of the tests would be first
    rows, weights, _ = arrays(4, 5, 7, 3)
    counts = jnp.array([1, 2, 1])
    with pytest.raises(ValueError, match="one of .*reference.*got 'fast'"):
        unchecked(rows, weights, counts, implementation="fast")
    with pytest.raises(ValueError, match="weights must have the axes E O I with I=4"):
        unchecked(rows[:, :4], weights, counts)
    with pytest.raises(ValueError, match="rows_per_expert must have the axes E with E=3"):
        unchecked(rows, weights, counts[:2])
