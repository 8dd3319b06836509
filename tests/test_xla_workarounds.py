"""Each workaround is still needed: without it, the compiled program shows the problem.

If a test fails, the installed jax no longer needs the workaround: delete it, with its test.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from maxlib import _xla_workarounds as workarounds
from maxlib.distributed.xla_flags import WITHOUT_TPU

ROOT = Path(__file__).parents[1]
# XLA for CPUs is slow at some sums in jax 0.10 and no longer in 0.12. These workarounds can go with Python 3.11, which
# has no newer jax.
slow_sums = pytest.mark.skipif(
    jax.default_backend() != "cpu" or jax.__version_info__ >= (0, 12),
    reason="only XLA for CPUs before jax 0.12 needs it",
)


@pytest.mark.parametrize("kept", [True, False])
def test_a_loop_that_runs_once_is_unrolled(kept):
    def update(x):
        times, x = workarounds.run_once_later(x) if kept else (jnp.int32(1), x)
        return lax.fori_loop(0, times, lambda _, x: 2 * jnp.sin(x), x)

    x = jnp.ones(4)
    compiled = jax.jit(update).lower(x).compile()
    assert ("while(" in compiled.as_text()) == kept
    assert jnp.array_equal(compiled(x), jax.jit(lambda x: 2 * jnp.sin(x))(x))


TPU_PROGRAM = """
import functools, json
import jax, jax.numpy as jnp
from jax.experimental import topologies
from maxlib._xla_workarounds import gradient_as_stored, keep_float32
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
here = jax.sharding.SingleDeviceSharding(devices[0])
array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype, sharding=here)

def memory(run, *args, **options):
    lowered = jax.jit(run, **options).trace(*args).lower(lowering_platforms=("tpu",))
    return lowered.compile().memory_analysis().temp_size_in_bytes

def layers(keep, x, stack):
    def layer(x, w):
        w = keep(w).astype(x.dtype)
        return jnp.tanh(x @ w) @ w.T, None
    return jax.lax.scan(layer, x, stack)[0]

def update(keep, table, moments, ids):
    gradient = jax.grad(lambda table: jnp.square(jnp.take(keep(table), ids, axis=0)).sum())(table)
    gradient = gradient / jnp.sqrt(jnp.square(gradient).sum())
    first, second = 0.9 * moments[0] + gradient, 0.9 * moments[1] + jnp.square(gradient)
    return table - first / jnp.sqrt(second), (first, second)

found = {"layers": [], "update": []}
for keep in (keep_float32, lambda w: w):
    args = array(2048, 4096, dtype=jnp.bfloat16), array(8, 4096, 4096)
    found["layers"].append(memory(functools.partial(layers, keep), *args))
