"""PEFT directories: results equal PEFT's, exports load in PEFT, and what cannot be represented is refused."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import adapters, nn
from tests.adapters import peft_parity as theirs
from tests.adapters.test_adapters import jit, trained, tuned
from tests.models import parity

# Their files hold rows of several of our matrices in turn, head by head: refused by name when they are read.
NOT_READ = {"qwen3_next": "linear_attn.in_proj_ba"}
READ = [n for n in theirs.CASES if n not in NOT_READ]
CASES = [pytest.param(n, marks=pytest.mark.full) for n in READ]  # by default: test_peft_matrix.py


@jit
def logits(model, tokens):
    return model.logits(model(tokens, dtype=jnp.float32).hidden)


@pytest.fixture
def base(tmp_path):
    def read(name):
        return maxlib.from_pretrained(parity.directory(tmp_path / f"base_{name}", theirs.base_case(name)))

    return read


def halved(model):
    """Makes adapters smaller: at their size, rounding Gemma's weights once moves a logit of PEFT in float64 by 3e-4."""
    factors, rest = nn.partition(model, adapters.trainable)
    return nn.combine({name: 0.5 * value for name, value in factors.items()}, rest)


def equal(got, want, atol=5e-5):
    size = np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=atol * max(1.0, float(size)))


@pytest.mark.full
@pytest.mark.parametrize("name", NOT_READ)
def test_matrices_that_are_held_otherwise_are_refused_by_name(name, base, tmp_path):
    with pytest.raises(ValueError, match=NOT_READ[name]):
        adapters.load(base(name), theirs.directory(tmp_path / "adapter", name))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_peft(name, base, tmp_path):
    model = base(name)
    adapted = adapters.load(model, theirs.directory(tmp_path / "adapter", name))
    tokens = theirs.tokens(model.cfg.vocab)
    got, want = logits(adapted, tokens)[:, -theirs.KEPT :], theirs.golden(name)["logits"]
    equal(got, want)
    assert np.abs(want - logits(model, tokens)[:, -theirs.KEPT :]).max() > 0.05

    # What is written is read as the same, in every layout that the family has.
    for layout in (None, "fused") if "moe" in name else (None,):
        adapters.save(adapted, tmp_path / f"own_{layout}", experts=layout)
        again = adapters.load(model, tmp_path / f"own_{layout}")
        equal(logits(again, tokens)[:, -theirs.KEPT :], want)


@pytest.mark.parametrize("name", CASES)
def test_peft_reads_what_is_written(name, base, tmp_path):
    peft = pytest.importorskip("peft")
    model = base(name)
    adapted = halved(trained(adapters.load(model, theirs.directory(tmp_path / "adapter", name)), size=0.1))
    tokens = theirs.tokens(model.cfg.vocab)
    adapters.save(adapted, tmp_path / "own", dropout=0.25)
    assert peft.PeftConfig.from_pretrained(tmp_path / "own").lora_dropout == 0.25
    assert adapters.lora_dropout(tmp_path / "own") == 0.25
    path = tmp_path / f"base_{name}"
    got = theirs.their_logits(theirs.their_base(path), tmp_path / "own", tokens)
    equal(logits(adapted, tokens), got)
    assert np.abs(got - logits(model, tokens)).max() > 0.05


@pytest.mark.full
@pytest.mark.parametrize("name", theirs.CASES)
def test_golden_arrays_are_what_peft_gives(name, tmp_path):
    pytest.importorskip("peft")
    now, golden = theirs.theirs(name, tmp_path), theirs.golden(name)
    assert now["shapes"] == golden["shapes"]
    equal(now["logits"], golden["logits"], 1e-5)


# --- what is refused ---


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return maxlib.from_pretrained(parity.directory(tmp_path_factory.mktemp("base"), theirs.base_case("llama_layers")))


