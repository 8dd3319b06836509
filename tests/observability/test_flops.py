"""FLOPs counted on traces against counts by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import adapters, nn, observability, ops, quantization, sharding, training
from maxlib.hardware import chip_of
from tests.outside import DIM, VOCAB, Outside
from tests.training import tiny

SHAPE = jax.ShapeDtypeStruct


def matmul_weights(model, but=("embed.w",)):
    """The numbers of weights that every token is multiplied with."""
    names = nn.tree.axes(model)
    sizes = {path: v.get_value().size for path, v in nn.variables(model).items()}
    return sum(size for path, size in sizes.items() if len(nn.tree.own_axes(names[path])) > 1 and path not in but)


def triangle(n, window=None):
    """Pairs of a causal mask over `n` tokens."""
    return sum(min(i + 1, window or n) for i in range(n))


@pytest.mark.parametrize("remat", [None, "full"])
def test_llama_is_six_n_t_and_attention(remat):
    B, T, L, N, H = 2, 24, 2, 2, 12
    model = jax.eval_shape(tiny.llama)
    batch = tiny.batch(B, T)
    loss = functools.partial(training.NextToken(), remat=remat)
    want = 6 * matmul_weights(model) * B * T + 6 * L * B * triangle(T) * N * (H + H)
    assert observability.training_flops(loss, model, batch) == want


FILTERS = {
    "all": nn.tree.is_trainable,
    "LoRA": adapters.trainable,
    "the last layers": training.trainable_only("layers.*"),
    "the head": training.trainable_only("head.w"),
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_backward_pass_is_counted_as_autodiff_makes_it(name):
    """Against the matmuls in the trace of the gradient: of what is trained, and of what lies behind it."""
    model = tiny.model()
    if name == "LoRA":
        model = adapters.add(model, adapters.LoRA(2, 4), rngs=nnx.Rngs(0))
    params, rest = nn.partition(model, FILTERS[name])
    tokens = jnp.asarray(tiny.batch()["tokens"])

    def loss(model, tokens, key):
        return jnp.sum(jnp.sin(model.logits(jnp.tanh(model(tokens).hidden))))

    def gradient(params):
        return jax.value_and_grad(lambda params: loss(nn.combine(params, rest), tokens, None))(params)

    trained = nn.combine(dict.fromkeys(params, True), jax.tree.map(lambda _: False, rest))
    got = observability.training_flops(loss, model, tokens, trained=trained)
    forward = observability.forward_flops(loss, model, tokens, None)
    assert got == observability.forward_flops(gradient, params)
    assert (got == observability.training_flops(loss, model, tokens)) == (name == "all")
    assert forward < got <= 3 * forward


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_matmuls_of_eight_bits_have_gradients_as_others(format):
    plain = tiny.model()
    batch, loss = tiny.batch(), training.NextToken()
    want = observability.training_flops(loss, plain, batch)
    assert observability.training_flops(loss, quantization.for_training(plain, format), batch) == want


def test_what_is_frozen_or_has_no_gradient_counts_once():
    x, w, v = (SHAPE(shape, jnp.float32) for shape in ((4, 8), (8, 8), (8, 8)))
    matmul = 2 * 4 * 8 * 8
    count = lambda loss, **trained: observability.training_flops(loss, {"w": w, "v": v}, x, trained=trained or None)
    two = lambda model, x, key: x @ model["w"] @ model["v"]
    assert count(two) == (2 + 3) * matmul
    assert count(two, w=True, v=False) == (2 + 2) * matmul
    assert count(two, w=False, v=True) == (1 + 2) * matmul
    assert count(lambda model, x, key: jax.lax.stop_gradient(x @ model["w"]) @ model["v"]) == (2 + 2) * matmul
    loop = lambda model, x, key: jax.lax.scan(lambda x, _: (x @ model["w"], None), x, length=5)[0]
    assert count(loop) == 15 * matmul and count(loop, w=False, v=True) == 5 * matmul
    either = lambda model, x, key: jax.lax.cond(x[0, 0] > 0, lambda: x @ model["w"], lambda: x) @ model["v"]
    assert count(either) == (2 + 3) * matmul


def test_packed_documents_and_padding_attend_less():
    B, T, L, N, H = 2, 24, 2, 2, 12
    model = jax.eval_shape(tiny.llama)
    segment_ids = np.tile(np.repeat([1, 2, 0], [10, 8, 6]), (B, 1))
    batch = tiny.batch(B, T) | {"segment_ids": segment_ids.astype(np.int32)}
    weights = 6 * matmul_weights(model) * B * T
    want = weights + 6 * L * B * (triangle(10) + triangle(8)) * N * (H + H)
    assert observability.training_flops(training.NextToken(), model, batch) == want
    unknown = {name: SHAPE(x.shape, x.dtype) for name, x in batch.items()}
    everything = weights + 6 * L * B * T * T * N * (H + H)
    assert observability.training_flops(training.NextToken(), model, unknown) == everything


def test_windows_in_a_period_of_a_model_from_outside():
    """Three layers see everything before them, two see four tokens; the head is tied."""
    B, T = 2, 12
    model = jax.eval_shape(lambda: Outside(rngs=nnx.Rngs(0)))
    weights = matmul_weights(model) + VOCAB * DIM
    pairs = 3 * triangle(T) + 2 * triangle(T, 4)
    want = 6 * weights * B * T + 6 * B * pairs * 2 * (8 + 8)
    assert observability.training_flops(training.NextToken(), model, tiny.batch(B, T, vocab=VOCAB)) == want


@pytest.mark.parametrize(
    ("mask", "implementation"),
    [(ops.Chunked(5) & ops.Causal(), "chunked"), (ops.Causal() | ops.Prefix(4), "reference"), (ops.Full(), "chunked")],
    ids=str,
)
def test_every_mask_and_implementation_counts_the_pairs_it_sees(mask, implementation):
    T = 12

    def attend(q, k):
        start, end = nn.make_context(2, T).key_intervals(mask)
        return ops.attention(q, k, k, k_start=start, k_end=end, implementation=implementation)

    pairs = {"Chunked": 2 * triangle(5) + triangle(2), "Prefix": triangle(T) + 6, "Full": T * T}
    want = next(n for name, n in pairs.items() if name in repr(mask))
    got = observability.forward_flops(attend, SHAPE((2, T, 4, 8), jnp.float32), SHAPE((2, T, 2, 8), jnp.float32))
    assert got == 2 * want * 4 * 2 * (8 + 8)


def test_what_contains_matmuls_is_looked_into():
    x, w = SHAPE((4, 8), jnp.float32), SHAPE((8, 8), jnp.float32)
    matmul = 2 * 4 * 8 * 8
    count = observability.forward_flops
    scanned = lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]
    assert count(scanned, x, w) == 5 * matmul
    assert count(jax.checkpoint(scanned), x, w) == 5 * matmul
    assert count(jax.vmap(scanned, (0, None)), SHAPE((3, 4, 8), jnp.float32), w) == 15 * matmul
    either = lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)
    assert count(either, x, w) == 2 * matmul
    grads = lambda x, w: jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
    assert count(grads, x, w) == 2 * matmul
    image, kernel = SHAPE((1, 8, 8, 3), jnp.float32), SHAPE((3, 3, 3, 16), jnp.float32)
    convolve = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert count(convolve, image, kernel) == 2 * 64 * 16 * 9 * 3
    ragged = lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes)
    assert count(ragged, x, SHAPE((3, 8, 8), jnp.float32), SHAPE((3,), jnp.int32)) == matmul


def test_a_mesh_does_the_same_work_together():
    layout = sharding.Layout(sharding.make_mesh(data=4, tensor=2), sharding.TP)
    q = SHAPE((4, 12, 4, 8), jnp.float32)
    attend = lambda q: nn.attend(q, q, q, *nn.make_context(4, 12).key_intervals(ops.Full()))
    with sharding.use(layout):
        inside = observability.forward_flops(attend, q)
    assert inside == observability.forward_flops(attend, q)


def test_loops_of_unknown_length_are_said():
    x, w = SHAPE((4, 8), jnp.float32), SHAPE((8, 8), jnp.float32)
    loop = lambda x, w: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ w, x)
    with pytest.warns(UserWarning, match="unknown number of times"):
        assert observability.forward_flops(loop, x, w) == 2 * 4 * 8 * 8


def test_a_registered_formula_counts_a_loop_of_unknown_length():
    """`n` matmuls where `n` is known, one where it is not; a backward pass is not counted by it."""

    def formula(x, w, n):
        return 2 * x.shape[0] * w.size * (1 if isinstance(n, SHAPE) else n)

    @ops.register_flops(formula)
    def powers(x, w, n):
        return jax.lax.while_loop(lambda at: at[0] < n, lambda at: (at[0] + 1, at[1] @ w), (0, x))[1]

    @ops.register_flops(lambda x, w: 2 * x.shape[0] * w.size, static=("least",))
    def until(x, w, *, least):
        return jax.lax.while_loop(lambda x: x[0, 0] < least, lambda x: x @ w, x)

    x, w = SHAPE((4, 8), jnp.float32), SHAPE((8, 8), jnp.float32)
    matmul = 2 * 4 * 8 * 8
    assert observability.forward_flops(powers, x, w, np.int32(5)) == 5 * matmul
    assert observability.forward_flops(powers, x, w, SHAPE((), jnp.int32)) == matmul
    assert observability.forward_flops(lambda x, w: until(x, w, least=9.0), x, w) == matmul
    np.testing.assert_array_equal(powers(jnp.eye(2), 2 * jnp.eye(2), 3), 8 * jnp.eye(2))


def test_peaks():
    assert observability.peak_flops() is None  # of a CPU
    kinds = {"TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12, "TPU v6 lite": 918e12, "TPU7x": 1153.5e12}
    kinds |= {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12}
    kinds |= {"NVIDIA H200": 989e12, "NVIDIA H20": 148e12, "NVIDIA L40S": 362e12, "NVIDIA GB200": 2500e12}
    assert {kind: chip_of(kind).flops for kind in kinds} == kinds
    assert [chip_of(f"NVIDIA H{n} NVL").flops for n in (100, 200)] == [835e12, 835e12]  # 15 % less than SXM
    assert chip_of("NVIDIA A100-PCIE-40GB").memory < 40 * 2**30
    assert chip_of("NVIDIA H20-3e") == chip_of("NVIDIA H20") and chip_of("TPU v3") is None
