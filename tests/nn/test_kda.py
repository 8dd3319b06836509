"""What only Kimi delta attention has, and the latent attention without positions of its family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import inference, nn, ops, sharding
from maxlib.models import kimi_linear
from maxlib.sharding.strategies import SplitSequence
from tests.nn.recurrences import DIM, KIMI, X, layer


def tiny() -> kimi_linear.Config:
    latent = dict(kv_rank=8, nope_dim=6, shared_dim=4, v_dim=6)
    sizes = dict(vocab=40, num_layers=4, dim=DIM, mlp_dim=24, num_heads=2, **latent)
    experts = dict(num_dense=1, expert_dim=8, num_experts=4, num_shared=1, top_k=2, routed_scale=1.5)
    return kimi_linear.Config(**sizes, **experts, delta_heads=2, delta_dim=8, conv_width=4)


def test_a_convolution_of_one_input_is_refused():
    with pytest.raises(ValueError, match="conv_width must be at least 2"):
        nn.KimiDeltaAttention(DIM, **KIMI, conv_width=1, rngs=nnx.Rngs(0))


@pytest.mark.full
def test_generation_is_the_argmax_of_the_whole():
    """Prompts of different lengths, past the border of a chunk, at once and on the slots of an engine."""
    model = jax.jit(lambda: kimi_linear.KimiLinear(tiny(), rngs=nnx.Rngs(0)))()
    prompts = [np.random.default_rng(i).integers(0, 40, n).tolist() for i, n in enumerate((70, 3, 12))]
    got = inference.generate(model, prompts, max_new_tokens=6, dtype=jnp.float32)
    logits = jax.jit(lambda tokens: model.logits(model(tokens, dtype=jnp.float32).hidden))
    for prompt, new in zip(prompts, got, strict=True):
        tokens = list(prompt)
        for token in new:
            assert int(logits(jnp.asarray([tokens]))[0, -1].argmax()) == token
            tokens.append(token)
    engine = inference.LocalEngine(model, slots=2, dtype=jnp.float32)
    assert [one.tokens for (one,) in engine.generate(prompts, max_new_tokens=6)] == got


def test_traffic_is_that_of_transitions_states_and_the_last_inputs():
    """Of each device, in float32: N transitions and states [H, H]; and three inputs of the convolution."""
    split = SplitSequence(sharding.CP_RING, {"context": 4}, parts=4, heads=2, rows=3, tokens=20, width=2, passes=3)
    whole = 3 * 4 * (4 * 4 * (8 * 8 + 8 * 8) + 2 * 3 * 3 * 4 * 8) / 2
    assert layer("kimi").traffic(split) == {"all-gather": 2 * whole, "reduce-scatter": whole}


def test_latent_attention_without_a_rope_has_no_positions():
    """The same keys in another order give the last query the same result; a rope must have the shared part's size."""
    sizes = dict(num_heads=2, kv_rank=8, nope_dim=6, v_dim=6)
    attn = jax.jit(lambda: nn.MLA(DIM, **sizes, rope=None, shared_dim=4, rngs=nnx.Rngs(0)))()
    turned = np.concatenate([X[:, :-1][:, ::-1], X[:, -1:]], axis=1)
    call = jax.jit(lambda attn, x: attn(x)[0][:, -1])
    want = call(attn, X)
    np.testing.assert_allclose(call(attn, turned), want, atol=2e-5 * np.std(want))
    for wrong in ({"rope": None}, {"rope": ops.Rope(6), "shared_dim": 4}):
        with pytest.raises(ValueError, match="MLA needs rope=, or without one shared_dim="):
            nn.MLA(DIM, **sizes, **wrong, rngs=nnx.Rngs(0))
