"""Pairs, labelled answers and rollouts as batches."""

import threading

import numpy as np
import pytest

from maxlib import data, inference, tokenization, training
from maxlib import post_training as pt
from tests.data.test_chats import PLAIN
from tests.training import tiny
from tests.training.trainers import trainer

ASK = [{"role": "user", "content": "the size?"}]
YES, NO = [{"role": "assistant", "content": "the apple"}], [{"role": "assistant", "content": "of"}]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenization.train_bpe(
        ["the size of the apple"] * 3, vocab_size=280, special_tokens=("<user>", "<assistant>", "</s>")
    )


def documents(*records):
    return data.in_memory(["x"] * len(records)).map_with_index(lambda i, _: records[i % len(records)])


TEMPLATE = tokenization.ChatTemplate(PLAIN)


def text(tokenizer, targets):
    return tokenizer.decode([t for t in np.asarray(targets).tolist() if t >= 0], skip_special_tokens=False)


def test_pairs_share_their_prompt_and_learn_the_answer(tokenizer):
    source = documents(
        {"prompt": None, "chosen": ASK + YES, "rejected": ASK + NO}, {"prompt": ASK, "chosen": NO, "rejected": YES}
    )
    first, second = (data.pairs(source, tokenizer, TEMPLATE)[i] for i in range(2))
    assert text(tokenizer, first["chosen"]["targets"]) == "the apple</s>"
    assert text(tokenizer, first["rejected"]["targets"]) == text(tokenizer, second["chosen"]["targets"]) == "of</s>"
    np.testing.assert_array_equal(first["chosen"]["tokens"], second["rejected"]["tokens"])


def test_margins_of_pairs_are_kept(tokenizer):
    """`BradleyTerry` reads them; without them it is another loss."""
    pair = {"chosen": ASK + YES, "rejected": ASK + NO}
    rows = data.pad(data.pairs(documents(pair | {"margin": 0.5}, pair | {"margin": 2}), tokenizer, TEMPLATE), length=24)
    batch = next(data.Loader(lambda part: rows[part].to_iter_dataset(), batch_size=2, num_shards=1))
    np.testing.assert_array_equal(batch["margin"], np.float32([0.5, 2]))
    with pytest.raises(ValueError, match="'margin' must be a finite number, got 'large'"):
        data.pairs(documents(pair | {"margin": "large"}), tokenizer, TEMPLATE)[0]


def test_a_loader_gives_nested_batches(tokenizer):
    source = documents(*[{"chosen": ASK + YES, "rejected": ASK + NO}] * 6)
    rows = data.pad(data.pairs(source, tokenizer, TEMPLATE), length=24)
    loader = data.Loader(lambda part: rows[part].to_iter_dataset(), batch_size=4, num_shards=2)
    first, second = next(loader), next(loader)
    for half in ("chosen", "rejected"):
        assert {name: x.shape for name, x in first[half].items()} == dict.fromkeys(
            ("tokens", "targets", "segment_ids"), (4, 24)
        )
    assert (second["chosen"]["targets"][1] == -1).all()  # six pairs: each shard's last batch has a row of padding
    assert text(tokenizer, second["rejected"]["targets"][0]) == "of</s>"


def test_padded_chats_are_rows_without_their_messages(tokenizer):
    source = documents({"messages": ASK + YES, "tools": ["none"], "record": "a:1"})
    row = data.pad(data.tokenize_chats(source, tokenizer, TEMPLATE), length=24)[0]
    assert {name: x.shape for name, x in row.items()} == dict.fromkeys(("tokens", "targets", "segment_ids"), (24,))
    assert text(tokenizer, row["targets"]) == "the apple</s>"


def test_documents_without_targets_are_not_padded():
    with pytest.raises(ValueError, match="pad needs 'targets' in a document: use data.tokenize_chats"):
        data.pad(data.in_memory([[1, 2, 3]]), length=4)[0]


def test_bad_pairs_are_named(tokenizer):
    source = documents(
        {"chosen": ASK + YES, "rejected": ASK + YES},
        {"chosen": ASK + YES, "rejected": ASK + ASK + NO},
        {"chosen": ASK + YES},
        {"chosen": ASK + YES, "rejected": ASK + NO},
    )
    pairs = data.pairs(source, tokenizer, TEMPLATE)
    for index, message in enumerate(("are equal", "must answer the same prompt", "needs the messages 'chosen' and")):
        with pytest.raises(ValueError, match=f"document {index}: ValueError: .*{message}"):
            pairs[index]
    bad = data.SkipBadRecords(limit=3)
    assert len(list(bad.guard(pairs))) == 1 and len(bad) == 3
    rows = data.pad(pairs.slice(slice(3, 4)), length=5)
    with pytest.raises(ValueError, match="does not fit a row of 5"):
        rows[0]
    assert data.pad(pairs.slice(slice(3, 4)), length=5, overlong="truncate")[0]["chosen"]["tokens"].shape == (5,)
    assert list(data.pad(pairs.slice(slice(3, 4)), length=5, overlong="drop")) == []


