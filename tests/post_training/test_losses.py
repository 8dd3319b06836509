"""Every loss on a small model: packed, in microbatches, on meshes and in a 1F1B pipeline, compared with the plain loss.

All losses are computed from one forward pass (`everything`), so that a program is compiled once for all of them; each
loss and each of its metrics is compared, and the gradient of a weighted sum.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import adapters, nn, sharding, training
from maxlib import post_training as pt
from maxlib.post_training._preference_losses import interleaved
from maxlib.training._objectives.objective import split_options
from maxlib.training._step import means
from tests.nn.tiny import tiny_llama
from tests.training import tiny

ROWS, T, VOCAB, K = 8, 24, 64, 3
PP = sharding.Pipeline("stage", microbatches=4)
PAIRS = {
    "sigmoid": pt.DPO(0.3, label_smoothing=0.1),
    "robust": pt.DPO(0.3, "robust", 0.1),
    "hinge": pt.DPO(0.3, "hinge"),
    "ipo": pt.DPO(0.3, "ipo"),
    "apo_zero": pt.DPO(0.3, "apo_zero"),
    "apo_down": pt.DPO(0.3, "apo_down"),
    "sppo": pt.DPO(0.3, "sppo_hard"),
    "nca": pt.DPO(0.3, "nca_pair"),
    "bco": pt.DPO(0.3, "bco_pair"),
    "sigmoid_norm": pt.DPO(0.3, "sigmoid_norm"),
    "simpo": pt.SimPO(),
    "mixture": pt.Mixture(((0.7, pt.DPO(0.2)), (0.3, pt.DPO(0.2, "bco_pair")))),
}
POLICIES = {
    "grpo": functools.partial(pt.grpo, kl_term=pt.KL(0.1), entropy=0.01),
    "dr_grpo": pt.dr_grpo(20),
    "dapo": functools.partial(pt.dapo, kl_term=pt.KL(0.1, "corrected")),
    "gspo": pt.gspo,
    "gspo_token": functools.partial(pt.gspo, ratio="sequence_token"),
    "cispo": functools.partial(pt.cispo, kl_term=pt.KL(0.1, "k2")),
    "rloo": pt.rloo,
    "tis": functools.partial(pt.grpo, correction=pt.Correction("token", None, 1.5)),
    "mis": functools.partial(pt.grpo, correction=pt.Correction("sequence", 0.5, 2.0, "zero")),
}
LOSSES = {
    **{name: functools.partial(pt.preference_loss, kind=kind) for name, kind in PAIRS.items()},
    **{name: functools.partial(loss, temperature=0.8) for name, loss in POLICIES.items()},
    "kto": functools.partial(pt.kto_loss, kind=pt.KTO(0.3, 1.2, 0.8)),
    "top_k": functools.partial(pt.distillation_loss, beta=0.3, hard=0.2),
    "dft": training.dft_loss,
}


# One of every kind of sum: pairs, sequences, tokens, ratios and weights of sequences, stored targets. `full` has all.
FEW = "sigmoid", "dapo", "mis", "kto", "top_k"
ALL = tuple(LOSSES)


@training.objective
def everything(head, hidden, batch, *, names=FEW):
    """The sum of these losses with different factors; sums of each, and what each is divided by, are metrics."""
    total, sums = 0.0, {}
    for i, name in enumerate(names):
        goal, given = split_options(LOSSES[name])
        value, stats = goal.from_hidden(head, hidden, batch, **given)
        total += (1 + i % 4) * value
        sums |= {f"{name}/loss": value, f"{name}/count": stats.num_targets}
        sums |= {f"{name}/{metric}": x for metric, x in stats.sums.items()}
    return total, training.Stats(jnp.asarray(float(len(batch["tokens"]))), jax.lax.stop_gradient(sums))


loss_of = lambda names: functools.partial(everything, names=names, dtype=jnp.float32)
full = functools.partial(pytest.param, marks=pytest.mark.full)
chosen = pytest.mark.parametrize("names", [pytest.param(FEW, id="few"), full(ALL, id="all")])


@functools.cache
def _built():
    return tiny_llama(num_layers=4, vocab=VOCAB)


def model():
    return jax.tree.map(jnp.copy, _built())


@functools.cache
def batch():
    """Rows of two pairs: segments 1 and 3 chosen, 2 and 4 rejected, each with a prompt; the last row has one pair."""
    rng = np.random.default_rng(0)
    segment_ids, targets = np.zeros((ROWS, T), np.int32), np.full((ROWS, T), -1, np.int32)
    tokens = rng.integers(0, VOCAB, (ROWS, T)).astype(np.int32)
    values = {name: np.zeros((ROWS, T), np.float32) for name in ("advantages", "desirable")}
    for row in range(ROWS):
        begin = 0
        for segment in range(1, 5 if row < ROWS - 1 else 3):
            size, prompt = int(rng.integers(4, 7)), int(rng.integers(1, 3))
            at = slice(begin, begin + size)
            segment_ids[row, at] = segment
            targets[row, begin + prompt - 1 : begin + size - 1] = tokens[row, begin + prompt : begin + size]
            values["advantages"][row, at], values["desirable"][row, at] = rng.normal(), rng.random() < 0.5
            begin += size
    near = lambda: (rng.normal(-4.1, 0.3, (ROWS, T))).astype(np.float32)
    log_p = np.log(rng.dirichlet(np.ones(K + 2), (ROWS, T))[..., :K]).astype(np.float32)
    ids = np.argsort(rng.random((ROWS, T, VOCAB)), axis=-1)[..., :K].astype(np.int32)
    scores = {name: near() for name in ("reference_log_probs", "old_log_probs", "sampler_log_probs")}
    stored = {"teacher_ids": ids, "teacher_log_probs": log_p, "kl_baseline": np.full(ROWS, 0.4, np.float32)}
    return {"tokens": tokens, "targets": targets, "segment_ids": segment_ids, **values, **scores, **stored}


def by_autodiff(names):
    """Gradients, mean and statistics, as `training.one_f_one_b` gives them."""

    def gradients(params, rest, data, key):
        def mean(params):
            value, stats = loss_of(names)(nn.combine(params, rest), data, key)
            return value / stats.num_targets, stats

        (value, stats), grads = jax.value_and_grad(mean, has_aux=True)(params)
        return grads, value, stats

    return gradients


def run(gradients, spread, data):
    compiled = jax.jit(gradients, compiler_options=tiny.QUICKLY)
    return jax.device_get(compiled(*nn.partition(spread), jax.tree.map(jnp.asarray, data), jax.random.key(0)))


@functools.cache
def alone(names):
    return run(by_autodiff(names), model(), batch())


def check(got, want):
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    close_sums(got[2].sums, want[2].sums)
    close_gradients(got[0], want[0])


def close_sums(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=2e-5, err_msg=name)


def close_gradients(got, want):
    assert got.keys() == want.keys()
    for path, gradient in want.items():
        np.testing.assert_allclose(got[path], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=path)


@chosen
def test_losses_differ_and_have_gradients(names):
    sums = alone(names)[2].sums
    values = {name: float(sums[f"{name}/loss"] / sums[f"{name}/count"]) for name in names}
    assert all(np.isfinite(list(values.values()))) and len({round(v, 5) for v in values.values()}) >= len(names) - 2
    assert sums["sigmoid/count"] == 2 * ROWS - 1 and sums["mis/count"] == 4 * ROWS - 2
    assert sums["dapo/count"] == sums["top_k/count"] == (batch()["targets"] >= 0).sum()


def separate(data):
    """Each segment in a row of its own, chosen rows before rejected ones."""
    parts = []
    for row in range(ROWS):
        for segment in range(1, data["segment_ids"][row].max() + 1):
            at = np.flatnonzero(data["segment_ids"][row] == segment)
            part = {}
            for name, x in data.items():
                part[name] = x[row]
                if x.ndim > 1:
                    part[name] = np.zeros((8, *x.shape[2:]), x.dtype)
                    part[name][: len(at)] = x[row, at]
            part["targets"][len(at) :] = -1
            part["segment_ids"] = (part["segment_ids"] > 0).astype(np.int32)
            parts.append(part)
    return [{name: np.stack([part[name] for part in half]) for name in parts[0]} for half in (parts[::2], parts[1::2])]


@chosen
def test_packed_is_separate(names):
    """Rows of their own, in pairs of sub-batches where losses compare two."""
    first, second = separate(batch())

    def both(params, rest, data, key):
        def mean(model):
            pairs = interleaved(data)
            inputs = {"segment_ids": pairs["segment_ids"], "dtype": jnp.float32}
            hidden = model(pairs["tokens"], **inputs).hidden
            value, stats = everything.from_hidden(model, hidden, pairs, names=names)
            return value / ROWS, stats

        (value, stats), grads = jax.value_and_grad(lambda params: mean(nn.combine(params, rest)), has_aux=True)(params)
        return grads, value, stats

    check(run(both, model(), {"chosen": first, "rejected": second}), alone(names))


MESHES = {
    "fsdp x tensor": ({"fsdp": 4, "tensor": 2}, sharding.FSDP_TP),
    "data x context": ({"data": 2, "context": 4}, sharding.DP | sharding.CP_RING),
    "fsdp": ({"fsdp": 8}, sharding.FSDP),
    "gpipe x fsdp": ({"stage": 4, "fsdp": 2}, sharding.FSDP | PP),
}


@chosen
@pytest.mark.parametrize("mesh", ["fsdp x tensor", full("data x context"), full("fsdp"), full("gpipe x fsdp")])
def test_on_a_mesh_as_on_one_device(mesh, names):
    degrees, rules = MESHES[mesh]
    layout = sharding.Layout(sharding.make_mesh(**degrees), rules)
    spread = jax.device_put(model(), sharding.shardings(model(), layout))
    with sharding.use(layout):
        check(run(by_autodiff(names), spread, batch()), alone(names))


PIPELINES = {
    "data x tensor": ({"stage": 2, "data": 2, "tensor": 2}, sharding.TP | PP),
    "fsdp": ({"stage": 4, "fsdp": 2}, sharding.FSDP | PP),
}


@pytest.mark.full
@pytest.mark.parametrize("names", [FEW, ALL], ids=["few", "all"])
@pytest.mark.parametrize("mesh", PIPELINES)
def test_in_a_1f1b_pipeline_as_on_one_device(mesh, names):
    degrees, rules = PIPELINES[mesh]
    layout = sharding.Layout(sharding.make_mesh(**degrees), rules)
    spread = jax.device_put(model(), sharding.shardings(model(), layout))
    with sharding.use(layout):
        check(run(training.one_f_one_b(loss_of(names)).gradients, spread, batch()), alone(names))


@pytest.mark.full  # by default that of tests/training/test_objectives.py
@pytest.mark.parametrize("names", [FEW, ALL], ids=["few", "all"])
def test_microbatches_make_the_whole(names):
    optimizer = optax.sgd(1.0)
    step = tiny.jit_step(training.make_train_step(training.accumulate(loss_of(names), 4), optimizer))
    state, metrics = jax.device_get(step(training.make_state(model(), optimizer), jax.tree.map(jnp.asarray, batch())))
    want_grads, value, stats = alone(names)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    close_sums({name: metrics[name] for name in stats.sums}, means(stats))
    before = nn.partition(model())[0]
    got = {path: np.asarray(before[path]) - x for path, x in state.trainable.items()}
    for path, gradient in want_grads.items():  # differences of parameters are rounded at their size
        np.testing.assert_allclose(got[path], gradient, atol=1e-5 * np.abs(gradient).max() + 2e-7, err_msg=path)


@pytest.mark.parametrize(
    "loss",
    [
        pt.dapo,
        pt.dr_grpo(8),
        functools.partial(pt.policy_loss, mean="sequence"),
        functools.partial(pt.preference_loss, kind=pt.DPO()),
        pt.kto_loss,
    ],
    ids=["token", "fixed", "sequence", "pairs", "kto"],
)
def test_ids_of_a_corpus_are_no_numbers_of_segments(loss):
    """They work in attention, where only runs count; sums over sequences would leave them out in silence."""
    goal, options = split_options(loss)
    hidden = jnp.ones((ROWS, T, 1))

    class Head:
        softcap, head_weight = None, lambda self: jnp.ones((VOCAB, 1))

    mean = lambda data: goal.from_hidden(Head(), hidden, jax.tree.map(jnp.asarray, data), **options)
    (good, few), (bad, many) = mean(batch()), mean(batch() | {"segment_ids": batch()["segment_ids"] * 5017})
    assert np.isfinite(good) and float(few.num_targets) > 0
    assert np.isnan(bad) or np.isnan(many.num_targets)


def halves(seed=0):
    """Pairs as two sub-batches with one segment each."""
    first, second = separate(batch())
    keep = ("tokens", "targets", "segment_ids")
    return {half: {k: x[k][:8] for k in keep} for half, x in (("chosen", first), ("rejected", second))}


def preferred(model, batch, key):
    return pt.preference_loss(model, batch, key, dtype=jnp.float32, kind=pt.DPO(0.5))


def distilled(model, batch, key):
    options = {"beta": 0.4, "temperature": 1.5, "hard": 0.3}
    return pt.distillation_loss(model, batch["chosen"], key, dtype=jnp.float32, **options)


def labelled(model, batch, key):
    own = batch["chosen"] | {"desirable": jnp.arange(8) % 2 == 0, "mismatched": batch["rejected"]}
    return pt.kto_loss(model, own, key, dtype=jnp.float32)


def odds(model, batch, key):
    return pt.preference_loss(model.trained, batch, key, dtype=jnp.float32, kind=pt.ORPO(0.2))


@functools.cache
def beside(seed=1):
    """The frozen model has another width."""
    return pt.WithFrozen(_built(), tiny_llama(num_layers=1, vocab=VOCAB, dim=24, seed=seed))


def test_a_model_beside_itself_is_frozen_as_it_is_now():
    model = tiny.model()
    both = pt.WithFrozen(model, model)
    training.materialize_model(both, None)  # which refuses one parameter at two places
    before = np.asarray(both.frozen.embed.w[...])
    model.embed.w.set_value(model.embed.w[...] + 1)
    np.testing.assert_array_equal(both.frozen.embed.w[...], before)
    np.testing.assert_array_equal(both.trained.embed.w[...], before + 1)


def taught(loss, spread, data):
    def gradients(params, rest, data):
        f = lambda params: loss(nn.combine(params, rest), data, jax.random.key(0))
        (value, stats), grads = jax.value_and_grad(f, has_aux=True)(params)
        return grads, value, stats

    only = training.trainable_only("trained.*")
    compiled = jax.jit(gradients, compiler_options=tiny.QUICKLY)
    return jax.device_get(compiled(*nn.partition(spread, only), jax.tree.map(jnp.asarray, data)))


def test_the_frozen_model_is_left_alone_without_a_filter():
    """Weight decay needs no gradient, so it would shrink a reference or a teacher that the optimizer sees."""
    both = beside()
    state = training.make_state(both, training.adamw(0.1))
    assert set(state.trainable) == {f"trained.{path}" for path in nn.partition(both.trained)[0]}
    step = jax.jit(training.make_train_step(preferred, training.adamw(0.1)), compiler_options=tiny.QUICKLY)
    state, _ = step(state, halves())
    before, after = nn.variables(beside().frozen), nn.variables(state.model.frozen)
    assert all(np.array_equal(value.get_value(), after[path].get_value()) for path, value in before.items())


def test_beside_a_frozen_model_adapters_are_trained_alone():
    put_on = lambda model: adapters.add(model, adapters.LoRA(2, 4), rngs=nnx.Rngs(0))
    adapted = put_on(_built())
    want = {f"trained.{path}" for path in nn.partition(adapted, adapters.trainable)[0]}
    both = pt.WithFrozen(adapted, put_on(_built()))
    assert set(training.make_state(pt.WithFrozen(adapted, _built()), training.adamw(0.1)).trainable) == want
    assert set(nn.partition(both, nn.tree.default_filter(both))[0]) == want


@pytest.mark.full
@pytest.mark.parametrize("loss", [preferred, distilled, labelled, odds])
def test_with_a_frozen_model_on_a_mesh(loss):
    want = taught(loss, beside(), halves())
    assert all(path.startswith("trained.") for path in want[0])
    layout = sharding.Layout(sharding.make_mesh(fsdp=4, tensor=2), sharding.FSDP_TP)
    spread = jax.device_put(beside(), sharding.shardings(beside(), layout))
    with sharding.use(layout):
        check(taught(loss, spread, halves()), want)


def test_a_reference_in_the_batch_is_one_beside_the_model():
    """`add_reference` and `add_teacher` store what `WithFrozen` computes; all tokens as top-k are the divergence."""
    both, data = beside(), jax.tree.map(jnp.asarray, halves())

    class Once(tiny.Loader):
        def __next__(self):
            self.next += 1
            return halves()

    stored = next(pt.add_reference(Once(), both.frozen, dtype=jnp.float32))
    options = {"kind": pt.DPO(0.5), "dtype": jnp.float32}

    @functools.partial(jax.jit, compiler_options=tiny.QUICKLY)
    def preferences(both, stored):
        found = pt.preference_loss(both, data, **options), pt.preference_loss(both.trained, stored, **options)
        return *found, pt.preference_loss(both.trained, data, reference=lambda model: model, **options)

    (want, stats), (got, _), (itself, _) = preferences(both, stored)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(itself / stats.num_targets, np.log(2), rtol=1e-6)

    loader = pt.add_teacher(Once(), both.frozen, k=VOCAB, temperature=1.5, dtype=jnp.float32)
    first, state = next(loader)["chosen"], loader.get_state()
    assert state == {"0": {"next": 1}} and first["teacher_ids"].shape == (*data["chosen"]["tokens"].shape, VOCAB)
    options = {"beta": 0.0, "temperature": 1.5, "dtype": jnp.float32}

    @functools.partial(jax.jit, compiler_options=tiny.QUICKLY)
    def divergences(both, first):
        found = (
            pt.distillation_loss(both.trained, first, **options),
            pt.distillation_loss(both, data["chosen"], **options),
        )
        return [value for value, _ in found]

    np.testing.assert_allclose(*divergences(both, first), rtol=1e-4)


def test_noise_on_token_vectors_is_drawn_with_the_key():
    tuned = functools.partial(training.with_embedding_noise(training.dft_loss, alpha=20.0), dtype=jnp.float32)
    data = jax.tree.map(jnp.asarray, halves()["chosen"])
    f = jax.jit(lambda model, data, key: tuned(model, data, key)[0], compiler_options=tiny.QUICKLY)
    one, two, again = (float(f(_built(), data, jax.random.key(seed))) for seed in (0, 1, 0))
    silent = training.with_embedding_noise(training.dft_loss, alpha=0.0)

    @functools.partial(jax.jit, compiler_options=tiny.QUICKLY)
    def without(model, data):
        found = (
            training.dft_loss(model, data, dtype=jnp.float32),
            silent(model, data, jax.random.key(0), dtype=jnp.float32),
        )
        return [value for value, _ in found]

    plain, silent = without(_built(), data)
    assert one == again and one != two and one != float(plain)
    np.testing.assert_allclose(silent, plain, rtol=1e-6)
    with pytest.raises(TypeError, match="needs a model with embed_tokens"):
        tuned(tiny.model(), data, jax.random.key(0))


def test_rows_of_pairs_in_one_array_are_refused():
    """As TRL stacks them; without segments the loss was 0 of 0 pairs, and only weight decay acted."""
    first, second = (jax.tree.map(jnp.asarray, half) for half in halves().values())
    stacked = {name: jnp.concatenate([first[name], second[name]]) for name in ("tokens", "targets")}
    run = lambda model: pt.preference_loss(model, stacked, dtype=jnp.float32, kind=pt.SimPO())
    with pytest.raises(ValueError, match=r"finds no pairs in a batch of \['targets', 'tokens'\].*chosen.*segment_ids"):
        jax.eval_shape(run, _built())


def test_what_is_missing_is_named():
    data, small = jax.tree.map(jnp.asarray, batch()), _built()
    without = lambda *names: {name: x for name, x in data.items() if name not in names}
    shape = lambda loss, data, **more: jax.eval_shape(lambda m: loss(m, data, dtype=jnp.float32, **more), small)
    with pytest.raises(ValueError, match="DPO compares with a reference"):
        shape(pt.preference_loss, without("reference_log_probs"))
    with pytest.raises(ValueError, match="the KL term compares with a reference"):
        shape(pt.policy_loss, without("reference_log_probs"), kl_term=pt.KL(0.1))
    with pytest.raises(ValueError, match=r"needs batch\['advantages'\]"):
        shape(pt.policy_loss, without("advantages"))
    with pytest.raises(ValueError, match=r"a correction needs batch\['sampler_log_probs'\]"):
        shape(pt.policy_loss, without("sampler_log_probs"), correction=pt.Correction())
    with pytest.raises(ValueError, match="KTO needs"):
        shape(pt.kto_loss, without("kl_baseline"))
    with pytest.raises(ValueError, match="distillation needs a teacher"):
        shape(pt.distillation_loss, without("teacher_ids"))
    with pytest.raises(ValueError, match="no trainable adapters to remove"):
        shape(pt.preference_loss, data, reference=adapters.base_model)
    with pytest.raises(TypeError, match="put a model of its own beside the trained one"):
        pt.preference_loss(small, data, reference=small)
    other = tiny_llama(num_layers=1, vocab=VOCAB + 8)
    with pytest.raises(ValueError, match="the same vocabulary; the student's has 64 tokens, the teacher's 72"):
        shape(pt.distillation_loss, data, teacher=lambda model: other)
    uneven = halves() | {"rejected": {"tokens": np.zeros((8, 3), np.int32)}}
    with pytest.raises(ValueError, match="chosen and rejected must have the same arrays"):
        shape(pt.preference_loss, uneven)


def test_one_advantage_for_several_completions_of_a_row_is_an_error():
    """Each completion has its own; one number for a row is one for a single completion."""
    loss = functools.partial(pt.policy_loss, dtype=jnp.float32)
    total = lambda data: loss(_built(), data, jax.random.key(0))[0]
    one = {**batch(), "advantages": np.linspace(-1, 1, ROWS, dtype=np.float32)}
    one = {name: jnp.asarray(x) for name, x in one.items()}
    with pytest.raises(ValueError, match="several completions, but .* one number for each row: give it as B T"):
        total(one)
    assert np.isnan(jax.jit(total)(one))
    single = one | {"targets": jnp.where(one["segment_ids"] == 2, one["targets"], -1)}
    wide = single | {"advantages": jnp.broadcast_to(one["advantages"][:, None], one["tokens"].shape)}
    assert float(jax.jit(total)(single)) == float(jax.jit(total)(wide)) != 0
