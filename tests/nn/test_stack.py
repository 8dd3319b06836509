"""A stack's groups only affect storage, not results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops, sharding
from maxlib.models import llama
from maxlib.nn.stack._storage import find_groups, number_kinds
from tests.nn.tiny import LLAMA, filled

# Values in which equal layers must agree: none, and some that make groups of all kinds.
GROUPINGS = {
    "aaaaaaa": [(1, 7)],
    "abcdcdc": [(2, 1), (2, 2), (1, 1)],
    "abcdefg": [(7, 1)],
    "aabcdcd": [(1, 2), (1, 1), (2, 2)],
}


class Layer(nnx.Module):
    """Mixes in its own weights, counts calls in its cache, and may report or have more weights."""

    def __init__(self, kind: str = "reports", *, rngs):
        self.proj = nn.Einsum("...D,ED->...E", (4, 4), ("embed", "mlp"), rngs=rngs)
        self.more = nn.Einsum("...D,ED->...E", (4, 4), ("embed", "mlp"), rngs=rngs) if kind == "more" else None
        self.reports = kind == "reports"

    def __call__(self, x, ctx, cache):
        h = jnp.tanh(self.proj(x)) + ctx
        aux = {"load": jnp.mean(h)} if self.reports else {}
        x = x + h if self.more is None else self.more(x + h)
        return x, None if cache is None else cache + jnp.sum(x), aux

    def init_cache(self, batch, capacity, dtype):
        return jnp.zeros((), dtype)


ALIKE = ["reports"] * 7
KINDS = [ALIKE, ["silent", "reports"] * 3 + ["silent"], ["more"] * 3 + ["reports"] * 4]


def build(kinds=ALIKE, groups="aaaaaaa"):
    """Builds layers of these kinds, in groups as if letters were kinds."""
    make = lambda kind, rngs: Layer(kind[0], rngs=rngs)
    return nn.Stack(make, list(zip(kinds, groups, strict=True)), rngs=nnx.Rngs(3))


def built(groups):
    """Those layers with any values, at once."""
    return filled(lambda: build(groups=groups))


@pytest.mark.parametrize("kinds", [*(pytest.param(k, marks=pytest.mark.full) for k in KINDS[:2]), KINDS[2]], ids=str)
def test_groups_change_neither_values_nor_results(kinds):
    x = jax.random.normal(jax.random.key(0), (2, 3, 4))
    results = []
    for groups in GROUPINGS:
        stack = jax.jit(lambda groups=groups: build(kinds, groups))()
        y, cache, aux = jax.jit(lambda stack: stack(x, 0.1, stack.init_cache(2, 8, jnp.float32)))(stack)
        caches = [float(stack.cache_of(i, cache)) for i in range(7)]
        weights = [np.asarray(stack[i].proj.w[...]) for i in range(7)]
        results.append((weights, np.asarray(y), np.array(caches), aux))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0][0], other[0])
        close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
        jax.tree.map(close, results[0][1:], other[1:])


@pytest.mark.parametrize("groups", GROUPINGS)
def test_where_points_at_each_layer(groups):
    stack = built(groups)
    assert stack.grouping == (*GROUPINGS[groups],)
    leaves = {path: v.get_value() for path, v in nn.variables(stack).items()}
    for i in range(7):
        path, row = stack.where(i)
        leaf = leaves[f"{path}.proj.w"]
        np.testing.assert_array_equal(leaf if row is None else leaf[row], stack[i].proj.w[...])


def test_aux_rows_come_in_layer_order():
    stack = filled(lambda: build(KINDS[1]))
    load = lambda stack: stack(jnp.ones((1, 1, 4)), 0.0)[2]["load"]
    scanned, alone = jax.jit(lambda stack: (load(stack), load(stack.unstacked())))(stack)
    np.testing.assert_allclose(scanned, alone, rtol=1e-6)
    assert scanned.shape == (3,)


@pytest.mark.parametrize("jit", [True, False])
def test_initial_values_may_depend_on_the_number(jit):
    def scaled(kind, rngs, i):
        layer = Layer(rngs=rngs)
        layer.proj.w.set_value(layer.proj.w[...] * 0.5**i)
        return layer

    make = lambda: (nn.Stack(scaled, "abbbcbb", numbered=True, rngs=nnx.Rngs(3)), build())
    got, plain = jax.jit(make)() if jit else make()
    for i in range(7):
        np.testing.assert_allclose(got[i].proj.w[...], plain[i].proj.w[...] * 0.5**i, rtol=1e-6)


def test_a_layer_is_built_once_for_each_slot():
    """Nothing is compared, so attributes that never equal each other do not matter."""
    made = []

    class WithFunction(Layer):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            self.act = lambda x: x

    def make(kind, rngs):
        made.append(kind)
        return WithFunction(rngs=rngs)

    stack = jax.jit(lambda: nn.Stack(make, "abcbcbcd", rngs=nnx.Rngs(3)))()
    assert made == ["a", "b", "c", "d"] and stack.grouping == ((1, 1), (2, 3), (1, 1))
    assert nn.unstack(stack).restacked().grouping == stack.grouping


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ("", []),
        ("f", [(1, 1)]),
        ("ffffff", [(1, 6)]),
        ("sfsfsf", [(2, 3)]),
        ("sfsfs", [(2, 2), (1, 1)]),
        ("sssfsssfsss", [(4, 2), (3, 1)]),
        ("ffssss", [(1, 2), (1, 4)]),
        ("dsfsfsf", [(1, 1), (2, 3)]),
        ("ddcsfsfsf", [(1, 2), (1, 1), (2, 3)]),
        ("ssfssfss", [(3, 2), (2, 1)]),
        ("sssfssfssf", [(1, 1), (3, 3)]),
        ("sssssfsssssf", [(6, 2)]),  # not [s] x 5, f, [s] x 5, f: a pipeline could split five layers only
        ("abcd", [(4, 1)]),
        ("ababababcdcd", [(2, 4), (2, 2)]),
        ("aabaabABcdcdcd", [(3, 2), (2, 1), (2, 3)]),
        ("abababacac", [(2, 3), (4, 1)]),
        ("aabbccd", [(1, 2), (1, 2), (1, 2), (1, 1)]),
        ("sssssf" * 30 + "ss", [(6, 30), (2, 1)]),
    ],
)
def test_groups_trace_few_layers(kinds, groups):
    assert find_groups(number_kinds(kinds)) == (*groups,)


@pytest.mark.parametrize(
    ("kinds", "staged"), [("abc", None), ("aaab", 0), ("aabbb", 1), ("aabb", 1), ("aaaabcbc", 1), ("aaaaabcbc", 0)]
)
def test_a_pipeline_splits_the_group_with_the_most_layers(kinds, staged):
    stack = jax.eval_shape(lambda: nn.Stack(lambda _, rngs: Layer(rngs=rngs), kinds, rngs=nnx.Rngs(3)))
    assert stack.staged == staged
    names = [nn.stack.layer_axis(slots[0]) for slots in stack.groups]
    assert [n for n, name in enumerate(names) if name == "layers"] == ([] if staged is None else [staged])
    assert {*names} <= {"layers", "unstaged_layers", None}


@pytest.mark.parametrize(
    "remat",
    ["full"]
    + [pytest.param(r, marks=pytest.mark.full) for r in ("dots", ("h",), jax.checkpoint_policies.everything_saveable)],
)
def test_remat_changes_no_gradient(remat):
    stack, x = built("abcbcbc"), jnp.ones((2, 3, 4))
    loss = lambda stack, remat: jnp.sum(stack(x, 0.1, remat=remat)[0] ** 2)
    want, got = jax.jit(lambda stack: [jax.grad(loss)(stack, policy) for policy in (None, remat)])(stack)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(a).max()), want, got)


def test_on_gpus_layers_stay_as_they_lie_and_nothing_else_changes(monkeypatch):
    mesh = sharding.make_mesh(fsdp=4, data=2)
    layout = sharding.Layout(mesh, sharding.FSDP)
    with sharding.use(layout):
        stack, x = built("abcbcbc"), jnp.ones((8, 3, 4))
        stack = jax.device_put(stack, sharding.shardings(stack, layout))
        gradient = lambda stack: jax.grad(lambda stack: jnp.sum(stack(x, 0.1, remat="full")[0] ** 2))(stack)
        want = jax.jit(gradient)(stack)
        monkeypatch.setattr("maxlib.nn.stack._run.current_device", lambda: ("gpu", "NVIDIA H100"))
        lowered = jax.jit(lambda stack: gradient(stack)).lower(stack)
        assert "LayoutConstraint" in lowered.as_text()
        jax.tree.map(np.testing.assert_array_equal, want, lowered.compile()(stack))


def test_unknown_remat_is_refused():
    with pytest.raises(ValueError, match="remat must be None, one of"):
        built("aaaaaaa")(jnp.ones((1, 1, 4)), 0.0, remat="most")


def test_other_groups_are_a_stack_of_its_own():
    stack = built("abccccc")
    before = [np.asarray(stack[i].proj.w[...]) for i in range(7)]
    for other in (stack.unstacked(), stack.restacked(), stack.restacked("abcdddd"), nn.unstack(stack)):
        other._layer(0).proj.w.set_value(jnp.zeros((4, 4)))
        if other.where(0)[1] is None:
            other[0].proj.w.set_value(jnp.zeros((4, 4)))
        for i in range(7):
            np.testing.assert_array_equal(stack[i].proj.w[...], before[i])


def test_a_part_without_the_axis_of_layers_is_named():
    """Without the check, `lax.scan` reports sizes alone."""
    stack, x = built("abcbcbc"), jnp.ones((1, 2, 4))
    stack.groups[1][1].proj = stack[0].proj
    with pytest.raises(
        ValueError, match=r"1.proj.w of a scanned block lacks the axis of layers, of size 3: .*unstacked"
    ):
        stack(x, 0.1)


@pytest.mark.parametrize("width", [8, 4])
def test_layers_that_were_changed_are_not_scanned_with_others(width):
    alone = build().unstacked()
    alone[0].proj = nn.Einsum("...D,ED->...E", (width, 4), ("embed", "mlp"), rngs=nnx.Rngs(0))
    alone[0].reports = width == 8
    assert alone.restacked().grouping == ((1, 1), (1, 6))


def test_layers_of_other_kinds_are_not_scanned_together():
    """Even if they are equal, as layers with and without `layer_inputs` are."""
    stack = nn.Stack(lambda _, rngs: Layer(rngs=rngs), "aaabbbb", rngs=nnx.Rngs(0))
    assert stack.unstacked().restacked().grouping == stack.grouping == ((1, 3), (1, 4))


class Adds(nnx.Module):
    """Adds what it is given for itself, and hands on how much that was so far, beside x."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(()), axes=())

    def __call__(self, x, ctx, cache, added):
        x, total = x
        return (x + added * self.w[...], total + added.max()), cache, {}


