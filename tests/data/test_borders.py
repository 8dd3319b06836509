"""A token that lies across the border of a learned turn is learned, as by transformers."""

from itertools import combinations

import numpy as np
import pytest
import transformers

from maxlib import data, tokenization
from maxlib.data._tokenize import _learned
from tests.data.kinds_of_tokenizer import every_kind

KINDS = every_kind()
SPACED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
ASK = [{"role": "user", "content": "hello"}]


def answered(*answers):
    return [message for answer in answers for message in [*ASK, {"role": "assistant", "content": answer}]]


BORDERS = ": ", ":", ":\n", "<s>"


# Each kind with two of the borders, each border with three kinds.
@pytest.mark.parametrize(
    ("kind", "border"), [(kind, BORDERS[(i + j) % 4]) for i, kind in enumerate(KINDS) for j in (0, 2)]
)
def test_learned_tokens_are_those_of_transformers(kind, border):
    template = SPACED.replace(": ", border)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=KINDS[kind], chat_template=template)
    for answers in (["yes maybe"], ["yes", "no yes"], ["7"], ["é😀"], ["\nyes"]):
        want = theirs.apply_chat_template(answered(*answers), return_dict=True, return_assistant_tokens_mask=True)
        source = data.records([{"messages": answered(*answers)}], field="messages")
        (row,) = data.tokenize_chats(source, KINDS[kind], tokenization.ChatTemplate(template))
        np.testing.assert_array_equal(row["tokens"], want["input_ids"])
        np.testing.assert_array_equal(
            row["targets"][:-1] >= 0, np.array(want["assistant_masks"][1:]) == 1, str(answers)
        )


def test_pairs_learn_the_first_token_of_both_answers():
    tokenizer = KINDS["byte"]
    source = [{"chosen": answered("yes maybe"), "rejected": answered("no")}]
    (pair,) = data.pairs(source, tokenizer, tokenization.ChatTemplate(SPACED))
    for half, want in (("chosen", " yes maybe</s>"), ("rejected", " no</s>")):
        learned = [token for token in pair[half]["targets"].tolist() if token >= 0]
        assert tokenizer.decode(learned, skip_special_tokens=False) == want


@pytest.mark.parametrize("kind", ["byte", "byte trimmed"])
def test_a_token_is_learned_if_one_of_its_characters_is(kind):
    """Over all spans of a text; the characters of a token are counted from its bytes, not from its offsets."""
    text = "<s>user:  yes é\n </s>\n\n😀 no</s>"
    encoded = KINDS[kind].encode(text, add_special_tokens=False)
    sizes = [len(token) for token in encoded.tokens]  # a byte is a letter of a token
    of_byte = [i for i, character in enumerate(text) for _ in character.encode()]
    ends = np.cumsum(sizes)
    assert ends[-1] == len(of_byte)
    characters = [set(of_byte[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    for begin, end in combinations(range(len(text) + 1), 2):
        want = [bool(token & set(range(begin, end))) for token in characters]
        assert _learned(encoded.offsets, [(begin, end)]).tolist() == want, (begin, end)
