"""Models with heads of numbers: scores and gradients of transformers' classifiers, read from and written to files."""

import importlib
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

import maxlib
from maxlib import adapters, nn, ops
from tests.nn.tiny import filled_llama

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
TOKENS = np.random.default_rng(0).integers(1, 61, (3, 9)).astype(np.int32)
TOKENS[1, 6:] = TOKENS[2, 4:] = 0  # padding
VALID = TOKENS > 0
full = pytest.mark.full


def theirs(config: str, labels: int, directory, kind: str = "Sequence", **changes):
    """Writes a classifier of transformers with random weights."""
    torch.manual_seed(0)
    made = getattr(transformers, config)(**(SIZES | changes), num_labels=labels)
    model = getattr(transformers, f"AutoModelFor{kind}Classification").from_config(made).eval()
    with torch.no_grad():
        model.score.weight.normal_(0, 0.3)
    model.save_pretrained(directory)
    return model


def scores(model, tokens=TOKENS, valid=VALID):
    """Returns the scores of each token."""
    return model.logits(model(jnp.asarray(tokens), valid=jnp.asarray(valid), dtype=jnp.float32).hidden)


def last(x):
    return nn.pool(x, "last", valid=jnp.asarray(VALID))[:, 0]


CONFIGS = [
    pytest.param("Qwen3Config", {}, id="qwen3", marks=full),
    pytest.param("Gemma3TextConfig", {"sliding_window": 4}, id="gemma3"),
    pytest.param("LlamaConfig", {}, id="llama", marks=full),
    pytest.param("Qwen2Config", {}, id="qwen2", marks=full),
    pytest.param("MistralConfig", {"sliding_window": None}, id="mistral", marks=full),
    pytest.param("GemmaConfig", {}, id="gemma", marks=full),
    pytest.param("Gemma2Config", {"sliding_window": 4, "final_logit_softcapping": 3.0}, id="gemma2", marks=full),
]


@pytest.mark.parametrize(("config", "changes"), CONFIGS)
def test_scores_gradients_and_files_are_those_of_transformers(config, changes, tmp_path):
    model = theirs(config, 3, tmp_path / "theirs", **changes)
    wanted = model(torch.tensor(TOKENS, dtype=torch.long), attention_mask=torch.tensor(VALID)).logits
    (wanted**2).sum().backward()
    ours = maxlib.from_pretrained(tmp_path / "theirs", dtype=jnp.float32)
    params, rest = nn.partition(ours)

    def total(params):
        logits = last(scores(nn.combine(params, rest)))
        return jnp.sum(logits**2), logits

    grads, logits = jax.jit(jax.grad(total, has_aux=True))(params)
    np.testing.assert_allclose(logits, wanted.detach(), rtol=1e-5, atol=1e-5)
    for path, weight in (("head.w", model.score.weight), ("embed.w", model.model.embed_tokens.weight)):
        np.testing.assert_allclose(grads[path], weight.grad, rtol=1e-4, atol=1e-5 * float(weight.grad.abs().max()))
    maxlib.save_pretrained(ours, tmp_path / "ours", generation={"pad_token_id": 0})
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert type(again) is type(model)
    theirs_again = again(torch.tensor(TOKENS, dtype=torch.long), attention_mask=torch.tensor(VALID)).logits
    np.testing.assert_allclose(theirs_again.detach(), wanted.detach(), rtol=1e-6, atol=1e-6)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [type(model).__name__]


@pytest.mark.full
def test_labels_of_tokens_have_a_bias(tmp_path):
    model = theirs("Qwen3Config", 2, tmp_path / "theirs", kind="Token")
    with torch.no_grad():
        model.score.bias.normal_()
    model.save_pretrained(tmp_path / "theirs")
    wanted = model(torch.tensor(TOKENS, dtype=torch.long), attention_mask=torch.tensor(VALID)).logits.detach()
    ours = maxlib.from_pretrained(tmp_path / "theirs", dtype=jnp.float32)
    np.testing.assert_allclose(scores(ours)[VALID], wanted[VALID], rtol=1e-5, atol=1e-5)
    maxlib.save_pretrained(ours, tmp_path / "ours")
    again = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "ours")
    assert bool((again.score.bias == model.score.bias).all())


