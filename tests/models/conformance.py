"""Tests that every family must pass, with or without transformers installed.

    class TestMistral(Conformance):
        family = "mistral"
        config = "MistralConfig"
        cases = {"windowed": {"sliding_window": 5}, ...}

A case is what it changes of `base`, the config of a tiny model. Golden files hold what transformers made of all of
them. By default a family is compared with these, and its files are read and written; the whole conformance (marked
`full`) runs in `nox -s tests_full`.
"""

import contextlib
import functools
import json
import re
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import maxlib
from maxlib import nn, sharding
from maxlib.weights import HFConfig, read_model
from tests.models import parity

SEQ = 24
CLOSE = 2e-5  # of the deviation: what float32 sums in another order differ by
BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
# For families whose usual ids lie outside of this vocabulary; nor does transformers give the row of padding a gradient.
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 64.0, "original_max_position_embeddings": 16}


def assert_close(got: Any, want: Any, atol: float = CLOSE) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=atol * float(np.std(want)))


def _logits(
    model: Any,
    tokens: np.ndarray,
    segment_ids: np.ndarray | None = None,
    images: Any = None,
    audio: Any = None,
    source: Any = None,
) -> np.ndarray:
    inputs = {"segment_ids": segment_ids} | parity._given(images, audio, source)
    # Indexing a jax array would compile once more for every shape.
    return np.asarray(_forward(model, tokens, inputs))


