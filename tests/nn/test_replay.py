"""Router replay: forced experts against transformers, own routes, drifted routes, padding, and split sequences."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxlib
from maxlib import nn, post_training, sharding
from tests.models.conformance import BASE

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

E, X, LAYERS = 6, 3, 3
EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": X, "num_hidden_layers": LAYERS}
CONFIGS = {
    "Qwen3Moe": {"num_experts": E, "head_dim": 10, "mlp_only_layers": [1], "norm_topk_prob": True},
    "DeepseekV3": {
        "n_routed_experts": E,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 6,
        "n_shared_experts": 1,
        "num_key_value_heads": 4,
        "norm_topk_prob": True,
    },
}
TOKENS = np.random.default_rng(0).integers(0, BASE["vocab_size"], (2, 8)).astype(np.int32)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a function that makes a model of transformers and ours with its weights, once each."""
    cache = {}

    def make(name):
        if name not in cache:
            torch.manual_seed(0)
            config = getattr(transformers, f"{name}Config")(**(BASE | EXPERTS | CONFIGS[name]))
            theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
            with torch.no_grad():
                for parameter in theirs.parameters():
                    parameter.normal_(0, 0.2)
            theirs.save_pretrained(directory := tmp_path_factory.mktemp(name))
            cache[name] = theirs, maxlib.from_pretrained(directory, dtype=jnp.float32)
        return cache[name]

    return make


def routes(layers=2, seed=1):
    """Returns random distinct experts for each token, `B T M X`."""
    order = np.random.default_rng(seed).permuted(np.broadcast_to(np.arange(E), (2, 8, layers, E)), axis=-1)
    return order[..., :X].astype(np.int16)


@contextlib.contextmanager
def forced(monkeypatch, ids):
    """Makes the routers of transformers choose `ids`, `B T M X`, layer after layer."""
    topk, layers = torch.topk, iter(range(ids.shape[2]))

    def choose(x, k, dim=-1, **options):
        if x.shape[-1] != E:
            return topk(x, k, dim=dim, **options)
        index = torch.tensor(ids[:, :, next(layers)].reshape(-1, X), dtype=torch.long)
        return x.gather(-1, index), index

    with monkeypatch.context() as patched:
        patched.setattr(torch, "topk", choose)
        yield
    assert next(layers, None) is None


def logits(model, **inputs):
    return model.logits(model(jnp.asarray(TOKENS), dtype=jnp.float32, **inputs).hidden)


@pytest.mark.full
@pytest.mark.parametrize("name", ["Qwen3Moe", "DeepseekV3"])
def test_forced_experts_give_the_logits_and_router_gradients_of_transformers(name, made, monkeypatch):
    theirs, ours = made(name)
    ids = routes()
    theirs.zero_grad()
    with forced(monkeypatch, ids):
        wanted = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits
    (wanted**2).sum().backward()
    params, rest = nn.partition(ours)

    @jax.jit
    def run(params, ids):
        def total(params):
            out = logits(nn.router.replay(nn.combine(params, rest), ids))
            return jnp.sum(out**2), out

        return jax.grad(total, has_aux=True)(params)

    grads, out = run(params, jnp.asarray(ids))
    np.testing.assert_allclose(out, wanted.detach(), rtol=1e-5, atol=1e-5)
    gates = [layer.mlp.gate.weight.grad.numpy() for layer in theirs.model.layers if hasattr(layer.mlp, "gate")]
    mine = [grads[path] for path in sorted(grads) if path.endswith("router.gate.w")]
    mine = np.concatenate([g.reshape(-1, *gates[0].shape) for g in mine])
    assert np.abs(np.stack(gates)).max() > 1e-2  # routers learn, though every route is forced
    np.testing.assert_allclose(mine, np.stack(gates), rtol=1e-4, atol=1e-5 * np.abs(gates).max())


