"""Merged models: averages, SLERP against its formula in float64, TIES against PEFT's, and experts from dense models."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import adapters, nn, ops
from maxlib.models import llama, mixtral
from maxlib.weights import merging
from tests.nn.tiny import filled

SIZES: Any = {"vocab": 32, "num_layers": 2, "dim": 16, "mlp_dim": 24, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}


def make(seed, **changes):
    cfg = llama.Config(**SIZES | changes, rope=ops.Rope(8, max_length=32))
    return filled(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)), seed)


@pytest.fixture(scope="module")
def models():
    return [make(seed) for seed in range(3)]


unstack = jax.jit(nn.unstack)


def arrays(model):
    return {path: np.asarray(v[...]) for path, v in nn.variables(unstack(model)).items()}


@jax.jit
def hidden(model, tokens):
    return model(tokens, dtype=jnp.float32).hidden


def test_an_average_is_weighted_and_keeps_dtypes(models):
    average = jax.jit(lambda models: merging.average(iter(models), weights=[1, 2, 1]))
    merged, first, second, third = map(arrays, (average(models), *models))
    for path, value in merged.items():
        np.testing.assert_allclose(value, (first[path] + 2.0 * second[path] + third[path]) / 4, atol=1e-6)
    half = jax.eval_shape(
        lambda model: merging.average([jax.tree.map(lambda x: x.astype("bfloat16"), model)] * 3), models[0]
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half)} == {"bfloat16"}


def test_slerp_is_the_formula_for_each_matrix_alone(models):
    slerp = jax.jit(lambda *models: merging.slerp(*models, 0.3))
    merged, first, second = (arrays(m) for m in (slerp(*models[:2]), *models[:2]))
    for path, a, b in ((path, first[path].astype(np.float64), second[path].astype(np.float64)) for path in merged):
        angle = np.arccos(min(np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b), 1.0))
        line = angle < 1e-4
        near, far = (0.7, 0.3) if line else (np.sin(0.7 * angle) / np.sin(angle), np.sin(0.3 * angle) / np.sin(angle))
        np.testing.assert_allclose(merged[path], near * a + far * b, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    ("density", "majority"), [(0.3, "total"), pytest.param(1.0, "frequency", marks=pytest.mark.full)]
)
@pytest.mark.filterwarnings("ignore")
def test_ties_is_that_of_peft(models, density, majority):
    base = make(7)
    torch, merge_utils = pytest.importorskip("torch"), pytest.importorskip("peft.utils.merge_utils")
    options: Any = {"density": density, "weights": [0.5, 1.0, 2.0], "majority": majority}
    ties = jax.jit(lambda models: merging.ties(models, base=base, **options))  # op by op it compiles 200 programs
    merged, start, *tuned = map(arrays, (ties(models), base, *models))
    for path in merged:
        changes = [torch.tensor(values[path] - start[path]) for values in tuned]
        theirs = merge_utils.ties(changes, torch.tensor(options["weights"]), density, majority)
        np.testing.assert_allclose(merged[path], start[path] + theirs.numpy(), atol=1e-5, err_msg=path)


def test_adapters_are_merged_by_their_arrays(models):
    tuned = jax.eval_shape(lambda: adapters.add(models[0], adapters.LoRA(rank=2, alpha=4), rngs=nnx.Rngs(0)))
    shapes, random = {path: x.shape for path, x in nn.partition(tuned)[0].items()}, np.random.default_rng(0)
    factors = [{path: np.float32(random.normal(size=shape)) for path, shape in shapes.items()} for _ in range(2)]
    averaged = jax.jit(merging.average)(factors)
    chex.assert_trees_all_close(averaged, jax.tree.map(lambda a, b: (a + b) / 2, *factors), atol=1e-6)


def test_experts_from_a_dense_model_compute_what_it_does():
    dense = make(0)
    sizes: Any = {name: size for name, size in SIZES.items() if name != "mlp_dim"}
    experts: Any = {"expert_dim": 24, "num_experts": 4, "top_k": 2}
    cfg = mixtral.Config(**sizes, **experts, rope=ops.Rope(8, max_length=32))
    sparse = filled(lambda: mixtral.Mixtral(cfg, rngs=nnx.Rngs(0)), 1)
    tokens = np.random.default_rng(0).integers(0, 32, (2, 9)).astype(np.int32)
    grown = jax.jit(merging.upcycle)(dense, sparse)
    assert jax.tree.structure(grown) == jax.tree.structure(sparse)
    np.testing.assert_allclose(hidden(grown, tokens), hidden(dense, tokens), atol=1e-5)
    wider = make(0, mlp_dim=32)
    with pytest.raises(ValueError, match=r"has no counterpart .*: both must have the same sizes"):
        merging.upcycle(wider, sparse)


def test_models_that_do_not_fit_are_refused(models):
    other = make(0, mlp_dim=32)
    merges: Any = (lambda: merging.average([models[0], other]), lambda: merging.slerp(models[0], other, 0.5))
    for merge in merges:
        with pytest.raises(ValueError, match="same config"):
            merge()
    with pytest.raises(ValueError, match="density must lie"):
        merging.ties(models, density=0.0)
    with pytest.raises(ValueError, match="a weight for each"):
        merging.average(models, weights=[1.0])
