"""Phi-3 against transformers: fused projections, a window, LongRoPE on both sides of its switch, partial rotation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxlib
from maxlib.models import phi3
from maxlib.weights import HFConfig
from tests.models import parity
from tests.models.conformance import BASE, Conformance, assert_close

ORIGINAL = 64
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 5.0, 30.0],
    "partial_rotary_factor": 0.75,
}
WHOLE = {"short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [2.0, 5.0, 20.0, 30.0], "partial_rotary_factor": 1.0}


class TestPhi3(Conformance):
    family = "phi3"
    config = "Phi3Config"
    # transformers' embeddings give the padding token no gradient.
    base = BASE | {"pad_token_id": None, "original_max_position_embeddings": 16, "rope_parameters": LONG}
    cases = {
        "longer": {"sliding_window": 5, "vocab_size": 53},  # than the first training, with 24 tokens
        "shorter": {  # and longer than it with the 520 of the export
            "original_max_position_embeddings": ORIGINAL,
            "rope_parameters": LONG | WHOLE,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    }
    windows = {"longer": {5}}
    matters = {
        "sliding_window": 6,
        "rms_norm_eps": 0.1,
        "max_position_embeddings": 4096,
        "rope_parameters": LONG | {"original_max_position_embeddings": 16, "long_factor": [2.0, 9.0, 30.0]},
    }
    refused = {"original_max_position_embeddings": 32}


@functools.partial(jax.jit, compiler_options=parity.QUICK)
def step(model, tokens, cache):
    out = model(tokens, cache=cache, dtype=jnp.float32)
    return model.logits(out.hidden), out.cache


@pytest.mark.full
def test_factors_are_those_of_the_text_so_far_or_of_a_fixed_length(tmp_path):
    """With `rope_length` beyond the first training's length a cache has the long factors from its first token on."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    directory = parity.directory(tmp_path, parity.golden("phi3")["shorter"])
    model, tokens = maxlib.from_pretrained(directory), parity.tokens(61, ORIGINAL + 8)[:1]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens).long()).logits.numpy()
        short = theirs(torch.from_numpy(tokens[:, :ORIGINAL]).long()).logits.numpy()
    cache = model.init_cache(1, ORIGINAL + 8, dtype=jnp.float32, rope_length=ORIGINAL + 8)
    first, cache = step(model, tokens[:, :ORIGINAL], cache)
    rest, _ = step(model, tokens[:, ORIGINAL:], cache)
    assert_close(np.concatenate([first, rest], axis=1), want, 1e-4)
    assert np.abs(short - want[:, :ORIGINAL]).max() > 0.1 * want.std()
    first, _ = step(model, tokens[:, :ORIGINAL], model.init_cache(1, 2 * ORIGINAL, dtype=jnp.float32))
    assert_close(first, short, 1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings must be given beside"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "must have the scaling LongRopeScaling"),
    ],
)
def test_other_ropes_are_refused(change, message):
    fields = {"model_type": "phi3"} | TestPhi3.base | change
    with pytest.raises(ValueError, match=message):
        phi3.FIELDS.read(HFConfig(fields))
