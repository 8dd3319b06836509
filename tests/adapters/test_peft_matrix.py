"""PEFT's files, read and written again: targets x modules_to_save x tied tables x kinds x experts.

By default few of the golden cases of `peft_parity.py` that together have every value, without PEFT: what we write of
them equals its files. With `full` all of them, which have every pair, and the whole product beside PEFT. Golden cases
compute gradients through merged weights, so that all share one compiled model; the product runs the adapters, too.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import adapters, nn, quantization, training
from maxlib.adapters import _peft_config
from maxlib.adapters._saved_modules import untied
from tests.adapters import peft_parity as theirs
from tests.adapters.test_adapters import jit, put_on, trained, tuned
from tests.models import parity

GOLDEN = theirs.matrix_golden()


def with_every_value(cases):
    """Few of the cases that together have every value of all."""
    missing, chosen = {value for case in cases for value in case}, []
    while missing:
        chosen.append(max(cases, key=lambda case: len(missing.intersection(case))))
        missing.difference_update(chosen[-1])
    return chosen


PAIRS = [tuple(name.split("-")) for name in GOLDEN["cases"]]
BY_DEFAULT = with_every_value(PAIRS)
CASES = [pytest.param(c, id="-".join(c), marks=() if c in BY_DEFAULT else pytest.mark.full) for c in PAIRS]
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
    if adapted:  # ours has a whole table
        got, _ = run(*nn.partition(adapters.load(base, tmp_path / "again", into_base=True), adapters.trainable))
        np.testing.assert_allclose(got, logits, rtol=0, atol=2e-5)
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
    _, base = bases[theirs.base_of(case)]
    check_reading(case, base, *golden_file(case, tmp_path / "theirs"), through_merged, tmp_path)


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


# --- saved modules ---


@pytest.fixture
def saved_head(bases, tmp_path):
    """A model with the head that a golden file of PEFT saves."""
    adapter, *_ = golden_file(("attention", "saved_head", "untied", "rslora", "all"), tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"whole tables \(\['lm_head.weight'\]\).*into_base=True"):
        adapters.load(bases["untied"][1], adapter)
    return adapters.load(bases["untied"][1], adapter, into_base=True)


def test_a_saved_module_is_trained_frozen_and_merged(saved_head, tmp_path):
    assert "head.w" in training.make_state(saved_head, optax.sgd(0.1)).trainable
    report = adapters.report(saved_head)
    assert report.saved == ("head.w",) and "saved modules" in report.readers[1] and "saved module" in str(report)
    with pytest.raises(ValueError, match=r"\['head.w'\] are trained as a whole"):
        adapters.base_model(saved_head)

    frozen = adapters.freeze(saved_head)
    assert not any(adapters.trainable(path, v) for path, v in nn.variables(frozen).items())
    new = put_on(frozen, adapters.LoRA(2, 4))
    np.testing.assert_array_equal(adapters.base_model(new).head.w[...], saved_head.head.w[...])
    config, tensors = written(new, tmp_path / "frozen")
    assert config["modules_to_save"] == ["lm_head"]
    np.testing.assert_array_equal(tensors["base_model.model.lm_head.weight"], saved_head.head.w[...])

    merged = jit(adapters.merge)(saved_head)
    assert nn.tree.default_filter(merged)("head.w", merged.head.w)  # a parameter like any other
    maxlib.save_pretrained(merged, tmp_path / "merged")
    np.testing.assert_array_equal(maxlib.from_pretrained(tmp_path / "merged").head.w[...], saved_head.head.w[...])


def test_a_tied_model_with_its_own_head_is_exported_with_it(bases, tmp_path):
    """PEFT's copy of a tied embedding leaves the head as it was: merged, the model has two tables."""
    adapter, *_ = golden_file(("linear", "saved_embedding", "tied", "lora", "all"), tmp_path / "theirs")
    model = adapters.merge(adapters.load(bases["tied"][1], adapter, into_base=True))
    maxlib.save_pretrained(model, tmp_path / "merged")
    again = maxlib.from_pretrained(tmp_path / "merged")
    np.testing.assert_array_equal(again.head.w[...], bases["tied"][1].embed.w[...])
    np.testing.assert_array_equal(again.embed.w[...], model.embed.w[...])
    assert np.abs(again.head.w[...] - again.embed.w[...]).max() > 0.05


