"""A stack's layout only affects storage, not results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops, sharding
from maxlib.models import llama
from tests.nn.tiny import LLAMA

# prefix, period, lead, lead_period
LAYOUTS = [(0, 1), (2, 2), (1, 3), (7, 1), (1, 2, 2), (0, 4, 3), (1, 1, 4, 2)]


class Layer(nnx.Module):
    """Mixes in its own weights, counts calls in its cache, reports from every second layer."""

    def __init__(self, i: int, *, rngs):
        self.proj = nn.Einsum("...D,ED->...E", (4, 4), ("embed", "mlp"), rngs=rngs)
        self.report = i % 2 == 1

    def __call__(self, x, ctx, cache):
        h = jnp.tanh(self.proj(x)) + ctx
        aux = {"load": jnp.mean(h)} if self.report else {}
        return x + h, None if cache is None else cache + jnp.sum(x), aux

    def init_cache(self, batch, capacity, dtype):
        return jnp.zeros((), dtype)


class Same(Layer):
    def __init__(self, i, *, rngs):
        super().__init__(1, rngs=rngs)


class LedBy(Layer):
    """Of another shape than what follows, in the first three layers."""

    def __init__(self, i, *, rngs):
        super().__init__(1, rngs=rngs)
        self.more = nn.Einsum("...D,ED->...E", (4, 4), ("embed", "mlp"), rngs=rngs) if i < 3 else None

    def __call__(self, x, ctx, cache):
        x, cache, aux = super().__call__(x, ctx, cache)
        return (x if self.more is None else self.more(x)), cache, aux | ({} if self.more is None else {"led": x[0, 0]})


def build(layer, prefix, period, lead=0, lead_period=1, *, num_layers=7):
    layout = {"lead": lead, "prefix": prefix, "period": period, "lead_period": lead_period}
    return nn.Stack(lambda i, rngs: layer(i, rngs=rngs), num_layers, **layout, rngs=nnx.Rngs(3))


def layout_of(layer):
    if layer is LedBy:
        return [(3, 2), (0, 1, 3)]
    if layer is Layer:
        return [(2, 2), (7, 1), (1, 1, 6, 2)]
    return [(p, q) for p, q, *lead in LAYOUTS if not lead] if layer is Same else [(2, 2), (7, 1)]


@pytest.mark.parametrize("layer", [Layer, pytest.param(Same, marks=pytest.mark.full), LedBy])
def test_layout_changes_neither_values_nor_results(layer):
    x = jax.random.normal(jax.random.key(0), (2, 3, 4))
    results = []
    for layout in layout_of(layer):
        stack = jax.jit(lambda layout=layout: build(layer, *layout))()
        y, cache, aux = jax.jit(lambda stack: stack(x, 0.1, stack.init_cache(2, 8, jnp.float32)))(stack)
        caches = [leaf.reshape(-1) for leaf in jax.tree.leaves(cache)]
        weights = [np.asarray(stack[i].proj.w[...]) for i in range(7)]
        results.append((weights, np.asarray(y), np.sort(np.concatenate(caches)), aux))
    assert len(results) >= 2
    for other in results[1:]:
        np.testing.assert_array_equal(results[0][0], other[0])
        close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
        jax.tree.map(close, results[0][1:], other[1:])


def test_eager_construction_is_layout_independent_too():
    first, second = build(Same, 0, 1, num_layers=3), build(Same, 1, 2, num_layers=3)
    for i in range(3):
        np.testing.assert_array_equal(first[i].proj.w[...], second[i].proj.w[...])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_points_at_each_layer(layout):
    stack = build(Same, *layout)
    leaves = {path: v.get_value() for path, v in nn.variables(stack).items()}
    for i in range(7):
        path, repeat = stack.where(i)
        leaf = leaves[f"{path}.proj.w"]
        np.testing.assert_array_equal(leaf if repeat is None else leaf[repeat], stack[i].proj.w[...])
    with pytest.raises(IndexError):
        stack.where(7)


def test_aux_rows_come_in_layer_order():
    x = jnp.ones((1, 1, 4))
    scanned, alone = jax.jit(lambda: [build(Layer, *layout)(x, 0.0)[2]["load"] for layout in ((1, 2), (7, 1))])()
    np.testing.assert_allclose(scanned, alone, rtol=1e-6)
    assert scanned.shape == (3,)


DEPTHS = {
    "number": lambda i: 0.5**i,
    "array": lambda i: np.full((4, 4), 0.5**i, np.float32),
    "choice": lambda i: 1.0 if i % 2 else jnp.ones(()),  # equal values, by other operations
}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("jit", [True, False])
def test_initial_values_may_depend_on_the_depth(depth, jit):
    """Every layer has its own, though one trace would do for their shapes."""

    class Scaled(Same):
        def __init__(self, i, *, rngs):
            super().__init__(i, rngs=rngs)
            self.proj.w.set_value(self.proj.w[...] * DEPTHS[depth](i))

    make = lambda layer: build(layer, 0, 2, 2, num_layers=7)
    scaled, plain = jax.jit(lambda: (make(Scaled), make(Same)))() if jit else (make(Scaled), make(Same))
    for i in range(7):
        want = np.asarray(plain[i].proj.w[...]) * np.asarray(DEPTHS[depth](i))
        np.testing.assert_allclose(scaled[i].proj.w[...], want, rtol=1e-6)


def test_equal_layers_are_compared_and_built_once():
    made = []

    def make(i, rngs):
        made.append(i)
        return Same(i, rngs=rngs)

    jax.eval_shape(lambda: nn.Stack(make, 9, prefix=1, period=2, rngs=nnx.Rngs(3)))
    assert sorted(made) == [0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8]  # compared: 1 to 8; built: 0, and 1 and 2 for their places


def test_layers_on_trust_are_traced_once_and_are_the_same():
    made = []

    def make(i, rngs):
        made.append(i)
        return Same(i, rngs=rngs)

    describe = lambda: jax.eval_shape(lambda: nn.Stack(make, 9, prefix=1, period=2, rngs=nnx.Rngs(3)))
    checked = describe()
    assert sorted({*made}) == [*range(9)]
    made.clear()
    with nn.stack.skip_layer_check():
        trusted = describe()
    assert made == [0, 1, 2]
    assert jax.tree.structure(trusted) == jax.tree.structure(checked)
    assert jax.tree.leaves(trusted) == jax.tree.leaves(checked)
    with pytest.raises(ValueError, match="layers 0 and 1 would be scanned together"):  # no longer
        build(Layer, 0, 1)


def test_layers_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"layers 0 and 1 would be scanned together"):
        build(Layer, 0, 1)
    wide = lambda i, rngs: nn.Einsum("...D,ED->...E", (4 + (i == 4), 4), ("mlp", "embed"), rngs=rngs)
    with pytest.raises(ValueError, match=r"layers 0 and 4 would be scanned together"):
        nn.Stack(wide, 6, period=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"layers 0 and 2 would be scanned together under .*'lead': 3"):
        build(lambda i, rngs: LedBy(i + (i == 2), rngs=rngs), 0, 1, 3)
    for wrong in ((9, 1), (5, 1, 3), (9, 1, -2)):
        with pytest.raises(ValueError, match="prefix between 0 and num_layers"):
            build(Same, *wrong)


def test_a_lead_lies_in_one_place():
    stack = build(LedBy, 0, 1, 3)
    assert stack.grouping == {"num_layers": 7, "lead": 3, "prefix": 0, "period": 1} and stack.repeats == 4
    assert [len(part) for part in (stack.lead, stack.prefix, stack.body, stack.suffix)] == [1, 0, 1, 0]
    assert stack.lead[0].more.w.shape == (3, 4, 4) and stack.where(2) == ("lead.0", 2)
    assert build(LedBy, 2, 1, 1).grouping == {"num_layers": 7, "prefix": 3, "period": 1}  # one alone repeats nothing
    assert [stack.regrouped(prefix=3, period=1).where(i)[0] for i in (0, 2, 3)] == ["prefix.0", "prefix.2", "body.0"]


@pytest.mark.parametrize(
    "remat",
    ["full"]
    + [pytest.param(r, marks=pytest.mark.full) for r in ("dots", ("h",), jax.checkpoint_policies.everything_saveable)],
)
def test_remat_changes_no_gradient(remat):
    stack, x = jax.jit(lambda: build(Same, 1, 2))(), jnp.ones((2, 3, 4))
    loss = lambda stack, remat: jnp.sum(stack(x, 0.1, remat=remat)[0] ** 2)
    want, got = jax.jit(lambda stack: [jax.grad(loss)(stack, policy) for policy in (None, remat)])(stack)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(a).max()), want, got)


def test_on_gpus_layers_stay_as_they_lie_and_nothing_else_changes(monkeypatch):
    mesh = sharding.make_mesh(fsdp=4, data=2)
    layout = sharding.Layout(mesh, sharding.FSDP)
    with sharding.use(layout):
        stack, x = sharding.create(lambda: build(Same, 1, 2), layout), jnp.ones((8, 3, 4))
        gradient = lambda stack: jax.grad(lambda stack: jnp.sum(stack(x, 0.1, remat="full")[0] ** 2))(stack)
        want = jax.jit(gradient)(stack)
        monkeypatch.setattr("maxlib.nn._layer_weights.current_device", lambda: ("gpu", "NVIDIA H100"))
        lowered = jax.jit(lambda stack: gradient(stack)).lower(stack)
        assert "LayoutConstraint" in lowered.as_text()
        jax.tree.map(np.testing.assert_array_equal, want, lowered.compile()(stack))


def test_remat_keeps_less():
    stack, x = build(Same, 0, 1), jnp.ones((64, 64, 4))

    def temporary_bytes(remat):
        gradient = jax.grad(lambda stack, x: jnp.sum(stack(x, 0.1, remat=remat)[0] ** 2))
        return jax.jit(gradient).lower(stack, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes("full") < temporary_bytes(None)


def test_unknown_remat_is_refused():
    with pytest.raises(ValueError, match="remat must be None, one of"):
        build(Same, 0, 1)(jnp.ones((1, 1, 4)), 0.0, remat="most")


def test_another_layout_is_a_stack_of_its_own():
    stack = build(Same, 2, 1)
    before = [np.asarray(stack[i].proj.w[...]) for i in range(7)]
    for other in (stack.unstacked(), stack.regrouped(prefix=3, period=1), nn.unstack(stack)):
        other[0].proj.w.set_value(jnp.zeros((4, 4)))
        for i in range(7):
            np.testing.assert_array_equal(stack[i].proj.w[...], before[i])


def test_a_part_without_the_axis_of_layers_is_named():
    """Without the check, `lax.scan` reports sizes alone."""
    stack, x = build(Same, 1, 2), jnp.ones((1, 2, 4))
    stack.body[1].proj = nn.Einsum("...D,ED->...E", (4, 4), ("embed", "mlp"), rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"1.proj.w of a scanned block lacks the axis of layers, of size 3: .*unstacked"
    ):
        stack(x, 0.1)


@pytest.mark.parametrize(("width", "said"), [(8, r"proj.w \(.*\(8, 4\).* and .*\(4, 4\)"), (4, "options, not arrays")])
def test_regrouping_names_layers_that_differ(width, said):
    alone = build(Same, 0, 1).unstacked()
    alone[0].proj = nn.Einsum("...D,ED->...E", (width, 4), ("embed", "mlp"), rngs=nnx.Rngs(0))
    alone[0].report = width == 8
    with pytest.raises(ValueError, match=rf"layers 0 and 1 would be scanned together under .* differ in {said}"):
        alone.regrouped(prefix=0, period=1)
    assert alone.regrouped(prefix=1, period=1).grouping == {"num_layers": 7, "prefix": 1, "period": 1}


def test_unstacked_is_the_same_function():
    stack = build(Same, 1, 2)
    x, alone = jnp.ones((1, 2, 4)), nn.unstack({"a": stack})["a"]
    assert alone.grouping == {"num_layers": 7, "prefix": 7, "period": 2} and len(alone.body) == 0
    np.testing.assert_allclose(stack(x, 0.1)[0], alone(x, 0.1)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("kinds", "layout"),
    [
        ("", (0, 1)),
        ("f", (0, 1)),
        ("ffffff", (0, 1)),
        ("sfsfsf", (0, 2)),
        ("sfsfs", (0, 2)),  # one at the end stands alone
        ("sssfsssfsss", (0, 4)),
        ("ffssss", (0, 1, 2)),
        ("dsfsfsf", (1, 2)),
        ("ddsfsfsf", (0, 2, 2)),
        ("ddcsfsfsf", (1, 2, 2)),
        ("ssfssfss", (0, 3)),
        ("sssfssfssf", (1, 3)),  # what the periods have too is none of its own
        ("abcd", (0, 3)),  # nothing repeats, so any would do
        ("ababcdcd", (0, 2, 4, 2)),
        ("ababababcdcd", (0, 2, 8, 2)),
        ("aabaabABcdcdcd", (2, 2, 6, 3)),
        ("abababacac", (6, 2)),  # the body has what a lead would have
    ],
)
def test_layout_for_scans_the_most(kinds, layout):
    assert nn.grouping_for(kinds) == dict(zip(("prefix", "period", "lead", "lead_period"), layout, strict=False))


class Adds(nnx.Module):
    """Adds what it is given for itself, and hands on how much that was so far, beside x."""

    def __init__(self, i: int, *, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.ones(()), axes=())

    def __call__(self, x, ctx, cache, own):
        x, total = x
        return (x + own * self.w[...], total + own.max()), cache, {}


@pytest.mark.parametrize("layout", [(0, 1, 0), (1, 2, 0), (7, 1, 0), (0, 2, 3), (1, 1, 4, 2)])
def test_layers_get_their_own_row_and_carry_more_than_x(layout):
    own = jnp.asarray(np.arange(7.0) * 10.0 ** np.arange(7), jnp.float32)[:, None] * jnp.ones((7, 3))

    @jax.jit
    def run():
        stack = build(lambda i, rngs: Adds(i, rngs=rngs), *layout)
        x = jnp.zeros(3), jnp.zeros(())
        return [stack(x, layer_inputs=own, remat=remat)[0] for remat in (None, "full")]

    for x, total in run():
        np.testing.assert_array_equal(x, np.full(3, 6543210.0))
        assert float(total) == 6543210


class Shares(nnx.Module):
    """Layer 2 shares twice its x; layers 4 and later add what it shared, the others their weight."""

    def __init__(self, i: int, *, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.full((), 0.5), axes=())
        self.makes, self.takes = i == 2, i >= 4

    def __call__(self, x, ctx, cache):
        y = jnp.sin(x.x * self.w[...]) + (x.shared["twice"] * x.x if self.takes else 0)
        return x.updated(y, **({"twice": 2 * x.x} if self.makes else {})), cache, {}


def test_what_a_layer_shares_reaches_all_later_ones_and_their_gradients_reach_it():
    def run(layout, remat, x):
        stack = nn.Stack(lambda i, rngs: Shares(i, rngs=rngs), 8, **layout, rngs=nnx.Rngs(0))
        out = stack(nn.stack.WithShared(x, {}), remat=remat)[0]
        return (out.x + out.shared["twice"]).sum()

    scanned = {"lead": 2, "prefix": 2, "period": 1}
    x = jnp.linspace(0.1, 1, 3)
    both = lambda layout, remat: jax.jit(jax.value_and_grad(lambda x: run(layout, remat, x)))(x)
    want = both({"prefix": 8, "period": 1}, None)
    for remat in (None, "full"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), both(scanned, remat), want)


def test_what_layers_share_is_stored_once_for_the_backward_pass():
    """Scanned layers read it as a constant: no residual has it once for each layer."""
    stack = nn.Stack(lambda i, rngs: Shares(i, rngs=rngs), 12, prefix=4, period=1, rngs=nnx.Rngs(0))
    loss = lambda x, remat: stack(nn.stack.WithShared(x, {}), remat=remat)[0].x.sum()
    for remat, rows in ((None, 3), ("full", 1)):  # per layer: x and what sin and the product need; x alone
        _, pull = jax.vjp(lambda x, remat=remat: loss(x, remat), jnp.linspace(0.1, 1, 3))
        stacked = [a for a in jax.tree.leaves(pull) if getattr(a, "shape", ()) == (8, 3)]
        assert 1 <= len(stacked) <= rows, [a.shape for a in stacked]


def test_a_scanned_layer_may_not_share():
    stack = nn.Stack(lambda i, rngs: Shares(2, rngs=rngs), 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="scanned layer shares twice"):
        stack(nn.stack.WithShared(jnp.ones(3), {}))


def test_a_lead_of_periods():
    stack = build(Same, 1, 1, 4, 2)
    assert stack.grouping == {"num_layers": 7, "lead": 4, "lead_period": 2, "prefix": 1, "period": 1}
    assert [len(part) for part in (stack.lead, stack.prefix, stack.body, stack.suffix)] == [2, 1, 1, 0]
    assert [stack.where(i) for i in range(4)] == [("lead.0", 0), ("lead.1", 0), ("lead.0", 1), ("lead.1", 1)]
    again = stack.regrouped(prefix=0, period=1)
    assert "lead_period" not in again.grouping
    assert again.regrouped(lead=4, lead_period=2, prefix=1, period=1).grouping == stack.grouping
    assert build(Same, 0, 1, 2, 2).grouping == {"num_layers": 7, "prefix": 2, "period": 1}  # once is no scan
    with pytest.raises(ValueError, match="lead_period must be at least 1 and divide lead, got lead=3"):
        build(Same, 0, 1, 3, 2)


def test_a_layer_taken_out_of_a_scan_refuses_changes():
    """Its arrays are copies, so that a change would be lost."""
    stack = nn.Stack(lambda i, rngs: nn.GatedMLP(4, 8, rngs=rngs), 3, rngs=nnx.Rngs(0))
    layer, norm = stack[1], nn.RMSNorm(4)
    for change in (
        lambda: layer.up.w.set_value(jnp.zeros(layer.up.w.shape)),
        lambda: layer.up.w.__setitem__(..., 0.0),
        lambda: setattr(layer, "up", norm),
        lambda: setattr(layer.up, "extra", norm),
    ):
        with pytest.raises(ValueError, match=r"layer 1 was taken out .* in `nn.unstack\(model\)`"):
            change()
    copy = jax.tree.map(lambda a: a, layer)
    copy.up.w[...] = jnp.zeros(copy.up.w.shape)
    assert jax.tree.structure(copy) == jax.tree.structure(layer) and not copy.up.w[...].any() and layer.up.w[...].any()
    alone = stack.unstacked()
    alone[1].up.w[...] = jnp.zeros(copy.up.w.shape)
    assert not alone[1].up.w[...].any()


def test_a_part_of_a_scanned_block_without_arrays_is_that_of_all_its_layers():
    stack = nn.Stack(lambda i, rngs: llama.Block(LLAMA, rngs=rngs), 3, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 9, LLAMA.dim))
    before, window = stack(x, nn.context(1, 9))[0], ops.Causal() & ops.SlidingWindow(2)
    alone = stack.unstacked()
    for layer in alone:
        layer.attn.mask = window
    stack.body[0].attn.mask = window
    found = stack(x, nn.context(1, 9))[0]
    np.testing.assert_allclose(found, alone(x, nn.context(1, 9))[0], atol=1e-5)
    assert float(jnp.abs(found - before).max()) > 1e-2
    assert [one.kind for one in nn.cache.layer_caches(stack.init_cache(1, 9))] == ["ring"]


def test_layers_are_taken_by_number():
    stack = nn.Stack(lambda i, rngs: nn.GatedMLP(4, 8, rngs=rngs), 3, rngs=nnx.Rngs(0))
    assert stack.where(-1) == stack.where(2)
    with pytest.raises(IndexError):
        stack.where(3)
