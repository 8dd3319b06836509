"""Streamed text is the text of all tokens, however they lie on its characters, and a token costs the same."""

import pytest

from maxlib.inference import Generator, stream_text
from maxlib.inference._text import StopTexts, text_lengths, token_bytes
from tests.data.kinds_of_tokenizer import every_kind

KINDS = every_kind()
TEXT = "user: yes 😀é  7\n</s> yes</s>zb 日本 yes"
CUT = "\N{REPLACEMENT CHARACTER}"


class Replays(Generator):
    """A generator that continues with given ids."""

    def __init__(self, ids):
        self.ids = ids

    def stream(self, prompts, **options):
        yield from ((token,) for token in self.ids)


class Counts:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_continue_the_prompt_wherever_it_ends(kind):
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    full = tokenizer.decode(ids)
    for size in range(1, len(ids) + 1):
        pieces = list(stream_text(Replays(ids[size:]), tokenizer, ids[:size]))
        texts = (tokenizer.decode(ids[:end]) for end in range(size, -1, -1))
        prompt = next(text for text in texts if not text.endswith(CUT))  # its whole characters
        assert prompt + "".join(pieces) == full
        assert all(pieces) and not any(CUT in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_costs_the_same_after_any_prompt(kind):
    tokenizer = KINDS[kind]
    prompt, new = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("user: yes ", TEXT))
    costs = []
    for times in (1, 300):
        counting = Counts(tokenizer)
        list(stream_text(Replays(new * 5), counting, prompt * times))
        costs.append(counting.decoded)
    assert costs[0] == costs[1] <= 50 * 5 * len(new)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_bytes_and_offsets_of_tokens_are_those_of_the_text(kind):
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    full = tokenizer.decode(ids, skip_special_tokens=False)
    joined = b"".join(token_bytes(tokenizer, token) for token in ids).decode()
    assert joined.removeprefix(" ") == full.removeprefix(" ")  # decoders may leave out the first space
    texts = [tokenizer.decode(ids[:end]) for end in range(1, len(ids))]
    shown = [next(text for text in texts[n::-1] if not text.endswith(CUT)) for n in range(len(texts))]
    assert text_lengths(tokenizer, ids[:1], ids[1:])[:-1] == [len(text) - len(texts[0]) for text in shown]


def test_the_text_of_a_special_token_ends_a_completion():
    tokenizer = KINDS["byte"]
    ids = tokenizer.encode("yes</s> no", add_special_tokens=False).ids
    ends = [[StopTexts(tokenizer, stop).end([], ids[:n]) for n in range(len(ids) + 1)] for stop in (["</s>"], [" n"])]
    place = ids.index(tokenizer.token_to_id("</s>"))
    assert ends[0].index(True) == place + 1 and ends[1].index(True) > place + 1


def test_a_space_in_the_first_token_is_a_part_of_a_stop_text():
    tokenizer = KINDS["unigram first"]
    prompt, ids = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("user:", "yes"))
    assert StopTexts(tokenizer, [" yes"]).end(prompt, ids)


def test_bytes_that_never_become_a_character_are_shown():
    tokenizer = KINDS["byte"]
    face = tokenizer.encode("😀").ids
    assert "".join(stream_text(Replays([*face[:2], *tokenizer.encode("yes").ids]), tokenizer, "no")) == f"{CUT}yes"
    assert list(stream_text(Replays(face[:3]), tokenizer, "no")) == [CUT]
    unigram = KINDS["unigram first"]
    byte = [unigram.token_to_id("<0x80>")]
    shown = "".join(stream_text(Replays([*unigram.encode("a😀").ids, *byte, *unigram.encode("b").ids]), unigram, "yes"))
    assert shown == f" a😀{CUT} b"  # the decoder alone would write all bytes of the run as broken
