"""Llama against transformers: live where torch installs, through golden arrays everywhere."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import maxlib
from maxlib import nn, ops, sharding, weights
from maxlib.models import llama
from tests.models import parity

SEQ = 24
# Longer than the first training, so that every scaling has its effect.
ROPES = {
    "linear": ({"factor": 2.5}, 32),
    "dynamic": ({"factor": 2.0}, 16),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        64,
    ),
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0}, 64),
    "longrope": (
        {
            "short_factor": [1.0] * 4,
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        64,
    ),
}
CASES = {
    "gqa": {},
    "mha_tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "mqa_biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "odd_sizes": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "hidden_size": 33,
        "head_dim": 10,
        "vocab_size": 53,
    },
    "heads_that_do_not_divide": {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 6},
    **{
        kind: {
            "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **fields},
            "max_position_embeddings": limit,
            "tie_word_embeddings": kind == "yarn",
        }
        for kind, (fields, limit) in ROPES.items()
    },
}
cases = pytest.mark.parametrize("name", CASES)
FIRST = ("gqa",)  # by default
first = pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)


def transformers_cases():
    """Returns the configuration for transformers, used by `parity.write` and the live test."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    base = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    made = {}
    for name, changes in CASES.items():
        valid = base | changes | {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32}
        config = transformers.LlamaConfig(**valid)
        for field, value in (base | changes).items():  # set later, sizes that its constructor refuses are taken
            setattr(config, field, value)
        if "head_dim" not in changes:
            config.head_dim = config.hidden_size // config.num_attention_heads
        made[name] = (config, parity.tokens(config.vocab_size, SEQ))
    return made


@pytest.fixture(scope="module")
def live():
    return transformers_cases()


def expected(name: str):
    """A warning, where transformers 5 would not open the export."""
    return pytest.warns(UserWarning, match="refuses") if "divide" in name else contextlib.nullcontext()


@first
def test_logits_and_gradients_are_those_of_transformers(name, tmp_path):
    case = parity.golden("llama")[name]
    model = maxlib.from_pretrained(parity.directory(tmp_path / "hf", case))
    with expected(name):
        logits, gradients = parity.ours(model, case["tokens"], tmp_path / "gradients")
    assert np.abs(logits - case["logits"]).max() < 1e-4 * case["logits"].std()
    assert gradients.keys() == case["shapes"].keys()
    for tensor, gradient in gradients.items():
        norm, product = case["gradients"][tensor]
        ours = parity.projection(tensor, gradient)
        np.testing.assert_allclose(ours, [norm, product], rtol=0, atol=1e-4 * norm, err_msg=tensor)


@pytest.mark.full
@cases
def test_golden_arrays_are_what_transformers_gives(name, live):
    golden, now = parity.golden("llama")[name], parity.theirs(*live[name])
    assert golden["shapes"] == now["shapes"]
    np.testing.assert_allclose(now["logits"], golden["logits"], atol=1e-5 * golden["logits"].std(), rtol=1e-5)
    for tensor, value in now["gradients"].items():
        np.testing.assert_allclose(value, golden["gradients"][tensor], rtol=1e-3, atol=1e-5 * value[0])


@pytest.mark.filterwarnings("ignore:nothing is split over")
@first
def test_export_is_bit_exact(name, tmp_path):
    """transformers' tensors and ours after a round trip, sharded one way: the same bytes under the same names."""
    case = parity.golden("llama")[name]
    path = parity.directory(tmp_path / "hf", case)
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    rules = sharding.FSDP  # neither odd vocabularies nor single heads divide over a tensor axis
    for where in ({}, {"layout": sharding.Layout(mesh, rules | {"embed": None} if name == "odd_sizes" else rules)}):
        model = maxlib.from_pretrained(path, **where)
        with expected(name):
            maxlib.save_pretrained(model, tmp_path / "out", max_shard_bytes=20_000, overwrite=True)
        out = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
        want = parity.tensors(case["shapes"])
        assert out.keys() == want.keys()
        assert all(out[k].dtype == want[k].dtype and np.array_equal(out[k], want[k]) for k in want)
        assert maxlib.from_pretrained(tmp_path / "out").cfg == model.cfg


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gqa", {"rms_norm_eps": 0.1}),
        ("gqa", {"rope_theta": 5e5}),
        ("linear", {"factor": 5.0}),
        ("dynamic", {"factor": 4.0}),
        ("llama3", {"factor": 4.0}),
        ("llama3", {"high_freq_factor": 2.0}),
        ("yarn", {"factor": 8.0}),
        ("longrope", {"long_factor": [2.0, 3.0, 8.0, 5.0]}),
    ],
    ids=str,
)
def test_every_field_matters(name, fields, tmp_path):
    case = parity.golden("llama")[name]
    rope = case["config"]["rope_parameters"]
    own = {"rope_parameters": rope | fields} if "rms_norm_eps" not in fields else fields
    path = parity.directory(tmp_path, {**case, "config": case["config"] | own})
    other = parity.logits(maxlib.from_pretrained(path), case["tokens"])
    assert np.abs(other - case["logits"]).max() > 1e-3 * case["logits"].std()


