"""Checkpoints of adapters: only trained parameters are saved, and a changed base model is refused."""

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import adapters, checkpoint, nn, quantization, training
from tests.adapters.test_adapters import LORA, jit, mlps, tuned
from tests.training.tiny import Bigram, Loader, loss, share_steps


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    share_steps(monkeypatch)


OPTIMIZER = optax.sgd(0.1, momentum=0.9)  # compiles in half of AdamW's time


@functools.cache
def build():
    return tuned(jit(lambda base: quantization.for_inference(base, "int8"))(mlps(64)))


def trainer(model, directory: Path, base: str | None = "a/base"):
    return training.Trainer(
        model,
        optimizer=OPTIMIZER,
        loader=Loader(),
        loss=loss,
        filter=adapters.trainable,
        checkpointer=checkpoint.Checkpointer(directory, every=2, base=base),
    )


def test_a_run_saves_what_is_trained_and_resumes_bit_for_bit(tmp_path):
    uninterrupted = trainer(build(), tmp_path / "uninterrupted")
    uninterrupted.fit(4)
    first = trainer(build(), tmp_path / "run")
    first.fit(2)
    held = [*first.state.trainable.values(), *jax.tree.leaves(first.state.opt_state)]
    size = lambda item: sum(p.stat().st_size for p in (tmp_path / "run" / "2" / item).rglob("*") if p.is_file())
    trained = sum(a.nbytes for a in held)
    # What describes the arrays is of one size, here as large as they are.
    assert size("params") + size("opt") <= 1.2 * trained + 20_000
    assert size("rest") < 1000 < trained
    second = trainer(build(), tmp_path / "run")
    second.fit(4)
    for name, value in uninterrupted.state.trainable.items():
        np.testing.assert_array_equal(value, second.state.trainable[name])
    before = nn.partition(build(), adapters.trainable)[0]
    assert not any(np.array_equal(v, before[n]) for n, v in second.state.trainable.items())


def test_another_base_is_refused(tmp_path):
    trainer(build(), tmp_path).fit(2)
    other = jax.tree.map(lambda x: x, build())
    other.embed, other.head = other.head, other.embed
    with pytest.raises(ValueError, match=r"trained on the base in a/base \(checksum .*differ"):
        trainer(other, tmp_path).restore()
    with pytest.raises(ValueError, match="rest") as error:
        trainer(build(), tmp_path, base=None).restore()
    assert "pass the same base" in error.value.__notes__[0]


def test_the_compiled_step_has_gradients_of_factors_only():
    model = jax.eval_shape(lambda: adapters.add(Bigram(64, rngs=nnx.Rngs(0)), LORA, rngs=nnx.Rngs(1)))
    size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    factors = size(nn.partition(model, adapters.trainable)[0])
    weights, sizes = size(model) - factors, {}
    batch = {name: jnp.zeros((2, 8), jnp.int32) for name in ("tokens", "targets")}
    for name, filter in (("factors", adapters.trainable), ("all", nn.tree.is_trainable)):
        state = jax.eval_shape(lambda model, filter=filter: training.make_state(model, OPTIMIZER, filter=filter), model)
        step = jax.jit(training.make_train_step(loss, OPTIMIZER), donate_argnums=0)
        compiled = step.lower(state, batch).compile()
        sizes[name] = compiled.memory_analysis().temp_size_in_bytes, compiled.cost_analysis()["flops"]
    assert sizes["all"][0] - sizes["factors"][0] > 0.5 * weights
    assert sizes["factors"][1] < 0.9 * sizes["all"][1]
