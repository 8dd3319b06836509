"""Gemma 4's text against transformers: shared keys, keys as values, a vector per layer, experts beside the MLP.

`test_gemma4_images.py` has its images, `test_gemma4_audio.py` its sound.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxlib
from maxlib import nn, sharding, training
from maxlib.models import gemma4
from maxlib.models._gemma4_config import GLOBAL, LOCAL, OWN, SHARES, TAKES
from maxlib.training._pipelined_gradient import pipelined_gradient
from maxlib.weights import HFConfig
from tests.models import parity
from tests.models.conformance import BASE, Conformance, assert_close

ROPES = {
    GLOBAL: {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    LOCAL: {"rope_type": "default", "rope_theta": 1e4},
}
SMALL = {
    "pad_token_id": None,  # torch gives the row of padding no gradient
    "head_dim": 8,
    "global_head_dim": 12,
    "sliding_window": 6,
    "final_logit_softcapping": 3.0,
    "rope_parameters": ROPES,
    "vocab_size_per_layer_input": 61,
    "hidden_size_per_layer_input": 0,
}
E_TYPES = [LOCAL, GLOBAL] * 4 + [LOCAL, LOCAL, GLOBAL] * 2


class TestGemma4(Conformance):
    family = "gemma4"
    config = "Gemma4TextConfig"
    base = BASE | SMALL
    cases = {
        # The last six layers take the keys of layers 6 and 7, and repeat every three; the first six every two.
        "shared": {
            "num_hidden_layers": 14,
            "layer_types": E_TYPES,
            "num_kv_shared_layers": 6,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 10,
        },
        "keys_as_values": {
            "num_hidden_layers": 3,
            "layer_types": [LOCAL, LOCAL, GLOBAL],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "sliding_window": 4,
        },
        "experts": {
            "num_hidden_layers": 4,
            "layer_types": [LOCAL, GLOBAL] * 2,
            "enable_moe_block": True,
            "num_experts": 12,
            "top_k_experts": 3,
            "moe_intermediate_size": 14,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    }
    windows = {"shared": {6, 24}, "keys_as_values": {4, 24}, "experts": {6, 24}}
    matters = {
        "sliding_window": 5,
        "final_logit_softcapping": 1.0,
        "rms_norm_eps": 0.1,
        "rope_parameters": ROPES | {GLOBAL: ROPES[GLOBAL] | {"partial_rotary_factor": 0.25}},
    }
    refused = {"num_kv_shared_layers": 13, "per_layer_config": {"0": {"head_dim": 12}}}

    test_both_spellings_are_read = None  # there is one: transformers 4 has no Gemma 4


def made(tmp_path, name: str, **changes):
    """A case of the golden file and our model of it, its config changed."""
    case = parity.golden("gemma4")[name]
    case = case | {"config": case["config"] | changes}
    return case, maxlib.from_pretrained(parity.directory(tmp_path / name, case))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"layer_types": [GLOBAL, LOCAL], "num_hidden_layers": 2}, "layer_types must end with full_attention"),
        ({"layer_types": [GLOBAL, LOCAL, GLOBAL], "num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"enable_moe_block": True}, "num_experts must be given"),
    ],
)
def test_configs_that_cannot_be_are_refused_by_name(changes, error):
    config = parity.golden("gemma4")["keys_as_values"]["config"]
    config = {name: value for name, value in config.items() if name != "per_layer_config"}
    with pytest.raises(ValueError, match=error):
        gemma4.FIELDS.read(HFConfig(config | {"num_hidden_layers": 3} | changes))


@pytest.mark.full
def test_layers_of_the_presets_are_scanned():
    """E2B: ten layers with keys in two periods, five among which two share, twenty that take them in four."""
    kinds = gemma4.PRESETS["gemma4-e2b"].kinds
    assert [role for _, role in kinds] == [OWN] * 13 + [SHARES] * 2 + [TAKES] * 20
    assert [i for i, (kind, _) in enumerate(kinds) if kind == GLOBAL] == [4, 9, 14, 19, 24, 29, 34]
    make = lambda kind, rngs: nnx.Module()
    groupings = {name: nn.Stack(make, cfg.kinds, rngs=nnx.Rngs(0)).grouping for name, cfg in gemma4.PRESETS.items()}
    assert groupings == {
        "gemma4-e2b": ((5, 2), (5, 1), (5, 4)),
        "gemma4-e4b": ((6, 3), (6, 1), (6, 3)),
        "gemma4-12b": ((6, 8),),
        "gemma4-26b-a4b": ((6, 5),),
        "gemma4-31b": ((6, 10),),
    }


def test_layers_that_take_keys_have_none_and_no_cache(tmp_path):
    """Releases store some for them."""
    case = parity.golden("gemma4")["shared"]
    ours, theirs = "model.layers.7.self_attn.", "model.layers.13.self_attn."
    extra = {theirs + name: np.ones(case["shapes"][ours + name], np.float32) for name in
             ("k_proj.weight", "v_proj.weight", "k_norm.weight")}  # fmt: skip
    assert not extra.keys() & case["shapes"].keys()
    model = maxlib.from_pretrained(parity.directory(tmp_path, case, **extra))
    assert isinstance(model.layers[13].attn, nn.SharedKVAttention)
    # Layers 0 to 5 are stored in two slots, 6 and 7 alone: their caches serve the other six.
    assert len(nn.cache.layer_caches(model.init_cache(2, 24).layers)) == 4


@pytest.mark.full
@pytest.mark.parametrize(("field", "value"), [("top_k_experts", 2), ("num_experts", 6), ("attention_k_eq_v", False)])
def test_fields_of_experts_matter(tmp_path, field, value):
    case, model = made(tmp_path, "experts")
    before = parity.logits(model, case["tokens"])
    try:
        changed = made(tmp_path / "changed", "experts", **{field: value})[1]
    except ValueError:
        return  # the files have other sizes
    assert np.abs(parity.logits(changed, case["tokens"]) - before).max() > 1e-3 * before.std()


@pytest.mark.full
@pytest.mark.parametrize("remat", ["full", "qkv"])
def test_recomputed_layers_have_the_same_gradients(tmp_path, remat):
    """Keys that other layers take get the gradients of all of them."""
    case, model = made(tmp_path, "shared")
    params, rest = nn.partition(model)

    def loss(params, remat):
        out = nn.combine(params, rest)(jnp.asarray(case["tokens"]), dtype=jnp.float32, remat=remat)
        return jnp.sin(out.hidden).sum()

    want, got = (jax.jit(jax.grad(loss), static_argnums=1)(params, how) for how in (None, remat))
    for path, gradient in want.items():
        np.testing.assert_allclose(got[path][...], gradient[...], atol=1e-5 * float(jnp.abs(gradient[...]).max()))


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["CP_RING", "CP_GATHER"])
def test_a_sequence_over_devices_equals_one_device(tmp_path, strategy):
    """Tokens stand in another order there, and with them shared keys and the vectors of layers."""
    case = parity.golden("gemma4")["shared"]
    layout = sharding.Layout(
        sharding.make_mesh(data=2, context=4), sharding.DP | getattr(sharding, strategy) | {"vocab": None}
    )
    model = maxlib.from_pretrained(parity.directory(tmp_path, case), layout=layout)
    with sharding.use(layout):
        assert_close(parity.logits(model, case["tokens"]), case["logits"], 1e-4)


@pytest.mark.full
def test_pipelines_equal_one_device_or_refuse_vectors_of_layers(tmp_path):
    layout = sharding.Layout(
        sharding.make_mesh(data=4, stage=2), sharding.DP | sharding.Pipeline("stage", microbatches=2)
    )
    loss = training.NextToken()
    pipelined = functools.partial(pipelined_gradient, loss, dtype=jnp.float32)

    @jax.jit
    def by_autodiff(params, rest, batch):
        total = lambda params: loss(nn.combine(params, rest), batch, dtype=jnp.float32)
        grads, stats = jax.grad(total, has_aux=True)(params)
        return jax.tree.map(lambda g: g / stats.num_targets, grads)

    for name in ("experts", "shared"):
        case, model = made(tmp_path, name)
        tokens = jnp.asarray(np.tile(case["tokens"], (4, 1)))
        batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}
        params, rest = nn.partition(model)
        with sharding.use(layout):
            placed = maxlib.from_pretrained(tmp_path / name, layout=layout)
            if name == "shared":
                with pytest.raises(ValueError, match="layer_inputs are not supported in a pipeline"):
                    parity.logits(placed, np.asarray(batch["tokens"]))
                with pytest.raises(ValueError, match="layers of Gemma4 take token ids"):
                    pipelined(*nn.partition(placed), batch, jax.random.key(0))
                continue
            assert_close(parity.logits(placed, np.asarray(batch["tokens"]))[:2], case["logits"], 1e-4)
            got, _, _ = jax.jit(pipelined)(*nn.partition(placed), batch, jax.random.key(0))
        want = by_autodiff(params, rest, batch)
        for path, gradient in want.items():
            scale = float(jnp.abs(gradient[...]).max())
            np.testing.assert_allclose(got[path][...], gradient[...], atol=1e-4 * scale, err_msg=path)