@pytest.fixture
def files(llama, tmp_path):
    """A tiny Llama, and a function that writes its PEFT directory with changes."""

    def write(change=lambda tensors: tensors, **config):
        path = theirs.directory(tmp_path / "adapter", "llama_layers", **config)
        tensors = load_file(path / "adapter_model.safetensors")
        save_file(change(tensors), path / "adapter_model.safetensors", metadata={"format": "pt"})
        return path

    return llama, write


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA'"),
        ({"lora_alpha": None}, "lora_alpha a number"),
        ({"bias": "all"}, "unsupported fields that affect the result: {'bias': 'all'}"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"some_day": {"a": 1}}, "some_day"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"use_dora": True}, "lora_magnitude_vector require each other"),
        ({"r": 5}, "must have rank 5"),
        ({"rank_pattern": {"q_proj": 7}}, "q_proj: factors must have rank 7"),
    ],
)
def test_fields_that_change_the_result_are_honoured_or_refused(files, config, message):
    model, write = files
    with pytest.raises(ValueError, match=re.escape(message)):
        adapters.load(model, write(**config))


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed("layers.0", "layers.9"), "the model has no such matrix"),
        (renamed("q_proj", "qq_proj"), "qq_proj is adapted, but the model has no such matrix"),
        (renamed("base_model.model.", ""), "names must begin with 'base_model.model.'"),
        (renamed("lora_A", "lora_E"), "a kind of adapter that is not supported"),
        (lambda t: {n: v for n, v in t.items() if "lora_A" not in n}, "needs lora_A and lora_B"),
        (lambda t: {n: v[..., 1:] if "lora_A" in n else v for n, v in t.items()}, "inputs and"),
        (
            lambda t: t | {"base_model.model.other.weight": np.zeros(3, np.float32)},
            "without a counterpart in the model: ['other.weight']",
        ),
        (lambda t: {n: v[0] if "lora_B" in n else v for n, v in t.items()}, "both matrices"),
        (lambda t: {}, "has no tensors, so the result would be the base model"),
    ],
)
def test_tensors_without_a_place_are_refused(files, change, message):
    model, write = files
    with pytest.raises(ValueError, match=re.escape(message)):
        adapters.load(model, write(change))


def test_missing_files_are_named(files, tmp_path):
    model, write = files
    with pytest.raises(FileNotFoundError, match="adapter_config.json"):
        adapters.load(model, tmp_path)
    (write() / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="adapter_model.safetensors"):
        adapters.load(model, tmp_path / "adapter")


def test_square_experts_of_unknown_version_are_refused_and_known_ones_turned(tmp_path):
    """Experts as wide as the model: PEFT before 0.19.1 swapped inputs and outputs."""
    case = dict(theirs.base_case("qwen3_moe_down"))
    width = case["config"]["hidden_size"]
    case["config"] = case["config"] | {"moe_intermediate_size": width}
    old = theirs.base_case("qwen3_moe_down")["config"]["moe_intermediate_size"]
    wide = lambda n, s: [width if d == old and ".experts." in n else d for d in s]
    case["shapes"] = {n: wide(n, s) for n, s in case["shapes"].items()}
    model = maxlib.from_pretrained(parity.directory(tmp_path / "base", case))
    shapes = theirs.golden("qwen3_moe_down")["shapes"]
    shapes = {n: wide(".experts.", s) if "experts" in n else s for n, s in shapes.items()}
    path = theirs.directory(tmp_path / "adapter", "qwen3_moe_down")
    save_file(theirs.values(shapes), path / "adapter_model.safetensors", metadata={"format": "pt"})
    loaded = {}
    for version in ("0.18.1", "0.19.1", None):
        config = json.loads((path / "adapter_config.json").read_text()) | {"peft_version": version}
        (path / "adapter_config.json").write_text(json.dumps(config))
        if version is None:
            with pytest.raises(ValueError, match="is square.* whether A and B are swapped .*add peft_version"):
                adapters.load(model, path)
        else:
            layers = adapters.load(model, path).layers
            loaded[version] = next(layer.moe for layer in layers if layer.moe is not None).down.matmul
    narrow = {n: v[:, 1:] if "experts" in n and "lora_A" in n else v for n, v in theirs.values(shapes).items()}
    save_file(narrow, path / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"factors must be for {width} inputs and {width} outputs, got"):
        adapters.load(model, path)
    new, before = loaded["0.19.1"], loaded["0.18.1"]
    np.testing.assert_array_equal(new.a[...], jnp.swapaxes(before.b[...], 1, 2))
    np.testing.assert_array_equal(new.b[...], jnp.swapaxes(before.a[...], 1, 2))


