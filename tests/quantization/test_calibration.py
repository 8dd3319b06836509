"""Calibration: less error than rounding to nearest and than qwix's; changes that leave the model's function alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from qwix.contrib import awq_core, gptq_core

import maxlib
from maxlib import adapters, nn, ops, quantization
from maxlib.models import llama, mixtral, olmo2
from maxlib.quantization import _gptq, _scales, _streaming
from maxlib.quantization._gptq import _rounded
from tests.models import parity
from tests.nn.tiny import filled

ROPE = ops.Rope(32, max_length=64)
SIZES = {"vocab": 64, "num_layers": 2, "dim": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "rope": ROPE}
DENSE = llama.Config(**SIZES, mlp_dim=96, tied=True)
EXPERTS = mixtral.Config(**SIZES, expert_dim=96, num_experts=4, top_k=2)
TOKENS = jax.random.randint(jax.random.key(0), (4, 64), 0, 64)
INT4 = quantization.INFERENCE["int4"]


def with_outliers(model):
    """A model some of whose channels are large after the norm, as in trained ones."""
    wide = jnp.where(jnp.arange(64) % 16 == 3, 8.0, 1.0)
    new = jax.tree.map(lambda a: a, model)
    for layers in new.layers.groups[0]:
        layers.mlp_norm.scale = layers.mlp_norm.scale.replace(layers.mlp_norm.scale[...] * wide[None])
        for site in (layers.mlp.gate, layers.mlp.up):
            site.w = site.w.replace(site.w[...] / wide[None, None] ** 0.5)
    return new


@pytest.fixture(scope="module")
def dense():
    return with_outliers(filled(lambda: llama.Llama(DENSE, rngs=nnx.Rngs(0))))


@pytest.fixture(scope="module")
def experts():
    return jax.jit(lambda: mixtral.Mixtral(EXPERTS, rngs=nnx.Rngs(0)))()


def matrix_and_inputs():
    random = np.random.default_rng(0)
    x = random.standard_normal((256, 8)) @ random.standard_normal((8, 64)) + 0.3 * random.standard_normal((256, 64))
    x *= np.where(np.arange(64) % 16 == 3, 8, 1)
    w, x = jnp.asarray(random.standard_normal((16, 64)), jnp.float32), jnp.asarray(x, jnp.float32)
    how = qwix._src.core.qarray.HowToQuantize(qtype=jnp.int4, channelwise_axes=[0], tiled_axes={1: 32})

    def loss(rounded):
        """The error of the outputs."""
        return float(jnp.square((rounded - w) @ x.T).sum())

    return w, x, how, loss, loss(qwix.dequantize(qwix.quantize(w, jnp.int4, channelwise_axes=[0], tiled_axes={1: 32})))


@pytest.mark.full
def test_error_is_at_most_that_of_qwix():
    """GPTQ and AWQ, on the same matrix and inputs."""
    w, x, how, loss, nearest = matrix_and_inputs()
    h = x.T @ x
    with jax.numpy_rank_promotion("allow"):
        theirs = qwix.dequantize(gptq_core.quantize_weight(w, h, how)[0])
        scaled, scales = awq_core.quantize_weight(w, awq_core.compute_act_scale(x), how)
        awq = qwix.dequantize(scaled) / scales
    values, scale, _ = _rounded(w[None], h[None], INT4, 0.01)
    ours = loss(values[0] * jnp.repeat(scale[0], 32, axis=1))
    assert ours < 0.9 * loss(theirs)
    assert ours < 0.1 * nearest
    site = nn.Einsum("...D,FD->...F", (16, 64), ("mlp", "embed"), rngs=nnx.Rngs(0))
    site.w = site.w.replace(w)
    read = {"site": _scales.Inputs(h[None], jnp.abs(x).max(axis=0)[None])}
    layer = nnx.Dict(norm=nn.RMSNorm(64), site=site)
    factor = _scales._best(layer, _scales.Link("norm", ("site",)), {"site": INT4}, read, 20)
    # AWQ's own search knows the inputs' sizes alone, not their covariance.
    assert loss(
        qwix.dequantize(qwix.quantize(w * factor, jnp.int4, channelwise_axes=[0], tiled_axes={1: 32})) / factor
    ) < (1.02 * loss(awq))


def test_a_model_changes_less_than_by_rounding_to_nearest(dense):
    asymmetric = quantization.Rule(quantization.INFERENCE["int4_asymmetric"], match="layers.mlp.*")
    exact = quantization.Rule(None, match="layers.attn.[kvo]")
    rules = [exact, quantization.Rule(None, match="layers.mlp.up"), asymmetric, quantization.Rule(INT4)]
    small = quantization.gptq(dense, [TOKENS], rules)
    nearest = jax.jit(lambda model: quantization.for_inference(model, rules))(dense)
    table = quantization.compare_methods(dense, {"gptq": lambda: small, "nearest": lambda: nearest}, TOKENS)
    assert table.errors["gptq"].logit_error < 0.8 * table.errors["nearest"].logit_error
    assert table.bytes["gptq"] == table.bytes["nearest"] and "nearest" in str(table)
    assert quantization.report(small).rows == quantization.report(nearest).rows
    assert small.layers.grouping == nearest.layers.grouping


@pytest.mark.full
@pytest.mark.parametrize(("family", "format"), [("dense", "int4"), ("experts", "int4"), ("dense", "int4_asymmetric")])
def test_each_method_helps(family, format, request):
    model = request.getfixturevalue(family)
    made = {
        "nearest": lambda: quantization.for_inference(model, format),
        "gptq": lambda: quantization.gptq(model, [TOKENS], format),
        "awq": lambda: quantization.for_inference(quantization.awq(model, [TOKENS], format), format),
    }
    errors = {name: e.logit_error for name, e in quantization.compare_methods(model, made, TOKENS).errors.items()}
    assert errors["gptq"] < 0.8 * errors["nearest"]
    assert errors["awq"] < 0.97 * errors["nearest"]


METHODS = {
    "awq": lambda model: quantization.awq(model, [TOKENS], clip=False),
    "smoothquant": lambda model: quantization.smoothquant(model, [TOKENS]),
    "rotate": lambda model: quantization.rotate(model, jax.random.key(1)),
}


@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=[pytest.mark.full] * ((family, method) != ("dense", "smoothquant")))
        for family in ("dense", "experts")
        for method in METHODS
    ],
)
def test_scales_and_rotations_leave_the_function(family, method, request):
    model = request.getfixturevalue(family)
    made = METHODS[method](model)
    errors = quantization.compare_methods(model, {method: lambda: made}, TOKENS).errors[method]
    assert errors.logit_error < 1e-5
    assert errors.quantized_perplexity == pytest.approx(errors.perplexity, rel=1e-5)
    path = "layers.groups.0.0.attn.q.w"
    assert float(jnp.abs(nn.variables(made)[path][...] - nn.variables(model)[path][...]).max()) > 1e-3


@pytest.mark.full
def test_outliers_of_activations_cost_less(dense):
    rules = "int8_w8a8"
    made = {
        "nearest": lambda: quantization.for_inference(dense, rules),
        "smoothquant": lambda: quantization.for_inference(quantization.smoothquant(dense, [TOKENS]), rules),
    }
    errors = quantization.compare_methods(dense, made, TOKENS).errors
    assert errors["smoothquant"].logit_error < 0.8 * errors["nearest"].logit_error


@pytest.mark.full
@pytest.mark.parametrize("family", sorted({*parity.FAMILIES} - {*parity.MASKED, *parity.SEQ2SEQ, "whisper"}))
def test_any_family_keeps_its_function_or_is_refused(family, tmp_path):
    """The first case of each family's golden file: text alone."""
    case = next(iter(parity.golden(family).values()))
    model = maxlib.from_pretrained(parity.directory(tmp_path / "model", case))
    tokens = parity.tokens(case["config"].get("vocab_size", 64), 24)
    want = parity.logits(model, tokens)
    smooth = parity.logits(quantization.smoothquant(model, [jnp.asarray(tokens)]), tokens)
    assert np.abs(smooth - want).max() < 1e-4 * want.std()
    try:
        rotated = quantization.rotate(model, jax.random.key(0))
    except ValueError as error:
        if "cannot be rotated" not in str(error):
            raise
        return
    assert np.abs(parity.logits(rotated, tokens) - want).max() < 1e-3 * want.std()


