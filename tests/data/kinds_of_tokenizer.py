"""Small tokenizers of the kinds in use, which differ in what a token does at its ends."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from maxlib import tokenization

_SPECIAL = ["<s>", "</s>"]
_LETTERS = "abcdefghijklmnopqrstuvwxyz:\n"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(*, trims: bool) -> Tokenizer:
    """Words with the space before them, as GPT-2; Llama 3 trims that space from the offsets."""
    text = "user: hello assistant: yes no maybe" + " yes no maybe" * 5
    tokenizer = tokenization.train_bpe([text] * 20, vocab_size=330, special_tokens=_SPECIAL)
    if trims:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def unigram(prepends: str) -> Tokenizer:
    """SentencePiece's Unigram with bytes for other characters; `prepends` a space "always", "first" or "never"."""
    pieces = [("<unk>", 0.0), ("▁yes", -2.0), ("▁hello", -2.0), ("yes", -4.0), ("▁", -5.0)]
    letters = [(letter, -8.0) for letter in _LETTERS]
    tokenizer = Tokenizer(models.Unigram([*pieces, *letters, *((byte, -20.0) for byte in _BYTES)], 0, True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepends)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=prepends)])
    tokenizer.add_special_tokens(_SPECIAL)
    return tokenizer


def llama() -> Tokenizer:
    """Llama 2's: a normalizer writes the spaces, and the decoder removes the first one."""
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", *_BYTES, "▁", *_LETTERS])}
    merges = [("▁", "y"), ("▁y", "e"), ("▁ye", "s"), ("▁", "h"), ("▁h", "e")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(_SPECIAL)
    return tokenizer


def every_kind() -> dict[str, Tokenizer]:
    """Returns a tokenizer of each kind, by name."""
    schemes = {f"unigram {prepends}": unigram(prepends) for prepends in ("always", "first", "never")}
    return {"byte": byte_level(trims=False), "byte trimmed": byte_level(trims=True), **schemes, "llama": llama()}