def test_what_peft_cannot_express_is_refused(files, tmp_path):
    model, write = files
    with pytest.raises(ValueError, match="no adapters to save"):
        adapters.save(model, tmp_path / "own")
    with pytest.raises(ValueError, match="the model has adapters"):
        maxlib.save_pretrained(adapters.load(model, write()), tmp_path / "own")
    dora = adapters.LoRA(2, 4, dora=True)
    rules = [adapters.Rule(dora, match="layers.attn.q"), adapters.Rule(adapters.LoRA(2, 4))]
    with pytest.raises(ValueError, match="one use_dora for all"):
        adapters.save(tuned(model, rules), tmp_path / "own")
    loaded = adapters.load(model, write())
    with pytest.raises(ValueError, match="cannot express DoRA on top of another adapter"):
        adapters.save(adapters.add(adapters.freeze(loaded), dora, rngs=nnx.Rngs(0)), tmp_path / "own")
    with pytest.raises(ValueError, match="dropout must be at least 0 and below 1, got 1"):
        adapters.save(loaded, tmp_path / "own", dropout=1.0)
    lines = adapters.save(loaded, tmp_path / "own", dropout=0.25)
    assert lines[0].startswith("PEFT: all") and "max_lora_rank of at least 3" in lines[1]
    assert adapters.lora_dropout(tmp_path / "own") == 0.25
    with pytest.raises(ValueError, match="lora_dropout must be at least 0 and below 1, got 2"):
        adapters.lora_dropout(write(lora_dropout=2))


def test_what_peft_would_ignore_is_a_warning(base, tmp_path):
    """DeepSeek's first layer is dense: beside experts PEFT reads its MLP as parameters, which have no DoRA there."""
    model, own = base("deepseek_experts"), tmp_path / "own"
    adapted = tuned(model, [adapters.Rule(adapters.LoRA(2, 4, dora=True), match="*.down")])
    with pytest.warns(UserWarning, match=r"own: PEFT: ignores \d+ dense MLP modules beside experts, such as"):
        adapters.save(adapted, own, experts="each")
    with pytest.raises(ValueError, match="experts.* PEFT has no DoRA for fused experts"):
        adapters.save(adapted, own, experts="fused")

    tensors = load_file(own / "adapter_model.safetensors")
    rest = {name: value for name, value in tensors.items() if ".experts.1." not in name}
    save_file(rest, own / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"all \d+ experts must have adapters, there are none of \[1\]"):
        adapters.load(model, own)
    save_file(tensors, own / "adapter_model.safetensors")
    config = json.loads((own / "adapter_config.json").read_text())
    (own / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": {"experts.1.down_proj": 9}}))
    with pytest.raises(ValueError, match="experts of a layer must have one rank and alpha"):
        adapters.load(model, own)


def test_readers_are_told_the_rank_that_is_written(files, tmp_path):
    model, write = files
    both = adapters.add(adapters.freeze(adapters.load(model, write())), adapters.LoRA(2, 4), rngs=nnx.Rngs(0))
    rules = [adapters.Rule(adapters.LoRA(2, 4), match="layers.attn.q")]
    few = adapters.add(adapters.freeze(adapters.add(model, rules, rngs=nnx.Rngs(0))), rules, rngs=nnx.Rngs(1))
    line = adapters.save(few, tmp_path / "few")[1]
    shapes = {v.shape for n, v in load_file(tmp_path / "few" / "adapter_model.safetensors").items() if "lora_A" in n}
    assert {rank for rank, _ in shapes} == {4} and line.endswith("max_lora_rank of at least 4")
    assert adapters.report(few).readers[1] == line
    assert "several ranks or scales" in adapters.save(both, tmp_path / "both")[1]


@pytest.mark.parametrize(
    "damage",
    [
        "[" * 9000,
        "[]",
        '{"peft_type": "LORA", "r": true, "lora_alpha": 8}',
        '{"peft_type": "LORA", "r": 2, "lora_alpha": NaN}',
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 8, "rank_pattern": ["q"]}',
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 8, "rank_pattern": {"(": 2}}',
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_parameters": 3}',
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 8, "init_lora_weights": {}}',
    ],
)
def test_a_damaged_config_is_named(damage, tmp_path):
    (tmp_path / "adapter_config.json").write_text(damage)
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        adapters.load(None, tmp_path)