@pytest.mark.full
def test_memory_is_that_of_one_layer(monkeypatch):
    """Beyond the model, the quantized layers and the activations, the statistics of one layer alone are in memory."""
    cfg = llama.Config(**SIZES | {"num_layers": 4}, mlp_dim=96)
    model = jax.jit(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)))()
    live, sizes = [], []
    quantized = _gptq._quantized

    def watched(layer, formats, records, *options):
        live.append(sum(a.nbytes for a in jax.live_arrays()))
        sizes.append(sum(a.nbytes for a in jax.tree.leaves(records)))
        new = quantized(layer, formats, records, *options)
        live[-1] -= sum(a.nbytes for a in jax.tree.leaves(new)) * len(sizes)
        return new

    monkeypatch.setattr(_gptq, "_quantized", watched)
    quantization.gptq(model, [TOKENS])
    assert len(sizes) == 4 and len(set(sizes)) == 1
    assert live[-1] - live[0] < 0.2 * sizes[0]


@pytest.mark.full
def test_a_model_that_cannot_be_rotated_is_named():
    cfg = olmo2.Config(**SIZES, mlp_dim=96)
    model = jax.jit(lambda: olmo2.OLMo2(cfg, rngs=nnx.Rngs(0)))()
    for layers in model.layers.groups[0]:  # a norm after a branch commutes with rotations while its weights are one
        layers.attn_norm.scale = layers.attn_norm.scale.replace(jnp.tile(jnp.linspace(0.5, 2, 64), (2, 1)))
    with pytest.raises(ValueError, match="this OLMo2 cannot be rotated: .* without norms after them"):
        quantization.rotate(model, jax.random.key(0))


