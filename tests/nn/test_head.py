"""Log-probabilities of targets under every preset against one device, and the memory of a compiled step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, sharding
from tests.training.tiny import QUICKLY

D = 16


MESHES = {
    "dp": {"data": 8},
    "zero1": {"data": 8},
    "fsdp": {"fsdp": 8},
    "tp": {"data": 2, "tensor": 4},
    "tp_sp": {"data": 2, "tensor": 4},
    "fsdp_tp": {"fsdp": 4, "tensor": 2},
    "fsdp_tp_sp": {"fsdp": 4, "tensor": 2},
    "ep": {"fsdp": 4, "expert": 2},
    "ep_tp": {"fsdp": 2, "expert": 2, "tensor": 2},
    "fsdp_by_expert": {"data": 2, "fsdp": 4},
    "cp_gather": {"context": 8},
    "cp_ring": {"context": 8},
    "cp_ulysses": {"context": 8},
    "pp": {"stage": 8},
}


def test_all_presets_are_here():
    others = {name for name in sharding.PRESETS if name.startswith(("exchange", "offload"))} | {
        "pp_1f1b"
    }  # move no logits
    assert sharding.PRESETS.keys() - others == MESHES.keys()


@functools.cache
def inputs(vocab):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(16, 8, D)).astype(np.float32))
    targets = jnp.asarray(rng.integers(-1, vocab, (16, 8)).astype(np.int32))
    return hidden, targets, nn.Embed(vocab, D, rngs=nnx.Rngs(0))


@functools.partial(jax.jit, compiler_options=QUICKLY)
def results(hidden, head, targets):
    def total(hidden, head):
        out = nn.token_log_probs(hidden, head.w[...], targets, temperature=0.7, softcap=5.0, entropy=True)
        return jnp.sum(jnp.sin(out.log_prob) + out.entropy**2), out

    return jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, head)


@functools.cache
def alone(vocab):
    hidden, targets, head = inputs(vocab)
    return jax.device_get(results(hidden, head, targets))


def test_one_device_is_the_formula():
    hidden, targets, head = inputs(48)
    z = 5.0 * np.tanh(np.asarray(hidden, np.float64) @ np.asarray(head.w[...], np.float64).T / 5.0) / 0.7
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    valid = np.asarray(targets) >= 0
    picked = np.take_along_axis(log_p, np.maximum(targets, 0)[..., None], -1)[..., 0]
    out = alone(48)[0][1]
    np.testing.assert_allclose(out.log_prob, picked * valid, atol=1e-5)
    np.testing.assert_allclose(out.entropy, -(np.exp(log_p) * log_p).sum(-1) * valid, atol=1e-5)
    np.testing.assert_array_equal(out.correct, (z.argmax(-1) == targets) & valid)


# Few tokens travel to a large head; 61 divides over nothing. By default each way to place rows and head comes once.
DEFAULT = {"tp_sp": 512, "fsdp_tp": 61, "ep_tp": 48, "cp_ring": 48}
PAIRS = [
    pytest.param(name, vocab, marks=() if DEFAULT.get(name) == vocab else pytest.mark.full)
    for name in MESHES
    for vocab in (48, 512, 61)
]


@pytest.mark.parametrize(("name", "vocab"), PAIRS)
def test_every_preset_gives_what_one_device_gives(name, vocab):
    (hidden, targets, head), (want, want_grads) = inputs(vocab), alone(vocab)
    layout = sharding.Layout(sharding.make_mesh(**MESHES[name]), sharding.PRESETS[name])
    layout = layout | {"vocab": None, "act_vocab": None} if vocab == 61 else layout
    spread = jax.device_put(head, sharding.shardings(head, layout))
    with sharding.use(layout):
        (value, out), grads = results(hidden, spread, targets)
    np.testing.assert_allclose(value, want[0], rtol=1e-5)
    for field in ("log_prob", "entropy", "correct"):
        np.testing.assert_allclose(getattr(out, field), getattr(want[1], field), atol=1e-5, err_msg=field)
    np.testing.assert_allclose(grads[0], want_grads[0], atol=1e-5)
    np.testing.assert_allclose(grads[1].w[...], want_grads[1].w[...], atol=1e-5)


def test_a_compiled_step_never_holds_all_logits():
    """Rows and vocabulary are split over the mesh; the head is never whole on a device either."""
    V, rows = 4096, (16, 256)
    layout = sharding.Layout(sharding.make_mesh(fsdp=4, tensor=2), sharding.FSDP_TP)
    head = jax.eval_shape(lambda: nn.Embed(V, D, rngs=nnx.Rngs(0)))
    head = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), head, sharding.shardings(head, layout)
    )
    by_row = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec("fsdp"))
    hidden = jax.ShapeDtypeStruct((*rows, D), jnp.float32, sharding=by_row)
    targets = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=by_row)

    def total(hidden, head, targets):
        out = nn.token_log_probs(hidden, head.w[...], targets, entropy=True, chunk=64)
        return jnp.sum(jnp.sin(out.log_prob) * out.entropy)

    with sharding.use(layout):
        compiled = jax.jit(jax.grad(total, (0, 1))).lower(hidden, head, targets).compile()
    # Of a device: a quarter of the rows, half of the vocabulary.
    part = V // 2
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * (4 * 64 * part + 4 * part * D + 8 * 4 * 256 * D)
    assert 4 * (4 * 64 * part + 4 * part * D + 8 * 4 * 256 * D) < 4 * 4 * 256 * part
    assert f"[{V},{D}]" not in compiled.as_text()


def test_streams_behind_a_teachers_hidden_state_do_not_count():
    random = np.random.default_rng(0)
    hidden, teacher = random.normal(size=(2, 1, 4, 6)).astype(np.float32)
    weight, others = random.normal(size=(2, 8, 6)).astype(np.float32)
    divergence = jax.jit(nn.distillation.token_divergence)
    wide = np.concatenate([teacher, 9 * teacher], axis=-1)
    plain, behind = (divergence(hidden, weight, t, others, np.ones((1, 4), bool)) for t in (teacher, wide))
    np.testing.assert_array_equal(plain, behind)