def test_templates_that_yield_no_mask_are_named(tokenizer):
    """One that leaves answers out, and one in which they cannot be found."""
    source = documents({"chosen": ASK + YES, "rejected": ASK + NO})
    silent = "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}</s>{% endif %}{% endfor %}"
    shuffled = "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    for text, message in ((silent, "the chosen turns have no tokens"), (shuffled, "mark it in the template with")):
        with pytest.raises(ValueError, match=f"document 0: ValueError: .*{message}"):
            data.pairs(source, tokenizer, tokenization.ChatTemplate(text))[0]


def test_pairs_have_the_tools_of_their_document(tokenizer):
    template = tokenization.ChatTemplate("{{ tools[0] if tools else '' }}" + PLAIN)
    with_tools, without = (
        data.pairs(documents({"chosen": ASK + YES, "rejected": ASK + NO} | more), tokenizer, template)[0]["chosen"]
        for more in ({"tools": ["the size of"]}, {})
    )
    assert text(tokenizer, with_tools["targets"]) == text(tokenizer, without["targets"]) == "the apple</s>"
    assert tokenizer.decode(with_tools["tokens"]).startswith("the size of")


def test_labelled_answers_come_with_others(tokenizer):
    other = [{"role": "user", "content": "of"}]
    source = documents({"messages": ASK + YES, "desirable": True}, {"messages": other + NO, "desirable": False})
    first, second = (data.kto_examples(source, tokenizer, TEMPLATE)[i] for i in range(2))
    assert first["desirable"] and not second["desirable"]
    assert text(tokenizer, first["mismatched"]["targets"]) == "of</s>"
    assert tokenizer.decode(second["mismatched"]["tokens"], skip_special_tokens=False).startswith("<user>of</s>")
    row = data.pad(data.kto_examples(source, tokenizer, TEMPLATE), length=30)[0]
    assert row["mismatched"]["segment_ids"].shape == row["tokens"].shape == (30,) and row["desirable"].shape == ()


def test_the_other_answer_is_to_another_prompt(tokenizer):
    """Data made from pairs has both answers to a prompt next to each other; z is a mean over other prompts' answers."""
    other = [{"role": "user", "content": "of"}]
    answers = [{"messages": ask + end, "desirable": end is YES} for ask in (ASK, other) for end in (YES, NO)]
    examples = data.kto_examples(documents(*answers), tokenizer, TEMPLATE)
    ids = lambda messages: tokenizer.encode(TEMPLATE(messages, add_generation_prompt=False)).ids
    got = [row["mismatched"]["tokens"].tolist() for row in (examples[i] for i in range(4))]
    # The two of the first prompt get the first answer to the other one, and the other way round.
    assert got == [ids(ask + YES) for ask in (ASK, ASK, other, other)]
    with pytest.raises(ValueError, match="needs an answer to another prompt, but the next 1 documents have the same"):
        data.kto_examples(documents(*answers[:2]), tokenizer, TEMPLATE)[0]