@pytest.mark.parametrize("kinds", GROUPINGS)
def test_layers_get_their_own_row_and_carry_more_than_x(kinds):
    rows = jnp.asarray(np.arange(7.0) * 10.0 ** np.arange(7), jnp.float32)[:, None] * jnp.ones((7, 3))

    @jax.jit
    def run():
        stack = nn.Stack(lambda kind, rngs: Adds(), kinds, rngs=nnx.Rngs(0))
        x = jnp.zeros(3), jnp.zeros(())
        return [stack(x, layer_inputs=rows, remat=remat)[0] for remat in (None, "full")]

    for x, total in run():
        np.testing.assert_array_equal(x, np.full(3, 6543210.0))
        assert float(total) == 6543210


def test_rows_for_some_layers_of_a_scan_are_refused():
    stack = nn.Stack(lambda kind, rngs: Adds(), "aaaaabb", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="layer_inputs have 3 rows, for the first of the layers 0 to 4, which are"):
        stack((jnp.zeros(3), jnp.zeros(())), layer_inputs=jnp.ones((3, 3)))


class Shares(nnx.Module):
    """A layer that shares twice its x, adds what was shared, or neither."""

    def __init__(self, kind: str):
        self.w = nnx.Param(jnp.full((), 0.5), axes=())
        self.makes, self.takes = kind == "makes", kind == "takes"

    def __call__(self, x, ctx, cache):
        y = jnp.sin(x.x * self.w[...]) + (x.shared["twice"] * x.x if self.takes else 0)
        return x.updated(y, **({"twice": 2 * x.x} if self.makes else {})), cache, {}


