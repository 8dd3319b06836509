"""The contract of sequence mixers, on a recurrence unknown to maxlib (tests/outside_recurrent.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import inference, nn, plan, sharding
from maxlib.checkpoint import Checkpointer
from tests.counting import batch, trained
from tests.nn.tiny import filled
from tests.outside_recurrent import DIM, VOCAB, GatedRecurrence, Hybrid, hybrid

ROWS, LENGTH = 8, 16


def ids(seed: int = 0, rows: int = ROWS, length: int = LENGTH):
    return jnp.asarray(np.random.default_rng(seed).integers(1, VOCAB, (rows, length)), jnp.int32)


def batches(steps: int) -> list[dict]:
    return [batch(i, VOCAB, length=LENGTH) for i in range(steps)]


@jax.jit
def hidden(model, tokens, **inputs):
    return model(tokens, **inputs, dtype=jnp.float32).hidden


def test_the_layer_is_its_formula():
    """Against a loop in float64, row by row and token by token."""
    layer = filled(lambda: GatedRecurrence(DIM, rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).normal(size=(2, 7, DIM))
    matrix = lambda einsum: np.asarray(einsum.w[...], np.float64)
    want, h = np.zeros_like(x), np.zeros((2, DIM))
    for t in range(7):
        a = 1 / (1 + np.exp(-(x[:, t] @ matrix(layer.gate).T + 2)))
        h = a * h + (1 - a) * (x[:, t] @ matrix(layer.value).T)
        want[:, t] = h @ matrix(layer.out).T
    got, _ = jax.jit(lambda layer, x: layer(x))(layer, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())


def test_packed_documents_are_those_documents_alone():
    """Slow decay, so that a state which is not reset shows."""
    model, tokens = filled(hybrid), ids(rows=1, length=16)
    run = lambda ids, segments: np.asarray(hidden(model, ids, segment_ids=jnp.asarray([segments])))
    packed = run(tokens, [1] * 6 + [2] * 6 + [0] * 4)
    for first, last in ((0, 6), (6, 12)):
        alone = run(tokens[:, first:last], [1] * 6)
        np.testing.assert_allclose(packed[:, first:last], alone, atol=2e-6 * np.abs(alone).max())
    packed_once = run(tokens, [1] * 16)
    assert (
        np.abs(packed[:, 6:12] - packed_once[:, 6:12]).max() > 1e-2 * np.abs(packed_once).max()
    )  # it does make a difference


def test_it_decodes_what_it_computes_at_once():
    """A padded prompt of two lengths, then three tokens one by one, against all at once."""
    model, tokens, lengths = filled(hybrid), ids(1, 2, 9), np.array([6, 4])
    at_once, tokens = np.asarray(hidden(model, tokens)), np.asarray(tokens)
    run = jax.jit(lambda model, tokens, valid, cache: model(tokens, valid=valid, cache=cache, dtype=jnp.float32))
    valid = np.arange(6)[None] < lengths[:, None]
    cache = model.init_cache(2, 16, dtype=jnp.float32)
    cache = run(model, np.where(valid, tokens[:, :6], 0), valid, cache).cache
    for step in range(3):
        new = np.stack([tokens[row, n + step] for row, n in enumerate(lengths)])[:, None]
        out = run(model, new, None, cache)
        cache = out.cache
        for row, n in enumerate(lengths):
            want = at_once[row, n + step]
            np.testing.assert_allclose(np.asarray(out.hidden)[row, 0], want, atol=3e-6 * np.abs(want).max())


@pytest.mark.full
def test_it_trains_and_generates():
    state, losses = trained(hybrid(), batches(80))
    assert losses[-1] < 0.5 * losses[0]
    got = inference.generate(state.model, [[3, 4, 5, 6], [20, 21]], max_new_tokens=4, dtype=jnp.float32)
    assert got == [[7, 8, 9, 10], [22, 23, 24, 25]]


def test_it_is_saved_and_restored_in_another_layout(tmp_path):
    model, other = filled(hybrid), filled(hybrid, seed=1)
    other.layers = other.layers.unstacked()
    with Checkpointer(tmp_path, groupings=nn.tree.groupings(model)) as saver:
        saver.save(2, {"params": nn.partition(model)[0]})
    fresh, rest = nn.partition(other)
    with Checkpointer(tmp_path, groupings=nn.tree.groupings(other)) as reader:
        restored = nn.combine(reader.restore(like={"params": fresh})["params"], rest)
    ours, theirs = jax.device_get((restored, model))
    for i in range(4):
        jax.tree.map(np.testing.assert_array_equal, ours.layers[i], theirs.layers[i])
    jax.tree.map(np.testing.assert_array_equal, (ours.embed, ours.norm), (theirs.embed, theirs.norm))


@pytest.mark.parametrize(
    ("rules", "degrees"),
    [
        ("fsdp_tp+cp_ring", {"fsdp": 2, "tensor": 2, "context": 2}),
        pytest.param("fsdp_tp", {"fsdp": 4, "tensor": 2}, marks=pytest.mark.full),
        *(
            pytest.param(f"fsdp+{kind}", {"fsdp": 2, "context": 4}, marks=pytest.mark.full)
            for kind in ("cp_ring", "cp_gather")
        ),
    ],
)
def test_eight_devices_are_one(rules, degrees):
    """A sequence that devices share keeps its order, though attention alone would have it in zigzag."""
    rules, tokens = sharding.preset(rules), ids()
    mesh = sharding.make_mesh(**degrees)
    model = filled(hybrid)
    want = hidden(model, tokens)
    layout = sharding.Layout(mesh, rules)
    placed = jax.device_put(model, sharding.shardings(model, layout))
    with sharding.use(layout):
        got = jax.jit(lambda model, tokens: model(tokens, dtype=jnp.float32).hidden)(placed, tokens)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_zigzag_order_is_refused():
    layout = sharding.Layout(sharding.make_mesh(context=8), sharding.CP_RING)
    model = filled(hybrid)
    assert not model.layers.is_reorderable

    class Forced(Hybrid):
        def enter(self, x, *, cache=None, **inputs):
            x, ctx = super().enter(x, cache=cache, **inputs)
            return nn.decoder._context.zigzag_shard(x, ctx)

    model.__class__ = Forced
    with sharding.use(layout), pytest.raises(ValueError, match="zigzag order, but GatedRecurrence must get them in"):
        jax.eval_shape(lambda: model(ids()))


def test_a_state_cannot_be_quantized():
    with pytest.raises(ValueError, match="GatedRecurrence cannot store a state in int8"):
        filled(hybrid).init_cache(2, 16, dtype=jnp.int8)
    with pytest.raises(ValueError, match="GatedRecurrence cannot store a state in int8"):
        inference.Generator(filled(hybrid), cache_dtype=jnp.int8).generate([[1, 2]], max_new_tokens=2)


def test_a_state_cannot_be_rewound():
    class Drafting(Hybrid):
        def init_draft_cache(self, batch, capacity, *, dtype=jnp.bfloat16):
            return self.init_cache(batch, capacity, dtype=dtype)

        def draft(self, hidden, tokens, *, cache, valid=None):
            return hidden, cache

    model = filled(hybrid)
    model.__class__ = Drafting
    with pytest.raises(ValueError, match="only keep a state .*State.* cannot be removed"):
        inference.LocalEngine(model, num_drafts=1, drafter="mtp")


def test_caches_answer_for_themselves():
    model = filled(hybrid)
    caches = [model.layers[i].init_cache(1, 8) for i in range(2)]
    assert [nn.cache.can_rewind(cache) for cache in caches] == [False, True]
    assert not nn.cache.can_rewind({"h": jnp.zeros(2)})  # nobody answers: not to be relied on
    assert nn.describe.cache_kinds(model) == ("full", "state")
    assert nn.describe.attention_kind(model) == "GatedRecurrence, MHA"


def test_plans_ask_the_layer():
    """With a sequence over 4 devices: the attention's ring, and the gathers that the recurrence states."""
    base = {"target": "h100x4", "sequence": 64, "layout": sharding.Layout({"context": 4}, sharding.CP_RING)}
    plans = [plan.estimated(plan.Job(model=make, **base)) for make in (hybrid, lambda: hybrid(attention=False))]
    of = lambda estimate: {item.kind: item.bytes for item in estimate.costs.collectives if "context" in item.axes}
    mixed, alone = map(of, plans)
    tokens, passes = 64 / 4 * 4, 3  # a batch of one row for each device, cut over four; remat is full
    gather = (passes - 1) * tokens * 4 * DIM * 2
    assert mixed["collective-permute"] > 0 and "collective-permute" not in alone
    assert alone["all-gather"] - mixed["all-gather"] == pytest.approx(2 * gather)
    assert plans[0].peak > 0


def test_implementations_are_chosen_by_op():
    model = filled(hybrid)
    new = nn.mixer.with_implementation(model, "scan", op="recurrence")
    assert [new.layers[i].mixer.implementation for i in range(4)] == ["scan", None, "scan", None]
    assert nn.with_attention(model, "chunked").layers[1].mixer.implementation == "chunked"
    with pytest.raises(ValueError, match="no layer .* whose op is 'attention'"):
        nn.with_attention(filled(lambda: hybrid(attention=False)), "chunked")