def test_a_named_format_leaves_what_no_group_divides(monkeypatch):
    """As `for_inference` does."""
    cfg, formats = llama.Config(**SIZES | {"num_layers": 1}, mlp_dim=80), {}
    model = filled(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)))

    def quantized(layer, of_layer, *_):
        formats.update(of_layer)
        return layer

    monkeypatch.setattr(_gptq, "_quantized", quantized)  # rounding takes seconds to compile
    with pytest.warns(UserWarning, match=r"stay in full precision, .*layers\.mlp\.down"):
        quantization.gptq(model, [TOKENS[:1, :8]])
    assert formats == dict.fromkeys(formats, INT4) | {"mlp.down": None} and "mlp.up" in formats


def test_formats_and_rules_are_checked(dense):
    with pytest.raises(ValueError, match="GPTQ rounds to int4 or int8, got nf4"):
        quantization.gptq(dense, [], "nf4")
    with pytest.raises(ValueError, match="tokens must have a batch of ids"):
        quantization.gptq(dense, [])
    with pytest.raises(ValueError, match=r"strength must be in \[0, 1\], got 2"):
        quantization.smoothquant(dense, [TOKENS], strength=2)


def test_a_covariance_without_an_inverse_is_refused():
    layer, x = nn.Einsum("...D,FD->...F", (4, 32), ("mlp", "embed"), rngs=nnx.Rngs(0)), jnp.eye(6, 32) + 1
    read = _streaming.Inputs((x.T @ x)[None], jnp.abs(x).max(axis=0)[None])
    with pytest.raises(ValueError, match="damping=0.0 invertible"):
        _gptq._quantized(layer, {"": INT4}, {"": read}, damping=0.0)


def test_a_model_with_adapters_is_refused():
    """Scales and rotations would change the weight, and not the adapter beside it."""
    model = lambda: llama.Llama(DENSE, rngs=nnx.Rngs(0))
    adapted = filled(lambda: adapters.add(model(), adapters.LoRA(rank=2, alpha=4), rngs=nnx.Rngs(1)))
    for calibrate in (quantization.awq, quantization.gptq):
        with pytest.raises(ValueError, match="has an adapter"):
            calibrate(adapted, [np.zeros((1, 8), np.int32)], "int8")
