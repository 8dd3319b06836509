"""Any text survives encoding and decoding, and transformers loads saved tokenizers."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from maxlib import data, tokenization

TEXTS = ["The quick brown fox jumps over the lazy dog. " * 3, "def f(x):\n\treturn x ** 2\n"] * 20
STRANGE = ["", " ", "  two  spaces ", "tab\tnew\nline\r\n", "naïve 日本語 🦊 \u200b \x00", "\ufeff", "Ġ", "a" * 300]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenization.train_bpe(TEXTS, vocab_size=300)


def test_any_text_comes_back(tokenizer):
    for text in STRANGE:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_training_is_deterministic_and_as_large_as_asked(tokenizer):
    assert tokenizer.get_vocab_size() == 300
    assert tokenization.train_bpe(iter(TEXTS), vocab_size=300).to_str() == tokenizer.to_str()
    assert [tokenizer.token_to_id(token) for token in ("<bos>", "<eos>")] == [0, 1]


def test_vocabulary_too_small():
    with pytest.raises(ValueError, match=r"vocab_size must be at least 258 .* got 200"):
        tokenization.train_bpe(TEXTS, vocab_size=200)


def test_one_text_is_no_list_of_texts():
    for change in ({"texts": "the fox"}, {"special_tokens": "<bos>"}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} must be a list of texts"):
            tokenization.train_bpe(**{"texts": ["the fox"], "vocab_size": 300} | change)


def test_tokenize_adds_the_ends_it_is_told(tokenizer):
    documents = data.in_memory(["the fox"])
    plain = tokenizer.encode("the fox", add_special_tokens=False).ids
    assert data.tokenize(documents, tokenizer)[0]["tokens"].tolist() == plain
    with_ends = data.tokenize(documents, tokenizer, bos_id=0, eos_id=1)[0]
    assert with_ends["tokens"].tolist() == [0, *plain, 1]
    assert with_ends["tokens"].dtype == np.int32
    assert with_ends["text"] == "the fox"


def test_document_without_tokens():
    class Nothing:
        def encode(self, text, /, *, add_special_tokens):
            return []

    with pytest.raises(ValueError, match="made no tokens from the document 'the fox'"):
        data.tokenize(data.in_memory(["the fox"]), Nothing())[0]
    with pytest.raises(ValueError, match=r"To be tokenized, documents need 'text', got \['tokens'\]"):
        data.tokenize(data.in_memory([[1]]), Nothing())[0]


def test_tokens_that_only_other_files_state_are_added(tokenizer, tmp_path):
    """As transformers does; such as those of a chat template, which would be cut to letters."""
    transformers = pytest.importorskip("transformers")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size, token = tokenizer.get_vocab_size(), {"content": "<|turn|>", "special": True, "normalized": False}
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {str(size): token}}
    for name, fields in (("tokenizer_config.json", stated), ("added_tokens.json", {"<|turn|>": size})):
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        (tmp_path / name).write_text(json.dumps(fields))
        got = tokenization.load_tokenizer(tmp_path).encode("the <|turn|> fox").ids
        assert got == transformers.AutoTokenizer.from_pretrained(tmp_path)("the <|turn|> fox").input_ids
        assert size in got
        (tmp_path / name).write_text(json.dumps(fields).replace(str(size), str(size + 7)))
        with pytest.raises(ValueError, match=r"'<\|turn\|>' with the id 307, and would give it 300"):
            tokenization.load_tokenizer(tmp_path)
        (tmp_path / name).unlink()


LONG = "the quick brown fox jumps over the lazy dog"


def test_a_file_that_truncates_or_pads_is_read_without(tokenizer, tmp_path):
    """Files written after a fine-tune often have both, and `Tokenizer.encode` obeys them."""
    theirs = Tokenizer.from_str(tokenizer.to_str())
    theirs.enable_truncation(4)
    theirs.enable_padding(length=64)
    theirs.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(LONG).ids) == 64
    assert tokenization.load_tokenizer(tmp_path).encode(LONG).ids == tokenizer.encode(LONG).ids


@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_a_tokenizer_that_truncates_or_pads_is_refused(tokenizer, tmp_path, setting):
    theirs = Tokenizer.from_str(tokenizer.to_str())
    theirs.enable_truncation(4) if setting == "truncation" else theirs.enable_padding(length=64)
    documents, template = data.in_memory([LONG]), tokenization.ChatTemplate("{{ messages[0].content }}")
    chats = documents.map(lambda document: {"messages": [{"role": "assistant", "content": document["text"]}]})
    for start in (
        lambda: data.tokenize(documents, theirs),
        lambda: data.tokenize_chats(chats, theirs, template),
        lambda: data.write_tokens(documents, tmp_path / "out", theirs),
    ):
        with pytest.raises(ValueError, match=rf"{setting} is on, .* call tokenizer.no_{setting}\(\) first"):
            start()


def test_a_hugging_face_tokenizer_that_truncated_in_its_last_call(tokenizer):
    """Its backend keeps the setting, which chats would then obey."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    chats = data.in_memory([LONG]).map(
        lambda document: {"messages": [{"role": "assistant", "content": document["text"]}]}
    )
    read = data.tokenize_chats(chats, theirs, tokenization.ChatTemplate("{{ messages[0].content }}"))
    tokens = read[0]["tokens"].tolist()
    assert tokens == tokenizer.encode(LONG).ids
    theirs(LONG, truncation=True, max_length=4)
    with pytest.raises(ValueError, match="truncation is on"):
        read[0]


def test_transformers_opens_it(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenization.save_tokenizer(tokenizer, tmp_path, bos_token="<bos>", eos_token="<eos>", max_length=128)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.model_max_length) == (0, 1, 128)
    for text in STRANGE:
        ids = theirs.encode(text)
        assert ids == [0, *tokenizer.encode(text).ids]
        assert theirs.decode(ids, skip_special_tokens=True) == text
    # A Hugging Face tokenizer is tokenized with as it is.
    documents = data.in_memory(["the fox"])
    ours = data.tokenize(documents, tokenizer, bos_id=0)[0]["tokens"]
    np.testing.assert_array_equal(data.tokenize(documents, theirs, bos_id=0)[0]["tokens"], ours)


def test_saving_leaves_the_tokenizer_as_it_was(tokenizer, tmp_path):
    before = tokenizer.to_str()
    tokenization.save_tokenizer(tokenizer, tmp_path / "new", bos_token="<bos>")
    assert tokenizer.to_str() == before
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())["bos_token"] == "<bos>"


def test_unknown_special_token(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="eos_token='</s>' is not in the tokenizer's vocabulary"):
        tokenization.save_tokenizer(tokenizer, tmp_path, eos_token="</s>")
    assert list(tmp_path.iterdir()) == []
