"""Tests that families with images of a fixed size share: a reference of transformers, decoding, devices, and errors."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import maxlib
from maxlib import nn, sharding
from maxlib.weights import family_of, read_model
from tests.models import parity
from tests.models.conformance import assert_close

compiled = functools.partial(jax.jit, compiler_options=parity.QUICK)


@compiled
def logits_of(model, tokens, images, segment_ids=None):
    return model.logits(model(tokens, images=images, segment_ids=segment_ids, dtype=jnp.float32).hidden)


@compiled
def step(model, tokens, valid, images, cache):
    out = model(tokens, valid=valid, images=images, cache=cache, dtype=jnp.float32)
    return model.logits(out.hidden), out.cache


@compiled
def gradients_of(params, rest, tokens, images):
    def loss(params):
        model = nn.combine(params, rest)
        logits = model.logits(model(tokens, images=images, dtype=jnp.float32).hidden)[:, :-1]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).mean()

    return jax.grad(loss)(params)


class FixedImages:
    """Three rows of ids, and an image of 12 x 12 pixels for each place, a row and the column of its first id.

    transformers computes the reference, so that subclasses are marked `full`.
    """

    theirs_class: ClassVar[str]
    seq: ClassVar[int]
    image: ClassVar[int] = 60
    per_image: ClassVar[int] = 4
    places: ClassVar[list[tuple[int, int]]]
    lengths: ClassVar[list[int]]  # of prompts, in which all images are
    slots: ClassVar[set[int]] = set()  # of the caches, if they differ

    @classmethod
    def config(cls) -> Any:
        """transformers' config."""
        raise NotImplementedError

    @staticmethod
    def run(model: Any, tokens: np.ndarray, images: np.ndarray) -> Any:
        """transformers' logits."""
        raise NotImplementedError

    @staticmethod
    def released(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Under the names of released files."""
        return tensors

    @pytest.fixture(scope="class")
    @classmethod
    def inputs(cls) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.random.RandomState(1).randint(0, cls.image, (3, cls.seq)).astype(np.int32)
        for row, start in cls.places:
            tokens[row, start : start + cls.per_image] = cls.image
        return tokens, np.random.RandomState(2).standard_normal((len(cls.places), 3, 12, 12)).astype(np.float32)

    @pytest.fixture(scope="class")
    @classmethod
    def theirs(cls, inputs, tmp_path_factory) -> tuple[Path, np.ndarray, dict[str, np.ndarray]]:
        """The directory of a transformers model, its logits, and the gradients of its loss under the names of files."""
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
        model, directory = getattr(transformers, cls.theirs_class)(cls.config()).eval(), tmp_path_factory.mktemp("hf")
        model.set_attn_implementation("eager")
        values = parity.tensors({name: list(p.shape) for name, p in model.named_parameters()})
        for name, p in model.named_parameters():
            p.data.copy_(torch.from_numpy(values[name]))
        model.save_pretrained(directory / "weights")
        logits = cls.run(model, *inputs)
        labels = torch.from_numpy(inputs[0])[:, 1:].flatten().long()
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels).backward()
        for p in model.parameters():
            p.data.copy_(p.grad)
        model.save_pretrained(directory / "gradients")
        gradients = load_file(directory / "gradients" / "model.safetensors")
        return directory / "weights", logits.detach().numpy(), gradients

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, theirs) -> Any:
        return maxlib.from_pretrained(theirs[0])

    def altered(self, theirs, tmp_path: Path, **vision: Any) -> Any:
        """The model of the same weights under another config; what is no field of the tower is one of the whole."""
        data = json.loads((theirs[0] / "config.json").read_text())
        for field, value in vision.items():
            (data["vision_config"] if field in data["vision_config"] else data)[field] = value
        (tmp_path / "config.json").write_text(json.dumps(data))
        (tmp_path / "model.safetensors").write_bytes((theirs[0] / "model.safetensors").read_bytes())
        return maxlib.from_pretrained(tmp_path)

    def test_logits_are_those_of_transformers(self, theirs, model, inputs):
        assert_close(logits_of(model, *inputs), theirs[1], 1e-4)

    def test_gradients_are_those_of_transformers(self, theirs, model, inputs, tmp_path):
        params, rest = nn.partition(model)
        maxlib.save_pretrained(nn.combine(gradients_of(params, rest, *inputs), rest), tmp_path / "gradients")
        got, want = load_file(tmp_path / "gradients" / "model.safetensors"), self.released(theirs[2])
        assert got.keys() == want.keys()
        for name, value in want.items():
            # The softmax does not see what all keys share: the bias of a tower's keys has no gradient but rounding.
            scale = 1.0 if "vision_tower" in name and "k_proj.bias" in name else np.linalg.norm(value)
            assert np.linalg.norm(got[name] - value) < 1e-4 * scale, name

    def test_export_is_what_was_read_and_transformers_opens_it(self, theirs, model, inputs, tmp_path):
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
        maxlib.save_pretrained(model, tmp_path / "export")
        want = self.released(load_file(theirs[0] / "model.safetensors"))
        got = load_file(tmp_path / "export/model.safetensors")
        assert got.keys() == want.keys()
        assert all(got[name].tobytes() == value.tobytes() for name, value in want.items())
        assert read_model(tmp_path / "export")[1] == model.cfg
        again, info = getattr(transformers, self.theirs_class).from_pretrained(
            tmp_path / "export", attn_implementation="eager", output_loading_info=True
        )
        assert not any(info.values()), info
        with torch.no_grad():
            assert_close(self.run(again, *inputs).numpy(), theirs[1], 1e-6)

    def test_prefill_and_decode_equal_the_full_pass(self, model, inputs):
        """Prompts of three lengths, then token by token."""
        (tokens, images), prompt, ends = inputs, max(self.lengths), np.array(self.lengths)
        want, cache = np.asarray(logits_of(model, tokens, images)), model.init_cache(3, self.seq, dtype=jnp.float32)
        assert not self.slots or {a.shape[-3] for a in jax.tree.leaves(cache.layers)} == self.slots
        valid = np.arange(prompt) < ends[:, None]
        logits, cache = step(model, np.where(valid, tokens[:, :prompt], 0), valid, images, cache)
        for row, n in enumerate(self.lengths):
            assert_close(logits[row, :n], want[row, :n])
        for i in range(self.seq - prompt):
            logits, cache = step(model, tokens[np.arange(3), ends + i][:, None], np.ones((3, 1), bool), None, cache)
            assert_close(logits[:, 0], want[np.arange(3), ends + i])

    def test_eight_devices_equal_one(self, theirs, model, inputs):
        layout = sharding.Layout(sharding.make_mesh(data=2, fsdp=2, tensor=2), sharding.FSDP_TP)
        spread = maxlib.from_pretrained(theirs[0], layout=layout)
        with sharding.use(layout):
            got = jax.device_get(logits_of(spread, *(np.concatenate([x] * 4) for x in inputs)))
        assert_close(got, np.tile(logits_of(model, *inputs), (4, 1, 1)))

    def test_wrong_images_are_refused(self, model, inputs):
        """Of four images of four vectors each."""
        tokens, images = map(jnp.asarray, inputs)
        with pytest.raises(ValueError, match="have 16 image placeholders, but the given images make 12 vectors"):
            model(tokens, images=images[:3])
        with pytest.raises(ValueError, match="have 16 image placeholders, but the given images make 0 vectors"):
            model(tokens)
        with pytest.raises(ValueError, match=r"images must have the shape \(number, 3, 12, 12\), got \(4, 3, 12, 9\)"):
            logits_of(model, tokens, images[..., :9])

    def test_the_text_of_a_model_that_sees_can_be_read_alone(self, theirs, model, inputs):
        text = maxlib.from_pretrained(theirs[0], vision=None)
        alone = dataclasses.replace(model.cfg, vision=None)
        shapes = jax.eval_shape(lambda: family_of(model).model(alone, rngs=nnx.Rngs(0)))
        assert jax.tree.structure(text) == jax.tree.structure(shapes)
        tokens = inputs[0] % self.image
        assert_close(logits_of(text, tokens, None), logits_of(model, tokens, None), 1e-6)
        with pytest.raises(ValueError, match="reads text only"):
            text(jnp.asarray(tokens), images=jnp.asarray(inputs[1]))