def test_completions_become_rows():
    completions = [[7, 8, 2], [9, 9, 9]]
    scores = [[-0.1, -0.2, -0.3], [-1.0, -2.0, -3.0]]
    batch = pt.completion_batch([[4, 5], [6]], completions, [[0.5, -0.5]], length=6, sampler_log_probs=scores)
    np.testing.assert_array_equal(batch["tokens"], [[4, 5, 7, 8, 2, 0], [6, 9, 9, 9, 0, 0]])
    np.testing.assert_array_equal(batch["targets"], [[-1, 7, 8, 2, -1, -1], [9, 9, 9, -1, -1, -1]])
    np.testing.assert_array_equal(batch["segment_ids"], [[1] * 5 + [0], [1] * 4 + [0] * 2])
    np.testing.assert_array_equal(batch["advantages"], 0.5 * np.array([[0, 1, 1, 1, 0, 0], [-1, -1, -1, 0, 0, 0]]))
    np.testing.assert_allclose(batch["sampler_log_probs"], [[0, -0.1, -0.2, -0.3, 0, 0], [-1, -2, -3, 0, 0, 0]])
    with pytest.warns(UserWarning, match=r"1 of 2 completions are shorter .* one of \[3\]: the policy does not learn"):
        pt.completion_batch([[4, 5], [6]], [[7, 8, 2], [9]], [[0.5, -0.5]], length=6, stop_token_ids=[3])
    pt.completion_batch([[4, 5], [6]], [[7, 8, 2], [9, 3]], [[0.5, -0.5]], length=6, stop_token_ids=[3])
    warm, cold = inference.Sampler(temperature=0.7), inference.Sampler(temperature=0.1)
    drawn = [inference.Completion(*both, "stop", warm) for both in zip(completions, scores, strict=True)]
    same = pt.completion_batch([[4, 5], [6]], drawn, [[0.5, -0.5]], length=6)
    assert same.pop("sampler") == warm and "sampler" not in batch and same.keys() == batch.keys()
    assert all((same[name] == batch[name]).all() for name in batch)
    named = pt.completion_batch([[4, 5], [6]], completions, [[0.5, -0.5]], length=6, sampler=cold)
    assert named["sampler"] == cold
    for mixed in ([drawn[0], inference.Completion([9], [-1.0], "stop", cold)], [drawn[0], completions[1]]):
        with pytest.raises(ValueError, match="one engine and one sampler"):
            pt.completion_batch([[4, 5], [6]], mixed, [[0.5, -0.5]], length=6)
    with pytest.raises(ValueError, match="a prompt and an advantage for each completion"):
        pt.completion_batch([[4]], completions, [[1.0]], length=6)
    for wrong in ([[-0.1], scores[1]], scores[:1], [scores[0], []]):  # the first would fill all places with one number
        with pytest.raises(ValueError, match=r"for each token of each completion, \[3, 3\], got"):
            pt.completion_batch([[4, 5], [6]], completions, [1.0, 1.0], length=6, sampler_log_probs=wrong)
    with pytest.raises(ValueError, match="does not fit a row of 4"):
        pt.completion_batch([[4, 5], [6]], completions, [[1.0, 1.0]], length=4)


def test_rollouts_are_batches_by_number_with_their_metrics():
    asked = []

    def sample(number):
        asked.append(number)
        return tiny.batch(8, seed=number), {"reward": number / 4}

    trained = trainer(loader=pt.Rollouts(sample))
    assert trained.fit(3)["reward"] == 0.5 and asked == [0, 1, 2]
    state = trained.loader.get_state()
    again = pt.Rollouts(sample)
    again.set_state(state)
    np.testing.assert_array_equal(next(again)["tokens"], tiny.batch(8, seed=3)["tokens"])
    again.reset()
    next(again)
    assert asked == [0, 1, 2, 3, 0] and again.metrics() == {"reward": 0.0}


def test_rollouts_are_sampled_while_the_model_trains():
    """In a thread, with weights that were copied before the step: those after step n - 1 for batch n + 1."""
    handed, weights = [], []
    first = lambda: np.asarray(next(iter(trained.state.trainable.values())))

    def sample(number):
        weights.append((number, threading.current_thread() is threading.main_thread(), handed[-1]))
        return tiny.batch(8, seed=number), {}

    before = lambda: handed.append(first())
    loader = training.Prefetch(pt.Rollouts(sample), size=1, in_thread=True, before_read=before)
    trained = trainer(loader=loader)
    seen = [first()]
    for steps in (1, 2, 3):
        trained.fit(steps)
        seen.append(first())
    assert [(number, main) for number, main, _ in weights[:3]] == [(0, False), (1, False), (2, False)]
    for (_, _, used), after in zip(weights, (0, 0, 1), strict=False):
        np.testing.assert_array_equal(used, seen[after])
    assert not np.array_equal(seen[0], seen[1])


def test_rollouts_may_be_sampled_a_step_ahead():
    """`Prefetch` draws a batch with the weights of one step earlier, and does not count it as trained on."""
    sampled_at = []

    def sample(number):
        sampled_at.append((number, trained.step))
        return tiny.batch(8, seed=number), {"reward": number / 4}

    trained = trainer(loader=training.Prefetch(pt.Rollouts(sample), size=2))
    assert trained.fit(3)["reward"] == 0.5 and sampled_at == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert trained.loader.get_state() == {"0": {"next": 3}}
