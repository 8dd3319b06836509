"""Bytes of tokens against the bytes of texts, for the kinds of tokenizer that decode without loss."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from maxlib import tokenization

TEXTS = ["Hello, world!  Two  spaces\n\n\ttab", "é 中文 🙂 naïve", "def f(x):\n    return x", " begins with a space"]


def sentencepiece(*, fallback):
    """Unigram-free SentencePiece BPE with byte fallback, as Llama 2 and Gemma have it."""
    pieces = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁w", *"HeloworldTspace", "é", "中"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "w")], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.add_tokens([AddedToken("\n\n", special=False, normalized=False)])
    if fallback:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return tokenizer


@pytest.mark.parametrize("kind", ["byte-level", "fallback", "metaspace"])
def test_tokens_have_as_many_bytes_as_their_texts(kind):
    if kind == "byte-level":
        tokenizer = tokenization.train_bpe(TEXTS, vocab_size=280)
        tokenizer.add_tokens([AddedToken("🙂 naïve", special=False)])
    else:
        tokenizer = sentencepiece(fallback=kind == "fallback")
    lengths = tokenization.byte_lengths(tokenizer)
    assert lengths.shape == (tokenizer.get_vocab_size(),)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert lengths[ids].sum() == len(text.encode())
    assert lengths.max() > 1
    special = tokenizer.token_to_id("<bos>" if kind == "byte-level" else "<s>")
    assert lengths[special] == 0


def test_of_a_hugging_face_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = tokenization.train_bpe(TEXTS, vocab_size=280)
    tokenization.save_tokenizer(tokenizer, tmp_path, bos_token="<bos>")
    np.testing.assert_array_equal(
        tokenization.byte_lengths(AutoTokenizer.from_pretrained(tmp_path)), tokenization.byte_lengths(tokenizer)
    )


def test_a_tokenizer_that_loses_spaces_is_refused():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"decodes with \['WordPiece'\]"):
        tokenization.byte_lengths(tokenizer)
