"""Special tokens, templates and prompts of directories of many shapes, against transformers and lm-eval."""

import importlib.util
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from maxlib import inference, tokenization
from maxlib.inference import _harness
from maxlib.tokenization import ChatTemplate, special_tokens
from maxlib.weights import families
from tests.nn.tiny import filled_llama

transformers = pytest.importorskip("transformers")

TOKENS = ("<|endoftext|>", "<s>", "</s>", "<bos>", "<eos>", "<img>", "<end>", "<unk>", "<pad>", "<mask>", "<|start|>")
TOKENIZER = tokenization.train_bpe(["user assistant hello ok"], vocab_size=300, special_tokens=TOKENS)
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "ok 5"}]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {}}}]
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
NAMED = [{"name": "default", "template": TURNS}, {"name": "tool_use", "template": "{{ tools }}" + TURNS}]
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
END = {"eos_token": "<end>"}
ADDED = {"content": "<end>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
# Contents of tokenizer_config.json, special_tokens_map.json and config.json.
FILES = {
    "nothing": (FAST, None, {}),
    "no files": (None, None, {"model_type": "llama"}),
    "configuration": (FAST | END | {"bos_token": "<s>"}, None, {}),
    "object": (FAST | {"eos_token": {"__type": "AddedToken", **ADDED}}, None, {}),
    "null": (FAST | END | {"bos_token": None}, None, {}),
    "options": (FAST | END | {"add_bos_token": True, "add_eos_token": False}, None, {}),
    "map": (FAST, END, {}),
    "map of objects": (FAST, {"eos_token": ADDED, "bos_token": "<s>"}, {}),
    "map over configuration": (FAST | {"eos_token": "</s>"}, END, {}),
    "null in the map": (FAST | END, {"eos_token": None}, {}),
    "map is not read": (FAST | {"eos_token": "</s>", "added_tokens_decoder": {}}, END, {}),
    "configuration over map": (FAST | {"image_token": "<img>"}, {"image_token": "<end>"}, {}),
    "image in the map": (FAST, {"image_token": "<img>"}, {}),
    "extra": (FAST | END | {"extra_special_tokens": {"image_token": "<img>"}}, None, {}),
    "extra over configuration": (FAST | END | {"extra_special_tokens": {"eos_token": "</s>"}}, None, {}),
    "extra in the map": (FAST | {"image_token": "<end>"}, {"extra_special_tokens": {"image_token": "<img>"}}, {}),
    "list of extra": (FAST | END | {"extra_special_tokens": ["<img>"]}, None, {}),
    "additional": (FAST | END | {"additional_special_tokens": ["<img>"]}, None, {}),
    "gpt2": ({"model_max_length": 1024}, None, {"model_type": "gpt2"}),
    "gpt2 with another end": (END, None, {"model_type": "gpt2"}),
    "gpt2 without begin": ({"bos_token": None}, None, {"model_type": "gpt2"}),
    "class in config.json": ({}, None, {"model_type": "llama", "tokenizer_class": "GPT2TokenizerFast"}),
    "unknown class": ({"tokenizer_class": "OtherTokenizer"}, None, {"model_type": "llama"}),
}
CLASSES = (
    None,
    *("PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2TokenizerFast"),
    "GemmaTokenizer",
)


def write(directory, tokenizer_config, token_map, config, tokenizer=TOKENIZER):
    tokenizer.save(str(directory / "tokenizer.json"))
    names = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
    for name, fields in zip(names, (tokenizer_config, token_map, config), strict=True):
        if fields is not None:
            (directory / name).write_text(json.dumps(fields))


def stated(directory):
    return {name: token for name, token in special_tokens(directory).items() if token is not None}


def assert_as_in_transformers(directory):
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    assert stated(directory) == theirs.special_tokens_map
    names = stated(directory) | dict.fromkeys(n for n, token in special_tokens(directory).items() if token is None)
    every_token = "{{ messages[0].content }}" + "".join(
        f"{{{{ {name} }}}}{{{{ {name} is defined }}}}" for name in names
    )
    want = theirs.apply_chat_template(CHAT, chat_template=every_token, tokenize=False)
    assert ChatTemplate.from_directory(directory, default=every_token)(CHAT) == want
    # A token of some models only renders as nothing, as in transformers; a standard one that no file states does not.
    assert ChatTemplate.from_directory(directory, default="{{ other_token }}")(CHAT) == ""
    for name in {"bos_token", "eos_token", "pad_token"} - special_tokens(directory).keys():
        with pytest.raises(ValueError, match=f"no file of the tokenizer states its {name}"):
            ChatTemplate.from_directory(directory, default=f"{{{{ {name} }}}}")(CHAT)
    return theirs


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_tokens_are_those_of_transformers(files, tmp_path):
    write(tmp_path, *files)
    assert_as_in_transformers(tmp_path)


@pytest.mark.parametrize("metaspace", [False, True])
def test_every_family_has_the_defaults_of_its_class(metaspace, tmp_path):
    """The defaults depend on the model, the class that a file declares, and for one class on the tokenizer."""
    tokenizer = TOKENIZER
    if metaspace:
        tokenizer = Tokenizer(models.BPE({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}, [], unk_token="<unk>"))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    kinds = {kind.split("/")[0] for family in families() for kind in family.model_types} - {"gemma4_assistant"}
    unigram = Tokenizer(models.Unigram([("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("a", -1.0)], unk_id=2))
    for kind in ("llama", "mistral", "t5", "xlm-roberta") if metaspace else sorted(kinds - {"t5", "xlm-roberta"}):
        for name in CLASSES if kind in ("llama", "mistral", "qwen2", "qwen3", "gemma") else (None, "GPT2Tokenizer"):
            kept = unigram if kind in ("t5", "xlm-roberta") else tokenizer
            write(tmp_path, {"tokenizer_class": name} if name else {}, None, {"model_type": kind}, kept)
            want = transformers.AutoTokenizer.from_pretrained(tmp_path).special_tokens_map
            assert stated(tmp_path) == want, (kind, name)


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "GemmaTokenizer"])
@pytest.mark.parametrize("own_files", [True, False])
def test_directories_that_transformers_wrote(name, own_files, tmp_path):
    """With templates in files of their own, or within tokenizer_config.json."""
    if name == "PreTrainedTokenizerFast":
        options = {"eos_token": "<end>", "pad_token": "<pad>", "extra_special_tokens": {"image_token": "<img>"}}
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, **options)
    else:
        tokenizer = getattr(transformers, name)(vocab=TOKENIZER.get_vocab(), merges=[])
    tokenizer.chat_template = {entry["name"]: entry["template"] for entry in NAMED} | {"rag": "{{ documents }}"}
    tokenizer.save_pretrained(tmp_path, save_jinja_files=own_files)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert stated(tmp_path) == theirs.special_tokens_map
    ours = ChatTemplate.from_directory(tmp_path)
    for options in (
        {"add_generation_prompt": True},
        {"tools": TOOLS, "add_generation_prompt": False},
        {"chat_template": "rag", "documents": [{"title": "a", "text": "b"}]},
        {"continue_final_message": True},
    ):
        assert ours(CHAT, **options) == theirs.apply_chat_template(CHAT, tokenize=False, **options), options
    with pytest.raises(ValueError, match="chat_template must be one of default, .*got 'other'"):
        ours(CHAT, chat_template="other")
    with pytest.raises(ValueError, match="takes no return_tensors"):
        ours(CHAT, return_tensors="np")


@pytest.mark.parametrize("files", [FILES[name] for name in ("configuration", "map", "null", "gpt2", "extra")])
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval")
def test_prompts_of_the_harness_are_those_of_lm_eval(files, tmp_path, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    tokenizer_config, token_map, config = files
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TURNS + "{{ eos_token }}"
    write(tmp_path, tokenizer_config | {"chat_template": refuses}, token_map, config)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=320, **shape))
    theirs = HFLM(pretrained=model, tokenizer=transformers.AutoTokenizer.from_pretrained(tmp_path), max_length=32)
    monkeypatch.setattr(_harness, "read_model", lambda directory: filled_llama(vocab=300))
    ours = inference.Harness.from_pretrained(tmp_path)
    assert (ours.eot_token_id, ours.prefix_token_id) == (theirs.eot_token_id, theirs.prefix_token_id)
    begin = TOKENIZER.id_to_token(ours.prefix_token_id)
    for text in ("hello", begin + "hello", "<end> ok"):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
    for chat in (CHAT, [{"role": "system", "content": "ok"}, *CHAT]):
        for prompted in (True, False):
            assert ours.apply_chat_template(chat, prompted) == theirs.apply_chat_template(chat, prompted)


def test_a_text_ends_where_the_tokenizer_says_if_no_other_file_does(tmp_path):
    write(tmp_path, FAST, END, {"model_type": "llama"})
    assert inference.stop_tokens(tmp_path) == [TOKENIZER.token_to_id("<end>")]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    assert inference.stop_tokens(tmp_path) == [3, 2]


@pytest.mark.parametrize("wrong", [{"eos_token": 5}, {"extra_special_tokens": {"image_token": ["<img>"]}}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_token_that_is_no_text_is_refused(wrong, name, tmp_path):
    write(tmp_path, FAST, None, {})
    (tmp_path / name).write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match=rf"{name}: .*token"):
        special_tokens(tmp_path)