def test_what_a_layer_shares_reaches_all_later_ones_and_their_gradients_reach_it():
    def run(unstacked, remat, x):
        kinds = ["first", "first", "makes", "other", *["takes"] * 4]
        stack = nn.Stack(lambda kind, rngs: Shares(kind), kinds, rngs=nnx.Rngs(0))
        stack = stack.unstacked() if unstacked else stack
        out = stack(nn.stack.Carry(x, {}), remat=remat)[0]
        return (out.x + out.shared["twice"]).sum()

    x = jnp.linspace(0.1, 1, 3)
    both = lambda unstacked, remat: jax.jit(jax.value_and_grad(lambda x: run(unstacked, remat, x)))(x)
    want = both(True, None)
    for remat in (None, "full"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), both(False, remat), want)


def test_what_layers_share_is_stored_once_for_the_backward_pass():
    """Scanned layers read it as a constant: no residual has it once for each layer."""
    kinds = ["first", "makes", "other", "another", *["takes"] * 8]
    stack = nn.Stack(lambda kind, rngs: Shares(kind), kinds, rngs=nnx.Rngs(0))
    loss = lambda x, remat: stack(nn.stack.Carry(x, {}), remat=remat)[0].x.sum()
    for remat, rows in ((None, 3), ("full", 1)):  # per layer: x and what sin and the product need; x alone
        _, pull = jax.vjp(lambda x, remat=remat: loss(x, remat), jnp.linspace(0.1, 1, 3))
        stacked = [a for a in jax.tree.leaves(pull) if getattr(a, "shape", ()) == (8, 3)]
        assert 1 <= len(stacked) <= rows, [a.shape for a in stacked]