def test_what_cannot_be_read_is_refused(bases, tmp_path):
    adapter, *_ = golden_file(("attention", "saved_norms", "kept_tied", "dora", "frozen"), tmp_path / "theirs")
    few = {n: v for n, v in load_file(adapter / TENSORS).items() if "layers.1.input_layernorm" not in n}
    save_file(few, adapter / TENSORS)
    with pytest.raises(ValueError, match=r"some layers of layers\.groups\.0\.0\.\w+"):
        adapters.load(bases["tied"][1], adapter, into_base=True)
    save_file({n: v[1:] if "input_layernorm" in n else v for n, v in few.items()}, adapter / TENSORS)
    with pytest.raises(ValueError, match=r"input_layernorm.weight must be \(\d+,\), got"):
        adapters.load(bases["tied"][1], adapter, into_base=True)

    adapter, *_ = golden_file(("head", "saved_none", "kept_tied", "dora", "frozen"), tmp_path / "head")
    small = quantization.for_inference(
        bases["tied"][1], [quantization.Rule(quantization.Format("int8"), kinds=("embedding",))]
    )
    with pytest.raises(ValueError, match="quantized weight: load the adapter first"):
        adapters.load(small, adapter, into_base=True)
    tensors = load_file(adapter / TENSORS)
    save_file({n: v for n, v in tensors.items() if "lm_head.lora_magnitude" not in n}, adapter / TENSORS)
    with pytest.raises(ValueError, match="lm_head: use_dora and lora_magnitude_vector require each other"):
        adapters.load(bases["tied"][1], adapter, into_base=True)
    save_file({n: v[:, 1:] if "lm_head.lora_A" in n else v for n, v in tensors.items()}, adapter / TENSORS)
    with pytest.raises(ValueError, match="lm_head: factors must have rank .* and fit the table"):
        adapters.load(bases["tied"][1], adapter, into_base=True)


def test_configs_of_initializers_that_leave_the_base_are_read(bases, tmp_path):
    adapter, *_ = golden_file(("attention", "saved_none", "untied", "lora", "frozen"), tmp_path / "theirs")
    fields = json.loads((adapter / CONFIG).read_text())
    eva = {"init_lora_weights": "eva", "eva_config": {"rho": 2.0, "tau": 0.99, "whiten": False}}
    (adapter / CONFIG).write_text(json.dumps(fields | eva))
    adapters.load(bases["untied"][1], adapter)


# --- experts ---

ATTENTION = adapters.Rule(adapters.LoRA(2, 4), match="layers.attn.q")
EXPERTS = {
    "gate_up": [adapters.Rule(adapters.LoRA(2, 3), match="*.gate"), adapters.Rule(adapters.LoRA(2, 3), match="*.up")],
    "gate": [adapters.Rule(adapters.LoRA(2, 3), match="*.gate")],
    "down": [adapters.Rule(adapters.LoRA(2, 3, rslora=True), match="*.down")],
    "scales": [
        adapters.Rule(adapters.LoRA(2, 3), match="*.gate"),
        adapters.Rule(adapters.LoRA(3, 7), match="*.up"),
        adapters.Rule(adapters.LoRA(2, 5), match="*.down"),
    ],
}


@pytest.mark.parametrize("name", EXPERTS)
def test_adapters_of_some_projections_of_experts_are_read_again(name, bases, tmp_path):
    _, base = bases["untied"]
    model = tuned(base, [ATTENTION, *EXPERTS[name]], size=0.1)
    if name in ("gate_up", "gate"):
        with pytest.raises(ValueError, match=r'PEFT reads .* pass experts="fused"'):
            adapters.save(model, tmp_path / "each", experts="each")
    adapters.save(model, tmp_path / "ours")
    again = adapters.load(base, tmp_path / "ours")
    want, got = (through_merged(*nn.partition(each, adapters.trainable))[0] for each in (model, again))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", EXPERTS)
def test_adapters_of_some_projections_of_experts_are_those_of_peft(name, bases, tmp_path):
    """PEFT reads modules of experts by joining gate and up, at one scale, below an adapter of down."""
    pytest.importorskip("peft")
    path, base = bases["untied"]
    check_writing(tuned(base, [ATTENTION, *EXPERTS[name]]), path, through_merged, tmp_path)


def test_names_that_files_spell_otherwise_and_experts_without_a_gate(tmp_path):
    """Nemotron-H is `backbone` in files and `model` in transformers, whose names PEFT's patterns have."""
    base = maxlib.from_pretrained(parity.directory(tmp_path / "base", next(iter(parity.golden("nemotron_h").values()))))
    alphas = {"*attn.q": 64, "*attn.*": 2, "*moe.up": 4, "*moe.down": 6}
    rules = [adapters.Rule(adapters.LoRA(2, alpha), match) for match, alpha in alphas.items()]
    model = tuned(base, rules)
    adapters.save(model, tmp_path / "adapter")
    again = adapters.load(base, tmp_path / "adapter")
    want, got = map(nn.variables, map(jit(adapters.merge), (model, again)))
    for path, variable in want.items():
        np.testing.assert_allclose(got[path].get_value(), variable.get_value(), atol=1e-6, err_msg=path)


def test_a_module_is_saved_with_what_it_contains(tmp_path):
    """PEFT copies all of a module that `modules_to_save` names; what is inside would else not be trained."""
    config = _peft_config.Config({"modules_to_save": ["mlp", "lm_head"]}, tmp_path)
    saved = "lm_head", "model.layers.0.mlp", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.experts.3.w1"
    assert all(map(config.saves, saved))
    others = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp_norm", "model.embed_tokens"
    assert not any(map(config.saves, others)) and not _peft_config.Config({}, tmp_path).saves("lm_head")
