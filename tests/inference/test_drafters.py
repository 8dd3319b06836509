"""Decoding with a drafter yields the same text as plain decoding, however good the drafts are."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import maxlib
from maxlib import nn, ops
from maxlib._command import main
from maxlib.inference import Generator, LocalEngine
from maxlib.models import gemma4, gemma4_assistant
from maxlib.models.gemma4 import GLOBAL, LOCAL
from maxlib.models.gemma4_assistant import Drafting
from tests.models import parity
from tests.nn.tiny import filled, filled_llama

PROMPTS = [[1, 4, 2, 3, 0], [5], [3, 1, 4, 1, 5, 2, 2, 5, 3, 5, 0]]
# A vocabulary so small that an untrained drafter is right now and then; a window that texts leave behind.
TEXT = dict(
    vocab=6, mlp_dim=24, num_heads=2, num_kv_heads=1, head_dim=8, window=4, global_heads=(12, 1), per_layer_dim=0,
    per_layer_vocab=0, rope=ops.Rope(12, 1e5, ops.ProportionalScaling(0.5), max_length=64), local_rope=ops.Rope(8, 1e4, max_length=64),
)  # fmt: skip
TARGETS = {
    # Two scanned layers of each type, then two that take the keys of the last of these.
    "shared": gemma4.Config(**TEXT, dim=16, tied=False, num_layers=6, layer_types=(LOCAL, GLOBAL) * 3, num_shared=2),
    "alone": gemma4.Config(
        **TEXT, dim=16, tied=False, num_layers=3, layer_types=(LOCAL, LOCAL, GLOBAL), keys_as_values=True
    ),
}
ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
DRAFTING = Drafting(target_dim=16, clustered=True, num_clusters=3, top_clusters=2)
CFG = gemma4_assistant.Config(**TEXT, dim=12, num_layers=3, final_softcap=None, drafting=DRAFTING)


def made(build, cfg):
    """A model with random weights, large enough for texts that wander, also where they are stored and not trained."""
    model = filled(lambda: build(cfg, rngs=nnx.Rngs(0)))
    for path, value in nn.variables(model).items():
        if value.ndim > 1:
            value.set_value(5 * value.get_value())
        if path.endswith("factor"):
            value.set_value(jnp.full(value.shape, 1.1))
        if path.endswith("ids"):
            value.set_value(jnp.asarray(np.random.RandomState(0).permutation(len(value)), jnp.int32))
    return model


@pytest.fixture(scope="module", params=["shared", pytest.param("alone", marks=pytest.mark.full)])
def generator(request):
    return Generator(made(gemma4.Gemma4, TARGETS[request.param]), dtype=jnp.float32)


@pytest.fixture(scope="module")
def longer(generator):
    return generator.generate(PROMPTS, max_new_tokens=21)


@pytest.fixture(scope="module")
def plain(longer):
    return [text[:20] for text in longer]


@pytest.fixture(scope="module")
def drafter():
    return made(gemma4_assistant.Gemma4Assistant, CFG)


class Told(nnx.Module):
    """A drafter that was told the text, and adds `off` to each token."""

    def __init__(self, texts: list[list[int]], off: int):
        self.texts = nnx.Variable(jnp.asarray([text + [0] * (64 - len(text)) for text in texts]))
        self.off = off

    def check_target(self, target) -> None: ...

    def draft(self, target, hidden, token, cache, *, count):
        at = cache.length[:, None] + 1 + jnp.arange(count)[None]
        return (jnp.take_along_axis(self.texts[...], at, axis=1) + self.off) % TEXT["vocab"]


def drafting(model, drafter, *, num_drafts=3, **options):
    return LocalEngine(model, slots=3, num_drafts=num_drafts, drafter=drafter, dtype=jnp.float32, **options)


def texts_of(engine, prompts=PROMPTS, **options):
    return [completion.tokens for (completion,) in engine.generate(prompts, **options)]


def test_text_is_that_of_plain_decoding(generator, drafter, plain):
    engine = drafting(generator.model, drafter)
    assert texts_of(engine, max_new_tokens=20) == plain
    assert 0 < engine.num_accepted < engine.num_drafted


@pytest.mark.full
def test_all_drafts_are_taken_or_none(generator, plain, longer):
    texts = [PROMPTS[2] + longer[2]]
    for off, steps in ((0, 5), (1, 19)):  # four tokens in each pass, or one
        engine = drafting(generator.model, Told(texts, off))
        assert texts_of(engine, PROMPTS[2:], max_new_tokens=20) == plain[2:]
        assert (engine.num_steps, engine.num_accepted) == (steps, 0 if off else engine.num_drafted)


def test_a_guess_sees_the_last_keys_alone(generator, drafter):
    """Whatever stands in a ring from refused drafts: the drafts are those from a cache that never had these."""
    model, tokens = generator.model, jnp.asarray([PROMPTS[2] + PROMPTS[0]], jnp.int32)

    @jax.jit
    def drafts(tokens, refused):
        cache = model.init_cache(1, 32, dtype=jnp.float32)
        cache = dataclasses.replace(cache, layers=nn.cache.make_rewindable(cache.layers, 4))
        out = model(tokens, cache=cache, dtype=jnp.float32)
        after = model(refused, cache=out.cache, dtype=jnp.float32)
        rewound = dataclasses.replace(after.cache, length=out.cache.length)
        keys = [drafter.target_keys(model, kept, jnp.float32) for kept in (out.cache, rewound)]
        embedded = model.embed_tokens(tokens[:, :1], jnp.float32)
        return [drafter(embedded, out.hidden[:, -1:], k, out.cache.length)[0] for k in keys]

    want, got = drafts(tokens, jnp.asarray([[2, 2, 2]], jnp.int32))
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.full
def test_rounded_caches_and_single_tokens(generator, drafter, plain):
    rounded = Generator(generator.model, dtype=jnp.float32, cache_dtype=jnp.int8)
    want = rounded.generate(PROMPTS, max_new_tokens=12)
    assert texts_of(drafting(generator.model, drafter, cache_dtype=jnp.int8), max_new_tokens=12) == want
    engine, stop = drafting(generator.model, drafter), plain[0][3]
    assert texts_of(engine, max_new_tokens=1) == [text[:1] for text in plain]
    got = texts_of(engine, max_new_tokens=20, stop_token_ids=[stop])
    assert got == [row[: row.index(stop) + 1] if stop in row else row for row in plain]


def test_pairs_that_do_not_fit_are_refused(generator, drafter):
    with pytest.raises(ValueError, match="this drafter is for a Gemma4, got Llama"):
        drafting(filled_llama(num_layers=1), drafter)
    with pytest.raises(ValueError, match=r"drafter must have the methods of nn\.mtp\.Drafter"):
        drafting(generator.model, generator.model)
    with pytest.raises(ValueError, match="this Gemma4 does not draft: it has no MTP module.* pass drafter="):
        drafting(generator.model, "mtp", num_drafts=1)
    with pytest.raises(ValueError, match="drafts for another model and generates no text itself"):
        Generator(drafter)
    target = generator.model.cfg
    for changes, what in (
        ({"drafting": dataclasses.replace(DRAFTING, target_dim=8)}, "target_dim .* is 8, the model's 16"),
        ({"vocab": 9}, "vocab .* is 9, the model's 6"),
        ({"window": 5}, "window .* is 5, the model's 4"),
        ({"global_heads": (8, 1), "rope": ops.Rope(8, 1e5)}, r"key heads \(full_attention\) is \(8, 1\)"),
        ({"local_rope": ops.Rope(8, 1e5)}, r"rope \(sliding_attention\)"),
    ):
        other = jax.eval_shape(
            lambda c=changes: gemma4_assistant.Gemma4Assistant(dataclasses.replace(CFG, **c), rngs=nnx.Rngs(0))
        )
        with pytest.raises(ValueError, match=what):
            other.check_target(generator.model)
    assert drafter.check_target(generator.model) is None and target.dim == 16


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_shared": 1}, "every layer of a drafter takes keys"),
        ({"per_layer_dim": 4}, "a drafter has no hidden_size_per_layer_input, got 4"),
        ({"shared_wide": True}, "a drafter has no use_double_wide_mlp"),
        ({"drafting": Drafting(clustered=True, num_clusters=4)}, "num_centroids must divide vocab_size .* got 6 and 4"),
    ],
)
def test_configs_that_cannot_be_are_refused_by_name(changes, error):
    with pytest.raises(ValueError, match=error):
        dataclasses.replace(CFG, **changes)


@pytest.mark.parametrize("drafting", [DRAFTING, Drafting(unified=True, target_dim=16)])
def test_a_directory_is_read_back(tmp_path, capsys, drafting):
    cfg = dataclasses.replace(CFG, drafting=drafting, tied=not drafting.clustered)
    model = made(gemma4_assistant.Gemma4Assistant, cfg)
    maxlib.save_pretrained(model, tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["architectures"] == [ARCHITECTURES[drafting.unified]]
    assert config["model_type"] == ("gemma4_unified_assistant" if drafting.unified else "gemma4_assistant")
    assert config["text_config"]["model_type"] == config["model_type"].replace("assistant", "text")
    again = maxlib.from_pretrained(tmp_path / "drafter")
    assert again.cfg == cfg
    for path, value in nn.variables(model).items():
        np.testing.assert_array_equal(nn.variables(again)[path][...], value[...], err_msg=path)
    assert main(["generate", str(tmp_path / "drafter"), "A house", "--raw"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


# --- against transformers ---


@pytest.fixture
def transformers(monkeypatch):
    """transformers 5.23 builds no model in which every layer takes keys, and gives no keys of one in which none does,
    since a property of its configs (pull request 47290) looks for layers that share; here it finds them.
    """
    pytest.importorskip("torch")
    module = pytest.importorskip("transformers")

    def modes(self):
        num_own = self.num_hidden_layers - (self.num_kv_shared_layers or 0)
        last = {kind: i for i, kind in enumerate(self.layer_types[:num_own])}
        return ["reuse" if i >= num_own else "store" if last[k] == i else None for i, k in enumerate(self.layer_types)]

    for config in (module.Gemma4TextConfig, module.Gemma4UnifiedTextConfig):
        monkeypatch.setattr(config, "kv_sharing_modes", property(modes))
    return module


def theirs(model, directory, cls):
    """The export of a model as transformers opens it: nothing is missing or left over."""
    maxlib.save_pretrained(model, directory)
    loaded, info = cls.from_pretrained(directory, attn_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    return loaded.eval()


@pytest.mark.full
@pytest.mark.parametrize("drafting", [DRAFTING, Drafting(unified=True, target_dim=16)])
@pytest.mark.parametrize("length", [3, 16])
def test_scores_and_texts_are_those_of_transformers(tmp_path, transformers, generator, plain, drafting, length):
    """Within a window and beyond it."""
    import torch

    cfg = dataclasses.replace(CFG, drafting=drafting, tied=not drafting.clustered)
    drafter = made(gemma4_assistant.Gemma4Assistant, cfg)
    draft = theirs(drafter, tmp_path / "drafter", getattr(transformers, ARCHITECTURES[drafting.unified]))
    target = theirs(generator.model, tmp_path / "target", transformers.Gemma4ForCausalLM)
    tokens = parity.tokens(TEXT["vocab"], length)[:1]
    with torch.no_grad():
        out = target(torch.from_numpy(tokens).long(), output_hidden_states=True, return_shared_kv_states=True)
        token = out.logits[:, -1:].argmax(dim=-1)
        inputs = torch.cat([target.get_input_embeddings()(token), out.hidden_states[-1][:, -1:]], dim=-1)
        keys, at = dict(out.shared_kv_states), torch.tensor([[length]])
        want = draft(inputs_embeds=inputs, position_ids=at, shared_kv_states=keys)

    model, cache = generator.model, generator.model.init_cache(1, 32, dtype=jnp.float32)
    cache = dataclasses.replace(cache, layers=nn.cache.make_rewindable(cache.layers, 4))
    out = model(jnp.asarray(tokens), cache=cache, dtype=jnp.float32)
    keys = drafter.target_keys(model, out.cache, jnp.float32)
    embedded = model.embed_tokens(jnp.asarray(token.numpy(), jnp.int32), jnp.float32)
    for got, right in zip(drafter(embedded, out.hidden[:, -1:], keys, out.cache.length),
                          (want.logits, want.last_hidden_state), strict=True):  # fmt: skip
        np.testing.assert_allclose(got, right.numpy(), rtol=0, atol=1e-5 * right.numpy().std())

    draft.generation_config.num_assistant_tokens = 3
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": None}
    for prompt, text in zip(PROMPTS, plain, strict=True):
        row = torch.tensor([prompt])
        with torch.no_grad():
            generated = target.generate(row, attention_mask=torch.ones_like(row), assistant_model=draft, **options)
        assert generated[0, len(prompt) :].tolist() == text


@pytest.mark.full
def test_a_directory_of_transformers_is_written_again(tmp_path, transformers):
    """Also one without the number of layers that take keys, as it says it of itself."""
    import torch

    text = transformers.Gemma4TextConfig(
        vocab_size=60, hidden_size=16, intermediate_size=20, num_hidden_layers=4, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, global_head_dim=12, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
    )  # fmt: skip
    config = transformers.Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=24,
        use_ordered_embeddings=True,
        num_centroids=10,
        centroid_intermediate_top_k=3,
    )
    model = transformers.Gemma4AssistantForCausalLM(config)
    model.masked_embedding.token_ordering.data = torch.randperm(60)
    model.save_pretrained(tmp_path / "theirs")
    maxlib.save_pretrained(maxlib.from_pretrained(tmp_path / "theirs"), tmp_path / "ours")
    want, got = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    again = transformers.Gemma4AssistantForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.masked_embedding.token_ordering.tolist() == model.masked_embedding.token_ordering.tolist()