@pytest.mark.full
def test_adapters_of_a_reward_model_are_those_of_peft(tmp_path):
    base = theirs("Qwen3Config", 1, tmp_path / "base")
    ours = maxlib.from_pretrained(tmp_path / "base", dtype=jnp.float32)
    ours = adapters.add(ours, adapters.LoRA(rank=2, alpha=4), rngs=nnx.Rngs(0))
    params, rest = nn.partition(ours, nn.tree.default_filter(ours))
    assert "head.w" in params and "embed.w" not in params
    tuned = nn.combine(jax.tree.map(lambda x: x + 0.1, params), rest)
    wanted = scores(tuned)
    adapters.save(tuned, tmp_path / "adapter", base=str(tmp_path / "base"))
    peft = pytest.importorskip("peft")
    read = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    logits = read(torch.tensor(TOKENS, dtype=torch.long), attention_mask=torch.tensor(VALID)).logits
    np.testing.assert_allclose(logits.detach(), last(wanted), rtol=1e-5, atol=1e-5)
    again = adapters.load(
        maxlib.from_pretrained(tmp_path / "base", dtype=jnp.float32), tmp_path / "adapter", into_base=True
    )
    np.testing.assert_allclose(scores(again), wanted, rtol=1e-5, atol=1e-5)
    maxlib.save_pretrained(adapters.merge(tuned), tmp_path / "merged")
    merged = maxlib.from_pretrained(tmp_path / "merged", dtype=jnp.float32)
    np.testing.assert_allclose(scores(merged), wanted, rtol=1e-4, atol=1e-4)


def test_the_names_of_labels_are_those_of_the_original(tmp_path):
    model = filled_llama(num_layers=1, rope=ops.Rope(12, max_length=64))
    names = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    for labels, kept in ((2, names["id2label"]), (3, {str(n): f"LABEL_{n}" for n in range(3)})):
        scored = nn.with_head(model, nn.ScoreHead(model.cfg.dim, labels, rngs=nnx.Rngs(0)))
        maxlib.save_pretrained(scored, tmp_path / f"first{labels}")
        config = tmp_path / f"first{labels}" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | names))
        maxlib.save_pretrained(scored, tmp_path / f"again{labels}", like=tmp_path / f"first{labels}")
        assert json.loads((tmp_path / f"again{labels}" / "config.json").read_text())["id2label"] == kept


def test_a_model_with_another_head_keeps_the_rest():
    model = filled_llama(num_layers=2)
    critic = nn.with_head(model, nn.ScoreHead(32, 1, rngs=nnx.Rngs(0)))
    values, scores = jax.eval_shape(
        lambda: [m.logits(m(jnp.asarray(TOKENS), dtype=jnp.float32).hidden) for m in (critic, model)]
    )
    assert values.shape == (3, 9, 1) and values.dtype == jnp.float32
    assert scores.shape[-1] == 61  # the model is as it was
    with pytest.raises(ValueError, match="the last axes of x must be D=32 for the head"):
        critic.head.logits(jnp.ones((1, 5)))


def embeddings(model, **options):
    hidden = model(jnp.asarray(TOKENS), valid=jnp.asarray(VALID), dtype=jnp.float32).hidden
    return model.head.embed(hidden, valid=jnp.asarray(VALID), **options)[:, 0]