@pytest.mark.full
def test_logits_on_eight_devices(tmp_path):
    case = parity.golden("llama")["gqa"]
    layout = sharding.Layout(
        sharding.make_mesh(data=2, fsdp=2, tensor=2), sharding.FSDP_TP | {"vocab": None, "act_vocab": None}
    )
    model = maxlib.from_pretrained(parity.directory(tmp_path / "hf", case), layout=layout)
    with sharding.use(layout):
        logits = parity.logits(model, case["tokens"])
    assert np.abs(logits - case["logits"]).max() < 1e-4 * case["logits"].std()


@pytest.mark.full
@pytest.mark.parametrize("name", ["gqa", "mha_tied", "mqa_biases", "linear", "dynamic", "llama3", "yarn", "longrope"])
def test_transformers_opens_exports(name, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    case = parity.golden("llama")[name]
    maxlib.save_pretrained(maxlib.from_pretrained(parity.directory(tmp_path / "hf", case)), tmp_path / "out")
    tokens = torch.from_numpy(case["tokens"]).long()
    logits = []
    for path in (tmp_path / "hf", tmp_path / "out"):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        logits.append(model.eval()(tokens).logits.detach().numpy())
    np.testing.assert_array_equal(*logits)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_of_transformers(dtype, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    case = parity.golden("llama")["gqa"]
    path = parity.directory(tmp_path / "hf", case)
    half = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    half.save_pretrained(tmp_path / "half", max_shard_size="20KB")
    assert (tmp_path / "half/model.safetensors.index.json").exists()
    want = half.float().eval()(torch.from_numpy(case["tokens"]).long()).logits.detach().numpy()
    model = maxlib.from_pretrained(tmp_path / "half")
    assert {v.dtype for v in nn.partition(model)[0].values()} == {np.dtype(dtype)}
    assert np.abs(parity.logits(model, case["tokens"]) - want).max() < 1e-4 * want.std()


# Parameters in billions, as published.
SIZES = {
    "llama2-7b": 6.738,
    "llama2-13b": 13.016,
    "llama2-70b": 68.977,
    "llama3-8b": 8.030,
    "llama3-70b": 70.554,
    "llama3.1-8b": 8.030,
    "llama3.1-70b": 70.554,
    "llama3.1-405b": 405.853,
    "llama3.2-1b": 1.236,
    "llama3.2-3b": 3.213,
    "llama3.3-70b": 70.554,
}


@pytest.mark.parametrize("name", SIZES)
def test_presets(name):
    cfg = llama.PRESETS[name]
    assert llama.PRESETS.keys() == SIZES.keys()
    abstract = jax.eval_shape(lambda: llama.Llama(dataclasses.replace(cfg, num_layers=2), rngs=nnx.Rngs(0)))
    layer = nn.num_parameters(abstract.layers) // 2
    count = nn.num_parameters(abstract) + (cfg.num_layers - 2) * layer
    assert round(count / 1e9, 3) == SIZES[name]
    fields = weights.HFConfig(json.loads(json.dumps(llama.FIELDS.write(cfg))))
    assert llama.FIELDS.read(fields) == cfg
    fields.done()


def test_ropes_that_hugging_face_does_not_have_are_refused():
    cfg = llama.PRESETS["llama3.2-1b"]
    for rope in (ops.Rope(64, interleaved=True, max_length=8), ops.Rope(32, max_length=8)):
        with pytest.raises(ValueError, match="turns whole heads in halves"):
            llama.FIELDS.write(dataclasses.replace(cfg, rope=rope))


def test_sequences_beyond_the_config_are_refused(tmp_path):
    case = parity.golden("llama")["gqa"]
    model = maxlib.from_pretrained(parity.directory(tmp_path / "hf", case))
    with pytest.raises(ValueError, match="at most 64 positions, got 65"):
        model(jnp.zeros((1, 65), jnp.int32))