def test_own_routes_change_nothing(made):
    _, ours = made("Qwen3Moe")
    output, recorded = jax.jit(lambda: nn.router.record(ours)(jnp.asarray(TOKENS), dtype=jnp.float32))()
    assert recorded.shape == (2, 8, 2, X) and recorded.dtype == jnp.int16
    replayed = jax.jit(
        lambda ids, **inputs: nn.router.replay(ours, ids)(jnp.asarray(TOKENS), dtype=jnp.float32, **inputs)
    )
    # vLLM gives a row for each layer, and none for the last token.
    every_layer, others = np.zeros((2, 2, 8, LAYERS, X), np.int16)
    every_layer[:, :, [0, 2]], others[:, :, [0, 2]] = recorded, routes()
    np.testing.assert_array_equal(replayed(every_layer).hidden, output.hidden)
    rows = nn.router.route_rows([every_layer[0, :-1], every_layer[1, :5]], length=8)
    assert (rows[1, 5:] == -1).all()
    np.testing.assert_array_equal(replayed(rows).hidden, output.hidden)
    other = replayed(others)
    assert np.abs(other.hidden - output.hidden).max() > 1e-2
    counts = np.array([[(routes()[:, :, m] == e).sum() for e in range(E)] for m in range(2)])
    np.testing.assert_array_equal(other.aux["moe/counts"], counts)  # balancing follows the replayed ids
    with pytest.raises(ValueError, match="routes must be B T M X"):
        nn.router.replay(ours, jnp.zeros((2, 8, 4, X), jnp.int16))
    with pytest.raises(ValueError, match="must fit a row of 4 tokens, got 5"):
        nn.router.route_rows([every_layer[1, :5]], length=4)


@pytest.mark.full
def test_split_sequences_replay_in_their_order(made):
    """Layers have tokens in zigzag order on a context axis; routes have not."""
    _, ours = made("Qwen3Moe")
    ids = jnp.asarray(routes())
    wanted = logits(nn.router.replay(ours, ids))
    layout = sharding.Layout(sharding.make_mesh(context=2, devices=jax.devices()[:2]), sharding.FSDP | sharding.CP_RING)
    with sharding.use(layout):
        got = jax.jit(lambda ids: logits(nn.router.replay(ours, ids)))(ids)
        recorded = jax.jit(lambda: nn.router.record(ours)(jnp.asarray(TOKENS), dtype=jnp.float32)[1])()
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(recorded, nn.router.record(ours)(jnp.asarray(TOKENS), dtype=jnp.float32)[1])


@pytest.mark.full
def test_a_policy_loss_replays_the_routes_of_its_batch(made):
    """Under remat and in microbatch order, with a gradient for a route that the router no longer prefers."""
    _, ours = made("Qwen3Moe")
    ids = routes()
    batch = {
        "tokens": jnp.asarray(TOKENS),
        "targets": jnp.roll(jnp.asarray(TOKENS), -1, axis=1).at[:, -1].set(-1),
        "advantages": jnp.ones((2, 8)),
        "segment_ids": jnp.ones((2, 8), jnp.int32),
    }
    loss = post_training.GRPO(temperature=1.0)
    params, rest = nn.partition(ours)

    def gradient(batch, remat=None, replay=False):
        def total(params):
            model = nn.combine(params, rest)
            model = nn.router.replay(model, jnp.asarray(ids)) if replay else model
            return loss(model, batch, dtype=jnp.float32, remat=remat)[0]

        return jax.jit(jax.grad(total))(params)

    wanted = gradient(batch, replay=True)
    for got in (gradient(batch | {"routed_experts": ids}), gradient(batch | {"routed_experts": ids}, remat="full")):
        for path, value in wanted.items():
            np.testing.assert_allclose(got[path], value, rtol=1e-4, atol=1e-6, err_msg=path)
    gates = [value for path, value in wanted.items() if path.endswith("router.gate.w")]
    assert all(np.abs(gate).max() > 1e-6 for gate in gates)