def write_embedding_gemma(directory):
    """Writes an EmbeddingGemma as published: two-way attention, mean pooling, two linear layers, a norm of 1.

    Returns the vectors that its formula gives.
    """
    torch.manual_seed(0)
    sizes = SIZES | {"sliding_window": 6, "use_bidirectional_attention": True}
    model = transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**sizes)).eval()
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    assert config["use_bidirectional_attention"] and config["sliding_window"] == 6
    with torch.no_grad():
        hidden = model(torch.tensor(TOKENS, dtype=torch.long), attention_mask=torch.tensor(VALID)).last_hidden_state
    mask = torch.tensor(VALID, dtype=torch.float32)[..., None]
    x = (hidden * mask).sum(1) / mask.sum(1)
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    folders = ["", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, folder) in enumerate(zip(kinds, folders, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    for folder in folders[1:]:
        (directory / folder).mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling | {"include_prompt": True}))
    for folder, (width, out) in (("2_Dense", (32, 80)), ("3_Dense", (80, 32))):
        weight = torch.randn(out, width) / width**0.5
        identity = "torch.nn.modules.linear.Identity"
        dense = {"in_features": width, "out_features": out, "bias": False, "activation_function": identity}
        (directory / folder / "config.json").write_text(json.dumps(dense))
        safetensors_torch.save_file({"linear.weight": weight}, directory / folder / "model.safetensors")
        x = x @ weight.T
    return x


def test_embedding_gemma_is_read_and_written(tmp_path):
    x = write_embedding_gemma(tmp_path / "theirs")
    ours = maxlib.from_pretrained(tmp_path / "theirs", dtype=jnp.float32)
    vectors, short = jax.jit(lambda model: (embeddings(model), embeddings(model, dim=12)))(ours)
    np.testing.assert_allclose(vectors, torch.nn.functional.normalize(x, dim=-1), atol=1e-5)
    np.testing.assert_allclose(short, torch.nn.functional.normalize(x[:, :12], dim=-1), atol=1e-5)
    maxlib.save_pretrained(ours, tmp_path / "ours")
    maxlib.save_pretrained(ours, tmp_path / "ours", overwrite=True)  # its folders are those of an export
    for name in ("modules.json", "2_Dense/config.json"):
        written, read = (json.loads((tmp_path / which / name).read_text()) for which in ("ours", "theirs"))
        assert written == read
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == ["Gemma3TextModel"] and config["use_bidirectional_attention"]
    again = maxlib.from_pretrained(tmp_path / "ours", dtype=jnp.float32)
    chex.assert_trees_all_equal(nn.variables(again), nn.variables(ours))
    modules = json.loads((tmp_path / "ours" / "modules.json").read_text())
    modules[1]["path"] = "../1_Pooling"
    (tmp_path / "ours" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="must name folders beside it"):
        maxlib.from_pretrained(tmp_path / "ours")


@pytest.mark.full
@pytest.mark.parametrize("pooling", ["lasttoken", "mean", "cls"])
def test_vectors_are_those_of_sentence_transformers(pooling, tmp_path):
    st = pytest.importorskip("sentence_transformers")
    parts = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    vocab = {f"w{i}": i for i in range(61)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w1"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    torch.manual_seed(0)
    backbone = transformers.Qwen3Model(transformers.Qwen3Config(**SIZES)).eval()
    backbone.save_pretrained(tmp_path / "backbone")
    tokenizer.save_pretrained(tmp_path / "backbone")
    modules = [
        parts.Transformer(str(tmp_path / "backbone")),
        parts.Pooling(32, pooling_mode=pooling),
        parts.Dense(32, 20),
        parts.Normalize(),
    ]
    theirs = st.SentenceTransformer(modules=modules, device="cpu")
    theirs.save(str(tmp_path / "theirs"))
    texts = [" ".join(f"w{i}" for i in row[row > 0]) for row in TOKENS]
    wanted = theirs.encode(texts)
    ours = maxlib.from_pretrained(tmp_path / "theirs", dtype=jnp.float32)
    np.testing.assert_allclose(embeddings(ours), wanted, atol=1e-5)
    maxlib.save_pretrained(ours, tmp_path / "ours", like=tmp_path / "theirs")
    again = st.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    np.testing.assert_allclose(again.encode(texts), wanted, atol=1e-6)
