"""BERT and RoBERTa against transformers: masked tokens and classes, kinds of tokens, packed classes."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import training
from maxlib.models import bert
from tests.models import parity
from tests.models.conformance import BASE, assert_close
from tests.models.encoder_decoder import EncoderConformance


class TestBert(EncoderConformance):
    family = "bert"
    config = "BertConfig"
    base = {name: value for name, value in BASE.items() if name != "num_key_value_heads"} | {
        "max_position_embeddings": 64
    }
    cases = {
        "bert": {},
        "types": {"type_vocab_size": 3},
        "roberta": {"model_type": "roberta", "max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1},
    }
    matters = {"layer_norm_eps": 0.1, "num_attention_heads": 2}
    refused = {"is_decoder": True}
    zero_gradients = r"key\.bias"  # the same number is added to all scores of a query
    test_both_spellings_are_read = None  # of rotary embeddings, which it has none of

    @staticmethod
    def tokens(vocab, seq):
        """Without 1: RoBERTa counts positions by the tokens that are not its padding."""
        ids = parity.tokens(vocab, seq)
        return np.where(ids == 1, 2, ids)

    @classmethod
    def transformers_cases(cls):
        """RoBERTa has a class of its own."""
        transformers = pytest.importorskip("transformers")
        configs = {}
        for name, changes in cls.cases.items():
            fields = cls.base | changes
            kind = (
                transformers.RobertaConfig if fields.pop("model_type", "bert") == "roberta" else transformers.BertConfig
            )
            configs[name] = kind(**fields)
        return {name: (config, cls.tokens(config.vocab_size, 24), cls.dtype) for name, config in configs.items()}


def classifier(kind: str, directory, **fields):
    """A small classifier of transformers with three classes, and its directory."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **TestBert.base, num_labels=3, id2label={0: "bad", 1: "fair", 2: "good"}, **fields
    )
    theirs = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    for parameter in theirs.parameters():  # initial values are too small to tell mistakes
        parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(directory)
    return theirs


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Bert", "Roberta", "ModernBert", "mean"])
def test_classes_are_those_of_transformers(kind, tmp_path):
    """And packed, alone, with kinds of tokens; the gradient of `NextToken`; the export opens with the same classes."""
    import torch
    import transformers

    fields = {"Roberta": {"pad_token_id": 1}, "mean": {"classifier_pooling": "mean", "local_attention": 8}}.get(
        kind, {}
    )
    fields |= (
        {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
        if kind in ("ModernBert", "mean")
        else {}
    )
    theirs = classifier("ModernBert" if kind == "mean" else kind, tmp_path / "theirs", **fields)
    model = maxlib.from_pretrained(tmp_path / "theirs")
    assert model.cfg.labels == ("bad", "fair", "good")
    tokens = parity.tokens(59, 24) + 2
    tokens[1, 9:] = fields.get("pad_token_id", 0)
    mask = np.arange(24) < np.array([[24], [9]])
    types = (
        {"token_types": jnp.asarray((np.arange(24) > 12) * np.ones((2, 1), np.int32), jnp.int32)}
        if kind == "Bert"
        else {}
    )
    typed = {"token_type_ids": torch.from_numpy(np.array(types["token_types"])).long()} if types else {}
    out = theirs(
        torch.from_numpy(tokens).long(),
        attention_mask=torch.from_numpy(mask).long(),
        labels=torch.tensor([2, 0]),
        **typed,
    )
    hidden = model(jnp.asarray(tokens), valid=jnp.asarray(mask), dtype=jnp.float32, **types).hidden
    assert_close(model.logits(hidden)[:, 0], out.logits.detach().numpy(), 1e-4)
    row = np.concatenate([tokens[0], tokens[1, :9]])[None]
    ids = np.repeat(np.array([1, 2], np.int32), [24, 9])[None]
    types = {name: jnp.concatenate([x[0], x[1, :9]])[None] for name, x in types.items()}
    packed = model(jnp.asarray(row), segment_ids=jnp.asarray(ids), dtype=jnp.float32, **types).hidden
    assert_close(model.logits(packed)[0, np.array([0, 24])], out.logits.detach().numpy(), 1e-4)
    targets = np.full((2, 24), -1, np.int32)
    targets[:, 0] = [2, 0]
    batch = {"tokens": jnp.asarray(tokens), "targets": jnp.asarray(targets), "valid": jnp.asarray(mask)}
    if not typed:
        total, stats = training.NextToken()(model, batch, dtype=jnp.float32)
        np.testing.assert_allclose(total / stats.num_targets, out.loss.item(), rtol=1e-4)
    maxlib.save_pretrained(model, tmp_path / "ours")
    again, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values()), info
    assert again.config.id2label == {0: "bad", 1: "fair", 2: "good"}
    assert_close(
        again.eval()(torch.from_numpy(tokens).long(), attention_mask=torch.from_numpy(mask).long(), **typed)
        .logits.detach()
        .numpy(),
        out.logits.detach().numpy(),
        1e-5,
    )


def test_classes_are_written_and_read(tmp_path):
    """By the family's own names, not by those that classifiers of decoders have."""
    cfg = bert.Config(
        vocab=9, num_layers=1, dim=8, mlp_dim=8, num_heads=2, num_positions=16, labels=("bad", "fair", "good")
    )
    maxlib.save_pretrained(bert.Bert(cfg, rngs=nnx.Rngs(0)), tmp_path)
    assert "classifier.weight" in load_file(tmp_path / "model.safetensors")
    assert maxlib.from_pretrained(tmp_path).cfg == cfg


def test_files_with_old_names_of_norms_are_read(tmp_path):
    """And with the parts that only pre-training has."""
    case = parity.golden("bert")["bert"]
    path = parity.directory(tmp_path, case)
    tensors = load_file(path / "model.safetensors")
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
        for n, x in tensors.items()
    }
    assert old.keys() != tensors.keys()
    old |= {
        "cls.seq_relationship.weight": np.zeros((2, 32), np.float32),
        "bert.pooler.dense.bias": np.zeros(32, np.float32),
    }
    save_file(old, path / "model.safetensors", metadata={"format": "pt"})
    assert_close(parity.logits(maxlib.from_pretrained(path), case["tokens"]), case["logits"], 1e-4)
