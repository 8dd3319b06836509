"""This year's families on several devices, with packed rows: each is compared with itself on one device."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxlib
from maxlib import nn, sharding, training
from maxlib.training._pipelined_gradient import pipelined_gradient
from maxlib.weights import HFConfig
from tests.models import parity
from tests.nn.tiny import filled
from tests.training.tiny import QUICKLY

HYBRIDS = ("qwen3_next", "qwen3_5", "granite4", "nemotron_h", "falcon_h1", "lfm2", "olmo_hybrid", "kimi_linear")
OTHERS = ("minimax_m2", "mimo_v2", "hy3", "seed_oss", "apertus", "glm4_moe_lite", "muse_glimmer", "gemma4", "mistral4")
OTHERS += ("deepseek_v32", "deepseek_v4")
ROWS, T = 4, 24
LOSS = functools.partial(training.NextToken(), dtype=jnp.float32)
# The mesh and the rules of each kind of parallelism.
MESHES = {
    "context": ({"fsdp": 2, "context": 2}, sharding.FSDP | sharding.CP_RING),
    "heads": ({"tensor": 2, "context": 2}, sharding.TP | sharding.CP_ULYSSES | {"vocab": None}),
    "experts": ({"fsdp": 2, "expert": 2}, sharding.EP | {"rank": None}),  # latents of 14 do not divide
    "gpipe": ({"stage": 2, "data": 2}, sharding.DP | sharding.Pipeline("stage", microbatches=2)),
}
MESHES["1f1b"] = MESHES["gpipe"]
REFUSED = {  # by family and mesh
    ("gemma4", "gpipe"): "layer_inputs are not supported in a pipeline",
    ("gemma4", "1f1b"): "layer_inputs are not supported in a pipeline",
    # The layers of these small models do not repeat.
    ("qwen3_next", "1f1b"): "whose layers repeat",
    ("mimo_v2", "1f1b"): "whose layers repeat",
}


@functools.cache
def model_of(family: str):
    """The first case of the golden files, twice as deep, so that its layers repeat."""
    case = next(c for c in parity.golden(family).values() if "vision_config" not in c["config"])
    known = next(f for f in maxlib.weights.families() if f.name == family)
    cfg = known.fields.read(HFConfig(case["config"]))
    if hasattr(cfg, "pattern"):
        cfg = dataclasses.replace(cfg, pattern=cfg.pattern * 2)
    elif getattr(cfg, "layer_types", None) is not None:
        cfg = dataclasses.replace(cfg, num_layers=2 * cfg.num_layers, layer_types=cfg.layer_types * 2)
    else:
        cfg = dataclasses.replace(cfg, num_layers=2 * cfg.num_layers)
    if family == "deepseek_v4":
        cfg = dataclasses.replace(cfg, num_hash=cfg.num_layers)  # so that layers repeat
    model = filled(lambda: known.model(cfg, rngs=nnx.Rngs(0)))
    for path, variable in nn.variables(model).items():
        if path.endswith("router.table"):
            experts = jnp.arange(variable.get_value().size, dtype=jnp.int32) * 5 // 3
            variable.set_value(experts.reshape(variable.get_value().shape) % cfg.num_experts)
    return model


def packed(vocab: int) -> dict:
    """Rows of two documents and padding; borders differ."""
    tokens = np.random.default_rng(0).integers(0, vocab, (ROWS, T)).astype(np.int32)
    places, borders = np.arange(T)[None], np.array([[9], [13], [4], [20]])
    segments = np.where(places >= T - 2, 0, 1 + (places >= borders)).astype(np.int32)
    targets = np.where((np.roll(segments, -1, axis=1) == segments) & (segments > 0), np.roll(tokens, -1, axis=1), -1)
    return {"tokens": tokens, "targets": targets.astype(np.int32), "segment_ids": segments}


@functools.partial(jax.jit, static_argnames="remat", compiler_options=QUICKLY)
def gradients(trainable, rest, batch, remat=None):
    def mean(trainable):
        total, stats = LOSS(nn.combine(trainable, rest), batch, remat=remat)
        return total / stats.num_targets

    loss, grads = jax.value_and_grad(mean)(trainable)
    return grads, loss


@functools.cache
def on_one_device(family: str):
    model = model_of(family)
    return jax.device_get(gradients(*nn.partition(model), packed(model.cfg.vocab)))


def assert_same(got, want) -> None:
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    assert got[0].keys() == want[0].keys()
    for path, gradient in want[0].items():
        np.testing.assert_allclose(
            got[0][path], gradient, rtol=0, atol=2e-4 * np.abs(gradient).max() + 1e-7, err_msg=path
        )


# Each family on two of the meshes, which are other ones for the next family.
PAIRS = [(family, [*MESHES][(2 * i + n) % len(MESHES)]) for i, family in enumerate(HYBRIDS + OTHERS) for n in (0, 1)]
PAIRS = [*dict.fromkeys([*PAIRS, *REFUSED, *(("deepseek_v4", kind) for kind in MESHES)])]
PAIRS += [("qwen4_exp", kind) for kind in ("context", "experts", "gpipe")]


@pytest.mark.full
@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_devices_change_nothing(family, kind):
    model, (degrees, rules) = model_of(family), MESHES[kind]
    if family in ("deepseek_v32", "qwen4_exp") and kind == "context":
        rules = sharding.FSDP | sharding.CP_GATHER  # chosen keys cannot travel around a ring
    if kind == "experts" and not any("expert" in axes for axes in nn.tree.axes(model).values()):
        pytest.skip("it has no experts")
    layout = sharding.Layout(sharding.make_mesh(**degrees, devices=jax.devices()[:4]), rules)
    spread = nn.partition(jax.device_put(model, sharding.shardings(model, layout)))
    refusal = REFUSED.get((family, kind))
    expected = pytest.raises((ValueError, TypeError), match=refusal) if refusal else contextlib.nullcontext()
    with expected, sharding.use(layout):
        batch = training.shard_batch(packed(model.cfg.vocab), layout)
        if kind == "1f1b":
            gradient = functools.partial(pipelined_gradient, training.NextToken(), dtype=jnp.float32)
            step = jax.jit(gradient, compiler_options=QUICKLY)
            got = step(*spread, batch, jax.random.key(0))[:2]
        else:
            got = gradients(*spread, batch)
        assert_same(got, on_one_device(family))
