"""Rotary tables against float64 formulas and transformers, and the rotation against complex numbers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib.ops import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
    apply_rope,
    yarn_mscale,
)

DIM, LENGTH = 16, 512  # rotary dimensions; max_position_embeddings
SHORT = tuple(1 + 0.05 * i for i in range(DIM // 2))
LONG = tuple(1 + 1.5 * i for i in range(DIM // 2))
EXTENDED = {"factor": 8.0, "original_max_position_embeddings": 64}
DEEPSEEK = {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2}
# (our scaling, transformers' rope_parameters, max_position_embeddings)
CASES = {
    "default": (None, {"rope_type": "default"}, LENGTH),
    "linear": (LinearScaling(3.0), {"rope_type": "linear", "factor": 3.0}, LENGTH),
    "dynamic": (DynamicNTKScaling(2.5, 64), {"rope_type": "dynamic", "factor": 2.5}, 64),
    "llama3": (
        Llama3Scaling(8.0, 1.0, 4.0, 64),
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **EXTENDED},
        LENGTH,
    ),
    "llama3-step": (  # Llama 4 Scout: the ramp has no width and must not divide by zero
        Llama3Scaling(8.0, 1.0, 1.0, 64),
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 1.0, **EXTENDED},
        LENGTH,
    ),
    "yarn": (YarnScaling(8.0, 64), {"rope_type": "yarn", **EXTENDED}, LENGTH),
    "yarn-gpt-oss": (
        YarnScaling(8.0, 64, truncate=False),
        {"rope_type": "yarn", "truncate": False, **EXTENDED},
        LENGTH,
    ),
    "yarn-deepseek": (
        YarnScaling(8.0, 64, beta_fast=16, beta_slow=2, mscale=0.7, mscale_all_dim=1.0),
        {"rope_type": "yarn", **EXTENDED, **DEEPSEEK},
        LENGTH,
    ),
    "yarn-factor": (
        YarnScaling(8.0, 64, attention_factor=1.3),
        {"rope_type": "yarn", "attention_factor": 1.3, **EXTENDED},
        LENGTH,
    ),
    "yarn-narrow": (  # the ramp has no width and must not divide by zero
        YarnScaling(8.0, 32, beta_fast=2, beta_slow=2, truncate=False),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 2, "beta_slow": 2}
        | {"truncate": False},
        LENGTH,
    ),
    "longrope": (
        LongRopeScaling(SHORT, LONG, 64, 8.0),
        {"rope_type": "longrope", "short_factor": list(SHORT), "long_factor": list(LONG), **EXTENDED},
        LENGTH,
    ),
    "longrope-factor": (
        LongRopeScaling(SHORT, LONG, 64, 8.0, attention_factor=0.9),
        {"rope_type": "longrope", "short_factor": list(SHORT), "long_factor": list(LONG), "attention_factor": 0.9}
        | EXTENDED,
        LENGTH,
    ),
    "proportional": (
        ProportionalScaling(0.4, 2.0),
        {"rope_type": "proportional", "partial_rotary_factor": 0.4, "factor": 2.0},
        LENGTH,
    ),
}
names = pytest.mark.parametrize("name", CASES)
# Within and beyond the first context, each with one base.
bases = pytest.mark.parametrize(("theta", "length"), [(10_000.0, 400), (500_000.0, 40)])


def llama_tables(parameters: dict, max_length: int, positions: np.ndarray):
    """transformers' inverse frequencies, cosines and sines (halves not repeated) for `positions`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=2 * DIM,
        num_attention_heads=2,
        head_dim=DIM,
        max_position_embeddings=max_length,
        rope_parameters=parameters,
    )
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.tensor(positions))
    half = cos.shape[-1] // 2
    return rotary.inv_freq.numpy(), cos.numpy()[..., :half], sin.numpy()[..., :half]


@names
@bases
def test_tables_equal_transformers(name, theta, length):
    scaling, parameters, max_length = CASES[name]
    positions = np.stack([np.arange(length), np.arange(length)[::-1]])
    inv_freq, cos, sin = llama_tables({"rope_theta": theta, **parameters}, max_length, positions)
    rope = Rope(DIM, theta, scaling)
    np.testing.assert_allclose(rope.inv_freq(length), inv_freq, rtol=6e-7)  # five units in the last place
    ours = jax.jit(rope.tables)(positions)
    np.testing.assert_allclose(ours[0], cos, atol=length * 6e-7)
    np.testing.assert_allclose(ours[1], sin, atol=length * 6e-7)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_length_may_be_static_traced_or_left_to_the_positions(name):
    rope = Rope(DIM, scaling=CASES[name][0])
    assert rope.needs_length
    positions = jnp.arange(90)[None]
    static = jax.jit(rope.tables, static_argnames="length")
    left = static(positions)
    for tables in (static(positions, length=90), jax.jit(rope.tables)(positions, length=jnp.int32(90))):
        np.testing.assert_allclose(tables, left, atol=1e-6)
    assert np.abs(static(positions, length=40)[0] - left[0]).max() > 0.1  # the length does decide
    # decoding one token with the length of the prefill repeats the prefill's angles
    prefill, decode = (static(p, length=128)[0] for p in (positions, positions[:, 89:]))
    np.testing.assert_array_equal(prefill[:, 89:], decode)


def test_far_positions_follow_the_float32_frequencies():
    """At position 100,000 float32 angles are coarse, but cosine and sine of them must not add an error of their own."""
    rope = Rope(DIM, 500_000.0)
    positions = np.arange(99_990, 100_010)[None]
    angles = positions[..., None].astype(np.float32) * np.asarray(rope.inv_freq())
    np.testing.assert_allclose(jax.jit(rope.tables)(positions)[0], np.cos(angles.astype(np.float64)), atol=1e-6)