def test_a_scanned_layer_may_not_share():
    stack = nn.Stack(lambda kind, rngs: Shares("makes"), 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="scanned layer shares twice"):
        stack(nn.stack.Carry(jnp.ones(3), {}))


def test_a_layer_taken_out_of_a_scan_refuses_changes():
    """Its arrays are copies, so that a change would be lost."""
    stack = nn.Stack(lambda _, rngs: nn.GatedMLP(4, 8, rngs=rngs), 3, rngs=nnx.Rngs(0))
    layer, norm = stack[1], nn.RMSNorm(4)
    for change in (
        lambda: layer.up.w.set_value(jnp.zeros(layer.up.w.shape)),
        lambda: layer.up.w.__setitem__(..., 0.0),
        lambda: setattr(layer, "up", norm),
        lambda: setattr(layer.up, "extra", norm),
    ):
        with pytest.raises(ValueError, match=r"layer 1 was read from .* in `nn.unstack\(model\)`"):
            change()
    copy = jax.tree.map(lambda a: a, layer)
    copy.up.w[...] = jnp.zeros(copy.up.w.shape)
    assert jax.tree.structure(copy) == jax.tree.structure(layer) and not copy.up.w[...].any() and layer.up.w[...].any()
    alone = stack.unstacked()
    alone[1].up.w[...] = jnp.zeros(copy.up.w.shape)
    assert not alone[1].up.w[...].any()


def test_a_part_of_a_scanned_block_without_arrays_is_that_of_all_its_layers():
    stack = filled(lambda: nn.Stack(lambda _, rngs: llama.Block(LLAMA, rngs=rngs), 3, rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).normal(size=(1, 9, LLAMA.dim)).astype(np.float32)
    run = jax.jit(lambda stack, x: stack(x, nn.make_context(1, 9))[0])
    before, window = run(stack, x), ops.Causal() & ops.SlidingWindow(2)
    alone = stack.unstacked()
    for layer in alone:
        layer.attn.mask = window
    stack.groups[0][0].attn.mask = window
    windowed = run(stack, x)
    np.testing.assert_allclose(windowed, run(alone, x), atol=1e-5)
    assert np.abs(windowed - before).max() > 1e-2
    caches = jax.eval_shape(lambda: stack.init_cache(1, 9))
    assert [cache.kind for cache in nn.cache.layer_caches(caches)] == ["ring"]


def test_keys_are_those_of_the_numbers_of_layers():
    """Whatever is scanned, and with or without jit."""
    make = lambda kind, rngs: Layer(rngs=rngs)
    first, second = nn.Stack(make, 3, rngs=nnx.Rngs(3)), nn.Stack(make, "abb", rngs=nnx.Rngs(3))
    jitted = jax.jit(lambda: nn.Stack(make, "abc", rngs=nnx.Rngs(3)))()
    for i in range(3):
        np.testing.assert_array_equal(first[i].proj.w[...], second[i].proj.w[...])
        np.testing.assert_array_equal(first[i].proj.w[...], jitted[i].proj.w[...])
