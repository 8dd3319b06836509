"""Training of tokenizers, saved in Hugging Face's format, and the bytes that their tokens stand for."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from maxlib._utils.files import read_json_object, write_atomically
from maxlib._utils.text import check_texts
from maxlib.tokenization._special_tokens import special_tokens as read_special_tokens


def train_bpe(
    texts: Iterable[str], *, vocab_size: int, special_tokens: Sequence[str] = ("<bos>", "<eos>")
) -> Tokenizer:
    """Trains a byte-level BPE tokenizer, for which decode(encode(text)) equals any text.

    The special tokens have the ids 0, 1, ... in their order. Small texts may give fewer than `vocab_size` tokens.

    Raises:
        ValueError: when `vocab_size` is too small for the 256 bytes and the special tokens, or `texts` or
            `special_tokens` is a single text.
    """
    check_texts("texts", texts)
    check_texts("special_tokens", special_tokens)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(special_tokens)
    if vocab_size < least:
        raise ValueError(f"vocab_size must be at least {least} (256 bytes + special tokens), got {vocab_size}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer,
    directory: str | os.PathLike,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    pad_token: str | None = None,
    max_length: int | None = None,
) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, which `transformers.AutoTokenizer` opens.

    With a `bos_token`, encoding there begins with it, as a prompt should.

    Raises:
        ValueError: when a named special token is not in the vocabulary.
    """
    special = {"bos_token": bos_token, "eos_token": eos_token, "pad_token": pad_token}
    special = {role: token for role, token in special.items() if token is not None}
    for role, token in special.items():
        if tokenizer.token_to_id(token) is None:
            raise ValueError(
                f"{role}={token!r} is not in the tokenizer's vocabulary: name one that is, or train with it."
            )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
    }
    if max_length is not None:
        config["model_max_length"] = max_length
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "tokenizer.json", _with_template(tokenizer, bos_token).to_str(pretty=True))
    write_atomically(directory / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def _with_template(tokenizer: Tokenizer, bos_token: str | None) -> Tokenizer:
    """Copies a tokenizer so that its encoding begins with `bos_token`."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    if bos_token is not None and copy.post_processor is None:
        copy.post_processor = processors.TemplateProcessing(
            single=f"{bos_token} $A", special_tokens=[(bos_token, copy.token_to_id(bos_token))]
        )
    return copy


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Reads a `tokenizer.json`, and tries it on a short text.

    Truncation and padding in the file, which files written after training often have, are disabled: texts are encoded
    whole. Added tokens that only tokenizer_config.json or added_tokens.json of the directory state are added.

    Args:
        path: The file, or a directory that has it.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when the file is damaged, its tokenizer can neither encode nor decode a text, or other files give a
            token another id; the message names it.
    """
    path = Path(path)
    directory = path if path.is_dir() else None
    path = path if directory is None else directory / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: expected a tokenizer.json, or a directory that has one.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.decode(tokenizer.encode(_PROBE).ids)
    except BaseException as error:
        # Its errors are plain Exceptions, and Rust panics are not even those.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{path} is no tokenizer that can be used ({error}). Download it again.") from error
    if directory is not None:
        _add_stated(tokenizer, directory)
    return tokenizer


def _add_stated(tokenizer: Tokenizer, directory: Path) -> None:
    """Adds the tokens that other files of the directory state, as transformers does.

    Raises:
        ValueError: when one gets another id than the files say.
    """
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for i, token in sorted(_stated(directory).items()):
        if token.content in known:
            continue
        tokenizer.add_tokens([token])
        if (got := tokenizer.token_to_id(token.content)) != i:
            raise ValueError(
                f"{directory} must give each token one id, but tokenizer.json lacks the added token {token.content!r} with "
                f"the id {i}, and would give it {got}: its files belong to several tokenizers"
            )


def _stated(directory: Path) -> dict[int, AddedToken]:
    """Reads the added tokens that tokenizer_config.json states, or else added_tokens.json, by id.

    Raises:
        ValueError: when they are not stated as transformers writes them.
    """
    path, older = directory / "tokenizer_config.json", directory / "added_tokens.json"
    stated, named = _fields(path).get("added_tokens_decoder"), _fields(older)
    path = older if stated is None else path
    try:
        if stated is not None:
            return {int(i): AddedToken(**fields) for i, fields in stated.items()}
        special = read_special_tokens(directory).values() if named else ()
        return {i: AddedToken(name, normalized=False, special=name in special) for name, i in named.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must state each added token and its id: {error}") from error


def _fields(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


_PROBE = "A b, 1\n\u00e9 \u4e2d"  # letters, a digit, white space, and characters of two and three bytes


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token for one byte, in SentencePiece's vocabularies
_SPACE = "\u2581"  # and its mark of a space


def byte_lengths(tokenizer: Any) -> Int32[np.ndarray, " V"]:
    """Returns the number of bytes (UTF-8) of text that each token stands for; 0 for special tokens.

    The tokens of a text have as many bytes as the text, so Σ nll / (ln 2 Σ bytes) is its number of bits per byte. A
    tokenizer that puts a space before each text adds the space's byte.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a Hugging Face one that is based on it: byte-level BPE, or SentencePiece
            with its mark of spaces.

    Raises:
        ValueError: for another kind, such as WordPiece, whose tokens do not contain the text's spaces.
    """
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    state = json.loads(tokenizer.to_str())
    decoders = list(_decoders(state["decoder"]))
    kinds = {decoder["type"] for decoder in decoders}
    is_byte_level = "ByteLevel" in kinds
    marks_spaces = "Metaspace" in kinds or any(d.get("pattern") == {"String": _SPACE} for d in decoders)
    if not is_byte_level and not marks_spaces:
        raise ValueError(
            f"byte_lengths needs a byte-level tokenizer, or one of SentencePiece, which decode without loss; this one "
            f"decodes with {sorted(kinds)}"
        )
    lengths = np.zeros(max(tokenizer.get_vocab().values(), default=-1) + 1, np.int32)
    for token, i in tokenizer.get_vocab().items():
        if is_byte_level:  # each character of its alphabet stands for one byte
            lengths[i] = len(token)
        else:
            lengths[i] = 1 if _BYTE.fullmatch(token) else len(token.replace(_SPACE, " ").encode())
    for token in state["added_tokens"]:
        lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    return lengths


def _decoders(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yields the parts of a decoder."""
    if decoder is None:
        return
    yield decoder
    for inner in decoder.get("decoders", ()):
        yield from _decoders(inner)
