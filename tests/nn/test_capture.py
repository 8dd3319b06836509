"""Values are read and replaced by name: against transformers, in scans, under remat and in generation."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import maxlib
from maxlib import inference, nn, ops, sharding, training
from maxlib.models import gemma2, llama
from maxlib.training._pipelined_gradient import pipelined_gradient
from tests.nn import transformer_lens
from tests.nn.tiny import filled
from tests.training.tiny import QUICKLY

LAYERS, HEADS = 4, 4


@pytest.fixture(scope="module")
def model():
    sizes = {"num_layers": LAYERS, "num_heads": HEADS, "num_kv_heads": 2, "head_dim": 8}
    cfg = llama.Config(vocab=64, dim=32, mlp_dim=48, rope=ops.Rope(8, max_length=64), **sizes)
    return filled(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(0), (2, 12), 0, 64)


@functools.partial(jax.jit, compiler_options=QUICKLY)
def hidden(model, tokens):
    return model(tokens, dtype=jnp.float32).hidden


def captured(model, names, tokens, *, layers=None, **inputs):
    """The values of a compiled call."""
    run = lambda model, tokens: nn.capture(model, names, layers=layers)(tokens, dtype=jnp.float32, **inputs)[1]
    return jax.jit(run, compiler_options=QUICKLY)(model, tokens)


def test_captured_values_are_those_of_transformers(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=4)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(tmp_path)
    ours = maxlib.from_pretrained(tmp_path, dtype=jnp.float32)
    rows = np.random.default_rng(0).integers(0, 64, (2, 12))
    hooked = {"attn": [], "mlp": [], "heads": []}

    def keep(name):
        return lambda module, args, out: hooked[name].append((out[0] if isinstance(out, tuple) else out).detach())

    for block in theirs.transformer.h:
        block.attn.register_forward_hook(keep("attn"))
        block.mlp.register_forward_hook(keep("mlp"))
        block.attn.c_proj.register_forward_pre_hook(lambda module, args: hooked["heads"].append(args[0].detach()))
    with torch.no_grad():
        out = theirs(torch.tensor(rows), output_hidden_states=True, output_attentions=True)
    names = ["resid_pre", "attn", "mlp", "heads", "attention_pattern"]
    values = captured(ours, names, jnp.asarray(rows))
    values["heads"] = values["heads"].reshape(3, 2, 12, 32)
    # transformers' last hidden state is after the final norm, so it is no layer's input.
    expected = {name: np.stack(rows) for name, rows in hooked.items()}
    expected |= {"resid_pre": np.stack(out.hidden_states[:3]), "attention_pattern": np.stack(out.attentions)}
    for name in names:
        np.testing.assert_allclose(values[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_values_and_a_patching_grid_are_those_of_transformer_lens(tmp_path):
    golden = np.load(transformer_lens.GOLDEN)
    pytest.importorskip("torch")
    transformer_lens.hugging_face().save_pretrained(tmp_path)
    model = maxlib.from_pretrained(tmp_path, dtype=jnp.float32)
    names = list(transformer_lens.HOOKS)
    values = captured(model, names, jnp.asarray(golden["clean"]))
    for name in names:
        theirs = golden[name]
        if name == "attention_pattern":
            assert np.ptp(theirs[..., -1, :]) > 0.3  # attention has a pattern
        np.testing.assert_allclose(values[name], theirs, rtol=1e-4, atol=1e-4, err_msg=name)

    @jax.jit
    def patched(layer, position):
        def put(x, here):
            return jnp.where(here == layer, x.at[:, position].set(values["resid_pre"][layer, :, position]), x)

        hidden = nn.patch(model, {"resid_pre": put})(jnp.asarray(golden["corrupt"]), dtype=jnp.float32).hidden
        return model.logits(hidden)[0, -1]

    grid = [[patched(layer, t) for t in range(transformer_lens.LENGTH)] for layer in range(transformer_lens.LAYERS)]
    np.testing.assert_allclose(np.array(grid), golden["grid"], rtol=1e-4, atol=1e-4)


def test_scanned_layers_report_what_separate_ones_do(tokens):
    """Of two kinds in turn, all of them and some."""
    sizes = {"vocab": 64, "dim": 32, "mlp_dim": 48, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    cfg = gemma2.Config(**sizes, window=4, rope=ops.Rope(8, max_length=64))
    model = filled(lambda: gemma2.Gemma2(cfg, rngs=nnx.Rngs(0)))
    names = ["resid_mid", "gate", "attention_pattern"]
    expected = jax.tree.map(lambda x: x[np.array([3, 1])], captured(model, names, tokens))
    for same in (model, nn.unstack(model)):
        values = captured(same, names, tokens, layers=[3, 1], remat="full")
        chex.assert_trees_all_close(values, expected, rtol=1e-5, atol=1e-5)


def test_values_of_one_name_in_a_layer_are_numbered(tokens):
    def layer(x):
        x = checkpoint_name(x, "resid_pre")
        return checkpoint_name(checkpoint_name(x + 1, "norm") * 2, "norm")

    assert set(nn.named_values(layer, jnp.ones(3))) == {"resid_pre", "norm.0", "norm.1"}
    _, values = nn.capture(layer, ["norm.0", "norm.1"])(jnp.ones(3))
    assert np.array_equal(values["norm.0"], [[2, 2, 2]]) and np.array_equal(values["norm.1"], [[4, 4, 4]])
    with pytest.raises(ValueError, match="several values named 'norm'"):
        nn.capture(layer, "norm")(jnp.ones(3))
    with pytest.raises(KeyError, match=r"norm\.2"):
        nn.capture(layer, "norm.2")(jnp.ones(3))


def test_a_capture_stores_the_captured_layers_only(model, tokens):
    run = jax.jit(lambda model: nn.capture(model, "gate", layers=2)(tokens, dtype=jnp.float32)[1]["gate"])
    program = run.lower(model).compile()
    assert program.memory_analysis().output_size_in_bytes == 2 * 12 * 48 * 4
    loops = str(jax.make_jaxpr(run)(model))
    assert f"f32[{LAYERS},2,12,48]" not in loops and "f32[1,2,12,48]" in loops


def test_a_patch_that_changes_nothing_changes_no_bit(model, tokens):
    same = nn.patch(model, {name: lambda x, layer: x for name in ("resid_pre", "heads", "mlp")})
    assert np.array_equal(hidden(same, tokens), hidden(model, tokens))


def test_a_patch_is_an_edit_of_the_weights_also_in_generation(model, tokens):
    patched = nn.patch(model, {"heads": lambda heads, layer: heads.at[:, :, 1].set(0)}, layers=2)
    edited = jax.tree.map(lambda a: a, model)
    weight = nn.variables(edited)["layers.groups.0.0.attn.o.w"]  # [L, D, N, H]
    weight.set_value(weight.get_value().at[2, :, 1].set(0))
    np.testing.assert_allclose(hidden(patched, tokens), hidden(edited, tokens), atol=1e-5)
    assert np.abs(hidden(patched, tokens) - hidden(model, tokens)).max() > 0.1
    texts = [inference.generate(m, [[1, 2, 3]], max_new_tokens=6, dtype=jnp.float32) for m in (patched, edited)]
    assert texts[0] == texts[1]


def test_only_the_patched_layer_and_position_change(model, tokens):
    patched = nn.patch(model, {"resid_pre": lambda x, layer: x.at[:, 5].add(1.0)}, layers=2)
    before, after = (captured(either, "resid_pre", tokens)["resid_pre"] for either in (model, patched))
    changed = np.abs(np.asarray(after - before)).max(axis=(1, 3)) > 1e-4  # L T
    assert not changed[:2].any() and changed[2].tolist() == [t == 5 for t in range(12)] and not changed[3, :5].any()


def test_the_gradient_to_a_value_is_the_finite_difference(model, tokens):
    @functools.partial(jax.jit, compiler_options=QUICKLY)
    @jax.value_and_grad
    def result(delta):
        shifted = nn.patch(model, {"resid_post": lambda x, layer: x + delta[layer]})
        return jnp.sin(shifted(tokens, dtype=jnp.float32, remat="full").hidden).sum()

    _, gradient = result(jnp.zeros((LAYERS, 2, 12, 32)))
    step = jnp.zeros((LAYERS, 2, 12, 32)).at[1, 0, 3].set(jax.random.normal(jax.random.key(1), (32,)))
    slope = (result(1e-2 * step)[0] - result(-1e-2 * step)[0]) / 2e-2
    np.testing.assert_allclose(jnp.vdot(gradient, step), slope, rtol=2e-3)


def test_packed_rows(model, tokens):
    segments = jnp.array([[1] * 5 + [2] * 7, [1] * 12])
    run = jax.jit(lambda m, t, s: nn.capture(m, "heads")(t, segment_ids=s, dtype=jnp.float32)[1]["heads"])
    packed = run(model, tokens, segments)
    alone = captured(model, "heads", tokens[:1, 5:])["heads"]
    np.testing.assert_allclose(packed[:, :1, 5:], alone, atol=1e-5)


def test_values_of_a_split_sequence_are_in_order(model, tokens):
    """Elsewhere devices have an early and a late chunk. What bypasses the call of a patched model is refused."""

    def run(model, tokens):
        patched = nn.patch(model, {"attn": lambda x, layer: x.at[:, 3].set(0)}, layers=1)
        return nn.capture(patched, "mlp", layers=[2])(tokens, dtype=jnp.float32)[1]["mlp"]

    run = jax.jit(run, compiler_options=QUICKLY)
    layout = sharding.Layout(sharding.make_mesh(context=2, devices=jax.devices()[:2]), sharding.DP | sharding.CP_GATHER)
    with sharding.use(layout):
        split = run(model, tokens)
    np.testing.assert_allclose(split, run(model, tokens), atol=1e-5)
    patched = nn.patch(model, {"attn": lambda x, layer: 0 * x})
    with pytest.raises(ValueError, match="would leave out what nn.patch replaces"):
        pipelined_gradient(training.NextToken(), *nn.partition(patched), {"tokens": tokens}, jax.random.key(0))


def test_errors_name_what_is_missing(model, tokens):
    same, first = (lambda x, layer: x), (lambda x, layer: x[..., :1])
    for wrong, error, message in (
        (lambda: nn.capture(model, "gates"), KeyError, "no value named 'gates'"),
        (lambda: nn.capture(model, "gate", layers=9), KeyError, r"layers \[9\] have no 'gate'"),
        (lambda: nn.patch(model, {"gate": same}, layers=[0, -1, 99]), KeyError, r"layers \[-1, 99\] have no value"),
        (lambda: nn.patch(model, {"gates": same}), KeyError, "the model has no value named 'gates'"),
        (lambda: nn.patch(model, {"gate": first}), TypeError, "must keep its shape and dtype"),
    ):
        with pytest.raises(error, match=message):
            jax.eval_shape(lambda tokens, wrong=wrong: wrong()(tokens), tokens)
