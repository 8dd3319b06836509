"""tokenizer.json: byte-level BPE, and the parts of other kinds."""

import functools
import json
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from maxlib.tokenization import load_tokenizer, save_tokenizer, train_bpe
from tests.fuzz.run import Target

TEXTS = ["", "Hello, world", "é 中\n\n12", "<bos>a", "\x00\ufdd0 " * 20]


@functools.cache
def files() -> dict[str, str]:
    """One file of each kind of model, by name."""
    bpe = train_bpe(["a short text of some words", "another one, 12 é"] * 3, vocab_size=290)
    pieces = {"[UNK]": 0, "a": 1, "##b": 2, "hello": 3}
    words = Tokenizer(models.WordPiece(vocab=pieces, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.5)], unk_id=0, byte_fallback=False))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    kinds = {"bpe": bpe, "wordpiece": words, "unigram": unigram, "wordlevel": tokenizer}
    return {f"{name}/tokenizer.json": json.dumps(json.loads(kind.to_str())) for name, kind in kinds.items()}


def make(directory: Path) -> None:
    for name, text in files().items():
        (directory / name).parent.mkdir()
        (directory / name).write_text(text)
    saved = directory / "saved"
    save_tokenizer(train_bpe(["a b c"], vocab_size=270), saved, bos_token="<bos>", eos_token="<eos>")


def read(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    for text in TEXTS:
        try:
            ids = tokenizer.encode(text).ids
        except Exception as error:
            if type(error) is not Exception:  # its own errors, which a text can meet later, are of that class itself
                raise
            continue
        tokenizer.decode(ids)


KINDS = dict.fromkeys((*(f"{name}/tokenizer.json" for name in ("bpe", "wordpiece", "unigram", "wordlevel")),), "json")
TARGET = Target(make, read, KINDS | {"saved/tokenizer.json": "json"}, alone=True)
