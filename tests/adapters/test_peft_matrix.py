"""PEFT's files, read and written again: targets x modules_to_save x tied tables x kinds x experts.

By default the golden cases of `peft_parity.py`, which cover all pairs; with `full` the whole product beside PEFT. By
default gradients go through merged weights, so that all cases share one compiled model; `full` runs the adapters, too.
"""

import functools
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import adapters, nn
from maxlib.adapters._saved_modules import untied
from tests.adapters import peft_parity as theirs
from tests.adapters.test_adapters import trained
from tests.models import parity

GOLDEN = theirs.matrix_golden()
CASES = [pytest.param(tuple(name.split("-")), id=name) for name in GOLDEN["cases"]]
PRODUCT = [pytest.param(case, id="-".join(case), marks=pytest.mark.full) for case in theirs.PRODUCT]
TOKENS = theirs.tokens(theirs.TINY["vocab_size"])
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Directories and models of the two bases."""
    paths = {n: parity.directory(tmp_path_factory.mktemp(n), case) for n, case in GOLDEN["bases"].items()}
    return {name: (path, maxlib.from_pretrained(path)) for name, path in paths.items()}


@functools.partial(jax.jit, compiler_options=parity.QUICK)
def logits_and_gradients(params, rest):
    def loss(params):
        model = nn.combine(params, rest)
        logits = model.logits(model(jnp.asarray(TOKENS), dtype=jnp.float32).hidden)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], TOKENS[:, 1:]).mean(), logits

    gradients, logits = jax.grad(loss, has_aux=True)(params)
    return logits, gradients


def through_merged(params, rest):
    """The same by weights into which adapters are merged: models of all cases have one structure."""

    def merge(params):
        return nn.partition(untied(adapters.merge(nn.combine(params, rest))))

    weights, pull, plain = jax.vjp(merge, params, has_aux=True)
    logits, gradients = logits_and_gradients(weights, plain)
    return logits, pull(gradients)[0]


def is_adapted_table(name):
    """True for factors of an embedding or a head, which we merge into the table and write as a saved module."""
    return ("embed_tokens." in name or "lm_head." in name) and ("lora_" in name or "base_layer" in name)


def written(model, directory):
    """Config and tensors of the file that `save` writes."""
    adapters.save(model, directory, experts="fused")  # as PEFT writes them
    return json.loads((directory / CONFIG).read_text()), load_file(directory / TENSORS)


def with_one_a(gradient, shape, name):
    """A gradient in PEFT's shape: gate and up have one `a` there, whose gradient is the sum of those of our two."""
    if gradient.shape == shape:
        return gradient
    if "lora_A" in name:  # [E 2r, I] -> [E r, I]
        return gradient.reshape(theirs.TINY["num_experts"], 2, -1, gradient.shape[1]).sum(axis=1).reshape(shape)
    return gradient.reshape(len(gradient), 2, -1).sum(axis=1)  # [O, 2r E] -> [O, r E]; the other half is zero


def check_reading(case, base, adapter, logits, projections, run, tmp_path):
    """Compares a file of PEFT, read and written again, with PEFT's logits and gradients; returns the model."""
    model = adapters.load(base, adapter, into_base=True)
    params, rest = nn.partition(model, adapters.trainable)
    got, gradients = run(params, rest)
    np.testing.assert_allclose(got, logits, rtol=0, atol=2e-5)

    tensors = load_file(adapter / TENSORS)
    touched = any("embed_tokens" in name or "lm_head" in name for name in tensors)
    adapted = any(map(is_adapted_table, tensors))
    is_one_table = "untied" not in case and (not touched or ("kept_tied" in case and not ("dora" in case and adapted)))
    assert (model.head is None) == is_one_table

    config, again = written(model, tmp_path / "again")
    assert config["use_rslora"] == ("rslora" in case) and config["use_dora"] == ("dora" in case)
    same = [name for name in tensors if not is_adapted_table(name)]
    for name in same:
        np.testing.assert_allclose(again[name], tensors[name], rtol=1e-6, err_msg=name)
    _, slopes = written(nn.combine(gradients, rest), tmp_path / "gradients")
    for name in same:
        slope = parity.projection(name, with_one_a(slopes[name], tensors[name].shape, name))
        np.testing.assert_allclose(slope, projections[name], rtol=1e-3, atol=1e-5, err_msg=name)
    assert same
    return model


def check_writing(model, base, run, tmp_path):
    """Compares logits of PEFT, reading what `save` writes of a trained model, with those of the model."""
    model = trained(model, size=0.1)
    got, _ = run(*nn.partition(model, adapters.trainable))
    adapters.save(model, tmp_path / "ours")
    want = theirs.their_logits(theirs.their_base(base), tmp_path / "ours", TOKENS)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * max(1, np.abs(want).max()))


def golden_file(case, path):
    """The file that PEFT wrote for a case, and what PEFT computes with it."""
    golden = GOLDEN["cases"]["-".join(case)]
    path.mkdir()
    (path / CONFIG).write_text(json.dumps(golden["config"]))
    save_file(golden["tensors"], path / TENSORS, metadata={"format": "pt"})
    return path, golden["logits"], golden["gradients"]


@pytest.mark.parametrize("case", CASES)
def test_golden_files_of_peft(case, bases, tmp_path):
    path, base = bases[theirs.base_of(case)]
    model = check_reading(case, base, *golden_file(case, tmp_path / "theirs"), through_merged, tmp_path)
    if importlib.util.find_spec("peft"):
        check_writing(model, path, through_merged, tmp_path)


@pytest.mark.parametrize("case", PRODUCT)
def test_the_product_beside_peft(case, bases, tmp_path):
    pytest.importorskip("peft")
    path, base = bases[theirs.base_of(case)]
    live, adapter = theirs.write_matrix_case(path, tmp_path / "theirs", case), tmp_path / "theirs"
    if "-".join(case) in GOLDEN["cases"]:
        golden = GOLDEN["cases"]["-".join(case)]
        np.testing.assert_allclose(live["logits"], golden["logits"], rtol=0, atol=1e-5)
    model = check_reading(case, base, adapter, live["logits"], live["gradients"], logits_and_gradients, tmp_path)
    check_writing(model, path, logits_and_gradients, tmp_path)