# By default whole and partial rotary, each in one order.
@pytest.mark.parametrize(
    ("interleaved", "head"),
    [(False, DIM), (True, DIM + 7)]
    + [pytest.param(*pair, marks=pytest.mark.full) for pair in ((True, DIM), (False, DIM + 7))],
)
def test_rotation_is_a_complex_product(interleaved, head):
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, head))
    rope = Rope(DIM, interleaved=interleaved)
    positions = jnp.array([[0, 1, 2, 3, 4], [7, 7, 90, 3, 0]])
    got = jax.jit(lambda x, p: apply_rope(x, *rope.tables(p), interleaved=interleaved))(x, positions)
    real, imaginary = (
        (x[..., 0:DIM:2], x[..., 1:DIM:2]) if interleaved else (x[..., : DIM // 2], x[..., DIM // 2 : DIM])
    )
    angles = np.asarray(positions)[..., None] * 10_000.0 ** (-np.arange(0, DIM, 2) / DIM)
    turned = (np.asarray(real) + 1j * np.asarray(imaginary)) * np.exp(1j * angles)[:, :, None]
    both = (turned.real, turned.imag)
    want = np.stack(both, -1).reshape(2, 5, 3, DIM) if interleaved else np.concatenate(both, -1)
    np.testing.assert_allclose(got[..., :DIM], want, atol=2e-5)
    np.testing.assert_array_equal(got[..., DIM:], x[..., DIM:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_turns_back(interleaved):
    """A rotation is orthogonal: its vector-Jacobian product is the rotation by the opposite angle."""
    x, g = jax.random.normal(jax.random.key(1), (2, 1, 4, 2, DIM + 4))

    @jax.jit
    def results(x, g):
        cos, sin = Rope(DIM).tables(jnp.arange(4)[None] + 3)
        grad = jax.vjp(lambda x: apply_rope(x, cos, sin, interleaved=interleaved), x)[1](g)[0]
        return grad, apply_rope(g, cos, -sin, interleaved=interleaved)

    np.testing.assert_allclose(*results(x, g), atol=1e-6)


def test_bfloat16_is_rounded_once():
    x = jax.random.normal(jax.random.key(2), (1, 4, 2, DIM)).astype(jnp.bfloat16)
    turn = jax.jit(lambda x: apply_rope(x, *Rope(DIM).tables(jnp.arange(4)[None])))
    got = turn(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, turn(x.astype(jnp.float32)).astype(jnp.bfloat16))


def test_specs_are_values():
    assert Rope(DIM, scaling=LongRopeScaling(list(SHORT), list(LONG), 64, 8.0)) == Rope(
        DIM, scaling=CASES["longrope"][0]
    )
    assert len({Rope(DIM, scaling=scaling) for scaling, *_ in CASES.values()}) == len(CASES)


def test_yarn_mscale():
    assert yarn_mscale(1.0, 0.707) == yarn_mscale(0.5) == 1.0
    assert yarn_mscale(40.0, 0.707) == pytest.approx(0.0707 * math.log(40) + 1)
    pytest.importorskip("torch")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

    assert yarn_mscale(40.0, 0.707) == pytest.approx(yarn_get_mscale(40.0, 0.707))


def test_too_long_is_refused_where_the_length_is_known():
    rope = Rope(DIM, max_length=32)
    rope.tables(jnp.arange(32)[None], length=32)
    with pytest.raises(ValueError, match="longer than the rotary table: at most 32 positions, got 33"):
        rope.tables(jnp.arange(33)[None])
    with pytest.raises(ValueError, match="got 40"):
        jax.jit(lambda p: rope.tables(p, length=40))(jnp.arange(3)[None])
    jax.jit(rope.tables)(jnp.arange(33)[None])  # traced positions: nothing to check
    packed = jnp.tile(jnp.arange(32), 3)[None]  # a row of three documents, each short enough
    assert rope.tables(packed)[0].shape == (1, 96, DIM // 2)
    assert rope.tables(jnp.zeros((2, 0), jnp.int32))[0].shape == (2, 0, DIM // 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rope(7), "Rope.dim must be a positive even number"),
        (lambda: Rope(0), "Rope.dim"),
        (lambda: Rope(8, theta=0.0), "Rope.theta must be a positive number, got 0.0"),
        (lambda: Rope(8, theta=float("nan")), "Rope.theta"),
        (lambda: Rope(8, max_length=0), "Rope.max_length"),
        (lambda: Rope(8, scaling=LinearScaling(-1.0)), "LinearScaling.factor"),
        (lambda: Rope(2, scaling=DynamicNTKScaling(2.0, 64)), "at least 4 rotary dimensions"),
        (lambda: Rope(8, scaling=Llama3Scaling(8.0, 4.0, 3.9, 64)), "high_freq_factor must not be less"),
        (lambda: Rope(8, scaling=YarnScaling(8.0, 0)), "YarnScaling.original_length"),
        (
            lambda: Rope(8, scaling=LongRopeScaling((1.0,), (1.0,) * 4, 64, 8.0)),
            "short_factor must have one number per",
        ),
        (lambda: Rope(8, scaling=LongRopeScaling((1.0,) * 4, (0.0,) * 4, 64, 8.0)), "long_factor.0 must be a positive"),
        (lambda: Rope(8, scaling=ProportionalScaling(1.5)), "ProportionalScaling.fraction must be between 0 and 1"),
    ],
)
def test_impossible_specs_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_tables_wider_than_a_head_are_refused():
    cos, sin = Rope(DIM).tables(jnp.arange(2)[None])
    with pytest.raises(ValueError, match="rotate 16 dimensions, but a head only has 8"):
        apply_rope(jnp.ones((1, 2, 1, 8)), cos, sin)