def changed(case: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """Returns the case with another value of a config field; a dotted name is in a nested object."""

    def put(config: dict[str, Any], field: str) -> dict[str, Any]:
        name, _, inner = field.partition(".")
        return {**config, name: put(config[name], inner) if inner else value}

    return {**case, "config": put(case["config"], field)}


def read(family: str, config: dict[str, Any]) -> Any:
    """Reads a config.json as `from_pretrained` does: no field is left unread."""
    hf = HFConfig(config)
    cfg = next(f for f in maxlib.weights.families() if f.name == family).fields.read(hf)
    hf.done()
    return cfg


def _dtype(model: Any) -> Any:
    """The dtype of the model's parameters, in which it computes here too."""
    return jnp.result_type(*jax.tree.leaves(nn.partition(model)[0]))


@functools.partial(jax.jit, compiler_options=parity.QUICK)
def _forward(model, tokens, inputs):
    return model.logits(model(tokens, **inputs, dtype=_dtype(model)).hidden)


@functools.partial(jax.jit, compiler_options=parity.QUICK)
def _step(model, tokens, valid, cache):
    out = model(tokens, valid=valid, cache=cache, dtype=_dtype(model))
    return model.logits(out.hidden), out.cache


def _is_heads_first(cache) -> bool:
    return isinstance(cache, nn.cache.KVCache | nn.cache.RingCache)


class Conformance:
    family: ClassVar[str]
    config: ClassVar[str]  # transformers' class
    base: ClassVar[dict[str, Any]] = BASE
    cases: ClassVar[dict[str, dict[str, Any]]]
    # Of the first case: another value for every field that matters to the computation.
    matters: ClassVar[dict[str, Any]]
    stated: ClassVar[dict[str, Any]] = {}  # fields without which a config does not say what it means
    refused: ClassVar[dict[str, Any]] = {}  # values that a field of its own kind cannot have
    windows: ClassVar[dict[str, set[int]]] = {}  # slots of the caches of a case; all others keep everything
    gradients_by_default: ClassVar[bool] = False  # of the first case; otherwise by default only its logits
    slot_axis: ClassVar[
        int
    ] = -3  # of the arrays in a cache other than those of keys and values, [rows, heads, slots, width]
    rules: ClassVar[sharding.Strategy] = sharding.FSDP_TP | {"vocab": None}
    dtype: ClassVar[str] = "float32"  # in which transformers computes
    gradients: ClassVar[float] = 1e-4  # of their norms
    recorded: ClassVar[str] = "resid_pre"  # which value of a layer their hidden states are
    zero_gradients: ClassVar[str] = "$^"  # pattern of tensors whose gradient is zero but for rounding

    @staticmethod
    def tokens(vocab: int, seq: int) -> np.ndarray:
        """Returns rows of ids."""
        return parity.tokens(vocab, seq)

    def pytest_generate_tests(self, metafunc):
        """Every case; by default only the first is read and computed."""
        if "name" not in metafunc.fixturenames:
            return
        first, *others = type(self).cases
        if "made" in metafunc.fixturenames:
            others = [pytest.param(name, marks=pytest.mark.full) for name in others]
        with_gradients = {
            "test_logits_are_those_of_transformers": False,
            "test_gradients_are_those_of_transformers": True,
        }
        if with_gradients.get(metafunc.function.__name__, self.gradients_by_default) != self.gradients_by_default:
            first = pytest.param(first, marks=pytest.mark.full)
        metafunc.parametrize("name", [first, *others])

    @classmethod
    def transformers_cases(cls) -> dict[str, tuple[Any, np.ndarray, str]]:
        """Returns the configuration for transformers, used by `parity.write` and the live tests."""
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("torch")
        make = lambda changes: getattr(transformers, cls.config)(**cls.base | changes)
        configs = {name: make(changes) for name, changes in cls.cases.items()}
        return {name: (config, cls.tokens(config.vocab_size, SEQ), cls.dtype) for name, config in configs.items()}

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, tmp_path_factory):
        """By name: the golden case, its directory, and our model of it."""

        @functools.cache
        def make(name: str) -> tuple[dict[str, Any], Path, Any]:
            case = parity.golden(cls.family)[name]
            directory = parity.directory(tmp_path_factory.mktemp(name), case)
            return case, directory, maxlib.from_pretrained(directory)

        return make

    @pytest.fixture
    def exact(self, made):
        """As `made`; in float64 if the reference uses it, because recurrences amplify float32's rounding errors."""
        with jax.enable_x64(self.dtype == "float64"):

            def make(name: str) -> tuple[dict[str, Any], Path, Any]:
                case, directory, model = made(name)
                return (
                    case,
                    directory,
                    maxlib.from_pretrained(directory, dtype=self.dtype) if self.dtype == "float64" else model,
                )

            yield make

    # --- against transformers ---

    def test_logits_are_those_of_transformers(self, name, made):
        case, _, model = made(name)
        assert_close(parity.logits(model, case["tokens"], *parity.inputs_of(case)), case["logits"], 1e-4)

    def test_gradients_are_those_of_transformers(self, name, made, tmp_path):
        """And logits."""
        case, _, model = made(name)
        logits, gradients = parity.ours(model, case["tokens"], tmp_path / "gradients", *parity.inputs_of(case))
        assert_close(logits, case["logits"], 1e-4)
        assert gradients.keys() == case["shapes"].keys()
        for tensor, gradient in gradients.items():
            norm, product = case["gradients"][tensor]
            if re.search(self.zero_gradients, tensor):
                assert max(norm, np.linalg.norm(gradient)) < 1e-6, tensor
                continue
            ours = parity.projection(tensor, gradient)
            np.testing.assert_allclose(ours, [norm, product], rtol=0, atol=self.gradients * norm, err_msg=tensor)

    @pytest.mark.full
    def test_golden_arrays_are_what_transformers_gives(self, name):
        golden, now = parity.golden(self.family)[name], parity.theirs(*self.transformers_cases()[name])
        assert golden["shapes"] == now["shapes"]
        assert_close(now["logits"], golden["logits"], CLOSE)
        for tensor, value in now["gradients"].items():
            np.testing.assert_allclose(value, golden["gradients"][tensor], rtol=1e-3, atol=1e-5 * value[0])

    @pytest.mark.full
    def test_transformers_opens_the_export(self, name, made, tmp_path):
        """Nothing is missing or left over, and it computes what we compute, also far behind the first tokens."""
        torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
        case, _, model = made(name)
        maxlib.save_pretrained(model, tmp_path / "export")
        theirs, info = parity.auto(case["config"]["model_type"]).from_pretrained(
            tmp_path / "export", attn_implementation="eager", experts_implementation="eager", output_loading_info=True
        )
        theirs = theirs.to(getattr(torch, self.dtype))
        assert not any(info.values()), info
        tokens = self.tokens(model.cfg.vocab, min(520, model.max_length or 520))[:1]
        with torch.no_grad():
            want = theirs(torch.from_numpy(tokens).long()).logits.float().numpy()
        assert_close(_logits(model, tokens), want, 1e-4)

    @pytest.mark.full
    def test_captured_values_are_those_of_transformers(self, exact):
        """The input of every layer, and the attention pattern of every layer that has one."""
        torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
        case, directory, model = exact(next(iter(self.cases)))
        sees = any(case.get(inputs) is not None for inputs in ("grids", "clips"))
        theirs = parity.auto(case["config"]["model_type"], sees=sees).from_pretrained(
            directory, attn_implementation="eager", experts_implementation="eager", dtype=getattr(torch, self.dtype)
        )
        with torch.no_grad():
            arguments = parity.arguments(case, torch.from_numpy(case["tokens"]).long(), theirs.dtype)
            out = theirs(**arguments, output_hidden_states=True, output_attentions=True)
        inputs = parity._given(*parity.inputs_of(case))
        _, values = nn.capture(model, ["resid_pre", "resid_post"])(case["tokens"], **inputs, dtype=_dtype(model))
        recorded = out.get("hidden_states", out.get("decoder_hidden_states"))
        # Their last hidden state is after the final norm. They record layers before Qwen3-VL adds images to them.
        text = case["tokens"] != case["config"].get("image_token_id")
        ours, want = values[self.recorded][:, text], np.stack(recorded[:-1])[:, text]
        assert_close(ours, want.reshape(ours.shape))  # streams may be one axis with their width
        patterns = []
        for layer in range(len(values["resid_pre"])):
            run = nn.capture(model, "attention_pattern.0", layers=layer)
            with contextlib.suppress(KeyError):  # no attention in this layer
                patterns.append(run(case["tokens"], **inputs, dtype=_dtype(model))[1]["attention_pattern.0"][0])
        recorded = out.get("attentions", out.get("decoder_attentions")) or ()
        recorded = [pattern for pattern in recorded if pattern is not None]
        for ours, pattern in zip(patterns, recorded, strict=True):
            # Where DeepSeek V4 attends to compressed entries too, those are a pattern of their own.
            if ours.shape == pattern.shape:
                np.testing.assert_allclose(ours, pattern, rtol=0, atol=1e-5)
            else:
                assert case["config"]["model_type"] == "deepseek_v4"

    # --- weights and config ---

    def test_export_is_what_was_read(self, name, made, tmp_path):
        _, directory, model = made(name)
        maxlib.save_pretrained(model, tmp_path / "export")
        want, got = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "export"))
        assert got.keys() == want.keys()
        for tensor, value in want.items():
            assert got[tensor].tobytes() == value.tobytes(), tensor
        assert read_model(tmp_path / "export")[1] == model.cfg

    def test_both_spellings_are_read(self, name):
        case = parity.golden(self.family)[name]
        assert read(self.family, parity.old_spelling(case["config"])) == read(self.family, case["config"])

    @pytest.mark.full
    def test_every_field_matters(self, made, tmp_path):
        case, _, model = made(next(iter(self.cases)))
        inputs = parity.inputs_of(case)
        before = _logits(model, case["tokens"], None, *inputs)
        for field, value in self.matters.items():
            other = maxlib.from_pretrained(parity.directory(tmp_path / field, changed(case, field, value)))
            assert np.abs(_logits(other, case["tokens"], None, *inputs) - before).max() > 1e-3 * before.std(), field

    def test_values_that_cannot_be_are_refused(self):
        """What another value of any other field does, `test_config_fields` tells."""
        case = parity.golden(self.family)[next(iter(self.cases))]
        for field, value in self.refused.items():
            with pytest.raises(ValueError, match=field.rpartition(".")[2]):
                read(self.family, changed(case, field, value)["config"])

    @pytest.mark.full
    def test_what_a_config_leaves_out_is_as_in_transformers(self):
        transformers = pytest.importorskip("transformers")
        theirs = json.loads(getattr(transformers, self.config)(**self.stated).to_json_string(use_diff=False))
        fields = next(f for f in maxlib.weights.families() if f.name == self.family).fields
        names = {"model_type", "max_position_embeddings", "qk_rope_head_dim", *fields.required, *self.stated}
        short = {name: theirs[name] for name in names & theirs.keys()}
        assert fields.read(HFConfig(short)) == fields.read(HFConfig(theirs))

    # --- packing, caches, devices ---

    @pytest.mark.full
    def test_packed_equals_separate(self, name, exact):
        """Two documents, alone, beside each other with padding, and in one row."""
        case, _, model = exact(name)
        tokens, cut = case["tokens"], SEQ // 3
        long, short = tokens[0], tokens[1, :cut]
        want = np.concatenate([_logits(model, document[None])[0] for document in (long, short)])
        padded = np.where(np.arange(SEQ) < np.array([[SEQ], [cut]]), tokens, 0)
        got = _logits(model, padded, (np.arange(SEQ) < np.array([[SEQ], [cut]])).astype(np.int32))
        assert_close(np.concatenate([got[0], got[1, :cut]]), want, CLOSE)
        row = np.concatenate([long, short, np.zeros(3, np.int32)])[None]
        segments = np.repeat(np.array([1, 2, 0], np.int32), [SEQ, cut, 3])[None]
        assert_close(_logits(model, row, segments)[0, : SEQ + cut], want, CLOSE)

    @pytest.mark.full
    def test_prefill_and_decode_equal_the_full_pass(self, name, exact):
        """Rows of different lengths, in pieces as long as the window or longer, then one by one."""
        case, _, model = exact(name)
        tokens, want = case["tokens"], _logits(model, case["tokens"])
        cache = model.init_cache(2, SEQ, dtype=_dtype(model), rope_length=SEQ)  # as long as the full pass
        slots = {
            array.shape[-2 if _is_heads_first(node) else self.slot_axis]
            for node in jax.tree.leaves(cache.layers, is_leaf=_is_heads_first)
            for array in jax.tree.leaves(node)
        }
        assert slots == self.windows.get(name, {SEQ})
        done, got = np.zeros(2, int), np.zeros_like(want)
        for new in [(5, 4), (5, 0), (0, 5), *[(1, 1)] * (SEQ - 10), (0, 1)]:
            width = 1 if max(new) == 1 else 5
            at = np.minimum(done[:, None] + np.arange(width), SEQ - 1)
            valid = np.arange(width) < np.array(new)[:, None]
            logits, cache = _step(model, np.take_along_axis(tokens, at, 1), valid, cache)
            for row, n in enumerate(new):
                got[row, done[row] : done[row] + n] = np.asarray(logits)[row, :n]
            done += new
        assert list(done) == [SEQ, SEQ]
        assert_close(got, want, CLOSE)

    @pytest.mark.filterwarnings("ignore:nothing is split over")
    @pytest.mark.full
    def test_eight_devices_equal_one(self, exact):
        """Read onto data x fsdp x tensor by the rules; a vocabulary that does not divide stays whole."""
        case, directory, model = exact(next(iter(self.cases)))
        layout = sharding.Layout(sharding.make_mesh(data=2, fsdp=2, tensor=2), self.rules)
        spread, tokens = (
            maxlib.from_pretrained(directory, layout=layout, dtype=_dtype(model)),
            np.tile(case["tokens"], (4, 1)),
        )
        with sharding.use(layout):
            got = _logits(spread, tokens)
        assert_close(got, _logits(model, tokens), CLOSE)
