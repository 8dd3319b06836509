"""Runs resumed in another pipeline or without one: checkpoints do not depend on pipelines."""

import functools
import math
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import checkpoint, nn, sharding, training
from maxlib.models import whisper
from maxlib.training import _trainer as trainer_module
from maxlib.training._pipelined_gradient import pipelined_gradient
from tests.nn.tiny import filled
from tests.training import tiny

FSDP = {"mesh": {"fsdp": 8}, "rules": sharding.FSDP}
EVEN_1F1B = {"mesh": {"stage": 2, "fsdp": 4}, "rules": sharding.FSDP | sharding.Pipeline("stage", 2, schedule="1f1b")}
EVEN = {"mesh": {"stage": 2, "fsdp": 4}, "rules": sharding.FSDP | sharding.Pipeline("stage", 2)}
AROUND = {
    "mesh": {"stage": 4, "data": 2},
    "rules": sharding.DP | sharding.Pipeline("stage", 4, repeats=2, schedule="1f1b"),
}
ONE = {"mesh": {"data": 1}, "rules": sharding.DP}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(trainer_module, "jit_step", tiny.jit_step)


def run(directory, mesh, rules, layers, **options: Any):
    """A trainer that goes on where the last one of this directory stopped."""
    devices = jax.devices()[: math.prod(mesh.values())]
    make = lambda: tiny.llama(num_layers=layers)
    layout = sharding.Layout(sharding.make_mesh(**mesh, devices=devices), rules)
    options = {"layout": layout, "dtype": jnp.float32, "loader": tiny.Loader()} | options
    checkpointer = checkpoint.Checkpointer(directory, groupings=nn.tree.groupings(jax.eval_shape(make)))
    optimizer = tiny.optimizer(jax.eval_shape(make))
    ours = training.Trainer(make, optimizer=optimizer, checkpointer=checkpointer, **options)
    ours.restore()
    return ours


def numbers(trainer):
    return jax.device_get(jax.tree.leaves((trainer.state.trainable, trainer.state.opt_state)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after", "layers"),
    [(AROUND, FSDP, 7), (FSDP, AROUND, 7), (EVEN, ONE, 4), (ONE, EVEN_1F1B, 4), (EVEN, AROUND, 8)],
)
def test_a_run_goes_on_in_another_layout(tmp_path, before, after, layers):
    """The state is that of the checkpoint, number by number, and the next losses are those of the first layout."""
    first = run(tmp_path / "before", **before, layers=layers)
    first.fit(2)
    saved = numbers(first)
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    want = [float(first.fit(step)["loss"]) for step in (3, 4)]
    second = run(tmp_path / "after", **after, layers=layers)
    assert second.step == 2
    for a, b in zip(numbers(second), saved, strict=True):
        np.testing.assert_array_equal(a, b)
    assert [float(second.fit(step)["loss"]) for step in (3, 4)] == pytest.approx(want, rel=1e-5)


def test_an_encoder_that_would_get_no_gradient_is_refused():
    """1F1B sends gradients back through x alone; a frozen encoder needs none."""
    sizes = {"vocab": 16, "num_layers": 2, "num_encoder_layers": 1, "dim": 8, "mlp_dim": 8, "encoder_mlp_dim": 8}
    cfg = whisper.Config(**sizes, num_heads=2, num_encoder_heads=2, num_positions=8, num_vectors=4, num_bands=3)
    model = filled(lambda: whisper.Whisper(cfg, rngs=nnx.Rngs(0)))
    tokens = jnp.ones((2, 4), jnp.int32)
    audio = nn.audio.Clips(jnp.ones((2, 8, 3)), jnp.full(2, 8, jnp.int32))
    batch = {"tokens": tokens, "targets": tokens, "audio": audio}
    gradient = functools.partial(pipelined_gradient, training.NextToken())
    with pytest.raises(ValueError, match=r"tower\..* is learned through what layers read beside x"):
        jax.eval_shape(gradient, *nn.partition(model), batch, jax.random.key(0))
    learns = lambda path, variable: nn.tree.is_trainable(path, variable) and not path.startswith("tower.")
    frozen = nn.partition(model, learns)
    with pytest.raises(ValueError, match="there is no pipeline"):
        jax.eval_shape(gradient, *frozen, batch, jax.random.key(0))
