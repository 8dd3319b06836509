"""Weight decay masks by logical rank, and schedules at their breakpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import adapters, nn, training, weights
from maxlib.training import _optimizers as optimizers
from tests.nn.tiny import filled
from tests.training import tiny


def test_matrices_decay_and_nothing_else():
    model = jax.eval_shape(lambda: tiny.llama(attention_bias=True, mlp_bias=True))
    mask = training.decay_mask(model)(nn.partition(model)[0])
    short = nn.tree.pattern_paths(model)
    decayed = {short[path] for path, decays in mask.items() if decays}
    kept = {short[path] for path, decays in mask.items() if not decays}
    names = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down"]
    assert decayed == {"embed.w", "head.w"} | {f"layers.{name}.w" for name in names}
    scales = {"norm.scale", "layers.attn_norm.scale", "layers.mlp_norm.scale"}
    assert kept == scales | {f"layers.{name}.b" for name in names}


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])  # biases everywhere, those of experts, and sinks
def test_without_a_mask_the_same_decays_by_name(family):
    assert_decays_as_by_axes(next(known for known in weights.families() if known.name == family))


@pytest.mark.full
def test_without_a_mask_the_same_decays_in_every_family():
    for family in (known for known in weights.families() if known.presets):
        assert_decays_as_by_axes(family)


def assert_decays_as_by_axes(family):
    preset = next(iter(family.presets.values()))
    model = jax.eval_shape(lambda: family.model(preset, rngs=nnx.Rngs(0)))
    params, _ = nn.partition(model)
    want = training.decay_mask(model)(params)
    assert optimizers.decay_by_name(params) == optimizers.decay_by_name(params, nn.tree.stacked_paths(model)) == want


class Own(nnx.Module):
    """A layer with a vector that has a name of its own, and a matrix with a vector's."""

    def __init__(self):
        self.temperature = nnx.Param(jnp.ones(4), axes=("heads",))
        self.d = nnx.Param(jnp.ones((4, 4)), axes=("embed", "mlp"))

    def __call__(self, x, ctx, cache):
        return x + self.temperature[...] @ self.d[...], cache, {}


