"""Fill-in-the-middle rearranges documents, loses nothing, and its shares are the asked ones."""

import itertools

import numpy as np
import pytest

from maxlib import data, tokenization
from maxlib.data._fill_in_the_middle import FIM_TOKENS
from tests.data import kinds_of_tokenizer

TEXTS = [f"def f{i}(x):\n    return '{'Größe ' * (i % 7)}日本' + x * {i}\n" for i in range(300)]
ENDS = "<s>", "</s>"


def tokenizer(names=FIM_TOKENS[0]):
    return tokenization.train_bpe(TEXTS[:20], vocab_size=300, special_tokens=(*ENDS, *names))


def rearranged(tok, texts=TEXTS, **options):
    return list(data.fill_in_the_middle(data.in_memory(texts), tok, **options))


def pieces(ids: list[int], marks: list[int]) -> dict[int, list[int]]:
    """The ids after each mark."""
    at = [i for i, token in enumerate(ids) if token in marks]
    return {ids[i]: ids[i + 1 : j] for i, j in itertools.pairwise([*at, len(ids)])}


def original(tok, ids: list[int], names) -> tuple[str, str]:
    """The text before the rearrangement, and its order."""
    before_prefix, before_suffix, before_middle = marks = [tok.token_to_id(name) for name in names]
    by_mark = {mark: tok.decode(piece, skip_special_tokens=False) for mark, piece in pieces(ids, marks).items()}
    if not by_mark:
        return tok.decode(ids, skip_special_tokens=False), "as it was"
    assert list(by_mark) == marks and ids[0] == before_prefix
    prefix, suffix, middle = by_mark[before_prefix], by_mark[before_suffix], by_mark[before_middle]
    return prefix + middle + suffix, "spm" if ids[1] == before_suffix and middle else "psm"


@pytest.mark.parametrize("names", FIM_TOKENS, ids=["starcoder", "qwen", "deepseek", "llama"])
def test_it_inverts(names):
    tok = tokenizer(names)
    documents = rearranged(tok, rate=0.8, spm_rate=0.5)
    orders = []
    for text, document in zip(TEXTS, documents, strict=True):
        back, order = original(tok, document["tokens"].tolist(), names)
        assert back == text
        orders.append(order)
    assert document["tokens"].dtype == np.int32
    share = {order: orders.count(order) / len(TEXTS) for order in ("as it was", "psm", "spm")}
    assert abs(share["as it was"] - 0.2) < 0.08 and abs(share["psm"] - share["spm"]) < 0.12


@pytest.mark.parametrize("kind", ["unigram always", "unigram first", "unigram never", "llama", "byte"])
def test_only_the_beginning_of_a_text_gets_a_space(kind):
    """SentencePiece writes one before each text, which a suffix or a middle is not."""
    tok, names = kinds_of_tokenizer.every_kind()[kind], FIM_TOKENS[3]
    tok.add_special_tokens(list(names))
    marks = [tok.token_to_id(name) for name in names]
    written = lambda ids: "".join(map(tok.id_to_token, ids)).replace("▁", " ").replace("Ġ", " ")
    for document in rearranged(tok, ["yes hello: yes"] * 30, rate=1.0):
        by_mark = pieces(document["tokens"].tolist(), marks)
        prefix, suffix, middle = (written(by_mark[mark]) for mark in marks)
        assert (prefix + middle + suffix).removeprefix(" ") == "yes hello: yes"


def test_cuts_are_of_characters_and_uniform():
    tok = tokenizer()
    names, text = FIM_TOKENS[0], "0123456789" * 5
    marks, cuts = [tok.token_to_id(name) for name in names], []
    for document in rearranged(tok, [text] * 400, rate=1.0, spm_rate=0.0):
        by_mark = pieces(document["tokens"].tolist(), marks)
        prefix, suffix = (len(tok.decode(by_mark[mark])) for mark in marks[:2])
        cuts.append((prefix, len(text) - suffix))
    first, second = np.array(cuts).T / len(text)
    # The smaller and the larger of two uniform numbers.
    assert abs(first.mean() - 1 / 3) < 0.05 and abs(second.mean() - 2 / 3) < 0.05


def test_rates_and_ends():
    tok = tokenizer()
    bos, eos = (tok.token_to_id(name) for name in ENDS)
    plain = list(data.tokenize(data.in_memory(TEXTS), tok, bos_id=bos, eos_id=eos))
    for document, wanted in zip(rearranged(tok, rate=0.0, bos_id=bos, eos_id=eos), plain, strict=True):
        np.testing.assert_array_equal(document["tokens"], wanted["tokens"])
    marks = [tok.token_to_id(name) for name in FIM_TOKENS[0]]
    for document in rearranged(tok, rate=1.0, spm_rate=1.0, bos_id=bos, eos_id=eos):
        ids = document["tokens"].tolist()
        assert ids[:3] == [bos, *marks[:2]] and ids[-1] == eos


def test_every_epoch_is_cut_anew_and_a_resumed_one_as_before():
    tok = tokenizer()
    documents = data.fill_in_the_middle(data.in_memory(TEXTS[:9]).repeat(3), tok, rate=1.0, seed=4)
    epochs = [[documents[9 * epoch + i]["tokens"].tolist() for i in range(9)] for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    again = data.fill_in_the_middle(data.in_memory(TEXTS[:9]).repeat(3), tok, rate=1.0, seed=4)
    assert [again[9 + i]["tokens"].tolist() for i in range(9)] == epochs[1]


def test_tokenizers_without_the_tokens_are_refused():
    source = data.in_memory(TEXTS)
    with pytest.raises(ValueError, match="needs a tokenizer with three tokens .*<fim_prefix>, <fim_suffix>"):
        data.fill_in_the_middle(source, kinds_of_tokenizer.byte_level(trims=False))
    named = tokenizer(("[PREFIX]", "[SUFFIX]", "[MIDDLE]"))
    with pytest.raises(ValueError, match="needs a tokenizer with three tokens"):
        data.fill_in_the_middle(source, named)
    marked = list(data.fill_in_the_middle(source, named, tokens=("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), rate=1.0))
    assert all(document["tokens"][0] == named.token_to_id("[PREFIX]") for document in marked)
    with pytest.raises(ValueError, match="three tokens"):
        data.fill_in_the_middle(source, named, tokens=("[PREFIX]", "[SUFFIX]"))
    with pytest.raises(ValueError, match="spm_rate must be between 0 and 1, got 2"):
        data.fill_in_the_middle(source, tokenizer(), spm_rate=2)
