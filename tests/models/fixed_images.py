"""Tests that families with images of a fixed size share: a reference of transformers, decoding, devices, and errors."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import maxlib
from maxlib import nn, sharding
from tests.models import parity
from tests.models.conformance import assert_close

compiled = functools.partial(jax.jit, compiler_options=parity.QUICK)


def tokens_and_images(
    seq: int, image: int, per_image: int, places: list[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Three rows of ids, and an image of 12 x 12 pixels for each place, a row and the column of its first id."""
    tokens = np.random.RandomState(1).randint(0, image, (3, seq)).astype(np.int32)
    for row, start in places:
        tokens[row, start : start + per_image] = image
    images = np.random.RandomState(2).standard_normal((len(places), 3, 12, 12)).astype(np.float32)
    return tokens, images


def reference(model: Any, run: Any, tokens: np.ndarray, images: np.ndarray, directory: Path):
    """The directory of a transformers model, its logits, and the gradients of its loss under the names of files."""
    import torch

    model.set_attn_implementation("eager")
    values = parity.tensors({name: list(p.shape) for name, p in model.named_parameters()})
    for name, p in model.named_parameters():
        p.data.copy_(torch.from_numpy(values[name]))
    model.save_pretrained(directory / "weights")
    logits = run(model, tokens, images)
    labels = torch.from_numpy(tokens)[:, 1:].flatten().long()
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels).backward()
    for p in model.parameters():
        p.data.copy_(p.grad)
    model.save_pretrained(directory / "gradients")
    return directory / "weights", logits.detach().numpy(), load_file(directory / "gradients" / "model.safetensors")


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


def check_decoding(model: Any, tokens: np.ndarray, images: np.ndarray, lengths: list[int]) -> Any:
    """Prompts of three lengths, in which all images are, then token by token; returns the empty cache."""
    want, empty = np.asarray(logits_of(model, tokens, images)), model.init_cache(3, tokens.shape[1], dtype=jnp.float32)
    prompt, ends = max(lengths), np.array(lengths)
    valid = np.arange(prompt) < ends[:, None]
    logits, cache = step(model, np.where(valid, tokens[:, :prompt], 0), valid, images, empty)
    for row, n in enumerate(lengths):
        assert_close(logits[row, :n], want[row, :n])
    for i in range(tokens.shape[1] - prompt):
        logits, cache = step(model, tokens[np.arange(3), ends + i][:, None], np.ones((3, 1), bool), None, cache)
        assert_close(logits[:, 0], want[np.arange(3), ends + i])
    return empty


def check_eight_devices(directory: Path, model: Any, tokens: np.ndarray, images: np.ndarray) -> None:
    layout = sharding.Layout(sharding.make_mesh(data=2, fsdp=2, tensor=2), sharding.FSDP_TP)
    spread = maxlib.from_pretrained(directory, layout=layout)
    with sharding.use(layout):
        got = jax.device_get(logits_of(spread, *(np.concatenate([x] * 4) for x in (tokens, images))))
    assert_close(got, np.tile(logits_of(model, tokens, images), (4, 1, 1)))


def check_wrong_images(model: Any, tokens: np.ndarray, images: np.ndarray) -> None:
    """Of four images of four vectors each."""
    tokens, images = jnp.asarray(tokens), jnp.asarray(images)
    with pytest.raises(ValueError, match="have 16 image placeholders, but the given images make 12 vectors"):
        model(tokens, images=images[:3])
    with pytest.raises(ValueError, match="have 16 image placeholders, but the given images make 0 vectors"):
        model(tokens)
    with pytest.raises(ValueError, match=r"images must have the shape \(number, 3, 12, 12\), got \(4, 3, 12, 9\)"):
        logits_of(model, tokens, images[..., :9])