class OwnModel(tiny.Bigram):
    def __init__(self):
        super().__init__(4, rngs=nnx.Rngs(0))
        self.layers = nn.Stack(lambda _, rngs: Own(), 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("moments", [jnp.float32, jnp.bfloat16])
def test_a_step_decays_layers_of_ones_own_by_their_own_shapes(moments):
    optimizer = training.adamw(1.0, weight_decay=0.5, moments=moments, clip=None)

    def loss(model, batch, key):
        return 0 * jnp.sum(model.head_weight()), training.Stats(jnp.ones(()), {})

    step = training.make_train_step(loss, optimizer)
    state, _ = jax.jit(step)(training.make_state(lambda: OwnModel(), optimizer), tiny.batch())
    short = nn.tree.pattern_paths(state.rest)
    means = {short[path]: float(x.mean()) for path, x in state.trainable.items() if short[path].startswith("layers.")}
    assert means == {"layers.temperature": 1.0, "layers.d": 0.5}


@pytest.mark.parametrize("alone", [False, True])
def test_both_factors_of_adapters_decay_and_the_lengths_of_dora_do_not(alone):
    def build():
        model = tiny.llama(attention_bias=True)
        model = nn.unstack(model) if alone else model
        return adapters.add(model, adapters.LoRA(2, 4, dora=True), rngs=nnx.Rngs(0))

    model = jax.eval_shape(build)
    params, _ = nn.partition(model)
    for mask in (optimizers.decay_by_name(params), training.decay_mask(model)(params)):
        factors = {path: decays for path, decays in mask.items() if ".matmul." in path}
        assert {path.rpartition(".")[2] for path in factors} == {"a", "b", "magnitude"}
        assert {path for path, decays in factors.items() if decays} == {
            p for p in factors if not p.endswith("magnitude")
        }
        assert not any(mask[path] for path in mask if path.endswith(".b") and ".matmul." not in path)


def test_decay_follows_the_mask_and_clipping_comes_first():
    model = tiny.model()
    params, _ = nn.partition(model)
    optimizer = training.adamw(0.1, mask=training.decay_mask(model), weight_decay=0.5, clip=None)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates = jax.jit(lambda p: optimizer.update(zeros, optimizer.init(p), p)[0])(params)
    for path, update in updates.items():
        decays = path.endswith(".w")
        np.testing.assert_allclose(update, -0.05 * params[path] if decays else zeros[path], rtol=1e-6)

    clipped = training.adamw(0.1, mask=None, weight_decay=0.0, clip=1.0)
    state = clipped.update({"w": jnp.full(4, 50.0)}, clipped.init({"w": jnp.zeros(4)}), {"w": jnp.zeros(4)})[1]
    np.testing.assert_allclose(optax.tree_utils.tree_get(state, "mu")["w"], 0.1 * 0.5 * np.ones(4), rtol=1e-6)


@pytest.mark.parametrize(
    ("size", "dtype"), [(0.0, jnp.float32), (0.1, jnp.bfloat16), (50.0, jnp.bfloat16), (np.inf, jnp.float32)], ids=str
)
def test_clipping_is_that_of_optax(size, dtype):
    grads = {"a": jnp.full(3, size, dtype), "b": jnp.full((2, 2), -size, dtype)}
    clip, want = training.clip_by_global_norm(1.0), optax.clip_by_global_norm(1.0)
    got, _ = clip.update(grads, clip.init(grads))
    want, _ = want.update(grads, want.init(grads))
    for name in grads:
        assert got[name].dtype == dtype
        np.testing.assert_allclose(got[name].astype(float), want[name].astype(float), rtol=1e-2)


@pytest.mark.parametrize(
    ("make", "middle", "end"),
    [
        (training.warmup_cosine, 0.55, 0.1),
        (training.warmup_linear, 0.5, 0.0),
        (lambda *args, **kwargs: training.warmup_stable_decay(*args, decay=20, **kwargs), 1.0, 0.0),
    ],
    ids=["cosine", "linear", "stable"],
)
@pytest.mark.parametrize("warmup", [10, 0])
def test_schedules(make, middle, end, warmup):
    schedule = make(2.0, 110, warmup=warmup)
    assert [float(schedule(i)) for i in range(warmup)] == pytest.approx([2 * (i + 1) / 11 for i in range(warmup)])
    assert float(schedule(warmup)) == pytest.approx(2.0)
    assert float(schedule((110 + warmup) // 2)) == pytest.approx(2 * middle)
    assert float(schedule(110)) == float(schedule(200)) == pytest.approx(2 * end)


def test_the_plateau_ends_where_the_decay_begins():
    schedule = training.warmup_stable_decay(1.0, 100, warmup=10, decay=20)
    assert float(schedule(80)) == 1.0 and float(schedule(81)) == pytest.approx(0.95)


def test_a_schedule_that_does_not_fit_its_steps():
    with pytest.raises(ValueError, match="steps=10, warmup=8, decay=5"):
        training.warmup_stable_decay(1.0, 10, warmup=8, decay=5)


def test_muon_with_an_adam_rate_of_zero_moves_matrices_alone():
    model = jax.eval_shape(tiny.model)
    params, _ = nn.partition(tiny.model())
    ones = jax.tree.map(jnp.ones_like, params)
    matrices, moved = optimizers.muon_dimensions(model), {}
    for rate in (0.0, None):
        optimizer = training.muon(0.1, model=model, adam_learning_rate=rate)
        updates = jax.jit(lambda params, by=optimizer: by.update(ones, by.init(params), params)[0])(params)
        moved[rate] = {path for path, x in updates.items() if np.any(x)}
    assert moved[0.0] == matrices.keys() and moved[None] == params.keys()
    scored = jax.eval_shape(lambda: nn.with_head(tiny.llama(dim=16), nn.ScoreHead(16, 1, rngs=nnx.Rngs(0))))
    assert not [path for path in optimizers.muon_dimensions(scored) if path.startswith("head")]


def test_muon_makes_every_matrix_of_every_layer_and_expert_orthogonal():
    """Its update has the singular values of Newton-Schulz, near 1, times what gives it Adam's size; the rest follows
    Adam.
    """
    experts = lambda rngs: nn.MoE(16, 8, router=nn.Router(16, 3, top_k=2, rngs=rngs), rngs=rngs)
    build = lambda: {"llama": tiny.llama(), "moe": experts(nnx.Rngs(0))}
    params, _ = nn.partition(filled(build))
    optimizer = training.muon(0.1, model=jax.eval_shape(build), weight_decay=0.0, clip=None)
    random = np.random.default_rng(0)
    grads = {path: random.standard_normal(p.shape, np.float32) for path, p in params.items()}
    updates, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(grads, params)
    dims = optimizers.muon_dimensions(jax.eval_shape(build))
    short = nn.tree.pattern_paths(jax.eval_shape(build))
    rest = {short[path] for path in params} - {short[path] for path in dims}
    norms = {"llama.norm.scale", "llama.layers.attn_norm.scale", "llama.layers.mlp_norm.scale"}
    assert rest == {"llama.embed.w", "llama.head.w", "moe.router.gate.w"} | norms
    for path, (inputs, outputs) in dims.items():
        u = np.asarray(updates[path])
        batch = [d for d in range(u.ndim) if d not in inputs + outputs]
        assert [u.shape[d] for d in batch] == ([3] if path.startswith("moe") else [2]), path
        n, m = (int(np.prod([u.shape[d] for d in side])) for side in (inputs, outputs))
        values = np.linalg.svd(u.transpose(*batch, *inputs, *outputs).reshape(-1, n, m), compute_uv=False)
        assert np.all(np.abs(values / (0.1 * 0.2 * max(n, m) ** 0.5) - 0.95) < 0.35), path
    for path in params.keys() - dims.keys():
        np.testing.assert_allclose(updates[path], -0.1 * np.sign(grads[path]), rtol=1e-3)


def test_rates_fall_with_the_inputs_of_a_weight():
    make = lambda dim, **changes: jax.eval_shape(
        lambda: tiny.llama(dim=dim, mlp_dim=3 * dim, num_heads=dim // 8, **changes)
    )
    factors = training.mup_lr_factors(make(64), make(16))
    assert factors["layers.attn.q.w"] == factors["layers.attn.o.w"] == factors["head.w"] == 1 / 4
    assert factors["layers.mlp.down.w"] == 1 / 4
    assert factors.keys().isdisjoint({"embed.w", "norm.scale"})
    training.scale_by_path(factors, model=make(64)).init(nn.partition(make(64))[0])
    with pytest.raises(ValueError, match=r"only one has \['head.w'\]"):
        training.mup_lr_factors(make(64), make(16, tied=True))


def test_rates_of_muon_and_of_deeper_models():
    """Muon makes the spectral norm 0.2 √max(inputs, outputs); it must be in proportion to √(outputs / inputs)."""
    make = lambda dim, layers: jax.eval_shape(
        lambda: tiny.llama(dim=dim, mlp_dim=3 * dim, num_heads=dim // 8, num_layers=layers)
    )
    wide, base = make(64, 8), make(16, 2)
    muon = training.mup_lr_factors(wide, base, optimizer="muon")
    assert muon["layers.attn.q.w"] == muon["layers.mlp.up.w"] == muon["layers.mlp.down.w"] == 1 / 2
    assert muon["head.w"] == 1 / 4  # trained by Adam
    for optimizer, width in (("adam", 1 / 4), ("muon", 1 / 2)):
        deep = training.mup_lr_factors(wide, base, optimizer=optimizer, depth_exponent=1.0)
        assert deep["layers.attn.q.w"] == width and deep["layers.attn.o.w"] == deep["layers.mlp.down.w"] == width / 4
        half = training.mup_lr_factors(wide, base, optimizer=optimizer, depth_exponent=0.5)
        assert half["layers.attn.q.w"] == width / 2 and half["layers.attn.o.w"] == width / 4
        assert half["head.w"] == 1 / 4


def test_initial_values_of_deeper_models():
    model = filled(lambda: tiny.llama(num_layers=4))
    base = jax.eval_shape(lambda: tiny.llama(num_layers=2))
    scaled = jax.jit(lambda model: training.mup_init(model, base, depth_exponent=1.0))(model)
    before, after = (nn.partition(m)[0] for m in (model, scaled))
    changed = {path for path, x in before.items() if not np.array_equal(x, after[path])}
    assert changed == {f"layers.groups.0.0.{name}.w" for name in ("attn.o", "mlp.down")}
    for path in changed:
        np.testing.assert_array_equal(after[path], 0.5 * before[path])