with jax.set_mesh(jax.make_mesh((1,), ("x",), devices=devices[:1])):
    here = jax.NamedSharding(jax.make_mesh((1,), ("x",), devices=devices[:1]), jax.P())
    for keep in (lambda table: gradient_as_stored(table, (1, 1)), lambda table: table):
        table = array(65536, 2240)
        args = table, (table, table), array(4096, dtype=jnp.int32)
        found["update"].append(memory(functools.partial(update, keep), *args, donate_argnums=(0, 1)))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def on_tpu():
    """The memory of `TPU_PROGRAM`, with and without the workarounds."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, which compiles for TPUs, is not installed")
    env = os.environ | WITHOUT_TPU | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}  # for TPUs
    done = subprocess.run([sys.executable, "-c", TPU_PROGRAM], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_stack_of_layers_is_cast_before_the_loop(on_tpu):
    stack_bytes = 8 * 4096 * 4096 * 2  # the stack in bfloat16
    kept, plain = on_tpu["layers"]
    assert kept < stack_bytes <= plain


def test_a_table_and_moments_are_copied_for_the_update(on_tpu):
    table_bytes = 65536 * 2240 * 4
    kept, plain = on_tpu["update"]
    assert (
        kept < 2.5 * table_bytes and plain > 4 * table_bytes
    )  # the gradient in two orders; or in one, and three copies


@pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="XLA for GPUs does it, in a sharded stack on several of them"
)
def test_layers_are_transposed_before_the_loop():
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    place = jax.NamedSharding(mesh, P(None, None, "x"))
    stack = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float32, sharding=place)
    x = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16, sharding=jax.NamedSharding(mesh, P()))

    def layers(keep, x, stack):
        return lax.scan(lambda x, w: (x @ keep(w).astype(x.dtype), None), x, stack)[0]

    transposed = jax.shard_map(workarounds.row_major, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x"))
    temp = [
        jax.jit(lambda x, w, keep=keep: layers(keep, x, w))
        .lower(x, stack)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for keep in (transposed, lambda w: w)
    ]
    assert temp[0] < temp[1]


def summed_axes(run, *args) -> str:
    """Returns the axes over which a compiled program sums, as its text writes them."""
    return re.search(r" reduce\(.*dimensions=({[^}]*})", jax.jit(run).lower(*args).compile().as_text())[1]


# Sums that leave an axis of one are the slow ones: 6 and 8 times as long in jax 0.10.2.
@slow_sums
def test_the_gradient_of_a_weight_is_one_sum():
    def axes(place) -> str:
        loss = lambda w, x: jnp.sum(jnp.sin(place(w, x.shape) * x))
        return summed_axes(jax.grad(loss), jnp.ones(512), jnp.ones((1, 1024, 512)))

    assert axes(workarounds.for_each_token) == "{0,1}"
    assert axes(lambda w, shape: w[None, None]) == "{1}"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA for CPUs is slow at it")
def test_the_slice_of_a_layer_is_moved_into_the_loops_that_read_it():
    def program(taps):
        def layer(x, weight):
            first, second = taps(weight)
            return jax.nn.silu(jnp.broadcast_to(first, x.shape) * x + jnp.broadcast_to(second, x.shape)), None

        run = jax.jit(lambda x, stack: lax.scan(layer, x, stack)[0])
        return run.lower(jnp.ones((64, 128)), jnp.ones((3, 128, 2))).compile().as_text()

    # Of each fused loop its text, if it computes an exponential.
    loops = lambda text: [
        part for part in text.split("\n}\n") if "%fused_computation" in part and "exponential(" in part
    ]
    slices = lambda taps: any("dynamic-slice(" in loop for loop in loops(program(taps)))
    assert not slices(workarounds.last_axis_first)
    assert slices(lambda weight: jnp.moveaxis(weight, -1, 0))


@slow_sums
def test_a_sum_of_products_is_a_matmul():
    x = jnp.ones((1, 512, 4, 256))
    assert summed_axes(workarounds.inner, x, x) == "{0,3}"
    assert summed_axes(lambda a, b: jnp.sum(a * b, axis=-1), x, x) == "{3}"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA for CPUs is slow at it")
def test_few_rows_are_the_second_operand_of_a_product():
    def transposed(rows, weight):
        return jnp.einsum("OI,MI->OM", weight, rows).T

    x = jax.random.normal(jax.random.key(0), (16 + 1024, 64))
    rows, weight = x[:16], x[16:]
    texts = [jax.jit(f).lower(rows, weight).compile().as_text() for f in (workarounds.multiply_few, transposed)]
    assert ["f32[1024,16]{1,0} dot(" in text for text in texts] == [True, False]  # XLA exchanges the operands again
    assert jnp.allclose(workarounds.multiply_few(rows, weight), rows @ weight.T, atol=1e-4)


def test_the_gradient_of_a_scaled_vector():
    a, factor = jnp.arange(6.0).reshape(2, 3), jnp.array([2.0, -1.0])
    out, backward = jax.vjp(workarounds.scaled, a, factor)
    assert jnp.array_equal(out, a * factor[:, None])
    assert jnp.array_equal(backward(a + 1)[1], jnp.sum(a * (a + 1), axis=1))


def test_a_stored_vector_is_computed_once():
    def update(keep):  # of a state, by a vector that takes two products to compute
        return lambda state, a, b: state + keep(a * b * a)[:, None] * b[None, :]

    x = jnp.arange(64.0)
    text = jax.jit(update(workarounds.stored)).lower(jnp.ones((64, 64)), x, x).compile().as_text()
    assert _products_of_state(text) == 1
    text = jax.jit(update(lambda a: a)).lower(jnp.ones((64, 64)), x, x).compile().as_text()
    assert _products_of_state(text) == 3


def _products_of_state(text: str) -> int:
    """Counts the products in the loop over the numbers of a state."""
    loops = [part for part in text.split("\n}\n") if "%fused_computation" in part and "ROOT %add" in part]
    return sum(part.count(" multiply(") for part in loops)


def test_stored_vectors_are_unchanged():
    a = jnp.array([[1.5, -2.0, 3e38], [1e-38, 0.0, 7.0]])
    assert jnp.array_equal(workarounds.stored(a), a)
