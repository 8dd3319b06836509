"""The TPU kernels of the gated delta rule: interpreted and lowered without a TPU, and run where there is one."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from maxlib import ops, sharding
from maxlib.kernels.gated_delta import api as kernel
from maxlib.observability import forward_flops
from maxlib.ops._gated_delta import api
from tests.ops.recurrences import SLOW, close

V5P = ("tpu", "TPU v5p")
on_a_tpu = jax.default_backend() == "tpu"
no_tpu = pytest.mark.skipif(on_a_tpu, reason="is for machines without one")
DEFAULT = {"tokens": 330, "heads": (2, 4), "widths": (16, 12), "slow": SLOW}


@pytest.fixture
def interpreted(monkeypatch):
    """Runs the kernels here, by default in small chunks, so that a short text has several blocks of several chunks."""
    stack = contextlib.ExitStack()

    def install(tiles: kernel.DeltaTPUTiles = kernel.DeltaTPUTiles(32, 3)):
        monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
        monkeypatch.setattr(api, "current_device", lambda: V5P)
        stack.enter_context(ops.tile_sizes(tiles))
        api._gated_delta_rule.clear_cache()

    with stack:
        yield install
    api._gated_delta_rule.clear_cache()


def arrays(tokens, heads, widths, slow, dtype=jnp.float32) -> dict[str, jax.Array]:
    """Two rows. Steps are up to 2, where a state may turn over."""
    (K, N), (Hk, Hv), rng = heads, widths, np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=(2, tokens, *shape)).astype(np.float32)
    x = {name: jnp.asarray(normal(*of), dtype) for name, of in (("q", (K, Hk)), ("k", (K, Hk)), ("v", (N, Hv)))}
    x["log_decay"] = jnp.asarray(-slow * np.log1p(np.exp(normal(N))))
    x["beta"] = jnp.asarray(2 / (1 + np.exp(-normal(N))))
    return x | {"initial_state": jnp.asarray(rng.normal(size=(2, N, Hk, Hv)), jnp.float32)}


def masks(tokens: int) -> dict[str, jax.Array]:
    """Documents in a chunk, at its border, next to each other, over many chunks; padding inside and at the end."""
    starts, valid = np.zeros((2, tokens), bool), np.ones((2, tokens), bool)
    starts[0, [i for i in (3, 4, 64, 150) if i < tokens]] = True  # the second row begins with the initial state's text
    starts[1, 9 * tokens // 10] = True
    valid[0, tokens // 2 : tokens // 2 + 7] = valid[1, tokens - tokens // 20 :] = False
    return {"is_start": jnp.asarray(starts), "valid": jnp.asarray(valid)}


def results(x, implementation, **options):
    """Returns the output, the state, and the gradients of a loss of both."""

    def loss(x):
        out, state = ops.gated_delta_rule(**x, **options, implementation=implementation)
        weights = jnp.asarray(np.random.default_rng(3).integers(-8, 9, size=out.shape) / 8)  # exact in bfloat16
        return jnp.sum(out * weights) + jnp.sum(state**2), (out, state)

    gradients, (out, state) = jax.jit(jax.grad(loss, has_aux=True))(x)
    return {"out": out, "state": state, **gradients}


def truth(x, **options):
    """The definition, token by token, in float64."""
    with jax.enable_x64(True):
        return jax.device_get(results(jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), x), "sequential", **options))


def compare(atol, sizes=DEFAULT, *, dtype=jnp.float32, **options):
    x, options = arrays(**sizes, dtype=dtype), masks(sizes["tokens"]) | options
    want = truth(x, **options)
    got = jax.device_get(results(x, "mosaic_tpu", **options))
    for name in want:
        rounded = 2**-8 if got[name].dtype == jnp.bfloat16 else 0  # once, at the end
        given = np.asarray(got[name], np.float32)
        np.testing.assert_allclose(given, want[name], rtol=rounded, atol=atol * np.std(want[name]), err_msg=name)
    return got


@no_tpu
def test_values_and_gradients_are_those_of_the_definition(interpreted):
    interpreted()
    compare(5e-5)


@no_tpu
def test_narrow_inputs_are_summed_in_float32(interpreted):
    """What leaves in bfloat16 is rounded once; states and the gradients of rates are not."""
    interpreted(kernel.DeltaTPUTiles(16, 3))
    got = compare(5e-4, DEFAULT | {"tokens": 70}, dtype=jnp.bfloat16)
    assert [got[name].dtype for name in ("out", "q", "k", "v")] == [jnp.bfloat16] * 4
    assert {got[name].dtype for name in ("state", "log_decay", "beta", "initial_state")} == {np.dtype("float32")}


@no_tpu
@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 1100, "heads": (1, 1)},  # two blocks of five whole chunks
        {"tokens": 5, "widths": (64, 96)},
        {"heads": (2, 6), "widths": (128, 128)},
        {"slow": 3e-3},
        {"slow": 40.0},  # would overflow above the diagonal
    ],
    ids=str,
)
def test_every_shape_as_on_a_tpu(change, interpreted):
    interpreted(kernel.DeltaTPUTiles())
    compare(2e-4, DEFAULT | change)  # the gradient of a unit key cancels: `sequential` in float32 is off by as much


@no_tpu
@pytest.mark.full
def test_without_norm_state_and_masks(interpreted):
    interpreted()
    x = {name: a for name, a in arrays(**DEFAULT).items() if name != "initial_state"}
    x["beta"] = 0.05 * x["beta"]  # keys of length 4: a whole step would turn the state over again and again
    got, want = results(x, "mosaic_tpu", l2_norm=False, scale=0.3), truth(x, l2_norm=False, scale=0.3)
    for name in want:
        close(got[name], want[name], 1e-4)


@no_tpu
@pytest.mark.full
def test_devices_that_share_a_sequence_are_one(interpreted):
    interpreted(kernel.DeltaTPUTiles(16, 3))
    x, options = arrays(160, (1, 2), (8, 6), SLOW), masks(160)
    split, state = dict.fromkeys(x, P(None, "context")) | {"initial_state": P()}, P()
    rule = lambda name, x, masks, **more: ops.gated_delta_rule(**x, **masks, implementation=name, **more)
    ends = {"in_specs": (split, P(None, "context")), "out_specs": (P(None, "context"), state)}
    local = functools.partial(rule, "mosaic_tpu", axis_name="context")
    mapped = jax.shard_map(local, mesh=sharding.make_mesh(context=8), **ends, check_vma=False)

    def both(run):
        loss = lambda x: (lambda out, state: ((out**2).sum() + (state**2).sum(), (out, state)))(*run(x, options))
        return jax.jit(jax.grad(loss, has_aux=True))(x)

    got, want = both(mapped), both(functools.partial(rule, "sequential"))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close(ours, theirs, 5e-5)


# ------------------------------------------------------------------------------------------------ lowered, explained


def shapes(tokens=8192, heads=(16, 32), widths=(128, 128), dtype=jnp.bfloat16):
    (K, N), (Hk, Hv) = heads, widths
    x = {name: jax.ShapeDtypeStruct((1, tokens, K, Hk), dtype) for name in "qk"}
    x["v"] = jax.ShapeDtypeStruct((1, tokens, N, Hv), dtype)
    return x | {name: jax.ShapeDtypeStruct((1, tokens, N), jnp.float32) for name in ("log_decay", "beta")}


def test_both_passes_are_lowered_for_a_tpu(monkeypatch):
    """As one kernel each, around which nothing is multiplied."""
    monkeypatch.setattr(api, "current_device", lambda: V5P)
    x = shapes(tokens=3000)
    loss = lambda x: ops.gated_delta_rule(**x, implementation="mosaic_tpu")[0].astype(jnp.float32).sum()
    text = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 2 and "dot_general" not in text


@pytest.mark.parametrize("tokens", [8192, 1000])
def test_kernels_tell_the_compiler_what_they_compute(tokens):
    x, C = shapes(tokens), 128
    grouped = lambda a: jax.ShapeDtypeStruct((*a.shape[:2], 16, 2, *a.shape[3:]), a.dtype)
    given = [x["q"], x["k"], *(grouped(x[name]) for name in ("v", "log_decay", "beta"))]
    rest = jnp.zeros((1, tokens), bool), jax.ShapeDtypeStruct((1, 16, 2, 128, 128), jnp.float32)
    run = lambda *a: kernel.mosaic_tpu(*a[:5], rest[0], a[5], scale=1.0, l2_norm=True)[0].astype(jnp.float32).sum()
    chunks = 32 * -(-tokens // C)
    # The widths are 128 too, so every product is a cube. Forward: 4 doublings of the inverse, half of the rows in two
    # products each; scores of keys and queries; two reads of the state, its solution and update, the output;
    # twice the sums of decays.
    forward = chunks * 2 * C**3 * (4 + 2 + 5 + 2)
    assert forward_flops(run, *given, rest[1]) == forward
    # Backward: inverse and scores of keys, 3 for the state, 5 for the chunk but its results, 14 for gradients.
    backward = chunks * 2 * C**3 * (5 + 3 + 5 + 14 + 4)
    both = jax.grad(run, argnums=(0, 1, 2, 3, 4, 5))
    assert forward_flops(both, *given, rest[1]) == forward + backward


def test_blocks_fit_into_vector_memory():
    for groups, width, dtype in ((1, 128, "float32"), (2, 128, "bfloat16"), (16, 128, "float32"), (4, 256, "bfloat16")):
        assert kernel.refuses(groups, width, width, dtype) is None
        k = jax.ShapeDtypeStruct((1, 8192, 1, width), jnp.float32)
        v = jax.ShapeDtypeStruct((1, 8192, 1, groups, width), dtype)
        cut = kernel._Cut.of(k, v, kernel.DeltaTPUTiles())
        assert kernel._vmem(cut.chunks, cut.chunk, groups, width, width, v.dtype.itemsize) <= kernel.VMEM
        assert cut.count * cut.chunks * cut.chunk < 8192 + cut.count * cut.chunk


def explain(device=V5P, implementation="mosaic_tpu", axis_name=None, **sizes):
    x, options = shapes(**sizes), {"axis_name": axis_name, "implementation": implementation}
    return ops.explain_gated_delta_rule(x["q"], x["v"], **options, device=device)


def test_tpus_get_these_kernels_by_name():
    """Until a TPU has run them."""
    assert explain().chosen == "mosaic_tpu"
    assert explain(implementation=None).chosen == "chunked"
    assert explain(implementation=None, tokens=8).chosen == "sequential"
    assert explain(implementation=None).refused["mosaic_tpu"] == "runs only by name: it has not run on a TPU yet"
    assert "T=8192 K=16 N=32 Hk=128" in str(explain())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": ("cpu", "cpu")}, "runs on tpu, not on cpu"),
        ({"dtype": jnp.float16}, "takes values in bfloat16 or float32, not in float16"),
        (
            {"heads": (1, 64)},
            "needs 17 MiB of vector memory for 64 states of 128 x 128 and one chunk, of which there are 12",
        ),
        (
            {"widths": (512, 512), "dtype": jnp.float32, "axis_name": "context"},
            "for 2 states of 512 x 1024",
        ),
    ],
    ids=str,
)
def test_what_they_cannot_run_is_explained(change, reason):
    answer = explain(**change)
    assert answer.chosen is None and re.search(reason, answer.refused["mosaic_tpu"])


def test_what_they_cannot_run_is_an_error():
    x = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes(tokens=20, heads=(1, 1), widths=(8, 8)))
    if not on_a_tpu:
        with pytest.raises(ValueError, match="mosaic_tpu was requested, but it runs on tpu, not on cpu"):
            ops.gated_delta_rule(**x, implementation="mosaic_tpu")


# ------------------------------------------------------------------------------------------------ on a TPU


@pytest.mark.tpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [5, 330, 4096])
def test_on_a_tpu_the_kernels_equal_chunks(tokens, dtype):
    x, options = arrays(tokens, (2, 4), (128, 128), SLOW, dtype), masks(tokens)
    got = jax.device_get(results(x, "mosaic_tpu", **options))
    with jax.default_matmul_precision("float32"):
        want = jax.device_get(results(jax.tree.map(lambda a: a.astype(jnp.float32), x), "chunked", **options))
    for name in want:
        close(got[name].astype(np.float32), want[name], 3e-2 if got[name].dtype == jnp.bfloat16 else 1e-3)
