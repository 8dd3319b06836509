"""Multi-token prediction of Qwen3-Next and Qwen3.5, which transformers lacks: float64 formulas on tensors of files."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import training
from maxlib.training._step import means
from tests.models import parity

SEQ = 24


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Weights of the module, with one tensor for each matrix of each expert."""
    c = text_of(config)
    D, N, K, H = (c[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    mlp = lambda width: {"gate_proj": [width, D], "up_proj": [width, D], "down_proj": [D, width]}
    module = {"fc": [D, 2 * D], "pre_fc_norm_embedding": [D], "pre_fc_norm_hidden": [D], "norm": [D]}
    layer = {"input_layernorm": [D], "post_attention_layernorm": [D]}
    layer |= {"self_attn.q_proj": [2 * N * H, D], "self_attn.k_proj": [K * H, D], "self_attn.v_proj": [K * H, D]}
    layer |= {"self_attn.o_proj": [D, N * H], "self_attn.q_norm": [H], "self_attn.k_norm": [H]}
    if c.get("num_experts"):
        experts = {f"experts.{e}.{part}": s for e in range(c["num_experts"]) for part, s in mlp(_expert(c)).items()}
        shared = {f"shared_expert.{part}": s for part, s in mlp(c["shared_expert_intermediate_size"]).items()}
        parts = experts | shared | {"gate": [c["num_experts"], D], "shared_expert_gate": [1, D]}
    else:
        parts = mlp(c["intermediate_size"])
    layer |= {f"mlp.{part}": shape for part, shape in parts.items()}
    shapes = module | {f"layers.0.{name}": shape for name, shape in layer.items()}
    return parity.tensors({f"mtp.{name}.weight": shape for name, shape in shapes.items()})


def _expert(c: dict[str, Any]) -> int:
    return c["moe_intermediate_size"]


def fused(tensors: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """The same with all experts in two tensors, as some releases have them."""
    tensors, stem = dict(tensors), "mtp.layers.0.mlp.experts"
    stacked = lambda part: np.stack([tensors.pop(f"{stem}.{e}.{part}_proj.weight") for e in range(count)])
    both = np.concatenate([stacked("gate"), stacked("up")], axis=1)
    return tensors | {f"{stem}.gate_up_proj": both, f"{stem}.down_proj": stacked("down")}


def predicted(
    tensors: dict[str, np.ndarray], config: dict[str, Any], hidden: np.ndarray, embedded: np.ndarray
) -> np.ndarray:
    """Computes the module's output from the model's output and the embeddings of the following tokens, `B T D`."""
    c, w = text_of(config), {name.removeprefix("mtp."): value.astype(np.float64) for name, value in tensors.items()}
    layer = lambda name: w[f"layers.0.{name}.weight"]
    norm = lambda x, scale: x / np.sqrt((x**2).mean(-1, keepdims=True) + c["rms_norm_eps"]) * (1 + scale)
    joined = [norm(embedded, w["pre_fc_norm_embedding.weight"]), norm(hidden, w["pre_fc_norm_hidden.weight"])]
    x = np.concatenate(joined, axis=-1) @ w["fc.weight"].T
    x = x + np.stack([_attention(row, c, layer, norm) for row in norm(x, layer("input_layernorm"))])
    h = norm(x, layer("post_attention_layernorm"))
    return norm(x + (_experts(h, c, layer) if c.get("num_experts") else _mlp(h, layer, "mlp")), w["norm.weight"])


def _attention(x, c, layer, norm) -> np.ndarray:
    """One row: grouped causal attention on turned queries and keys, and a gate on each dimension of each head."""
    T, N, K, H = len(x), c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    query, gate = np.split((x @ layer("self_attn.q_proj").T).reshape(T, N, 2 * H), 2, axis=2)
    key, value = ((x @ layer(f"self_attn.{part}_proj").T).reshape(T, K, H) for part in "kv")
    rope = c["rope_parameters"]
    turn = lambda x: _turned(x, int(H * rope["partial_rotary_factor"]), rope["rope_theta"])
    query, key = turn(norm(query, layer("self_attn.q_norm"))), turn(norm(key, layer("self_attn.k_norm")))
    out = np.zeros((T, N, H))
    for head in range(N):
        for t in range(T):
            group = head // (N // K)
            scores = key[: t + 1, group] @ query[t, head] / np.sqrt(H)
            share = np.exp(scores - scores.max())
            out[t, head] = share / share.sum() @ value[: t + 1, group]
    return (out / (1 + np.exp(-gate))).reshape(T, N * H) @ layer("self_attn.o_proj").T


def _turned(x: np.ndarray, size: int, theta: float) -> np.ndarray:
    """The first `size` dimensions of heads, `T N H`, turn in pairs of their halves."""
    angle = np.arange(len(x))[:, None, None] * theta ** (-2.0 * np.arange(size // 2) / size)
    a, b, rest = np.split(x, [size // 2, size], axis=2)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), rest], axis=2)


def _mlp(x, layer, name: str) -> np.ndarray:
    gate = x @ layer(f"{name}.gate_proj").T
    return (gate / (1 + np.exp(-gate)) * (x @ layer(f"{name}.up_proj").T)) @ layer(f"{name}.down_proj").T


def _experts(x, c, layer) -> np.ndarray:
    """Each token takes the most probable experts, and one for all, times a gate."""
    scores = np.exp(x @ layer("mlp.gate").T)
    share = scores / scores.sum(-1, keepdims=True)
    least = np.sort(share, axis=-1)[..., -c["num_experts_per_tok"], None]
    share = np.where(share >= least, share, 0)
    share = share / share.sum(-1, keepdims=True) if c.get("norm_topk_prob", True) else share
    each = [_mlp(x, layer, f"mlp.experts.{e}") for e in range(c["num_experts"])]
    shared = _mlp(x, layer, "mlp.shared_expert") / (1 + np.exp(-x @ layer("mlp.shared_expert_gate").T))
    return shared + sum(share[..., e, None] * output for e, output in enumerate(each))


def with_module(case: dict[str, Any], path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A directory like the releases, and the tensors of its module."""
    module = tensors(case["config"])
    return parity.directory(path, case, **module), module


def check_prediction(path: Path, config: dict[str, Any], module: dict[str, np.ndarray], tokens: np.ndarray) -> None:
    """Hidden states and the loss of the module against the formulas, from the model's own output."""
    model, tokens = maxlib.from_pretrained(path, num_mtp=1), jnp.asarray(tokens)
    batch = {"tokens": tokens, "targets": jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)}

    @jax.jit
    def run(model, batch):
        hidden = model(batch["tokens"], dtype=jnp.float32).hidden
        (prediction,) = model.predict_ahead(hidden, batch["tokens"])
        return hidden, prediction.hidden, training.MTP(weight=0.25)(model, batch, dtype=jnp.float32)

    hidden, got, (loss, stats) = jax.tree.map(np.asarray, run(model, batch))
    embedded = np.asarray(model.embed.w[...], np.float64)[np.asarray(tokens[:, 1:])]
    want = predicted(module, config, hidden[:, :-1].astype(np.float64), embedded)
    assert np.abs(got[:, :-1] - want).max() < 1e-4 * want.std()
    # At place i it predicts token i + 2 by the model's own head.
    logits = want[:, :-1] @ np.asarray(model.head_weight(), np.float64).T
    logits -= logits.max(-1, keepdims=True)
    right = np.take_along_axis(logits, np.asarray(tokens)[:, 2:, None], axis=2)[..., 0]
    nll = np.log(np.exp(logits).sum(-1)) - right
    sums = {
        name: float(value) for name, value in means(jax.tree.map(jnp.asarray, stats)).items() if np.ndim(value) == 0
    }
    assert sums["mtp1/nll"] == pytest.approx(nll.mean(), rel=1e-4)
    assert float(loss) == pytest.approx(sums["nll"] * float(stats.num_targets) + 0.25 * nll.sum(), rel=1e-4)


def check_files(path: Path, module: dict[str, np.ndarray], tmp_path: Path) -> None:
    """The module is left out unless asked for, and written as it was read."""
    without = maxlib.from_pretrained(path)
    assert len(without.mtp) == 0
    maxlib.save_pretrained(without, tmp_path / "without")
    assert not any(name.startswith("mtp.") for name in load_file(tmp_path / "without" / "model.safetensors"))
    model = maxlib.from_pretrained(path, num_mtp=1)
    maxlib.save_pretrained(model, tmp_path / "with")
    got, want = (load_file(p / "model.safetensors") for p in (tmp_path / "with", path))
    assert got.keys() == want.keys() and module.keys() <= got.keys()
    assert all(got[name].tobytes() == want[name].tobytes() for name in want)
    with pytest.raises(ValueError, match="num_mtp must be 0 or 1, the one module of the releases, got 2"):
        maxlib.from_pretrained(path, num_mtp=2)
    with pytest.raises(ValueError, match=r"mtp\.0"):
        maxlib.from_pretrained(tmp_path / "without", num_mtp=1)


def check_fused(path: Path, module: dict[str, np.ndarray], count: int, tmp_path: Path) -> None:
    """Experts of the module in two tensors are the same."""
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    rest = {name: value for name, value in load_file(path / "model.safetensors").items() if name not in module}
    save_file(rest | fused(module, count), tmp_path / "model.safetensors")
    separate, other = (maxlib.nn.variables(maxlib.from_pretrained(p, num_mtp=1)) for p in (path, tmp_path))
    for name, value in separate.items():
        np.testing.assert_array_equal(value.get_value(), other[name].get_value())


def check_transformers_opens(path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kind = json.loads((path / "config.json").read_text())
    auto = transformers.AutoModelForImageTextToText if "vision_config" in kind else transformers.AutoModelForCausalLM
    _, info = auto.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
