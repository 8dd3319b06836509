"""Mixtral against transformers: experts one by one in the files, with and without a window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxlib
from maxlib import nn
from tests.models import parity
from tests.models.conformance import BASE, YARN, Conformance


class TestMixtral(Conformance):
    family = "mixtral"
    config = "MixtralConfig"
    base = BASE | {"intermediate_size": 12, "num_local_experts": 6}
    cases = {
        "windowed": {"sliding_window": 5, "head_dim": 10, "num_experts_per_tok": 3, "vocab_size": 53},
        "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 8, "rope_parameters": YARN},
    }
    rules = Conformance.rules | {"expert": "data"}
    windows = {"windowed": {5}}
    matters = {
        "sliding_window": 6,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }


@pytest.mark.full
def test_balance_loss_is_that_of_transformers(tmp_path):
    """But for the factor: theirs is `top_k` times as large. It takes all layers together, so there is one here."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**TestMixtral.base | {"num_hidden_layers": 1, "initializer_range": 0.5})
    theirs, tokens = transformers.MixtralForCausalLM(config).eval(), parity.tokens(61, 24)
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens).long(), output_router_logits=True).aux_loss.item()
    theirs.save_pretrained(tmp_path)
    model = maxlib.from_pretrained(tmp_path, losses=(nn.router.SwitchBalance(1.0),))
    aux = jax.jit(lambda model, tokens: model(tokens, dtype=jnp.float32).aux)(model, tokens)
    np.testing.assert_allclose(2 * aux["loss/moe_balance"], [want], rtol=1e-5)
    assert want > 2.1  # 2 when even
