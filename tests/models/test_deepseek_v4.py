"""DeepSeek V4 against transformers: sequences longer than the window, than compressed keys and than the choice."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import maxlib
from maxlib import nn, training
from maxlib.models import deepseek_v4
from maxlib.models._sizes import SLIDING
from maxlib.models.deepseek_v4 import HEAVY, SPARSE
from maxlib.weights import HFConfig
from maxlib.weights.files import Header, write_file
from tests.models import parity
from tests.models.conformance import BASE, Conformance, _logits, assert_close
from tests.nn.tiny import filled

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1.6e5,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "partial_rotary_factor": 0.5,
    "attention_factor": 1.0,
}
ROPES = {"main": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "compress": YARN}


class TestDeepSeekV4(Conformance):
    family = "deepseek_v4"
    config = "DeepseekV4Config"
    dtype = "float64"
    gradients = 1e-3
    base = BASE | {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "q_lora_rank": 14,
        "partial_rotary_factor": 0.5,
        "rope_parameters": ROPES,
        "o_groups": 2,
        "o_lora_rank": 6,
        "sliding_window": 5,
        "compress_rates": {SPARSE: 4, HEAVY: 6},
        # Of so many heads hardly ever all are zero, where any choice would do.
        "index_n_heads": 16,
        "index_head_dim": 12,
        "index_topk": 3,
        "moe_intermediate_size": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "swiglu_limit": 1.0,
        "hc_mult": 3,
        "pad_token_id": None,
    }
    cases = {
        "every_kind": {
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, SPARSE, HEAVY],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
        },
        "in_turn": {
            "num_hidden_layers": 5,
            "layer_types": [HEAVY, SPARSE, HEAVY, SPARSE, HEAVY],
            "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 3,
            "compress_rates": {SPARSE: 2, HEAVY: 9},
            "hc_mult": 4,
            "hc_sinkhorn_iters": 3,
            "vocab_size": 53,
            "swiglu_limit": 10.0,
        },
    }
    matters = {
        "rms_norm_eps": 0.1,
        "routed_scaling_factor": 1.0,
        "sliding_window": 4,
        "index_topk": 2,
        "swiglu_limit": 0.5,
        "hc_sinkhorn_iters": 2,
        "hc_eps": 0.1,
        "rope_parameters.compress.factor": 4.0,
    }
    refused = {
        "hidden_act": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
        "norm_topk_prob": False,
        "scoring_func": "sigmoid",
        "num_key_value_heads": 2,
        "n_shared_experts": 2,
        "mlp_layer_types": ["moe", "hash_moe", "moe"],
        "layer_types": ["full_attention"] * 3,
        "qk_rope_head_dim": 4,
    }
    windows = {"every_kind": {5, 2}, "in_turn": {5, 2}}  # slots of the window, and rows of entries

    @pytest.mark.full
    def test_left_padding_changes_nothing(self, name, exact):
        """Compressed keys count from the first token, not from the first column (as transformers counts them)."""
        case, _, model = exact(name)
        want = _logits(model, case["tokens"])
        padded = np.pad(case["tokens"], ((0, 0), (5, 0)))
        valid = np.broadcast_to(np.arange(padded.shape[1]) >= 5, padded.shape).astype(np.int32)
        assert_close(_logits(model, padded, valid)[:, 5:], want)

    def test_both_spellings_are_read(self, name):
        """The release's: a ratio for each layer, and one more for its prediction module."""
        config = parity.golden(self.family)[name]["config"]
        scaling = {k: v for k, v in YARN.items() if k in ("factor", "original_max_position_embeddings")}
        rates = config["compress_rates"]
        ratios = {SLIDING: 0, SPARSE: 4, HEAVY: 128}
        dropped = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor")
        released = {k: v for k, v in config.items() if k not in dropped} | {
            "compress_ratios": [*(ratios[kind] for kind in config["layer_types"]), 0],
            "compress_rate_csa": rates[SPARSE], "compress_rate_hca": rates[HEAVY],
            "num_hash_layers": config["mlp_layer_types"].count("hash_moe"), "qk_rope_head_dim": 8,
            "rope_theta": 1e4, "compress_rope_theta": 1.6e5, "rope_scaling": scaling | {"type": "yarn"},
        }  # fmt: skip
        now, before = HFConfig(config), HFConfig(released)
        assert deepseek_v4.FIELDS.read(before) == deepseek_v4.FIELDS.read(now)
        now.done()
        before.done()


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def test_files_of_the_release(tmp_path):
    """Its names, FP8 matrices in blocks of 128 x 128, and FP4 experts: equal to plain weights of the same values."""
    config = parity.golden("deepseek_v4")["every_kind"]["config"] | {"hidden_size": 160, "moe_intermediate_size": 32}
    cfg, random = deepseek_v4.FIELDS.read(HFConfig(config)), np.random.default_rng(0)
    maxlib.save_pretrained(filled(lambda: deepseek_v4.DeepSeekV4(cfg, rngs=nnx.Rngs(0))), tmp_path / "plain")
    plain, release = load_file(tmp_path / "plain" / "model.safetensors"), {}
    for name, value in plain.items():
        renamed = name.removeprefix("model.").replace("attn.norm.", "attn.kv_norm.")
        renamed = renamed.replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        release[renamed] = value
        if value.ndim != 2 or not name.endswith("weight") or "w" not in name.split(".")[-2]:
            continue
        fp4 = ".experts." in name
        rows, columns = value.shape
        blocks = (rows, columns // 32) if fp4 else (-(-rows // 128), -(-columns // 128))
        scales = (2.0 ** random.integers(-9, 9, blocks)).astype(ml_dtypes.float8_e8m0fnu)
        if fp4:
            stored = random.integers(-128, 128, (rows, columns // 2), np.int8)
            bits = stored.view(np.uint8)
            numbers = np.stack([E2M1[bits & 15], E2M1[bits >> 4]], axis=-1).reshape(rows, columns)
        else:
            stored = value.astype(ml_dtypes.float8_e4m3fn)
            numbers = stored.astype(np.float32)
        block = np.ones((1, 32) if fp4 else (128, 128), np.float32)
        plain[name] = numbers * np.kron(scales.astype(np.float32), block)[:rows, :columns]
        release |= {renamed: stored, f"{renamed.removesuffix('weight')}scale": scales}
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    written = json.loads((tmp_path / "plain" / "config.json").read_text())
    for path, tensors, more in (("plain", plain, {}), ("release", release, {"quantization_config": quantization})):
        (tmp_path / path).mkdir(exist_ok=True)
        headers = [Header(name, t.dtype, t.shape) for name, t in tensors.items()]
        write_file(tmp_path / path / "model.safetensors", headers, iter(tensors.values()))
        (tmp_path / path / "config.json").write_text(json.dumps(written | more))
    want, got = (
        nn.variables(maxlib.from_pretrained(tmp_path / path, dtype="float32")) for path in ("plain", "release")
    )
    for path, value in want.items():
        np.testing.assert_array_equal(got[path].get_value(), value.get_value(), err_msg=path)


# --- prediction modules ---


def with_module(path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A directory like the releases, and the tensors of its module: those of a layer, two projections and norms."""
    case = parity.golden("deepseek_v4")["every_kind"]
    dim, shapes = case["config"]["hidden_size"], case["shapes"]
    layer = {name.replace("model.layers.2", "mtp.0"): shape for name, shape in shapes.items() if ".layers.2." in name}
    layer = {name: shape for name, shape in layer.items() if ".compressor." not in name}  # only HEAVY layers have one
    head = {f"mtp.0.hc_head_{name}": shapes[f"model.hc_head.hc_{name}"] for name in ("fn", "base", "scale")}
    norms = {f"mtp.0.{name}.weight": [dim] for name in ("enorm", "hnorm", "norm")}
    projections = {f"mtp.0.{name}.weight": [dim, dim] for name in ("e_proj", "h_proj")}
    module = parity.tensors(layer | head | norms | projections)
    return parity.directory(path, case, **module), module


@pytest.mark.full
def test_the_module_predicts_as_the_formulas_say(tmp_path):
    """Its layer is compared with transformers' elsewhere: what is around it, with float64 formulas."""
    path, tensors = with_module(tmp_path)
    model, tokens = maxlib.from_pretrained(path, num_mtp=1), jnp.asarray(parity.tokens(61, 24))
    batch = {"tokens": tokens, "targets": jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)}
    w = {name.removeprefix("mtp.0."): value for name, value in tensors.items()}

    def normed(x, name):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * w[f"{name}.weight"]

    @jax.jit
    def run(model, batch):
        hidden = model(batch["tokens"], dtype=jnp.float32).hidden
        (module,) = model.predict_ahead(hidden, batch["tokens"])
        embedded = model.embed(jnp.roll(batch["tokens"], -1, axis=1), dtype=jnp.float32)
        x = normed(hidden[..., 32:].reshape(*hidden.shape[:2], 3, 32), "hnorm") @ w["h_proj.weight"].T
        x = x + (normed(embedded, "enorm") @ w["e_proj.weight"].T)[:, :, None]
        streams = model.mtp[0].block(x, nn.make_context(*batch["tokens"].shape))[0]
        return hidden, module.hidden, streams, training.MTP(0.25)(model, batch, dtype=jnp.float32)

    with jax.numpy_rank_promotion("allow"):  # of the formulas
        hidden, got, streams, (loss, stats) = jax.tree.map(np.asarray, run(model, batch))
    # The head's weights of streams: a sigmoid of a product with all of them, normed.
    flat = streams.reshape(*streams.shape[:2], -1)
    flat = flat / np.sqrt(np.mean(flat**2, -1, keepdims=True) + 1e-6)
    share = 1 / (1 + np.exp(-(w["hc_head_scale"] * (flat @ w["hc_head_fn"].T) + w["hc_head_base"]))) + 1e-6
    x = np.einsum("btn,btnd->btd", share, streams)
    want = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * w["norm.weight"]
    assert_close(got[:, :-1, :32], want[:, :-1], 1e-4)
    assert_close(got[:, :-1, 32:], streams.reshape(*streams.shape[:2], -1)[:, :-1], 1e-4)
    plain = maxlib.from_pretrained(path)
    assert_close(hidden[..., :32], plain(tokens, dtype=jnp.float32).hidden, 1e-5)
    # At place i it predicts token i + 2 by the model's own head.
    logits = want[:, :-2] @ np.asarray(model.head_weight(), np.float64).T
    right = np.take_along_axis(logits, np.asarray(tokens)[:, 2:, None], axis=2)[..., 0]
    nll = np.sum(np.log(np.exp(logits).sum(-1)) - right)
    assert float(stats.sums["mtp1/nll"].sum) == pytest.approx(nll, rel=1e-4)
    assert float(loss) == pytest.approx(float(stats.sums["nll"]) + 0.25 * nll, rel=1e-4)


def test_the_module_is_read_and_written_as_released(tmp_path):
    path, module = with_module(tmp_path / "released")
    for num_mtp, asked in ((0, {}), (1, {"num_mtp": 1})):
        model, out = maxlib.from_pretrained(path, **asked), tmp_path / str(num_mtp)
        assert len(model.mtp) == num_mtp
        maxlib.save_pretrained(model, out)
        got, want = load_file(out / "model.safetensors"), load_file(path / "model.safetensors")
        assert want.keys() - got.keys() == ({*()} if num_mtp else module.keys())
        assert all(value.tobytes() == want[name].tobytes() for name, value in got.items())
        assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == num_mtp
